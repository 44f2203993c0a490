# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for HIP, torch's streams and the process group: they record every call and can fail at a chosen one."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from sgl_amd_mono.common.peer import PeerError


@dataclass
class StubHip:
    """``peer.HipApi`` over one shared address book; ``fail_at`` names the call that fails on this rank."""

    rank: int
    exported: dict[bytes, tuple[int, int]]
    fail_at: str | None = None
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    allocated: dict[int, bytearray] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)

    def _call(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        if self.fail_at == name:
            raise PeerError(f"{name} failed: hipErrorStub")

    def malloc_uncached(self, nbytes: int) -> int:
        self._call("malloc_uncached", nbytes)
        address = 0x1000_0000 * (self.rank + 1)
        self.allocated[address] = bytearray(b"\xaa" * nbytes)
        return address

    def memset_zero(self, address: int, nbytes: int) -> None:
        self._call("memset_zero", address, nbytes)
        self.allocated[address][:nbytes] = bytes(nbytes)

    def ipc_handle(self, address: int) -> bytes:
        self._call("ipc_handle", address)
        handle = f"handle of rank {self.rank}".encode().ljust(64, b"\0")
        self.exported[handle] = (self.rank, address)
        return handle

    def ipc_open(self, handle: bytes) -> int:
        self._call("ipc_open", handle)
        owner, _ = self.exported[handle]
        address = 0x9000_0000 + 0x100_0000 * owner + 0x1000 * self.rank
        self.opened.add(address)
        return address

    def ipc_close(self, address: int) -> None:
        self._call("ipc_close", address)
        self.opened.remove(address)

    def free(self, address: int) -> None:
        self._call("free", address)
        del self.allocated[address]

    def stream(self) -> int:
        self._call("stream")
        return 0x5555

    def write(self, address: int, data: bytes, stream: int) -> None:
        self._call("write", address, data, stream)
        for start, block in self.allocated.items():
            if start <= address < start + len(block):
                block[address - start : address - start + len(data)] = data

    def read(self, address: int, nbytes: int) -> bytes:
        self._call("read", address, nbytes)
        return bytes(self.allocated[address][:nbytes])


class ThreadGroup:
    """``RankGroup`` of ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, shared: SimpleNamespace) -> None:
        self.rank, self.size, self._shared = rank, size, shared

    @classmethod
    def make(cls, size: int) -> list[ThreadGroup]:
        shared = SimpleNamespace(barrier=threading.Barrier(size, timeout=60), values=[None] * size)
        return [cls(rank, size, shared) for rank in range(size)]

    def all_gather(self, value: Any) -> list[Any]:
        self._shared.values[self.rank] = value
        self._shared.barrier.wait()
        values = list(self._shared.values)
        self._shared.barrier.wait()
        return values

    def barrier(self) -> None:
        self.all_gather(None)


def on_every_rank(size: int, action: Any) -> list[Any]:
    """``action(rank)`` in one thread a rank; its result, or the exception it raised, in rank order."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = action(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
