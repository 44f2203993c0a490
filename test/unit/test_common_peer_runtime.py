# SPDX-License-Identifier: Apache-2.0
"""Peer memory and the HIP runtime, driven against stand-ins that record the calls and fail at each step."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from helpers.hip_stub import StubHip, ThreadGroup, on_every_rank

from sgl_amd_mono.common import build as building
from sgl_amd_mono.common import runtime
from sgl_amd_mono.common.build import Abi, Argument, Artifact, BuildKey, Resources
from sgl_amd_mono.common.peer import HipPeerBuffer, PeerError
from sgl_amd_mono.common.runtime import HipRuntime, Kernel, LaunchError, RuntimeRequest, describe_fault
from sgl_amd_mono.common.sync import (
    FAULT_BLOCK_BYTES,
    RECORD_OFFSET,
    REGION_EXCHANGE,
    FaultRecord,
    decode_fault_block,
    tag_of,
)

RANKS = 4
NBYTES = 10_000


def make_buffers(fail: dict[int, str] | None = None, table_fails: int | None = None) -> tuple[list[Any], list[StubHip]]:
    exported: dict[bytes, tuple[int, int]] = {}
    groups = ThreadGroup.make(RANKS)
    stubs = [StubHip(rank, exported, (fail or {}).get(rank)) for rank in range(RANKS)]

    def make_table(rank: int) -> Callable[[list[int]], Any]:
        def table(addresses: list[int]) -> Any:
            if rank == table_fails:
                raise MemoryError("no room for the table")
            return torch.tensor(addresses, dtype=torch.int64)

        return table

    def construct(rank: int) -> HipPeerBuffer:
        return HipPeerBuffer(NBYTES, groups[rank], stubs[rank], make_table(rank))

    return on_every_rank(RANKS, construct), stubs


def test_every_rank_sees_every_buffer() -> None:
    buffers, stubs = make_buffers()
    for rank, (buffer, stub) in enumerate(zip(buffers, stubs, strict=True)):
        assert buffer.nbytes == 12288  # whole pages
        names = [call[0] for call in stub.calls]
        assert names == ["malloc_uncached", "memset_zero", "ipc_handle"] + ["ipc_open"] * (RANKS - 1)
        assert buffer.table.tolist() == buffer.addresses and len(set(buffer.addresses)) == RANKS
        assert buffer.addresses[rank] in stub.allocated
        assert {a for r, a in enumerate(buffer.addresses) if r != rank} == stub.opened
        assert not any(stub.allocated[buffer.addresses[rank]])
        assert not buffer.fault_state().failed


def test_close_unmaps_before_anyone_frees() -> None:
    buffers, stubs = make_buffers()
    order: list[str] = []
    for stub in stubs:
        original_close, original_free = stub.ipc_close, stub.free
        stub.ipc_close = lambda a, f=original_close: (order.append("close"), f(a))
        stub.free = lambda a, f=original_free: (order.append("free"), f(a))
    assert on_every_rank(RANKS, lambda rank: buffers[rank].close()) == [None] * RANKS
    assert order == ["close"] * (RANKS * (RANKS - 1)) + ["free"] * RANKS
    assert not any(stub.allocated or stub.opened for stub in stubs)
    buffers[0].close()  # a second call does nothing
    assert len(order) == RANKS * RANKS


@pytest.mark.parametrize("call", ["malloc_uncached", "memset_zero", "ipc_handle", "ipc_open"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_failure_at_any_step_ends_all_ranks_and_leaks_nothing(call: str, rank: int) -> None:
    results, stubs = make_buffers({rank: call})
    for result in results:
        assert isinstance(result, PeerError)
        assert f"rank {rank}: PeerError: {call} failed: hipErrorStub" in str(result)
        assert "needed: all 4 ranks" in str(result)
    assert len({str(r) for r in results}) == 1
    assert not any(stub.allocated or stub.opened for stub in stubs)


def test_a_table_that_cannot_be_placed_ends_all_ranks() -> None:
    results, stubs = make_buffers(table_fails=2)
    assert all("rank 2: MemoryError: no room" in str(r) for r in results)
    assert not any(stub.allocated or stub.opened for stub in stubs)


def test_a_buffer_without_room_for_the_fault_block_is_refused() -> None:
    with pytest.raises(PeerError, match="at least the fault block's 512"):
        HipPeerBuffer(256, ThreadGroup.make(1)[0], StubHip(0, {}), list)


def test_a_rank_that_fails_on_the_host_tells_all() -> None:
    buffers, stubs = make_buffers()
    stubs[2].calls.clear()
    buffers[2].mark_failed()
    word = (3).to_bytes(4, "little")
    assert stubs[2].calls == [("stream",), *(("write", address, word, 0x5555) for address in buffers[2].addresses)]
    assert buffers[2].fault_state().error_word == 3
    # What HIP says then must not hide the error that led here; the other ranks are still told.
    for call, written in (("stream", 0), ("write", RANKS)):
        stubs[1].fail_at = call
        stubs[1].calls.clear()
        buffers[1].mark_failed()
        assert sum(name == "write" for name, *_ in stubs[1].calls) == written


# -- fault decoding -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrontKey(BuildKey):
    width: int = 1
    model: ClassVar[str] = "toy"
    launch: ClassVar[str] = "front"
    abi: ClassVar[Abi] = (("x", "ptr"), ("n", "i32"))
    region_names: ClassVar[tuple[str, ...]] = ("proj", "onrm")
    grid = 3
    block = 64


@dataclass(frozen=True)
class TailKey(FrontKey):
    launch: ClassVar[str] = "tail"
    slot_base: ClassVar[int] = 128
    region_names: ClassVar[tuple[str, ...]] = ("ar", "route")


def block_of(error: int, records: dict[int, FaultRecord]) -> list[int]:
    words = [0] * (FAULT_BLOCK_BYTES // 4)
    words[0] = error
    for rank, record in records.items():
        start = RECORD_OFFSET // 4 + 8 * rank
        words[start : start + 8] = [1, *dataclasses.astuple(record)]
    return [w - (1 << 32) if w >= 1 << 31 else w for w in words]


def test_fault_blocks_are_decoded_and_named() -> None:
    record = FaultRecord(128 + 5, 1, 77, tag_of(9, 133), 0xFFFFFFFF, 255, 3)
    state = decode_fault_block(block_of(4, {3: record}))
    assert state.failed and state.records == (record,) and record.epoch == 9
    text = describe_fault(state, [FrontKey(), TailKey()])
    assert text == (
        "tail of layer 5: wait on 'route' index 77 ran out of time on rank 3, workgroup 255: "
        f"expected tag {tag_of(9, 133):#x} (step 9), seen 0xffffffff"
    )
    front = FaultRecord(7, 0, 1, tag_of(0, 7), 0, 2, 0)
    state = decode_fault_block(block_of(1, {0: front}))
    assert "front of layer 7: wait on 'proj'" in describe_fault(state, [TailKey(), FrontKey()])
    end = FaultRecord(130, REGION_EXCHANGE, 1, 5, 0, 0, 0)
    assert "'step-end exchange'" in describe_fault(decode_fault_block(block_of(1, {0: end})), [TailKey()])
    assert describe_fault(decode_fault_block(block_of(0, {})), []) == "no fault"
    assert "rank 2 failed and left no record" in describe_fault(decode_fault_block(block_of(3, {})), [])
    with pytest.raises(ValueError, match="has 128 int32, got 3"):
        decode_fault_block([0, 0, 0])


def test_tags() -> None:
    assert tag_of(0, 0) == 1
    assert tag_of(5, 254) == 5 * 256 + 255
    assert tag_of(2**22 + 5, 7) == tag_of(5, 7)
    assert tag_of(2**22 - 1, 254) < 2**30
    for slot in (-1, 255):
        with pytest.raises(ValueError, match=r"needed: 0 \.\. 254"):
            tag_of(0, slot)


# -- HIP runtime ----------------------------------------------------------------------------------------------------


def artifact_of(key: BuildKey, binary: str | None = "module text") -> Artifact:
    resources = Resources(1, 0, 1, 0, 0, 0, 0, 1)
    arguments = (Argument("x", "ptr", 0, 8), Argument("n", "i32", 8, 4))
    return Artifact(key.name, "isa", arguments, 12, key.grid, key.block, resources, 0.1, binary)


class StubTorch:
    """The parts of torch that ``HipRuntime`` uses, with a stream handle and a record of calls."""

    uint8, int64 = torch.uint8, torch.int64

    def __init__(self) -> None:
        self.calls: list[Any] = []
        stream = SimpleNamespace(cuda_stream=0xABCD)
        self.cuda = SimpleNamespace(
            current_stream=lambda device: self.calls.append(("current_stream", device)) or stream,
            synchronize=lambda device: self.calls.append(("synchronize", device)),
        )

    def zeros(self, nbytes: int, dtype: Any, device: Any) -> Any:
        self.calls.append(("zeros", nbytes, device))
        return torch.zeros(nbytes, dtype=dtype)

    def tensor(self, values: list[int], dtype: Any, device: Any) -> Any:
        self.calls.append(("tensor", device))
        return torch.tensor(values, dtype=dtype)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    log: list[Any] = []
    monkeypatch.setattr(building, "build_all", lambda keys, binary: log.append(("build_all", len(keys), binary)))
    monkeypatch.setattr(building, "build", lambda key, binary: log.append(("build", binary)) or artifact_of(key))
    return log


def hip_runtime(rank: int, group: Any, stub: StubHip | None = None) -> tuple[HipRuntime, StubTorch, list[Any]]:
    launches: list[Any] = []
    fake = StubTorch()

    def launcher(module: str, name: str, abi: Abi) -> Any:
        return lambda values, stream: launches.append((module, name, tuple(abi), list(values), stream))

    request = RuntimeRequest(f"cuda:{rank}", "gfx950", group, 10.0, (1,))
    return HipRuntime(request, api=stub, make_launcher=launcher, torch=fake), fake, launches


def test_hip_launches_pass_addresses_in_abi_order_on_the_current_stream(built: list[Any]) -> None:
    hip, fake, launches = hip_runtime(0, ThreadGroup.make(1)[0])
    (kernel,) = hip.build([FrontKey()])
    assert built == [("build_all", 1, True), ("build", True)]
    x = torch.zeros(8)
    hip.launch(kernel, [x, 7])
    x.set_(torch.ones(9))  # the address is read at the launch, not when the kernel was built
    hip.launch(kernel, [x, -1])
    assert [(m, n, v, s) for m, n, _, v, s in launches] == [
        ("module text", str(kernel), [launches[0][3][0], 7], 0xABCD),
        ("module text", str(kernel), [x.data_ptr(), -1], 0xABCD),
    ]
    assert launches[0][3][0] != x.data_ptr()
    assert launches[0][2] == FrontKey.abi
    assert fake.calls == [("current_stream", "cuda:0")] * 2
    assert hip.deadline_ticks(60.0) == 6_000_000_000
    scratch = hip.zeros(100, "scratch")
    assert scratch.numel() == 100 and fake.calls[-1] == ("zeros", 100, "cuda:0")
    hip.synchronize()
    assert fake.calls[-1] == ("synchronize", "cuda:0")


def test_bad_launches_name_the_argument() -> None:
    kernel = Kernel(FrontKey(), artifact_of(FrontKey()))
    for args, text in (
        ([1], "takes 2 arguments, got 1"),
        ([1, torch.zeros(1)], "'n' is i32, got a tensor"),
        ([None, 1], "'x' is NoneType; needed: a tensor or an int"),
    ):
        with pytest.raises(LaunchError, match=text):
            runtime.argument_values(kernel, args)
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(LaunchError, match="more than 0"):
            runtime.deadline_ticks(seconds)
    with pytest.raises(LaunchError, match="built for gfx950, this device is gfx942"):
        HipRuntime(RuntimeRequest("cuda:0", "gfx942", None, 1.0, (1,)), torch=StubTorch())


def test_rank_0_builds_for_all_and_its_failure_reaches_all(built: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = 8
    groups = ThreadGroup.make(ranks)
    runtimes = [hip_runtime(rank, groups[rank])[0] for rank in range(ranks)]
    kernels = on_every_rank(ranks, lambda rank: runtimes[rank].build([FrontKey(), TailKey()]))
    assert [len(k) for k in kernels] == [2] * ranks
    assert built.count(("build_all", 2, True)) == 1 and built.count(("build", True)) == 2 * ranks

    def broken(keys: Any, binary: bool) -> None:
        raise building.BuildError("lld invocation failed")

    monkeypatch.setattr(building, "build_all", broken)
    problems = on_every_rank(ranks, lambda rank: runtimes[rank].build([FrontKey()]))
    assert all("failed on rank 0: BuildError: lld invocation failed" in str(p) for p in problems)


def test_hip_runtime_owns_its_peer_buffers() -> None:
    exported: dict[bytes, tuple[int, int]] = {}
    groups = ThreadGroup.make(2)
    stubs = [StubHip(rank, exported) for rank in range(2)]
    runtimes = [hip_runtime(rank, groups[rank], stubs[rank])[0] for rank in range(2)]
    buffers = on_every_rank(2, lambda rank: runtimes[rank].peer_buffer(4096, groups[rank]))
    assert [b.table.numel() for b in buffers] == [2, 2]
    assert on_every_rank(2, lambda rank: runtimes[rank].close()) == [None, None]
    assert not any(stub.allocated or stub.opened for stub in stubs)


def test_the_seam_imports_nothing_heavy() -> None:
    code = (
        "import sys; import sgl_amd_mono.common.runtime, sgl_amd_mono.common.build, sgl_amd_mono.common.peer, "
        "sgl_amd_mono.common.sync; "
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'flydsl', 'numpy') or '.sim' in m]; "
        "assert not bad, bad"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
