# SPDX-License-Identifier: Apache-2.0
"""PeerBuffer: memory of one rank that every tensor-parallel rank can write, with the fault block in front.

The buffer of a rank is allocated on its GPU as uncached memory, so that a store of another GPU needs no cache
maintenance to be seen, exported through a HIP IPC handle and opened by every other rank. The ranks agree after each
collective step (allocate and export; open): when one fails, all release what they hold and raise the same error. The
simulator's buffer has the same face and lives in ``runtime_sim.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any, Protocol

from sgl_amd_mono.common.sync import ERROR_OFFSET, FAULT_BLOCK_BYTES, FaultState, decode_fault_block

UNCACHED = 0x3  # hipDeviceMallocUncached
IPC_LAZY_PEER_ACCESS = 0x1  # hipIpcMemLazyEnablePeerAccess
IPC_HANDLE_BYTES = 64
COPY_HOST_TO_DEVICE = 1  # hipMemcpyHostToDevice
COPY_DEVICE_TO_HOST = 2  # hipMemcpyDeviceToHost
STREAM_NON_BLOCKING = 1  # hipStreamNonBlocking
PEER_ALIGN = 4096


class Group(Protocol):
    """CPU-side exchange between the ranks (``common.state.RankGroup``)."""

    rank: int
    size: int

    def all_gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order."""

    def barrier(self) -> None:
        """Return once every rank has called it."""


class PeerBuffer(Protocol):
    """What kernels and host need of peer memory."""

    nbytes: int
    table: Any  # int64 tensor [ranks] on the device: base address of each rank's buffer as seen by this rank

    def fault_state(self) -> FaultState:
        """Decoded fault block of this rank's buffer."""

    def mark_failed(self) -> None:
        """Set the error word of every rank: the step is lost, and each launch that waits or comes leaves at once."""

    def close(self) -> None:
        """Release; every rank must call it. A second call does nothing."""


class PeerError(RuntimeError):
    """Peer memory could not be set up; names the ranks, the step and the cause."""


class HipApi:
    """The HIP runtime calls that peer memory needs, by ctypes. Each raises ``PeerError`` with HIP's error name."""

    def __init__(self, library: str = "libamdhip64.so") -> None:
        try:
            self._lib = ctypes.CDLL(library)
        except OSError as error:
            raise PeerError(f"the HIP runtime '{library}' cannot be loaded ({error}); needed: ROCm") from error
        self._lib.hipGetErrorName.restype = ctypes.c_char_p

    def _check(self, call: str, status: int) -> None:
        if status:
            name = self._lib.hipGetErrorName(status)
            raise PeerError(f"{call} failed: {name.decode() if name else status}")

    def malloc_uncached(self, nbytes: int) -> int:
        """Device address of ``nbytes`` of uncached memory."""
        pointer = ctypes.c_void_p()
        size, flags = ctypes.c_size_t(nbytes), ctypes.c_uint(UNCACHED)
        status = self._lib.hipExtMallocWithFlags(ctypes.byref(pointer), size, flags)
        self._check("hipExtMallocWithFlags", status)
        return int(pointer.value or 0)

    def memset_zero(self, address: int, nbytes: int) -> None:
        """Fill with zeros and wait for it."""
        self._check("hipMemset", self._lib.hipMemset(ctypes.c_void_p(address), 0, ctypes.c_size_t(nbytes)))
        self._check("hipDeviceSynchronize", self._lib.hipDeviceSynchronize())

    def ipc_handle(self, address: int) -> bytes:
        """IPC handle of an allocation."""
        handle = (ctypes.c_char * IPC_HANDLE_BYTES)()
        self._check("hipIpcGetMemHandle", self._lib.hipIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(address)))
        return bytes(handle)

    def ipc_open(self, handle: bytes) -> int:
        """Address of another process's allocation."""

        class Handle(ctypes.Structure):
            _fields_ = [("reserved", ctypes.c_char * IPC_HANDLE_BYTES)]

        pointer = ctypes.c_void_p()
        status = self._lib.hipIpcOpenMemHandle(
            ctypes.byref(pointer), Handle.from_buffer_copy(handle), ctypes.c_uint(IPC_LAZY_PEER_ACCESS)
        )
        self._check("hipIpcOpenMemHandle", status)
        return int(pointer.value or 0)

    def ipc_close(self, address: int) -> None:
        """Unmap an opened allocation."""
        self._check("hipIpcCloseMemHandle", self._lib.hipIpcCloseMemHandle(ctypes.c_void_p(address)))

    def free(self, address: int) -> None:
        """Free an allocation."""
        self._check("hipFree", self._lib.hipFree(ctypes.c_void_p(address)))

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy device memory to the host (waits for the device)."""
        target = (ctypes.c_char * nbytes)()
        status = self._lib.hipMemcpy(target, ctypes.c_void_p(address), ctypes.c_size_t(nbytes), COPY_DEVICE_TO_HOST)
        self._check("hipMemcpy", status)
        return bytes(target)

    def write(self, address: int, data: bytes, stream: int) -> None:
        """Copy to device memory on a stream of its own; kernels that run meanwhile see it."""
        source = (ctypes.c_char * len(data)).from_buffer_copy(data)
        size, kind = ctypes.c_size_t(len(data)), COPY_HOST_TO_DEVICE
        status = self._lib.hipMemcpyAsync(ctypes.c_void_p(address), source, size, kind, ctypes.c_void_p(stream))
        self._check("hipMemcpyAsync", status)
        self._check("hipStreamSynchronize", self._lib.hipStreamSynchronize(ctypes.c_void_p(stream)))

    def stream(self) -> int:
        """A stream that waits for no other (hipStreamNonBlocking)."""
        pointer = ctypes.c_void_p()
        flags = ctypes.c_uint(STREAM_NON_BLOCKING)
        self._check("hipStreamCreateWithFlags", self._lib.hipStreamCreateWithFlags(ctypes.byref(pointer), flags))
        return int(pointer.value or 0)


class HipPeerBuffer:
    """Peer buffer in GPU memory. All ranks construct it with the same ``nbytes``.

    ``make_table``: list of addresses -> int64 tensor on this rank's device. Raises ``PeerError`` on every rank when a
    step failed on any.
    """

    def __init__(self, nbytes: int, group: Group, api: HipApi, make_table: Callable[[list[int]], Any]) -> None:
        if nbytes < FAULT_BLOCK_BYTES:
            raise PeerError(f"a peer buffer of {nbytes} bytes; needed: at least the fault block's {FAULT_BLOCK_BYTES}")
        self.nbytes = -(-nbytes // PEER_ALIGN) * PEER_ALIGN
        self._api = api
        self._group = group
        self._own = 0
        self._opened: dict[int, int] = {}
        self._closed = False
        try:
            handles = self._agree("allocate and export", self._allocate)
            self._agree("open the peers'", lambda: self._open(handles))
            self.addresses = [self._own if r == group.rank else self._opened[r] for r in range(group.size)]
            (self.table,) = self._agree("place the address table", lambda: [make_table(self.addresses)], local=True)
        except PeerError:
            self._release()
            raise

    def _agree(self, step: str, action: Callable[[], Any], local: bool = False) -> Any:
        """Run ``action`` and exchange outcomes; raises on every rank when any failed. Returns all ranks' results."""
        result, problem = None, None
        try:
            result = action()
        except Exception as error:  # any cause must reach the other ranks, or they wait for ever
            problem = f"{type(error).__name__}: {error}"
        outcomes = self._group.all_gather((problem, None if local else result))
        failed = [f"rank {r}: {p}" for r, (p, _) in enumerate(outcomes) if p]
        if failed:
            raise PeerError(
                f"peer memory of {self.nbytes} bytes a rank: could not {step} buffers ({'; '.join(failed)}); "
                f"needed: all {self._group.size} ranks on GPUs of one node that can access each other"
            )
        return result if local else [value for _, value in outcomes]

    def _allocate(self) -> bytes:
        self._own = self._api.malloc_uncached(self.nbytes)
        self._api.memset_zero(self._own, self.nbytes)
        return self._api.ipc_handle(self._own) if self._group.size > 1 else b""

    def _open(self, handles: list[bytes]) -> None:
        for rank, handle in enumerate(handles):
            if rank != self._group.rank:
                self._opened[rank] = self._api.ipc_open(handle)

    def _release(self) -> None:
        """Free what this rank holds; errors here must not hide the one that led here."""
        for address in self._opened.values():
            with contextlib.suppress(PeerError):
                self._api.ipc_close(address)
        self._opened.clear()
        if self._own:
            with contextlib.suppress(PeerError):
                self._api.free(self._own)
            self._own = 0

    def fault_state(self) -> FaultState:
        """Decoded fault block of this rank's buffer; waits for the device."""
        words = memoryview(self._api.read(self._own, FAULT_BLOCK_BYTES)).cast("i")
        return decode_fault_block(list(words))

    def mark_failed(self) -> None:
        """Set the error word of every rank, from the host. An error of HIP here must not hide the one that led here."""
        word = (1 + self._group.rank).to_bytes(4, "little")
        with contextlib.suppress(PeerError):
            stream = self._api.stream()  # the launches that hang hold the other streams
            for address in self.addresses:
                with contextlib.suppress(PeerError):
                    self._api.write(address + ERROR_OFFSET, word, stream)

    def close(self) -> None:
        """Unmap the peers' buffers, wait until every rank has, then free the own one."""
        if self._closed:
            return
        self._closed = True
        try:
            for address in self._opened.values():
                self._api.ipc_close(address)
            self._opened.clear()
        finally:
            self._group.barrier()  # freeing a buffer that a peer still maps faults on the peer
            own, self._own = self._own, 0
            self._api.free(own)
