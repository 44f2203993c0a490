# SPDX-License-Identifier: Apache-2.0
"""Branches, waits, barriers, clocks, cache maintenance, traps, and memory that is private to a lane."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.isa import LANES, PARTIAL_EXEC, covers, kernel_text, registers, run
from helpers.isa_reference import M32

from sgl_amd_mono.sim import CodeObject, Launch, Machine, SimFault, Stall

LANE = np.arange(LANES, dtype=np.uint32)
OLD = 0xC0FFEE00

# What a conditional branch tests: (mnemonic, SCC, VCC, EXEC, taken).
BRANCHES = [
    ("s_cbranch_scc0", 0, 0, 1, True),
    ("s_cbranch_scc0", 1, 0, 1, False),
    ("s_cbranch_scc1", 1, 0, 1, True),
    ("s_cbranch_scc1", 0, 0, 1, False),
    ("s_cbranch_vccz", 0, 0, 1, True),
    ("s_cbranch_vccz", 0, 1 << 63, 1, False),
    ("s_cbranch_vccnz", 0, 1 << 63, 1, True),
    ("s_cbranch_vccnz", 1, 0, 1, False),
    ("s_cbranch_execz", 0, 0, 0, True),
    ("s_cbranch_execz", 0, 0, 1 << 40, False),
    ("s_cbranch_execnz", 0, 0, 1 << 40, True),
    ("s_cbranch_execnz", 0, 0, 0, False),
    ("s_branch", 0, 0, 1, True),
]


@covers(*{row[0] for row in BRANCHES})
def test_branches() -> None:
    for name, scc, vcc, exec_mask, taken in BRANCHES:
        lines = [
            f"{name} .Ltaken",
            "s_movk_i32 s20, 2",
            "s_branch .Ldone",
            ".Ltaken:",
            "s_movk_i32 s20, 1",
            ".Ldone:",
            "s_nop 0",
        ]
        out = run(lines, s={20: 0}, out_s=[20], scc=scc, vcc=vcc, exec_mask=exec_mask)
        assert int(out.s["s20"][0]) == (1 if taken else 2), f"{name} scc={scc} vcc={vcc:#x} exec={exec_mask:#x}"


@covers("s_cbranch_scc1", "s_call_b64", "s_setpc_b64")
def test_loops_and_calls() -> None:
    loop = ["s_mov_b32 s20, 0", ".Lagain:", "s_addk_i32 s20, 3", "s_cmp_lt_u32 s20, s30", "s_cbranch_scc1 .Lagain"]
    out = run(loop, s={30: np.array([1, 30, 3000])}, out_s=[20])
    assert out.s["s20"].tolist() == [3, 30, 3000]
    call = [
        "s_call_b64 s[40:41], .Lroutine",
        "s_addk_i32 s20, 100",
        "s_branch .Lover",
        ".Lroutine:",
        "s_addk_i32 s20, 1",
        "s_setpc_b64 s[40:41]",
        ".Lover:",
        "s_nop 0",
    ]
    out = run(call, s={20: 5}, out_s=[20])
    assert int(out.s["s20"][0]) == 106


WITHOUT_EFFECT = {
    "s_nop": "s_nop 7", "s_setprio": "s_setprio 2", "s_sleep": "s_sleep 3",
    "s_waitcnt": "s_waitcnt vmcnt(0) expcnt(0) lgkmcnt(0)",
    "s_icache_inv": "s_icache_inv", "s_dcache_inv": "s_dcache_inv", "s_dcache_wb": "s_dcache_wb",
    "s_dcache_inv_vol": "s_dcache_inv_vol",
    "s_dcache_wb_vol": "s_dcache_wb_vol", "s_ttracedata": "s_ttracedata", "s_incperflevel": "s_incperflevel 1",
    "s_decperflevel": "s_decperflevel 1",
    "s_wakeup": "s_wakeup", "v_nop": "v_nop", "buffer_inv": "buffer_inv sc1", "buffer_wbl2": "buffer_wbl2 sc0 sc1",
    "s_sendmsg": "s_sendmsg sendmsg(MSG_INTERRUPT)",
    "s_sethalt": "s_sethalt 0", "ds_nop": "ds_nop",
}  # fmt: skip


@covers(*WITHOUT_EFFECT)
def test_instructions_that_change_no_register() -> None:
    for name, line in WITHOUT_EFFECT.items():
        out = run([line], v={10: LANE}, s={20: 7}, out_v=[10], out_s=[20], scc=1, vcc=0x1234, exec_mask=PARTIAL_EXEC)
        assert out.v["v10"].tolist() == LANE.tolist(), name
        assert (int(out.s["s20"][0]), int(out.scc[0]), int(out.vcc[0]), int(out.exec[0])) == (
            7,
            1,
            0x1234,
            PARTIAL_EXEC,
        ), name


@covers("s_setvskip", "global_store_dword", "ds_write_b32", "v_mfma_f32_16x16x4_f32")
def test_vskip_leaves_out_vector_instructions_alone() -> None:
    """Bit S1[4:0] of S0; branches and scalar instructions run on, memory and LDS are not touched, no counter moves."""
    memory = np.full(LANES, OLD, np.uint32)
    lines = [
        "ds_write_b32 v20, v11",
        "s_mov_b64 s[40:41], s[34:35]",
        "s_setvskip s30, s31",
        "v_mov_b32_e32 v10, 7",
        "v_add_f32_e64 v12, v12, 1.0 clamp",
        "v_mov_b32_dpp v13, v11 quad_perm:[0,0,0,0] row_mask:0xf bank_mask:0xf",
        "v_readfirstlane_b32 s20, v11",
        "v_cmp_eq_u32_e64 vcc, v11, v11",
        "v_mfma_f32_16x16x4_f32 v[24:27], v11, v11, 0",
        "ds_write_b32 v20, v21",
        "global_store_dword v20, v21, s[40:41]",
        "s_branch .Lon",
        "s_trap 2",
        ".Lon:",
        "s_movk_i32 s21, 3",
        "ds_read_b32 v22, v20",
        "s_setvskip 0, 0",
        "v_mov_b32_e32 v14, 9",
        "s_waitcnt lgkmcnt(0)",
        "ds_read_b32 v23, v20",
        "s_waitcnt lgkmcnt(0)",
    ]
    bits = np.array([0, 5, 31, 37, 5, 4])  # S1; only its low five bits count
    words = np.array([1, 1 << 5, 1 << 31, 1 << 5, ~(1 << 5) & M32, 0])
    for bit, word, skipped in zip(bits, words, (True, True, True, True, False, False)):
        memory[:] = OLD
        out = run(
            lines,
            v={10: OLD, 11: LANE, 12: OLD, 13: OLD, 14: OLD, 20: 4 * LANE, 21: 100 + LANE, 22: OLD, 24: OLD},
            s={20: 5, 30: word, 31: bit, 34: memory.ctypes.data & M32, 35: memory.ctypes.data >> 32},
            out_v=[10, 12, 13, 14, 22, 23, 24], out_s=[20, 21], vcc=0x1234, lds_bytes=256,
            map_more=lambda machine: machine.map_tensor(0, memory, "memory"),
        )  # fmt: skip
        assert (out.v["v14"] == 9).all() and int(out.s["s21"][0]) == 3
        for name, ran in (("v10", 7), ("v12", 0), ("v13", LANE // 4 * 4), ("v22", 100 + LANE)):
            assert (out.v[name] == (OLD if skipped else ran)).all(), f"{name}, bit {bit} of {word:#x}"
        assert (out.v["v23"] == (LANE if skipped else 100 + LANE)).all()
        assert (memory == (OLD if skipped else 100 + LANE)).all()
        assert int(out.s["s20"][0]) == (5 if skipped else 0)
        assert int(out.vcc[0]) == (0x1234 if skipped else 2**64 - 1)
        assert (out.v["v24"] == OLD).all() == skipped


def test_a_watched_instruction_is_skipped_too() -> None:
    """A fault-injection point on a vector instruction does not run it under VSKIP; without it the store faults."""
    store = "global_store_dword v0, v0, s[30:31]"
    for skip in (1, 0):
        lines = ["s_mov_b64 s[30:31], 0", f"s_setvskip {skip}, 0", store, "s_setvskip 0, 0"]
        code = CodeObject.parse(kernel_text(lines))
        machine = Machine()
        machine.inject(Stall(at=("line", code.find("global_store")[0].line, 2)))
        launch = Launch(rank=0, code=code, grid=1, block=64, kernargs=bytes(8))
        if skip:
            assert machine.launch([launch]).wave_instructions > 0
        else:
            with pytest.raises(SimFault) as caught:
                machine.launch([launch])
            assert caught.value.kind == "gpu-fault"


@covers("s_memrealtime", "s_memtime", "s_sleep")
def test_clocks_never_go_back() -> None:
    lines = [
        "s_memrealtime s[20:21]",
        "s_memtime s[30:31]",
        "s_waitcnt lgkmcnt(0)",
        "s_sleep 10",
        "s_memrealtime s[22:23]",
        "s_memtime s[32:33]",
        "s_waitcnt lgkmcnt(0)",
    ]
    out = run(lines, out_s=[20, 21, 22, 23, 30, 31, 32, 33])

    def pair(first: int) -> int:
        return int(out.s[f"s{first}"][0]) | int(out.s[f"s{first + 1}"][0]) << 32

    assert pair(22) >= pair(20) and pair(32) >= pair(30)


@covers("s_barrier")
def test_barrier_of_one_wave_lets_it_pass() -> None:
    out = run(["s_barrier", "s_mov_b32 s20, 4"], out_s=[20])
    assert int(out.s["s20"][0]) == 4


@covers("s_endpgm")
def test_end_of_the_program_skips_the_rest() -> None:
    """A wave that ends early stores nothing: its outputs keep what the harness put there."""
    lines = ["s_cmp_eq_u32 s20, 1", "s_cbranch_scc0 .Lstay", "s_endpgm", ".Lstay:", "s_mov_b32 s21, 9"]
    out = run(lines, s={20: np.array([0, 1, 2]), 21: 0}, out_s=[21])
    assert out.s["s21"].tolist() == [9, 0, 9]


def test_a_trap_is_a_fault() -> None:
    with pytest.raises(SimFault) as caught:
        run(["s_trap 2"])
    assert caught.value.kind == "trap"


@covers("s_trap")
def test_a_trap_behind_a_branch_does_no_harm() -> None:
    run(["s_branch .Lover", "s_trap 2", ".Lover:", "s_nop 0"])


SCRATCH_SIZES = {
    "byte": ("ubyte", 1), "short": ("ushort", 2), "dword": ("dword", 4), "dwordx2": ("dwordx2", 8),
    "dwordx3": ("dwordx3", 12), "dwordx4": ("dwordx4", 16),
}  # fmt: skip
SCRATCH_NARROW = {
    "sbyte": lambda w: (w & 0xFF ^ 0x80) - 0x80 & M32,
    "sshort": lambda w: (w & 0xFFFF ^ 0x8000) - 0x8000 & M32,
    "ubyte_d16": lambda w: OLD & 0xFFFF0000 | w & 0xFF,
    "ubyte_d16_hi": lambda w: OLD & 0xFFFF | (w & 0xFF) << 16,
    "sbyte_d16": lambda w: OLD & 0xFFFF0000 | ((w & 0xFF ^ 0x80) - 0x80) & 0xFFFF,
    "sbyte_d16_hi": lambda w: OLD & 0xFFFF | (((w & 0xFF ^ 0x80) - 0x80) & 0xFFFF) << 16,
    "short_d16": lambda w: OLD & 0xFFFF0000 | w & 0xFFFF,
    "short_d16_hi": lambda w: OLD & 0xFFFF | (w & 0xFFFF) << 16,
}


@covers(
    *(f"scratch_store_{name}" for name in SCRATCH_SIZES),
    *(f"scratch_load_{load}" for load, _ in SCRATCH_SIZES.values()),
)
def test_scratch_is_private_to_a_lane() -> None:
    """Every lane writes the same offset and reads its own value back; three addressing forms."""
    data = {20 + k: np.random.default_rng(70 + k).integers(0, 2**32, LANES, dtype=np.uint32) for k in range(4)}
    for store, (load, size) in SCRATCH_SIZES.items():
        words = max(1, size // 4)
        source, target = registers("v", 20, words), registers("v", 10, words)
        for write, read in (
            (f"off, {source}, off offset:16", "off, off offset:16"),
            (f"v30, {source}, off offset:8", "v30, off offset:8"),
            (f"off, {source}, s30 offset:4", "off, s30 offset:4"),
        ):
            lines = [
                f"scratch_store_{store} {write}",
                "s_waitcnt vmcnt(0)",
                f"scratch_load_{load} {target}, {read}",
                "s_waitcnt vmcnt(0)",
            ]
            out = run(lines, v={**data, 30: 32, 10: OLD}, s={30: 48}, out_v=range(10, 10 + words), scratch_bytes=96)
            for k in range(words):
                want = data[20 + k] & np.uint32((1 << 8 * min(size, 4)) - 1)
                assert out.v[f"v{10 + k}"].tolist() == want.tolist(), lines[0]


@covers(*(f"scratch_load_{name}" for name in SCRATCH_NARROW), "scratch_store_byte_d16_hi", "scratch_store_short_d16_hi")
def test_narrow_scratch_accesses() -> None:
    words = np.random.default_rng(80).integers(0, 2**32, LANES, dtype=np.uint32)
    for name, function in SCRATCH_NARROW.items():
        lines = [
            "scratch_store_dword off, v20, off",
            "s_waitcnt vmcnt(0)",
            f"scratch_load_{name} v10, off, off",
            "s_waitcnt vmcnt(0)",
        ]
        out = run(lines, v={20: words, 10: OLD}, out_v=[10], scratch_bytes=16)
        assert out.v["v10"].tolist() == [function(int(w)) for w in words], name
    for name, mask in (("byte_d16_hi", 0xFF), ("short_d16_hi", 0xFFFF)):
        lines = [
            "scratch_store_dword off, v21, off",
            f"scratch_store_{name} off, v20, off",
            "s_waitcnt vmcnt(0)",
            "scratch_load_dword v10, off, off",
            "s_waitcnt vmcnt(0)",
        ]
        out = run(lines, v={20: words, 21: OLD}, out_v=[10], scratch_bytes=16)
        assert out.v["v10"].tolist() == [OLD & ~mask | int(w) >> 16 & mask for w in words], name


def test_scratch_beyond_its_size_is_a_fault() -> None:
    with pytest.raises(SimFault):
        run(["scratch_load_dword v10, off, off offset:16"], scratch_bytes=16)
