# SPDX-License-Identifier: Apache-2.0
"""Both memory models: what code with the right scopes and waits may rely on, and that whatever lacks them is seen."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.sim_kernels import CHAIN, MESSAGE, address, arguments, kernel

from sgl_amd_mono.sim import CodeObject, DelayStores, DropStores, Launch, Machine, SimError, SimFault, Starve

SEEDS, SEEN = 20, 19
GROUPS = 128  # words of the message


def message(code: CodeObject, seed: int, memory: str = "adversarial", ranks: int = 1) -> bool:
    """Runs MESSAGE (its producer on rank 0; with two ranks the consumer is rank 1); whether the data arrived whole."""
    data, flag, result = np.zeros(GROUPS, np.uint32), np.zeros(16, np.uint32), np.zeros(GROUPS, np.uint32)
    machine = Machine(ranks=ranks, memory=memory, seed=seed, wall_clock_s=20, instruction_limit=2_000_000)
    for rank in range(ranks):
        machine.map_tensor(rank, data, "data")
        machine.map_tensor(rank, flag, "flag", kind="mailbox")
        machine.map_tensor(rank, result, "result")
    block = arguments(address(data), address(flag), address(result))
    if ranks == 1:
        launches = [Launch(0, code, 2, 128, block)]
    else:  # rank 0 runs workgroup 0 only, rank 1 begins at the consumer
        consumer = code.replace(r"s_cmp_lg_u32 s2, 0", "s_cmp_eq_u32 s2, s2")
        launches = [Launch(0, code, 1, 128, block), Launch(1, consumer, 1, 128, block)]
    try:
        machine.launch(launches)
    except SimFault as fault:
        assert fault.kind in ("deadlock", "out-of-bounds", "limit"), fault
        return False
    return bool((result == np.arange(100, 100 + GROUPS)).all())


@pytest.mark.parametrize("memory", ["consistent", "adversarial"])
def test_a_message_with_all_its_parts_arrives(memory: str) -> None:
    code = kernel(MESSAGE)
    assert all(message(code, seed, memory) for seed in range(SEEDS))


LACKING = {
    "wait before the barrier": lambda c: c.delete(r"s_waitcnt vmcnt\(0\)", 0),
    "scope of the data's store": lambda c: c.replace(r"(global_store_dword v1, v2.*) sc1", r"\1"),
    "scope of the flag's store": lambda c: c.replace(r"(global_store_dword v5, v3.*) sc1", r"\1"),
    "scope of the poll": lambda c: c.replace(r"(global_load_dword v3.*) sc1", r"\1"),
    "invalidation before the load": lambda c: c.delete("buffer_inv"),
    "wait for the loaded data": lambda c: c.delete(r"s_waitcnt vmcnt\(0\)", 2),
    "wait for the polled flag": lambda c: c.delete(r"s_waitcnt vmcnt\(0\)", 1),
    "wait for the arguments": lambda c: c.delete(r"s_waitcnt lgkmcnt\(0\)"),
}


@pytest.mark.parametrize("what", LACKING)
def test_a_message_that_lacks_a_part_is_caught(what: str) -> None:
    code = LACKING[what](kernel(MESSAGE))
    caught = sum(not message(code, seed) for seed in range(SEEDS))
    assert caught >= SEEN, f"without {what}: seen in {caught} of {SEEDS} seeds"


def test_a_barrier_that_is_missing_is_seen_by_some_schedules() -> None:
    """Only a wave that lags behind its workgroup for long shows it."""
    code = kernel(MESSAGE).delete("s_barrier", 0)
    assert sum(not message(code, seed) for seed in range(3 * SEEDS)) >= 3


def test_consistent_memory_hides_missing_scopes() -> None:
    """Why the adversarial model exists."""
    for what in ("scope of the data's store", "scope of the poll", "invalidation before the load"):
        assert all(message(LACKING[what](kernel(MESSAGE)), seed, "consistent") for seed in range(4))


def test_a_plain_store_needs_a_write_back() -> None:
    plain = kernel(MESSAGE).replace(r"(global_store_dword v1, v2.*) sc1", r"\1")
    text = "\n".join(i.text if i.text != "s_barrier" else "s_barrier" for i in plain.instructions)
    assert "buffer_wbl2" not in text
    released = kernel(
        MESSAGE.replace(
            "global_store_dword v1, v2, s[4:5] sc1\n", "global_store_dword v1, v2, s[4:5]\nbuffer_wbl2 sc1\n"
        )
    )
    assert all(message(released, seed) for seed in range(SEEDS))
    dropped = released.delete("buffer_wbl2")
    assert sum(not message(dropped, seed) for seed in range(SEEDS)) >= SEEN


SYSTEM = MESSAGE.replace(" sc1", " sc0 sc1")


def test_peer_memory_needs_system_scope() -> None:
    assert all(message(kernel(SYSTEM), seed, ranks=2) for seed in range(SEEDS))
    assert sum(not message(kernel(MESSAGE), seed, ranks=2) for seed in range(SEEDS)) >= SEEN
    for weaker in (
        lambda c: c.replace(r"(global_store_dword v1, v2.*) sc0 sc1", r"\1 sc1"),
        lambda c: c.replace(r"(global_store_dword v5, v3.*) sc0 sc1", r"\1 sc1"),
        lambda c: c.replace(r"(global_load_dword v3.*) sc0 sc1", r"\1 sc1"),
        lambda c: c.replace("buffer_inv sc0 sc1", "buffer_inv sc1"),
    ):
        code = weaker(kernel(SYSTEM))
        caught = sum(not message(code, seed, ranks=2) for seed in range(SEEDS))
        assert caught >= SEEN, f"{code.find('sc1')}: {caught}"


def test_a_chain_of_pairs_under_every_seed() -> None:
    for policy, ranks in (("sc1", 1), ("sc0 sc1", 2)):
        for seed in range(SEEDS):
            blocks = 6
            pairs, results = np.zeros((ranks * blocks + 1, 2), np.uint32), np.zeros((ranks, blocks), np.uint32)
            pairs[0] = (10, 7)
            machine = Machine(ranks=ranks, memory="adversarial", seed=seed, wall_clock_s=20)
            launches = []
            for rank in range(ranks):
                machine.map_tensor(rank, pairs, "pairs", kind="mailbox")
                machine.map_tensor(rank, results[rank], "results")
                block = arguments(address(pairs) + rank * blocks * 8, address(results[rank]))
                launches.append(Launch(rank, kernel(CHAIN.format(policy=policy)), blocks, 64, block))
            machine.launch(launches)
            assert results.flatten().tolist() == [11 + k for k in range(ranks * blocks)]


def test_an_8_byte_access_is_never_torn() -> None:
    """A writer keeps storing equal halves; a reader must never see two different ones."""
    lines = """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_mov_b32_e32 v1, 0
        v_mov_b32_e32 v8, 0
        s_movk_i32 s8, 200
        s_waitcnt lgkmcnt(0)
        s_cmp_lg_u32 s2, 0
        s_cbranch_scc1 .Lreader
        .Lwrite:
        v_add_u32_e32 v8, 1, v8
        v_mov_b32_e32 v9, v8
        global_store_dwordx2 v1, v[8:9], s[4:5] sc1
        s_sub_u32 s8, s8, 1
        s_cmp_lg_u32 s8, 0
        s_cbranch_scc1 .Lwrite
        s_endpgm
        .Lreader:
        global_load_dwordx2 v[2:3], v1, s[4:5] sc1
        s_waitcnt vmcnt(0)
        v_xor_b32_e32 v4, v2, v3
        v_or_b32_e32 v8, v8, v4
        s_sub_u32 s8, s8, 1
        s_cmp_lg_u32 s8, 0
        s_cbranch_scc1 .Lreader
        global_store_dwordx2 v1, v[8:9], s[6:7]
        s_endpgm"""
    for memory in ("consistent", "adversarial"):
        for seed in range(SEEDS):
            word, out = np.zeros(2, np.uint32), np.full(2, 99, np.uint32)
            machine = Machine(memory=memory, seed=seed)
            machine.map_tensor(0, word, "word")
            machine.map_tensor(0, out, "out")
            machine.launch([Launch(0, kernel(lines), 2, 64, arguments(address(word), address(out)))])
            assert out[0] == 0 and word.tolist() == [200, 200]


def test_a_wave_sees_its_own_stores_in_order() -> None:
    lines = """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 2, v0
        v_mov_b32_e32 v2, 1
        v_mov_b32_e32 v3, 2
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v2, s[4:5]
        global_store_dword v1, v3, s[4:5] {second}
        global_store_short v1, v2, s[4:5] offset:2
        global_load_dword v4, v1, s[4:5] {load}
        s_waitcnt vmcnt(0)
        global_store_dword v1, v4, s[6:7]
        s_endpgm"""
    for second in ("", "sc1", "sc0 sc1"):
        for load in ("", "sc1", "sc0 sc1"):
            for seed in range(6):
                memory, out = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
                machine = Machine(memory="adversarial", seed=seed)
                machine.map_tensor(0, memory, "memory")
                machine.map_tensor(0, out, "out")
                code = kernel(lines.format(second=second, load=load))
                machine.launch([Launch(0, code, 1, 64, arguments(address(memory), address(out)))])
                assert (memory == 0x10002).all() and (out == 0x10002).all()


def test_the_kernels_end_writes_everything_back() -> None:
    lines = """
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        s_lshl_b32 s3, s2, 8
        v_lshl_add_u32 v1, v0, 2, s3
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v1, s[4:5]
        s_endpgm"""
    for seed in range(SEEDS):
        out = np.zeros(64 * 40, np.uint32)
        machine = Machine(memory="adversarial", seed=seed)
        machine.map_tensor(0, out, "out")
        machine.launch([Launch(0, kernel(lines), 40, 64, arguments(address(out)))])
        assert (out == 4 * np.arange(out.size)).all()


LDS_EXCHANGE = """
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32_e32 v1, 2, v0
v_xor_b32_e32 v2, 0x1fc, v1
ds_write_b32 v1, v0
s_waitcnt lgkmcnt(0)
s_barrier
ds_read_b32 v3, v2
s_waitcnt lgkmcnt(0)
global_store_dword v1, v3, s[4:5]
s_endpgm
"""


def lds_exchange(code: CodeObject, seed: int) -> bool:
    out = np.zeros(128, np.uint32)
    machine = Machine(memory="adversarial", seed=seed)
    machine.map_tensor(0, out, "out")
    try:
        machine.launch([Launch(0, code, 1, 128, arguments(address(out)))])
    except SimFault:
        return False
    return bool((out == 127 - np.arange(128)).all())


def test_lds_needs_its_waits_and_the_barrier() -> None:
    code = kernel(LDS_EXCHANGE, lds=512)
    assert all(lds_exchange(code, seed) for seed in range(SEEDS))
    for broken in (code.delete("lgkmcnt", 0), code.delete("lgkmcnt", 1), code.delete("s_barrier")):
        assert sum(not lds_exchange(broken, seed) for seed in range(SEEDS)) >= SEEN


def test_partial_waits_cover_the_oldest_operations() -> None:
    lines = """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 2, v0
        s_waitcnt lgkmcnt(0)
        global_load_dword v2, v1, s[4:5]
        global_load_dword v3, v1, s[4:5] offset:256
        s_waitcnt vmcnt(1)
        v_mov_b32_e32 v4, v2
        v_mov_b32_e32 v5, v3
        s_waitcnt vmcnt(0)
        global_store_dwordx3 v1, v[3:5], s[6:7]
        s_endpgm"""
    memory, out = np.arange(128, dtype=np.uint32), np.zeros(3, np.uint32)
    machine = Machine(memory="adversarial")
    machine.map_tensor(0, memory, "memory")
    machine.map_tensor(0, out, "out")
    machine.launch([Launch(0, kernel(lines), 1, 1, arguments(address(memory), address(out)))])
    assert out.tolist() == [64, 0, 0xFFA5FFA5]  # v3 after its wait, v2 in time, v3 before its wait


def test_lds_dma_arrives_when_it_is_waited_for() -> None:
    lines = """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 4, v0
        s_mov_b32 m0, 0
        s_waitcnt lgkmcnt(0)
        global_load_lds_dwordx4 v1, s[4:5]
        s_waitcnt vmcnt(0)
        ds_read_b128 v[4:7], v1
        s_waitcnt lgkmcnt(0)
        global_store_dwordx4 v1, v[4:7], s[6:7]
        s_endpgm"""
    code = kernel(lines, lds=1024)
    for variant, works in ((code, True), (code.delete(r"vmcnt\(0\)"), False)):
        memory, out = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
        machine = Machine(memory="adversarial", seed=1)
        machine.map_tensor(0, memory, "memory")
        machine.map_tensor(0, out, "out")
        machine.launch([Launch(0, variant, 1, 64, arguments(address(memory), address(out)))])
        assert bool((out == memory).all()) == works


def test_atomics_of_all_workgroups_add_up() -> None:
    lines = """
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_mov_b32_e32 v1, 0
        v_mov_b32_e32 v2, 1
        s_waitcnt lgkmcnt(0)
        global_atomic_add v1, v2, s[4:5]
        global_atomic_add v3, v1, v2, s[4:5] offset:4 sc0
        s_waitcnt vmcnt(0)
        v_lshlrev_b32_e32 v4, 2, v3
        global_store_dword v4, v3, s[4:5] offset:64
        s_endpgm"""
    for seed in range(4):
        memory = np.zeros(16 + 5 * 128, np.uint32)
        machine = Machine(memory="adversarial", seed=seed)
        machine.map_tensor(0, memory, "memory")
        machine.launch([Launch(0, kernel(lines), 5, 128, arguments(address(memory)))])
        assert memory[:2].tolist() == [640, 640] and (memory[16:] == np.arange(640)).all()


# ---- injected store faults ----


@pytest.mark.parametrize("memory", ["consistent", "adversarial"])
def test_dropped_and_delayed_stores_of_a_rank(memory: str) -> None:
    lines = """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_mov_b32_e32 v1, 0
        v_mov_b32_e32 v2, 5
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v2, s[4:5] sc0 sc1
        global_store_dword v1, v2, s[4:5] offset:64 sc0 sc1
        global_store_dword v1, v2, s[6:7]
        s_endpgm"""

    def run(*faults: object) -> tuple[list[int], Machine]:
        peer, own = np.zeros(32, np.uint32), np.zeros(1, np.uint32)
        machine = Machine(ranks=2, memory=memory)
        for rank in range(2):
            machine.map_tensor(rank, peer, "peer", regions=[("first", 0, 64), ("second", 64, 64)])
        machine.map_tensor(0, own, "own")
        for fault in faults:
            machine.inject(fault)
        machine.launch([Launch(0, kernel(lines), 1, 64, arguments(address(peer), address(own)))])
        return [int(peer[0]), int(peer[16]), int(own[0])], machine

    assert run()[0] == [5, 5, 5]
    assert run(DropStores(rank=0))[0] == [0, 0, 5]
    assert run(DropStores(rank=0, region="second"))[0] == [5, 0, 5]
    assert run(DropStores(rank=1))[0] == [5, 5, 5]
    assert run(DropStores(rank=0, to_rank=1, region="peer"))[0] == [0, 0, 5]
    assert run(DropStores(rank=0, region="peer/second"))[0] == [5, 0, 5]
    with pytest.raises(SimError, match="no memory of that name"):
        run(DropStores(rank=0, region="own/second"))
    values, _ = run(DelayStores(rank=0, region="first", ticks=10_000))
    assert values == [5, 5, 5]
    with pytest.raises(SimError, match="no memory of that name"):
        run(DropStores(rank=0, region="nothing"))


def test_a_delayed_store_arrives_by_the_clock() -> None:
    """The consumer polls for the flag; the machine jumps to the moment the store is due, no later."""
    data, flag, result = np.zeros(GROUPS, np.uint32), np.zeros(16, np.uint32), np.zeros(GROUPS, np.uint32)
    machine = Machine(ranks=2, wall_clock_s=20)
    for rank in range(2):
        for array, name in ((data, "data"), (flag, "flag"), (result, "result")):
            machine.map_tensor(rank, array, name)
    block = arguments(address(data), address(flag), address(result))
    code = kernel(SYSTEM)
    consumer = code.replace(r"s_cmp_lg_u32 s2, 0", "s_cmp_eq_u32 s2, s2")
    machine.inject(DelayStores(rank=0, region="flag", ticks=1_000_000))
    report = machine.launch([Launch(0, code, 1, 128, block), Launch(1, consumer, 1, 128, block)])
    assert (result == np.arange(100, 100 + GROUPS)).all()
    assert 1_000_000 <= report.clock_end - report.clock_start < 1_001_000 and report.clock_jumps >= 1


CLOCKED = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    s_memrealtime s[8:9]
    s_waitcnt lgkmcnt(0)
    v_lshlrev_b32_e32 v1, 2, v0
    v_mov_b32_e32 v2, s8
    global_store_dword v1, v2, s[4:5]
    s_mov_b32 s6, 4000
    .LBB0_1:
    s_sub_u32 s6, s6, 1
    s_cmp_lg_u32 s6, 0
    s_cbranch_scc1 .LBB0_1
    s_endpgm"""


def begins(seed: int, *faults: object) -> list[int]:
    """The clock at which the first wave of each of two ranks begins; the other wave may be a laggard of its own."""
    machine = Machine(ranks=2, memory="adversarial", seed=seed, wall_clock_s=20)
    stamps = [np.zeros(128, np.uint32) for _ in range(2)]
    for rank, stamp in enumerate(stamps):
        machine.map_tensor(rank, stamp, "stamp")
    for fault in faults:
        machine.inject(fault)
    machine.launch([Launch(rank, kernel(CLOCKED), 1, 128, arguments(address(s))) for rank, s in enumerate(stamps)])
    return [int(stamp[0]) for stamp in stamps]


@pytest.mark.parametrize("late", [0, 1])
def test_a_starved_rank_begins_late(late: int) -> None:
    for seed in range(5):
        plain, starved = begins(seed), begins(seed, Starve(rank=late, rounds=20))
        assert starved[late] - plain[late] >= 20
        assert starved[1 - late] < starved[late]


def test_a_starved_rank_begins_once_the_others_only_poll() -> None:
    code, words = kernel(SYSTEM), [np.zeros(n, np.uint32) for n in (GROUPS, 16, GROUPS)]
    machine = Machine(ranks=2, memory="adversarial", wall_clock_s=20, instruction_limit=2_000_000)
    for rank in range(2):
        for array, name in zip(words, ("data", "flag", "result"), strict=True):
            machine.map_tensor(rank, array, name, kind="mailbox" if name == "flag" else "plain")
    consumer = code.replace(r"s_cmp_lg_u32 s2, 0", "s_cmp_eq_u32 s2, s2")
    machine.inject(Starve(rank=0, rounds=1_000_000_000))
    block = arguments(*map(address, words))
    machine.launch([Launch(0, code, 1, 128, block), Launch(1, consumer, 1, 128, block)])
    assert (words[2] == np.arange(100, 100 + GROUPS)).all()


def test_consistent_memory_starves_nobody() -> None:
    with pytest.raises(SimError, match="waves are starved in adversarial memory only"):
        Machine().inject(Starve(rank=0))
