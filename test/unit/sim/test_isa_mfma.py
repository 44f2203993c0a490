# SPDX-License-Identifier: Apache-2.0
"""Matrix instructions: operand layouts, formats, scales, broadcasts, accumulation order and special values.

Layouts are spelled out here lane by lane from AMD's CDNA3 and CDNA4 documents; the expected values are exact
(integers small enough for any order of the sum), except where a test is about rounding.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from helpers.isa import LANES, covers, registers, run
from helpers.isa_reference import BF6, BF8, BF16, F16, F32, F64, FP4, FP6, FP8, NAN, fma, same, signed

from sgl_amd_mono.sim.mfma_table import MNEMONICS, MfmaInfo, lookup

FORMATS = {f.name: f for f in (F16, BF16, F32, F64, FP8, BF8, FP6, BF6, FP4)}
A0, B0, C0, D0, SCALE_A, SCALE_B = 20, 40, 60, 100, 150, 151
COVERED = MNEMONICS
INLINE = {0: "0", 0x3F800000: "1.0", 0xC0000000: "-2.0", 7: "7"}


def element_bits(fmt: str) -> int:
    return 8 if fmt == "i8" else FORMATS[fmt].bits


def operand_place(info: MfmaInfo, fmt: str, dim: int, block: int, index: int, k: int) -> tuple[int, int]:
    """(lane, element number in the lane) of element [index][k] of a block of A (or [k][index] of B)."""
    groups = LANES // (dim * info.blocks)
    if info.f8f6f4 and fmt in ("fp8", "bf8"):
        # 32 elements a lane in two runs of 16: the first runs of all groups come first in K.
        run_number, rest = divmod(k, 16 * groups)
        group, position = divmod(rest, 16)
        return group * dim + index, 16 * run_number + position
    per_lane = info.k // groups
    group, position = divmod(k, per_lane)
    return (block * groups + group) * dim + index, position


def result_place(info: MfmaInfo, block: int, row: int, column: int) -> tuple[int, int]:
    """(lane, register) of element [row][column] of a block of C and D."""
    if info.n == 4:
        return 4 * block + column, row
    if info.acc == "f64":
        return 16 * (row % 4) + column, row // 4  # pairs of registers
    if info.n == 16:
        return 16 * (row // 4) + column, 4 * block + row % 4
    return 32 * (row // 4 % 2) + column, 16 * block + 4 * (row // 8) + row % 4


def pack_operand(info: MfmaInfo, fmt: str, codes: np.ndarray, dim: int) -> np.ndarray:
    """Registers [reg][lane] of an operand given as codes[block][index][k]."""
    bits = element_bits(fmt)
    per_lane = info.k * dim * info.blocks // LANES
    words = [0] * LANES
    for block, index, k in itertools.product(range(info.blocks), range(dim), range(info.k)):
        lane, element = operand_place(info, fmt, dim, block, index, k)
        words[lane] |= int(codes[block, index, k]) << bits * element
    count = per_lane * bits // 32
    return np.array([[word >> 32 * r & 0xFFFFFFFF for word in words] for r in range(count)], dtype=np.uint32)


def encode(fmt: str, values: np.ndarray) -> np.ndarray:
    if fmt == "i8":
        return np.asarray(values, dtype=np.int64) & 0xFF
    table: dict[int, int] = {}
    flat = [table.setdefault(int(v), FORMATS[fmt].round(Fraction(int(v)))) for v in values.ravel()]
    return np.array(flat, dtype=object).reshape(values.shape)


def integers(rng: np.random.Generator, fmt: str, shape: tuple[int, ...]) -> np.ndarray:
    """Small integers that the format holds exactly."""
    pool = {
        "fp4": (-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6),
        "fp6": range(-7, 8),
        "bf6": (-16, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8),
    }
    return rng.choice(list(pool.get(fmt, range(-8, 9))), shape)


def load(v: dict[int | str, object], prefix: str, first: int, rows: np.ndarray) -> str:
    for r, row in enumerate(rows):
        v[f"{prefix}{first + r}"] = row
    return registers(prefix, first, len(rows))


def pack_c(info: MfmaInfo, c: np.ndarray) -> np.ndarray:
    """Registers of C given as codes[block][row][column] (f64: pairs)."""
    wide = 2 if info.acc == "f64" else 1
    out = np.zeros((info.d_regs, LANES), dtype=np.uint32)
    for block, row, column in itertools.product(range(info.blocks), range(info.m), range(info.n)):
        lane, register = result_place(info, block, row, column)
        for word in range(wide):
            out[wide * register + word, lane] = int(c[block, row, column]) >> 32 * word & 0xFFFFFFFF
    return out


def unpack_d(info: MfmaInfo, rows: list[np.ndarray]) -> np.ndarray:
    wide = 2 if info.acc == "f64" else 1
    out = np.zeros((info.blocks, info.m, info.n), dtype=object)
    for block, row, column in itertools.product(range(info.blocks), range(info.m), range(info.n)):
        lane, register = result_place(info, block, row, column)
        out[block, row, column] = sum(int(rows[wide * register + word][lane]) << 32 * word for word in range(wide))
    return out


def execute(
    info: MfmaInfo, a: np.ndarray, b: np.ndarray, c: np.ndarray | None, tail: str = "", prefix: str = "v",
    in_place: bool = False,
    inline: int = 0, scales: tuple[np.ndarray, np.ndarray] | None = None, exec_mask: int = 2**LANES - 1,
) -> np.ndarray:  # fmt: skip
    """D's codes; a[block][m][k], b[block][n][k] and c[block][m][n] are codes. c None: the inline constant."""
    v: dict[int | str, object] = {}
    # Accumulation registers are few in the harness: with AGPRs the operands start low.
    first = (A0, B0, C0, D0) if prefix == "v" else (0, 8, 16, 16)
    texts = [
        load(v, prefix, first[0], pack_operand(info, info.fmt_a, a, info.m)),
        load(v, prefix, first[1], pack_operand(info, info.fmt_b, b, info.n)),
    ]
    c_text = INLINE[inline] if c is None else load(v, prefix, first[2], pack_c(info, c))
    d_first = first[2] if in_place else first[3]
    scale_text = ""
    if scales is not None:
        v[SCALE_A], v[SCALE_B] = scales
        scale_text = f", v{SCALE_A}, v{SCALE_B}"
    target = registers(prefix, d_first, info.d_regs)
    line = f"{info.name} {target}, {texts[0]}, {texts[1]}, {c_text}{scale_text} {tail}".strip()
    names = [f"{prefix}{d_first + r}" for r in range(info.d_regs)]
    out = run([line, "s_nop 15"], v=v, out_v=names, exec_mask=exec_mask)
    return unpack_d(info, [out.v[name] for name in names])


def modifiers(info: MfmaInfo) -> str:
    if not info.f8f6f4:
        return ""
    names = ("fp8", "bf8", "fp6", "bf6", "fp4")
    return f"cbsz:{names.index(info.fmt_a)} blgp:{names.index(info.fmt_b)}"


def expected(info: MfmaInfo, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Exact D as codes, from integer a[block][m][k], b[block][n][k], c[block][m][n]."""
    d = np.einsum("xmk,xnk->xmn", a, b) + c
    if info.acc == "i32":
        return d & 0xFFFFFFFF
    return encode(info.acc, d)


def integer_problem(info: MfmaInfo, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    a = integers(rng, info.fmt_a, (info.blocks, info.m, info.k))
    b = integers(rng, info.fmt_b, (info.blocks, info.n, info.k))
    return a, b, rng.integers(-50, 51, (info.blocks, info.m, info.n))


def codes_of(info: MfmaInfo, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    acc = c & 0xFFFFFFFF if info.acc == "i32" else encode(info.acc, c)
    return encode(info.fmt_a, a), encode(info.fmt_b, b), acc


@pytest.mark.parametrize("name", [name for name in MNEMONICS if not lookup(name).f8f6f4])
def test_layouts_and_sums(name: str) -> None:
    """Every operand element is in its place: exact products of small integers, C from registers, D elsewhere, EXEC
    ignored.
    """
    info = lookup(name)
    a, b, c = integer_problem(info, 1)
    d = execute(info, *codes_of(info, a, b, c), exec_mask=0x5)
    assert (d == expected(info, a, b, c)).all()


@pytest.mark.parametrize("formats", itertools.product(("fp8", "bf8", "fp6", "bf6", "fp4"), repeat=2), ids="-".join)
@pytest.mark.parametrize("shape", ["16x16x128", "32x32x64"])
def test_f8f6f4_layouts_and_sums(shape: str, formats: tuple[str, str]) -> None:
    """All pairs of formats, unscaled: the K positions of both operands agree although their layouts differ."""
    info = lookup(f"v_mfma_f32_{shape}_f8f6f4").with_modifiers(
        *[("fp8", "bf8", "fp6", "bf6", "fp4").index(f) for f in formats]
    )
    a, b, c = integer_problem(info, 2)
    d = execute(info, *codes_of(info, a, b, c), tail=modifiers(info))
    assert (d == expected(info, a, b, c)).all()


@pytest.mark.parametrize(
    "formats", [("fp4", "fp4"), ("fp8", "fp8"), ("fp8", "fp4"), ("bf6", "fp6"), ("fp4", "bf8")], ids="-".join
)
@pytest.mark.parametrize("shape", ["16x16x128", "32x32x64"])
def test_block_scales(shape: str, formats: tuple[str, str]) -> None:
    """The scale of row i, K block j is one byte of lane j * rows + i; op_sel and op_sel_hi pick the byte."""
    info = lookup(f"v_mfma_scale_f32_{shape}_f8f6f4").with_modifiers(
        *[("fp8", "bf8", "fp6", "bf6", "fp4").index(f) for f in formats]
    )
    rng = np.random.default_rng(3)
    a, b, c = integer_problem(info, 4)
    words = rng.integers(125, 131, (2, LANES, 4), dtype=np.uint32)  # no sum needs more than 24 bits
    for byte_a, byte_b in ((0, 0), (1, 2), (3, 1), (2, 3)):
        tail = f"op_sel:[{byte_a & 1},{byte_b & 1},0] op_sel_hi:[{byte_a >> 1},{byte_b >> 1},0] {modifiers(info)}"
        scales = tuple((w[:, 0] | w[:, 1] << 8 | w[:, 2] << 16 | w[:, 3] << 24).astype(np.uint32) for w in words)
        d = execute(info, *codes_of(info, a, b, c), tail=tail, scales=scales)
        total = c.astype(object)[0] * Fraction(1)
        for block in range(info.k // 32):
            part = a[0, :, 32 * block : 32 * block + 32] @ b[0, :, 32 * block : 32 * block + 32].T
            ea = [int(words[0, block * info.m + i, byte_a]) - 127 for i in range(info.m)]
            eb = [int(words[1, block * info.n + i, byte_b]) - 127 for i in range(info.n)]
            for i, j in itertools.product(range(info.m), range(info.n)):
                total[i, j] += int(part[i, j]) * Fraction(2) ** (ea[i] + eb[j])
        want = np.array([[F32.round(x) for x in row] for row in total], dtype=object)
        assert (d[0] == want).all()


@covers("v_mfma_scale_f32_16x16x128_f8f6f4")
def test_extreme_scales() -> None:
    """0xff is NaN for its block only; 0 is 2^-127; 0xfe is 2^127; the product of two scales may leave f32's range and
    come back.
    """
    info = lookup("v_mfma_scale_f32_16x16x128_f8f6f4").with_modifiers(4, 4)
    one = np.full((1, 16, 128), FP4.round(Fraction(1)), dtype=object)
    zero = np.zeros((1, 16, 16), dtype=object)
    tail = "op_sel_hi:[0,0,0] cbsz:4 blgp:4"
    scale_a, scale_b = np.full(LANES, 127, dtype=np.uint32), np.full(LANES, 127, dtype=np.uint32)
    scale_a[3], scale_a[16 + 4], scale_a[5], scale_b[9], scale_b[5] = 0xFF, 0, 0, 0xFE, 0
    d = execute(info, one, one, zero, tail=tail, scales=(scale_a, scale_b))[0]
    assert all(F32.is_nan(int(x)) for x in d[3])
    assert int(d[4, 0]) == F32.round(Fraction(96))  # block 1 of row 4 counts 32 * 2^-127: lost beside 96
    assert int(d[5, 9]) == F32.round(Fraction(32 + 96))  # 2^-127 * 2^127 in block 0
    assert int(d[0, 9]) == F32.round(Fraction(32) * Fraction(2) ** 127 + 96)  # 2^132: infinity
    assert int(d[0, 9]) == F32.infinity
    assert int(d[5, 5]) == F32.round(Fraction(96)), "2^-254 * 32 is lost, not a NaN"
    tiny = execute(info, one, one, zero, tail=tail, scales=(np.full(LANES, 0), np.full(LANES, 117)))[0]
    assert int(tiny[0, 0]) == F32.round(Fraction(128) * Fraction(2) ** (-127 - 10)), "a denormal result is kept"


@covers("v_mfma_f32_16x16x32_bf16", "v_mfma_scale_f32_16x16x128_f8f6f4", "v_mfma_i32_16x16x64_i8")
def test_register_choices() -> None:
    """AGPRs, D over C, D over A, and C as an inline constant give the same sums."""
    for name, formats in (
        ("v_mfma_f32_16x16x32_bf16", ""),
        ("v_mfma_i32_16x16x64_i8", ""),
        ("v_mfma_scale_f32_16x16x128_f8f6f4", "cbsz:4 blgp:4"),
    ):
        info = lookup(name)
        if formats:
            info = info.with_modifiers(4, 4)
        scales = (np.full(LANES, 0x7F), np.full(LANES, 0x7F)) if info.scaled else None
        tail = ("op_sel_hi:[0,0,0] " if info.scaled else "") + formats
        a, b, c = integer_problem(info, 6)
        want = expected(info, a, b, c)
        ca, cb, cc = codes_of(info, a, b, c)
        for prefix, in_place in (("v", True), ("a", True)):
            assert (
                execute(info, ca, cb, cc, tail=tail, prefix=prefix, in_place=in_place, scales=scales) == want
            ).all(), prefix
        constants = {0: 0, 7: 7} if info.acc == "i32" else {0: 0, 0x3F800000: 1, 0xC0000000: -2}
        for bits, value in constants.items():
            got = execute(info, ca, cb, None, tail=tail, inline=bits, scales=scales)
            assert (got == expected(info, a, b, np.full_like(c, value))).all(), INLINE[bits]


@covers("v_mfma_f32_16x16x32_bf16")
def test_destination_may_overlap_a_source() -> None:
    info = lookup("v_mfma_f32_16x16x32_bf16")
    a, b, c = integer_problem(info, 7)
    ca, cb, _ = codes_of(info, a, b, c)
    v: dict[int | str, object] = {}
    load(v, "v", 20, pack_operand(info, "bf16", ca, 16))
    load(v, "v", 24, pack_operand(info, "bf16", cb, 16))
    out = run(["v_mfma_f32_16x16x32_bf16 v[20:23], v[20:23], v[24:27], 0", "s_nop 15"], v=v, out_v=range(20, 24))
    assert (unpack_d(info, [out.v[f"v{k}"] for k in range(20, 24)]) == expected(info, a, b, 0 * c)).all()


@pytest.mark.parametrize("fmt", ["bf16", "f16"])
def test_accumulation_is_an_fma_chain_in_ascending_k(fmt: str) -> None:
    """The stated order: D = C, then one fused multiply-add a K, each rounded to f32."""
    info = lookup(f"v_mfma_f32_16x16x32_{fmt}")
    rng = np.random.default_rng(8)
    f = FORMATS[fmt]
    a, b = (
        rng.integers(0, 1 << f.mbits, (1, 16, 32)) | rng.integers(f.bias - 6, f.bias + 7, (1, 16, 32)) << f.mbits
        for _ in range(2)
    )
    a, b = (x | rng.integers(0, 2, x.shape) << (f.bits - 1) for x in (a, b))
    c = rng.integers(0x3F000000, 0x41000000, (1, 16, 16))
    d = execute(info, a, b, c)
    wide = {int(x): F32.round(f.value(int(x))) for x in np.unique(np.concatenate([a, b]))}
    for i, j in itertools.product(range(0, 16, 3), range(0, 16, 5)):
        total: int | str = int(c[0, i, j])
        for k in range(32):
            total = fma(F32, wide[int(a[0, i, k])], wide[int(b[0, j, k])], total)
        assert int(d[0, i, j]) == total


@covers("v_mfma_f32_16x16x32_bf16", "v_mfma_f32_16x16x32_f16", "v_mfma_f32_16x16x4_f32")
def test_special_values_and_denormals() -> None:
    """inf * 0 and inf - inf are NaN, infinities and -0 stay, denormals are neither flushed on the way in nor on the
    way out.
    """
    for name in ("v_mfma_f32_16x16x32_bf16", "v_mfma_f32_16x16x32_f16", "v_mfma_f32_16x16x4_f32"):
        info = lookup(name)
        f = FORMATS[info.fmt_a]
        one, two = f.round(Fraction(1)), f.round(Fraction(2))
        a, b = np.zeros((1, 16, info.k), dtype=object), np.zeros((1, 16, info.k), dtype=object)
        c = np.zeros((1, 16, 16), dtype=object)
        a[0, 0, 0], a[0, 1, 0], a[0, 1, 1] = f.infinity, f.infinity, f.infinity | 1 << (f.bits - 1)
        a[0, 2, 1], a[0, 3, 2], a[0, 4, 3] = one, 1, f.quiet_nan
        b[0, 5, :] = one
        b[0, 6, 2] = two
        c[0, 7, :] = 0x80000000
        c[0, 8, :] = 0x00000001
        for flush in (False, True):  # the wave's denormal mode plays no part
            v: dict[int | str, object] = {}
            ta = load(v, "v", A0, pack_operand(info, info.fmt_a, a, 16))
            tb = load(v, "v", B0, pack_operand(info, info.fmt_b, b, 16))
            tc = load(v, "v", C0, pack_c(info, c))
            out = run(
                [f"{name} v[100:103], {ta}, {tb}, {tc}", "s_nop 15"], v=v, out_v=range(100, 104), flush_denormals=flush
            )
            d = unpack_d(info, [out.v[f"v{k}"] for k in range(100, 104)])[0]
            smallest = f.value(1)
            assert int(d[0, 5]) == F32.infinity and same(F32, int(d[0, 0]), NAN)
            assert same(F32, int(d[1, 5]), NAN) and same(F32, int(d[4, 5]), NAN) and same(F32, int(d[4, 0]), NAN)
            assert int(d[2, 5]) == 0x3F800000 and int(d[2, 0]) == 0
            assert int(d[3, 5]) == F32.round(smallest) and int(d[3, 6]) == F32.round(2 * smallest)
            assert int(d[7, 0]) == 0, "-0 + 0 * 0 is +0"
            assert int(d[8, 0]) == 1 and int(d[8, 5]) == 1


@pytest.mark.parametrize("cbsz, abid", [(1, 0), (1, 1), (2, 3)])
@covers("v_mfma_f32_16x16x4_4b_bf16", "v_mfma_f32_4x4x4_16b_f16")
def test_block_broadcast_of_a(cbsz: int, abid: int) -> None:
    """cbsz: groups of 2^cbsz blocks all read block abid of their group."""
    for name in ("v_mfma_f32_16x16x4_4b_bf16", "v_mfma_f32_4x4x4_16b_f16"):
        info = lookup(name)
        a, b, c = integer_problem(info, 9)
        group = 1 << cbsz
        read = [block // group * group + abid for block in range(info.blocks)]
        d = execute(info, *codes_of(info, a, b, c), tail=f"cbsz:{cbsz} abid:{abid}")
        assert (d == expected(info, a[read], b, c)).all()


@pytest.mark.parametrize("blgp", range(8))
@covers("v_mfma_f32_16x16x16_bf16")
def test_lane_patterns_of_b(blgp: int) -> None:
    """blgp: which lanes' B a lane reads; K group g of column n sits in lane 16 * g + n."""
    info = lookup("v_mfma_f32_16x16x16_bf16")
    a, b, c = integer_problem(info, 10)
    reads = {
        0: (0, 1, 2, 3),
        1: (0, 1, 0, 1),
        2: (2, 3, 2, 3),
        3: (1, 2, 3, 0),
        4: (0,) * 4,
        5: (1,) * 4,
        6: (2,) * 4,
        7: (3,) * 4,
    }[blgp]
    seen = np.concatenate([b[:, :, 4 * g : 4 * g + 4] for g in reads], axis=2)
    d = execute(info, *codes_of(info, a, b, c), tail=f"blgp:{blgp}" if blgp else "")
    assert (d == expected(info, a, seen, c)).all()


@covers("v_mfma_f64_16x16x4_f64")
def test_f64_negations() -> None:
    info = lookup("v_mfma_f64_16x16x4_f64")
    a, b, c = integer_problem(info, 12)
    d = execute(info, *codes_of(info, a, b, c), tail="neg:[1,0,1]")
    assert (d == expected(info, -a, b, -c)).all()


@covers("v_mfma_i32_16x16x64_i8")
def test_integer_sums_wrap() -> None:
    info = lookup("v_mfma_i32_16x16x64_i8")
    a = np.full((1, 16, 64), -128)
    c = np.full((1, 16, 16), 2**31 - 1)
    d = execute(info, *codes_of(info, a, a, c))
    assert signed(int(d[0, 3, 3])) == signed(2**31 - 1 + 64 * 128 * 128)
