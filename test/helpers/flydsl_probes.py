# SPDX-License-Identifier: Apache-2.0
"""Small FlyDSL kernels for operations that K1 and K2 do not use: atomics, DPP, permlane swaps, LDS DMA, transposed
LDS reads, and FlyDSL's own cooperative library on top of them.

Each probe is a function of (src, out), byte addresses in global memory; its docstring says what lies where. FlyDSL's
public API is used where it has one (``fx.llvm.atomic_*``, ``fx.rocdl``, ``fx.coop``), else LLVM's intrinsic by name.

``python -m helpers.flydsl_probes`` (from ``test/``) builds all of them and prints the instructions that they are for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

from sgl_amd_mono.common.build import Abi, BuildKey

WAVE = 64
WORD = 4
BINS = 8
"""Words that all threads of an atomic probe share."""

ATOMIC_THREADS = 128
ATOMIC_BLOCKS = 4
TRANSPOSED_BITS = (4, 6, 8, 16)
DMA_SIZES = (4, 12, 16)
DMA_M0 = 0x100
"""Byte of LDS at which a DMA probe's data begins."""

WARP_WIDTHS = (2, 4, 8, 16, 32, 64)
BLOCK_THREADS = 256
HISTOGRAM_BINS = 32

DPP_CONTROLS: dict[str, int] = {  # the ISA's dpp_ctrl field
    "quad_perm:[3,0,0,2]": 3 | 0 << 2 | 0 << 4 | 2 << 6,
    "quad_perm:[1,0,3,2]": 1 | 0 << 2 | 3 << 4 | 2 << 6,
    "row_shl:1": 0x101,
    "row_shl:7": 0x107,
    "row_shr:1": 0x111,
    "row_shr:2": 0x112,
    "row_shr:4": 0x114,
    "row_shr:8": 0x118,
    "row_ror:3": 0x123,
    "wave_shl:1": 0x130,
    "wave_shr:1": 0x138,
    "row_mirror": 0x140,
    "row_half_mirror": 0x141,
    "row_bcast:15": 0x142,
    "row_bcast:31": 0x143,
}
DPP_MASKS = ((0xF, 0xF), (0xA, 0xF), (0xC, 0xF), (0xF, 0x6))
"""(row_mask, bank_mask)"""


def dpp_cases() -> list[tuple[str, int, int, bool]]:
    """(control, row mask, bank mask, bound_ctrl) of each row of the probe ``dpp``."""
    return [(c, *masks, bound) for c in DPP_CONTROLS for masks in DPP_MASKS for bound in (False, True)]


@dataclass(frozen=True)
class ProbeKey(BuildKey):
    """The probe ``name`` as a kernel: ``src`` and ``out`` are global addresses."""

    name: str = ""
    blocks: int = 1
    threads: int = WAVE
    model: ClassVar[str] = "test"
    launch: ClassVar[str] = "probe"
    abi: ClassVar[Abi] = (("src", "ptr"), ("out", "ptr"))

    @property
    def grid(self) -> int:
        return self.blocks

    @property
    def block(self) -> int:
        return self.threads

    def body(self) -> Callable[..., None]:
        def kernel(src: Any, out: Any) -> None:
            from sgl_amd_mono.common._flydsl import TARGET

            # The cooperative library asks FlyDSL for the GPU of this machine.
            with mock.patch.dict(os.environ, FLYDSL_GPU_ARCH=TARGET):
                PROBES[self.name](src, out)

        return kernel


# ---- atomics ------------------------------------------------------------------------------------------------------

ATOMIC_OPERATIONS = (
    ("add", "Int32"), ("sub", "Int32"), ("min", "Int32"), ("max", "Int32"), ("min", "Uint32"), ("max", "Uint32"),
    ("and", "Int32"), ("or", "Int32"), ("xor", "Int32"), ("add", "Float32"), ("min", "Float32"), ("max", "Float32"),
    ("add", "Int64"), ("max", "Int64"), ("min", "Uint64"), ("add", "Float64"), ("max", "Float64"),
)  # fmt: skip
"""(operation, FlyDSL type). Float operations get small whole numbers, so that their order leaves no trace."""

BYTES = {"Int32": 4, "Uint32": 4, "Float32": 4, "Int64": 8, "Uint64": 8, "Float64": 8}
OPERATION_BYTES = BINS * 8
"""Of memory for each operation: one word of up to 8 bytes a bin."""


def _operand(d: Any, fx: Any, value: Any, kind: str) -> Any:
    """An Int32 as the operand of an atomic of type ``kind``."""
    number = getattr(fx, kind)
    if kind.startswith("Float"):
        return value.to(number)
    if BYTES[kind] == 4:
        return number(value)
    return number(value.to(fx.Int64))


def _apply_atomics(pointer: Callable[[Any], Any], src: Any, thread: Any) -> None:
    """Every operation of the table: thread t applies its value to bin t % BINS at ``pointer(byte offset)``."""
    import flydsl.expr as fx

    from sgl_amd_mono.common import device as d

    value = d.load(src, thread * WORD, d.I32)
    for number, (operation, kind) in enumerate(ATOMIC_OPERATIONS):
        place = pointer((thread & (BINS - 1)) * 8 + number * OPERATION_BYTES)
        getattr(fx.llvm, f"atomic_{operation}")(place, _operand(d, fx, value, kind), syncscope="agent")


def atomics_global(src: Any, out: Any) -> None:
    """src: one Int32 a thread of the grid. out: ``[operation][bin]`` of 8 bytes, with the start values in it."""
    from sgl_amd_mono.common import device as d

    _apply_atomics(lambda offset: d.address(out, offset), src, d.block_id() * ATOMIC_THREADS + d.thread_id())


def atomics_lds(src: Any, out: Any) -> None:
    """As ``atomics_global`` for one workgroup, with the bins in LDS between a load from ``out`` and a store back."""
    from sgl_amd_mono.common import device as d

    total = len(ATOMIC_OPERATIONS) * OPERATION_BYTES
    bins = d.Lds(total).take(total)
    tid = d.thread_id()

    def each_word(move: Callable[[Any], None]) -> None:
        for first in range(0, total // WORD, ATOMIC_THREADS):
            word = tid + first
            with d.if_(d.compare("ult", word, d.I32(total // WORD))):
                move(word * WORD)

    each_word(lambda place: bins.store(d.load(out, place, d.I32), place))
    d.barrier()
    _apply_atomics(bins._pointer, src, tid)
    d.barrier()
    each_word(lambda place: d.store(bins.load(place, d.I32), out, place))


def atomic_returns(src: Any, out: Any) -> None:
    """out: four counters of 64 bytes (global add, global swap, global compare-and-swap loop, and a count of the
    loop's rounds), then three Int32 a thread of the grid: its ticket, what its exchange gave, its ticket from the loop.
    """
    import flydsl.expr as fx

    from sgl_amd_mono.common import device as d

    thread = d.block_id() * ATOMIC_THREADS + d.thread_id()
    ticket, slot, swapped, rounds = (d.address(out, 64 * i) for i in range(4))
    got = out + d.I64(256)
    place = thread * 12
    d.store(fx.llvm.atomic_add(ticket, d.I32(1), syncscope="agent"), got, place)
    d.store(fx.llvm.atomic_xchg(slot, thread + 1, syncscope="agent"), got, place, constant=4)

    def attempt(expected: Any) -> tuple[Any, list[Any]]:
        found = d.fly.compare_exchange(swapped, expected, expected + 1, align=4, scope="agent")
        fx.llvm.atomic_add(rounds, d.I32(1), syncscope="agent")
        return d.compare("ne", found, expected), [found]

    (own,) = d.loop_while([d.I32(0)], attempt)
    d.store(own, got, place, constant=8)


def atomics_packed(src: Any, out: Any) -> None:
    """src: a pair of bf16 a thread. out: BINS pairs in bf16, then BINS of half precision: packed additions."""
    import flydsl.expr as fx

    from sgl_amd_mono.common import device as d

    tid = d.thread_id()
    pair = d.load(src, tid * WORD, d.vec(d.BF16, 2))
    place = (tid & (BINS - 1)) * WORD
    fx.llvm.atomic_add(d.address(out, place), pair, syncscope="agent")
    halves = d.vector_from([d.vector_element(pair, i).to(fx.Float32).to(fx.Float16) for i in range(2)])
    fx.llvm.atomic_add(d.address(out, place, BINS * WORD), halves, syncscope="agent")


def atomics_buffer(src: Any, out: Any) -> None:
    """src: an Int32 a lane. out: five tables of 16 entries of 8 bytes (fadd, fmax of Float64, smax, umin, and a
    compare-and-swap from 0, words at the entry's begin); lanes 48 and up lie behind the buffer's end and must leave no
    trace.
    """
    import flydsl.expr as fx

    from sgl_amd_mono.common import device as d

    tid = d.thread_id()
    value = d.load(src, tid * WORD, d.I32)
    size = 16 * 8
    zero = d.I32(0)
    outside = d.select(d.compare("ult", tid, d.I32(48)), zero, d.I32(1 << 20))
    place = (tid & 15) * 8 + outside
    operations = (
        ("fadd.f32", value.to(fx.Float32)), ("fmax.f64", value.to(fx.Float64)), ("smax.i32", value),
        ("umin.i32", value), ("cmpswap.i32", value),
    )  # fmt: skip
    for number, (name, operand) in enumerate(operations):
        buffer = d.fly.make_buffer(out + d.I64(number * size), d.I32(size), d.BUFFER_FLAGS)
        given = [operand, zero] if name.startswith("cmpswap") else [operand]
        d.intrinsic(f"llvm.amdgcn.raw.ptr.buffer.atomic.{name}", type(operand), [*given, buffer, place, zero, zero])


# ---- lanes --------------------------------------------------------------------------------------------------------


def dpp(src: Any, out: Any) -> None:
    """src: an Int32 a lane, then the values that stand where a move reaches nothing. out: one row a ``dpp_cases()``."""
    import flydsl.expr as fx

    from sgl_amd_mono.common import device as d

    tid = d.thread_id()
    value, old = d.load(src, tid * WORD, d.I32), d.load(src, tid * WORD, d.I32, constant=WAVE * WORD)
    for number, (control, rows, banks, bound) in enumerate(dpp_cases()):
        moved = fx.rocdl.update_dpp(
            d.I32.ir_type, old.ir_value(), value.ir_value(), DPP_CONTROLS[control], rows, banks, bound
        )
        d.store(d.I32(moved), out, tid * WORD, constant=number * WAVE * WORD)


def permlane_swaps(src: Any, out: Any) -> None:
    """src: two Int32 rows of 64 lanes. out: both results of the swap of rows of 16, then of halves of 32 lanes."""
    from sgl_amd_mono.common import device as d

    tid = d.thread_id()
    first, second = (d.load(src, tid * WORD, d.I32, constant=i * WAVE * WORD) for i in range(2))
    for number, lanes in enumerate((16, 32)):
        false = d.fly.fx.Boolean(False)
        pair = d.fly.intrinsic_pair(f"llvm.amdgcn.permlane{lanes}.swap", [first, second, false, false])
        for half, value in enumerate(pair):
            d.store(value, out, tid * WORD, constant=(2 * number + half) * WAVE * WORD)


WARP_REDUCTIONS = (("ADD", "Int32"), ("MAX", "Int32"), ("MIN", "Float32"), ("ADD", "Float32"), ("MUL", "Int32"))


def coop_warp(src: Any, out: Any) -> None:
    """src: an Int32 a lane. out: rows of 64 lanes: for every width and every WARP_REDUCTIONS the reduction, its
    inclusive and its exclusive scan, by FlyDSL's cooperative library (DPP moves and swizzles).
    """
    import flydsl.expr as fx

    from sgl_amd_mono.common import device as d

    tid = d.thread_id()
    value = d.load(src, tid * WORD, d.I32)
    row = 0
    for width in WARP_WIDTHS:
        for name, kind in WARP_REDUCTIONS:
            operation = getattr(fx.ReductionOp, name)
            given = value.to(fx.Float32) if kind == "Float32" else value
            for collective in (fx.coop.warp_reduce, fx.coop.warp_inclusive_scan, fx.coop.warp_exclusive_scan):
                result = collective(given, operation, width=width)
                d.store(d.bitcast(result, d.I32), out, tid * WORD, constant=row * WAVE * WORD)
                row += 1


def coop_block(src: Any, out: Any) -> None:
    """src: an Int32 a thread. out: rows of BLOCK_THREADS: the sum over the workgroup with atomic tickets, the
    exclusive sum, the values sorted (radix sort in LDS); then HISTOGRAM_BINS counts (LDS atomics).
    """
    import flydsl.expr as fx

    from sgl_amd_mono.common import device as d

    tid = d.thread_id()
    value = d.load(src, tid * WORD, d.I32)
    block = (BLOCK_THREADS, 1, 1)
    reduce = fx.coop.BlockReduce[fx.Int32, block, fx.coop.BlockReduceAlgorithm.WARP_REDUCTIONS_NONDETERMINISTIC]
    scan = fx.coop.BlockScan[fx.Int32, block]
    sort = fx.coop.BlockRadixSort[fx.Int32, block, 1]
    histogram = fx.coop.BlockHistogram[fx.Int32, block, HISTOGRAM_BINS]

    allocator = fx.SharedAllocator()
    shared = {each: allocator.allocate(each.SharedStorage).peek() for each in (reduce, scan, sort, histogram)}
    total = reduce(value, fx.ReductionOp.ADD, storage=shared[reduce])
    before = scan.exclusive_sum(value, storage=shared[scan])
    ordered = sort(value, storage=shared[sort])
    for row, result in enumerate((total, before, ordered)):
        d.store(result, out, tid * WORD, constant=row * BLOCK_THREADS * WORD)
    counts = histogram(value & (HISTOGRAM_BINS - 1), storage=shared[histogram])
    with d.if_(d.compare("ult", tid, d.I32(HISTOGRAM_BINS))):
        d.store(counts[tid], out, tid * WORD, constant=3 * BLOCK_THREADS * WORD)


# ---- memory to LDS, and transposed out of it ----------------------------------------------------------------------


def lds_dma(src: Any, out: Any) -> None:
    """src: 4 KiB. out, for every path (buffer, global) and size: 64 lanes of that size, as they lie in LDS.

    Lane l fetches element (11 l) % 64; LDS is filled with ones before. Lanes 5, 6 and 7 of the buffer path lie behind
    the buffer's end (they fetch zeros), lanes 40 and up of the global path do not take part.
    """
    from sgl_amd_mono.common import device as d

    tid = d.thread_id()
    area = d.Lds(2048).take(2048)
    target = area._pointer(DMA_M0)
    base = 0
    for path in ("buffer", "global"):
        for size in DMA_SIZES:
            for first in range(0, 2048, WAVE * WORD):
                area.store(d.I32(0x01010101), tid * WORD + first)
            d.wait_lds()
            source = ((tid * 11) & (WAVE - 1)) * size
            if path == "buffer":
                gone = d.compare("ult", tid - 5, d.I32(3))
                buffer = d.fly.make_buffer(src, d.I32(WAVE * size), d.BUFFER_FLAGS)
                arguments = [buffer, target, d.I32(size), d.select(gone, d.I32(1 << 20), source), *[d.I32(0)] * 3]
                d.intrinsic("llvm.amdgcn.raw.ptr.buffer.load.lds", None, arguments)
            else:
                with d.if_(d.compare("ult", tid, d.I32(40))):
                    arguments = [d.address(src, source), target, d.I32(size), d.I32(0), d.I32(0)]
                    d.intrinsic("llvm.amdgcn.global.load.lds", None, arguments)
            d.wait_stores()
            for word in range(size // WORD):
                value = area.load_at(tid * size, DMA_M0 + word * WORD, d.I32)
                d.store(value, out, tid * size, constant=base + word * WORD)
            d.wait_lds()
            base += WAVE * size


def transposed_read(bits: int) -> Callable[[Any, Any], None]:
    """The probe of ``ds_read_b64_tr_b{bits}`` (b96 for 6 bits): src and out hold one piece of 8 (12) bytes a lane."""

    def probe(src: Any, out: Any) -> None:
        from sgl_amd_mono.common import device as d

        tid = d.thread_id()
        words = 3 if bits == 6 else 2
        area = d.Lds(WAVE * words * WORD).take(WAVE * words * WORD)
        for word in range(words):
            value = d.load(src, tid * (words * WORD), d.I32, constant=word * WORD)
            area.store(value, tid * (words * WORD) + word * WORD)
        d.barrier()
        name, like = {
            4: ("llvm.amdgcn.ds.read.tr4.b64.v2i32", d.vec(d.I32, 2)),
            6: ("llvm.amdgcn.ds.read.tr6.b96.v3i32", d.vec(d.I32, 3)),
            8: ("llvm.amdgcn.ds.read.tr8.b64.v2i32", d.vec(d.I32, 2)),
            16: ("llvm.amdgcn.ds.read.tr16.b64.v4i16", d.vec(d.I16, 4)),
        }[bits]
        got = d.bitcast(d.intrinsic(name, like, [area._pointer(tid * (words * WORD))]), d.vec(d.I32, words))
        for word in range(words):
            d.store(d.vector_element(got, word), out, tid * (words * WORD), constant=word * WORD)

    return probe


def transposed_matmul(src: Any, out: Any) -> None:
    """out (16 x 16 Float32) = A @ B: src holds A (16 x 32 bf16, row-major), then B (32 x 16 bf16, row-major).

    B's fragment (lane: column l % 16, rows 8 (l / 16) .. + 7) comes from row-major LDS by two transposed reads, each of
    four rows of 16 columns a group of 16 lanes; the MFMA's own layout checks that of the read.
    """
    import flydsl.expr as fx

    from sgl_amd_mono.common import device as d

    tid = d.thread_id()
    bytes_b = 32 * 16 * 2
    area = d.Lds(bytes_b).take(bytes_b)
    area.store(d.load(src, tid * 16, d.vec(d.I32, 4), constant=16 * 32 * 2), tid * 16)
    a = d.load(src, (tid & 15) * 64 + (tid >> 4) * 16, d.vec(d.BF16, 8))
    d.barrier()
    halves = []
    for half in range(2):
        # lane l of a group reads 4 columns of one row: row l / 4 of the four, columns 4 (l % 4) .. + 3
        row = (tid >> 4) * 8 + half * 4 + ((tid & 15) >> 2)
        got = d.intrinsic(
            "llvm.amdgcn.ds.read.tr16.b64.v4i16", d.vec(d.I16, 4), [area._pointer(row * 32 + (tid & 3) * 8)]
        )
        halves.append(d.bitcast(got, d.vec(d.I32, 2)))
    words = d.vector_from([d.vector_element(half, i) for half in halves for i in range(2)])
    zero = d.vector_from([d.F32(0.0)] * 4)
    total = d.intrinsic(
        "llvm.amdgcn.mfma.f32.16x16x32.bf16",
        d.vec(d.F32, 4),
        [a, d.bitcast(words, d.vec(d.BF16, 8)), zero, *[fx.Int32(0)] * 3],
    )
    for i in range(4):
        d.store(d.vector_element(total, i), out, ((tid >> 4) * 4 + i) * 64 + (tid & 15) * 4)


PROBES: dict[str, Callable[[Any, Any], None]] = {
    "atomics_global": atomics_global,
    "atomics_lds": atomics_lds,
    "atomic_returns": atomic_returns,
    "atomics_packed": atomics_packed,
    "atomics_buffer": atomics_buffer,
    "dpp": dpp,
    "permlane_swaps": permlane_swaps,
    "coop_warp": coop_warp,
    "coop_block": coop_block,
    "lds_dma": lds_dma,
    **{f"transposed_{bits}": transposed_read(bits) for bits in TRANSPOSED_BITS},
    "transposed_matmul": transposed_matmul,
}

KEYS: dict[str, ProbeKey] = {
    **{name: ProbeKey(name) for name in PROBES},
    "atomics_global": ProbeKey("atomics_global", ATOMIC_BLOCKS, ATOMIC_THREADS),
    "atomics_lds": ProbeKey("atomics_lds", 1, ATOMIC_THREADS),
    "atomic_returns": ProbeKey("atomic_returns", ATOMIC_BLOCKS, ATOMIC_THREADS),
    "coop_block": ProbeKey("coop_block", 1, BLOCK_THREADS),
}
"""Every probe's build key, by its name."""


def _main() -> None:
    import re
    from collections import Counter

    from sgl_amd_mono.common.build import compile_artifact

    for name, key in KEYS.items():
        isa = compile_artifact(key).isa
        seen = Counter(re.findall(r"^\s+(\w*(?:atomic|_dpp|permlane|_tr_|swizzle)\w*|ds_(?:add|m|cmp)\w+)", isa, re.M))
        seen.update({"load to LDS": len(re.findall(r"^\s+(?:buffer_load.* lds|global_load_lds)", isa, re.M))})
        print(name, {k: v for k, v in seen.items() if v})


if __name__ == "__main__":
    _main()
