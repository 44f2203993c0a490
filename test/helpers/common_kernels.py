# SPDX-License-Identifier: Apache-2.0
"""Small kernels that exercise the common package: each shows one family of primitives.

``python -m helpers.common_kernels FOLDER`` (from ``test/``) builds all that the tests execute into a cache folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from sgl_amd_mono.common.build import Abi, BuildKey
from sgl_amd_mono.common.sync import FAULT_BLOCK_BYTES, HOT_LINE_BYTES, PAIR_BYTES

SYNC_ABI: Abi = (
    ("scratch", "ptr"), ("peers", "ptr"), ("epoch", "ptr"), ("deadline_ticks", "i64"), ("rank", "i32"),
    ("layer_slot", "i32"), ("mode", "i32"), ("last", "i32"),
)
DEAD_BYTES = 16


@dataclass(frozen=True)
class RingKey(BuildKey):
    """A running sum handed from workgroup to workgroup, and from the last of a rank to the first of the next.

    ``out[b, t]`` = sum of ``src`` up to (rank, b); ``state[b, t]`` gets the same, right after a look at the error word.
    """

    blocks: int = 8
    ranks: int = 1
    stop: bool = False
    wrong_tag: bool = False  # negative control: pairs of the ring carry the next launch's tag
    model: ClassVar[str] = "test"
    launch: ClassVar[str] = "ring"
    abi: ClassVar[Abi] = (("src", "ptr"), ("out", "ptr"), ("state", "ptr"), *SYNC_ABI)
    region_names: ClassVar[tuple[str, ...]] = ("ring", "token", "marks")
    readonly: ClassVar[frozenset[str]] = frozenset({"src"})
    block: ClassVar[int] = 512

    @property
    def grid(self) -> int:
        return self.blocks

    @property
    def scratch_bytes(self) -> int:
        return 2 * self.blocks * HOT_LINE_BYTES

    def scratch_regions(self) -> dict[str, tuple[int, int]]:
        half = self.blocks * HOT_LINE_BYTES
        return {"ring": (0, half), "marks": (half, half)}

    def peer_regions(self) -> dict[str, tuple[int, int]]:
        return {"fault": (0, FAULT_BLOCK_BYTES), "token": (FAULT_BLOCK_BYTES, PAIR_BYTES)}

    @property
    def peer_bytes(self) -> int:
        return FAULT_BLOCK_BYTES + HOT_LINE_BYTES

    def body(self) -> Callable[..., None]:
        from sgl_amd_mono.common import device as d
        from sgl_amd_mono.common.sync import Region, Sync

        def kernel(src: Any, out: Any, state: Any, scratch: Any, peers: Any, epoch: Any, deadline_ticks: Any,
                   rank: Any, layer_slot: Any, mode: Any, last: Any) -> None:
            lds = d.Lds(DEAD_BYTES + 16)
            dead, shared = lds.take(DEAD_BYTES), lds.take(16)
            s = Sync(epoch=epoch, slot=layer_slot, peers=peers, rank=rank, ranks=self.ranks,
                     deadline_ticks=deadline_ticks, mode=mode, dead=dead, stop=self.stop)
            tid, block = d.thread_id(), d.block_id()
            ring = Region(0, scratch, stride=HOT_LINE_BYTES)
            marks = Region(2, scratch + d.I64(self.blocks * HOT_LINE_BYTES), stride=HOT_LINE_BYTES)
            token = Region(1, s.own_base + d.I64(FAULT_BLOCK_BYTES), system=True)
            own = d.load(src, block * 4, d.F32)
            s.leave_if_failed()

            def before() -> list[Any]:
                first = d.compare("eq", block, d.I32(0))
                return d.if_else(
                    first,
                    lambda: d.if_else(d.compare("eq", rank, d.I32(0)), lambda: [d.F32(0.0)],
                                      lambda: s.poll([(token, 0)], [d.F32]), [d.F32]),
                    lambda: s.poll([(ring, block - 1)], [d.F32]), [d.F32],
                )

            with d.if_(d.compare("eq", tid, d.I32(0))):
                total = before()[0] + own
                right = s.tag
                s.tag = right + 1 if self.wrong_tag else right
                s.put(ring, block, total)
                s.tag = right
                with d.if_(d.compare("eq", block, d.I32(self.blocks - 1))):
                    for other in range(1, self.ranks):
                        with d.if_(d.compare("eq", rank, d.I32(other - 1))):
                            s.put(token, 0, total, base=s.peer_base[other] + d.I64(FAULT_BLOCK_BYTES))
                shared.store(total, 0)
            s.barrier()
            total = shared.load(0, d.F32)
            place = (block * self.block + tid) * 4
            d.store(total, out, place)
            s.check_error()
            d.store(total, state, place)
            s.step_end(last, marks, self.blocks)

        return kernel


@dataclass(frozen=True)
class BulkKey(BuildKey):
    """Each workgroup publishes a row of 16 bytes a thread behind one flag and copies its neighbour's row to ``out``.

    It has read the neighbour's row before, as it stood: a cache that keeps that line shows a load without scope.
    """

    blocks: int = 8
    model: ClassVar[str] = "test"
    launch: ClassVar[str] = "bulk"
    abi: ClassVar[Abi] = (("src", "ptr"), ("out", "ptr"), *SYNC_ABI)
    region_names: ClassVar[tuple[str, ...]] = ("flags", "rows")
    readonly: ClassVar[frozenset[str]] = frozenset({"src"})
    block: ClassVar[int] = 512
    row_bytes: ClassVar[int] = 512 * 16

    @property
    def grid(self) -> int:
        return self.blocks

    @property
    def flag_bytes(self) -> int:
        return self.blocks * HOT_LINE_BYTES

    @property
    def scratch_bytes(self) -> int:
        return self.flag_bytes + self.blocks * self.row_bytes

    def scratch_regions(self) -> dict[str, tuple[int, int]]:
        return {"flags": (0, self.flag_bytes), "rows": (self.flag_bytes, self.blocks * self.row_bytes)}

    def body(self) -> Callable[..., None]:
        from sgl_amd_mono.common import device as d
        from sgl_amd_mono.common.sync import Region, Sync

        def kernel(src: Any, out: Any, scratch: Any, peers: Any, epoch: Any, deadline_ticks: Any, rank: Any,
                   layer_slot: Any, mode: Any, last: Any) -> None:
            lds = d.Lds(DEAD_BYTES)
            s = Sync(epoch=epoch, slot=layer_slot, peers=peers, rank=rank, ranks=1, deadline_ticks=deadline_ticks,
                     mode=mode, dead=lds.take(DEAD_BYTES), stop=False)
            tid, block = d.thread_id(), d.block_id()
            flags = Region(0, scratch, stride=HOT_LINE_BYTES)
            rows = d.Buffer(scratch + d.I64(self.flag_bytes), self.blocks * self.row_bytes)
            piece = d.load(src, block * self.row_bytes + tid * 16, d.vec(d.I32, 4))
            neighbour = d.select(d.compare("eq", block, d.I32(self.blocks - 1)), d.I32(0), block + 1)
            place = neighbour * self.row_bytes + tid * 16
            before = rows.load(place, d.vec(d.I32, 4), d.AGENT)
            d.fly.inline_asm("", "v", None, [before])  # a use, so that the load stays
            s.leave_if_failed()
            rows.store(piece, block * self.row_bytes + tid * 16, d.AGENT)
            s.publish(flags, block)
            with d.if_(d.compare("eq", d.wave_id(), d.I32(0))):
                s.poll([(flags, neighbour)])
            s.barrier()
            got = rows.load(place, d.vec(d.I32, 4), d.AGENT)
            d.store(got, out, block * self.row_bytes + tid * 16)

        return kernel


@dataclass(frozen=True)
class GemvKey(BuildKey):
    """16 weight rows a workgroup times ``rows`` activation rows: in bf16, and in MXFP4 with activations quantised."""

    k: int = 1024
    rows: int = 2
    blocks: int = 2
    model: ClassVar[str] = "test"
    launch: ClassVar[str] = "gemv"
    abi: ClassVar[Abi] = (
        ("x", "ptr"), ("w", "ptr"), ("w_packed", "ptr"), ("w_scale", "ptr"), ("out", "ptr"), ("out_mx", "ptr"),
        ("words", "ptr"), ("codes", "ptr"),
    )
    readonly: ClassVar[frozenset[str]] = frozenset({"x", "w", "w_packed", "w_scale"})
    block: ClassVar[int] = 512

    @property
    def grid(self) -> int:
        return self.blocks

    def body(self) -> Callable[..., None]:
        from sgl_amd_mono.common import device as d
        from sgl_amd_mono.common import gemv as g

        def kernel(x: Any, w: Any, w_packed: Any, w_scale: Any, out: Any, out_mx: Any, words: Any, codes: Any) -> None:
            k, rows = self.k, self.rows
            sizes = [g.partial_bytes(rows), g.Bf16Rows.nbytes(rows, k), g.Mxfp4Rows.nbytes(rows, k)]
            lds = d.Lds(sum(-(-n // 16) * 16 for n in sizes))
            partials = lds.take(sizes[0])
            plain = g.Bf16Rows(lds.take(sizes[1]), rows, k)
            quantised = g.Mxfp4Rows(lds.take(sizes[2]), rows, k)
            wave, block, tid = d.wave_id(), d.block_id(), d.thread_id()
            task, mx = g.Bf16Task(k), g.Mxfp4Task(k)
            pairs = mx.steps // 2
            waves = next(n for n in (8, 4, 2, 1) if pairs % n == 0)
            steps = mx.steps // waves
            first = (wave & (waves - 1)) * steps
            registers = task.issue(w, block * g.TASK_ROWS, wave)
            tile = mx.issue(w_packed, w_scale, block, first, steps)
            plain.fill(x, self.block)
            d.barrier()
            quantised.quantize(plain, self.block)

            def put_sum(target: Any, slots: Any) -> None:
                with d.if_(d.compare("ult", tid, d.I32(g.TASK_ROWS * rows))):
                    weight_row, row = tid & (g.TASK_ROWS - 1), tid >> 4
                    value = g.sum_partials(partials, rows, weight_row, row, slots)
                    place = row * (self.blocks * g.TASK_ROWS) + block * g.TASK_ROWS + weight_row
                    d.store(value, target, place * 4)

            g.store_partials(task.consume(registers, plain, wave), partials, rows, wave)
            d.barrier()
            put_sum(out, range(8))
            d.barrier()
            g.store_partials(mx.consume(tile, quantised, first), partials, rows, wave)
            d.barrier()
            put_sum(out_mx, range(waves))
            # The quantised rows as they stand in LDS, by workgroup 0.
            with d.if_(d.compare("eq", block, d.I32(0))):
                blocks = k // d.MX_BLOCK
                for first_unit in range(0, rows * blocks, self.block):
                    unit = tid + first_unit
                    with d.if_(d.compare("ult", unit, d.I32(rows * blocks))):
                        row, piece = d.unsigned_divide(unit, blocks)
                        value = quantised.words.load(row * quantised.word_stride + piece * 16, d.vec(d.I32, 4))
                        d.store(value, words, unit * 16)
                        place = row * quantised.code_stride + (piece & 3) * quantised.codes_per_group + (piece >> 2)
                        d.store(quantised.codes.load(place, d.I8), codes, unit)

        return kernel


def _bits(d: Any, value: Any) -> Any:
    """A 32-bit result as stored by ``OpsKey``."""
    return d.bitcast(value, d.I32)


def operations() -> dict[str, Callable[[Any, Any, Any, Any], Any]]:
    """name -> function(d, a, b, tid) of two f32 a thread, giving 32 bits a thread."""
    table: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
        f"sum{n}": lambda d, a, b, t, n=n: d.wave_sum(a, n) for n in (2, 4, 8, 16, 32, 64)
    }
    table.update({f"max{n}": lambda d, a, b, t, n=n: d.wave_max(a, n) for n in (16, 64)})
    table.update({f"xor{n}": lambda d, a, b, t, n=n: d.wave_xor(a, n) for n in (1, 2, 4, 8, 16, 32)})
    table.update({
        "low_half": lambda d, a, b, t: d.wave_halves(a)[0],
        "high_half": lambda d, a, b, t: d.wave_halves(a)[1],
        "even_row": lambda d, a, b, t: d.row_pairs(a)[0],
        "odd_row": lambda d, a, b, t: d.row_pairs(a)[1],
        "pack": lambda d, a, b, t: d.pack_bf16(a, b),
        "bf16_bits": lambda d, a, b, t: d.zext(d.bf16_bits(a), d.I32),
        "bf16_round": lambda d, a, b, t: d.bf16_round(a),
        "unpack": lambda d, a, b, t: d.f32_from_bf16_pair(d.bitcast(a, d.I32))[1]
        + d.f32_from_bf16_pair(d.bitcast(b, d.I32))[0],
        "code": lambda d, a, b, t: d.mxfp4_code(d.intrinsic("llvm.fabs.f32", d.F32, [a])),
        "fma": lambda d, a, b, t: d.fma(a, b, a),
        "maximum": lambda d, a, b, t: d.maximum(a, b),
        "exp": lambda d, a, b, t: d.exp(a),
        "sigmoid": lambda d, a, b, t: d.sigmoid(a),
        "silu": lambda d, a, b, t: d.silu(a),
        "softplus": lambda d, a, b, t: d.softplus(a),
        "rsq": lambda d, a, b, t: d.rsq(d.intrinsic("llvm.fabs.f32", d.F32, [a])),
        "wave": lambda d, a, b, t: d.wave_id(),
        "lane": lambda d, a, b, t: d.lane_id(),
        "read_lane": lambda d, a, b, t: d.read_lane(d.bitcast(a, d.I32), 5),
        "ballot": lambda d, a, b, t: d.trunc(d.ballot(a < b), d.I32),
        "all": lambda d, a, b, t: d.select(d.all_lanes(d.compare("ult", t, d.I32(64))), d.I32(1), d.I32(0)),
        "divide": lambda d, a, b, t: d.unsigned_divide(t * 977, 192)[0],
        "remainder": lambda d, a, b, t: d.unsigned_divide(t * 977, 192)[1],
        "loop": lambda d, a, b, t: d.for_range(0, t & 7, 1, [t], lambda i, v: [v * 3 + i])[0],
        "branch": lambda d, a, b, t: d.if_else(a < b, lambda: [a - b], lambda: [b * b], [d.F32])[0],
    })
    return table


@dataclass(frozen=True)
class OpsKey(BuildKey):
    """Every operation of ``operations()`` on two f32 a thread; result i at ``out[i, thread]``."""

    model: ClassVar[str] = "test"
    launch: ClassVar[str] = "ops"
    abi: ClassVar[Abi] = (("a", "ptr"), ("b", "ptr"), ("out", "ptr"))
    readonly: ClassVar[frozenset[str]] = frozenset({"a", "b"})
    grid: ClassVar[int] = 1
    block: ClassVar[int] = 512

    def body(self) -> Callable[..., None]:
        from sgl_amd_mono.common import device as d

        def kernel(a: Any, b: Any, out: Any) -> None:
            tid = d.thread_id()
            left, right = d.load(a, tid * 4, d.F32), d.load(b, tid * 4, d.F32)
            for number, operation in enumerate(operations().values()):
                d.store(_bits(d, operation(d, left, right, tid)), out, tid * 4, constant=number * self.block * 4)

        return kernel


@dataclass(frozen=True)
class AccessKey(BuildKey):
    """Copies one 2 KiB slice of ``src`` to ``out`` by each width and cache policy (see ``forms``)."""

    model: ClassVar[str] = "test"
    launch: ClassVar[str] = "access"
    abi: ClassVar[Abi] = (("src", "ptr"), ("out", "ptr"))
    readonly: ClassVar[frozenset[str]] = frozenset({"src"})
    grid: ClassVar[int] = 1
    block: ClassVar[int] = 512
    slice_bytes: ClassVar[int] = 2048

    @staticmethod
    def forms() -> list[tuple[str, int, str]]:
        """(path, bytes, policy) of each slice."""
        plain = [("global", n, p) for n in (1, 2, 4, 8, 16) for p in ("PLAIN", "NT")]
        scoped = [("global", n, p) for n in (2, 4, 8) for p in ("AGENT", "SYSTEM")]
        buffers = [("buffer", n, p) for n in (1, 2, 4, 8, 16) for p in ("PLAIN", "NT", "AGENT", "SYSTEM")]
        return plain + scoped + buffers + [("lds", n, "PLAIN") for n in (1, 2, 4, 8, 16)]

    def body(self) -> Callable[..., None]:
        from sgl_amd_mono.common import device as d

        kinds = {1: d.I8, 2: d.I16, 4: d.F32, 8: d.vec(d.I32, 2), 16: d.vec(d.I32, 4)}

        def kernel(src: Any, out: Any) -> None:
            tid = d.thread_id()
            lds = d.Lds(self.slice_bytes)
            region = lds.take(self.slice_bytes)
            for number, (path, size, policy) in enumerate(self.forms()):
                kind, cache = kinds[size], d.Cache[policy]
                source, target = (base + d.I64(number * self.slice_bytes) for base in (src, out))
                threads = self.slice_bytes // size
                for first in range(0, threads, self.block):
                    unit = tid + first
                    with d.if_(d.compare("ult", unit, d.I32(threads))):
                        place = unit * size
                        if path == "global":
                            d.store(d.load(source, place, kind, cache), target, place, cache)
                        elif path == "buffer":
                            d.Buffer(target, self.slice_bytes).store(
                                d.Buffer(source, self.slice_bytes).load(place, kind, cache), place, cache)
                        else:
                            region.store(d.load(source, place, kind), place)
                if path == "lds":
                    d.barrier()
                    for first in range(0, threads, self.block):
                        unit = tid + first
                        with d.if_(d.compare("ult", unit, d.I32(threads))):
                            d.store(region.load(unit * size, kind), target, unit * size)
                    d.barrier()

        return kernel


@dataclass(frozen=True)
class GreedyKey(BuildKey):
    """Holds ``vectors`` x 4 registers across a barrier: past 256 registers the compiler must spill."""

    vectors: int = 8
    lds_bytes: int = 0
    model: ClassVar[str] = "test"
    launch: ClassVar[str] = "greedy"
    abi: ClassVar[Abi] = (("x", "ptr"), ("out", "ptr"))
    grid: ClassVar[int] = 1
    block: ClassVar[int] = 512

    def body(self) -> Callable[..., None]:
        from sgl_amd_mono.common import device as d

        def kernel(x: Any, out: Any) -> None:
            tid = d.thread_id()
            held = [d.load(x, tid * 16, d.vec(d.I32, 4), constant=8192 * i) for i in range(self.vectors)]
            if self.lds_bytes:
                region = d.Lds(self.lds_bytes).take(self.lds_bytes)
                region.store(tid, tid * 4)
                d.barrier()
                tid = region.load((511 - tid) * 4, d.I32)
            d.compiler_fence()
            d.barrier()
            for i, value in enumerate(reversed(held)):
                d.store(value, out, tid * 16, constant=8192 * i)

        return kernel


def simulated_keys() -> list[BuildKey]:
    """Every kernel that a test executes on the simulator."""
    rings = [RingKey(), RingKey(ranks=2), RingKey(ranks=2, stop=True), RingKey(blocks=2, wrong_tag=True)]
    gemvs = [GemvKey(k=8192), *(GemvKey(k=k, rows=3) for k in (256, 1024, 2048, 8192))]
    gemvs += [GemvKey(rows=rows) for rows in (1, 2, 3, 8, 16)]
    return [*rings, BulkKey(), OpsKey(), AccessKey(), *gemvs]


if __name__ == "__main__":
    import sys
    from pathlib import Path

    from helpers import common_kernels  # under its importable name, which is part of the keys
    from sgl_amd_mono.common.build import build_all

    build_all(common_kernels.simulated_keys(), cache_dir=Path(sys.argv[1]), processes=1, progress=print)
