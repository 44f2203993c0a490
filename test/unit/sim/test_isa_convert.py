# SPDX-License-Identifier: Apache-2.0
"""Conversions between f32, f16, bf16 and the fp8, bf8, fp6, bf6 and fp4 formats, with scales, byte selects and
stochastic rounding.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from helpers.isa import ALL_LANES, FLOATS, HALVES, LANES, PARTIAL_EXEC, covers, registers, run
from helpers.isa_reference import BF16, F16, F32, NAN, SMALL, WIDE, Format, convert, same, small_code

from sgl_amd_mono.sim.convert_table import CONVERSIONS

OLD = 0xCAFE_F00D
SCALES = (
    0x3F800000,
    0x40000000,
    0x3E000000,
    0x00000000,
    0x7F000000,
    0x7F800000,
    0x4B812345,
    0xC0800000,
)  # f32 bits; only the exponent counts
COVERED = tuple(info.name for info in CONVERSIONS)


def f32(x: float | Fraction) -> int:
    return F32.round(Fraction(x))


# Values around every boundary of the small formats, and the special ones.
SAMPLES = tuple(
    dict.fromkeys(
        [
            *FLOATS,
            *(f32(Fraction(n, 8)) for n in range(-60, 61)),
            *(
                f32(s * x)
                for s in (1, -1)
                for x in (
                    Fraction(5, 4),
                    7,
                    Fraction(29, 4),
                    28,
                    30,
                    447,
                    448,
                    456,
                    464,
                    465,
                    480,
                    500,
                    57344,
                    61439,
                    61440,
                    65536,
                )
            ),
            *(f32(Fraction(n, 2**k)) for k in (9, 10, 11, 16, 17, 18) for n in (1, 2, 3, 5, 7)),
        ]
    )
)


def value_of(fmt: Format, code: int) -> tuple[Fraction | str, bool]:
    """(exact value, "nan" or "inf"; negative)."""
    negative = fmt.negative(code)
    if fmt.is_nan(code):
        return NAN, negative
    if fmt.is_infinite(code):
        return "inf", negative
    return fmt.value(code), negative


def scale_of(bits: int) -> Fraction | str:
    """2^(e - 127) of the exponent field; 255 is NaN."""
    e = bits >> 23 & 255
    return NAN if e == 255 else Fraction(2) ** (e - 127)


@functools.cache
def narrow(source: Format, target: str, code: int, scale_bits: int | None) -> int:
    """Code in a small format of value / scale."""
    x, negative = value_of(source, code)
    scale = Fraction(1) if scale_bits is None else scale_of(scale_bits)
    if scale == NAN:
        x = NAN
    elif not isinstance(x, str):
        x = x / scale
    return small_code(SMALL[target], x, negative)


@functools.cache
def widen(source: str, target: Format, code: int, scale_bits: int | None) -> int | str:
    """Code in f32, f16 or bf16 of value * scale, rounded to nearest even."""
    x, negative = value_of(SMALL[source], code)
    scale = Fraction(1) if scale_bits is None else scale_of(scale_bits)
    if x == NAN or scale == NAN:
        return NAN
    if x == "inf":
        return negative << (target.bits - 1) | target.infinity
    return target.round(x * scale, negative_zero=negative)


def lanes(values: Sequence[int]) -> np.ndarray:
    """The values, repeated to whole waves."""
    return np.resize(np.array(values, dtype=np.uint32), -(-len(values) // LANES) * LANES)


def check_small(name: str, target: str, got: int, want: int, context: str) -> None:
    fmt = SMALL[target]
    sign = 1 << (fmt.bits - 1)
    nan_equal = fmt.is_nan(got) and fmt.is_nan(want)
    assert got == want or nan_equal, f"{name}: {context}: {got:#x}, expected {want:#x} ({sign:#x})"


# ---- unscaled ------------------------------------------------------------------------------------------------------


@covers("v_cvt_pk_bf16_f32", "v_cvt_pk_f16_f32")
def test_packing_to_bf16_and_f16() -> None:
    ties = (
        0x3F808000,
        0x3F818000,
        0x3F807FFF,
        0x3F808001,
        0x7F7FFFFF,
        0x00008000,
        0x00018000,
        0x477FEFFF,
        0x477FF000,
        0x33000000,
        0x33000001,
        0x387FE000,
    )
    values = (*SAMPLES, *ties)
    a, b = lanes(values), lanes(values)[::-1].copy()
    for name, fmt in (("v_cvt_pk_bf16_f32", BF16), ("v_cvt_pk_f16_f32", F16)):
        out = run([f"{name} v10, v20, v21"], v={10: OLD, 20: a, 21: b}, out_v=[10], exec_mask=PARTIAL_EXEC)
        for lane, got in enumerate(out.v["v10"].tolist()):
            if not PARTIAL_EXEC >> lane % LANES & 1:
                assert got == OLD
                continue
            for half, source in ((got & 0xFFFF, int(a[lane])), (got >> 16, int(b[lane]))):
                want = convert(F32, fmt, source)
                assert same(fmt, half, want), f"{name}({source:#x}) = {half:#x}, expected {want}"
                if fmt.is_nan(half):
                    assert half >> (fmt.mbits - 1) & 1, "a NaN comes out quiet"


@pytest.mark.parametrize("target", ["fp8", "bf8"])
@covers("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32")
def test_packing_to_fp8(target: str) -> None:
    run_names = {"fp8": "v_cvt_pk_fp8_f32", "bf8": "v_cvt_pk_bf8_f32"}
    a, b = lanes(SAMPLES), lanes(SAMPLES)[::-1].copy()
    for name_target in ("fp8", "bf8"):  # both, so that each case covers the pair of mnemonics
        name = run_names[name_target]
        for high in (0, 1):
            line = f"{name} v10, v20, v21 op_sel:[0,0,{high}]"
            out = run([line], v={10: OLD, 20: a, 21: b}, out_v=[10])
            for lane, got in enumerate(out.v["v10"].tolist()):
                half, other = (got >> 16, got & 0xFFFF) if high else (got & 0xFFFF, got >> 16)
                assert other == (OLD & 0xFFFF if high else OLD >> 16), "the other half is kept"
                for code, source in ((half & 255, int(a[lane])), (half >> 8, int(b[lane]))):
                    check_small(line, name_target, code, narrow(F32, name_target, source, None), f"{source:#x}")
    assert target in run_names


def test_fp8_overflow_follows_the_mode() -> None:
    """FP16_OVFL clear: NaN (fp8) and infinity (bf8) beyond the range; set: the largest value, true infinities as
    before.
    """
    values = lanes(
        [f32(464), f32(465), f32(1e9), f32(61439), f32(61440), f32(-70000), 0x7F800000, 0xFF800000, 0x7FC00000]
    )
    convert_lines = ["v_cvt_pk_fp8_f32 v10, v20, v20", "v_cvt_pk_bf8_f32 v11, v20, v20"]
    plain = run(convert_lines, v={10: 0, 11: 0, 20: values}, out_v=[10, 11])
    clamped = run(
        ["s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1", *convert_lines],
        v={10: 0, 11: 0, 20: values},
        out_v=[10, 11],
    )
    assert [int(x) & 255 for x in plain.v["v10"][:9]] == [0x7E, 0x7F, 0x7F, 0x7F, 0x7F, 0xFF, 0x7F, 0xFF, 0x7F]
    assert [int(x) & 255 for x in clamped.v["v10"][:9]] == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0xFF, 0x7F]
    assert [int(x) & 255 for x in plain.v["v11"][:8]] == [0x5F, 0x5F, 0x7C, 0x7B, 0x7C, 0xFC, 0x7C, 0xFC]
    assert [int(x) & 255 for x in clamped.v["v11"][:8]] == [0x5F, 0x5F, 0x7B, 0x7B, 0x7B, 0xFB, 0x7C, 0xFC]


@covers("v_cvt_f32_fp8", "v_cvt_f32_bf8", "v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8")
def test_every_fp8_code_to_f32() -> None:
    codes = np.arange(256, dtype=np.uint32)
    words = codes | (255 - codes) << 8 | (codes ^ 0x55) << 16 | (codes ^ 0x81) << 24
    for source in ("fp8", "bf8"):
        for byte in range(4):
            suffix = "_sdwa" if byte else ""
            tail = f" src0_sel:BYTE_{byte}" if byte else ""
            out = run([f"v_cvt_f32_{source}{suffix} v10, v20{tail}"], v={20: words}, out_v=[10])
            for lane, got in enumerate(out.v["v10"].tolist()):
                want = widen(source, F32, int(words[lane]) >> 8 * byte & 255, None)
                assert same(F32, got, want), (
                    f"v_cvt_f32_{source} byte {byte}: {int(words[lane]):#x} gives {got:#x}, expected {want}"
                )
        for high in (0, 1):
            suffix, tail = ("_sdwa", " src0_sel:WORD_1") if high else ("", "")
            out = run([f"v_cvt_pk_f32_{source}{suffix} v[10:11], v20{tail}"], v={20: words}, out_v=[10, 11])
            for lane in range(256):
                for k in range(2):
                    want = widen(source, F32, int(words[lane]) >> (16 * high + 8 * k) & 255, None)
                    assert same(F32, int(out.v[f"v{10 + k}"][lane]), want), f"v_cvt_pk_f32_{source} word {high}"


# ---- scaled --------------------------------------------------------------------------------------------------------

PACK_F32 = {"v_cvt_scalef32_pk_fp8_f32": "fp8", "v_cvt_scalef32_pk_bf8_f32": "bf8", "v_cvt_scalef32_pk_fp4_f32": "fp4"}
PACK_HALF = {f"v_cvt_scalef32_pk_{t}_{s}": (t, s) for t in ("fp8", "bf8", "fp4") for s in ("f16", "bf16")}


def _scaled_samples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Every sample with every scale: (values, scales)."""
    pairs = list(itertools.product(SAMPLES if count == 0 else SAMPLES[:count], SCALES))
    return lanes([p[0] for p in pairs]), lanes([p[1] for p in pairs])


def _half_samples(fmt: Format) -> list[int]:
    codes = [convert(F32, fmt, x) for x in SAMPLES]
    return [fmt.quiet_nan if x == NAN else int(x) for x in codes] + [h for h in HALVES if fmt is F16]


@covers(*PACK_F32, *PACK_HALF)
def test_scaled_packing() -> None:
    """x / 2^(exponent of the scale) in the word or, for fp4, the byte that op_sel picks; the rest of the register is
    kept.
    """
    for name in (*PACK_F32, *PACK_HALF):
        if name in PACK_F32:
            target, source = PACK_F32[name], F32
            values, scales = _scaled_samples(0)
            first, second = values, values[::-1].copy()
            scales = (
                lanes(SCALES)[: len(first)]
                if len(SCALES) > len(first)
                else np.resize(np.array(SCALES, np.uint32), len(first))
            )
            v = {20: first, 21: second, 22: scales}
            text, entries = "v20, v21, v22", 4
        else:
            target, half_name = PACK_HALF[name]
            source = WIDE[half_name]
            pairs = list(itertools.product(_half_samples(source), SCALES))
            first, scales = lanes([p[0] for p in pairs]), lanes([p[1] for p in pairs])
            second = first[::-1].copy()
            v = {20: first | second << 16, 22: scales}
            text, entries = "v20, v22", 3 if target != "fp4" else 4
        positions = range(4) if target == "fp4" else range(2)
        for position in positions:
            if target == "fp4":
                op_sel = [0, 0, position & 1, position >> 1]
            else:
                op_sel = [0] * (entries - 1) + [position]
            line = f"{name} v10, {text} op_sel:[{','.join(map(str, op_sel))}]"
            out = run([line], v={10: OLD, **v}, out_v=[10], exec_mask=PARTIAL_EXEC if position == 1 else ALL_LANES)
            bits = SMALL[target].bits
            shift = 2 * bits * position
            field = (1 << 2 * bits) - 1
            for lane, got in enumerate(out.v["v10"].tolist()):
                if position == 1 and not PARTIAL_EXEC >> lane % LANES & 1:
                    assert got == OLD
                    continue
                assert got & ~(field << shift) == OLD & ~(field << shift), f"{line}: other bits changed"
                for k, column in enumerate((first, second)):
                    want = narrow(source, target, int(column[lane]), int(scales[lane]))
                    check_small(
                        line,
                        target,
                        got >> shift + bits * k & ((1 << bits) - 1),
                        want,
                        f"{int(column[lane]):#x} / {int(scales[lane]):#x}",
                    )


UNPACK_PAIRS = {f"v_cvt_scalef32_pk_{t}_{s}": (s, t) for s in ("fp8", "bf8", "fp4") for t in ("f32", "f16", "bf16")}
UNPACK_ONE = {f"v_cvt_scalef32_{t}_{s}": (s, t) for s in ("fp8", "bf8") for t in ("f32", "f16")}


@covers(*UNPACK_PAIRS, *UNPACK_ONE)
def test_scaled_unpacking() -> None:
    codes = np.arange(256, dtype=np.uint32)
    words = np.tile(codes | (255 - codes) << 8 | (codes ^ 0x3C) << 16 | (codes ^ 0xA7) << 24, len(SCALES))
    scales = np.repeat(np.array(SCALES, np.uint32), 256)
    for name, (source, target_name) in {**UNPACK_PAIRS, **UNPACK_ONE}.items():
        target = WIDE[target_name]
        single = name in UNPACK_ONE
        bits = SMALL[source].bits
        positions = range(4) if single or source == "fp4" else range(2)
        for position in positions:
            entries = [position & 1, position >> 1, 0] if single or source == "fp4" else [position, 0, 0]
            shift = (8 if single or source == "fp4" else 16) * position
            wide = target_name == "f32" and not single
            line = f"{name} {registers('v', 10, 2 if wide else 1)}, v20, v21 op_sel:[{','.join(map(str, entries))}]"
            out = run([line], v={10: OLD, 11: OLD, 20: words, 21: scales}, out_v=[10, 11])
            for lane in range(len(words)):
                low, high = int(out.v["v10"][lane]), int(out.v["v11"][lane])
                if single:
                    got = [low & ((1 << target.bits) - 1)]
                    if target.bits == 16:
                        assert low >> 16 == OLD >> 16, f"{line}: the other half is kept"
                else:
                    got = [low, high] if wide else [low & 0xFFFF, low >> 16]
                for k, code in enumerate(got):
                    small = int(words[lane]) >> shift + bits * k & ((1 << bits) - 1)
                    want = widen(source, target, small, int(scales[lane]))
                    assert same(target, code, want), (
                        f"{line}: {small:#x} * {int(scales[lane]):#x} = {code:#x}, expected {want}"
                    )
    out = run(
        ["v_cvt_scalef32_f16_fp8 v10, v20, v21 op_sel:[0,0,1]"], v={10: OLD, 20: 0x38, 21: 0x3F800000}, out_v=[10]
    )
    assert int(out.v["v10"][0]) == 0x3C00 << 16 | OLD & 0xFFFF, "the third entry of op_sel picks the high half"


def _packed32(codes: Sequence[int], bits: int) -> int:
    return sum(int(code) << bits * n for n, code in enumerate(codes))


PACK_32 = {f"v_cvt_scalef32_pk32_{t}_{s}": (s, t) for t in ("fp6", "bf6") for s in ("f16", "bf16")}
UNPACK_32 = {f"v_cvt_scalef32_pk32_{t}_{s}": (s, t) for s in ("fp6", "bf6") for t in ("f32", "f16", "bf16")}
INTERLEAVE = {"v_cvt_scalef32_2xpk16_fp6_f32": "fp6", "v_cvt_scalef32_2xpk16_bf6_f32": "bf6"}


@covers(*PACK_32, *UNPACK_32, *INTERLEAVE)
def test_thirty_two_elements_at_once() -> None:
    rng = np.random.default_rng(21)
    scales = lanes(SCALES)
    for name, (source_name, target) in PACK_32.items():
        source = WIDE[source_name]
        pool = _half_samples(source)
        values = rng.choice(pool, (LANES, 32))
        v = {
            20 + r: values[:, 2 * r].astype(np.uint32) | values[:, 2 * r + 1].astype(np.uint32) << 16 for r in range(16)
        }
        out = run([f"{name} v[10:15], v[20:35], v40"], v={**v, 40: scales}, out_v=range(10, 16))
        for lane in range(LANES):
            got = sum(int(out.v[f"v{10 + r}"][lane]) << 32 * r for r in range(6))
            want = _packed32([narrow(source, target, int(x), int(scales[lane])) for x in values[lane]], 6)
            assert got == want, f"{name}: lane {lane}"
    for name, (source_name, target_name) in UNPACK_32.items():
        target = WIDE[target_name]
        codes = rng.integers(0, 64, (LANES, 32))
        numbers = [_packed32(row, 6) for row in codes]
        v = {20 + r: np.array([x >> 32 * r & 0xFFFFFFFF for x in numbers], dtype=np.uint32) for r in range(6)}
        count = 32 * target.bits // 32
        out = run(
            [f"{name} {registers('v', 50, count)}, v[20:25], v40"], v={**v, 40: scales}, out_v=range(50, 50 + count)
        )
        for lane in range(LANES):
            number = sum(int(out.v[f"v{50 + r}"][lane]) << 32 * r for r in range(count))
            for n in range(32):
                want = widen(source_name, target, int(codes[lane, n]), int(scales[lane]))
                assert same(target, number >> target.bits * n & ((1 << target.bits) - 1), want), (
                    f"{name}: lane {lane}, element {n}"
                )
    for name, target in INTERLEAVE.items():
        values = rng.choice(SAMPLES, (2, LANES, 16))
        v = {20 + 16 * k + r: values[k, :, r].astype(np.uint32) for k in range(2) for r in range(16)}
        out = run([f"{name} v[10:15], v[20:35], v[36:51], v60"], v={**v, 60: scales}, out_v=range(10, 16))
        for lane in range(LANES):
            got = sum(int(out.v[f"v{10 + r}"][lane]) << 32 * r for r in range(6))
            order = [int(values[k, lane, r]) for r in range(16) for k in range(2)]  # the two sources alternate
            assert got == _packed32([narrow(F32, target, x, int(scales[lane])) for x in order], 6), (
                f"{name}: lane {lane}"
            )


# ---- stochastic rounding: the seed's top bits are added below the last kept bit, then the value is truncated -------


@functools.cache
def stochastic(source: Format, target: Format | str, code: int, scale_bits: int | None, seed: int) -> int:
    fmt = SMALL[target] if isinstance(target, str) else target
    x, negative = value_of(source, code)
    scale = Fraction(1) if scale_bits is None else scale_of(scale_bits)
    if x == NAN or scale == NAN:
        return small_code(fmt, NAN, negative) if isinstance(target, str) else fmt.quiet_nan
    sign = negative << (fmt.bits - 1)
    if x == "inf":
        return small_code(fmt, "inf", negative) if isinstance(target, str) else sign | fmt.infinity
    a = abs(x) / scale
    if a == 0:
        return sign
    q = fmt.quantum(a)
    n = int(a / q + Fraction(seed, 2**32))
    code_out = fmt._code(n * q) if n else 0
    if code_out > fmt.largest:
        infinity = {"fp8": 0x7F, "bf8": 0x7C}.get(fmt.name, fmt.largest)
        return sign | (infinity if isinstance(target, str) else fmt.infinity)
    return sign | code_out


SEEDS = (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678, 0xC0000000)
SR_PLAIN: dict[str, Format | str] = {
    "v_cvt_sr_fp8_f32": "fp8",
    "v_cvt_sr_bf8_f32": "bf8",
    "v_cvt_sr_f16_f32": F16,
    "v_cvt_sr_bf16_f32": BF16,
}
SR_SCALED = {f"v_cvt_scalef32_sr_{t}_{s}": (s, t) for t in ("fp8", "bf8") for s in ("f32", "f16", "bf16")}
SR_FP4 = {f"v_cvt_scalef32_sr_pk_fp4_{s}": s for s in ("f32", "f16", "bf16")}
SR_32 = {f"v_cvt_scalef32_sr_pk32_{t}_{s}": (s, t) for t in ("fp6", "bf6") for s in ("f32", "f16", "bf16")}


def _prng(x: int) -> int:
    return (x << 1 ^ (0xC5 if x >> 31 else 0)) & 0xFFFFFFFF


@covers(*SR_PLAIN, *SR_SCALED)
def test_stochastic_rounding_of_one_element() -> None:
    for name in (*SR_PLAIN, *SR_SCALED):
        source_name, target = SR_SCALED.get(name, ("f32", SR_PLAIN.get(name)))
        source = WIDE[source_name]
        pool = [x for x in (SAMPLES if source is F32 else _half_samples(source)) if not source.is_nan(x)][::3]
        pairs = list(itertools.product(pool, SEEDS))
        values, seeds = lanes([p[0] for p in pairs]), lanes([p[1] for p in pairs])
        scaled = name in SR_SCALED
        scales = np.resize(np.array(SCALES, np.uint32), len(values))
        bits = SMALL[target].bits if isinstance(target, str) else 16
        for position in range(32 // bits):
            entries = [0, 0, position & 1, position >> 1] if bits == 8 else [0, 0, position]
            text = "v20, v21, v22" if scaled else "v20, v21"
            line = f"{name} v10, {text} op_sel:[{','.join(map(str, entries))}]"
            out = run([line], v={10: OLD, 20: values, 21: seeds, 22: scales}, out_v=[10])
            mask = ((1 << bits) - 1) << bits * position
            for lane, got in enumerate(out.v["v10"].tolist()):
                want = stochastic(
                    source, target, int(values[lane]), int(scales[lane]) if scaled else None, int(seeds[lane])
                )
                assert got & ~mask == OLD & ~mask, f"{line}: other bits changed"
                code = (got & mask) >> bits * position
                fmt = SMALL[target] if isinstance(target, str) else target
                assert code == want or (fmt.is_nan(code) and fmt.is_nan(want)), (
                    f"{line}: {int(values[lane]):#x}, seed {int(seeds[lane]):#x}: {code:#x}, expected {want:#x}"
                )


@covers(*SR_FP4)
def test_stochastic_rounding_of_fp4_pairs() -> None:
    """The second element's seed is one v_prng_b32 step further."""
    for name, source_name in SR_FP4.items():
        source = WIDE[source_name]
        pool = [x for x in (SAMPLES if source is F32 else _half_samples(source)) if not source.is_nan(x)]
        first, second = lanes(pool), lanes(pool)[::-1].copy()
        seeds, scales = (
            np.resize(np.array(SEEDS, np.uint32), len(first)),
            np.resize(np.array(SCALES, np.uint32), len(first)),
        )
        v = {20: first, 21: second} if source is F32 else {20: first | second << 16}
        text = "v[20:21]" if source is F32 else "v20"
        for byte in range(4):
            line = f"{name} v10, {text}, v30, v31 op_sel:[0,0,{byte & 1},{byte >> 1}]"
            out = run([line], v={10: OLD, **v, 30: seeds, 31: scales}, out_v=[10])
            for lane, got in enumerate(out.v["v10"].tolist()):
                seed, scale = int(seeds[lane]), int(scales[lane])
                want = (
                    stochastic(source, "fp4", int(first[lane]), scale, seed)
                    | stochastic(source, "fp4", int(second[lane]), scale, _prng(seed)) << 4
                )
                assert got == OLD & ~(255 << 8 * byte) & 0xFFFFFFFF | want << 8 * byte, f"{line}: lane {lane}"


@covers(*SR_32)
def test_stochastic_rounding_of_thirty_two_elements() -> None:
    rng = np.random.default_rng(22)
    seeds, scales = lanes(SEEDS), lanes(SCALES)
    for name, (source_name, target) in SR_32.items():
        source = WIDE[source_name]
        pool = [x for x in (SAMPLES if source is F32 else _half_samples(source)) if not source.is_nan(x)]
        values = rng.choice(pool, (LANES, 32))
        if source is F32:
            v = {20 + r: values[:, r].astype(np.uint32) for r in range(32)}
            text = "v[20:51]"
        else:
            v = {
                20 + r: values[:, 2 * r].astype(np.uint32) | values[:, 2 * r + 1].astype(np.uint32) << 16
                for r in range(16)
            }
            text = "v[20:35]"
        out = run([f"{name} v[10:15], {text}, v60, v61"], v={**v, 60: seeds, 61: scales}, out_v=range(10, 16))
        for lane in range(LANES):
            seed, codes = int(seeds[lane]), []
            for x in values[lane]:
                codes.append(stochastic(source, target, int(x), int(scales[lane]), seed))
                seed = _prng(seed)
            got = sum(int(out.v[f"v{10 + r}"][lane]) << 32 * r for r in range(6))
            assert got == _packed32(codes, 6), f"{name}: lane {lane}"


def test_table_of_conversions_matches_the_library() -> None:
    """The Python table (registers, scale operand, op_sel rule) is the C side's, entry by entry."""
    import ctypes

    from sgl_amd_mono.sim.library import load

    class Info(ctypes.Structure):
        _fields_ = [("name", ctypes.c_char_p)] + [
            (n, ctypes.c_uint8) for n in ("source", "target", "form", "d", "s0", "s1", "scale", "entry")
        ]

    native = load()
    native.sim_cvt_info.restype = ctypes.POINTER(Info)
    assert native.sim_cvt_count() == len(CONVERSIONS)
    for kind, info in enumerate(CONVERSIONS):
        c = native.sim_cvt_info(kind).contents
        assert (c.name.decode(), c.d, c.s0, c.s1, c.scale, bool(c.entry)) == (
            info.name, info.d_regs, info.s0_regs, info.s1_regs, info.scale_operand, info.target_entry,
        )  # fmt: skip


def test_negated_sources() -> None:
    out = run(
        ["v_cvt_scalef32_pk_fp4_f32 v10, -v20, |v21|, v22", "v_cvt_pk_bf16_f32 v11, -v20, |v21|"],
        v={10: 0, 20: f32(3), 21: f32(-4), 22: 0x3F800000}, out_v=[10, 11],
    )  # fmt: skip
    assert int(out.v["v10"][0]) == 0xD | 0x6 << 4
    assert int(out.v["v11"][0]) == 0xC040 | 0x4080 << 16
