# SPDX-License-Identifier: Apache-2.0
"""v_div_scale, v_div_fmas, v_div_fixup: alone, and in LLVM's division sequence against IEEE division over every class
of operands.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from helpers.isa import HALVES, LANES, covers, cross, run
from helpers.isa_reference import F16, F32, NAN, divide, fma, same

CLASSES = 9
PER_CLASS = 4096


def _classed(rng: np.random.Generator, bits: int, kind: int) -> np.ndarray:
    """Random bit patterns of one class: zero, denormal, tiny, ordinary, huge, near 1, powers of two, infinite, NaN."""
    mbits, ebits = (23, 8) if bits == 32 else (52, 11)
    top, bias = (1 << ebits) - 1, (1 << (ebits - 1)) - 1
    exponents = [
        (0, 1),
        (0, 1),
        (1, 30),
        (1, top),
        (top - 40, top),
        (bias - 2, bias + 2),
        (1, top),
        (top, top + 1),
        (top, top + 1),
    ][kind]
    e = rng.integers(*exponents, PER_CLASS, dtype=np.uint64)
    m = rng.integers(0, 1 << mbits, PER_CLASS, dtype=np.uint64)
    m[::7] = (1 << mbits) - 1
    m[::11] = 0 if kind != 8 else 1
    if kind in (0, 6, 7):
        m[:] = 0
    if kind in (1, 8):
        m |= np.uint64(1)
    s = rng.integers(0, 2, PER_CLASS, dtype=np.uint64)
    return s << np.uint64(bits - 1) | e << np.uint64(mbits) | m


F32_DIVISION = [
    "v_div_scale_f32 v10, s[30:31], v21, v21, v20",
    "v_div_scale_f32 v11, vcc, v20, v21, v20",
    "v_rcp_f32 v12, v10",
    "v_fma_f32 v13, -v10, v12, 1.0",
    "v_fma_f32 v12, v13, v12, v12",
    "v_mul_f32 v13, v11, v12",
    "v_fma_f32 v14, -v10, v13, v11",
    "v_fma_f32 v13, v14, v12, v13",
    "v_fma_f32 v10, -v10, v13, v11",
    "v_div_fmas_f32 v10, v10, v12, v13",
    "v_div_fixup_f32 v10, v10, v21, v20",
]
F64_DIVISION = [
    "v_div_scale_f64 v[40:41], s[30:31], v[22:23], v[22:23], v[20:21]",
    "v_rcp_f64 v[42:43], v[40:41]",
    "v_fma_f64 v[44:45], -v[40:41], v[42:43], 1.0",
    "v_fma_f64 v[42:43], v[42:43], v[44:45], v[42:43]",
    "v_fma_f64 v[44:45], -v[40:41], v[42:43], 1.0",
    "v_fma_f64 v[42:43], v[42:43], v[44:45], v[42:43]",
    "v_div_scale_f64 v[44:45], vcc, v[20:21], v[22:23], v[20:21]",
    "v_mul_f64 v[46:47], v[44:45], v[42:43]",
    "v_fma_f64 v[40:41], -v[40:41], v[46:47], v[44:45]",
    "v_div_fmas_f64 v[40:41], v[40:41], v[42:43], v[46:47]",
    "v_div_fixup_f64 v[10:11], v[40:41], v[22:23], v[20:21]",
]


@covers("v_div_scale_f32", "v_div_fmas_f32", "v_div_fixup_f32")
def test_f32_division_is_correctly_rounded_over_all_classes() -> None:
    rng = np.random.default_rng(17)
    for kind in range(CLASSES):
        a = np.concatenate([_classed(rng, 32, kind) for _ in range(CLASSES)]).astype(np.uint32)
        b = np.concatenate([_classed(rng, 32, other) for other in range(CLASSES)]).astype(np.uint32)
        out = run(F32_DIVISION, v={20: a, 21: b}, out_v=[10])
        with np.errstate(all="ignore"):
            want = a.view(np.float32) / b.view(np.float32)
        got = out.v["v10"].view(np.float32)
        wrong = ~((got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want)))
        assert not wrong.any(), [
            (hex(x), hex(y), hex(z))
            for x, y, z in zip(a[wrong][:5], b[wrong][:5], out.v["v10"][wrong][:5], strict=True)
        ]


@covers("v_div_scale_f64", "v_div_fmas_f64", "v_div_fixup_f64")
def test_f64_division_is_correctly_rounded_over_all_classes() -> None:
    rng = np.random.default_rng(18)
    for kind in range(CLASSES):
        a = np.concatenate([_classed(rng, 64, kind)[:1024] for _ in range(CLASSES)])
        b = np.concatenate([_classed(rng, 64, other)[:1024] for other in range(CLASSES)])
        v = {
            20: a & np.uint64(0xFFFFFFFF),
            21: a >> np.uint64(32),
            22: b & np.uint64(0xFFFFFFFF),
            23: b >> np.uint64(32),
        }
        out = run(F64_DIVISION, v=v, out_v=[10, 11])
        with np.errstate(all="ignore"):
            want = a.view(np.float64) / b.view(np.float64)
        bits = out.v["v10"].astype(np.uint64) | out.v["v11"].astype(np.uint64) << np.uint64(32)
        got = bits.view(np.float64)
        wrong = ~((bits == want.view(np.uint64)) | (np.isnan(got) & np.isnan(want)))
        assert not wrong.any(), [
            (hex(x), hex(y), hex(z)) for x, y, z in zip(a[wrong][:5], b[wrong][:5], bits[wrong][:5], strict=True)
        ]


@pytest.mark.parametrize(
    "source, denominator, numerator, want, flag",
    [
        (0x3F800000, 0x3F800000, 0x40000000, 0x3F800000, 0),  # ordinary: unscaled
        (0x3F800000, 0x00000000, 0x3F800000, NAN, 0),  # a zero denominator
        (0x00400000, 0x00400000, 0x10000000, 0x20000000, 0),  # a denormal denominator 2^-127: times 2^64
        (0x7F000000, 0x7F000000, 0x44800000, 0x5F000000, 0),  # its reciprocal would be denormal: times 2^-64
        (0x7F000000, 0x7F000000, 0x3F800000, 0x5F000000, 1),  # ... and the quotient too: undone by v_div_fmas
        (0x3F800000, 0x3F800000, 0x7F000000, 0x5F800000, 1),  # quotient near overflow: the denominator times 2^64
        (0x7F000000, 0x3F800000, 0x7F000000, 0x7F000000, 1),  # ... and the numerator as it is
        (0x01000000, 0x40800000, 0x01000000, 0x21000000, 1),  # quotient denormal: the numerator times 2^64
        (0x40800000, 0x40800000, 0x01000000, 0x40800000, 1),  # ... and the denominator as it is
        (0x05000000, 0x05000000, 0x05000000, 0x25000000, 0),  # a small numerator: times 2^64
    ],
)
def test_division_scaling(source: int, denominator: int, numerator: int, want: int | str, flag: int) -> None:
    out = run(
        ["v_div_scale_f32 v10, vcc, v20, v21, v22"],
        v={20: source, 21: denominator, 22: numerator},
        out_v=[10],
        exec_mask=0x3,
    )
    assert same(F32, int(out.v["v10"][0]), want)
    assert int(out.vcc[0]) == (3 if flag else 0)


def test_division_fma_scales_with_vcc() -> None:
    """Unscaled a plain fma; with VCC times 2^64 where the third source is 2 or more, else 2^-64, rounded once."""
    a, b, c = cross(
        (0x3F800001, 0xBF800000, 0x00000001, 0x40490FDB),
        (0x3F7FFFFF, 0x33800000, 0x3F800000),
        (0x3F800000, 0x41200000, 0x1F800001, 0xC1200000),
    )
    for vcc in (0, 2**LANES - 1):
        out = run(["v_div_fmas_f32 v10, v20, v21, v22"], v={20: a, 21: b, 22: c}, out_v=[10], vcc=vcc)
        for x, y, z, got in zip(a.tolist(), b.tolist(), c.tolist(), out.v["v10"].tolist(), strict=True):
            if vcc:
                exact = F32.value(x) * F32.value(y) + F32.value(z)
                want: int | str = F32.round(exact * Fraction(2) ** (64 if (z >> 23 & 255) > 127 else -64))
            else:
                want = fma(F32, x, y, z)
            assert same(F32, got, want), f"{x:#x} {y:#x} {z:#x}: {got:#x}, expected {want}"


@covers("v_div_fixup_f16", "v_div_fixup_legacy_f16")
def test_f16_division_fix_up() -> None:
    """Given a correct quotient, the special cases of the ISA's table come out as IEEE division gives them."""
    d, n = cross(HALVES, HALVES)
    quotients = []
    for x, y in zip(d.tolist(), n.tolist(), strict=True):
        q = divide(F16, y, x)
        quotients.append(
            0x3C00 if q == NAN or F16.is_infinite(q) or F16.value(q) == 0 else q & 0x7FFF
        )  # without its sign
    for name in ("v_div_fixup_f16", "v_div_fixup_legacy_f16"):
        out = run([f"{name} v10, v20, v21, v22"], v={10: 0, 20: np.array(quotients), 21: d, 22: n}, out_v=[10])
        for x, y, q, got in zip(d.tolist(), n.tolist(), quotients, out.v["v10"].tolist(), strict=True):
            want = divide(F16, y, x)
            special = any(F16.magnitude(z) in (0, F16.infinity) or F16.is_nan(z) for z in (x, y))
            if not special and F16.magnitude(want) in (0, F16.infinity):
                want = (want & 0x8000) | q  # finite operands: the given quotient passes, with the right sign
            assert same(F16, got & 0xFFFF, want), f"{name}({q:#x}, {x:#x}, {y:#x}) = {got:#x}, expected {want}"
