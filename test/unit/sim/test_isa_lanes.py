# SPDX-License-Identifier: Apache-2.0
"""Instructions that move data between lanes or read lane masks: DPP, SDWA, readlane, permlane swaps, carries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.isa import ALL_LANES, FEW_INTEGERS, INTEGERS, LANES, PARTIAL_EXEC, covers, cross, run
from helpers.isa_reference import M16, M32, M64, signed

from sgl_amd_mono.sim import SimError

LANE = np.arange(LANES, dtype=np.uint32)
VALUE = LANE * 3 + 100  # what lane l of the DPP source holds
OLD = 0xDEAD0000


# ---- DPP: control text -> source lane of each lane (None: outside the row) -----------------------------------------


def _within_row(lane: int, source: int) -> int | None:
    return source if source // 16 == lane // 16 and source >= 0 else None


DPP: dict[str, Callable[[int], int | None]] = {
    "quad_perm:[3,0,0,2]": lambda lane: lane // 4 * 4 + (3, 0, 0, 2)[lane % 4],
    "quad_perm:[1,0,3,2]": lambda lane: lane ^ 1,
    "row_shl:1": lambda lane: _within_row(lane, lane + 1),
    "row_shl:15": lambda lane: _within_row(lane, lane + 15),
    "row_shr:1": lambda lane: _within_row(lane, lane - 1),
    "row_shr:4": lambda lane: _within_row(lane, lane - 4),
    "row_shr:15": lambda lane: _within_row(lane, lane - 15),
    "row_ror:1": lambda lane: lane // 16 * 16 + (lane - 1) % 16,
    "row_ror:13": lambda lane: lane // 16 * 16 + (lane - 13) % 16,
    "row_mirror": lambda lane: lane // 16 * 16 + 15 - lane % 16,
    "row_half_mirror": lambda lane: lane // 8 * 8 + 7 - lane % 8,
    "row_bcast:15": lambda lane: lane // 16 * 16 - 1 if lane >= 16 else None,  # lane 15 of the row before
    "row_bcast:31": lambda lane: 31 if lane >= 32 else None,
    "row_newbcast:5": lambda lane: lane // 16 * 16 + 5,
    "wave_shl:1": lambda lane: lane + 1 if lane < 63 else None,
    "wave_shr:1": lambda lane: lane - 1 if lane > 0 else None,
    "wave_rol:1": lambda lane: (lane + 1) % 64,
    "wave_ror:1": lambda lane: (lane - 1) % 64,
}


@pytest.mark.parametrize("bound_ctrl", [False, True])
@pytest.mark.parametrize("exec_mask", [ALL_LANES, PARTIAL_EXEC, 0x7FFF_FFFF_0000_8001])
@pytest.mark.parametrize("control", DPP)
def test_dpp_source_lanes(control: str, exec_mask: int, bound_ctrl: bool) -> None:
    """A source outside the row, or off in EXEC, gives 0 with bound_ctrl and leaves the destination alone without."""
    for row_mask, bank_mask in ((0xF, 0xF), (0xA, 0xF), (0xF, 0x6)):
        line = f"v_mov_b32_dpp v10, v20 {control} row_mask:{row_mask:#x} bank_mask:{bank_mask:#x}" + (
            " bound_ctrl:1" if bound_ctrl else ""
        )
        out = run([line], v={10: OLD + LANE, 20: VALUE}, out_v=[10], exec_mask=exec_mask)
        for lane, got in enumerate(out.v["v10"].tolist()):
            source = DPP[control](lane)
            enabled = exec_mask >> lane & 1 and row_mask >> lane // 16 & 1 and bank_mask >> lane // 4 % 4 & 1
            valid = source is not None and exec_mask >> source & 1
            if not enabled or (not valid and not bound_ctrl):
                want = OLD + lane
            else:
                want = int(VALUE[source]) if valid else 0
            assert got == want, f"{line}: lane {lane} holds {got:#x}, expected {want:#x}"


@covers("v_add_u32", "v_max_i32", "v_add_f32", "v_cndmask_b32", "v_add_co_u32")
def test_dpp_on_operations_and_in_place() -> None:
    """Only the first source is permuted, all its lanes are read before any is written, and other operands stay put."""
    dpp = "row_shr:1 row_mask:0xf bank_mask:0xf"
    lines = [
        f"v_add_u32_dpp v10, v10, v21 {dpp}",  # in place: a row shift of the old values
        f"v_max_i32_dpp v11, v20, v21 {dpp} bound_ctrl:1",
        f"v_add_f32_dpp v12, v22, v22 {dpp} bound_ctrl:1",
        f"v_cndmask_b32_dpp v13, v20, v21, vcc {dpp} bound_ctrl:1",
        f"v_add_co_u32_dpp v14, vcc, v20, v23 {dpp} bound_ctrl:1",
    ]
    floats = LANE.astype(np.float32)
    out = run(
        lines,
        v={
            10: VALUE,
            11: 0,
            12: 0,
            13: 0,
            14: 0,
            20: VALUE,
            21: 2 * LANE,
            22: floats.view(np.uint32),
            23: np.full(LANES, 0xFFFFFF80),
        },
        out_v=[10, 11, 12, 13, 14],
        vcc=0xF0F0F0F0F0F0F0F0,
    )
    first = LANE % 16 == 0
    shifted = np.where(first, 0, np.roll(VALUE, 1))
    assert out.v["v10"].tolist() == np.where(first, VALUE, shifted + 2 * LANE).tolist()
    assert out.v["v11"].tolist() == np.maximum(shifted, 2 * LANE).tolist()
    assert out.v["v12"].view(np.float32).tolist() == (np.where(first, 0, np.roll(floats, 1)) + floats).tolist()
    assert out.v["v13"].tolist() == np.where(LANE // 4 % 2 == 1, 2 * LANE, shifted).tolist()
    total = shifted.astype(np.uint64) + 0xFFFFFF80
    assert out.v["v14"].tolist() == (total & M32).tolist()
    assert int(out.vcc[0]) == sum(int(x >> 32) << lane for lane, x in enumerate(total.tolist()))


def test_dpp_on_64_bits_is_refused() -> None:
    with pytest.raises(SimError, match="64-bit"):
        run(["v_mov_b64_dpp v[10:11], v[20:21] row_newbcast:3 row_mask:0xf bank_mask:0xf"])


# ---- SDWA ----------------------------------------------------------------------------------------------------------

SELECTS = {
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
    "DWORD": (0, 32),
}
UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")


def _select(word: int, name: str, sext: bool = False) -> int:
    shift, bits = SELECTS[name]
    field = word >> shift & ((1 << bits) - 1)
    return signed(field, bits) & M32 if sext else field


def _place(value: int, name: str, unused: str, old: int) -> int:
    shift, bits = SELECTS[name]
    mask = ((1 << bits) - 1) << shift
    field = value << shift & mask
    if unused == "UNUSED_PRESERVE":
        return old & ~mask & M32 | field
    if unused == "UNUSED_SEXT" and value >> (bits - 1) & 1:
        field |= M32 << (shift + bits) & M32
    return field


@pytest.mark.parametrize("source", SELECTS)
@pytest.mark.parametrize("target", SELECTS)
def test_sdwa_selects(target: str, source: str) -> None:
    words = np.resize(np.array([0x80FF7F01, 0x12348765, 0xFFFFFFFF, 0, 0x00808000, 0x7F80FF81], dtype=np.uint32), LANES)
    for unused in UNUSED:
        for sext in (False, True):
            operand = "sext(v20)" if sext else "v20"
            line = f"v_mov_b32_sdwa v10, {operand} dst_sel:{target} dst_unused:{unused} src0_sel:{source}"
            out = run([line], v={10: 0xA1B2C3D4, 20: words}, out_v=[10], exec_mask=PARTIAL_EXEC)
            for lane, got in enumerate(out.v["v10"].tolist()):
                want = 0xA1B2C3D4
                if PARTIAL_EXEC >> lane & 1:
                    want = _place(_select(int(words[lane]), source, sext), target, unused, 0xA1B2C3D4)
                assert got == want, f"{line}: {int(words[lane]):#x} gives {got:#x}, expected {want:#x}"


@covers(
    "v_add_u32", "v_max_u32", "v_min_u32", "v_lshlrev_b32", "v_mul_u32_u24", "v_cmp_gt_u32", "v_add_f16", "v_or_b32"
)
def test_sdwa_on_operations() -> None:
    words = np.resize(np.array(INTEGERS, dtype=np.uint32), LANES)
    others = words[::-1].copy()
    full = "dst_sel:DWORD dst_unused:UNUSED_PAD"
    lines = [
        f"v_add_u32_sdwa v10, v20, v21 {full} src0_sel:WORD_1 src1_sel:BYTE_0",
        f"v_max_u32_sdwa v11, v20, v21 {full} src0_sel:WORD_0 src1_sel:WORD_1",
        f"v_min_u32_sdwa v12, v20, v21 {full} src0_sel:BYTE_3 src1_sel:DWORD",
        f"v_lshlrev_b32_sdwa v13, v22, v21 {full} src0_sel:DWORD src1_sel:BYTE_2",
        f"v_mul_u32_u24_sdwa v14, v20, v21 {full} src0_sel:BYTE_1 src1_sel:WORD_0",
        "v_or_b32_sdwa v15, v20, sext(v21) dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_0 src1_sel:BYTE_0",
        "v_add_f16_sdwa v16, v23, -v23 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:WORD_0",
        "v_cmp_gt_u32_sdwa vcc, v20, v21 src0_sel:BYTE_1 src1_sel:BYTE_2",
    ]
    out = run(
        lines,
        v={**dict.fromkeys(range(10, 17), 286335522), 20: words, 21: others, 22: 4, 23: 0x45003C00},  # 23: (1.0, 5.0)
        out_v=range(10, 17),
    )
    for lane in range(LANES):
        a, b = int(words[lane]), int(others[lane])
        got = [int(out.v[f"v{k}"][lane]) for k in range(10, 17)]
        want = [
            ((a >> 16) + (b & 255)) & M32,
            max(a & M16, b >> 16),
            min(a >> 24, b),
            (b >> 16 & 255) << 4,
            (a >> 8 & 255) * (b & M16),
            0x2222 | ((a & M16 | signed(b & 255, 8)) & M16) << 16,
            0x44000000,  # 5 - 1 = 4
        ]
        assert got == want, f"lane {lane}: {a:#x} {b:#x}"
        assert int(out.vcc[0]) >> lane & 1 == int((a >> 8 & 255) > (b >> 16 & 255))


# ---- lanes <-> scalars ---------------------------------------------------------------------------------------------


@covers("v_readfirstlane_b32", "v_readlane_b32", "v_writelane_b32")
def test_lanes_to_scalars_and_back() -> None:
    lines = [
        "v_readfirstlane_b32 s20, v20",
        "v_readlane_b32 s21, v20, 63",
        "v_readlane_b32 s22, v20, s30",  # 70: only six bits count
        "v_writelane_b32 v10, s31, 5",  # off in EXEC: written all the same
        "v_writelane_b32 v10, 17, s32",
    ]
    out = run(
        lines,
        v={10: OLD, 20: VALUE},
        s={30: 70, 31: 777, 32: 64 + 9},
        out_s=[20, 21, 22],
        out_v=[10],
        exec_mask=0xFF00FF00_00FF0040,
    )
    assert [int(out.s[f"s{k}"][0]) for k in (20, 21, 22)] == [int(VALUE[6]), int(VALUE[63]), int(VALUE[6])]
    assert out.v["v10"].tolist() == [777 if lane == 5 else 17 if lane == 9 else OLD for lane in range(LANES)]
    empty = run(["v_readfirstlane_b32 s20, v20"], v={20: VALUE}, out_s=[20], exec_mask=0)
    assert int(empty.s["s20"][0]) == int(VALUE[0]), "no lane on: lane 0 is read"


@covers("v_permlane16_swap_b32", "v_permlane32_swap_b32")
def test_permlane_swaps() -> None:
    a, b = LANE + 1000, LANE + 2000
    out = run(["v_permlane32_swap_b32 v10, v20"], v={10: a, 20: b}, out_v=[10, 20])
    # The upper half of the first register changes places with the lower half of the second.
    assert out.v["v10"].tolist() == [1000 + lane if lane < 32 else 2000 + lane - 32 for lane in range(LANES)]
    assert out.v["v20"].tolist() == [1000 + lane + 32 if lane < 32 else 2000 + lane for lane in range(LANES)]
    out = run(["v_permlane16_swap_b32 v10, v20"], v={10: a, 20: b}, out_v=[10, 20])
    # Odd rows of the first change places with even rows of the second.
    assert out.v["v10"].tolist() == [1000 + lane if lane // 16 % 2 == 0 else 2000 + lane - 16 for lane in range(LANES)]
    assert out.v["v20"].tolist() == [1000 + lane + 16 if lane // 16 % 2 == 0 else 2000 + lane for lane in range(LANES)]


@covers("v_accvgpr_write_b32", "v_accvgpr_read_b32", "v_accvgpr_mov_b32", "v_swap_b32", "v_prng_b32")
def test_register_moves_under_exec() -> None:
    lines = [
        "v_accvgpr_write_b32 a3, v20",
        "v_accvgpr_mov_b32 a4, a3",
        "v_accvgpr_read_b32 v10, a4",
        "v_swap_b32 v20, v21",
        "v_prng_b32 v11, v22",
    ]
    states = np.resize(np.array([1, 0x80000000, 0xFFFFFFFF, 0x40000001], dtype=np.uint32), LANES)
    out = run(
        lines,
        v={10: OLD, 11: OLD, 20: VALUE, 21: LANE, 22: states, "a3": 5, "a4": 6},
        out_v=[10, 11, 20, 21, "a3", "a4"],
        exec_mask=PARTIAL_EXEC,
    )
    on = np.array([PARTIAL_EXEC >> lane & 1 for lane in range(LANES)], dtype=bool)
    assert out.v["v10"].tolist() == np.where(on, VALUE, OLD).tolist()
    assert out.v["a3"].tolist() == np.where(on, VALUE, 5).tolist()
    assert out.v["a4"].tolist() == np.where(on, VALUE, 6).tolist()
    assert out.v["v20"].tolist() == np.where(on, LANE, VALUE).tolist()
    assert out.v["v21"].tolist() == np.where(on, VALUE, LANE).tolist()
    # One step of the shift register with taps 0xC5.
    step = {1: 2, 0x80000000: 0xC5, 0xFFFFFFFF: 0xFFFFFFFE ^ 0xC5, 0x40000001: 0x80000002}
    assert out.v["v11"].tolist() == [step[int(x)] if on[lane] else OLD for lane, x in enumerate(states)]


# ---- masks ---------------------------------------------------------------------------------------------------------

CARRIES: dict[str, Callable[[int, int, int], tuple[int, int]]] = {
    "v_add_co_u32": lambda a, b, c: ((a + b) & M32, (a + b) >> 32),
    "v_sub_co_u32": lambda a, b, c: ((a - b) & M32, int(a < b)),
    "v_subrev_co_u32": lambda a, b, c: ((b - a) & M32, int(b < a)),
    "v_addc_co_u32": lambda a, b, c: ((a + b + c) & M32, (a + b + c) >> 32),
    "v_subb_co_u32": lambda a, b, c: ((a - b - c) & M32, int(a < b + c)),
    "v_subbrev_co_u32": lambda a, b, c: ((b - a - c) & M32, int(b < a + c)),
}


@covers(*CARRIES)
def test_carries_in_and_out() -> None:
    """Carry bits of lanes that are off become 0."""
    a, b = cross(FEW_INTEGERS, FEW_INTEGERS)
    carry_in = 0xAAAA_5555_F0F0_3333
    for name, function in CARRIES.items():
        takes = "c_co" in name or "subb" in name
        for exec_mask in (ALL_LANES, PARTIAL_EXEC):
            for e64 in (False, True):
                mask = "s[30:31]" if e64 else "vcc"
                line = f"{name}_{'e64' if e64 else 'e32'} v10, {mask}, v20, v21" + (f", {mask}" if takes else "")
                scalars = {30: carry_in & M32, 31: carry_in >> 32}
                out = run(
                    [line],
                    v={10: OLD, 20: a, 21: b},
                    s=scalars,
                    out_s=[30, 31],
                    out_v=[10],
                    exec_mask=exec_mask,
                    vcc=carry_in,
                )
                masks = (
                    out.s["s30"].astype(np.uint64) | out.s["s31"].astype(np.uint64) << np.uint64(32) if e64 else out.vcc
                )
                for lane, got in enumerate(out.v["v10"].tolist()):
                    on = exec_mask >> lane % LANES & 1
                    value, carry = function(int(a[lane]), int(b[lane]), carry_in >> lane % LANES & 1)
                    assert got == (value if on else OLD), f"{line}: lane {lane}"
                    assert int(masks[lane // LANES]) >> lane % LANES & 1 == (carry if on else 0), (
                        f"{line}: carry of lane {lane}"
                    )


@covers("v_mad_u64_u32", "v_mad_i64_i32")
def test_wide_multiply_add() -> None:
    longs = (0, 1, M32, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, M64)
    a, b, c = cross(FEW_INTEGERS, FEW_INTEGERS, longs)
    a, b = a.astype(np.uint32), b.astype(np.uint32)
    v = {
        20: a,
        21: b,
        22: (c & np.uint64(M32)).astype(np.uint32),
        23: (c >> np.uint64(32)).astype(np.uint32),
        10: OLD,
        11: OLD,
    }
    for name in ("v_mad_u64_u32", "v_mad_i64_i32"):
        for exec_mask in (ALL_LANES, PARTIAL_EXEC):
            out = run(
                [f"{name} v[10:11], s[30:31], v20, v21, v[22:23]"],
                v=v,
                out_v=[10, 11],
                out_s=[30, 31],
                exec_mask=exec_mask,
            )
            for lane in range(len(a)):
                x, y, z = int(a[lane]), int(b[lane]), int(c[lane])
                if name == "v_mad_i64_i32":
                    total = signed(x) * signed(y) + signed(z, 64)
                    carry = int(not -(2**63) <= total < 2**63)
                else:
                    total = x * y + z
                    carry = total >> 64
                got = int(out.v["v10"][lane]) | int(out.v["v11"][lane]) << 32
                on = exec_mask >> lane % LANES & 1
                assert got == (total & M64 if on else OLD << 32 | OLD), f"{name}({x:#x}, {y:#x}, {z:#x}) = {got:#x}"
                word = int(out.s["s30"][lane // LANES]) | int(out.s["s31"][lane // LANES]) << 32
                if name == "v_mad_u64_u32":
                    assert word >> lane % LANES & 1 == (carry if on else 0), f"{name}({x:#x}, {y:#x}, {z:#x}): carry"


@covers("v_cndmask_b32")
def test_conditional_mask() -> None:
    mask = 0xF00F_1234_8000_0001
    for line, vcc in (
        ("v_cndmask_b32_e32 v10, v20, v21, vcc", mask),
        ("v_cndmask_b32_e64 v10, v20, -v21, s[30:31]", 0),
    ):
        out = run(
            [line],
            v={10: OLD, 20: VALUE, 21: LANE},
            s={30: mask & M32, 31: mask >> 32},
            out_v=[10],
            exec_mask=PARTIAL_EXEC,
            vcc=vcc,
        )
        second = LANE if "e32" in line else LANE ^ 0x80000000  # a negation flips the sign bit
        want = [
            OLD if not PARTIAL_EXEC >> lane & 1 else int(second[lane]) if mask >> lane & 1 else int(VALUE[lane])
            for lane in range(LANES)
        ]
        assert out.v["v10"].tolist() == want, line


@covers("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def test_lane_counts_of_a_mask() -> None:
    mask = 0xF00F_1234_8000_0421
    lines = ["v_mbcnt_lo_u32_b32 v10, s30, v20", "v_mbcnt_hi_u32_b32 v10, s31, v10"]
    out = run(lines, v={20: 1000}, s={30: mask & M32, 31: mask >> 32}, out_v=[10])
    assert out.v["v10"].tolist() == [1000 + (mask & ((1 << lane) - 1)).bit_count() for lane in range(LANES)]


@covers("v_bitop3_b32", "v_bitop3_b16")
def test_three_input_truth_tables() -> None:
    """Bit n of the table is the result where A, B, C are bits 2, 1, 0 of n."""
    a, b, c = 0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA
    words = np.random.default_rng(3).integers(0, 2**32, (3, LANES), dtype=np.uint32)
    for table in (0x00, 0x01, 0x80, 0x96, 0xE8, 0xCA, 0xFF, 0x3C, 0x1B):
        out = run(
            [
                f"v_bitop3_b32 v10, v20, v21, v22 bitop3:{table:#x}",
                f"v_bitop3_b16 v11, v23, v24, v25 bitop3:{table:#x}",
            ],
            v={20: a, 21: b, 22: c, 23: words[0], 24: words[1], 25: words[2], 11: OLD},
            out_v=[10, 11],
        )
        assert int(out.v["v10"][0]) == table * 0x01010101
        for lane in range(LANES):
            x, y, z = (int(w[lane]) for w in words)
            want = sum((table >> (4 * (x >> n & 1) + 2 * (y >> n & 1) + (z >> n & 1)) & 1) << n for n in range(16))
            assert int(out.v["v11"][lane]) & M16 == want
