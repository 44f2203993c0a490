# SPDX-License-Identifier: Apache-2.0
"""Definitions of number formats and arithmetic in exact integers and fractions, for the instruction tests.

Nothing here shares code with the simulator: values are `fractions.Fraction`, rounding is spelled out, NaNs compare as
a class.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

M16, M32, M64 = 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def signed(x: int, bits: int = 32) -> int:
    """Two's complement value of the low `bits` bits."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def clamp(x: int, low: int, high: int) -> int:
    """The nearest integer of [low, high]."""
    return max(low, min(high, x))


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary format: sign, ebits, mbits. `ieee`: the top exponent holds infinity and NaN; else `nan_codes` and
    saturation.
    """

    name: str
    ebits: int
    mbits: int
    ieee: bool = True
    nan_codes: tuple[int, ...] = ()  # magnitudes

    @property
    def bits(self) -> int:
        return 1 + self.ebits + self.mbits

    @property
    def bias(self) -> int:
        return (1 << (self.ebits - 1)) - 1

    @property
    def emin(self) -> int:
        return 1 - self.bias

    @property
    def infinity(self) -> int:
        return ((1 << self.ebits) - 1) << self.mbits

    @property
    def quiet_nan(self) -> int:
        return self.infinity | 1 << (self.mbits - 1)

    @property
    def largest(self) -> int:
        """Magnitude code of the largest finite value."""
        if self.ieee:
            return self.infinity - 1
        top = (1 << (self.ebits + self.mbits)) - 1
        return top - len(self.nan_codes)

    def negative(self, code: int) -> bool:
        return bool(code >> (self.bits - 1) & 1)

    def magnitude(self, code: int) -> int:
        return code & ((1 << (self.bits - 1)) - 1)

    def is_nan(self, code: int) -> bool:
        m = self.magnitude(code)
        return m > self.infinity if self.ieee else m in self.nan_codes

    def is_infinite(self, code: int) -> bool:
        return self.ieee and self.magnitude(code) == self.infinity

    def is_denormal(self, code: int) -> bool:
        return 0 < self.magnitude(code) < 1 << self.mbits

    def value(self, code: int) -> Fraction:
        """Exact value of a finite code."""
        assert not self.is_nan(code) and not self.is_infinite(code)
        m = self.magnitude(code)
        e, f = m >> self.mbits, m & ((1 << self.mbits) - 1)
        scale = Fraction(2) ** (max(e, 1) - self.bias - self.mbits)
        x = (f + ((1 << self.mbits) if e else 0)) * scale
        return -x if self.negative(code) else x

    def round(self, x: Fraction, negative_zero: bool = False) -> int:
        """Code of x rounded to nearest even; too large: infinity (IEEE formats only)."""
        sign = (x < 0 or (x == 0 and negative_zero)) << (self.bits - 1)
        return sign | self.round_magnitude(abs(x))

    def quantum(self, a: Fraction) -> Fraction:
        """Distance of neighbouring values around a > 0, as if the exponent had no upper end."""
        e = a.numerator.bit_length() - a.denominator.bit_length()
        if Fraction(2) ** e > a:
            e -= 1
        return Fraction(2) ** (max(e, self.emin) - self.mbits)

    def round_magnitude(self, a: Fraction) -> int:
        if a == 0:
            return 0
        n = round(a / self.quantum(a))  # Python rounds fractions half to even
        return self._code(n * self.quantum(a))

    def _code(self, a: Fraction) -> int:
        """Magnitude code of a value that is exact in the format, its exponent unbounded above; infinity beyond the
        largest.
        """
        if a == 0:
            return 0
        q = self.quantum(a)
        n = int(a / q)
        e = q.numerator.bit_length() - q.denominator.bit_length() + self.mbits
        if n < 1 << self.mbits:
            return n
        code = ((e - self.emin + 1) << self.mbits) + (n - (1 << self.mbits))
        return min(code, self.infinity) if self.ieee else code


F16 = Format("f16", 5, 10)
BF16 = Format("bf16", 8, 7)
F32 = Format("f32", 8, 23)
F64 = Format("f64", 11, 52)
FP8 = Format("fp8", 4, 3, ieee=False, nan_codes=(0x7F,))
BF8 = Format("bf8", 5, 2)
FP6 = Format("fp6", 2, 3, ieee=False)
BF6 = Format("bf6", 3, 2, ieee=False)
FP4 = Format("fp4", 2, 1, ieee=False)
SMALL = {f.name: f for f in (FP8, BF8, FP6, BF6, FP4)}
WIDE = {f.name: f for f in (F16, BF16, F32)}

NAN = "nan"  # an expected value: any NaN of the format


def same(fmt: Format, got: int, want: int | str) -> bool:
    """Whether a result is the wanted one: equal bits, or both a NaN."""
    if want == NAN or fmt.is_nan(want):
        return fmt.is_nan(got)
    return got == want


def add(fmt: Format, a: int, b: int) -> int | str:
    """a + b, rounded to nearest even."""
    if fmt.is_nan(a) or fmt.is_nan(b):
        return NAN
    if fmt.is_infinite(a) or fmt.is_infinite(b):
        if fmt.is_infinite(a) and fmt.is_infinite(b) and a != b:
            return NAN
        return a if fmt.is_infinite(a) else b
    return fmt.round(fmt.value(a) + fmt.value(b), negative_zero=fmt.negative(a) and fmt.negative(b))


def negate(fmt: Format, a: int) -> int:
    return a ^ 1 << (fmt.bits - 1)


def mul(fmt: Format, a: int, b: int) -> int | str:
    """a * b, rounded to nearest even."""
    if fmt.is_nan(a) or fmt.is_nan(b):
        return NAN
    negative = fmt.negative(a) != fmt.negative(b)
    if fmt.is_infinite(a) or fmt.is_infinite(b):
        if fmt.magnitude(a) == 0 or fmt.magnitude(b) == 0:
            return NAN
        return negative << (fmt.bits - 1) | fmt.infinity
    return fmt.round(fmt.value(a) * fmt.value(b), negative_zero=negative)


def fma(fmt: Format, a: int, b: int, c: int) -> int | str:
    """a * b + c with one rounding."""
    if fmt.is_nan(a) or fmt.is_nan(b) or fmt.is_nan(c):
        return NAN
    negative = fmt.negative(a) != fmt.negative(b)
    if fmt.is_infinite(a) or fmt.is_infinite(b):
        product = mul(fmt, a, b)
        return NAN if product == NAN else add(fmt, product, c)
    if fmt.is_infinite(c):
        return c
    return fmt.round(fmt.value(a) * fmt.value(b) + fmt.value(c), negative_zero=negative and fmt.negative(c))


def order(fmt: Format, a: int) -> tuple[Fraction | float, int]:
    """Key of the total order of numbers, -0 below +0, infinities included."""
    if fmt.is_infinite(a):
        return (-math.inf if fmt.negative(a) else math.inf, 0)
    return (fmt.value(a), 0 if fmt.negative(a) else 1)


def is_signalling(fmt: Format, a: int) -> bool:
    return fmt.is_nan(a) and not a >> (fmt.mbits - 1) & 1


def minimum_number(fmt: Format, a: int, b: int, largest: bool = False) -> int | str:
    """IEEE 754-2008 minNum (maxNum): a number beats a quiet NaN; a signalling NaN gives NaN."""
    if is_signalling(fmt, a) or is_signalling(fmt, b) or (fmt.is_nan(a) and fmt.is_nan(b)):
        return NAN
    if fmt.is_nan(a):
        return b
    if fmt.is_nan(b):
        return a
    return (max if largest else min)((a, b), key=lambda x: order(fmt, x))


def minimum(fmt: Format, a: int, b: int, largest: bool = False) -> int | str:
    """IEEE 754-2019 minimum (maximum): a NaN wins."""
    if fmt.is_nan(a) or fmt.is_nan(b):
        return NAN
    return (max if largest else min)((a, b), key=lambda x: order(fmt, x))


def divide(fmt: Format, a: int, b: int) -> int | str:
    """a / b, rounded to nearest even."""
    if fmt.is_nan(a) or fmt.is_nan(b):
        return NAN
    negative = fmt.negative(a) != fmt.negative(b)
    sign = negative << (fmt.bits - 1)
    if fmt.is_infinite(a):
        return NAN if fmt.is_infinite(b) else sign | fmt.infinity
    if fmt.is_infinite(b):
        return sign
    if fmt.value(b) == 0:
        return NAN if fmt.value(a) == 0 else sign | fmt.infinity
    return fmt.round(fmt.value(a) / fmt.value(b), negative_zero=negative)


def convert(source: Format, target: Format, code: int) -> int | str:
    """A code of one IEEE format in another, rounded to nearest even."""
    if source.is_nan(code):
        return NAN
    sign = source.negative(code) << (target.bits - 1)
    if source.is_infinite(code):
        return sign | target.infinity
    return target.round(source.value(code), negative_zero=source.negative(code))


def to_integer(fmt: Format, a: int, low: int, high: int) -> int:
    """Truncated towards zero, saturated; NaN gives 0."""
    if fmt.is_nan(a):
        return 0
    if fmt.is_infinite(a):
        return low if fmt.negative(a) else high
    return clamp(math.trunc(fmt.value(a)), low, high)


def round_integral(fmt: Format, a: int, how: str) -> int | str:
    """trunc, ceil, floor or rndne, with the sign of zero kept."""
    if fmt.is_nan(a):
        return NAN
    if fmt.is_infinite(a):
        return a
    x = {"trunc": math.trunc, "ceil": math.ceil, "floor": math.floor, "rndne": round}[how](fmt.value(a))
    return fmt.round(Fraction(x), negative_zero=fmt.negative(a))


def small_code(fmt: Format, x: Fraction | str, negative: bool, saturate: bool = False) -> int:
    """Code of an exact value in a small format by OCP's rules as convert.h states them: x may be "nan" or "inf"."""
    sign = negative << (fmt.bits - 1)
    nan = {"fp8": 0x7F, "bf8": 0x7F}.get(fmt.name, fmt.largest)
    infinity = {"fp8": 0x7F, "bf8": 0x7C}.get(fmt.name, fmt.largest)
    if x == NAN:
        return sign | nan
    if x == "inf":
        return sign | infinity
    code = fmt.round_magnitude(abs(x))
    if code > fmt.largest:
        code = fmt.largest if saturate else infinity
    return sign | code
