# SPDX-License-Identifier: Apache-2.0
"""Vector ALU instructions: every operation of the element-wise tables against its definition, with EXEC full and
partly off.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from helpers.isa import (
    ALL_LANES,
    DOUBLES,
    FEW_FLOATS,
    FEW_INTEGERS,
    FLOATS,
    HALVES,
    INTEGERS,
    LANES,
    PARTIAL_EXEC,
    covers,
    cross,
    registers,
    run,
)
from helpers.isa_reference import (
    F16,
    F32,
    F64,
    M16,
    M32,
    M64,
    NAN,
    Format,
    add,
    clamp,
    convert,
    divide,
    fma,
    minimum,
    minimum_number,
    mul,
    negate,
    round_integral,
    same,
    signed,
    to_integer,
)

SENTINEL = 0xCAFE_F00D  # what inactive lanes and kept halves must still hold


@dataclasses.dataclass(frozen=True)
class Operand:
    """A kind of operand: registers a lane, the values it is tested with, and the format of results."""

    words: int
    values: tuple[int, ...]
    few: tuple[int, ...]
    fmt: Format | None = None


OPERANDS = {
    "i": Operand(1, INTEGERS, FEW_INTEGERS),
    "f": Operand(1, FLOATS, FEW_FLOATS, F32),
    "h": Operand(1, HALVES, HALVES[:14], F16),
    "b": Operand(1, tuple(x & M16 for x in INTEGERS), tuple(x & M16 for x in FEW_INTEGERS)),
    "q": Operand(
        2, (0, 1, 0xFFFFFFFF, 0x100000000, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, M64, 0x123456789ABCDEF0), (0, 1, M64)
    ),
    "d": Operand(2, DOUBLES, DOUBLES[:14], F64),
}
HIGH_HALF = 0xA5C3  # what the high halves of 16-bit sources hold: it must not matter


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation: `shape` is "result=sources" in operand kinds; `expect` maps the sources to the result.

    `accumulates`: the last source is the destination's old value. `keeps_high`: a 16-bit result keeps the other half.
    `ulps`: how far a result may be off (transcendentals, whose last bit the documents leave open).
    """

    name: str
    shape: str
    expect: Callable[..., int | str]
    accumulates: bool = False
    keeps_high: bool = False
    tail: str = ""
    ulps: int = 0
    values: tuple[Sequence[int], ...] | None = None

    @property
    def result(self) -> str:
        return self.shape[0]

    @property
    def sources(self) -> str:
        return self.shape[2:]


def _shift(x: int, bits: int = 32) -> int:
    return x & (bits - 1)


def _bfe_i32(a: int, b: int, c: int) -> int:
    offset, width = b & 31, c & 31
    if width == 0:
        return 0
    if offset + width < 32:
        return signed(a >> offset & ((1 << width) - 1), width) & M32
    return (signed(a) >> offset) & M32


def _perm(a: int, b: int, selectors: int) -> int:
    data = (a << 32 | b).to_bytes(8, "little")
    out = []
    for s in selectors.to_bytes(4, "little"):
        if s >= 13:
            out.append(0xFF)
        elif s == 12:
            out.append(0)
        elif s >= 8:
            out.append(0xFF if data[2 * (s - 8) + 1] & 0x80 else 0)
        else:
            out.append(data[s])
    return int.from_bytes(bytes(out), "little")


def _bytes(x: int) -> list[int]:
    return list(x.to_bytes(4, "little"))


def _signed_bytes(x: int) -> list[int]:
    return [signed(y, 8) for y in _bytes(x)]


def _nibbles(x: int) -> list[int]:
    return [x >> k & 15 for k in range(0, 32, 4)]


def _dot(a: Sequence[int], b: Sequence[int], c: int) -> int:
    return (sum(x * y for x, y in zip(a, b, strict=True)) + c) & M32


def _halves(x: int) -> list[int]:
    return [x & M16, x >> 16]


def _signed_halves(x: int) -> list[int]:
    return [signed(y, 16) for y in _halves(x)]


def _median(values: Sequence[int]) -> int:
    return sorted(values)[1]


def _median_float(fmt: Format, a: int, b: int, c: int) -> int | str:
    """v_med3: with a NaN among the sources it is the minimum of the three (ISA pseudo code)."""
    if any(fmt.is_nan(x) for x in (a, b, c)):
        return _fold(fmt, minimum_number, (a, b, c))
    from helpers.isa_reference import order

    return sorted((a, b, c), key=lambda x: order(fmt, x))[1]


def _fold(fmt: Format, op: Callable[..., int | str], values: Sequence[int], largest: bool = False) -> int | str:
    first = op(fmt, values[0], values[1], largest)
    return op(fmt, fmt.quiet_nan if first == NAN else first, values[2], largest)


def _ldexp(fmt: Format, a: int, n: int) -> int | str:
    if fmt.is_nan(a):
        return NAN
    if fmt.is_infinite(a):
        return a
    return fmt.round(fmt.value(a) * Fraction(2) ** clamp(n, -4000, 4000), negative_zero=fmt.negative(a))


def _fract(fmt: Format, a: int) -> int | str:
    """x - floor(x), held below 1."""
    if fmt.is_nan(a) or fmt.is_infinite(a):
        return NAN
    x = fmt.value(a)
    return min(fmt.round(x - math.floor(x)), fmt.round(Fraction(1)) - 1)


def _frexp(fmt: Format, a: int) -> tuple[int | str, int]:
    """Mantissa in [0.5, 1) with the sign, and the exponent; zeros and specials as they are with exponent 0."""
    if fmt.is_nan(a):
        return NAN, 0
    if fmt.is_infinite(a) or fmt.value(a) == 0:
        return a, 0
    x, e = abs(fmt.value(a)), 0
    while x >= 1:
        x, e = x / 2, e + 1
    while x < Fraction(1, 2):
        x, e = x * 2, e - 1
    return fmt.round(-x if fmt.negative(a) else x), e


def _legacy_mul(a: int, b: int) -> int | str:
    """A factor of zero gives +0, whatever the other is."""
    return 0 if F32.magnitude(a) == 0 or F32.magnitude(b) == 0 else mul(F32, a, b)


def _norm(fmt: Format, a: int, is_signed: bool) -> int:
    if fmt.is_nan(a):
        return 0
    limit = 32767 if is_signed else 65535
    low = -1 if is_signed else 0
    x = (
        Fraction(low if fmt.negative(a) else 1)
        if fmt.is_infinite(a)
        else clamp(fmt.value(a), Fraction(low), Fraction(1))
    )
    return round(x * limit) & M16


def _pack(low: int, high: int) -> int:
    return (low & M16) | (high & M16) << 16


def _rtz_f16(a: int) -> int:
    """f32 to f16 towards zero; a finite value never becomes infinity. NaN: any."""
    if F32.is_nan(a):
        return F16.quiet_nan
    sign = F32.negative(a) << 15
    if F32.is_infinite(a):
        return sign | F16.infinity
    x = abs(F32.value(a))
    if x == 0:
        return sign
    q = F16.quantum(x)
    return sign | min(F16._code(int(x / q) * q), F16.largest)


def _pack_rtz(a: int, b: int) -> int:
    return _rtz_f16(a) | _rtz_f16(b) << 16


def _cvt_pk_u8(a: int, b: int, c: int) -> int:
    x = (
        0
        if F32.is_nan(a)
        else (255 * (not F32.negative(a)) if F32.is_infinite(a) else clamp(round(F32.value(a)), 0, 255))
    )
    shift = 8 * (b & 3)
    return c & ~(255 << shift) & M32 | x << shift


def _floor_i32(a: int, offset: int) -> int:
    """floor(x + offset) as an integer; the sum is rounded to f32."""
    total = add(F32, a, offset)
    return (
        to_integer(
            F32, F32.quiet_nan if total == NAN else int(round_integral(F32, int(total), "floor")), -(2**31), 2**31 - 1
        )
        & M32
        if total != NAN
        else 0
    )


def _flush(a: int) -> int:
    return a & 0x80000000 if F32.is_denormal(a) else a


def _transcendental(fmt: Format, function: Callable[[Fraction], Fraction | str], a: int, flush: bool) -> int | str:
    """A function of the exact value, with denormals flushed on both sides where the hardware does."""
    a = _flush(a) if flush else a
    if fmt.is_nan(a):
        return NAN
    sign = 1 << (fmt.bits - 1)
    x = function(a)
    if isinstance(x, str):
        return {"nan": NAN, "inf": fmt.infinity, "-inf": fmt.infinity | sign, "0": 0, "-0": sign}[x]
    result = fmt.round(x)
    return result & sign if flush and fmt.is_denormal(result) else result


def _mp(name: str, fmt: Format, a: int) -> Fraction | str:
    """exp2, log2, rcp, rsq, sqrt of a code by mpmath, special values named."""
    import mpmath

    mpmath.mp.prec = 200
    zero, negative = fmt.magnitude(a) == 0, fmt.negative(a)
    if name == "exp":
        if fmt.is_infinite(a):
            return "0" if negative else "inf"
        x = fmt.value(a)
        if x > 2000 or x < -2000:
            return "inf" if x > 0 else "0"
        return _fraction(mpmath.power(2, _mpf(x)))
    if name == "rcp":
        if zero or fmt.is_infinite(a):
            return ("-" if negative else "") + ("inf" if zero else "0")
        return 1 / fmt.value(a)
    if zero:
        return {"log": "-inf", "sqrt": "-0" if negative else "0", "rsq": "-inf" if negative else "inf"}[name]
    if negative:
        return NAN
    if fmt.is_infinite(a):
        return {"log": "inf", "sqrt": "inf", "rsq": "0"}[name]
    x = _mpf(fmt.value(a))
    return _fraction(
        {"log": lambda: mpmath.log(x, 2), "sqrt": lambda: mpmath.sqrt(x), "rsq": lambda: 1 / mpmath.sqrt(x)}[name]()
    )


def _mpf(x: Fraction) -> object:
    import mpmath

    return mpmath.mpf(x.numerator) / x.denominator


def _fraction(x: object) -> Fraction:
    sign, mantissa, exponent, _ = x._mpf_
    return Fraction(-int(mantissa) if sign else int(mantissa)) * Fraction(2) ** exponent


def _trig(name: str, fmt: Format, a: int) -> Fraction | str:
    import mpmath

    mpmath.mp.prec = 200
    if fmt.is_infinite(a):
        return NAN
    x = fmt.value(a)
    if abs(x) > 256:
        return "0" if name == "sin" else Fraction(1)
    if x == 0 and name == "sin":
        return "-0" if fmt.negative(a) else "0"
    turn = x - round(x)
    if name == "sin" and turn in (0, Fraction(1, 2), Fraction(-1, 2)):
        return "0"
    if name == "cos" and abs(turn) == Fraction(1, 4):
        return "0"
    angle = 2 * mpmath.pi * _mpf(turn)
    return _fraction(mpmath.sin(angle) if name == "sin" else mpmath.cos(angle))


def _math_cases() -> list[Case]:
    cases = []
    for name in ("exp", "log", "rcp", "rsq", "sqrt"):
        f32 = functools.partial(_mp, name, F32)
        f16 = functools.partial(_mp, name, F16)
        cases.append(Case(f"v_{name}_f32", "f=f", functools.partial(_call, F32, f32, True), ulps=1))
        cases.append(Case(f"v_{name}_f16", "h=h", functools.partial(_call, F16, f16, False), ulps=1))
    for name in ("sin", "cos"):
        f32 = functools.partial(_trig, name, F32)
        f16 = functools.partial(_trig, name, F16)
        cases.append(Case(f"v_{name}_f32", "f=f", functools.partial(_call, F32, f32, True), ulps=1))
        cases.append(Case(f"v_{name}_f16", "h=h", functools.partial(_call, F16, f16, False), ulps=1))
    cases.append(
        Case("v_rcp_iflag_f32", "f=f", functools.partial(_call, F32, functools.partial(_mp, "rcp", F32), True), ulps=1)
    )
    for name in ("rcp", "rsq", "sqrt"):
        f64 = functools.partial(_mp, name, F64)
        cases.append(Case(f"v_{name}_f64", "d=d", functools.partial(_call, F64, f64, False), ulps=1))
    return cases


def _call(fmt: Format, function: Callable[[int], Fraction | str], flush: bool, a: int) -> int | str:
    return _transcendental(fmt, function, a, flush)


def _float_cases(fmt: Format, k: str, suffix: str) -> list[Case]:
    """The operations that f32 and f16 share."""
    partial = functools.partial
    return [
        Case(f"v_add_{suffix}", f"{k}={k}{k}", partial(add, fmt)),
        Case(f"v_sub_{suffix}", f"{k}={k}{k}", lambda a, b: add(fmt, a, negate(fmt, b))),
        Case(f"v_subrev_{suffix}", f"{k}={k}{k}", lambda a, b: add(fmt, b, negate(fmt, a))),
        Case(f"v_mul_{suffix}", f"{k}={k}{k}", partial(mul, fmt)),
        Case(f"v_min_{suffix}", f"{k}={k}{k}", partial(minimum_number, fmt)),
        Case(f"v_max_{suffix}", f"{k}={k}{k}", partial(minimum_number, fmt, largest=True)),
        Case(f"v_min3_{suffix}", f"{k}={k}{k}{k}", lambda *x: _fold(fmt, minimum_number, x)),
        Case(f"v_max3_{suffix}", f"{k}={k}{k}{k}", lambda *x: _fold(fmt, minimum_number, x, True)),
        Case(f"v_med3_{suffix}", f"{k}={k}{k}{k}", partial(_median_float, fmt)),
        Case(f"v_fma_{suffix}", f"{k}={k}{k}{k}", partial(fma, fmt)),
        Case(f"v_fract_{suffix}", f"{k}={k}", partial(_fract, fmt)),
        Case(f"v_frexp_mant_{suffix}", f"{k}={k}", lambda a: _frexp(fmt, a)[0]),
        *(
            Case(f"v_{how}_{suffix}", f"{k}={k}", partial(round_integral, fmt, how=how))
            for how in ("trunc", "ceil", "floor", "rndne")
        ),
    ]


def _with_flags(cases: Sequence[Case], **flags: object) -> list[Case]:
    return [dataclasses.replace(case, **flags) for case in cases]


# Operations introduced with op_sel in gfx9 keep the other half of a 16-bit destination; the older ones clear it
# (LLVM, zeroesHigh16BitsOfDest).
KEEPS_HIGH = {
    "v_fma_f16", "v_mad_u16", "v_mad_i16", "v_div_fixup_f16", "v_min3_f16", "v_max3_f16", "v_med3_f16", "v_min3_u16",
    "v_max3_u16",
    "v_med3_u16", "v_min3_i16", "v_max3_i16", "v_med3_i16", "v_add_i16", "v_sub_i16",
}  # fmt: skip

VALU: list[Case] = [
    # ---- moves and bits
    Case("v_mov_b32", "i=i", lambda a: a),
    Case("v_not_b32", "i=i", lambda a: ~a & M32),
    Case("v_bfrev_b32", "i=i", lambda a: int(f"{a:032b}"[::-1], 2)),
    Case("v_ffbh_u32", "i=i", lambda a: 32 - a.bit_length() if a else M32),
    Case("v_ffbl_b32", "i=i", lambda a: (a & -a).bit_length() - 1 if a else M32),
    Case("v_ffbh_i32", "i=i", lambda a: next((n for n in range(1, 32) if a >> (31 - n) & 1 != a >> 31), M32)),
    Case("v_sat_pk_u8_i16", "i=i", lambda a: sum(clamp(x, 0, 255) << (8 * k) for k, x in enumerate(_signed_halves(a)))),
    Case("v_and_b32", "i=ii", lambda a, b: a & b),
    Case("v_or_b32", "i=ii", lambda a, b: a | b),
    Case("v_xor_b32", "i=ii", lambda a, b: a ^ b),
    Case("v_xnor_b32", "i=ii", lambda a, b: ~(a ^ b) & M32),
    Case("v_lshlrev_b32", "i=ii", lambda a, b: b << _shift(a) & M32),
    Case("v_lshrrev_b32", "i=ii", lambda a, b: b >> _shift(a)),
    Case("v_ashrrev_i32", "i=ii", lambda a, b: signed(b) >> _shift(a) & M32),
    Case("v_bfm_b32", "i=ii", lambda a, b: ((1 << _shift(a)) - 1) << _shift(b) & M32),
    Case("v_bcnt_u32_b32", "i=ii", lambda a, b: (a.bit_count() + b) & M32),
    Case("v_and_or_b32", "i=iii", lambda a, b, c: a & b | c),
    Case("v_or3_b32", "i=iii", lambda a, b, c: a | b | c),
    Case("v_bfi_b32", "i=iii", lambda a, b, c: sum(((b if a >> n & 1 else c) >> n & 1) << n for n in range(32))),
    Case("v_bfe_u32", "i=iii", lambda a, b, c: a >> _shift(b) & ((1 << _shift(c)) - 1)),
    Case("v_bfe_i32", "i=iii", _bfe_i32),
    Case(
        "v_perm_b32",
        "i=iii",
        _perm,
        values=(FEW_INTEGERS, FEW_INTEGERS, (0x03020100, 0x07060504, 0x0B0A0908, 0x0F0E0D0C, 0xFF800706)),
    ),
    Case("v_alignbit_b32", "i=iii", lambda a, b, c: (a << 32 | b) >> _shift(c) & M32),
    Case("v_alignbyte_b32", "i=iii", lambda a, b, c: (a << 32 | b) >> 8 * (c & 3) & M32),
    Case("v_lshl_or_b32", "i=iii", lambda a, b, c: (a << _shift(b) | c) & M32),
    Case("v_xad_u32", "i=iii", lambda a, b, c: ((a ^ b) + c) & M32),
    # ---- 32-bit integers
    Case("v_add_u32", "i=ii", lambda a, b: (a + b) & M32),
    Case("v_sub_u32", "i=ii", lambda a, b: (a - b) & M32),
    Case("v_subrev_u32", "i=ii", lambda a, b: (b - a) & M32),
    Case("v_add_i32", "i=ii", lambda a, b: (a + b) & M32),
    Case("v_sub_i32", "i=ii", lambda a, b: (a - b) & M32),
    Case("v_add_u32", "i=ii", lambda a, b: min(a + b, M32), tail="clamp"),
    Case("v_sub_u32", "i=ii", lambda a, b: max(a - b, 0), tail="clamp"),
    Case("v_add_i32", "i=ii", lambda a, b: clamp(signed(a) + signed(b), -(2**31), 2**31 - 1) & M32, tail="clamp"),
    Case("v_sub_i32", "i=ii", lambda a, b: clamp(signed(a) - signed(b), -(2**31), 2**31 - 1) & M32, tail="clamp"),
    Case("v_mul_lo_u32", "i=ii", lambda a, b: a * b & M32),
    Case("v_mul_hi_u32", "i=ii", lambda a, b: a * b >> 32),
    Case("v_mul_hi_i32", "i=ii", lambda a, b: signed(a) * signed(b) >> 32 & M32),
    Case("v_mul_u32_u24", "i=ii", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) & M32),
    Case("v_mul_hi_u32_u24", "i=ii", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32),
    Case("v_mul_i32_i24", "i=ii", lambda a, b: signed(a, 24) * signed(b, 24) & M32),
    Case("v_mul_hi_i32_i24", "i=ii", lambda a, b: signed(a, 24) * signed(b, 24) >> 32 & M32),
    Case("v_min_u32", "i=ii", min),
    Case("v_max_u32", "i=ii", max),
    Case("v_min_i32", "i=ii", lambda a, b: min(signed(a), signed(b)) & M32),
    Case("v_max_i32", "i=ii", lambda a, b: max(signed(a), signed(b)) & M32),
    Case("v_add3_u32", "i=iii", lambda a, b, c: (a + b + c) & M32),
    Case("v_add_lshl_u32", "i=iii", lambda a, b, c: (a + b) << _shift(c) & M32),
    Case("v_lshl_add_u32", "i=iii", lambda a, b, c: ((a << _shift(b)) + c) & M32),
    Case("v_mad_u32_u24", "i=iii", lambda a, b, c: ((a & 0xFFFFFF) * (b & 0xFFFFFF) + c) & M32),
    Case("v_mad_i32_i24", "i=iii", lambda a, b, c: (signed(a, 24) * signed(b, 24) + c) & M32),
    Case("v_mad_u32_u16", "i=iii", lambda a, b, c: ((a & M16) * (b & M16) + c) & M32),
    Case("v_mad_i32_i16", "i=iii", lambda a, b, c: (signed(a, 16) * signed(b, 16) + c) & M32),
    Case("v_min3_u32", "i=iii", min),
    Case("v_max3_u32", "i=iii", max),
    Case("v_med3_u32", "i=iii", lambda *x: _median(x)),
    Case("v_min3_i32", "i=iii", lambda *x: min(map(signed, x)) & M32),
    Case("v_max3_i32", "i=iii", lambda *x: max(map(signed, x)) & M32),
    Case("v_med3_i32", "i=iii", lambda *x: _median([signed(y) for y in x]) & M32),
    Case("v_sad_u32", "i=iii", lambda a, b, c: (abs(a - b) + c) & M32),
    Case(
        "v_sad_u16",
        "i=iii",
        lambda a, b, c: (sum(abs(x - y) for x, y in zip(_halves(a), _halves(b), strict=True)) + c) & M32,
    ),
    Case(
        "v_sad_u8",
        "i=iii",
        lambda a, b, c: (sum(abs(x - y) for x, y in zip(_bytes(a), _bytes(b), strict=True)) + c) & M32,
    ),
    Case(
        "v_sad_hi_u8",
        "i=iii",
        lambda a, b, c: ((sum(abs(x - y) for x, y in zip(_bytes(a), _bytes(b), strict=True)) << 16) + c) & M32,
    ),
    Case(
        "v_lerp_u8",
        "i=iii",
        lambda a, b, c: sum(
            ((x + y + (z & 1)) >> 1) << (8 * k)
            for k, (x, y, z) in enumerate(zip(_bytes(a), _bytes(b), _bytes(c), strict=True))
        ),
    ),
    Case("v_dot4_i32_i8", "i=iii", lambda a, b, c: _dot(_signed_bytes(a), _signed_bytes(b), c)),
    Case("v_dot4_u32_u8", "i=iii", lambda a, b, c: _dot(_bytes(a), _bytes(b), c)),
    Case(
        "v_dot8_i32_i4",
        "i=iii",
        lambda a, b, c: _dot([signed(x, 4) for x in _nibbles(a)], [signed(x, 4) for x in _nibbles(b)], c),
    ),
    Case("v_dot8_u32_u4", "i=iii", lambda a, b, c: _dot(_nibbles(a), _nibbles(b), c)),
    Case("v_dot2_i32_i16", "i=iii", lambda a, b, c: _dot(_signed_halves(a), _signed_halves(b), c)),
    Case("v_dot2_u32_u16", "i=iii", lambda a, b, c: _dot(_halves(a), _halves(b), c)),
    Case("v_dot4c_i32_i8", "i=iii", lambda a, b, c: _dot(_signed_bytes(a), _signed_bytes(b), c), accumulates=True),
    Case(
        "v_dot8c_i32_i4",
        "i=iii",
        lambda a, b, c: _dot([signed(x, 4) for x in _nibbles(a)], [signed(x, 4) for x in _nibbles(b)], c),
        accumulates=True,
    ),
    Case("v_dot2c_i32_i16", "i=iii", lambda a, b, c: _dot(_signed_halves(a), _signed_halves(b), c), accumulates=True),
    # ---- f32
    *_float_cases(F32, "f", "f32"),
    Case("v_fmac_f32", "f=fff", functools.partial(fma, F32), accumulates=True),
    Case("v_mul_legacy_f32", "f=ff", _legacy_mul),
    Case("v_ldexp_f32", "f=fi", lambda a, n: _ldexp(F32, a, signed(n))),
    Case("v_minimum3_f32", "f=fff", lambda *x: _fold(F32, minimum, x)),
    Case("v_maximum3_f32", "f=fff", lambda *x: _fold(F32, minimum, x, True)),
    Case("v_frexp_exp_i32_f32", "i=f", lambda a: _frexp(F32, a)[1] & M32),
    # ---- conversions
    Case("v_cvt_f32_i32", "f=i", lambda a: F32.round(Fraction(signed(a)))),
    Case("v_cvt_f32_u32", "f=i", lambda a: F32.round(Fraction(a))),
    Case("v_cvt_i32_f32", "i=f", lambda a: to_integer(F32, a, -(2**31), 2**31 - 1) & M32),
    Case("v_cvt_rpi_i32_f32", "i=f", lambda a: _floor_i32(a, F32.round(Fraction(1, 2)))),
    Case("v_cvt_flr_i32_f32", "i=f", lambda a: _floor_i32(a, 0)),
    Case("v_cvt_u32_f32", "i=f", lambda a: to_integer(F32, a, 0, M32)),
    *(
        Case(f"v_cvt_f32_ubyte{n}", "f=i", functools.partial(lambda n, a: F32.round(Fraction(a >> 8 * n & 255)), n))
        for n in range(4)
    ),
    Case("v_cvt_off_f32_i4", "f=i", lambda a: F32.round(Fraction(signed(a, 4), 16))),
    Case("v_cvt_f32_bf16", "f=i", lambda a: (a & M16) << 16),
    Case("v_cvt_f32_f16", "f=h", functools.partial(convert, F16, F32)),
    Case("v_cvt_pk_u16_u32", "i=ii", lambda a, b: _pack(min(a, M16), min(b, M16))),
    Case(
        "v_cvt_pk_i16_i32", "i=ii", lambda a, b: _pack(clamp(signed(a), -32768, 32767), clamp(signed(b), -32768, 32767))
    ),
    Case("v_cvt_pknorm_i16_f32", "i=ff", lambda a, b: _pack(_norm(F32, a, True), _norm(F32, b, True))),
    Case("v_cvt_pknorm_u16_f32", "i=ff", lambda a, b: _pack(_norm(F32, a, False), _norm(F32, b, False))),
    Case("v_cvt_pk_u8_f32", "i=fii", _cvt_pk_u8),
    Case("v_cvt_pkrtz_f16_f32", "i=ff", _pack_rtz, values=(FLOATS[:-3], FLOATS[:-3])),
    # ---- 64 bits
    Case("v_mov_b64", "q=q", lambda a: a),
    Case("v_lshlrev_b64", "q=iq", lambda a, b: b << _shift(a, 64) & M64),
    Case("v_lshrrev_b64", "q=iq", lambda a, b: b >> _shift(a, 64)),
    Case("v_ashrrev_i64", "q=iq", lambda a, b: signed(b, 64) >> _shift(a, 64) & M64),
    Case(
        "v_lshl_add_u64",
        "q=qiq",
        lambda a, b, c: ((a << b) + c) & M64,
        values=(OPERANDS["q"].values, (0, 1, 2, 3, 4), OPERANDS["q"].values),
    ),
    Case("v_add_f64", "d=dd", functools.partial(add, F64)),
    Case("v_mul_f64", "d=dd", functools.partial(mul, F64)),
    Case("v_min_f64", "d=dd", functools.partial(minimum_number, F64)),
    Case("v_max_f64", "d=dd", functools.partial(minimum_number, F64, largest=True)),
    Case("v_fma_f64", "d=ddd", functools.partial(fma, F64)),
    Case("v_ldexp_f64", "d=di", lambda a, n: _ldexp(F64, a, signed(n))),
    *(
        Case(f"v_{how}_f64", "d=d", functools.partial(round_integral, F64, how=how))
        for how in ("trunc", "ceil", "floor", "rndne")
    ),
    Case("v_fract_f64", "d=d", functools.partial(_fract, F64)),
    Case("v_frexp_mant_f64", "d=d", lambda a: _frexp(F64, a)[0]),
    Case("v_frexp_exp_i32_f64", "i=d", lambda a: _frexp(F64, a)[1] & M32),
    Case("v_cvt_f64_i32", "d=i", lambda a: F64.round(Fraction(signed(a)))),
    Case("v_cvt_f64_u32", "d=i", lambda a: F64.round(Fraction(a))),
    Case("v_cvt_f64_f32", "d=f", functools.partial(convert, F32, F64)),
    Case("v_cvt_f32_f64", "f=d", functools.partial(convert, F64, F32)),
    Case("v_cvt_i32_f64", "i=d", lambda a: to_integer(F64, a, -(2**31), 2**31 - 1) & M32),
    Case("v_cvt_u32_f64", "i=d", lambda a: to_integer(F64, a, 0, M32)),
    # ---- 16 bits
    Case("v_add_u16", "b=bb", lambda a, b: (a + b) & M16),
    Case("v_sub_u16", "b=bb", lambda a, b: (a - b) & M16),
    Case("v_subrev_u16", "b=bb", lambda a, b: (b - a) & M16),
    Case("v_add_i16", "b=bb", lambda a, b: (a + b) & M16),
    Case("v_sub_i16", "b=bb", lambda a, b: (a - b) & M16),
    Case("v_mul_lo_u16", "b=bb", lambda a, b: a * b & M16),
    Case("v_lshlrev_b16", "b=bb", lambda a, b: b << (a & 15) & M16),
    Case("v_lshrrev_b16", "b=bb", lambda a, b: b >> (a & 15)),
    Case("v_ashrrev_i16", "b=bb", lambda a, b: signed(b, 16) >> (a & 15) & M16),
    Case("v_max_u16", "b=bb", max),
    Case("v_min_u16", "b=bb", min),
    Case("v_max_i16", "b=bb", lambda a, b: max(signed(a, 16), signed(b, 16)) & M16),
    Case("v_min_i16", "b=bb", lambda a, b: min(signed(a, 16), signed(b, 16)) & M16),
    Case("v_mad_u16", "b=bbb", lambda a, b, c: (a * b + c) & M16),
    Case("v_mad_i16", "b=bbb", lambda a, b, c: (signed(a, 16) * signed(b, 16) + signed(c, 16)) & M16),
    Case("v_mad_legacy_u16", "b=bbb", lambda a, b, c: (a * b + c) & M16),
    Case("v_mad_legacy_i16", "b=bbb", lambda a, b, c: (signed(a, 16) * signed(b, 16) + signed(c, 16)) & M16),
    Case("v_min3_u16", "b=bbb", min),
    Case("v_max3_u16", "b=bbb", max),
    Case("v_med3_u16", "b=bbb", lambda *x: _median(x)),
    Case("v_min3_i16", "b=bbb", lambda *x: min(signed(y, 16) for y in x) & M16),
    Case("v_max3_i16", "b=bbb", lambda *x: max(signed(y, 16) for y in x) & M16),
    Case("v_med3_i16", "b=bbb", lambda *x: _median([signed(y, 16) for y in x]) & M16),
    *_float_cases(F16, "h", "f16"),
    Case("v_fma_legacy_f16", "h=hhh", functools.partial(fma, F16)),
    Case("v_ldexp_f16", "h=hb", lambda a, n: _ldexp(F16, a, signed(n, 16))),
    Case("v_frexp_exp_i16_f16", "b=h", lambda a: _frexp(F16, a)[1] & M16),
    Case("v_cvt_f16_u16", "h=b", lambda a: F16.round(Fraction(a))),
    Case("v_cvt_f16_i16", "h=b", lambda a: F16.round(Fraction(signed(a, 16)))),
    Case("v_cvt_u16_f16", "b=h", lambda a: to_integer(F16, a, 0, M16)),
    Case("v_cvt_i16_f16", "b=h", lambda a: to_integer(F16, a, -32768, 32767) & M16),
    Case("v_cvt_norm_i16_f16", "b=h", lambda a: _norm(F16, a, True)),
    Case("v_cvt_norm_u16_f16", "b=h", lambda a: _norm(F16, a, False)),
    Case("v_cvt_f16_f32", "h=f", functools.partial(convert, F32, F16)),
    *_math_cases(),
]
VALU = [dataclasses.replace(case, keeps_high=case.name in KEEPS_HIGH) for case in VALU]
COVERED = tuple(case.name for case in VALU)


def _columns(case: Case) -> list[np.ndarray]:
    """The operand values of a case, one array a source."""
    if case.values is not None:
        return cross(*case.values)
    kinds = [OPERANDS[k] for k in case.sources]
    return cross(*[kind.few if len(kinds) == 3 else kind.values for kind in kinds])


def _run_case(case: Case, columns: list[np.ndarray], exec_mask: int) -> list[int]:
    """Results of the destination a lane (whole registers, so 16-bit results show both halves)."""
    v: dict[int, object] = {}
    texts = []
    width = OPERANDS[case.result].words
    for i, (kind, column) in enumerate(zip(case.sources, columns, strict=True)):
        first = 10 if case.accumulates and i == len(columns) - 1 else 20 + 2 * i
        if kind in "hb":
            column = column | HIGH_HALF << 16
        v[first] = (column & M32).astype(np.uint32)
        if OPERANDS[kind].words == 2:
            v[first + 1] = (column.astype(np.uint64) >> np.uint64(32)).astype(np.uint32)
        if first != 10:
            texts.append(registers("v", first, OPERANDS[kind].words))
    if not case.accumulates:
        v[10] = v[11] = SENTINEL
    line = f"{case.name} {registers('v', 10, width)}, {', '.join(texts)} {case.tail}".rstrip()
    out = run([line], v=v, out_v=range(10, 10 + width), exec_mask=exec_mask)
    low = out.v["v10"].astype(np.uint64)
    if width == 2:
        low |= out.v["v11"].astype(np.uint64) << np.uint64(32)
    return [int(x) for x in low]


def _old_value(case: Case, columns: list[np.ndarray], lane: int) -> int:
    if case.accumulates:
        return int(columns[-1][lane]) | (HIGH_HALF << 16 if case.sources[-1] in "hb" else 0)
    return SENTINEL | (SENTINEL << 32 if OPERANDS[case.result].words == 2 else 0)


def _matches(case: Case, got: int, want: int | str) -> bool:
    fmt = OPERANDS[case.result].fmt
    if fmt is None:
        return got == want
    if case.ulps and want != NAN and not fmt.is_nan(want) and not fmt.is_nan(got):
        return fmt.negative(got) == fmt.negative(want) and abs(fmt.magnitude(got) - fmt.magnitude(want)) <= case.ulps
    return same(fmt, got, want)


@pytest.mark.parametrize("case", VALU, ids=lambda case: f"{case.name}{'_' + case.tail if case.tail else ''}")
def test_every_operation_matches_its_definition(case: Case) -> None:
    columns = _columns(case)
    half = case.result in "hb"
    for exec_mask in (ALL_LANES, PARTIAL_EXEC):
        got = _run_case(case, columns, exec_mask)
        for lane, value in enumerate(got):
            old = _old_value(case, columns, lane)
            sources = [int(column[lane]) for column in columns]
            if not exec_mask >> lane % LANES & 1:
                assert value == old, f"lane {lane} is off in EXEC and was written"
                continue
            want = case.expect(*sources)
            result = value & M16 if half else value
            text = want if isinstance(want, str) else hex(want)
            assert _matches(case, result, want), f"{case.name}{tuple(map(hex, sources))} = {result:#x}, expected {text}"
            if half:
                high = old >> 16 if case.keeps_high else 0
                assert value >> 16 == high, f"{case.name}: high half {value >> 16:#x}, expected {high:#x}"


# Constants worked out by hand, independent of the definitions above.
HAND = [
    ("v_add_f32", (0x3F800000, 0x33800000), 0x3F800000),  # 1 + 2^-24: a tie, to even
    ("v_add_f32", (0x3F800001, 0x33800000), 0x3F800002),  # the next: a tie, away to even
    ("v_mul_f32", (0x00800000, 0x3F000000), 0x00400000),  # a denormal result is kept
    ("v_fma_f32", (0x3F800001, 0x3F800001, 0xBF800002), 0x28800000),  # the product is not rounded
    ("v_cvt_i32_f32", (0xCF000001,), 0x80000000),  # below -2^31: saturates
    ("v_cvt_u32_f32", (0xBF800000,), 0),
    ("v_perm_b32", (0x11223344, 0x55667788, 0x0C0D0400), 0x00FF4488),
    ("v_alignbit_b32", (1, 0, 33), 0x80000000),  # only five bits of the shift count
    ("v_bfe_i32", (0x00000080, 4, 4), 0xFFFFFFF8),
    ("v_bfe_u32", (0xFFFFFFFF, 0, 0), 0),
    ("v_mad_u32_u24", (0xFF000002, 0xFF000003, 1), 7),  # the top bytes of the factors do not count
    ("v_exp_f32", (0x40400000,), 0x41000000),  # 2^3
    ("v_exp_f32", (0xC3160000,), 0),  # 2^-150 is flushed
    ("v_log_f32", (0x42000000,), 0x40A00000),  # log2(32)
    ("v_log_f32", (0x00000001,), 0xFF800000),  # a denormal counts as zero
    ("v_rcp_f32", (0x40800000,), 0x3E800000),
    ("v_rcp_f32", (0x80000000,), 0xFF800000),
    ("v_rcp_f32", (0x7F000000,), 0),  # 2^-127 is flushed
    ("v_sqrt_f32", (0x41100000,), 0x40400000),
    ("v_sqrt_f32", (0x80000000,), 0x80000000),
    ("v_rsq_f32", (0x40800000,), 0x3F000000),
    ("v_sin_f32", (0x3E800000,), 0x3F800000),  # a quarter turn
    ("v_cos_f32", (0x3F000000,), 0xBF800000),  # half a turn
    ("v_max_f32", (0x7FC00000, 0xBF800000), 0xBF800000),
    ("v_max_f32", (0x80000000, 0x00000000), 0x00000000),
    ("v_ldexp_f32", (0x3F800000, 0xFFFFFF6B), 0x00000001),  # 2^-149
    ("v_mul_hi_i32", (0x80000000, 0xFFFFFFFF), 0),
    ("v_sad_u8", (0x01020304, 0x04030201, 10), 18),
]  # fmt: skip


@pytest.mark.parametrize("name, sources, want", HAND)
def test_hand_worked_values(name: str, sources: tuple[int, ...], want: int) -> None:
    texts = ", ".join(f"v{20 + i}" for i in range(len(sources)))
    out = run([f"{name} v10, {texts}"], v={20 + i: x for i, x in enumerate(sources)}, out_v=[10])
    assert [int(x) for x in out.v["v10"]] == [want] * LANES


@covers("v_fmaak_f32", "v_fmamk_f32")
def test_fma_with_a_literal() -> None:
    """v_fmaak adds the literal, v_fmamk multiplies the first source by it."""
    a, b = cross(FEW_FLOATS, FEW_FLOATS)
    literal = 0x40490FDB
    out = run(
        [f"v_fmaak_f32 v10, v20, v21, {literal:#x}", f"v_fmamk_f32 v11, v20, {literal:#x}, v21"],
        v={20: a, 21: b},
        out_v=[10, 11],
    )
    for x, y, added, multiplied in zip(
        a.tolist(), b.tolist(), out.v["v10"].tolist(), out.v["v11"].tolist(), strict=True
    ):
        assert same(F32, added, fma(F32, x, y, literal)), f"v_fmaak({x:#x}, {y:#x}) = {added:#x}"
        assert same(F32, multiplied, fma(F32, x, literal, y)), f"v_fmamk({x:#x}, {y:#x}) = {multiplied:#x}"


def test_division_helper_of_the_references() -> None:
    """The reference division itself, against the host's f32 division."""
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, 2**32, 2000, dtype=np.uint32), rng.integers(0, 2**32, 2000, dtype=np.uint32)
    with np.errstate(all="ignore"):
        want = (a.view(np.float32) / b.view(np.float32)).view(np.uint32)
    for x, y, z in zip(a.tolist(), b.tolist(), want.tolist(), strict=True):
        assert same(F32, z, divide(F32, x, y))
