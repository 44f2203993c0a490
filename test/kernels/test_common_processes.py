# SPDX-License-Identifier: Apache-2.0
"""Ranks in several processes meet for their launches in rank 0's simulator; and ranks in threads of one process."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from helpers.common_kernels import BulkKey, RingKey
from helpers.hip_stub import ThreadGroup, on_every_rank

from sgl_amd_mono.common.runtime import LaunchError, RuntimeRequest, deadline_ticks, simulator_runtime
from sgl_amd_mono.common.runtime_sim import Cluster, share_in_place

RANKS = 2
SLOT = 3


class PipeGroup:
    """``RankGroup`` of two processes over a pipe."""

    def __init__(self, rank: int, pipe: Connection) -> None:
        self.rank, self.size, self._pipe = rank, RANKS, pipe

    def all_gather(self, value: Any) -> list[Any]:
        self._pipe.send(value)
        other = self._pipe.recv()
        return [value, other] if self.rank == 0 else [other, value]

    def barrier(self) -> None:
        self.all_gather(None)


class Rank:
    """One rank's runtime, memory and launches of ``RingKey``."""

    def __init__(self, group: Any, **options: Any) -> None:
        self.group = group
        self.key = RingKey(ranks=RANKS)
        request = RuntimeRequest("cpu", "gfx950", group, 1.0, (1,))
        self.runtime = simulator_runtime(request, processes=1, **options)
        (self.kernel,) = self.runtime.build([self.key])
        self.peer = self.runtime.peer_buffer(self.key.peer_bytes, group)
        self.scratch = self.runtime.zeros(self.key.scratch_bytes, "scratch")
        self.epoch = torch.zeros(1, dtype=torch.int32)
        self.src = torch.arange(8.0) + 10 * group.rank
        pool = torch.full((3, 8, 512), -1.0)  # a view in the middle of a larger storage, as SGLang's pools are
        self.pool, self.state = pool, pool[1]

    def launch(self, epoch: int, kernel: Any = None, last: int = 1) -> torch.Tensor:
        out = torch.zeros(8, 512)  # a new tensor each launch, as activations are
        self.epoch.fill_(epoch)
        self.runtime.launch(
            kernel or self.kernel,
            [
                self.src,
                out,
                self.state,
                self.scratch,
                self.peer.table,
                self.epoch,
                deadline_ticks(0.001),
                self.group.rank,
                SLOT,
                1,
                last,
            ],
        )
        return out

    def expected(self) -> torch.Tensor:
        whole = torch.cat([torch.arange(8.0), torch.arange(8.0) + 10]).cumsum(0)
        return whole.reshape(2, 8)[self.group.rank][:, None].expand(8, 512)


def run_steps(group: Any) -> str:
    """Five steps; state, outputs and reports as expected."""
    rank = Rank(group)
    for epoch in range(1, 6):
        out = rank.launch(epoch)
        assert torch.equal(out, rank.expected()) and torch.equal(rank.state, rank.expected())
        assert (rank.pool[0] == -1).all() and (rank.pool[2] == -1).all()
    assert rank.scratch.data_ptr() % 256 == 0
    assert not rank.peer.fault_state().failed
    assert len(rank.runtime.reports) == (5 if group.rank == 0 else 0)
    rank.runtime.close()
    return "steps"


def run_missing(group: Any) -> str:
    """Rank 1 does not come to the second launch: rank 0 ends by wall clock, and rank 1 when it comes too late."""
    rank = Rank(group, timeout_s=10.0)
    rank.launch(1)
    if group.rank == 1:
        group.barrier()
    with pytest.raises(LaunchError, match=r"waited 10 s for rank\(s\) \[1\], which never came"):
        rank.launch(2)
    if group.rank == 0:
        group.barrier()
    with pytest.raises(LaunchError, match="an earlier launch ended the simulation"):
        rank.launch(3)
    group.barrier()  # rank 0 keeps its sockets until rank 1 has read the outcome
    rank.runtime.close()
    return "missing"


def run_gone(group: Any) -> str:
    """Rank 1's process ends between two launches."""
    rank = Rank(group, timeout_s=60.0)
    rank.launch(1)
    if group.rank == 1:
        return "gone"
    with pytest.raises(LaunchError, match="rank 1 ended before it launched test_ring"):
        rank.launch(2)
    return "gone"


def run_different(group: Any) -> str:
    """The ranks launch different kernels: an error on both that names them."""
    rank = Rank(group)
    (other,) = rank.runtime.build([RingKey(ranks=RANKS, blocks=8, stop=True)])
    with pytest.raises(LaunchError, match=r"the ranks launch different kernels: .*test_ring.*stop"):
        rank.launch(1, other if group.rank else None)
    return "different"


def run_fault(group: Any) -> str:
    """A stop build's fault reaches both processes, and both read the record."""
    from sgl_amd_mono.sim import SimFault, Stall

    rank = Rank(group)
    (stop,) = rank.runtime.build([RingKey(ranks=RANKS, stop=True)])
    if group.rank == 0:
        rank.runtime.machine.inject(Stall(rank=1, workgroup=3, at="start"))
    with pytest.raises(SimFault if group.rank == 0 else LaunchError, match="fault"):
        rank.launch(1, stop)
    state = rank.peer.fault_state()
    assert state.failed and state.records[0].rank in (0, 1)
    return "fault"


def child(name: str, rank: int, pipe: Connection, results: Any) -> None:
    try:
        results.put((rank, globals()[name](PipeGroup(rank, pipe))))
    except BaseException:
        results.put((rank, traceback.format_exc()))


@pytest.mark.parametrize("name", ["run_steps", "run_missing", "run_gone", "run_different", "run_fault"])
def test_two_processes(name: str) -> None:
    context = multiprocessing.get_context("fork")
    pipes = context.Pipe()
    results = context.Queue()
    processes = [context.Process(target=child, args=(name, rank, pipes[rank], results)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=600) for _ in range(RANKS))
    for process in processes:
        process.join(60)
    assert found == {rank: name.removeprefix("run_") for rank in range(RANKS)}, found


def test_ranks_in_threads_of_one_process() -> None:
    groups = ThreadGroup.make(RANKS)
    cluster = Cluster(RANKS)
    ranks = on_every_rank(RANKS, lambda r: Rank(groups[r], cluster=cluster))
    for epoch in (1, 2):
        outs = on_every_rank(RANKS, lambda r, e=epoch: ranks[r].launch(e))
        for rank, out in zip(ranks, outs, strict=True):
            assert torch.equal(out, rank.expected())
    assert len(cluster.reports) == 2


def test_a_thread_that_never_comes_ends_the_launch() -> None:
    groups = ThreadGroup.make(RANKS)
    cluster = Cluster(RANKS, timeout_s=0.2)
    ranks = on_every_rank(RANKS, lambda r: Rank(groups[r], cluster=cluster))
    with pytest.raises(LaunchError, match=r"waited 0.2 s for rank\(s\) \[1\], which never came"):
        ranks[0].launch(1)


def test_one_rank_reports_what_it_ran() -> None:
    class Alone:
        rank, size = 0, 1

        def all_gather(self, value: Any) -> list[Any]:
            return [value]

        def barrier(self) -> None:
            """Alone."""

    seen: list[Any] = []
    runtime = simulator_runtime(RuntimeRequest("cpu", "gfx950", Alone(), 1.0, (1,)), on_report=seen.append, processes=1)
    key = BulkKey()
    (kernel,) = runtime.build([key])
    peer = runtime.peer_buffer(4096, Alone())
    scratch = runtime.zeros(key.scratch_bytes, "scratch")
    rows = torch.arange(key.blocks * key.row_bytes // 4, dtype=torch.int32).reshape(key.blocks, -1)
    out = torch.zeros_like(rows)
    epoch = runtime.zeros(4, "epoch").view(torch.int32)  # persistent memory that is no scratch
    epoch.fill_(1)
    runtime.launch(kernel, [rows, out, scratch, peer.table, epoch, runtime.deadline_ticks(1.0), 0, SLOT, 1, 0])
    assert torch.equal(out, rows.roll(-1, 0))
    assert seen == runtime.reports and seen[0].kernel == str(kernel) and seen[0].key == key
    read = seen[0].report.bytes_read
    assert sum(read[0, "src"].values()) == rows.numel() * 4
    assert read[0, "scratch"]["sc1"] >= rows.numel() * 4
    runtime.close()


def test_shared_memory_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(1000)
    before = tensor.data_ptr()
    room = os.statvfs("/dev/shm")
    full = os.statvfs_result((*room[:4], 0, *room[5:]))
    monkeypatch.setattr(os, "statvfs", lambda folder: full)
    with pytest.raises(LaunchError, match=r"4000 bytes of a launch .* /dev/shm has 0 free; fix: .*--shm-size"):
        share_in_place(tensor)
    assert tensor.data_ptr() == before
    monkeypatch.undo()
    view = tensor[500:]
    share_in_place(tensor)
    assert tensor.data_ptr() != before and view.data_ptr() == tensor.data_ptr() + 2000 and (view == 1).all()
    monkeypatch.setattr(os, "statvfs", lambda folder: full)
    share_in_place(view)  # it is shared already
