# SPDX-License-Identifier: Apache-2.0
"""Operand kinds and modifiers: constants, literals, scalar registers, abs and neg, clamp, op_sel of 16-bit
operations, EXEC of 0.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest
from helpers.isa import ALL_LANES, FLOATS, HALVES, LANES, run
from helpers.isa_reference import F16, F32, M16, M32, NAN, add, fma, mul, same

OLD = 0xCAFE_F00D
LANE = np.arange(LANES, dtype=np.uint32)


def _bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def _value(line: str, width: int = 1, **more: object) -> int:
    """The result of one line in lane 0; destination v10 (v[10:11])."""
    out = run([line], out_v=range(10, 10 + width), **more)  # type: ignore[arg-type]
    return sum(int(out.v[f"v{10 + k}"][0]) << 32 * k for k in range(width))


# (text of the operand, its bits as a 32-bit value)
CONSTANTS = [
    ("0", 0), ("64", 64), ("-1", M32), ("-16", 0xFFFFFFF0), ("0.5", 0x3F000000), ("-0.5", 0xBF000000), ("1.0",
    0x3F800000),
    ("-1.0", 0xBF800000), ("2.0", 0x40000000), ("-2.0", 0xC0000000), ("4.0", 0x40800000), ("-4.0", 0xC0800000),
    ("0.15915494", 0x3E22F983), ("0x12345678", 0x12345678), ("0xbf317218", 0xBF317218), ("65", 65), ("-17", 0xFFFFFFEF),
]  # fmt: skip


@pytest.mark.parametrize("text, bits", CONSTANTS)
def test_constants_and_literals(text: str, bits: int) -> None:
    assert _value(f"v_mov_b32_e32 v10, {text}") == bits
    out = run([f"s_mov_b32 s20, {text}", f"v_xor_b32 v11, {text}, v20"], v={20: 0xFFFF0000}, out_s=[20], out_v=[11])
    assert int(out.s["s20"][0]) == bits
    assert int(out.v["v11"][0]) == bits ^ 0xFFFF0000


def test_constants_of_64_bits() -> None:
    """Integers are sign-extended, floats become f64; a literal of an f64 operation is its high word."""
    assert _value("v_mov_b64_e32 v[10:11], -3", 2) == 2**64 - 3
    assert _value("v_lshlrev_b64 v[10:11], 4, 7", 2) == 7 << 4
    assert _value("v_add_f64 v[10:11], 1.0, 2.0", 2) == 0x4008000000000000
    assert _value("v_mul_f64 v[10:11], v[20:21], 0.5", 2, v={20: 0, 21: 0x40140000}) == 0x4004000000000000
    assert _value("v_fma_f64 v[10:11], v[20:21], -2.0, 4.0", 2, v={20: 0, 21: 0x40080000}) == 0xC000000000000000
    out = run(
        ["s_mov_b64 s[20:21], -2", "s_and_b64 s[22:23], s[20:21], 0xff", "s_lshl_b64 s[24:25], 1, 40"],
        out_s=range(20, 26),
    )
    assert [int(out.s[f"s{k}"][0]) for k in range(20, 26)] == [M32 - 1, M32, 0xFE, 0, 0, 1 << 8]


def test_constants_of_16_bits() -> None:
    """A float constant is the f16 number, an integer its low half."""
    assert _value("v_add_f16 v10, 1.0, v20", v={20: 0x3C00}) == 0x4000
    assert _value("v_mul_f16 v10, -4.0, v20", v={20: 0x3800}) == 0xC000
    assert _value("v_add_u16 v10, -1, v20", v={20: 5}) == 4
    assert _value("v_max_i16 v10, -3, v20", v={20: 0x8000}) == 0xFFFD
    assert _value("v_lshlrev_b16 v10, 3, v20", v={20: 0xF001}) == 0x8008
    assert _value("v_pk_add_f16 v10, v20, 1.0 op_sel_hi:[1,0]", v={20: 0x40003C00}) == 0x42004000
    assert _value("v_pk_lshlrev_b16 v10, 4, v20 op_sel_hi:[0,1]", v={20: 0x00120034}) == 0x01200340
    assert _value("v_pk_add_u16 v10, v20, -1 op_sel_hi:[1,0]", v={20: 0x00120034}) == 0x00110033


def test_scalar_registers_as_vector_sources() -> None:
    s = {20: 1000, 21: 1}
    assert _value("v_add_u32 v10, s20, v20", v={20: 7}, s=s) == 1007
    assert _value("v_add3_u32 v10, s20, v20, s20", v={20: 7}, s=s) == 2007
    assert _value("v_add_u32 v10, vcc_lo, v20", v={20: 7}, vcc=0x500000003) == 10
    assert _value("v_add_u32 v10, vcc_hi, v20", v={20: 7}, vcc=0x500000003) == 12
    assert _value("v_mov_b32_e32 v10, exec_lo", exec_mask=0x30000000F) == 0xF
    out = run(["s_movk_i32 m0, 0x55", "v_add_u32 v10, m0, v20"], v={20: 1}, out_v=[10])
    assert int(out.v["v10"][0]) == 0x56
    assert (
        _value("v_lshl_add_u64 v[10:11], s[20:21], 2, v[20:21]", 2, v={20: 5, 21: 0}, s=s)
        == ((1 << 32 | 1000) << 2) + 5
    )
    assert _value("v_mov_b64_e32 v[10:11], s[20:21]", 2, s=s) == 1 << 32 | 1000


MODIFIED = [
    ("v_add_f32 v10, -v20, |v21|", lambda a, b: add(F32, a ^ 0x80000000, b & 0x7FFFFFFF)),
    ("v_mul_f32 v10, -|v20|, v21", lambda a, b: mul(F32, a | 0x80000000, b)),
    ("v_fma_f32 v10, v20, -v21, -1.0", lambda a, b: fma(F32, a, b ^ 0x80000000, 0xBF800000)),
    ("v_max_f32 v10, -v20, -v20", lambda a, b: a ^ 0x80000000),
]


@pytest.mark.parametrize("line, function", MODIFIED, ids=[row[0].split()[0] for row in MODIFIED])
def test_negated_and_absolute_vector_sources(line: str, function) -> None:
    a = np.resize(np.array(FLOATS, dtype=np.uint32), 128)
    b = np.roll(a, 7)
    out = run([line], v={20: a, 21: b}, out_v=[10])
    for x, y, got in zip(a.tolist(), b.tolist(), out.v["v10"].tolist(), strict=True):
        want = NAN if F32.is_nan(x) and "max" in line else function(x, y)
        assert same(F32, got, want), f"{line}: {x:#x} {y:#x} gives {got:#x}"


def test_negated_and_absolute_scalars_and_constants() -> None:
    s = {20: _bits(3.0), 21: _bits(-5.0)}
    assert _value("v_add_f32 v10, -s20, v20", v={20: _bits(1.0)}, s=s) == _bits(-2.0)
    assert _value("v_mul_f32 v10, |s21|, v20", v={20: _bits(2.0)}, s=s) == _bits(10.0)
    assert _value("v_fma_f32 v10, -|s21|, v20, s21", v={20: _bits(2.0)}, s=s) == _bits(-15.0)
    assert _value(
        "v_pk_mul_f32 v[10:11], v[20:21], v[20:21] neg_lo:[1,0] neg_hi:[0,0]", 2, v={20: _bits(2.0), 21: _bits(3.0)}
    ) == (_bits(9.0) << 32 | _bits(-4.0))


def test_clamp_of_float_results() -> None:
    """To [0, 1]; NaN becomes 0 (DX10 clamp)."""
    values = {
        _bits(-3.0): 0,
        _bits(0.25): _bits(0.25),
        _bits(7.0): _bits(1.0),
        0x7FC00000: 0,
        0x80000000: 0,
        0xFF800000: 0,
        0x7F800000: _bits(1.0),
    }
    for bits, want in values.items():
        assert _value("v_mul_f32_e64 v10, v20, 1.0 clamp", v={20: bits}) == want, hex(bits)
        assert _value("v_fma_f32 v10, v20, 1.0, 0 clamp", v={20: bits}) == want, hex(bits)
    halves = {0xC200: 0, 0x3400: 0x3400, 0x4700: 0x3C00, 0x7E00: 0}
    for bits, want in halves.items():
        assert _value("v_mul_f16_e64 v10, v20, 1.0 clamp", v={20: bits}) == want, hex(bits)


def test_op_sel_of_16_bit_operations() -> None:
    """Entries pick the half of each source and of the destination; the other half of the destination stays."""
    words = np.resize(np.array(HALVES, dtype=np.uint32), 128)
    a, b, c = (np.roll(words, k) | np.roll(words, k + 5) << 16 for k in (0, 3, 11))
    for bits in range(16):
        entries = [bits >> k & 1 for k in range(4)]
        out = run(
            [f"v_mad_u16 v10, v20, v21, v22 op_sel:[{','.join(map(str, entries))}]"],
            v={10: OLD, 20: a, 21: b, 22: c}, out_v=[10],
        )  # fmt: skip
        for lane, got in enumerate(out.v["v10"].tolist()):
            x, y, z = (int(w[lane]) >> 16 * e & M16 for w, e in zip((a, b, c), entries))
            result = (x * y + z) & M16
            want = OLD & M16 | result << 16 if entries[3] else OLD & 0xFFFF0000 | result
            assert got == want, f"op_sel {entries}, lane {lane}: {got:#x}, expected {want:#x}"
    out = run(["v_fma_f16 v10, v20, v21, v22 op_sel:[1,0,1,1]"], v={10: OLD, 20: a, 21: b, 22: c}, out_v=[10])
    for lane, got in enumerate(out.v["v10"].tolist()):
        want = fma(F16, int(a[lane]) >> 16, int(b[lane]) & M16, int(c[lane]) >> 16)
        assert same(F16, got >> 16, want) and got & M16 == OLD & M16


def test_no_lane_on_writes_nothing() -> None:
    """EXEC of 0: vector results stay, compares give 0, and a conditional branch on EXEC sees it."""
    lines = [
        "v_add_u32 v10, v20, 1",
        "v_cmp_eq_u32_e32 vcc, v20, v20",
        "v_mad_u64_u32 v[12:13], s[20:21], v20, v20, v[12:13]",
        "ds_write_b32 v20, v20",
    ]
    out = run(
        lines,
        v={10: OLD, 12: OLD, 13: OLD, 20: LANE},
        out_v=[10, 12, 13],
        out_s=[20, 21],
        exec_mask=0,
        vcc=ALL_LANES,
        lds_bytes=64,
    )
    assert out.v["v10"].tolist() == out.v["v12"].tolist() == out.v["v13"].tolist() == [OLD] * LANES
    assert int(out.vcc[0]) == 0 and [int(out.s[f"s{k}"][0]) for k in (20, 21)] == [0, 0]


def test_destination_equal_to_sources() -> None:
    """Every lane reads its sources before the result is written, also where both are 64 bits wide."""
    a, b = LANE + 5, LANE * 3
    out = run(
        ["v_sub_u32 v20, v21, v20", "v_mad_u64_u32 v[22:23], vcc, v22, v23, v[22:23]",
        "v_lshlrev_b64 v[24:25], 4, v[24:25]",
        "v_pk_add_f32 v[30:31], v[30:31], v[30:31] op_sel:[1,1] op_sel_hi:[0,0]"],
        v={20: a, 21: b, 22: 7, 23: 9, 24: 0x80000001, 25: 3, 30: _bits(1.0), 31: _bits(2.0)},
        out_v=[20, 22, 23, 24, 25, 30, 31],
    )  # fmt: skip
    assert out.v["v20"].tolist() == [(3 * lane - lane - 5) & M32 for lane in range(LANES)]
    assert (int(out.v["v22"][0]), int(out.v["v23"][0])) == (7 * 9 + 7, 9)
    assert (int(out.v["v24"][0]), int(out.v["v25"][0])) == (0x10, 0x38)
    assert (int(out.v["v30"][0]), int(out.v["v31"][0])) == (_bits(4.0), _bits(2.0))


def test_denormals_follow_the_mode() -> None:
    """The descriptor's f32 mode flushes sources and results; f16 keeps its own."""
    lines = ["v_add_f32 v10, v20, v21", "v_mul_f32 v11, v22, v23", "v_add_f16 v12, v24, v24"]
    v = {20: 1, 21: 2, 22: 0x00800000, 23: 0x3F000000, 24: 1}
    kept = run(lines, v=v, out_v=[10, 11, 12])
    flushed = run(lines, v=v, out_v=[10, 11, 12], flush_denormals=True)
    assert [int(kept.v[f"v{k}"][0]) for k in (10, 11, 12)] == [3, 0x00400000, 2]
    assert [int(flushed.v[f"v{k}"][0]) for k in (10, 11, 12)] == [0, 0, 2]
