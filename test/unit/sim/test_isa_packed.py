# SPDX-License-Identifier: Apache-2.0
"""Packed and mixed-precision vector instructions: op_sel, op_sel_hi, negations, both halves of every operation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from helpers.isa import ALL_LANES, FEW_FLOATS, HALVES, PARTIAL_EXEC, covers, cross, run
from helpers.isa_reference import (
    BF16,
    F16,
    F32,
    M16,
    NAN,
    Format,
    add,
    clamp,
    convert,
    fma,
    minimum,
    minimum_number,
    mul,
    negate,
    same,
    signed,
)

WORDS16 = (0, 1, 2, 15, 16, 17, 0x7F, 0xFF, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0xFFFE, 0x1234, 0x5A5A, 0xC001)
SENTINEL = 0xCAFE_F00D


def _fold16(op: Callable, largest: bool) -> Callable[[int, int, int], int | str]:
    def fold(a: int, b: int, c: int) -> int | str:
        first = op(F16, a, b, largest)
        return op(F16, F16.quiet_nan if first == NAN else first, c, largest)

    return fold


INTEGER: dict[str, tuple[int, Callable[..., int]]] = {
    "v_pk_add_u16": (2, lambda a, b: a + b),
    "v_pk_add_i16": (2, lambda a, b: a + b),
    "v_pk_sub_u16": (2, lambda a, b: a - b),
    "v_pk_sub_i16": (2, lambda a, b: a - b),
    "v_pk_mul_lo_u16": (2, lambda a, b: a * b),
    "v_pk_max_u16": (2, max),
    "v_pk_min_u16": (2, min),
    "v_pk_max_i16": (2, lambda a, b: max(signed(a, 16), signed(b, 16))),
    "v_pk_min_i16": (2, lambda a, b: min(signed(a, 16), signed(b, 16))),
    "v_pk_lshlrev_b16": (2, lambda a, b: b << (a & 15)),
    "v_pk_lshrrev_b16": (2, lambda a, b: b >> (a & 15)),
    "v_pk_ashrrev_i16": (2, lambda a, b: signed(b, 16) >> (a & 15)),
    "v_pk_mad_u16": (3, lambda a, b, c: a * b + c),
    "v_pk_mad_i16": (3, lambda a, b, c: signed(a, 16) * signed(b, 16) + signed(c, 16)),
}
CLAMPED: dict[str, Callable[[int, int], int]] = {
    "v_pk_add_u16": lambda a, b: min(a + b, M16),
    "v_pk_sub_u16": lambda a, b: max(a - b, 0),
    "v_pk_add_i16": lambda a, b: clamp(signed(a, 16) + signed(b, 16), -32768, 32767),
    "v_pk_sub_i16": lambda a, b: clamp(signed(a, 16) - signed(b, 16), -32768, 32767),
}
FLOAT: dict[str, tuple[int, Callable[..., int | str]]] = {
    "v_pk_add_f16": (2, lambda a, b: add(F16, a, b)),
    "v_pk_mul_f16": (2, lambda a, b: mul(F16, a, b)),
    "v_pk_min_f16": (2, lambda a, b: minimum_number(F16, a, b)),
    "v_pk_max_f16": (2, lambda a, b: minimum_number(F16, a, b, True)),
    "v_pk_fma_f16": (3, lambda a, b, c: fma(F16, a, b, c)),
    "v_pk_minimum3_f16": (3, _fold16(minimum, False)),
    "v_pk_maximum3_f16": (3, _fold16(minimum, True)),
}


def _halves(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


def _modifiers(count: int, sel: int, sel_hi: int, neg_lo: int = 0, neg_hi: int = 0) -> str:
    def bits(mask: int) -> str:
        return "[" + ",".join(str(mask >> k & 1) for k in range(count)) + "]"

    text = f"op_sel:{bits(sel)} op_sel_hi:{bits(sel_hi)}"
    return text + (f" neg_lo:{bits(neg_lo)} neg_hi:{bits(neg_hi)}" if neg_lo or neg_hi else "")


def _sources(count: int, values: tuple[int, ...]) -> list[np.ndarray]:
    """Operand words: the low halves take every combination, the high halves the same in reverse order."""
    columns = cross(*[values] * count)
    return [_halves(c, c[::-1]) for c in columns]


def _half(word: int, high: int) -> int:
    return word >> 16 if high else word & M16


@pytest.mark.parametrize("name", INTEGER)
def test_packed_integer_operations(name: str) -> None:
    count, function = INTEGER[name]
    words = _sources(count, WORDS16 if count == 2 else WORDS16[::2])
    all_bits = (1 << count) - 1
    for sel, sel_hi, mask in ((0, all_bits, ALL_LANES), (1, all_bits - 1, ALL_LANES), (all_bits, 0, PARTIAL_EXEC)):
        line = f"{name} v10, {', '.join(f'v{20 + k}' for k in range(count))} {_modifiers(count, sel, sel_hi)}"
        out = run([line], v={10: SENTINEL, **{20 + k: w for k, w in enumerate(words)}}, out_v=[10], exec_mask=mask)
        for lane, got in enumerate(out.v["v10"].tolist()):
            low = function(*[_half(int(w[lane]), sel >> k & 1) for k, w in enumerate(words)]) & M16
            high = function(*[_half(int(w[lane]), sel_hi >> k & 1) for k, w in enumerate(words)]) & M16
            want = low | high << 16 if mask >> lane % 64 & 1 else SENTINEL
            assert got == want, f"{line}: lane {lane}: {got:#x}, expected {want:#x}"


@pytest.mark.parametrize("name", CLAMPED)
def test_packed_integer_operations_saturate_with_clamp(name: str) -> None:
    words = _sources(2, WORDS16)
    out = run([f"{name} v10, v20, v21 clamp"], v={20: words[0], 21: words[1]}, out_v=[10])
    for lane, got in enumerate(out.v["v10"].tolist()):
        a, b = int(words[0][lane]), int(words[1][lane])
        want = CLAMPED[name](a & M16, b & M16) & M16 | (CLAMPED[name](a >> 16, b >> 16) & M16) << 16
        assert got == want, f"{name} clamp({a:#x}, {b:#x}) = {got:#x}, expected {want:#x}"


@pytest.mark.parametrize("name", FLOAT)
def test_packed_f16_operations(name: str) -> None:
    count, function = FLOAT[name]
    words = _sources(count, HALVES if count == 2 else HALVES[:14:2] + HALVES[15:16])
    all_bits = (1 << count) - 1
    for sel, sel_hi, neg_lo, neg_hi in ((0, all_bits, 0, 0), (1, all_bits - 1, 2, 1)):
        sources = ", ".join(f"v{20 + k}" for k in range(count))
        line = f"{name} v10, {sources} {_modifiers(count, sel, sel_hi, neg_lo, neg_hi)}"
        out = run([line], v={20 + k: w for k, w in enumerate(words)}, out_v=[10])
        for lane, got in enumerate(out.v["v10"].tolist()):
            for high, (pick, negated) in enumerate(((sel, neg_lo), (sel_hi, neg_hi))):
                operands = [_half(int(w[lane]), pick >> k & 1) ^ (negated >> k & 1) << 15 for k, w in enumerate(words)]
                want = function(*operands)
                assert same(F16, _half(got, high), want), (
                    f"{line}: {[hex(x) for x in operands]}: {_half(got, high):#x}, expected {want}"
                )


FLOAT_PAIRS: dict[str, tuple[int, Callable[..., int | str]]] = {
    "v_pk_add_f32": (2, lambda a, b: add(F32, a, b)),
    "v_pk_mul_f32": (2, lambda a, b: mul(F32, a, b)),
    "v_pk_fma_f32": (3, lambda a, b, c: fma(F32, a, b, c)),
}


@pytest.mark.parametrize("name", FLOAT_PAIRS)
def test_packed_f32_operations(name: str) -> None:
    count, function = FLOAT_PAIRS[name]
    columns = cross(*[FEW_FLOATS if count == 2 else FEW_FLOATS[::2]] * count)
    v = {}
    for k, column in enumerate(columns):
        v[20 + 2 * k], v[21 + 2 * k] = column, column[::-1]
    all_bits = (1 << count) - 1
    texts = ", ".join(f"v[{20 + 2 * k}:{21 + 2 * k}]" for k in range(count))
    for sel, sel_hi, neg_lo, neg_hi, mask in ((0, all_bits, 0, 0, ALL_LANES), (1, all_bits - 1, 2, 1, PARTIAL_EXEC)):
        line = f"{name} v[10:11], {texts} {_modifiers(count, sel, sel_hi, neg_lo, neg_hi)}"
        out = run([line], v={**v, 10: SENTINEL, 11: SENTINEL}, out_v=[10, 11], exec_mask=mask)
        for high, (pick, negated) in enumerate(((sel, neg_lo), (sel_hi, neg_hi))):
            for lane, got in enumerate(out.v[f"v{10 + high}"].tolist()):
                if not mask >> lane % 64 & 1:
                    assert got == SENTINEL
                    continue
                operands = [int(v[20 + 2 * k + (pick >> k & 1)][lane]) ^ (negated >> k & 1) << 31 for k in range(count)]
                want = function(*operands)
                assert same(F32, got, want), f"{line}: {[hex(x) for x in operands]}: {got:#x}, expected {want}"


@covers("v_pk_mov_b32")
def test_packed_move_picks_registers() -> None:
    v = {20: 1, 21: 2, 22: 3, 23: 4}
    for sel, sel_hi in itertools.product((0, 1, 2, 3), repeat=2):
        out = run([f"v_pk_mov_b32 v[10:11], v[20:21], v[22:23] {_modifiers(2, sel, sel_hi)}"], v=v, out_v=[10, 11])
        # The low result comes from the first source by op_sel[0], the high one from the second by op_sel[1].
        assert (int(out.v["v10"][0]), int(out.v["v11"][0])) == (1 + (sel & 1), 3 + (sel >> 1)), (sel, sel_hi)


@covers("v_pk_add_f32", "v_pk_mul_f32")
def test_packed_f32_takes_scalars_and_constants() -> None:
    """An SGPR pair gives both registers; an inline constant stands in both halves where op_sel_hi picks the low one."""
    out = run(
        ["v_pk_add_f32 v[10:11], v[20:21], s[30:31]", "v_pk_mul_f32 v[12:13], v[20:21], 2.0 op_sel_hi:[1,0]"],
        v={20: 0x3F800000, 21: 0x40000000},
        s={30: 0x3F800000, 31: 0x40400000},
        out_v=[10, 11, 12, 13],
    )
    assert [int(out.v[f"v{k}"][5]) for k in (10, 11, 12, 13)] == [0x40000000, 0x40A00000, 0x40000000, 0x40800000]


# Dot products of two f16 or bf16 pairs onto f32: small integers, so that every order of the sum is exact.
DOTS: dict[str, tuple[Format, bool]] = {
    "v_dot2_f32_f16": (F16, False),
    "v_dot2c_f32_f16": (F16, True),
    "v_dot2_f32_bf16": (BF16, False),
    "v_dot2c_f32_bf16": (BF16, True),
}


@covers(*DOTS)
def test_dot_products_of_pairs() -> None:
    rng = np.random.default_rng(11)
    a, b, c = (rng.integers(-40, 41, (128, 2)) for _ in range(3))
    for name, (fmt, accumulates) in DOTS.items():

        def word(pair: np.ndarray, fmt: Format = fmt) -> int:
            return fmt.round(Fraction(int(pair[0]))) | fmt.round(Fraction(int(pair[1]))) << 16

        wa, wb = np.array([word(p) for p in a], dtype=np.uint32), np.array([word(p) for p in b], dtype=np.uint32)
        start = np.array([F32.round(Fraction(int(p[0]))) for p in c], dtype=np.uint32)
        line = f"{name} v10, v20, v21" + ("" if accumulates else ", v22")
        out = run([line], v={20: wa, 21: wb, 22: start, 10: start}, out_v=[10])
        for lane, got in enumerate(out.v["v10"].tolist()):
            want = F32.round(Fraction(int((a[lane] * b[lane]).sum() + c[lane, 0])))
            assert got == want, f"{line}: lane {lane}: {got:#x}, expected {want:#x}"


@covers(*DOTS)
def test_dot_products_sum_in_the_documented_order() -> None:
    """2^24 - 2^24 + 1 shows the order: 1 where the third operand comes first, 0 where the products are summed first."""
    for name, (fmt, accumulates) in DOTS.items():
        big, one = fmt.round(Fraction(4096)), fmt.round(Fraction(1))
        word = big | one << 16
        c = F32.round(Fraction(-(2**24)))
        line = f"{name} v10, v20, v20" + ("" if accumulates else ", v22")
        out = run([line], v={20: word, 22: c, 10: c}, out_v=[10])
        assert int(out.v["v10"][0]) == (0 if name == "v_dot2_f32_bf16" else F32.round(Fraction(1))), name


@covers("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16")
def test_mixed_fma_sources_and_halves() -> None:
    """op_sel_hi: the source is f16, op_sel its half; neg and abs act on the f32 value.

    The f16 results keep the other half.
    """
    halves, floats = HALVES[:14], FEW_FLOATS
    size = 448
    h = np.resize(np.array(halves, dtype=np.uint32), size)
    words = [
        np.resize(np.array(floats, dtype=np.uint32), size),
        _halves(h, h[::-1]),
        np.resize(np.array(floats[::-1], dtype=np.uint32), size),
    ]
    words[0] = np.roll(words[0], 3)

    def source(word: int, half: bool, high: bool) -> int | str:
        if not half:
            return word
        value = convert(F16, F32, _half(word, high))
        return F32.quiet_nan if value == NAN else value

    for sel, sel_hi in ((0, 0b010), (0b010, 0b010), (0, 0), (0b111, 0b111)):
        for target in ("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"):
            line = f"{target} v10, -v20, |v21|, v22 op_sel:[{sel & 1},{sel >> 1 & 1},{sel >> 2}] op_sel_hi:[{sel_hi & 1},{sel_hi >> 1 & 1},{sel_hi >> 2}]"  # noqa: E501
            out = run([line], v={10: SENTINEL, **{20 + k: w for k, w in enumerate(words)}}, out_v=[10])
            for lane, got in enumerate(out.v["v10"].tolist()):
                a, b, c = (source(int(w[lane]), bool(sel_hi >> k & 1), bool(sel >> k & 1)) for k, w in enumerate(words))
                exact = fma(F32, negate(F32, a), b & 0x7FFFFFFF, c)
                if target == "v_fma_mix_f32":
                    assert same(F32, got, exact), f"{line}: {a:#x} {b:#x} {c:#x}: {got:#x}, expected {exact}"
                    continue
                want = NAN if exact == NAN else convert(F32, F16, exact)
                high = target.endswith("hi_f16")
                assert same(F16, _half(got, high), want), f"{line}: {a:#x} {b:#x} {c:#x}: {got:#x}, expected {want}"
                assert _half(got, not high) == _half(SENTINEL, not high)


COVERED = (*INTEGER, *CLAMPED, *FLOAT, *FLOAT_PAIRS)
