# SPDX-License-Identifier: Apache-2.0
"""The simulated machine: ranks with their memory, launches, injected faults, reports."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import re
import struct
import weakref
from collections.abc import Iterable, Sequence

import numpy as np

from . import library
from .code import LANES, LDS_PER_CU, CodeObject
from .errors import SimError, SimFault, Waiting
from .faults import DelayStores, DropStores, Stall, Starve
from .report import CLASSES, LaunchReport, Report, Traced

KINDS = {"plain": 0, "readonly": 1, "mailbox": 2, "peer": 3}
POLICIES = ("plain", "sc0", "sc1", "sc0 sc1", "nt", "sc0 nt", "sc1 nt", "sc0 sc1 nt")
POISON = 0xFFA5FFA5
PACKET_BYTES = 64
_MAX_RESIDENT = 64  # workgroups of a non-persistent launch that are resident at once
_FAULTS = (
    None, "out-of-bounds", "readonly-store", "gpu-fault", "deadlock", "limit", "misaligned", "trap", "hazard",
    "lds-out-of-bounds", "internal", "memory",
)  # fmt: skip
_STATES = ("polling", "barrier", "ended", "stalled")
_TRACE_KINDS = ("read", "write", "use")
_TRACE_CELL = np.dtype(
    [
        ("alloc", "u4"), ("region", "u2"), ("issue", "u2"), ("use", "u2"), ("kind", "u1"), ("policy", "u1"),
        ("group", "u4"), ("bytes", "u8"),
    ], align=True,
)  # fmt: skip
Extent = int | tuple[int, ...]


@dataclasses.dataclass
class Launch:
    """One kernel launch on one rank.

    grid: workgroups in x, y, z; block: threads; kernargs: the kernel argument block (hidden arguments are filled in);
    dynamic_lds: bytes beyond the kernel's own. persistent: all workgroups must be resident at once; False: they run in
    turn, as many as fit.
    """

    rank: int
    code: CodeObject
    grid: Extent
    block: Extent
    kernargs: bytes
    dynamic_lds: int = 0
    persistent: bool = True
    name: str | None = None


@dataclasses.dataclass
class _Allocation:
    id: int
    rank: int
    address: int
    nbytes: int
    name: str
    host: int
    kind: str
    regions: list[tuple[str, int, int]]
    owner: object


class _StallRecord(ctypes.Structure):
    _fields_ = [
        ("active", ctypes.c_uint32), ("rank", ctypes.c_int32), ("launch", ctypes.c_int32), ("group", ctypes.c_int32),
        ("wave", ctypes.c_int32), ("at", ctypes.c_uint32), ("alloc", ctypes.c_uint32), ("region", ctypes.c_uint32),
        ("pc", ctypes.c_uint32), ("passes", ctypes.c_uint32), ("hits", ctypes.c_uint64),
    ]  # fmt: skip


class _StoreFaultRecord(ctypes.Structure):
    _fields_ = [
        ("active", ctypes.c_uint32), ("rank", ctypes.c_int32), ("to_rank", ctypes.c_int32), ("alloc", ctypes.c_int32),
        ("region", ctypes.c_int32), ("ticks", ctypes.c_uint64), ("hits", ctypes.c_uint64),
    ]  # fmt: skip


def _extent(value: Extent) -> tuple[int, int, int]:
    parts = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    if not 1 <= len(parts) <= 3 or any(p < 1 for p in parts):
        raise SimError(f"grid and block are 1 to 3 positive numbers, found {value}")
    return (*parts, 1, 1)[:3]


class Machine:
    """Ranks of a node, each with an address space, and one scheduler for all.

    ranks: GPUs; cus: compute units of each. memory: "consistent" (every store is seen at once) or "adversarial" (caches
    without coherence, late and reordered stores, loads delivered late; as the instructions' scopes permit). seed:
    schedule and, in the adversarial mode, every delay; equal seeds give equal runs. instruction_limit:
    wave-instructions of one `launch`; wall_clock_s: seconds of one `launch`; both end in a SimFault of kind "limit".
    unique_bytes: count distinct bytes read (costs time). trace: record what each
    workgroup reads, writes and uses between hand-offs (`LaunchReport.trace`). The clock runs at 100 MHz, advances with
    the instructions and jumps when every wave polls.
    """

    def __init__(
        self,
        ranks: int = 1,
        cus: int = 256,
        memory: str = "consistent",
        seed: int = 0,
        *,
        instruction_limit: int | None = None,
        wall_clock_s: float | None = None,
        unique_bytes: bool = False,
        trace: bool = False,
    ) -> None:
        if memory not in ("consistent", "adversarial"):
            raise SimError(f'memory is "consistent" or "adversarial", found {memory!r}')
        if ranks < 1 or cus < 1:
            raise SimError(f"a machine needs at least one rank and one CU, found {ranks} and {cus}")
        self.ranks, self.cus, self.memory, self.seed = ranks, cus, memory, seed
        self.unique_bytes, self.trace = unique_bytes, trace
        self._lib = library.load()
        self._handle = self._lib.sim_machine_new(ranks, cus, memory == "adversarial", seed & (2**64 - 1))
        self._lib.sim_set_limits(self._handle, instruction_limit or 0, wall_clock_s or 0.0)
        self._allocations: dict[int, _Allocation] = {}
        self._next_id = 0
        self._faults: list[Stall | DropStores | DelayStores | Starve] = []
        weakref.finalize(self, self._lib.sim_machine_free, ctypes.c_void_p(self._handle))

    @property
    def clock(self) -> int:
        """Virtual time in ticks of 10 ns; it goes on over launches."""
        return int(self._lib.sim_clock(self._handle))

    # ---- memory ----

    def map(
        self,
        rank: int,
        address: int,
        nbytes: int,
        name: str,
        host_address: int | None = None,
        kind: str = "plain",
        regions: Iterable[tuple[str, int, int]] = (),
        poison: bool = False,
        owner: object = None,
    ) -> int:
        """Registers memory: nbytes at `address` as `rank` sees it are the bytes at host_address (default: address).

        Nothing is copied or touched unless poison is set. kind: "plain", "readonly" (a store is a fault), "mailbox"
        (hand-offs are counted by 8-byte word) or "peer"; the same host bytes mapped on several ranks are peer memory in
        any case. regions: (name, offset, nbytes) for reports and faults. owner: kept alive. Returns the address. Raises
        SimError when it overlaps another allocation of the rank.
        """
        self._check_rank(rank)
        if kind not in KINDS:
            raise SimError(f"kind is one of {sorted(KINDS)}, found {kind!r}")
        if nbytes <= 0 or address <= 0:
            raise SimError(f"{name}: cannot map {nbytes} bytes at {address:#x}")
        host = address if host_address is None else host_address
        regions = list(regions)
        for region, offset, size in regions:
            if offset < 0 or offset + size > nbytes:
                raise SimError(f"{name}: region {region} [{offset}, {offset + size}) is outside its {nbytes} bytes")
        words = np.array([w for _, offset, size in regions for w in (offset, size)] or [0], dtype=np.uint64)
        code = self._lib.sim_map(
            self._handle, rank, address, nbytes, host, KINDS[kind], self._next_id, len(regions), words.ctypes.data
        )
        if code:
            other = self._overlapping(rank, address, nbytes)
            raise SimError(
                f"{name}: [{address:#x}, {address + nbytes:#x}) of rank {rank} overlaps "
                f"{other.name if other else 'memory'}: "
                "unmap that first"
                if code == -1
                else f"{name}: no memory to register it"
            )
        allocation = _Allocation(self._next_id, rank, address, nbytes, name, host, kind, regions, owner)
        self._allocations[self._next_id] = allocation
        self._next_id += 1
        if poison:
            self.poison(rank, address, nbytes)
        return address

    def map_tensor(
        self,
        rank: int,
        tensor: object,
        name: str,
        kind: str = "plain",
        regions: Iterable[tuple[str, int, int]] = (),
        poison: bool = False,
    ) -> int:
        """Registers a contiguous CPU tensor (`data_ptr()`) or NumPy array at its own address and keeps it alive."""
        if isinstance(tensor, np.ndarray):
            if not tensor.flags.c_contiguous:
                raise SimError(f"{name}: the array is not contiguous")
            address, nbytes = tensor.ctypes.data, tensor.nbytes
        else:
            if not tensor.is_contiguous():
                raise SimError(f"{name}: the tensor is not contiguous")
            address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        return self.map(rank, address, nbytes, name, kind=kind, regions=regions, poison=poison, owner=tensor)

    def unmap(self, rank: int, address: int) -> None:
        """Forgets the allocation that begins at the address. Raises SimError where there is none."""
        self._check_rank(rank)
        if self._lib.sim_unmap(self._handle, rank, address) != 0:
            raise SimError(f"rank {rank} has no allocation at {address:#x}")
        for key, a in list(self._allocations.items()):
            if a.rank == rank and a.address == address:
                del self._allocations[key]

    def poison(self, rank: int, address: int, nbytes: int) -> None:
        """Fills memory with the poison pattern (a NaN as float32, bf16 and float16)."""
        a = self._overlapping(rank, address, nbytes)
        if a is None or address < a.address or address + nbytes > a.address + a.nbytes:
            raise SimError(f"[{address:#x}, {address + nbytes:#x}) of rank {rank} is not inside one allocation")
        pattern = struct.pack("<I", POISON) * 1024
        host = a.host + address - a.address
        for at in range(0, nbytes, len(pattern)):
            ctypes.memmove(host + at, pattern, min(len(pattern), nbytes - at))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise SimError(f"rank {rank} does not exist: the machine has {self.ranks}")

    def _overlapping(self, rank: int, address: int, nbytes: int) -> _Allocation | None:
        for a in self._allocations.values():
            if a.rank == rank and a.address < address + nbytes and address < a.address + a.nbytes:
                return a
        return None

    def _nearest(self, rank: int, address: int) -> str:
        best, text = None, "no memory is registered"
        for a in self._allocations.values():
            if a.rank != rank:
                continue
            below, above = a.address - address, address - (a.address + a.nbytes)
            distance = below if below > 0 else above
            if best is None or distance < best:
                best = distance
                if below > 0:
                    where = f"{below} bytes before"
                elif above >= 0:
                    where = f"{above} bytes behind the end of"
                else:
                    where = f"across the end of (at offset {address - a.address})"
                text = f"{where} {a.name} [{a.address:#x}, {a.address + a.nbytes:#x})"
        return text

    # ---- faults ----

    def inject(self, fault: Stall | DropStores | DelayStores | Starve) -> int:
        """Arms a fault for the launches that follow; returns its handle. See `clear_faults`.

        Raises SimError for a Starve in consistent memory, whose waves all run in every round.
        """
        if isinstance(fault, Starve) and self.memory != "adversarial":
            raise SimError(f'{fault}: waves are starved in adversarial memory only, this machine is "{self.memory}"')
        self._faults.append(fault)
        return len(self._faults) - 1

    def clear_faults(self) -> None:
        """Disarms every injected fault."""
        self._faults.clear()
        self._lib.sim_clear_faults(self._handle)

    def _targets(self, name: str | None, rank: int | None = None, to_rank: int | None = None) -> list[tuple[int, int]]:
        """(allocation id, region number or -1) of every mapping with that allocation, region or "allocation/region"."""
        found = []
        owner, _, name = name.rpartition("/") if name is not None else ("", "", None)
        for a in self._allocations.values():
            if (rank is not None and a.rank != rank) or owner not in ("", a.name):
                continue
            if to_rank is not None and not any(
                o.rank == to_rank and o.host < a.host + a.nbytes and a.host < o.host + o.nbytes
                for o in self._allocations.values()
            ):
                continue
            if name is None or a.name == name:
                found.append((a.id, -1))
            else:
                found.extend((a.id, k) for k, (region, _, _) in enumerate(a.regions) if region == name)
        return found

    def _arm(self, launches: Sequence[Launch]) -> None:
        self._lib.sim_clear_faults(self._handle)
        for fault in self._faults:
            if isinstance(fault, Stall):
                self._arm_stall(fault, launches)
                continue
            if isinstance(fault, Starve):
                self._lib.sim_set_starve(self._handle, -1 if fault.rank is None else fault.rank, fault.rounds)
                continue
            ticks = fault.ticks if isinstance(fault, DelayStores) else 0
            targets = self._targets(fault.region, fault.rank, fault.to_rank)
            if not targets:
                raise SimError(f"{fault}: no memory of that name is shared between these ranks")
            for alloc, region in targets:
                record = _StoreFaultRecord(1, -1 if fault.rank is None else fault.rank, -1, alloc, region, ticks, 0)
                self._lib.sim_add_store_fault(self._handle, ctypes.addressof(record))

    def _arm_stall(self, fault: Stall, launches: Sequence[Launch]) -> None:
        def add(**fields: int) -> None:
            record = _StallRecord(
                1, *(-1 if v is None else v for v in (fault.rank, fault.launch, fault.workgroup, fault.wave))
            )
            for key, value in fields.items():
                setattr(record, key, value)
            self._lib.sim_add_stall(self._handle, ctypes.addressof(record))

        if fault.at == "start":
            add(at=0)
            return
        what = fault.at[0]
        if what in ("store", "load"):
            targets = self._targets(fault.at[1], fault.rank)
            if not targets:
                raise SimError(f"{fault}: no allocation or region has that name")
            for alloc, region in targets:
                add(at=1 if what == "store" else 3, alloc=alloc, region=region & 0xFFFFFFFF)
            return
        if what not in ("line", "text"):
            raise SimError(f"{fault}: a stall is at the start, a store, a load, a line or a text")
        passes = fault.at[2] if len(fault.at) > 2 else 1
        for k, launch in enumerate(launches):
            if fault.launch is not None and fault.launch != k:
                continue
            code = launch.code
            found = [
                i
                for i in code.instructions
                if (i.line == fault.at[1] if what == "line" else re.search(fault.at[1], i.text))
            ]
            if found:
                add(at=2, launch=k, pc=found[0].index, passes=passes)

    # ---- launches ----

    def launch(self, launches: Sequence[Launch]) -> Report:
        """Runs the launches together until every wave has ended (or is stalled by an injected fault).

        Raises SimError before anything runs when a persistent launch cannot be resident as a whole, or the arguments do
        not fit; SimFault when a launch fails while it runs.
        """
        launches = list(launches)
        if not launches:
            raise SimError("no launch given")
        self._check_resident(launches)
        self._arm(launches)
        handles, keep = [], []
        lib = self._lib
        start = self.clock
        try:
            for launch in launches:
                handle, buffer = self._prepare(launch)
                handles.append(handle)
                keep.append(buffer)
            array = (ctypes.c_void_p * len(handles))(*handles)
            code = lib.sim_run(self._handle, ctypes.addressof(array), len(handles), self.unique_bytes + 2 * self.trace)
            if code:
                raise self._fault(launches)
            report = self._report(launches, handles, start)
        finally:
            lib.sim_run_end(self._handle)
            for handle in handles:
                lib.sim_launch_free(handle)
        return report

    def _name(self, launch: Launch) -> str:
        return launch.name or launch.code.name

    def _check_resident(self, launches: Sequence[Launch]) -> None:
        need: dict[int, float] = {}
        texts: dict[int, list[str]] = {}
        for launch in launches:
            self._check_rank(launch.rank)
            code, name = launch.code, self._name(launch)
            threads = math.prod(_extent(launch.block))
            groups = math.prod(_extent(launch.grid))
            if threads > 1024 or (code.max_threads and threads > code.max_threads):
                raise SimError(
                    f"{name}: {threads} threads a workgroup, the limit is {min(code.max_threads or 1024, 1024)}"
                )
            lds = code.lds_bytes + launch.dynamic_lds
            if lds > LDS_PER_CU:
                raise SimError(f"{name}: {lds} bytes of LDS a workgroup, a CU has {LDS_PER_CU}")
            per_cu = code.groups_per_cu(threads, launch.dynamic_lds)
            if per_cu == 0:
                raise SimError(
                    f"{name}: a workgroup of {threads} threads with {code.vgprs} VGPRs does not fit on a CU: use fewer "
                    "registers or threads"
                )
            if launch.persistent:
                need[launch.rank] = need.get(launch.rank, 0.0) + groups / per_cu
                texts.setdefault(launch.rank, []).append(
                    f"{name}: {groups} workgroups of {threads} threads, {code.vgprs} VGPRs, {lds} bytes of LDS, "
                    f"{per_cu} a CU"
                )
        for rank, cus in need.items():
            if cus > self.cus:
                raise SimError(
                    f"rank {rank}: not resident as a whole: {'; '.join(texts[rank])}; needs {math.ceil(cus)} CUs, the "
                    f"machine "
                    f"has {self.cus}: launch fewer workgroups, or persistent=False where they do not wait for each "
                    f"other"
                )

    def _kernargs(self, launch: Launch) -> np.ndarray:
        code = launch.code
        explicit = max((a.offset + a.size for a in code.args if not a.kind.startswith("hidden_")), default=0)
        if not explicit <= len(launch.kernargs) <= max(code.kernarg_size, explicit):
            raise SimError(
                f"{self._name(launch)}: {len(launch.kernargs)} bytes of kernel arguments, the kernel declares "
                f"{explicit} "
                f"(with hidden ones {code.kernarg_size})"
            )
        size = -(-max(code.kernarg_size, 8) // 64) * 64
        raw = np.zeros(size + PACKET_BYTES + 64, np.uint8)
        at = -raw.ctypes.data % 64
        block = raw[at : at + size + PACKET_BYTES]
        block[: len(launch.kernargs)] = np.frombuffer(launch.kernargs, np.uint8)
        grid, threads = _extent(launch.grid), _extent(launch.block)
        for a in code.args:
            value = None
            for k, axis in enumerate("xyz"):
                value = {
                    f"hidden_block_count_{axis}": grid[k],
                    f"hidden_group_size_{axis}": threads[k],
                    f"hidden_remainder_{axis}": 0,
                }.get(a.kind, value)
            if a.kind == "hidden_grid_dims":
                value = 3
            if value is not None:
                block[a.offset : a.offset + a.size] = np.frombuffer(int(value).to_bytes(a.size, "little"), np.uint8)
        packet = struct.pack(
            "<HHHHHHIIIIIQQQQ",
            2, 3, *threads, 0, *(g * t for g, t in zip(grid, threads)), code.scratch_bytes,
            code.lds_bytes + launch.dynamic_lds,
            0, block.ctypes.data, 0, 0,
        )  # fmt: skip
        block[size : size + len(packet)] = np.frombuffer(packet, np.uint8)
        return block

    def _prepare(self, launch: Launch) -> tuple[int, np.ndarray]:
        code = launch.code
        block = self._kernargs(launch)
        sgprs = code.user_sgprs()
        grid, threads = _extent(launch.grid), _extent(launch.block)
        enable = sum(
            code.directive(f"system_sgpr_workgroup_id_{axis}", axis == "x") << k for k, axis in enumerate("xyz")
        )
        groups = math.prod(grid)
        per_cu = code.groups_per_cu(math.prod(threads), launch.dynamic_lds)
        slots = groups if launch.persistent else min(groups, self.cus * per_cu, _MAX_RESIDENT)
        words = np.array(
            [
                launch.rank, *grid, *threads, code.lds_bytes + launch.dynamic_lds, len(block) - PACKET_BYTES,
                sgprs["count"],
                sgprs["private_segment_buffer"], sgprs["dispatch_ptr"], sgprs["queue_ptr"],
                sgprs["kernarg_segment_ptr"],
                sgprs["dispatch_id"], sgprs["flat_scratch_init"], sgprs["private_segment_size"], sgprs["preload"],
                sgprs["preload_length"], sgprs["preload_offset"], enable, code.directive("system_vgpr_workitem_id", 0),
                slots,
            ],
            dtype=np.int64,
        )  # fmt: skip
        handle = self._lib.sim_launch_new(self._handle, code.program(), words.ctypes.data, block.ctypes.data)
        if not handle:
            raise MemoryError("no memory for the launch")
        return handle, block

    # ---- results ----

    def _fault(self, launches: Sequence[Launch]) -> SimFault:
        raw = np.zeros(16, np.int64)
        self._lib.sim_fault(self._handle, raw.ctypes.data)
        kind, rank, index, group, wave, lane, pc, nbytes, address, write = (int(v) for v in raw[:10])
        name = _FAULTS[kind] or "internal"
        waiting = self._waiting(launches) if name in ("deadlock", "limit") else ()
        fields: dict[str, object] = {}
        place = ""
        if index >= 0:
            launch = launches[index]
            code = launch.code
            instruction = code.instructions[pc] if 0 <= pc < len(code.instructions) else None
            fields = {"rank": rank, "launch": self._name(launch), "workgroup": group, "wave": wave}
            place = f"rank {rank} {self._name(launch)} workgroup {group} wave {wave}"
            if lane >= 0:
                fields["lane"] = lane
                place += f" lane {lane}"
            if instruction:
                fields["line"], fields["text"] = instruction.line, instruction.text
                place += f", line {instruction.line}: {instruction.text}"
        address &= 2**64 - 1
        access = "store" if write else "load"
        if name in ("out-of-bounds", "readonly-store", "gpu-fault", "misaligned", "lds-out-of-bounds"):
            fields["address"] = address
        if name == "out-of-bounds":
            message = (
                f"{access} of {nbytes} bytes at {address:#x} outside registered memory: {self._nearest(rank, address)}"
            )
        elif name == "readonly-store":
            message = f"store of {nbytes} bytes at {address:#x} into readonly memory: {self._nearest(rank, address)}"
        elif name == "gpu-fault":
            message = f"{access} of {nbytes} bytes at address {address:#x}: a GPU memory fault"
        elif name == "lds-out-of-bounds":
            size = launches[index].code.lds_bytes + launches[index].dynamic_lds
            message = f"LDS {access} of {nbytes} bytes at {address}: the workgroup has {size} bytes"
        elif name == "misaligned":
            message = f"atomic of {nbytes} bytes at {address:#x}: not aligned"
        elif name == "trap":
            message = f"s_trap {address}"
        elif name == "hazard":
            message = (
                f"register {'v' if not write else 's'}{address} is used before its load was waited for (s_waitcnt)"
            )
        elif name == "deadlock":
            message = f"no wave can go on; {len(waiting)} wait: " + "; ".join(str(w) for w in waiting[:8])
        elif name == "limit":
            message = (
                f"instruction or time limit reached after {int(raw[11])} wave-instructions; {len(waiting)} waves live: "
            )
            message += "; ".join(str(w) for w in waiting[:8])
        elif name == "memory":
            message = "the host has no memory for the registers of the resident waves"
        else:
            message = f"internal error ({address:#x})"
        return SimFault(name, f"{message} ({place})" if place else message, waiting=waiting, **fields)

    def _waiting(self, launches: Sequence[Launch]) -> tuple[Waiting, ...]:
        room = int(self._lib.sim_waiting(self._handle, None, 0))
        raw = np.zeros((max(room, 1), 6), np.int64)
        self._lib.sim_waiting(self._handle, raw.ctypes.data, room)
        result = []
        for rank, index, group, wave, pc, state in raw[:room].tolist():
            code = launches[index].code
            at = code.instructions[min(max(pc - (state == 1), 0), len(code.instructions) - 1)]
            result.append(Waiting(rank, self._name(launches[index]), group, wave, at.line, at.text, _STATES[state]))
        return tuple(result)

    def _region_name(self, alloc: int, region: int) -> str:
        a = self._allocations.get(alloc)
        if a is None:
            return "?"
        return f"{a.name}.{a.regions[region][0]}" if region < len(a.regions) else a.name

    def _chain(self, node: int) -> list[tuple[str, str]]:
        chain = []
        out = np.zeros(4, np.int32)
        while node >= 0 and self._lib.sim_node(self._handle, node, out.ctypes.data):
            parent, alloc, region, cross = out.tolist()
            chain.append((self._region_name(alloc, region), "cross" if cross else "device"))
            node = parent
        return chain[::-1]

    def _trace(self, launch: int) -> list[Traced]:
        count = self._lib.sim_trace(self._handle, launch, None, 0)
        if count < 0:
            raise MemoryError("no memory for the trace")
        raw = np.zeros(max(count, 1), _TRACE_CELL)
        self._lib.sim_trace(self._handle, launch, raw.ctypes.data, count)
        found = []
        for alloc, region, issue, use, kind, policy, group, nbytes in raw[:count].tolist():
            a = self._allocations[alloc]
            name = a.regions[region][0] if region < len(a.regions) else ""
            cache = POLICIES[policy] if kind < 2 else ""
            found.append(Traced(group, a.name, name, _TRACE_KINDS[kind], cache, issue, use, nbytes))
        return found

    def _report(self, launches: Sequence[Launch], handles: Sequence[int], start: int) -> Report:
        lib = self._lib
        reports = []
        for launch, handle in zip(launches, handles):
            n = len(launch.code.instructions)
            counts, polls = np.zeros(n, np.int64), np.zeros(n, np.int64)
            lib.sim_launch_counts(handle, 0, counts.ctypes.data)
            lib.sim_launch_counts(handle, 1, polls.ctypes.data)
            classes = np.array([_classes()[op] for op in launch.code.decoded.records["op"].tolist()], dtype=np.int64)
            work = np.bincount(classes, weights=(counts - polls).astype(float), minlength=len(CLASSES))
            groups = math.prod(_extent(launch.grid))
            streamed, executed = np.zeros(groups, np.uint64), np.zeros(groups, np.uint64)
            lib.sim_launch_groups(handle, streamed.ctypes.data, executed.ctypes.data)
            stats = np.zeros(8, np.int64)
            lib.sim_launch_stats(handle, stats.ctypes.data)
            reports.append(
                LaunchReport(
                    self._name(launch),
                    launch.rank,
                    groups,
                    -(-math.prod(_extent(launch.block)) // LANES),
                    {name: int(work[k]) for k, name in enumerate(CLASSES)},
                    int(polls.sum()),
                    int(stats[0]),
                    counts.tolist(),
                    streamed.tolist(),
                    executed.tolist(),
                    int(stats[1]),
                    int(stats[2]),
                    int(stats[3]),
                    self._chain(int(stats[4])),
                    self._trace(len(reports)) if self.trace else None,
                )
            )
        raw = np.zeros(16, np.int64)
        lib.sim_fault(self._handle, raw.ctypes.data)
        report = Report(reports, {}, {}, {}, {}, start, self.clock, int(raw[12]), int(raw[10]), int(raw[11]))
        mapped: dict[int, set[int]] = {}
        for a in self._allocations.values():
            mapped.setdefault(a.host, set()).add(a.rank)
        report.shared = frozenset((a.rank, a.name) for a in self._allocations.values() if len(mapped[a.host]) > 1)
        self._memory_counters(report)
        return report

    def _memory_counters(self, report: Report) -> None:
        ident, unique = ctypes.c_uint32(), ctypes.c_uint64()
        read, written = np.zeros(8, np.uint64), np.zeros(8, np.uint64)
        most = max((len(a.regions) for a in self._allocations.values()), default=0) + 1
        polls = np.zeros(most, np.uint64)
        for rank in range(self.ranks):
            k = 0
            while self._lib.sim_alloc_counters(
                self._handle, rank, k, ctypes.addressof(ident), read.ctypes.data, written.ctypes.data,
                ctypes.addressof(unique), polls.ctypes.data, most,
            ):  # fmt: skip
                k += 1
                a = self._allocations[ident.value]
                key = (rank, a.name)
                for target, values in ((report.bytes_read, read), (report.bytes_written, written)):
                    if values.any():
                        into = target.setdefault(key, {})
                        for policy, value in zip(POLICIES, values.tolist()):
                            if value:
                                into[policy] = into.get(policy, 0) + value
                if unique.value:
                    report.unique_bytes[key] = report.unique_bytes.get(key, 0) + unique.value
                for r, count in enumerate(polls[: len(a.regions) + 1].tolist()):
                    if count:
                        name = (rank, self._region_name(a.id, r))
                        report.polls[name] = report.polls.get(name, 0) + count


def _classes() -> dict[int, int]:
    """Operation number -> instruction class."""
    return _CLASS_CACHE or _CLASS_CACHE.update({n: c for n, _, c in library.operations().values()}) or _CLASS_CACHE


_CLASS_CACHE: dict[int, int] = {}
