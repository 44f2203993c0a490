# SPDX-License-Identifier: Apache-2.0
"""The scheduler: barriers, the virtual clock, deadlocks and limits, injected stalls, equal seeds give equal runs."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.sim_kernels import CHAIN, address, arguments, kernel

from sgl_amd_mono.sim import CodeObject, Launch, Machine, SimError, SimFault, Stall

BOTH = pytest.mark.parametrize("memory", ["consistent", "adversarial"])

# Thread 0 waits for word 0 to become 7, at most s[6:7] ticks; then it stores 1 (came) or 2 (out of time) to word 1, and
# the elapsed ticks to word 2.
WAIT = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_mov_b32_e32 v1, 0
v_mov_b32_e32 v4, 1
s_memrealtime s[8:9]
s_waitcnt lgkmcnt(0)
.Lpoll:
s_sleep 1
global_load_dword v2, v1, s[4:5] sc1
s_waitcnt vmcnt(0)
v_cmp_eq_u32_e32 vcc, 7, v2
s_cbranch_vccnz .Lcame
s_memrealtime s[10:11]
s_waitcnt lgkmcnt(0)
s_sub_u32 s12, s10, s8
s_subb_u32 s13, s11, s9
v_mov_b32_e32 v6, s6
v_mov_b32_e32 v7, s7
v_cmp_lt_u64_e32 vcc, s[12:13], v[6:7]
s_cbranch_vccnz .Lpoll
v_mov_b32_e32 v4, 2
.Lcame:
s_memrealtime s[10:11]
s_waitcnt lgkmcnt(0)
s_sub_u32 s12, s10, s8
v_mov_b32_e32 v5, s12
global_store_dwordx2 v1, v[4:5], s[4:5] offset:4
s_endpgm
"""


def wait(ticks: int, memory: str, words: np.ndarray, seed: int = 0) -> Machine:
    machine = Machine(memory=memory, seed=seed, wall_clock_s=20)
    machine.map_tensor(0, words, "words")
    machine.launch([Launch(0, kernel(WAIT), 1, 1, arguments(address(words), ticks))])
    return machine


@BOTH
@pytest.mark.parametrize("ticks", [100, 100_000, 500_000_000, 6_000_000_000])
def test_a_deadline_passes_on_the_virtual_clock(ticks: int, memory: str) -> None:
    words = np.zeros(4, np.uint32)
    machine = wait(ticks, memory, words)
    assert words[1] == 2
    # Jumps are a sixteenth of the time since anything happened; the wave needs a few slices to see them.
    assert ticks <= machine.clock <= ticks + max(ticks // 10, 5000)


@BOTH
def test_what_is_there_is_not_waited_for(memory: str) -> None:
    words = np.array([7, 0, 0, 0], np.uint32)
    assert wait(1_000_000, memory, words).clock < 3000 and words[1] == 1 and words[2] < 2000


@BOTH
def test_the_clock_does_not_jump_while_a_wave_works(memory: str) -> None:
    """Workgroup 1 computes for long, reading no clock, before it stores what workgroup 0 waits for."""
    work = """
        s_cmp_eq_u32 s2, 0
        s_cbranch_scc1 .Lwaiter
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        s_mov_b32 s10, 0x8000
        .Lwork:
        v_add_u32_e32 v3, 1, v0
        v_add_u32_e32 v3, 1, v0
        s_sub_u32 s10, s10, 1
        s_cmp_lg_u32 s10, 0
        s_cbranch_scc1 .Lwork
        v_mov_b32_e32 v1, 0
        v_mov_b32_e32 v2, 7
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v2, s[4:5] sc1
        s_waitcnt vmcnt(0)
        s_endpgm
        .Lwaiter:
        """
    words = np.zeros(4, np.uint32)
    machine = Machine(memory=memory, wall_clock_s=20)
    machine.map_tensor(0, words, "words")
    # 5 * 32768 instructions are about 27,000 ticks.
    report = machine.launch([Launch(0, kernel(work + WAIT), 2, 1, arguments(address(words), 40_000))])
    assert words[1] == 1 and report.clock_jumps == 0


@BOTH
def test_two_deadlines_end_in_their_order(memory: str) -> None:
    for seed in range(5):
        first, second = np.zeros(4, np.uint32), np.zeros(4, np.uint32)
        machine = Machine(memory=memory, seed=seed, wall_clock_s=20)
        machine.map_tensor(0, first, "first")
        machine.map_tensor(0, second, "second")
        code = kernel(WAIT)
        machine.launch(
            [
                Launch(0, code, 1, 1, arguments(address(first), 9_000_000)),
                Launch(0, code, 1, 1, arguments(address(second), 8_000_000)),
            ]
        )
        assert first[1] == second[1] == 2 and second[2] < 9_000_000 <= first[2]


@BOTH
def test_waiting_for_ever_is_a_deadlock_that_names_every_wave(memory: str) -> None:
    words = np.zeros(32, np.uint32)
    lines = """
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_mov_b32_e32 v1, 0
        v_readfirstlane_b32 s10, v0
        s_waitcnt lgkmcnt(0)
        s_cmp_lg_u32 s10, 0
        s_cbranch_scc1 .Lmeet
        .Lpoll:
        {sleep}
        global_load_dword v2, v1, s[4:5] sc1
        s_waitcnt vmcnt(0)
        v_cmp_ne_u32_e32 vcc, 7, v2
        s_cbranch_vccnz .Lpoll
        .Lmeet:
        s_barrier
        s_endpgm"""
    for sleep in ("s_sleep 1", "s_nop 0"):
        machine = Machine(memory=memory, wall_clock_s=20)
        machine.map_tensor(0, words, "words")
        with pytest.raises(SimFault) as caught:
            machine.launch(
                [Launch(0, kernel(lines.replace("{sleep}", sleep)), 2, 128, arguments(address(words)), name="pollers")]
            )
        fault = caught.value
        assert fault.kind == "deadlock" and "no wave can go on; 4 wait" in str(fault)
        states = sorted((w.workgroup, w.wave, w.state) for w in fault.waiting)
        assert states == [(0, 0, "polling"), (0, 1, "barrier"), (1, 0, "polling"), (1, 1, "barrier")]
        assert all("s_barrier" in w.text for w in fault.waiting if w.state == "barrier")


def test_a_wait_with_a_clock_but_no_deadline_is_a_deadlock_too() -> None:
    words = np.zeros(4, np.uint32)
    with pytest.raises(SimFault) as caught:
        wait(2**62, "consistent", words)
    assert caught.value.kind == "deadlock" and words[1] == 0


def test_a_bounded_retry_is_no_deadlock() -> None:
    lines = """
        s_movk_i32 s4, 0x7fff
        .Lretry:
        s_sleep 1
        s_sub_u32 s4, s4, 1
        s_cmp_lg_u32 s4, 0
        s_cbranch_scc1 .Lretry
        s_endpgm"""
    Machine(wall_clock_s=20).launch([Launch(0, kernel(lines), 2, 64, arguments())])


@BOTH
def test_an_endless_loop_ends_at_a_limit(memory: str) -> None:
    code = kernel(".Lloop:\nv_add_u32_e32 v1, v1, v0\ns_branch .Lloop\ns_endpgm")
    machine = Machine(memory=memory, instruction_limit=100_000)
    with pytest.raises(SimFault, match=r"line 5|line 6") as caught:
        machine.launch([Launch(0, code, 1, 64, arguments())])
    assert caught.value.kind == "limit" and len(caught.value.waiting) == 1
    with pytest.raises(SimFault) as caught:
        Machine(memory=memory, wall_clock_s=0.2).launch([Launch(0, code, 1, 64, arguments())])
    assert caught.value.kind == "limit"


def test_ended_waves_leave_the_barrier() -> None:
    lines = """
        v_readfirstlane_b32 s10, v0
        s_cmp_eq_u32 s10, 64
        s_cbranch_scc1 .Lend
        s_barrier
        s_barrier
        .Lend:
        s_endpgm"""
    report = Machine().launch([Launch(0, kernel(lines), 3, 256, arguments())])
    assert report.launches[0].barriers == 3 * 3 * 2


def test_workgroups_in_turn_do_not_wait_for_each_other() -> None:
    """persistent=False: more workgroups than fit; a chain from the last to the first cannot be resident, and is a
    deadlock."""
    blocks = 400
    pairs, results = np.zeros((blocks + 1, 2), np.uint32), np.zeros(blocks, np.uint32)
    pairs[0] = (10, 7)
    code = kernel(CHAIN.format(policy="sc1"), vgprs=256)

    def launch(code: CodeObject) -> None:
        results[:] = 0
        pairs[1:] = 0
        machine = Machine(cus=4, wall_clock_s=20)
        machine.map_tensor(0, pairs, "pairs")
        machine.map_tensor(0, results, "results")
        machine.launch([Launch(0, code, blocks, 64, arguments(address(pairs), address(results)), persistent=False)])

    launch(code)
    assert (results == np.arange(11, 11 + blocks)).all()
    backwards = code.replace(r"s_lshl_b32 s3, s2, 3", f"s_sub_u32 s3, {blocks - 1}, s2")
    lines = [i.text for i in backwards.instructions]
    at = next(k for k, text in enumerate(lines) if text.startswith("s_sub_u32 s3"))
    reversed_text = CHAIN.format(policy="sc1").replace("s_lshl_b32 s3, s2, 3", f"{lines[at]}\ns_lshl_b32 s3, s3, 3")
    with pytest.raises(SimFault) as caught:
        launch(kernel(reversed_text, vgprs=256))
    assert caught.value.kind == "deadlock"


# ---- seeds ----


def order_of_arrival(memory: str, seed: int) -> tuple[list[int], int]:
    lines = """
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_mov_b32_e32 v1, 0
        v_mov_b32_e32 v2, 1
        v_mov_b32_e32 v5, s2
        s_waitcnt lgkmcnt(0)
        global_atomic_add v3, v1, v2, s[4:5] sc0
        s_waitcnt vmcnt(0)
        v_lshlrev_b32_e32 v4, 2, v3
        global_store_dword v4, v5, s[4:5] offset:4
        s_endpgm"""
    words = np.zeros(33, np.uint32)
    machine = Machine(memory=memory, seed=seed)
    machine.map_tensor(0, words, "words")
    report = machine.launch([Launch(0, kernel(lines), 32, 1, arguments(address(words)))])
    return words[1:].tolist(), report.clock_end


@BOTH
def test_equal_seeds_give_equal_runs_and_others_do_not(memory: str) -> None:
    runs = [order_of_arrival(memory, seed) for seed in range(8)]
    assert runs == [order_of_arrival(memory, seed) for seed in range(8)]
    assert all(sorted(order) == list(range(32)) for order, _ in runs)
    assert len({tuple(order) for order, _ in runs}) == 8


# ---- injected stalls ----


def stalled_chain(*stalls: Stall, memory: str = "consistent", blocks: int = 5) -> tuple[list[int], object]:
    """The chain with a deadline-free poll: whoever is not reached stays behind, so the launch ends in a deadlock unless
    all end."""
    pairs, results = np.zeros((blocks + 1, 2), np.uint32), np.zeros(blocks, np.uint32)
    pairs[0] = (10, 7)
    machine = Machine(memory=memory, wall_clock_s=20)
    machine.map_tensor(0, pairs, "pairs", regions=[(f"pair{k}", 8 * k, 8) for k in range(blocks + 1)])
    machine.map_tensor(0, results, "results")
    for stall in stalls:
        machine.inject(stall)
    try:
        machine.launch(
            [Launch(0, kernel(CHAIN.format(policy="sc1")), blocks, 64, arguments(address(pairs), address(results)))]
        )
    except SimFault as fault:
        return results.tolist(), fault
    return results.tolist(), None


@BOTH
@pytest.mark.parametrize(
    "stall",
    [
        Stall(workgroup=3),
        Stall(workgroup=3, at=("store", "pair4")),
        Stall(at=("store", "pair4")),
        Stall(workgroup=3, at=("load", "pair3")),
        Stall(workgroup=3, at=("text", "global_store_dwordx2", 1)),
        Stall(rank=0, workgroup=3, wave=0, launch=0, at=("text", r"v_add_u32_e32 v2", 1)),
    ],
)
def test_a_stalled_workgroup_holds_up_those_behind_it(stall: Stall, memory: str) -> None:
    results, fault = stalled_chain(stall, memory=memory)
    assert results == [11, 12, 13, 0, 0]
    assert fault.kind == "deadlock"
    assert sorted((w.workgroup, w.state) for w in fault.waiting) == [(3, "stalled"), (4, "polling")]


def test_a_stall_at_the_last_place_lets_all_others_end() -> None:
    """Only stalled waves are left: the launch returns, and the report says so."""
    results, fault = stalled_chain(Stall(workgroup=4, at=("store", "results")))
    assert fault is None and results == [11, 12, 13, 14, 0]
    assert stalled_chain(Stall(workgroup=4, at=("store", "pair1"))) == ([11, 12, 13, 14, 15], None)


def test_a_stall_at_the_kth_pass_of_a_line() -> None:
    lines = """
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 2, v0
        v_mov_b32_e32 v2, 0
        s_movk_i32 s8, 10
        s_waitcnt lgkmcnt(0)
        .Lloop:
        v_add_u32_e32 v2, 1, v2
        global_store_dword v1, v2, s[4:5]
        s_sub_u32 s8, s8, 1
        s_cmp_lg_u32 s8, 0
        s_cbranch_scc1 .Lloop
        s_endpgm"""
    code = kernel(lines)
    line = code.find("global_store")[0].line
    for k in (1, 4, 10, 11):
        words = np.zeros(64, np.uint32)
        machine = Machine()
        machine.map_tensor(0, words, "words")
        machine.inject(Stall(at=("line", line, k)))
        report = machine.launch([Launch(0, code, 1, 64, arguments(address(words)))])
        assert (words == min(k - 1, 10)).all() and report.stalled == (k <= 10)
        counts = report.launches[0].line_counts
        assert counts[code.find("global_store")[0].index] == min(k - 1, 10)
        machine.clear_faults()
        assert machine.launch([Launch(0, code, 1, 64, arguments(address(words)))]).stalled == 0 and (words == 10).all()


def test_a_stall_that_names_nothing_is_an_error() -> None:
    for at in (("store", "nothing"), ("moon", 1)):
        machine = Machine()
        machine.inject(Stall(at=at))
        with pytest.raises(SimError, match=r"no allocation or region|a stall is at"):
            machine.launch([Launch(0, kernel("s_endpgm"), 1, 64, arguments())])
