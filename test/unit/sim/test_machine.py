# SPDX-License-Identifier: Apache-2.0
"""The simulated machine: loading code, mapping memory, residency, errors that name place and cause, counters."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from helpers.sim_kernels import CHAIN, address, arguments, kernel, kernel_text, run

from sgl_amd_mono.sim import CodeObject, Launch, Machine, SimError, SimFault

COPY = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_lshl_b32 s3, s2, 8
v_lshl_add_u32 v1, v0, 2, s3
s_waitcnt lgkmcnt(0)
global_load_dword v2, v1, s[4:5]
s_waitcnt vmcnt(0)
global_store_dword v1, v2, s[6:7]
s_endpgm
"""


def test_the_text_says_what_the_kernel_needs() -> None:
    code = kernel(COPY, args=2, lds=512, vgprs=72)
    assert (code.name, code.vgprs, code.lds_bytes, code.kernarg_size) == ("kernel", 72, 512, 16)
    assert [(a.offset, a.size, a.kind) for a in code.args] == [(0, 8, "by_value"), (8, 8, "by_value")]
    assert [i.mnemonic for i in code.instructions][:2] == ["s_load_dwordx4", "s_lshl_b32"]
    assert code.find("global_store")[0].index == 6


def test_an_unknown_instruction_is_an_error_that_names_line_and_text() -> None:
    text = kernel_text("s_nop 0\nv_fly_to_mars_b32 v0, v1\ns_endpgm")
    line = 1 + text.splitlines().index("\tv_fly_to_mars_b32 v0, v1")
    with pytest.raises(SimError, match=rf"line {line}: v_fly_to_mars_b32 v0, v1: unknown instruction"):
        CodeObject.parse(text)


@pytest.mark.parametrize(
    "line",
    [
        "v_add_u32_e32 v0, v1",  # an operand is missing
        "v_add_u32_e32 v0, v1, banana",
        "global_load_dword v0, v1",
        "s_cbranch_scc1 .Lnowhere",
        "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3] cbsz:7",
        "buffer_load_dword v0, v1, s[4:5], 0 offen",
    ],
)
def test_a_line_that_cannot_be_decoded_is_an_error_at_load(line: str) -> None:
    with pytest.raises(SimError, match="line 5"):
        CodeObject.parse(kernel_text(f"{line}\ns_endpgm"))


def test_inline_assembly_and_comments_are_read() -> None:
    code = CodeObject.parse(
        kernel_text("X").replace("\tX", "\t;;#ASMSTART\ns_nop 3 ; note\n\t;;#ASMEND\n\ts_endpgm // end")
    )
    assert [i.text for i in code.instructions] == ["s_nop 3", "s_endpgm"]


def test_one_of_several_kernels_is_chosen_by_name() -> None:
    first, second = kernel_text("s_endpgm", name="one"), kernel_text("s_nop 0\ns_endpgm", name="two")
    merged = first.split("\t.amdgpu_metadata")[0] + second.split("\t.amdgpu_metadata")[0]
    kernels = "".join(t.split("amdhsa.kernels:\n")[1].split("...")[0] for t in (first, second))
    merged += "\t.amdgpu_metadata\n---\namdhsa.kernels:\n" + kernels + "...\n\t.end_amdgpu_metadata\n"
    assert len(CodeObject.parse(merged, "two").instructions) == 2
    with pytest.raises(SimError, match=r"2 kernels, name one of \['one', 'two'\]"):
        CodeObject.parse(merged)
    with pytest.raises(SimError, match="no kernel 'three'"):
        CodeObject.parse(merged, "three")


def test_a_copy_over_workgroups() -> None:
    source, target = np.arange(256, dtype=np.int32), np.zeros(256, np.int32)
    report = run(kernel(COPY), [source, target], grid=4)
    assert (source == target).all()
    launch = report.launches[0]
    assert launch.workgroups == 4 and launch.waves_per_workgroup == 1
    assert launch.instructions == {
        "valu": 4, "salu": 4, "vmem": 8, "lds": 0, "smem": 4, "mfma": 0, "convert": 0, "branch": 0, "wait": 8,
        "barrier": 0,
        "other": 4,
    }  # fmt: skip
    assert report.wave_instructions == 32 and launch.line_counts == [4] * 8
    assert report.bytes_read == {(0, "a0"): {"plain": 1024}} and report.bytes_written == {(0, "a1"): {"plain": 1024}}
    assert launch.streamed_per_workgroup == [256] * 4


def test_lanes_past_the_block_do_nothing() -> None:
    source, target = np.arange(64, dtype=np.int32), np.full(64, -1, np.int32)
    run(kernel(COPY), [source, target], block=20)
    assert (target[:20] == source[:20]).all() and (target[20:] == -1).all()


def test_ids_of_a_three_dimensional_launch() -> None:
    text = kernel_text("""
        s_load_dwordx2 s[6:7], s[0:1], 0x0
        v_and_b32_e32 v1, 0x3ff, v0
        v_bfe_u32 v2, v0, 10, 10
        v_bfe_u32 v3, v0, 20, 10
        s_lshl_b32 s5, s4, 1
        s_add_u32 s5, s5, s3
        s_lshl_b32 s5, s5, 1
        s_add_u32 s5, s5, s2
        v_mov_b32_e32 v4, s5
        v_lshl_add_u32 v5, v3, 1, v2
        v_lshl_add_u32 v5, v5, 2, v1
        v_lshlrev_b32_e32 v6, 2, v5
        v_lshl_add_u32 v6, v4, 6, v6
        v_lshl_or_b32 v5, v4, 8, v5
        s_waitcnt lgkmcnt(0)
        global_store_dword v6, v5, s[6:7]
        s_endpgm""").replace(
        ".amdhsa_system_sgpr_workgroup_id_x 1",
        ".amdhsa_system_sgpr_workgroup_id_x 1\n\t\t.amdhsa_system_sgpr_workgroup_id_y 1\n\t"
        "\t.amdhsa_system_sgpr_workgroup_id_z 1\n"
        "\t\t.amdhsa_system_vgpr_workitem_id 2",
    )
    out = np.zeros((8, 16), np.int32)
    machine = Machine()
    machine.map_tensor(0, out, "out")
    machine.launch([Launch(0, CodeObject.parse(text), (2, 2, 2), (4, 2, 2), arguments(address(out)))])
    assert (out == np.arange(8)[:, None] * 256 + np.arange(16)).all()


def test_dispatch_packet_and_hidden_arguments() -> None:
    lines = """
        s_load_dword s4, s[0:1], 0x4
        s_load_dword s5, s[0:1], 0xc
        s_load_dwordx2 s[8:9], s[2:3], 0x0
        s_load_dword s6, s[2:3], 0x8
        s_waitcnt lgkmcnt(0)
        v_mov_b32_e32 v1, 0
        v_mov_b32_e32 v2, s4
        v_mov_b32_e32 v3, s5
        v_mov_b32_e32 v4, s6
        global_store_dwordx3 v1, v[2:4], s[8:9]
        s_endpgm"""
    text = (
        kernel_text(lines, args=1)
        .replace(".amdhsa_user_sgpr_count 2", ".amdhsa_user_sgpr_count 4\n\t\t.amdhsa_user_sgpr_dispatch_ptr 1")
        .replace(
            "        .value_kind: by_value",
            "        .value_kind: by_value\n      - .offset: 8\n        .size: 4\n        .value_kind: "
            "hidden_block_count_x",
        )
        .replace(".kernarg_segment_size: 8", ".kernarg_segment_size: 16")
    )
    out = np.zeros(3, np.uint32)
    machine = Machine()
    machine.map_tensor(0, out, "out")
    machine.launch([Launch(0, CodeObject.parse(text), 6, (64, 2), struct.pack("<Q", address(out)))])
    assert out.tolist() == [64 | 2 << 16, 6 * 64, 6]  # workgroup size x, y; grid in threads; hidden workgroup count


# ---- errors that name place and cause ----


def test_an_access_outside_memory_names_everything() -> None:
    source, target = np.zeros(64, np.int32), np.zeros(256, np.int32)
    machine = Machine()
    machine.map_tensor(0, source, "source")
    machine.map_tensor(0, target, "target")
    with pytest.raises(SimFault) as caught:
        machine.launch([Launch(0, kernel(COPY), 2, 64, arguments(address(source), address(target)), name="copy")])
    fault = caught.value
    assert fault.kind == "out-of-bounds"
    assert (fault.rank, fault.launch, fault.workgroup, fault.wave, fault.lane) == (0, "copy", 1, 0, 0)
    assert fault.address == address(source) + 256 and fault.text == "global_load_dword v2, v1, s[4:5]"
    assert "0 bytes behind the end of source" in str(fault) and f"line {fault.line}" in str(fault)


def test_another_ranks_memory_is_not_this_ranks() -> None:
    source, target = np.zeros(64, np.int32), np.zeros(64, np.int32)
    machine = Machine(ranks=2)
    machine.map_tensor(0, source, "source")
    machine.map_tensor(1, target, "target")
    with pytest.raises(SimFault, match="rank 0") as caught:
        machine.launch([Launch(0, kernel(COPY), 1, 64, arguments(address(source), address(target)))])
    assert caught.value.kind == "out-of-bounds" and caught.value.address == address(target)


def test_address_zero_is_a_gpu_fault() -> None:
    source = np.zeros(64, np.int32)
    machine = Machine()
    machine.map_tensor(0, source, "source")
    with pytest.raises(SimFault) as caught:
        machine.launch([Launch(0, kernel(COPY), 1, 64, arguments(address(source), 0))])
    assert caught.value.kind == "gpu-fault" and caught.value.address == 0


def test_a_store_into_readonly_memory_is_a_fault() -> None:
    source, target = np.zeros(64, np.int32), np.zeros(64, np.int32)
    machine = Machine()
    machine.map_tensor(0, source, "source", kind="readonly")
    machine.map_tensor(0, target, "target", kind="readonly")
    with pytest.raises(SimFault, match="readonly") as caught:
        machine.launch([Launch(0, kernel(COPY), 1, 64, arguments(address(source), address(target)))])
    assert caught.value.kind == "readonly-store" and (target == 0).all()


@pytest.mark.parametrize(("offset", "kind"), [(0, None), (1, "lds-out-of-bounds")])
def test_lds_has_a_size(offset: int, kind: str | None) -> None:
    code = kernel(
        f"v_lshlrev_b32_e32 v1, 2, v0\nds_write_b32 v1, v0 offset:{offset}\ns_waitcnt lgkmcnt(0)\ns_endpgm", lds=256
    )
    machine = Machine()
    if kind is None:
        machine.launch([Launch(0, code, 1, 64, arguments())])
        return
    with pytest.raises(SimFault, match="the workgroup has 256 bytes") as caught:
        machine.launch([Launch(0, code, 1, 64, arguments())])
    assert caught.value.kind == kind and caught.value.lane == 63


def test_a_misaligned_atomic_and_a_trap() -> None:
    memory = np.zeros(64, np.int32)
    machine = Machine()
    machine.map_tensor(0, memory, "memory")
    code = kernel(
        "s_load_dwordx2 s[4:5], s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\nglobal_atomic_add v0, v0, s[4:5]\ns_endpgm"
    )
    with pytest.raises(SimFault) as caught:
        machine.launch([Launch(0, code, 1, 64, arguments(address(memory)))])
    assert caught.value.kind == "misaligned" and caught.value.lane == 1
    with pytest.raises(SimFault, match="s_trap 2") as caught:
        machine.launch([Launch(0, kernel("s_trap 2\ns_endpgm"), 1, 64, arguments())])
    assert caught.value.kind == "trap"


def test_registers_and_lds_begin_poisoned() -> None:
    out = np.zeros((3, 64), np.uint32)
    code = kernel(
        """
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 2, v0
        ds_read_b32 v3, v1
        v_mov_b32_e32 v4, s20
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v9, s[4:5]
        global_store_dword v1, v3, s[4:5] offset:256
        global_store_dword v1, v4, s[4:5] offset:512
        s_endpgm""",
        lds=256,
    )
    run(code, [out])
    assert (out == 0xFFA5FFA5).all()
    assert np.isnan(out.view(np.float32)).all() and np.isnan(out.view(np.float16)).all()


def test_fresh_memory_can_be_poisoned() -> None:
    memory = np.ones(4096, np.float32)
    machine = Machine()
    machine.map(0, address(memory) + 16, 8192, "part", poison=True)
    assert np.isnan(memory[4:2052]).all() and (memory[:4] == 1).all() and (memory[2052:] == 1).all()


# ---- residency ----


@pytest.mark.parametrize(
    ("vgprs", "lds", "threads", "per_cu"),
    [
        (32, 0, 512, 4),
        (128, 0, 512, 2),
        (129, 0, 512, 1),
        (256, 0, 512, 1),
        (64, 0, 64, 32),
        (32, 81 * 1024, 256, 1),
        (512, 0, 256, 1),
    ],
)
def test_workgroups_of_a_cu(vgprs: int, lds: int, threads: int, per_cu: int) -> None:
    code = kernel("s_endpgm", vgprs=vgprs, lds=lds)
    assert code.groups_per_cu(threads) == per_cu
    machine = Machine(cus=3)
    machine.launch([Launch(0, code, 3 * per_cu, threads, arguments())])
    with pytest.raises(SimError, match=r"not resident as a whole.*needs 4 CUs, the machine has 3"):
        machine.launch([Launch(0, code, 3 * per_cu + 1, threads, arguments())])
    machine.launch([Launch(0, code, 3 * per_cu + 1, threads, arguments(), persistent=False)])


def test_launches_of_a_rank_share_its_cus() -> None:
    code = kernel("s_endpgm", vgprs=128)
    machine = Machine(ranks=2, cus=2)
    launch = Launch(0, code, 2, 512, arguments())
    machine.launch([launch, Launch(0, code, 2, 512, arguments()), Launch(1, code, 4, 512, arguments())])
    with pytest.raises(SimError, match="not resident"):
        machine.launch([launch, launch, launch])


def test_what_does_not_fit_a_cu_is_refused() -> None:
    machine = Machine()
    with pytest.raises(SimError, match="1024 threads with 256 VGPRs does not fit"):
        machine.launch([Launch(0, kernel("s_endpgm", vgprs=256), 1, 1024, arguments())])
    with pytest.raises(SimError, match="2048 threads a workgroup"):
        machine.launch([Launch(0, kernel("s_endpgm"), 1, 2048, arguments())])
    with pytest.raises(SimError, match="163841 bytes of LDS"):
        machine.launch([Launch(0, kernel("s_endpgm", lds=160 * 1024), 1, 64, arguments(), dynamic_lds=1)])


# ---- mapping and arguments ----


def test_mapping_errors() -> None:
    memory = np.zeros(64, np.int32)
    machine = Machine()
    machine.map_tensor(0, memory, "memory")
    with pytest.raises(SimError, match="overlaps memory"):
        machine.map(0, address(memory) + 128, 512, "other")
    with pytest.raises(SimError, match="region r"):
        machine.map(0, 1 << 40, 64, "small", host_address=address(memory), regions=[("r", 32, 64)])
    with pytest.raises(SimError, match="rank 1 does not exist"):
        machine.map_tensor(1, memory, "memory")
    with pytest.raises(SimError, match="not contiguous"):
        machine.map_tensor(0, memory[::2], "slice")
    with pytest.raises(SimError, match="no allocation at"):
        machine.unmap(0, 4096)
    machine.unmap(0, address(memory))
    machine.map_tensor(0, memory, "again")


@pytest.mark.parametrize("size", [24, 40])
def test_the_argument_block_has_its_size(size: int) -> None:
    with pytest.raises(SimError, match=rf"{size} bytes of kernel arguments, the kernel declares 32"):
        Machine().launch([Launch(0, kernel("s_endpgm"), 1, 64, bytes(size))])


def test_one_block_at_different_addresses_of_two_ranks() -> None:
    shared, results = np.arange(64, dtype=np.int32), np.zeros((2, 64), np.int32)
    machine = Machine(ranks=2)
    launches = []
    for rank, base in enumerate((1 << 40, 5 << 40)):
        machine.map(rank, base, shared.nbytes, "shared", host_address=address(shared))
        machine.map_tensor(rank, results[rank], "result")
        launches.append(Launch(rank, kernel(COPY), 1, 64, arguments(base, address(results[rank]))))
    report = machine.launch(launches)
    assert (results == shared).all()
    assert report.bytes_read == {(0, "shared"): {"plain": 256}, (1, "shared"): {"plain": 256}}


def test_a_mutated_copy_leaves_the_original_alone() -> None:
    code = kernel(COPY)
    fewer = code.delete("s_waitcnt vmcnt")
    assert len(fewer.instructions) == len(code.instructions) - 1 and len(code.find("vmcnt")) == 1
    assert (
        code.replace(r"v2, s\[6:7\]", "v1, s[6:7]").find("global_store")[0].text == "global_store_dword v1, v1, s[6:7]"
    )
    assert code.delete(code.find("s_lshl")[0].line).find("s_lshl") == []
    with pytest.raises(SimError, match="0 instructions match"):
        code.delete("s_sleep")


# ---- counters ----


def test_unique_bytes_and_policies() -> None:
    lines = "\n".join(
        ["s_load_dwordx2 s[4:5], s[0:1], 0x0", "v_lshlrev_b32_e32 v1, 2, v0", "s_waitcnt lgkmcnt(0)"]
        + [f"global_load_dword v2, v1, s[4:5] {p}" for p in ("", "nt", "sc1", "sc0 sc1", "sc0")]
        + ["s_waitcnt vmcnt(0)", "s_endpgm"]
    )
    memory = np.zeros(1024, np.int32)
    machine = Machine(unique_bytes=True)
    machine.map_tensor(0, memory, "memory")
    report = machine.launch([Launch(0, kernel(lines), 3, 64, arguments(address(memory)))])
    assert report.bytes_read[0, "memory"] == dict.fromkeys(("plain", "nt", "sc1", "sc0 sc1", "sc0"), 768)
    assert report.unique_bytes == {(0, "memory"): 256}


def test_hand_offs_and_polls_of_a_chain_over_two_ranks() -> None:
    blocks = 4
    pairs, results = np.zeros((2 * blocks + 1, 2), np.uint32), np.zeros((2, blocks), np.uint32)
    pairs[0] = (10, 7)
    machine = Machine(ranks=2, wall_clock_s=30)
    launches = []
    for rank in range(2):
        regions = [("first half", 0, 8 * blocks), ("second half", 8 * blocks, 8 * blocks + 8)]
        machine.map(rank, address(pairs), pairs.nbytes, "pairs", kind="mailbox", regions=regions)
        machine.map_tensor(rank, results[rank], "results")
        base = address(pairs) + rank * blocks * 8
        code = kernel(CHAIN.format(policy="sc0 sc1"))
        launches.append(Launch(rank, code, blocks, 64, arguments(base, address(results[rank]))))
    report = machine.launch(launches)
    assert results.flatten().tolist() == [10 + k for k in range(1, 2 * blocks + 1)]
    # 4 workgroups a rank: 3 hops inside rank 0, one across, 3 inside rank 1; pair 0 was there before.
    assert (report.longest_device_hops, report.longest_cross_hops) == (6, 1)
    chain = report.hop_chain
    assert [kind for _, kind in chain] == ["device"] * 3 + ["cross"] + ["device"] * 3
    assert chain[0][0] == "pairs.first half" and chain[3][0] == "pairs.second half"
    assert sum(report.polls.values()) > 0 and all(launch.poll_instructions > 0 for launch in report.launches)
    # A wave's work is what it would run if the first poll had succeeded.
    assert [launch.wave_instructions for launch in report.launches] == [blocks * len(code.instructions)] * 2


def test_a_barrier_passes_the_depth_on() -> None:
    lines = """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_readfirstlane_b32 s10, v0
        v_mov_b32_e32 v1, 0
        v_mov_b32_e32 v2, 7
        s_waitcnt lgkmcnt(0)
        s_cmp_lg_u32 s2, 0
        s_cbranch_scc1 .Lreader
        global_store_dword v1, v2, s[4:5] sc1
        s_endpgm
        .Lreader:
        s_cmp_lg_u32 s10, 0
        s_cbranch_scc1 .Lmeet
        .Lpoll:
        s_sleep 1
        global_load_dword v3, v1, s[4:5] sc1
        s_waitcnt vmcnt(0)
        v_cmp_ne_u32_e32 vcc, 7, v3
        s_cbranch_vccnz .Lpoll
        .Lmeet:
        s_barrier
        s_cmp_eq_u32 s10, 0
        s_cbranch_scc1 .Lend
        global_store_dword v1, v2, s[4:5] offset:{to} sc1
        .Lend:
        s_endpgm"""
    words = np.zeros(16, np.uint32)
    machine = Machine(wall_clock_s=30)
    machine.map(0, address(words), words.nbytes, "words", kind="mailbox")
    first = kernel(lines.replace("{to}", "8"), name="first")
    # A second launch of one workgroup waits for what the other wave of the first launch's reader wrote.
    second = kernel(
        lines.replace("s_cmp_lg_u32 s2, 0\n", "s_cmp_eq_u32 s2, s2\n")
        .replace("s[4:5] sc1", "s[4:5] offset:8 sc1")
        .replace("{to}", "16"),
        name="second",
    )
    report = machine.launch(
        [Launch(0, first, 2, 128, arguments(address(words))), Launch(0, second, 1, 128, arguments(address(words)))]
    )
    assert [launch.longest_device_hops for launch in report.launches] == [1, 2]
    assert sum(launch.barriers for launch in report.launches) == 4  # waves of both readers
