# SPDX-License-Identifier: Apache-2.0
"""Runtime on the simulator. Imported only where a simulator is asked for; never on a real GPU.

All ranks' launches run together on one ``Machine``:

* a ``Cluster`` holds all ranks in this process: ``cluster.launch([(rank, kernel, args), ...])`` runs one launch list;
  runtimes of its ranks may also be used from one thread each, where the last rank to launch runs all of them;
* ranks in several processes meet in rank 0's process: the others put the memory that a launch names into shared
  memory (in place), send the launch over a socket, and wait for the outcome. A rank that never comes ends the launch
  by wall clock, with an error on every rank that came.

Each rank has its own address space in the machine: a launch maps exactly the bytes that its tensor arguments span,
runs, and unmaps them; scratch and peer memory stay mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sgl_amd_mono.common import build as building
from sgl_amd_mono.common.build import BuildKey
from sgl_amd_mono.common.peer import Group, PeerBuffer, PeerError
from sgl_amd_mono.common.runtime import (
    SCRATCH_ALIGN,
    Kernel,
    LaunchError,
    RuntimeRequest,
    argument_values,
    build_on_rank_0,
    deadline_ticks,
)
from sgl_amd_mono.common.sync import ERROR_OFFSET, FAULT_BLOCK_BYTES, FaultState, decode_fault_block

# Where a rank sees the peer buffers: an area that no process's heap uses, different for every viewing rank, so that
# a pointer of another rank's table is an access outside the registered memory.
PEER_AREA = 0x2000_0000_0000
PEER_VIEW = 1 << 40
PEER_OWNER = 1 << 34
SHARED_MEMORY_FOLDER = "/dev/shm"  # where torch keeps shared storages
MEETING_TIMEOUT_S = 300.0
KEEP_MAPPED_BYTES = 1 << 20  # shared blocks of at least this size stay mapped between launches
KEEP_MAPPED_BLOCKS = 4096


@dataclass(frozen=True)
class Block:
    """Bytes of one rank that a launch may touch: device address, and where they are in the simulating process."""

    address: int
    nbytes: int
    name: str
    kind: str
    host_address: int | None = None
    shared: SharedBytes | None = None
    regions: tuple[tuple[str, int, int], ...] = ()
    persistent: bool = False


@dataclass(frozen=True)
class SharedBytes:
    """A range of another process's shared-memory file."""

    pid: int
    fd: int
    inode: int
    file_bytes: int
    offset: int


@dataclass
class RankLaunch:
    """One rank's part of a launch."""

    rank: int
    name: str
    grid: int
    block: int
    kernargs: bytes
    blocks: list[Block]
    isa: str
    code: Any = None  # CodeObject in the simulating process; overrides ``isa``


@dataclass(frozen=True)
class LaunchReport:
    """What the simulator says of one launch of all ranks."""

    kernel: str
    key: BuildKey | None
    report: Any


def tensor_extent(tensor: Any) -> tuple[int, int]:
    """(address, bytes) that a tensor spans, gaps of its strides included."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def share_in_place(tensor: Any) -> tuple[int, int]:
    """Move a CPU tensor's storage to shared memory, for all tensors that view it; returns (fd, file bytes).

    Raises ``LaunchError`` where the shared-memory file system has no room: writing past its end would kill the process.
    """
    storage = tensor.untyped_storage()
    if not storage.is_shared():
        room = os.statvfs(SHARED_MEMORY_FOLDER)
        free = room.f_bavail * room.f_frsize
        if storage.nbytes() > free:
            raise LaunchError(
                f"{storage.nbytes()} bytes of a launch must be shared with the simulating process, "
                f"{SHARED_MEMORY_FOLDER} has {free} free; fix: a larger one (docker run --shm-size=4g)"
            )
    fd, nbytes = storage._share_fd_cpu_()
    return fd, nbytes


class Simulation:
    """The machine and what is mapped on it; lives in one process."""

    def __init__(
        self,
        ranks: int,
        *,
        memory: str,
        seed: int,
        cus: int,
        wall_clock_s: float | None,
        machine_options: dict[str, Any] | None = None,
    ) -> None:
        from sgl_amd_mono.sim import CodeObject, Launch, Machine, SimError

        self._code_object, self._launch_type, self.error_type = CodeObject, Launch, SimError
        self.machine = Machine(
            ranks=ranks, cus=cus, memory=memory, seed=seed, wall_clock_s=wall_clock_s, **(machine_options or {})
        )
        self.ranks = ranks
        self._codes: dict[str, Any] = {}
        self._persistent: set[tuple[int, int]] = set()
        self._files: dict[tuple[int, int], _MappedFile] = {}

    def code(self, isa: str) -> Any:
        """Decoded code object, cached by its text."""
        if isa not in self._codes:
            self._codes[isa] = self._code_object.parse(isa)
        return self._codes[isa]

    def run(self, launches: Sequence[RankLaunch]) -> Any:
        """Map, launch all ranks together, unmap; returns the simulator's report."""
        transient: list[tuple[int, int]] = []
        opened: list[_MappedFile] = []
        try:
            for launch in launches:
                for block in launch.blocks:
                    place = (launch.rank, block.address)
                    if place in self._persistent or not block.nbytes:
                        continue
                    host = self._host_address(block, opened)
                    self.machine.map(
                        launch.rank,
                        block.address,
                        block.nbytes,
                        block.name,
                        host_address=host,
                        kind=block.kind,
                        regions=list(block.regions),
                    )
                    if block.persistent:
                        self._persistent.add(place)
                    else:
                        transient.append(place)
            return self.machine.launch(
                [
                    self._launch_type(
                        rank=launch.rank,
                        code=launch.code or self.code(launch.isa),
                        grid=launch.grid,
                        block=launch.block,
                        kernargs=launch.kernargs,
                        name=launch.name,
                    )
                    for launch in launches
                ]
            )
        finally:
            for rank, address in transient:
                self.machine.unmap(rank, address)
            for file in opened:
                file.close()

    def unmap_persistent(self, rank: int, address: int) -> None:
        """Forget a scratch or peer block."""
        if (rank, address) in self._persistent:
            self._persistent.discard((rank, address))
            self.machine.unmap(rank, address)

    def _host_address(self, block: Block, opened: list[_MappedFile]) -> int:
        if block.shared is None:
            return block.host_address if block.host_address is not None else block.address
        shared = block.shared
        key = (shared.pid, shared.inode)
        file = self._files.get(key)
        if file is None:
            file = _MappedFile(shared)
            if block.persistent or shared.file_bytes >= KEEP_MAPPED_BYTES:
                if len(self._files) >= KEEP_MAPPED_BLOCKS:
                    oldest = next(k for k, f in self._files.items() if not f.persistent)
                    self._files.pop(oldest).close()
                file.persistent = block.persistent
                self._files[key] = file
            else:
                opened.append(file)
        else:
            self._files[key] = self._files.pop(key)  # most recently used last
            file.persistent = file.persistent or block.persistent
        return file.address + shared.offset


class _MappedFile:
    """Another process's shared-memory file in this process."""

    def __init__(self, shared: SharedBytes) -> None:
        path = f"/proc/{shared.pid}/fd/{shared.fd}"
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError as error:
            raise LaunchError(
                f"the shared memory of process {shared.pid} cannot be opened ({error}); needed: all ranks run as one "
                f"user in one process namespace"
            ) from error
        try:
            if os.fstat(handle).st_ino != shared.inode:
                raise LaunchError(f"process {shared.pid} replaced its shared memory while a launch was on its way")
            self._map = mmap.mmap(handle, shared.file_bytes)
        finally:
            os.close(handle)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.persistent = False

    def close(self) -> None:
        """Unmap."""
        del self._anchor
        self._map.close()


# ---------------------------------------------------------------------------------------------------------------
# Where the ranks' launches meet
# ---------------------------------------------------------------------------------------------------------------


class Cluster:
    """All ranks in this process.

    ``memory``: "consistent" or "adversarial"; ``seed`` drives the scheduler. ``machine_options`` go to ``Machine``.
    """

    def __init__(
        self,
        ranks: int = 1,
        *,
        memory: str = "consistent",
        seed: int = 0,
        cus: int = 256,
        wall_clock_s: float | None = None,
        timeout_s: float = MEETING_TIMEOUT_S,
        machine_options: dict[str, Any] | None = None,
    ) -> None:
        self.ranks = ranks
        self.simulation = Simulation(
            ranks, memory=memory, seed=seed, cus=cus, wall_clock_s=wall_clock_s, machine_options=machine_options
        )
        self.reports: list[LaunchReport] = []
        self._timeout_s = timeout_s
        self._condition = threading.Condition()
        self._waiting: dict[int, RankLaunch] = {}
        self._outcomes: dict[int, tuple[Any, BaseException | None]] = {}
        self._peers = 0
        self._spaces = [_RankSpace(rank) for rank in range(ranks)]

    @property
    def machine(self) -> Any:
        """The simulator's machine (faults, clock)."""
        return self.simulation.machine

    def kernel(self, key: BuildKey) -> Kernel:
        """Build ``key`` and decode it."""
        artifact = building.build(key)
        for space in self._spaces:
            space.name_peers([key])
        return Kernel(key, artifact, self.simulation.code(artifact.isa))

    def zeros(self, rank: int, nbytes: int, name: str) -> Any:
        """Scratch of one rank."""
        return self._spaces[rank].zeros(nbytes, name)

    def peer_buffers(self, nbytes: int) -> list[SimulatorPeerBuffer]:
        """One peer buffer a rank, each mapped on all ranks."""
        index, self._peers = self._peers, self._peers + 1
        tensors = [_aligned_zeros(nbytes) for _ in range(self.ranks)]
        return [
            SimulatorPeerBuffer(
                rank,
                tensors[rank],
                index,
                self.ranks,
                self._spaces[rank],
                nbytes,
                [_Owner(t.data_ptr(), None) for t in tensors],
            )
            for rank in range(self.ranks)
        ]

    def prepare(self, rank: int, kernel: Kernel, args: Sequence[Any]) -> RankLaunch:
        """A rank's part of a launch list."""
        return self._spaces[rank].prepare(kernel, args)

    def launch(self, parts: Sequence[tuple[int, Kernel, Sequence[Any]]]) -> Any:
        """Run the launches of all ranks together; returns the report. Raises the simulator's ``SimError``."""
        report = self.simulation.run([self.prepare(rank, kernel, args) for rank, kernel, args in parts])
        self.reports.append(LaunchReport(str(parts[0][1]), parts[0][1].key, report))
        return report

    def submit(self, launch: RankLaunch, key: BuildKey | None) -> Any:
        """One rank's launch, from its own thread: returns when all ranks' have run. The last to come runs them."""
        with self._condition:
            self._waiting[launch.rank] = launch
            if len(self._waiting) == self.ranks:
                together = [self._waiting[r] for r in range(self.ranks)]
                self._waiting = {}
                report, problem = None, None
                try:
                    require_same_launch(together)
                    report = self.simulation.run(together)
                    self.reports.append(LaunchReport(launch.name, key, report))
                except BaseException as error:
                    problem = error
                for part in together:
                    self._outcomes[part.rank] = (report, problem)
                self._condition.notify_all()
            elif not self._condition.wait_for(lambda: launch.rank in self._outcomes, self._timeout_s):
                self._waiting.pop(launch.rank, None)
                raise LaunchError(_missing(launch, [r for r in range(self.ranks) if r != launch.rank], self._timeout_s))
            report, problem = self._outcomes.pop(launch.rank)
        if problem is not None:
            raise problem
        return report

    def close(self) -> None:
        """Nothing to release: the machine goes with the object."""


def require_same_launch(parts: Sequence[RankLaunch]) -> None:
    """Raise ``LaunchError`` unless all ranks launch the same kernel (keys may differ by rank only in their data)."""
    names = {part.rank: part.name for part in parts}
    if len(set(names.values())) > 1:
        raise LaunchError(
            f"the ranks launch different kernels: {names}; needed: the same launch list on every rank, decided from "
            f"what is equal on all of them"
        )


def _missing(launch: RankLaunch, ranks: Sequence[int], seconds: float) -> str:
    return (
        f"rank {launch.rank} launched {launch.name} and waited {seconds:g} s for rank(s) {list(ranks)}, which never "
        f"came; needed: every rank runs the same launch list (is that process alive?)"
    )


class _Channel:
    """Length-framed pickles over a socket."""

    HEADER = struct.Struct("<Q")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, value: Any) -> None:
        data = pickle.dumps(value)
        self._sock.settimeout(None)
        self._sock.sendall(self.HEADER.pack(len(data)) + data)

    def receive(self, timeout_s: float) -> Any:
        """Next value; ``TimeoutError`` when it does not come, ``EOFError`` when the other side is gone."""
        end = time.monotonic() + timeout_s
        (size,) = self.HEADER.unpack(self._read(self.HEADER.size, end))
        return pickle.loads(self._read(size, end))

    def _read(self, size: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._sock.settimeout(left)
            piece = self._sock.recv(min(size - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def close(self) -> None:
        self._sock.close()


class ProcessMeeting:
    """Ranks in several processes; rank 0's simulates. Every rank constructs it together (``group.all_gather``)."""

    def __init__(self, group: Group, make_simulation: Callable[[], Simulation], timeout_s: float) -> None:
        self.rank, self.ranks = group.rank, group.size
        self._timeout_s = timeout_s
        self._broken: str | None = None
        self._sequence = 0
        self._sent: set[str] = set()
        self._known_isa: dict[str, str] = {}
        self._channels: dict[int, _Channel] = {}
        self._folder: str | None = None
        self.simulation: Simulation | None = None
        if self.rank == 0:
            self._folder = tempfile.mkdtemp(prefix="sgl-amd-mono-")
            path = os.path.join(self._folder, "meeting")
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            server.bind(path)
            server.listen(self.ranks)
            group.all_gather(path)
            self.simulation = make_simulation()
            server.settimeout(timeout_s)
            try:
                while len(self._channels) < self.ranks - 1:
                    channel = _Channel(server.accept()[0])
                    self._channels[channel.receive(timeout_s)] = channel
            except TimeoutError as error:
                raise LaunchError(f"not all of {self.ranks} ranks joined the simulation in {timeout_s:g} s") from error
            finally:
                server.close()
        else:
            path = group.all_gather(None)[0]
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(path)
            self._channels[0] = _Channel(sock)
            self._channels[0].send(self.rank)

    def submit(self, launch: RankLaunch) -> Any:
        """Run with the other ranks; the report on rank 0, None elsewhere. Raises ``LaunchError`` on every rank."""
        if self._broken:
            raise LaunchError(f"an earlier launch ended the simulation: {self._broken}")
        self._sequence += 1
        try:
            return self._host(launch) if self.rank == 0 else self._join(launch)
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            raise

    def _join(self, launch: RankLaunch) -> None:
        isa = launch.isa
        if launch.name in self._sent:
            launch = replace(launch, isa="")
        self._sent.add(launch.name)
        assert isa  # a launch without instructions has no meaning
        channel = self._channels[0]
        try:
            channel.send((self._sequence, launch))
            # Rank 0 waits for the slowest rank, then simulates: its own limit is the launch's, ours lies above both.
            problem = channel.receive(2 * self._timeout_s + 3600.0)
        except (TimeoutError, OSError, EOFError) as error:
            raise LaunchError(f"rank 0, which simulates all ranks, is gone while {launch.name} ran") from error
        if problem:
            raise LaunchError(problem)

    def _host(self, launch: RankLaunch) -> Any:
        parts = {0: launch}
        problem: str | None = None
        cause: BaseException | None = None
        report = None
        try:
            end = time.monotonic() + self._timeout_s
            for rank, channel in self._channels.items():
                try:
                    sequence, part = channel.receive(max(0.0, end - time.monotonic()))
                except TimeoutError as error:
                    missing = [r for r in range(self.ranks) if r not in parts]
                    raise LaunchError(_missing(launch, missing, self._timeout_s)) from error
                except (OSError, EOFError) as error:
                    raise LaunchError(f"rank {rank} ended before it launched {launch.name}") from error
                if sequence != self._sequence:
                    raise LaunchError(f"rank {rank} is at launch {sequence}, rank 0 at {self._sequence}")
                if part.isa:
                    self._known_isa[part.name] = part.isa
                else:
                    part.isa = self._known_isa[part.name]
                parts[rank] = part
            together = [parts[r] for r in range(self.ranks)]
            require_same_launch(together)
            assert self.simulation is not None
            report = self.simulation.run(together)
        except Exception as error:
            problem, cause = f"{type(error).__name__}: {error}", error
        for channel in self._channels.values():
            with contextlib.suppress(OSError):  # a rank that is gone cannot be told
                channel.send(problem)
        if cause is not None:
            raise cause
        return report

    def close(self) -> None:
        """Close the sockets."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


# ---------------------------------------------------------------------------------------------------------------
# One rank's memory
# ---------------------------------------------------------------------------------------------------------------


def _aligned_zeros(nbytes: int) -> Any:
    """Zeroed uint8 tensor aligned to ``SCRATCH_ALIGN``."""
    import torch

    whole = torch.zeros(nbytes + SCRATCH_ALIGN, dtype=torch.uint8)
    start = -whole.data_ptr() % SCRATCH_ALIGN
    return whole[start : start + nbytes]


@dataclass
class _Owner:
    """Where a rank's peer buffer is: an address in the simulating process, or another process's shared bytes."""

    host_address: int | None
    shared: SharedBytes | None


@dataclass
class _RankSpace:
    """Memory of one rank as its own process knows it; turns launches into ``RankLaunch``."""

    rank: int
    shared: bool = False  # True where another process simulates
    scratch: list[tuple[Any, str]] = field(default_factory=list)
    peer_blocks: list[Block] = field(default_factory=list)
    peer_regions: tuple[tuple[str, int, int], ...] = ()

    def name_peers(self, keys: Sequence[BuildKey]) -> None:
        """Take the names of the regions in peer memory from the first of ``keys`` that has some."""
        for key in keys:
            if not self.peer_regions:
                self.peer_regions = tuple((n, o, b) for n, (o, b) in key.peer_regions().items())

    def zeros(self, nbytes: int, name: str) -> Any:
        tensor = _aligned_zeros(nbytes)
        if self.shared:
            # Sharing moves the bytes: align again inside the new storage.
            share_in_place(tensor)
            storage = tensor.untyped_storage()
            start = -storage.data_ptr() % SCRATCH_ALIGN
            tensor = tensor.new_empty(0).set_(storage, start, (nbytes,), (1,))
        self.scratch.append((tensor, name))
        return tensor

    def prepare(self, kernel: Kernel, args: Sequence[Any]) -> RankLaunch:
        tensors = [
            (argument.name, value)
            for argument, value in zip(kernel.artifact.arguments, args, strict=False)
            if hasattr(value, "data_ptr")
        ]
        if self.shared:
            for _, tensor in tensors:
                share_in_place(tensor)
        values = argument_values(kernel, args)  # addresses are read after the storages have moved
        artifact = kernel.artifact
        return RankLaunch(
            rank=self.rank,
            name=artifact.name,
            grid=artifact.grid,
            block=artifact.block,
            kernargs=artifact.pack(values),
            blocks=self._blocks(kernel, tensors),
            isa=artifact.isa,
            code=kernel.loaded,
        )

    def _blocks(self, kernel: Kernel, tensors: Sequence[tuple[str, Any]]) -> list[Block]:
        blocks: list[Block] = []
        ranges: list[tuple[int, int, str, bool, Any]] = []
        for name, tensor in tensors:
            address, nbytes = tensor_extent(tensor)
            owner = self._owned_by(address, nbytes)
            if owner is not None:
                whole, label = owner
                # hand-offs lie in the scratch alone; other persistent buffers (activations, the epoch) are plain
                regions = tuple((n, o, b) for n, (o, b) in kernel.key.regions_of(name).items())
                kind = "mailbox" if regions else "plain"
                blocks.append(self._block(whole.data_ptr(), whole.numel(), label, kind, whole, regions, True))
            elif nbytes:
                ranges.append((address, address + nbytes, name, name in kernel.key.readonly, tensor))
        ranges.sort(key=lambda r: r[:2])
        merged: list[tuple[int, int, str, bool, Any]] = []
        for start, end, name, readonly, tensor in ranges:
            if merged and start < merged[-1][1]:
                last = merged.pop()
                names = last[2] if name in last[2].split("+") else f"{last[2]}+{name}"
                merged.append((last[0], max(end, last[1]), names, last[3] and readonly, last[4]))
            else:
                merged.append((start, end, name, readonly, tensor))
        for start, end, name, readonly, tensor in merged:
            kind = "readonly" if readonly else "plain"
            blocks.append(self._block(start, end - start, name, kind, tensor, (), False))
        peers = [
            replace(b, regions=tuple(r for r in self.peer_regions if r[1] + r[2] <= b.nbytes)) for b in self.peer_blocks
        ]
        return list({(b.address, b.nbytes): b for b in [*blocks, *peers]}.values())

    def _owned_by(self, address: int, nbytes: int) -> tuple[Any, str] | None:
        for tensor, name in self.scratch:
            if tensor.data_ptr() <= address and address + nbytes <= tensor.data_ptr() + tensor.numel():
                return tensor, name
        return None

    def _block(self, address: int, nbytes: int, name: str, kind: str, tensor: Any, regions: Any, keep: bool) -> Block:
        shared = shared_bytes(tensor, address - tensor.data_ptr()) if self.shared else None
        return Block(address, nbytes, name, kind, None if shared else address, shared, regions, keep)


def shared_bytes(tensor: Any, offset: int = 0) -> SharedBytes:
    """Where the byte ``offset`` bytes behind the tensor's first lies in the shared-memory file of its storage."""
    fd, file_bytes = share_in_place(tensor)  # may move the storage: addresses are read after it
    place = tensor.data_ptr() - tensor.untyped_storage().data_ptr() + offset
    assert 0 <= place < file_bytes, (place, file_bytes)
    return SharedBytes(os.getpid(), fd, os.fstat(fd).st_ino, file_bytes, place)


class SimulatorPeerBuffer:
    """Peer memory on the simulator; the face of ``peer.PeerBuffer``.

    ``table`` holds, for this rank, an address of its own for each rank's buffer; all name the same bytes.
    """

    def __init__(
        self, rank: int, tensor: Any, index: int, ranks: int, space: _RankSpace, nbytes: int, owners: Sequence[_Owner]
    ) -> None:
        import torch

        if nbytes < FAULT_BLOCK_BYTES:
            raise PeerError(f"a peer buffer of {nbytes} bytes; needed: at least the fault block's {FAULT_BLOCK_BYTES}")
        self.nbytes = nbytes
        self.tensor = tensor
        self.addresses = [PEER_AREA + (index * 64 + rank) * PEER_VIEW + owner * PEER_OWNER for owner in range(ranks)]
        self.table = torch.tensor(self.addresses, dtype=torch.int64)
        self._space = space
        self._blocks = [
            Block(address, nbytes, f"peer{owner}", "mailbox", place.host_address, place.shared, (), True)
            for owner, (address, place) in enumerate(zip(self.addresses, owners, strict=True))
        ]
        self._owners = list(owners)
        space.peer_blocks.extend(self._blocks)

    def mark_failed(self) -> None:
        """Set the error word of every rank, from the host; a rank whose process is gone is passed over."""
        word = (1 + self._space.rank).to_bytes(4, "little")
        for rank, owner in enumerate(self._owners):
            if rank == self._space.rank:
                ctypes.memmove(self.tensor.data_ptr() + ERROR_OFFSET, word, len(word))
            elif owner.shared is not None:
                with contextlib.suppress(LaunchError):
                    file = _MappedFile(owner.shared)
                    ctypes.memmove(file.address + owner.shared.offset + ERROR_OFFSET, word, len(word))
                    file.close()
            elif not self._space.shared:
                ctypes.memmove(owner.host_address + ERROR_OFFSET, word, len(word))
            # else: private memory of the process that simulates; it sees that this rank does not come

    def fault_state(self) -> FaultState:
        """Decoded fault block of this rank's buffer."""
        import torch

        return decode_fault_block(self.tensor[:FAULT_BLOCK_BYTES].view(torch.int32).tolist())

    def close(self) -> None:
        """Take the buffer out of later launches."""
        self._space.peer_blocks[:] = [b for b in self._space.peer_blocks if b not in self._blocks]
        self._blocks = []


# ---------------------------------------------------------------------------------------------------------------
# Runtime
# ---------------------------------------------------------------------------------------------------------------


class SimulatorRuntime:
    """One rank's runtime on the simulator; the face of ``runtime.Runtime``.

    ``cluster``: run in that in-process cluster. Without it, a group of one rank makes its own, and ranks of several
    processes meet in rank 0's. ``reports`` collects a ``LaunchReport`` a launch (on the rank that simulates).
    """

    def __init__(
        self,
        request: RuntimeRequest,
        *,
        cluster: Cluster | None = None,
        memory: str = "consistent",
        seed: int = 0,
        cus: int = 256,
        wall_clock_s: float | None = None,
        timeout_s: float = MEETING_TIMEOUT_S,
        on_report: Callable[[LaunchReport], None] | None = None,
        machine_options: dict[str, Any] | None = None,
        processes: int | None = None,
    ) -> None:
        group = request.group
        self._group = group
        self._on_report = on_report
        self._processes = processes
        self.reports: list[LaunchReport] = []
        self._peer_count = 0
        self._buffers: list[SimulatorPeerBuffer] = []
        self._meeting: ProcessMeeting | None = None
        self._cluster = cluster
        if cluster is not None:
            if cluster.ranks != group.size:
                raise LaunchError(f"a cluster of {cluster.ranks} ranks for a group of {group.size}")
            self._space = cluster._spaces[group.rank]
        elif group.size == 1:
            self._cluster = Cluster(
                1,
                memory=memory,
                seed=seed,
                cus=cus,
                wall_clock_s=wall_clock_s,
                timeout_s=timeout_s,
                machine_options=machine_options,
            )
            self._space = self._cluster._spaces[0]
        else:

            def make_simulation() -> Simulation:
                return Simulation(
                    group.size,
                    memory=memory,
                    seed=seed,
                    cus=cus,
                    wall_clock_s=wall_clock_s,
                    machine_options=machine_options,
                )

            self._meeting = ProcessMeeting(group, make_simulation, timeout_s)
            self._space = _RankSpace(group.rank, shared=group.rank > 0)

    @property
    def machine(self) -> Any:
        """The simulator's machine, where this process simulates; else None."""
        if self._cluster is not None:
            return self._cluster.machine
        return self._meeting.simulation.machine if self._meeting and self._meeting.simulation else None

    def build(self, keys: Sequence[BuildKey]) -> list[Kernel]:
        """Compile or take from the cache; rank 0 compiles while the others wait."""
        build_on_rank_0(self._group, lambda: building.build_all(keys, processes=self._processes))
        self._space.name_peers(keys)
        kernels = []
        for key in keys:
            artifact = building.build(key)
            code = None
            if self._cluster is not None:
                code = self._cluster.simulation.code(artifact.isa)
            elif self._meeting and self._meeting.simulation:
                code = self._meeting.simulation.code(artifact.isa)
            kernels.append(Kernel(key, artifact, code))
        return kernels

    def zeros(self, nbytes: int, name: str) -> Any:
        """Scratch: stays mapped, hand-offs in it are counted."""
        return self._space.zeros(nbytes, name)

    def peer_buffer(self, nbytes: int, group: Group) -> PeerBuffer:
        """Peer memory, shared between the ranks' processes where they are several."""
        index, self._peer_count = self._peer_count, self._peer_count + 1
        tensor = _aligned_zeros(nbytes)
        shared = None
        if self._space.shared:
            shared = shared_bytes(tensor)
        # An address is only meaningful in the simulating process, which for unshared memory is this one.
        place = _Owner(None if shared else tensor.data_ptr(), shared)
        owners = group.all_gather(place)
        buffer = SimulatorPeerBuffer(group.rank, tensor, index, group.size, self._space, nbytes, owners)
        self._buffers.append(buffer)
        return buffer

    def launch(self, kernel: Kernel, args: Sequence[Any]) -> None:
        """Runs to the end, together with the other ranks' launches."""
        part = self._space.prepare(kernel, args)
        if self._meeting is not None:
            if self._group.rank > 0:
                part.code = None
            report = self._meeting.submit(part)
        elif self._group.size == 1:
            assert self._cluster is not None
            report = self._cluster.simulation.run([part])
        else:
            assert self._cluster is not None
            report = self._cluster.submit(part, kernel.key)
        if report is not None:
            entry = LaunchReport(str(kernel), kernel.key, report)
            self.reports.append(entry)
            if self._on_report:
                self._on_report(entry)

    def prepare(self, kernel: Kernel, args: list[Any]) -> Callable[[], None]:
        """See ``Runtime.prepare``."""
        return lambda: self.launch(kernel, list(args))

    def begin_step(self) -> None:
        """Launches share nothing here."""

    def deadline_ticks(self, seconds: float) -> int:
        """Ticks of the virtual 100 MHz clock."""
        return deadline_ticks(seconds)

    def synchronize(self) -> None:
        """A launch has ended when ``launch`` returns."""

    def close(self) -> None:
        """Leave the meeting and forget peer buffers."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()
        if self._meeting is not None:
            self._meeting.close()
