# SPDX-License-Identifier: Apache-2.0
"""Hand-offs on the simulator: mailbox chains over workgroups and ranks, deadlines, error records, the end of a step."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from helpers.common_kernels import BulkKey, RingKey

from sgl_amd_mono.common.runtime import Kernel, deadline_ticks, describe_fault
from sgl_amd_mono.common.runtime_sim import Cluster
from sgl_amd_mono.common.sync import REGION_EXCHANGE, REGION_MARKS, tag_of

MODELS = ("consistent", "adversarial")
SEEDS = 20
CAUGHT = 19  # of SEEDS
SLOT = 5
DEADLINE_S = 0.001
UNTOUCHED = -1.0


@dataclass
class Ring:
    """A ``RingKey`` kernel with the memory of all ranks."""

    key: RingKey
    memory: str = "consistent"
    seed: int = 0
    code: Any = None
    cluster: Cluster = field(init=False)

    def __post_init__(self) -> None:
        key = self.key
        self.cluster = Cluster(key.ranks, memory=self.memory, seed=self.seed)
        self.kernel = self.cluster.kernel(key)
        self.peers = self.cluster.peer_buffers(key.peer_bytes)
        self.scratch = [self.cluster.zeros(rank, key.scratch_bytes, "scratch") for rank in range(key.ranks)]
        self.epoch = [torch.zeros(1, dtype=torch.int32) for _ in range(key.ranks)]
        shape = (key.ranks, key.blocks)
        self.src = torch.from_numpy(np.random.default_rng(2).integers(-9, 9, shape).astype(np.float32))
        self.reset()

    def reset(self) -> None:
        shape = (self.key.ranks, self.key.blocks, self.key.block)
        self.out, self.state = torch.full(shape, UNTOUCHED), torch.full(shape, UNTOUCHED)

    @property
    def expected(self) -> torch.Tensor:
        """Running sums, exact in f32."""
        sums = self.src.flatten().cumsum(0).reshape(self.src.shape)
        return sums[..., None].expand(self.out.shape)

    def launch(
        self, *, epoch: int = 1, slot: int = SLOT, mode: int = 1, last: int = 0, deadline_s: float = DEADLINE_S
    ) -> Any:
        parts = []
        for rank in range(self.key.ranks):
            self.epoch[rank].fill_(epoch)
            parts.append(
                (
                    rank,
                    self.kernel,
                    [
                        self.src[rank],
                        self.out[rank],
                        self.state[rank],
                        self.scratch[rank],
                        self.peers[rank].table,
                        self.epoch[rank],
                        deadline_ticks(deadline_s),
                        rank,
                        slot,
                        mode,
                        last,
                    ],
                )
            )
        return self.cluster.launch(parts)

    def stall(self, **where: Any) -> None:
        from sgl_amd_mono.sim import Stall

        self.cluster.machine.inject(Stall(**where))

    def mutated(self, change: Any) -> None:
        """Replace the code by ``change(code)``."""
        self.kernel = Kernel(self.kernel.key, self.kernel.artifact, change(self.kernel.loaded))


@pytest.mark.parametrize("memory", MODELS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_chain_over_workgroups_and_ranks(ranks: int, memory: str) -> None:
    ring = Ring(RingKey(ranks=ranks), memory)
    for epoch in (1, 2, 2**22 - 1, 2**22, 7):  # nothing is zeroed between steps; the tag wraps
        ring.reset()
        report = ring.launch(epoch=epoch, last=1)
        assert torch.equal(ring.out, ring.expected) and torch.equal(ring.state, ring.expected)
        assert not any(p.fault_state().failed for p in ring.peers)
    # Each workgroup waits for the one before it; ranks meet once in the token and once at the step's end.
    assert report.longest_device_hops >= ring.key.blocks - 1
    assert any("ring" in region for region, _ in report.hop_chain)
    if ranks == 2:
        assert report.longest_cross_hops >= 1
        assert any("token" in region for region, _ in report.hop_chain)


def test_seeds_change_the_schedule_and_not_the_result() -> None:
    for seed in range(SEEDS):
        ring = Ring(RingKey(ranks=2), "adversarial", seed)
        ring.launch(last=1)
        assert torch.equal(ring.state, ring.expected), seed


def test_the_warm_up_launch_touches_nothing() -> None:
    ring = Ring(RingKey(ranks=2))
    ring.launch(mode=0, last=1)
    assert (ring.out == UNTOUCHED).all() and (ring.state == UNTOUCHED).all()
    assert not any(p.tensor.any() for p in ring.peers) and not any(s.any() for s in ring.scratch)


def test_tags_keep_steps_and_launches_apart() -> None:
    ring = Ring(RingKey())
    pairs = ring.scratch[0].view(torch.int64)
    stale = torch.tensor([7.0]).view(torch.int32).item()
    for epoch, slot in ((0, SLOT), (1, SLOT - 1), (2, SLOT), (1, SLOT + 1)):
        pairs.fill_((tag_of(epoch, slot) << 32) | stale)
        ring.reset()
        ring.launch(epoch=1)
        assert torch.equal(ring.out, ring.expected), (epoch, slot)
    # The control: a pair that carries this launch's tag is taken, though nobody has put it.
    pairs.fill_((tag_of(1, SLOT) << 32) | stale)
    ring.reset()
    ring.stall(rank=0, workgroup=3, at="start")
    ring.launch(epoch=1)
    assert (ring.out[0, 4] == 7.0 + ring.src[0, 4]).all()


def test_a_wrong_tag_is_waited_for_until_the_deadline() -> None:
    ring = Ring(RingKey(blocks=2, wrong_tag=True))
    ring.launch()
    (record,) = ring.peers[0].fault_state().records
    assert (record.expected_tag, record.seen_tag) == (tag_of(1, SLOT), tag_of(1, SLOT) + 1)
    assert (ring.state[0, 1] == UNTOUCHED).all()


# ---------------------------------------------------------------------------------------------------------------
# Deadlines
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", MODELS)
@pytest.mark.parametrize("stalled", [0, 3, 6])
def test_a_stalled_workgroup_ends_the_launch_on_every_rank(stalled: int, memory: str) -> None:
    ring = Ring(RingKey(ranks=2), memory)
    ring.stall(rank=0, workgroup=stalled, at="start")
    ring.launch(last=1)
    states = [p.fault_state() for p in ring.peers]
    assert all(s.failed and s.error_word in (1, 2) for s in states)
    assert states[0].records == states[1].records
    # All that wait behind the stalled workgroup have the same deadline: any of them may be the first of its rank.
    for record in states[0].records:
        assert record.launch == SLOT and record.expected_tag == tag_of(1, SLOT) and record.seen_tag == 0
        if record.region == ring.key.region_names.index("ring"):
            assert (record.rank, record.workgroup) > (0, stalled) and record.index == record.workgroup - 1
        elif record.region == ring.key.region_names.index("token"):
            assert (record.rank, record.workgroup, record.index) == (1, 0, 0)
        else:
            assert record.region in (REGION_MARKS, REGION_EXCHANGE) and record.workgroup == 0
    assert describe_fault(states[1], [ring.key]).startswith(f"ring of layer {SLOT}: wait on '")
    # Nobody behind the stalled workgroup has written state.
    flat = ring.state.reshape(-1, ring.key.block)
    assert (flat[stalled:] == UNTOUCHED).all()
    assert torch.equal(flat[:stalled], ring.expected.reshape(-1, ring.key.block)[:stalled])


def test_a_stalled_rank_ends_the_launch_on_every_rank() -> None:
    for stalled in (0, 1):
        ring = Ring(RingKey(ranks=2))
        ring.stall(rank=stalled, at="start")
        ring.launch(last=1)
        live = ring.peers[1 - stalled].fault_state()
        assert live.failed and live.error_word == 2 - stalled
        (record,) = live.records
        expected = {0: (1, 0, 1), 1: (REGION_EXCHANGE, 1, 0)}[stalled]  # (region, index, rank): token, exchange slot 1
        assert (record.region, record.index, record.rank) == expected
        assert (ring.state[stalled:] == UNTOUCHED).all()
        # The stalled rank's own block carries the word and the record: its host knows without asking.
        assert ring.peers[stalled].fault_state() == live


def test_later_launches_leave_at_once() -> None:
    ring = Ring(RingKey(ranks=2))
    ring.stall(rank=0, workgroup=2, at="start")
    ring.launch()
    ring.cluster.machine.clear_faults()
    before = ring.cluster.machine.clock
    ring.reset()
    scratch = [s.clone() for s in ring.scratch]
    ring.launch(epoch=2, last=1)
    assert (ring.out == UNTOUCHED).all() and (ring.state == UNTOUCHED).all()
    assert all(torch.equal(a, b) for a, b in zip(scratch, ring.scratch, strict=True))
    assert ring.cluster.machine.clock - before < deadline_ticks(DEADLINE_S)


def test_no_rank_ends_a_step_that_another_lost() -> None:
    """Rank 1 loses its last workgroup after all waits of rank 0 are satisfied: only the exchange can tell rank 0."""
    for last, told in ((0, False), (1, True)):
        ring = Ring(RingKey(ranks=2))
        ring.stall(rank=1, workgroup=7, at="start")
        ring.launch(last=last)
        assert torch.equal(ring.state[0], ring.expected[0])
        assert ring.peers[0].fault_state().failed is told


def test_stop_builds_end_in_a_gpu_fault_at_address_0() -> None:
    from sgl_amd_mono.sim import SimFault

    ring = Ring(RingKey(ranks=2, stop=True))
    ring.launch(last=1)
    assert torch.equal(ring.state, ring.expected)
    ring.reset()
    ring.stall(rank=0, workgroup=2, at="start")
    with pytest.raises(SimFault) as caught:
        ring.launch(epoch=2)
    assert caught.value.kind == "gpu-fault" and caught.value.address == 0
    assert ring.peers[0].fault_state().failed  # the record is out before the fault
    assert (ring.state[0, 2:] == UNTOUCHED).all() and (ring.state[1] == UNTOUCHED).all()


def test_the_deadline_is_the_arguments() -> None:
    for seconds in (0.0005, 0.01):
        ring = Ring(RingKey())
        ring.stall(rank=0, workgroup=0, at="start")
        start = ring.cluster.machine.clock
        ring.launch(deadline_s=seconds)
        waited = ring.cluster.machine.clock - start
        assert deadline_ticks(seconds) < waited < 1.5 * deadline_ticks(seconds) + 100_000
        assert ring.peers[0].fault_state().failed


def test_a_deadline_of_a_minute_does_not_overflow() -> None:
    ring = Ring(RingKey())
    ring.stall(rank=0, workgroup=0, at="start")
    start = ring.cluster.machine.clock
    ring.launch(deadline_s=60.0)
    assert ring.cluster.machine.clock - start > 6_000_000_000
    assert ring.peers[0].fault_state().failed


# ---------------------------------------------------------------------------------------------------------------
# Bulk rows: what the memory model demands
# ---------------------------------------------------------------------------------------------------------------


def run_bulk(memory: str, seed: int, change: Any = None) -> bool:
    """True when every workgroup read its neighbour's row as published."""
    key = BulkKey()
    cluster = Cluster(1, memory=memory, seed=seed)
    kernel = cluster.kernel(key)
    if change:
        kernel = Kernel(key, kernel.artifact, change(kernel.loaded))
    (peer,) = cluster.peer_buffers(4096)
    scratch = cluster.zeros(0, key.scratch_bytes, "scratch")
    rows = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**31, (key.blocks, key.row_bytes // 4), np.int32))
    out = torch.zeros_like(rows)
    epoch = torch.ones(1, dtype=torch.int32)
    cluster.launch([(0, kernel, [rows, out, scratch, peer.table, epoch, deadline_ticks(1.0), 0, SLOT, 1, 0])])
    assert not peer.fault_state().failed
    return torch.equal(out, rows.roll(-1, 0))


def _without(pattern: str, nth: int) -> Any:
    return lambda code: code.delete(pattern, nth=nth)


def _drain_number(code: Any) -> int:
    """Which ``s_waitcnt vmcnt(0)`` stands between the row stores and the flag."""
    store = next(i.index for i in code.find(r"buffer_store_dwordx4"))
    waits = [i.index for i in code.find(r"s_waitcnt vmcnt\(0\)$")]
    return next(n for n, index in enumerate(waits) if index > store)


def test_rows_arrive_under_every_schedule() -> None:
    assert run_bulk("consistent", 0)
    assert all(run_bulk("adversarial", seed) for seed in range(SEEDS))


@pytest.mark.parametrize("what", ["wait before the flag", "scope of the stores", "scope of the loads"])
def test_a_missing_piece_of_the_protocol_is_seen(what: str) -> None:
    def change(code: Any) -> Any:
        if what == "wait before the flag":
            return code.delete(r"s_waitcnt vmcnt\(0\)$", nth=_drain_number(code))
        kind = "store" if what == "scope of the stores" else "load"
        return code.replace(rf"(buffer_{kind}_dwordx4 .*) sc1", r"\1", nth=None)

    caught = sum(not run_bulk("adversarial", seed, change) for seed in range(SEEDS))
    assert caught >= CAUGHT, f"{what}: seen in {caught} of {SEEDS} seeds"


def test_records_name_the_wait_in_words() -> None:
    ring = Ring(RingKey())
    ring.stall(rank=0, workgroup=4, at="start")
    ring.launch()
    text = describe_fault(ring.peers[0].fault_state(), [ring.key])
    assert re.fullmatch(
        rf"ring of layer {SLOT}: wait on 'ring' index \d ran out of time on rank 0, workgroup \d: "
        rf"expected tag {tag_of(1, SLOT):#x} \(step 1\), seen 0x0",
        text,
    )


@pytest.mark.parametrize("ranks, found, left", [(1, " sc1", ""), (2, " sc0 sc1", " sc1")])
def test_polls_without_their_scope_are_seen(ranks: int, found: str, left: str) -> None:
    """A poll served by a cache never sees the pair: the wait runs out of time."""
    caught = 0
    for seed in range(SEEDS):
        ring = Ring(RingKey(ranks=ranks), "adversarial", seed)
        ring.mutated(lambda code: code.replace(rf"(global_load_dwordx2 .*){found}$", rf"\1{left}", nth=None))
        ring.launch(last=1)
        caught += any(p.fault_state().failed for p in ring.peers)
    assert caught >= CAUGHT, f"seen in {caught} of {SEEDS} seeds"


def test_a_lost_or_late_store_of_a_peer() -> None:
    from sgl_amd_mono.sim import DelayStores, DropStores

    ring = Ring(RingKey(ranks=2))
    late = deadline_ticks(DEADLINE_S) // 2
    ring.cluster.machine.inject(DelayStores(rank=0, to_rank=1, region="token", ticks=late))
    ring.launch(last=1)
    assert torch.equal(ring.state, ring.expected) and ring.cluster.machine.clock > late
    ring.cluster.machine.clear_faults()
    ring.cluster.machine.inject(DropStores(rank=0, to_rank=1, region="token"))
    ring.reset()
    ring.launch(epoch=2, last=1)
    for state in (p.fault_state() for p in ring.peers):
        assert state.failed and [(r.rank, r.region, r.index) for r in state.records] == [(1, 1, 0)]
    assert torch.equal(ring.state[0], ring.expected[0]) and (ring.state[1] == UNTOUCHED).all()


def test_a_rank_that_fails_on_the_host_ends_the_launches_of_all() -> None:
    ring = Ring(RingKey(ranks=2))
    ring.peers[1].mark_failed()
    ring.launch(last=1)
    assert [p.fault_state().error_word for p in ring.peers] == [2, 2]
    assert (ring.out == UNTOUCHED).all() and (ring.state == UNTOUCHED).all()
    assert describe_fault(ring.peers[0].fault_state(), [ring.key]) == "rank 1 failed and left no record"
