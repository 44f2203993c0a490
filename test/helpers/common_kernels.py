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
    ("scratch", "ptr"),
    ("peers", "ptr"),
    ("epoch", "ptr"),
    ("deadline_ticks", "i64"),
    ("rank", "i32"),
    ("layer_slot", "i32"),
    ("mode", "i32"),
    ("last", "i32"),
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

        def kernel(
            src: Any,
            out: Any,
            state: Any,
            scratch: Any,
            peers: Any,
            epoch: Any,
            deadline_ticks: Any,
            rank: Any,
            layer_slot: Any,
            mode: Any,
            last: Any,
        ) -> None:
            lds = d.Lds(DEAD_BYTES + 16)
            dead, shared = lds.take(DEAD_BYTES), lds.take(16)
            s = Sync(
                epoch=epoch,
                slot=layer_slot,
                peers=peers,
                rank=rank,
                ranks=self.ranks,
                deadline_ticks=deadline_ticks,
                mode=mode,
                dead=dead,
                stop=self.stop,
            )
            tid, block = d.thread_id(), d.block_id()
            # The token comes first in the chain: of the waits behind a lost one, its wait is the one recorded.
            token = Region(1, s.own_base + d.I64(FAULT_BLOCK_BYTES), system=True)
            ring = Region(0, scratch, stride=HOT_LINE_BYTES, order=1)
            marks = Region(2, scratch + d.I64(self.blocks * HOT_LINE_BYTES), stride=HOT_LINE_BYTES, order=2)
            own = d.load(src, block * 4, d.F32)
            s.leave_if_failed()

            def before() -> list[Any]:
                first = d.compare("eq", block, d.I32(0))
                return d.if_else(
                    first,
                    lambda: d.if_else(
                        d.compare("eq", rank, d.I32(0)),
                        lambda: [d.F32(0.0)],
                        lambda: s.poll([(token, 0)], [d.F32]),
                        [d.F32],
                    ),
                    lambda: s.poll([(ring, block - 1)], [d.F32]),
                    [d.F32],
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
                            s.put(token, 0, total, base=s.peer_base(other) + d.I64(FAULT_BLOCK_BYTES))
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

        def kernel(
            src: Any,
            out: Any,
            scratch: Any,
            peers: Any,
            epoch: Any,
            deadline_ticks: Any,
            rank: Any,
            layer_slot: Any,
            mode: Any,
            last: Any,
        ) -> None:
            lds = d.Lds(DEAD_BYTES)
            s = Sync(
                epoch=epoch,
                slot=layer_slot,
                peers=peers,
                rank=rank,
                ranks=1,
                deadline_ticks=deadline_ticks,
                mode=mode,
                dead=lds.take(DEAD_BYTES),
                stop=False,
            )
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
        ("x", "ptr"),
        ("w", "ptr"),
        ("w_packed", "ptr"),
        ("w_scale", "ptr"),
        ("out", "ptr"),
        ("out_mx", "ptr"),
        ("words", "ptr"),
        ("codes", "ptr"),
    )
    readonly: ClassVar[frozenset[str]] = frozenset({"x", "w", "w_packed", "w_scale"})
    block: ClassVar[int] = 512

    @property
    def grid(self) -> int:
        return self.blocks

    def body(self) -> Callable[..., None]:
        from sgl_amd_mono.common import device as d
        from sgl_amd_mono.common import gemv as g

        k, rows = self.k, self.rows
        bf16_tiles, mx_tiles = k // g.BF16_TILE_K, k // g.MX_TILE_K
        mx_waves = next(n for n in (8, 4, 2, 1) if mx_tiles % (2 * n) == 0)
        x_pitch, word_pitch = 2 * k + 16, k // 2 + 16
        code_pitch = 4 * mx_tiles  # [part of the tile][tile]
        column_bytes = rows * g.COLUMN_BYTES

        def kernel(x: Any, w: Any, w_packed: Any, w_scale: Any, out: Any, out_mx: Any, words: Any, codes: Any) -> None:
            sizes = [8 * column_bytes, rows * x_pitch, rows * word_pitch, rows * code_pitch]
            lds = d.Lds(sum(-(-n // 16) * 16 for n in sizes))
            partials, plain, packed, scales = (lds.take(n) for n in sizes)
            wave, block, tid = d.wave_id(), d.block_id(), d.thread_id()
            each, mx_each = bf16_tiles // 8, mx_tiles // mx_waves
            mx_wave = wave & (mx_waves - 1)

            # Weights first: 16 rows of the bf16 matrix, then of the MXFP4 one.
            matrix = g.guarded(w, 2 * k * g.TILE_ROWS * self.blocks)
            at = g.bf16_lane_bytes(2 * k) + block * (2 * k * g.TILE_ROWS) + wave * (each * g.BF16_TILE_BYTES)
            tiles = [g.load_bf16_tile(matrix, at, i) for i in range(each)]
            first = mx_wave * mx_each
            start = block * (mx_tiles * g.MX_TILE_BYTES) + first * g.MX_TILE_BYTES
            weights = g.guarded(w_packed, self.blocks * mx_tiles * g.MX_TILE_BYTES)
            mx = [g.load_mxfp4_tile(weights, i * g.MX_TILE_BYTES, scalar=start) for i in range(mx_each)]
            start = ((block >> 1) * (mx_tiles // 2) + (first >> 1)) * g.MX_SCALE_BYTES
            scale_words = g.guarded(w_scale, -(-self.blocks // 2) * (mx_tiles // 2) * g.MX_SCALE_BYTES)
            mx_scales = [
                g.load_mxfp4_scales(scale_words, i * g.MX_SCALE_BYTES, scalar=start) for i in range(mx_each // 2)
            ]

            # Activations: copied to LDS, then quantised, a block of 32 a lane.
            for first_unit in range(0, rows * k // 8, self.block):
                unit = tid + first_unit
                with d.if_(d.compare("ult", unit, d.I32(rows * k // 8))):
                    row, piece = d.unsigned_divide(unit, k // 8)
                    plain.store(d.load(x, unit * 16, d.vec(d.I32, 4)), row * x_pitch + piece * 16)
            d.barrier()
            units = rows * k // d.MX_BLOCK
            for first_unit in range(0, units, self.block):
                unit = tid + first_unit
                with d.if_(d.compare("ult", unit, d.I32(units))):
                    row, piece = d.unsigned_divide(unit, k // d.MX_BLOCK)
                    values: list[Any] = []
                    for quarter in range(4):
                        four = plain.load(row * x_pitch + piece * 64 + quarter * 16, d.vec(d.I32, 4))
                        for i in range(4):
                            values.extend(d.f32_from_bf16_pair(d.vector_element(four, i)))
                    amax = d.F32(0.0)
                    for value in values:
                        amax = d.maximum(amax, d.intrinsic("llvm.fabs.f32", d.F32, [value]))
                    code = d.mxfp4_code(amax)
                    block_words = d.vector_from([d.mxfp4_pack8(values[8 * i : 8 * i + 8], code) for i in range(4)])
                    packed.store(block_words, row * word_pitch + piece * 16)
                    byte = d.trunc(code, d.I8)
                    scales.store(byte, row * code_pitch + (piece & 3) * mx_tiles + (piece >> 2))
                    with d.if_(d.compare("eq", block, d.I32(0))):
                        d.store(block_words, words, unit * 16)
                        d.store(byte, codes, unit)
            d.barrier()

            def put_sum(target: Any, waves: int) -> None:
                d.barrier()
                with d.if_(d.compare("ult", tid, d.I32(g.TILE_ROWS * rows))):
                    weight_row, row = tid & (g.TILE_ROWS - 1), tid >> 4
                    value = g.sum_in_order(partials, tid * 4, column_bytes, range(waves))
                    d.store(value, target, (row * (self.blocks * g.TILE_ROWS) + block * g.TILE_ROWS + weight_row) * 4)
                d.barrier()

            row = g.clamped_row(rows)
            at = g.bf16_lane_bytes(x_pitch, row) + wave * (each * g.BF16_TILE_BYTES)
            operands = [plain.load(at + i * g.BF16_TILE_BYTES, d.vec(d.I32, 4)) for i in range(each)]
            g.store_partials(partials, [g.multiply_bf16(tiles, operands)], rows, wave * column_bytes, 0)
            put_sum(out, 8)

            _, part = g.operand_lane()
            acc = d.zero_acc()
            for i in range(mx_each):
                operand = packed.load(row * word_pitch + part * 16 + (first + i) * 64, d.vec(d.I32, 4))
                code = d.zext(scales.load(row * code_pitch + part * mx_tiles + first + i, d.I8), d.I32)
                scale = d.shift_right_logical(mx_scales[i // 2], (block & 1) << 3)  # the odd row group's bytes
                acc = d.mfma_mxfp4(mx[i], operand, acc, scale, 2 * (i % 2), code, 0)
            g.store_partials(partials, [acc], rows, wave * column_bytes, 0)
            put_sum(out_mx, mx_waves)

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
    table.update(
        {
            "low_half": lambda d, a, b, t: d.wave_halves(a)[0],
            "high_half": lambda d, a, b, t: d.wave_halves(a)[1],
            "even_row": lambda d, a, b, t: d.row_pairs(a)[0],
            "odd_row": lambda d, a, b, t: d.row_pairs(a)[1],
            "pack": lambda d, a, b, t: d.pack_bf16(a, b),
            "bf16_bits": lambda d, a, b, t: d.zext(d.bf16_bits(a), d.I32),
            "bf16_round": lambda d, a, b, t: d.bf16_round(a),
            "unpack": lambda d, a, b, t: (
                d.f32_from_bf16_pair(d.bitcast(a, d.I32))[1] + d.f32_from_bf16_pair(d.bitcast(b, d.I32))[0]
            ),
            "code": lambda d, a, b, t: d.mxfp4_code(d.intrinsic("llvm.fabs.f32", d.F32, [a])),
            "code_even": lambda d, a, b, t: d.mxfp4_code_even(d.intrinsic("llvm.fabs.f32", d.F32, [a])),
            "bf16_amax": lambda d, a, b, t: d.bf16_amax([d.bitcast(a, d.I32), d.bitcast(b, d.I32)]),
            "pack_fp4": lambda d, a, b, t: d.mxfp4_pack_bf16(
                [d.bitcast(a, d.I32), d.bitcast(b, d.I32)],
                d.mxfp4_code_even(d.bf16_amax([d.bitcast(a, d.I32), d.bitcast(b, d.I32)])),
            ),
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
            "divide": lambda d, a, b, t: d.unsigned_divide(t * 977, 192)[0],
            "remainder": lambda d, a, b, t: d.unsigned_divide(t * 977, 192)[1],
            "loop": lambda d, a, b, t: d.for_range(0, t & 7, 1, [t], lambda i, v: [v * 3 + i])[0],
            "branch": lambda d, a, b, t: d.if_else(a < b, lambda: [a - b], lambda: [b * b], [d.F32])[0],
        }
    )
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
                                d.Buffer(source, self.slice_bytes).load(place, kind, cache), place, cache
                            )
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


@dataclass(frozen=True)
class FailingKey(GreedyKey):
    """A kernel whose compilation ends its process (``how`` "dies") or takes a minute ("sleeps")."""

    how: str = "dies"
    width: int = 8  # taken first

    def body(self) -> Callable[..., None]:
        import os
        import signal
        import time

        def kernel(x: Any, out: Any) -> None:
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

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
