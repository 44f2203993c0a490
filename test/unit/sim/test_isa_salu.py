# SPDX-License-Identifier: Apache-2.0
"""Scalar ALU instructions: result and SCC of every operation against its definition, for both incoming SCC."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from helpers.isa import ALL_LANES, covers, registers, run
from helpers.isa_reference import M16, M32, M64, clamp, signed

WORDS = (
    0,
    1,
    5,
    31,
    32,
    0x7F,
    0x80,
    0x8000,
    0x10003,
    0x200004,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFE,
    M32,
    0x12345678,
    0xA5A5F00F,
)
PAIRS = (
    0,
    1,
    40,
    M32,
    0x100000000,
    0x7FFFFFFFFFFFFFFF,
    0x8000000000000000,
    M64,
    0x00FF00FF12345678,
    0xFFFFFFFF80000000,
)
SENTINEL = 0x5EED_CAFE_0BAD_F00D

Result = tuple[int | None, int | None]  # (result, SCC); None: unchanged


@dataclasses.dataclass(frozen=True)
class Case:
    """`shape`: "result=sources" with i = 32 bits, q = 64 bits, k = 16-bit immediate; `expect(*sources, scc, old)`."""

    name: str
    shape: str
    expect: Callable[..., Result]

    @property
    def result(self) -> str:
        return self.shape.split("=")[0]

    @property
    def sources(self) -> str:
        return self.shape.split("=")[1]


def _nonzero(value: int, bits: int = 32) -> Result:
    value &= (1 << bits) - 1
    return value, int(value != 0)


def _overflow(value: int) -> Result:
    return value & M32, int(not -(2**31) <= value < 2**31)


def _carry(value: int) -> Result:
    return value & M32, int(value >> 32 != 0)


def _field(a: int, b: int, bits: int, is_signed: bool) -> Result:
    offset, width = b & (bits - 1), b >> 16 & 127
    if width == 0:
        return 0, 0
    x = (signed(a, bits) if is_signed else a) >> offset
    if width < bits:
        x = signed(x, width) if is_signed else x & ((1 << width) - 1)
    return _nonzero(x, bits)


def _count_from_top(a: int, bits: int) -> int:
    return bits - a.bit_length() if a else M32


def _sign_run(a: int, bits: int) -> int:
    """Distance from the top of the first bit that differs from the sign."""
    return next((n for n in range(1, bits) if a >> (bits - 1 - n) & 1 != a >> (bits - 1)), M32)


def _first(a: int, bits: int, value: int) -> int:
    return next((n for n in range(bits) if a >> n & 1 == value), M32)


def _quads(a: int, bits: int) -> int:
    return sum(int(a >> 4 * n & 15 != 0) << n for n in range(bits // 4))


def _whole_quads(a: int, bits: int) -> int:
    return sum(15 << 4 * n for n in range(bits // 4) if a >> 4 * n & 15)


def _logic(bits: int) -> list[Case]:
    k, suffix, mask = ("i", "b32", M32) if bits == 32 else ("q", "b64", M64)
    functions: dict[str, Callable[[int, int], int]] = {
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "nand": lambda a, b: ~(a & b),
        "nor": lambda a, b: ~(a | b),
        "xnor": lambda a, b: ~(a ^ b),
        "andn2": lambda a, b: a & ~b,
        "orn2": lambda a, b: a | ~b,
    }

    def case(name: str, function: Callable[[int, int], int]) -> Case:
        return Case(f"s_{name}_{suffix}", f"{k}={k}{k}", lambda a, b, scc, old: _nonzero(function(a, b), bits))

    def unary(name: str, shape: str, function: Callable[[int], Result]) -> Case:
        return Case(name, shape, lambda a, scc, old: function(a))

    return [
        *(case(name, function) for name, function in functions.items()),
        unary(f"s_not_{suffix}", f"{k}={k}", lambda a: _nonzero(~a, bits)),
        unary(f"s_mov_{suffix}", f"{k}={k}", lambda a: (a, None)),
        Case(f"s_cmov_{suffix}", f"{k}={k}", lambda a, scc, old: (a if scc else old, None)),
        Case(f"s_cselect_{suffix}", f"{k}={k}{k}", lambda a, b, scc, old: (a if scc else b, None)),
        Case(f"s_lshl_{suffix}", f"{k}={k}i", lambda a, b, scc, old: _nonzero(a << (b & (bits - 1)), bits)),
        Case(f"s_lshr_{suffix}", f"{k}={k}i", lambda a, b, scc, old: _nonzero(a >> (b & (bits - 1)), bits)),
        Case(
            f"s_ashr_i{bits}", f"{k}={k}i", lambda a, b, scc, old: _nonzero(signed(a, bits) >> (b & (bits - 1)), bits)
        ),
        Case(
            f"s_bfm_{suffix}",
            f"{k}=ii",
            lambda a, b, scc, old: (((1 << (a & (bits - 1))) - 1) << (b & (bits - 1)) & mask, None),
        ),
        Case(f"s_bfe_u{bits}", f"{k}={k}i", lambda a, b, scc, old: _field(a, b, bits, False)),
        Case(f"s_bfe_i{bits}", f"{k}={k}i", lambda a, b, scc, old: _field(a, b, bits, True)),
        unary(f"s_brev_{suffix}", f"{k}={k}", lambda a: (int(f"{a:0{bits}b}"[::-1], 2), None)),
        unary(f"s_bcnt0_i32_{suffix}", f"i={k}", lambda a: _nonzero(bits - a.bit_count())),
        unary(f"s_bcnt1_i32_{suffix}", f"i={k}", lambda a: _nonzero(a.bit_count())),
        unary(f"s_ff0_i32_{suffix}", f"i={k}", lambda a: (_first(a, bits, 0), None)),
        unary(f"s_ff1_i32_{suffix}", f"i={k}", lambda a: (_first(a, bits, 1), None)),
        unary(f"s_flbit_i32_{suffix}", f"i={k}", lambda a: (_count_from_top(a, bits), None)),
        unary("s_flbit_i32" if bits == 32 else "s_flbit_i32_i64", f"i={k}", lambda a: (_sign_run(a, bits), None)),
        unary(f"s_quadmask_{suffix}", f"{k}={k}", lambda a: _nonzero(_quads(a, bits), bits)),
        unary(f"s_wqm_{suffix}", f"{k}={k}", lambda a: _nonzero(_whole_quads(a, bits), bits)),
        Case(f"s_bitset0_{suffix}", f"{k}=i", lambda a, scc, old: (old & ~(1 << (a & (bits - 1))), None)),
        Case(f"s_bitset1_{suffix}", f"{k}=i", lambda a, scc, old: (old | 1 << (a & (bits - 1)), None)),
        Case(f"s_bitcmp0_{suffix}", f"={k}i", lambda a, b, scc, old: (None, int(not a >> (b & (bits - 1)) & 1))),
        Case(f"s_bitcmp1_{suffix}", f"={k}i", lambda a, b, scc, old: (None, a >> (b & (bits - 1)) & 1)),
    ]


COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def _comparisons() -> list[Case]:
    cases = []
    for name, function in COMPARISONS.items():

        def unsigned_case(a: int, b: int, scc: int, old: int, function: Callable = function) -> Result:
            return None, int(function(a, b))

        def signed_case(a: int, b: int, scc: int, old: int, function: Callable = function) -> Result:
            return None, int(function(signed(a), signed(b)))

        def signed_immediate(a: int, b: int, scc: int, old: int, function: Callable = function) -> Result:
            return None, int(function(signed(a), signed(b, 16)))

        cases += [
            Case(f"s_cmp_{name}_u32", "=ii", unsigned_case),
            Case(f"s_cmp_{name}_i32", "=ii", signed_case),
            Case(f"s_cmpk_{name}_u32", "=ik", unsigned_case),
            Case(f"s_cmpk_{name}_i32", "=ik", signed_immediate),
        ]
        if name in ("eq", "lg"):
            cases.append(Case(f"s_cmp_{name}_u64", "=qq", unsigned_case))
    return cases


SALU = [
    *_logic(32),
    *_logic(64),
    *_comparisons(),
    Case("s_movk_i32", "i=k", lambda a, scc, old: (signed(a, 16) & M32, None)),
    Case("s_cmovk_i32", "i=k", lambda a, scc, old: (signed(a, 16) & M32 if scc else old, None)),
    Case("s_addk_i32", "i=k", lambda a, scc, old: _overflow(signed(old) + signed(a, 16))),
    Case("s_mulk_i32", "i=k", lambda a, scc, old: (signed(old) * signed(a, 16) & M32, None)),
    Case("s_add_u32", "i=ii", lambda a, b, scc, old: _carry(a + b)),
    Case("s_sub_u32", "i=ii", lambda a, b, scc, old: ((a - b) & M32, int(a < b))),
    Case("s_addc_u32", "i=ii", lambda a, b, scc, old: _carry(a + b + scc)),
    Case("s_subb_u32", "i=ii", lambda a, b, scc, old: ((a - b - scc) & M32, int(a < b + scc))),
    Case("s_add_i32", "i=ii", lambda a, b, scc, old: _overflow(signed(a) + signed(b))),
    Case("s_sub_i32", "i=ii", lambda a, b, scc, old: _overflow(signed(a) - signed(b))),
    Case("s_mul_i32", "i=ii", lambda a, b, scc, old: (a * b & M32, None)),
    Case("s_mul_hi_u32", "i=ii", lambda a, b, scc, old: (a * b >> 32, None)),
    Case("s_mul_hi_i32", "i=ii", lambda a, b, scc, old: (signed(a) * signed(b) >> 32 & M32, None)),
    # The difference wraps to 32 bits before its absolute value is taken.
    Case("s_absdiff_i32", "i=ii", lambda a, b, scc, old: _nonzero(abs(signed(a - b)))),
    Case("s_abs_i32", "i=i", lambda a, scc, old: _nonzero(abs(signed(a)))),
    Case("s_min_i32", "i=ii", lambda a, b, scc, old: (min(signed(a), signed(b)) & M32, int(signed(a) < signed(b)))),
    Case("s_min_u32", "i=ii", lambda a, b, scc, old: (min(a, b), int(a < b))),
    # CDNA: SCC of the maxima is ">=".
    Case("s_max_i32", "i=ii", lambda a, b, scc, old: (max(signed(a), signed(b)) & M32, int(signed(a) >= signed(b)))),
    Case("s_max_u32", "i=ii", lambda a, b, scc, old: (max(a, b), int(a >= b))),
    Case("s_lshl1_add_u32", "i=ii", lambda a, b, scc, old: _carry((a << 1) + b)),
    Case("s_lshl2_add_u32", "i=ii", lambda a, b, scc, old: _carry((a << 2) + b)),
    Case("s_lshl3_add_u32", "i=ii", lambda a, b, scc, old: _carry((a << 3) + b)),
    Case("s_lshl4_add_u32", "i=ii", lambda a, b, scc, old: _carry((a << 4) + b)),
    Case("s_pack_ll_b32_b16", "i=ii", lambda a, b, scc, old: (a & M16 | (b & M16) << 16, None)),
    Case("s_pack_lh_b32_b16", "i=ii", lambda a, b, scc, old: (a & M16 | b >> 16 << 16, None)),
    Case("s_pack_hh_b32_b16", "i=ii", lambda a, b, scc, old: (a >> 16 | b >> 16 << 16, None)),
    Case("s_sext_i32_i8", "i=i", lambda a, scc, old: (signed(a, 8) & M32, None)),
    Case("s_sext_i32_i16", "i=i", lambda a, scc, old: (signed(a, 16) & M32, None)),
]
COVERED = tuple(case.name for case in SALU)
IMMEDIATES = (0, 1, 0x7FFF, 0x8000, 0xFFFF, 0x1234)


def _run(
    case: Case, sources: Sequence[np.ndarray], scc: np.ndarray, immediate: int | None
) -> tuple[np.ndarray, np.ndarray]:
    count = len(scc)
    scalars: dict[int, object] = {20: SENTINEL & M32, 21: SENTINEL >> 32}
    texts, register = [], 30
    for kind, column in zip(case.sources.replace("k", ""), sources, strict=True):
        scalars[register] = (column & np.uint64(M32)).astype(np.uint32)
        if kind == "q":
            scalars[register + 1] = (column >> np.uint64(32)).astype(np.uint32)
        texts.append(registers("s", register, 2 if kind == "q" else 1))
        register += 2
    if immediate is not None:
        texts.append(hex(immediate))
    if case.result:
        texts.insert(0, registers("s", 20, 2 if case.result == "q" else 1))
    out = run([f"{case.name} {', '.join(texts)}"], s=scalars, out_s=[20, 21], scc=scc)
    assert len(out.scc) == count
    return out.s["s20"].astype(np.uint64) | out.s["s21"].astype(np.uint64) << np.uint64(32), out.scc


@pytest.mark.parametrize("case", SALU, ids=lambda case: case.name)
def test_every_scalar_operation_matches_its_definition(case: Case) -> None:
    pools = [np.array(PAIRS if kind == "q" else WORDS, dtype=np.uint64) for kind in case.sources.replace("k", "")]
    grid = [g.ravel() for g in np.meshgrid(np.array([0, 1], dtype=np.uint64), *pools, indexing="ij")]
    scc, sources = grid[0], grid[1:]
    for immediate in IMMEDIATES if "k" in case.sources else (None,):
        results, flags = _run(case, sources, scc, immediate)
        for n in range(len(scc)):
            operands = [int(column[n]) for column in sources] + ([] if immediate is None else [immediate])
            old = SENTINEL if case.result == "q" else SENTINEL & M32
            want, want_scc = case.expect(*operands, int(scc[n]), old)
            untouched = SENTINEL if case.result == "q" or want is None else SENTINEL >> 32 << 32
            whole = SENTINEL if want is None else want if case.result == "q" else want | untouched
            where = f"{case.name}{tuple(map(hex, operands))} scc={scc[n]}"
            assert int(results[n]) == whole, f"{where}: {int(results[n]):#x}, expected {whole:#x}"
            assert int(flags[n]) == (int(scc[n]) if want_scc is None else want_scc), f"{where}: SCC {flags[n]}"


SAVE_EXEC: dict[str, Callable[[int, int], int]] = {
    "s_and_saveexec_b64": lambda a, e: a & e,
    "s_or_saveexec_b64": lambda a, e: a | e,
    "s_xor_saveexec_b64": lambda a, e: a ^ e,
    "s_andn2_saveexec_b64": lambda a, e: a & ~e,
    "s_orn2_saveexec_b64": lambda a, e: a | ~e,
    "s_andn1_saveexec_b64": lambda a, e: ~a & e,
    "s_orn1_saveexec_b64": lambda a, e: ~a | e,
    "s_nand_saveexec_b64": lambda a, e: ~(a & e),
    "s_nor_saveexec_b64": lambda a, e: ~(a | e),
    "s_xnor_saveexec_b64": lambda a, e: ~(a ^ e),
    "s_andn1_wrexec_b64": lambda a, e: ~a & e,
    "s_andn2_wrexec_b64": lambda a, e: a & ~e,
}


@covers(*SAVE_EXEC)
def test_exec_masks_are_saved_and_changed() -> None:
    masks = np.array([0, 1, ALL_LANES, 0x00FF00FF00FF00FF, 0x8000000000000001], dtype=np.uint64)
    a, e = (g.ravel() for g in np.meshgrid(masks, masks, indexing="ij"))
    for name, function in SAVE_EXEC.items():
        out = run(
            [f"{name} s[20:21], s[30:31]", "v_mov_b32 v10, 7"],
            s={30: (a & np.uint64(M32)).astype(np.uint32), 31: (a >> np.uint64(32)).astype(np.uint32)},
            v={10: 3},
            out_s=[20, 21],
            out_v=[10],
            exec_mask=e,
            scc=np.arange(len(a)) & 1,
        )
        for n in range(len(a)):
            want = function(int(a[n]), int(e[n])) & M64
            destination = int(out.s["s20"][n]) | int(out.s["s21"][n]) << 32
            assert int(out.exec[n]) == want, name
            assert destination == (want if "wrexec" in name else int(e[n])), name
            assert out.scc[n] == int(want != 0), name
            lanes = out.v["v10"][64 * n : 64 * n + 64].tolist()
            assert lanes == [7 if want >> lane & 1 else 3 for lane in range(64)], (
                f"{name}: the next instruction's lanes"
            )


@covers("s_getpc_b64", "s_setpc_b64", "s_swappc_b64")
def test_program_counter_moves() -> None:
    """A call through s_swappc comes back behind it with s_setpc; s_getpc names the next instruction."""
    lines = [
        "s_mov_b32 s20, 0",
        "s_getpc_b64 s[30:31]",
        "s_cmp_lg_u32 s20, 0",  # s_setpc below comes back here
        "s_cbranch_scc1 .Ltwice",
        "s_mov_b32 s20, 1",
        "s_setpc_b64 s[30:31]",
        "s_mov_b32 s20, 99",  # never reached
        ".Ltwice:",
        "s_addk_i32 s20, 0x10",
        "s_getpc_b64 s[32:33]",
        "s_cmp_lg_u32 s21, 5",  # the first pass calls, the second goes on
        "s_cbranch_scc0 .Lend_test",
        "s_mov_b32 s21, 5",
        "s_swappc_b64 s[34:35], s[32:33]",
        "s_mov_b32 s20, 98",
        ".Lend_test:",
        "s_nop 0",
    ]
    out = run(lines, s={21: 0}, out_s=[20])
    assert out.s["s20"].tolist() == [0x11]


@covers("s_movrels_b32", "s_movreld_b32")
def test_relative_scalar_moves() -> None:
    out = run(
        ["s_mov_b32 m0, 2", "s_movrels_b32 s20, s30", "s_mov_b32 m0, 3", "s_movreld_b32 s40, s31"],
        s={30: 1, 31: 2, 32: 3, 43: 0},
        out_s=[20, 43],
    )
    assert (out.s["s20"][0], out.s["s43"][0]) == (3, 2)


@covers("s_getreg_b32", "s_setreg_b32", "s_setreg_imm32_b32")
def test_mode_register_fields() -> None:
    """hwreg(HW_REG_MODE, offset, size): reads and writes touch just the field."""
    out = run(
        [
            "s_getreg_b32 s20, hwreg(HW_REG_MODE, 0, 8)",  # round modes 0, denormals kept in all formats
            "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0",
            "s_getreg_b32 s21, hwreg(HW_REG_MODE, 0, 8)",
            "s_setreg_b32 hwreg(HW_REG_MODE, 4, 2), s30",
            "s_getreg_b32 s22, hwreg(HW_REG_MODE, 4, 2)",
        ],
        s={30: 0xF},
        out_s=[20, 21, 22],
    )
    assert [int(out.s[f"s{k}"][0]) for k in (20, 21, 22)] == [0xF0, 0xC0, 3]


@covers("s_set_gpr_idx_on", "s_set_gpr_idx_off", "s_set_gpr_idx_idx", "s_set_gpr_idx_mode")
def test_vector_registers_indexed_by_a_scalar() -> None:
    out = run(
        [
            "s_set_gpr_idx_on s30, gpr_idx(SRC0)",
            "v_mov_b32_e32 v10, v20",  # v22
            "s_set_gpr_idx_idx s31",
            "v_mov_b32_e32 v11, v20",  # v23
            "s_set_gpr_idx_mode gpr_idx(DST)",
            "v_mov_b32_e32 v12, v21",  # to v15
            "s_set_gpr_idx_off",
            "v_mov_b32_e32 v13, v20",
        ],
        s={30: 2, 31: 3},
        v={20: 100, 21: 101, 22: 102, 23: 103, 10: 0, 11: 0, 12: 0, 13: 0, 15: 0},
        out_v=[10, 11, 12, 13, 15],
    )
    assert [int(out.v[f"v{k}"][0]) for k in (10, 11, 12, 13, 15)] == [102, 103, 0, 100, 101]


def test_hand_worked_scalar_values() -> None:
    """A few results worked out by hand, independent of the definitions above."""
    assert clamp(5, 0, 3) == 3
    cases = [
        ("s_sub_u32 s20, s30, s31", 1, 2, M32, 1),
        ("s_add_i32 s20, s30, s31", 0x7FFFFFFF, 1, 0x80000000, 1),
        ("s_bfe_i32 s20, s30, s31", 0x0000F000, 0x4000C, M32, 1),
        ("s_bfe_u32 s20, s30, s31", 0xABCD1234, 0x100010, 0xABCD, 1),
        ("s_lshl_b32 s20, s30, s31", 3, 33, 6, 1),
        ("s_max_u32 s20, s30, s31", 4, 4, 4, 1),
        ("s_lshl3_add_u32 s20, s30, s31", 0x20000000, 1, 1, 1),
        ("s_flbit_i32_b32 s20, s30", 0x00010000, 0, 15, 0),
    ]
    for line, a, b, want, scc in cases:
        out = run([line], s={30: a, 31: b}, out_s=[20])
        assert (int(out.s["s20"][0]), int(out.scc[0])) == (want, scc), line
