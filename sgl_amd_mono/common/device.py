# SPDX-License-Identifier: Apache-2.0
"""Device-side vocabulary: what the stages of a kernel are written with.

A kernel body is plain Python, run once while it is traced; scalars are FlyDSL numerics (``Int32``, ``Int64``,
``Float32``, ``BFloat16``, ``Boolean``), vectors ``fx.Vector``. No AST is rewritten: Python ``if``/``for`` are decided
at trace time, run-time control flow is written with ``if_``, ``if_else``, ``for_range`` and ``loop_while``.

Memory: an address is an ``Int64`` that is equal in all lanes of a wave (kernel argument, peer table entry) plus an
``Int32`` byte offset per lane, taken as unsigned. Each access names its cache policy:

========  ===========  ====================================================================================
policy    ISA bits     use
========  ===========  ====================================================================================
PLAIN     none         inputs written by an earlier launch, outputs read by a later one
NT        nt           weights: read once, streamed
AGENT     sc1          hand-offs inside one GPU (its eight L2 caches are not coherent with each other)
SYSTEM    sc0 sc1      hand-offs between GPUs
========  ===========  ====================================================================================

Scopes follow LLVM's AMDGPU memory model for gfx942, which gfx950 shares.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx

from sgl_amd_mono.common import _flydsl as fly
from sgl_amd_mono.common._flydsl import bitcast as bitcast
from sgl_amd_mono.common._flydsl import compare as compare
from sgl_amd_mono.common._flydsl import for_range as for_range
from sgl_amd_mono.common._flydsl import if_ as if_
from sgl_amd_mono.common._flydsl import if_else as if_else
from sgl_amd_mono.common._flydsl import intrinsic as intrinsic
from sgl_amd_mono.common._flydsl import loop_while as loop_while
from sgl_amd_mono.common._flydsl import select as select
from sgl_amd_mono.common._flydsl import shift_right_logical as shift_right_logical
from sgl_amd_mono.common._flydsl import trunc as trunc
from sgl_amd_mono.common._flydsl import vector_element as vector_element
from sgl_amd_mono.common._flydsl import vector_from as vector_from
from sgl_amd_mono.common._flydsl import zext as zext

I8 = fx.Int8
I16 = fx.Int16
I32 = fx.Int32
I64 = fx.Int64
F32 = fx.Float32
BF16 = fx.BFloat16

WAVE_LANES = 64


def vec(element: Any, lanes: int) -> tuple[Any, int]:
    """Type of a vector of ``lanes`` elements, for ``load`` and friends: ``vec(I32, 4)``."""
    return (element, lanes)


_BYTES = {fx.Int8: 1, fx.Int16: 2, fx.BFloat16: 2, fx.Int32: 4, fx.Float32: 4, fx.Int64: 8}


def size_of(like: Any) -> int:
    """Bytes of a scalar class or of a ``vec(...)``."""
    return _BYTES[like[0]] * like[1] if isinstance(like, tuple) else _BYTES[like]


class Cache(enum.IntEnum):
    """Cache policy of an access; the value is the ``aux`` operand of buffer instructions (sc0 1, nt 2, sc1 16)."""

    PLAIN = 0
    NT = 2
    AGENT = 16
    SYSTEM = 17


PLAIN, NT, AGENT, SYSTEM = Cache.PLAIN, Cache.NT, Cache.AGENT, Cache.SYSTEM
_LLVM_SCOPE = {Cache.AGENT: "agent", Cache.SYSTEM: ""}
ATOMIC_BYTES_MAX = 8  # wider accesses are not guaranteed to be single: they go through a Buffer


# ---------------------------------------------------------------------------------------------------------------
# Where am I
# ---------------------------------------------------------------------------------------------------------------


def thread_id() -> fx.Int32:
    """Thread in the workgroup, 0 .. block - 1."""
    return fx.thread_idx.x


def block_id() -> fx.Int32:
    """Workgroup in the grid (wave-uniform)."""
    return fx.block_idx.x


def lane_id() -> fx.Int32:
    """Lane in the wave, 0 .. 63 (workgroups are one-dimensional)."""
    return thread_id() & (WAVE_LANES - 1)


def wave_id() -> fx.Int32:
    """Wave in the workgroup, known to be uniform: branches on it are scalar."""
    return uniform(thread_id() >> 6)


def uniform(value: fx.Int32) -> fx.Int32:
    """The first active lane's value, in a scalar register; use where all lanes hold the same value."""
    return intrinsic("llvm.amdgcn.readfirstlane", I32, [value])


def uniform64(value: fx.Int64) -> fx.Int64:
    """``uniform`` for an address."""
    low = uniform(trunc(value, I32))
    high = uniform(trunc(shift_right_logical(value, I64(32)), I32))
    return (zext(high, I64) << I64(32)) | zext(low, I64)


def read_lane(value: fx.Int32, lane: fx.Int32 | int) -> fx.Int32:
    """``value`` of lane ``lane`` (uniform), in a scalar register."""
    return intrinsic("llvm.amdgcn.readlane", I32, [value, I32(lane)])


def ballot(condition: Any) -> fx.Int64:
    """Bit ``l`` is set where active lane ``l`` holds ``condition``."""
    return intrinsic("llvm.amdgcn.ballot.i64", I64, [condition])


def opaque(value: fx.Int32) -> fx.Int32:
    """``value`` in a vector register with its origin hidden from the compiler (stops hoisting across stages)."""
    return fly.inline_asm("", "=v,0", I32, [value])


def opaque_uniform(value: fx.Int32) -> fx.Int32:
    """``value`` in a scalar register with its origin hidden from the compiler (stops unrolling of poll loops)."""
    return uniform(opaque(value))


# ---------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------


GLOBAL_IMMEDIATE = 4096  # offsets below it fit the instruction


def address(base: fx.Int64, byte_offset: fx.Int32 | fx.Int64 | int = 0, constant: int = 0) -> Any:
    """Global pointer at ``base + byte_offset + constant`` (``Int32`` offsets are unsigned).

    What of ``constant`` fits the instruction's offset field goes there, so that neighbours share a base register.
    """
    near = constant % GLOBAL_IMMEDIATE
    start = base if constant == near else base + fx.Int64(constant - near)
    return fly.offset_pointer(fly.offset_pointer(fly.pointer(start), byte_offset), near)


def load(base: fx.Int64, byte_offset: Any, like: Any, cache: Cache = PLAIN, constant: int = 0) -> Any:
    """Load ``like`` (scalar class or ``vec``) naturally aligned from global memory at base + byte_offset + constant.

    AGENT and SYSTEM loads are relaxed atomics of at most 8 bytes (one access); 16-byte scoped loads go through
    ``Buffer``. A scoped load is never hoisted out of a loop or merged with another one.
    """
    size = size_of(like)
    pointer = address(base, byte_offset, constant)
    if cache in _LLVM_SCOPE:
        if size > ATOMIC_BYTES_MAX:
            raise ValueError(f"{cache.name} load of {size} bytes is not one access; needed: <= 8, or Buffer.load")
        carrier = {1: I8, 2: I16, 4: I32, 8: I64}[size]
        return bitcast(fly.load(pointer, carrier, align=size, scope=_LLVM_SCOPE[cache]), like)
    return fly.load(pointer, like, align=size, nontemporal=cache is NT)


def load_uniform(base: fx.Int64, byte_offset: Any, like: Any) -> Any:
    """Scalar load at a wave-uniform address of data that nobody writes while this kernel runs.

    The compiler may move it to the kernel's top, so the address must be valid in every launch mode.
    """
    return fly.load(address(base, byte_offset), like, align=size_of(like), invariant=True)


def kernel_argument(byte_offset: int, like: Any) -> Any:
    """Scalar load of a kernel argument from the argument block, here and not at the kernel's top: arguments that only a
    late stage needs hold no SGPRs before it."""
    return load_uniform(fly.kernel_arguments(), byte_offset, like)


def store(value: Any, base: fx.Int64, byte_offset: Any, cache: Cache = PLAIN, constant: int = 0) -> None:
    """Store a scalar or vector naturally aligned to global memory; scoped stores are relaxed atomics (<= 8 bytes)."""
    kind = fly.kind_of(value)
    size = size_of(kind)
    pointer = address(base, byte_offset, constant)
    if cache in _LLVM_SCOPE:
        if size > ATOMIC_BYTES_MAX:
            raise ValueError(f"{cache.name} store of {size} bytes is not one access; needed: <= 8, or Buffer.store")
        carrier = {1: I8, 2: I16, 4: I32, 8: I64}[size]
        fly.store(bitcast(value, carrier), pointer, align=size, scope=_LLVM_SCOPE[cache])
    else:
        fly.store(value, pointer, align=size, nontemporal=cache is NT)


BUFFER_FLAGS = 0x27000  # raw descriptor, 32-bit data format: the word 3 that LLVM and FlyDSL use on gfx9


class Buffer:
    """Raw buffer descriptor over ``num_bytes`` at a wave-uniform base.

    Loads past the end give 0 and stores past it are dropped. Offsets are ``Int32`` bytes per lane plus an optional
    uniform ``scalar`` offset. Serves every policy at up to 16 bytes an access; the compiler may move these accesses
    across scoped atomics, so put ``compiler_fence()`` between a poll and the loads it allows.
    """

    def __init__(self, base: fx.Int64, num_bytes: int | fx.Int32 = 0x7FFFFFFF) -> None:
        self._rsrc = fly.make_buffer(base, I32(num_bytes) if isinstance(num_bytes, int) else num_bytes, BUFFER_FLAGS)

    def load(self, byte_offset: Any, like: Any, cache: Cache = PLAIN, scalar: Any = 0) -> Any:
        """Load ``like`` (1, 2, 4, 8 or 16 bytes)."""
        carrier = {1: I8, 2: I16, 4: I32, 8: vec(I32, 2), 16: vec(I32, 4)}[size_of(like)]
        name = f"llvm.amdgcn.raw.ptr.buffer.load.{_SUFFIX[carrier]}"
        return bitcast(intrinsic(name, carrier, [self._rsrc, I32(byte_offset), I32(scalar), I32(int(cache))]), like)

    def store(self, value: Any, byte_offset: Any, cache: Cache = PLAIN, scalar: Any = 0) -> None:
        """Store a value of 1, 2, 4, 8 or 16 bytes."""
        size = size_of(fly.kind_of(value))
        carrier = {1: I8, 2: I16, 4: I32, 8: vec(I32, 2), 16: vec(I32, 4)}[size]
        args = [bitcast(value, carrier), self._rsrc, I32(byte_offset), I32(scalar), I32(int(cache))]
        intrinsic(f"llvm.amdgcn.raw.ptr.buffer.store.{_SUFFIX[carrier]}", None, args)


_SUFFIX = {I8: "i8", I16: "i16", I32: "i32", vec(I32, 2): "v2i32", vec(I32, 4): "v4i32"}


class Lds:
    """The kernel's LDS: one static block, divided at trace time.

    ``take(nbytes)`` hands out a region for good; ``mark``/``release`` let stages share bytes (put a barrier between
    the last reader of the old stage and the first writer of the new one). ``Lds(total)`` is created once a kernel.
    """

    LIMIT = 160 * 1024

    def __init__(self, total_bytes: int) -> None:
        if not 0 < total_bytes <= self.LIMIT:
            raise ValueError(f"LDS of {total_bytes} bytes asked for; needed: 1 .. {self.LIMIT} bytes a workgroup")
        self.total_bytes = total_bytes
        self._base = fly.lds_allocate(total_bytes, 16)
        self._top = 0

    def take(self, nbytes: int, align: int = 16) -> LdsRegion:
        """Next free region of ``nbytes``; raises ``ValueError`` with the sum when the block is too small."""
        start = -(-self._top // align) * align
        if start + nbytes > self.total_bytes:
            raise ValueError(f"LDS: {start} + {nbytes} = {start + nbytes} bytes needed, {self.total_bytes} allocated")
        self._top = start + nbytes
        return LdsRegion(self._base, start, nbytes)

    def mark(self) -> int:
        """Current top, for ``release``."""
        return self._top

    def release(self, mark: int) -> None:
        """Give back everything taken since ``mark``."""
        self._top = mark


class LdsRegion:
    """A byte range of the workgroup's LDS; offsets are ``Int32`` or int bytes from its start."""

    def __init__(self, base: Any, start: int, nbytes: int) -> None:
        self._base = base
        self.start = start
        self.nbytes = nbytes

    def _pointer(self, byte_offset: Any) -> Any:
        if isinstance(byte_offset, int):
            return fly.offset_pointer(self._base, self.start + byte_offset)
        # The constant goes last, so that it becomes the instruction's offset field.
        return fly.offset_pointer(fly.offset_pointer(self._base, byte_offset), self.start)

    def load(self, byte_offset: Any, like: Any) -> Any:
        """Load ``like``, naturally aligned."""
        return fly.load(self._pointer(byte_offset), like, align=size_of(like))

    def load_at(self, byte_offset: Any, constant: int, like: Any) -> Any:
        """``load`` at ``byte_offset + constant``, with the constant in the instruction's offset field."""
        pointer = fly.offset_pointer(fly.offset_pointer(self._base, byte_offset), self.start + constant)
        return fly.load(pointer, like, align=size_of(like))

    def store(self, value: Any, byte_offset: Any) -> None:
        """Store a scalar or vector, naturally aligned."""
        fly.store(value, self._pointer(byte_offset), align=size_of(fly.kind_of(value)))

    def part(self, byte_offset: int, nbytes: int) -> LdsRegion:
        """Sub-range at a constant offset."""
        if byte_offset + nbytes > self.nbytes:
            raise ValueError(f"LDS region: {byte_offset} + {nbytes} bytes exceed the region's {self.nbytes}")
        return LdsRegion(self._base, self.start + byte_offset, nbytes)


# ---------------------------------------------------------------------------------------------------------------
# Waiting and ordering
# ---------------------------------------------------------------------------------------------------------------


def barrier() -> None:
    """All waves of the workgroup meet; LDS writes before it are visible after it. Global stores are NOT waited for."""
    fly.barrier()


def compiler_fence() -> None:
    """No instruction; no memory access moves across it at compile time."""
    fly.inline_asm("", "~{memory}")


def wait_stores() -> None:
    """This wave's vector-memory operations are complete (stores have reached their scope): ``s_waitcnt vmcnt(0)``."""
    fly.inline_asm("s_waitcnt vmcnt(0)", "~{memory}")


def need(*values: Any) -> None:
    """No instruction; the loads of all ``values`` have arrived: one wait for them, where each first use would wait
    for its own. Values of at most 16 bytes a lane."""
    fly.inline_asm("", ",".join([*["v"] * len(values), "~{memory}"]), None, values)


def wait_lds() -> None:
    """This wave's LDS operations are complete: ``s_waitcnt lgkmcnt(0)``."""
    fly.inline_asm("s_waitcnt lgkmcnt(0)", "~{memory}")


def clock() -> fx.Int64:
    """100 MHz counter, uniform."""
    return intrinsic("llvm.amdgcn.s.memrealtime", I64, [])


def sleep(units: int) -> None:
    """``s_sleep units`` (64 clocks each)."""
    intrinsic("llvm.amdgcn.s.sleep", None, [I32(units)])


def end_program() -> None:
    """End this wave now (every lane of it); barriers of the workgroup no longer count it.

    Written as assembly that the compiler takes for an instruction that returns: a block without a successor inside a
    poll loop would make it rebuild the whole control flow around the exit.
    """
    fly.inline_asm("s_endpgm", "~{memory}")


def fault_at_zero() -> None:
    """Raise a GPU memory fault: store to address 0 and wait for it."""
    null = fly.inline_asm("v_mov_b64_e32 $0, 0", "=v", I64)
    fly.store(I32(0), fly.pointer(null), align=4, volatile=True)
    wait_stores()


# ---------------------------------------------------------------------------------------------------------------
# Cross-lane
# ---------------------------------------------------------------------------------------------------------------

_QUAD_XOR = {1: 0b10_11_00_01, 2: 0b01_00_11_10}  # quad_perm selectors of lane ^ 1 and lane ^ 2
_ROW_HALF_MIRROR, _ROW_MIRROR = 0x141, 0x140
_SWIZZLE_XOR = {4: 0x101F, 8: 0x201F}  # ds_swizzle bit mode: and 0x1f, or 0, xor n


def dpp(value: Any, control: int, *, row_mask: int = 0xF, bank_mask: int = 0xF, bound_control: bool = True) -> Any:
    """``v_mov_b32_dpp``: value of another lane of the row, by DPP control word."""
    kind = fly.kind_of(value)
    bits = bitcast(value, I32)
    args = [bits, bits, I32(control), I32(row_mask), I32(bank_mask), fx.Boolean(bound_control)]
    return bitcast(intrinsic("llvm.amdgcn.update.dpp.i32", I32, args), kind)


def wave_halves(value: Any) -> tuple[Any, Any]:
    """(32-bit value of lane l % 32, value of lane l % 32 + 32): ``v_permlane32_swap_b32``."""
    return _swapped("llvm.amdgcn.permlane32.swap", value)


def row_pairs(value: Any) -> tuple[Any, Any]:
    """(value of this lane's place in the even row of its pair of 16-lane rows, ... in the odd row):
    ``v_permlane16_swap_b32``."""
    return _swapped("llvm.amdgcn.permlane16.swap", value)


def _swapped(name: str, value: Any) -> tuple[Any, Any]:
    kind = fly.kind_of(value)
    bits = bitcast(value, I32)
    low, high = fly.intrinsic_pair(name, [bits, bits, fx.Boolean(False), fx.Boolean(False)])
    return bitcast(low, kind), bitcast(high, kind)


def wave_xor(value: Any, distance: int) -> Any:
    """32-bit ``value`` of lane ``lane ^ distance`` (1, 2, 4, 8, 16 or 32)."""
    kind = fly.kind_of(value)
    if distance in _QUAD_XOR:
        return dpp(value, _QUAD_XOR[distance])
    if distance in _SWIZZLE_XOR:
        control = I32(_SWIZZLE_XOR[distance])
        return bitcast(intrinsic("llvm.amdgcn.ds.swizzle", I32, [bitcast(value, I32), control]), kind)
    if distance not in (16, 32):
        raise ValueError(f"wave_xor distance {distance}; needed: 1, 2, 4, 8, 16 or 32")
    low, high = wave_halves(value) if distance == 32 else row_pairs(value)
    return select(compare("eq", lane_id() & distance, I32(0)), high, low)


def _butterfly(value: Any, lanes: int, combine: Any) -> Any:
    """Combine over aligned groups of ``lanes`` at distances 1, 2, 4, ...; every lane ends with the same bits.

    At distances 4 and 8 the lanes of the smaller groups already agree, so mirroring the row reaches the same value as
    an exclusive or; at 16 and 32 both operands come from one swap.
    """
    if lanes not in (2, 4, 8, 16, 32, 64):
        raise ValueError(f"groups of {lanes} lanes; needed: 2, 4, 8, 16, 32 or 64")
    for distance, control in ((1, _QUAD_XOR[1]), (2, _QUAD_XOR[2]), (4, _ROW_HALF_MIRROR), (8, _ROW_MIRROR)):
        if distance < lanes:
            value = combine(value, dpp(value, control))
    if lanes >= 32:
        value = combine(*row_pairs(value))
    if lanes == 64:
        value = combine(*wave_halves(value))
    return value


def wave_sum(value: fx.Float32, lanes: int = WAVE_LANES) -> fx.Float32:
    """Sum over aligned groups of ``lanes``, pairwise at distances 1, 2, 4, ..., lanes / 2; same bits in every lane."""
    return _butterfly(value, lanes, lambda a, b: a + b)


def wave_max(value: fx.Float32, lanes: int = WAVE_LANES) -> fx.Float32:
    """Maximum over aligned groups of ``lanes`` (a number wins over NaN)."""
    return _butterfly(value, lanes, maximum)


# ---------------------------------------------------------------------------------------------------------------
# Arithmetic in stated forms
# ---------------------------------------------------------------------------------------------------------------

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
SOFTPLUS_LINEAR_ABOVE = 20.0  # torch.nn.functional.softplus and SGLang's gating kernels


def fma(a: fx.Float32, b: fx.Float32, c: fx.Float32) -> fx.Float32:
    """``a * b + c`` with one rounding."""
    return intrinsic("llvm.fma.f32", F32, [a, b, c])


def maximum(a: fx.Float32, b: fx.Float32) -> fx.Float32:
    """``v_max_f32`` (a number wins over NaN)."""
    return intrinsic("llvm.maxnum.f32", F32, [a, b])


def minimum(a: fx.Float32, b: fx.Float32) -> fx.Float32:
    """``v_min_f32`` (a number wins over NaN)."""
    return intrinsic("llvm.minnum.f32", F32, [a, b])


def exp2(x: fx.Float32) -> fx.Float32:
    """``v_exp_f32``: 2**x, one instruction, denormal results flushed by the instruction."""
    return intrinsic("llvm.amdgcn.exp2.f32", F32, [x])


def log2(x: fx.Float32) -> fx.Float32:
    """``v_log_f32``."""
    return intrinsic("llvm.amdgcn.log.f32", F32, [x])


def exp(x: fx.Float32) -> fx.Float32:
    """``exp2(x * log2(e))``: one multiplication rounding, then ``v_exp_f32``."""
    return exp2(x * F32(LOG2_E))


def rcp(x: fx.Float32) -> fx.Float32:
    """``v_rcp_f32`` (1 ulp)."""
    return intrinsic("llvm.amdgcn.rcp.f32", F32, [x])


def rsq(x: fx.Float32) -> fx.Float32:
    """``v_rsq_f32`` (1 ulp)."""
    return intrinsic("llvm.amdgcn.rsq.f32", F32, [x])


def sqrt(x: fx.Float32) -> fx.Float32:
    """``v_sqrt_f32`` (1 ulp)."""
    return intrinsic("llvm.amdgcn.sqrt.f32", F32, [x])


def sigmoid(x: fx.Float32) -> fx.Float32:
    """``rcp(1 + exp(-x))``."""
    return rcp(F32(1.0) + exp(-x))


def silu(x: fx.Float32) -> fx.Float32:
    """``x * sigmoid(x)``."""
    return x * sigmoid(x)


def softplus(x: fx.Float32) -> fx.Float32:
    """``log(1 + exp(x))``, the identity above 20: ``log2(1 + exp(x)) * ln 2``."""
    value = log2(F32(1.0) + exp(minimum(x, F32(SOFTPLUS_LINEAR_ABOVE)))) * F32(LN_2)
    return select(x > F32(SOFTPLUS_LINEAR_ABOVE), x, value)


def unsigned_divide(value: fx.Int32, divisor: int) -> tuple[fx.Int32, fx.Int32]:
    """(quotient, remainder) of a non-negative ``Int32`` by a positive constant."""
    if divisor & (divisor - 1) == 0:
        return shift_right_logical(value, I32(divisor.bit_length() - 1)), value & (divisor - 1)
    quotient = fly.unsigned_quotient(value, I32(divisor))
    return quotient, value - quotient * divisor


# ---------------------------------------------------------------------------------------------------------------
# bf16
# ---------------------------------------------------------------------------------------------------------------


def pack_bf16(low: fx.Float32, high: fx.Float32) -> fx.Int32:
    """Two f32 rounded to bf16 (nearest even), ``low`` in bits 0..15 (``v_cvt_pk_bf16_f32``)."""
    return bitcast(fly.convert(vector_from([low, high]), vec(BF16, 2)), I32)


def f32_from_bf16_pair(word: fx.Int32) -> tuple[fx.Float32, fx.Float32]:
    """(low, high) bf16 of a 32-bit word as f32 (exact)."""
    return bitcast(word << 16, F32), bitcast(word & I32(-65536), F32)


def bf16_bits(value: fx.Float32) -> fx.Int16:
    """Bits of ``value`` rounded to bf16 (nearest even)."""
    return trunc(pack_bf16(value, value), I16)


def bf16_round(value: fx.Float32) -> fx.Float32:
    """``value`` rounded to bf16, as f32."""
    return bitcast(pack_bf16(value, value) << 16, F32)


# ---------------------------------------------------------------------------------------------------------------
# MXFP4
# ---------------------------------------------------------------------------------------------------------------

MX_BLOCK = 32  # elements that share one e8m0 scale
MX_CODE_MIN, MX_CODE_MAX = 1, 253
_E2M1_MAX_LOG2 = 2  # 6 = 1.5 * 2**2
_F32_HALF_MANTISSA = 0x400000  # the mantissa bits of 1.5
_BF16_MAGNITUDES = 0x7FFF7FFF  # of both bf16 of a word
_F32_QUARTER_MANTISSA = 0x200000  # added to the bits of an f32, it carries into the exponent from 1.75 on


def mxfp4_code(amax: fx.Float32) -> fx.Int32:
    """e8m0 code of a block by RCEIL: ``exponent(d) + (mantissa(d) != 0)``, d = amax / 6 correctly rounded, in 1..253.

    Computed without the division: for amax = m * 2**E (1 <= m < 2), amax / 6 = (m / 1.5) * 2**(E - 2), which is above
    2**(E - 2) exactly where m > 1.5, at it where m = 1.5, and in (2**(E - 3), 2**(E - 2)) below; rounding to f32
    never reaches a power of two from either side (its distance is at least 2/3 ulp).
    """
    bits = bitcast(amax, I32)
    exponent = shift_right_logical(bits, I32(23)) & 0xFF
    above = select(compare("ugt", bits & 0x7FFFFF, I32(_F32_HALF_MANTISSA)), I32(1), I32(0))
    code = exponent + above - _E2M1_MAX_LOG2
    code = select(compare("slt", code, I32(MX_CODE_MIN)), I32(MX_CODE_MIN), code)
    return select(compare("sgt", code, I32(MX_CODE_MAX)), I32(MX_CODE_MAX), code)


def mxfp4_code_even(amax: fx.Float32) -> fx.Int32:
    """e8m0 code of a block as AITER's ``dynamic_mxfp4_quant`` picks it, the one before SGLang's MXFP4 linears.

    The exponent of ``amax`` rounded to a power of two (up from 1.75 times one), less 2, in 1..253: scaled, the largest
    magnitude lies in [3.5, 7). AITER has code 0 where amax < 1.75 * 2**-125, which is 1 here.
    """
    bits = bitcast(amax, I32) + I32(_F32_QUARTER_MANTISSA)
    code = (shift_right_logical(bits, I32(23)) & 0xFF) - _E2M1_MAX_LOG2
    return select(compare("slt", code, I32(MX_CODE_MIN)), I32(MX_CODE_MIN), code)


def mxfp4_quantize_block(words: Sequence[fx.Int32]) -> tuple[Any, fx.Int32]:
    """MXFP4 of a lane's own block: 16 words of 32 bf16 -> (four words of e2m1, code by ``mxfp4_code_even``).

    This is the lane's operand of ``mfma_mxfp4`` where the block is row l % 16, columns 32 * (l / 16) .. + 31.
    """
    values = [value for word in words for value in f32_from_bf16_pair(word)]
    amax = F32(0.0)
    for value in values:
        amax = maximum(amax, intrinsic("llvm.fabs.f32", F32, [value]))
    code = mxfp4_code_even(amax)
    return vector_from([mxfp4_pack8(values[8 * i : 8 * i + 8], code) for i in range(4)]), code


def mxfp4_pack8(values: Sequence[fx.Float32], code: fx.Int32) -> fx.Int32:
    """Eight f32 as e2m1 (nearest even, saturating at 6) of value / 2**(code - 127); element i in bits 4i..4i+3."""
    scale = bitcast(code << 23, F32)
    word = I32(0)
    for pair in range(4):
        args = [word, values[2 * pair], values[2 * pair + 1], scale, I32(pair)]
        word = intrinsic("llvm.amdgcn.cvt.scalef32.pk.fp4.f32", I32, args)
    return word


def bf16_amax(words: Sequence[fx.Int32]) -> fx.Float32:
    """Largest magnitude of words of two bf16: magnitudes order as unsigned integers, so two are compared at a time."""
    pair = vec(I16, 2)
    most = words[0] & I32(_BF16_MAGNITUDES)
    for word in words[1:]:
        args = [bitcast(most, pair), bitcast(word & I32(_BF16_MAGNITUDES), pair)]
        most = bitcast(intrinsic("llvm.umax.v2i16", pair, args), I32)
    return maximum(*f32_from_bf16_pair(most))


def mxfp4_pack_bf16(words: Sequence[fx.Int32], code: fx.Int32) -> fx.Int32:
    """Up to four words of two bf16 as e2m1 of value / 2**(code - 127), as ``mxfp4_pack8``; element i in bits 4i."""
    scale = bitcast(code << 23, F32)
    packed = I32(0)
    for byte, word in enumerate(words):
        args = [packed, bitcast(word, vec(BF16, 2)), scale, I32(byte)]
        packed = intrinsic("llvm.amdgcn.cvt.scalef32.pk.fp4.bf16", I32, args)
    return packed


# ---------------------------------------------------------------------------------------------------------------
# MFMA
# ---------------------------------------------------------------------------------------------------------------

MFMA_ROWS = 16
ACC = vec(F32, 4)


def zero_acc() -> Any:
    """Accumulator of zeros: lane l holds rows 4 * (l / 16) + i (i = 0..3) of column l % 16."""
    return vector_from([F32(0.0)] * 4)


def mfma_bf16(a: Any, b: Any, acc: Any) -> Any:
    """``v_mfma_f32_16x16x32_bf16``: acc += A (16 x 32) * B (32 x 16).

    ``a``, ``b``: 16 bytes a lane; lane l holds row (column) l % 16, k = 8 * (l / 16) .. + 7.
    """
    kind = vec(BF16, 8)
    args = [bitcast(a, kind), bitcast(b, kind), acc, I32(0), I32(0), I32(0)]
    return intrinsic("llvm.amdgcn.mfma.f32.16x16x32.bf16", ACC, args)


_FMT_FP4 = 4


def mfma_mxfp4(a: Any, b: Any, acc: Any, scale_a: fx.Int32, byte_a: int, scale_b: fx.Int32, byte_b: int) -> Any:
    """``v_mfma_scale_f32_16x16x128_f8f6f4`` on fp4: acc += (A * 2**sa) (16 x 128) * (B * 2**sb) (128 x 16).

    ``a``, ``b``: four words a lane; lane l holds row (column) l % 16, k = 32 * (l / 16) .. + 31, low nibble first.
    Byte ``byte_*`` (0..3) of ``scale_*`` is the e8m0 code of that lane's 32 elements.
    """
    kind = vec(I32, 4)
    args = [
        bitcast(a, kind),
        bitcast(b, kind),
        acc,
        I32(_FMT_FP4),
        I32(_FMT_FP4),
        I32(byte_a),
        scale_a,
        I32(byte_b),
        scale_b,
    ]
    return intrinsic("llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4", ACC, args)
