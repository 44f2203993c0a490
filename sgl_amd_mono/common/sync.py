# SPDX-License-Identifier: Apache-2.0
"""Hand-offs between workgroups and GPUs: tags, mailboxes, bounded waits, the fault block, the end of a step.

**Mailbox**: an aligned 8-byte pair (value in the low word, tag in the high word), written and read by one 64-bit
relaxed atomic at the scope of its region. A reader re-loads its batch until every tag is the launch's, so a hand-off
is one store and one successful load. ``tag = (epoch mod 2**22) * 256 + slot + 1``: never 0, unique for 2**22 steps.

**Waits** have a deadline. The clock and the error word are looked at only after failed tries, every
``SPINS_PER_CHECK`` of them. A wave that runs out of time records the wait in the fault block of every rank, sets
every rank's error word (record first, error word after it), marks its workgroup dead in LDS and ends. A wave that
finds the error word set, or its workgroup dead, ends the same way without a record. Nothing that follows a wait is
therefore reached with data that did not arrive, provided that waves which did not wait themselves pass
``Sync.barrier()`` (barrier + look at the workgroup's dead word) before they use, publish or store anything.

**Fault block**: the first ``FAULT_BLOCK_BYTES`` of every rank's peer buffer.

======  =====================================================================================================
byte    content
======  =====================================================================================================
0       int32 error word: 0, or 1 + the rank that failed (any one, when several did)
4       int32 claim word: 0, or 1 once a wave of this rank records (only the first does)
64      int64[8] step-end exchange: (failed bit, tag) of each rank
128     int32[8][8] records, one a rank: {1, launch, region, index, expected tag, seen tag, workgroup, rank}
======  =====================================================================================================

``launch`` is the tag's slot (K1: layer, K2: 128 + layer); ``region`` the number of a name in the kernel's region list.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_RANKS = 8
FAULT_BLOCK_BYTES = 512
ERROR_OFFSET = 0
CLAIM_OFFSET = 4
EXCHANGE_OFFSET = 64
RECORD_OFFSET = 128
RECORD_WORDS = 8
RECORD_FIELDS = ("valid", "launch", "region", "index", "expected_tag", "seen_tag", "workgroup", "rank")

EPOCH_MODULUS = 1 << 22
TAG_SLOTS = 256
PAIR_BYTES = 8
HOT_LINE_BYTES = 64  # a flag that many workgroups poll gets a line of its own

SPINS_PER_CHECK = 32  # failed tries between two looks at the clock and the error word
POLL_SLEEP = 1  # s_sleep units between two tries
MAX_BATCH = 16  # pairs a lane re-loads together

# Regions that common itself waits on; a kernel's own regions are numbered from 0 below these.
REGION_MARKS = 0xFF00
REGION_EXCHANGE = 0xFF01
COMMON_REGIONS = {REGION_MARKS: "step-end marks", REGION_EXCHANGE: "step-end exchange"}


def tag_of(epoch: int, slot: int) -> int:
    """Tag of launch ``slot`` (0..254) in step ``epoch`` (host arithmetic; the kernel's is ``Sync.tag``)."""
    if not 0 <= slot < TAG_SLOTS - 1:
        raise ValueError(f"tag slot {slot}; needed: 0 .. {TAG_SLOTS - 2}")
    return (epoch % EPOCH_MODULUS) * TAG_SLOTS + slot + 1


@dataclass(frozen=True)
class FaultRecord:
    """One wait that ran out of time."""

    launch: int
    region: int
    index: int
    expected_tag: int
    seen_tag: int
    workgroup: int
    rank: int

    @property
    def epoch(self) -> int:
        """Step of the expected tag, modulo 2**22."""
        return (self.expected_tag - 1) // TAG_SLOTS

    def describe(
        self, launch_name: Callable[[int], str] | None = None, region_name: Callable[[int, int], str] | None = None
    ) -> str:
        """One line; ``launch_name(slot)`` and ``region_name(slot, region)`` give a model's own names."""
        launch = launch_name(self.launch) if launch_name else f"launch slot {self.launch}"
        if self.region in COMMON_REGIONS:
            region = COMMON_REGIONS[self.region]
        else:
            region = region_name(self.launch, self.region) if region_name else f"region {self.region}"
        return (
            f"{launch}: wait on '{region}' index {self.index} ran out of time on rank {self.rank}, workgroup "
            f"{self.workgroup}: expected tag {self.expected_tag:#x} (step {self.epoch}), seen {self.seen_tag:#x}"
        )


@dataclass(frozen=True)
class FaultState:
    """Decoded fault block of one rank."""

    error_word: int
    records: tuple[FaultRecord, ...]

    @property
    def failed(self) -> bool:
        """True when some rank of the group failed."""
        return self.error_word != 0

    def describe(
        self, launch_name: Callable[[int], str] | None = None, region_name: Callable[[int, int], str] | None = None
    ) -> str:
        """Text for a log: every record, or the failing rank where no record arrived."""
        if not self.failed:
            return "no fault"
        lines = [r.describe(launch_name, region_name) for r in self.records]
        return "; ".join(lines) or f"rank {self.error_word - 1} failed and left no record"


def decode_fault_block(words: Sequence[int]) -> FaultState:
    """Decode the first ``FAULT_BLOCK_BYTES / 4`` int32 of a peer buffer."""
    need = FAULT_BLOCK_BYTES // 4
    if len(words) < need:
        raise ValueError(f"a fault block has {need} int32, got {len(words)}")
    unsigned = [int(w) & 0xFFFFFFFF for w in words[:need]]
    records = []
    for rank in range(MAX_RANKS):
        start = RECORD_OFFSET // 4 + rank * RECORD_WORDS
        valid, *fields = unsigned[start : start + RECORD_WORDS]
        if valid:
            records.append(FaultRecord(*fields))
    return FaultState(unsigned[ERROR_OFFSET // 4], tuple(records))


@dataclass(frozen=True)
class Region:
    """A mailbox region as the kernel sees it: ``number`` names it in fault records, pair ``i`` lies ``i * stride``
    bytes from ``base`` (``Int64``, equal in all lanes); ``system`` when other GPUs write or read it.

    ``order`` is the place of the region's wait in the launch's chain of hand-offs: a wait gets ``order`` eighths of the
    deadline on top, so that of several waits that one lost hand-off holds up, the first in the chain is recorded.
    """

    number: int
    base: Any
    system: bool = False
    stride: int = PAIR_BYTES
    order: int = 0


class Sync:
    """Hand-off state of one kernel while it is traced.

    Made once at the top of a kernel body: reads mode, epoch, peer table and error word. ``dead`` is an LDS region of
    16 bytes of this kernel.
    """

    def __init__(
        self,
        *,
        epoch: Any,
        slot: Any,
        peers: Any,
        rank: Any,
        ranks: int,
        deadline_ticks: Any,
        mode: Any,
        dead: Any,
        stop: bool,
    ) -> None:
        from sgl_amd_mono.common import device as d

        self._d = d
        self._stop = stop
        self.ranks = ranks
        self.rank = rank
        self.slot = slot
        self._deadline = deadline_ticks
        self._dead = dead
        self._entered = False
        # mode 0 is the warm-up launch: it must touch nothing, not even the peer table.
        with d.if_(d.compare("eq", mode, d.I32(0))):
            d.end_program()
        step = d.load_uniform(epoch, 0, d.I32)
        self.tag = (step & (EPOCH_MODULUS - 1)) * TAG_SLOTS + slot + 1
        self._peers = peers
        self.own_base = d.load_uniform(peers, d.zext(rank, d.I64) << d.I64(3), d.I64)
        self._entry_error = d.load(self.own_base, ERROR_OFFSET, d.I32, d.SYSTEM)
        with d.if_(d.compare("eq", d.thread_id(), d.I32(0))):
            dead.store(d.I32(0), 0)

    def peer_base(self, rank: int | Any) -> Any:
        """Address of that rank's peer buffer, loaded where it is used: all of them held would take 2 SGPRs a rank."""
        d = self._d
        return d.load_uniform(self._peers, rank * 8, d.I64)

    def under(self, slot: Any) -> Sync:
        """The same hand-offs under the tag of another slot: of a second launch's stages in this kernel."""
        other = copy.copy(self)
        other.slot, other.tag = slot, self.tag + (slot - self.slot)
        return other

    # -- leaving -------------------------------------------------------------------------------------------------

    def leave_if_failed(self) -> None:
        """Ends the wave when the error word was set at the launch's start; holds the barrier that makes the dead word
        valid. Call it once, before the first put, poll or store of the kernel; the load was issued at the top."""
        d = self._d
        self._entered = True
        d.barrier()
        with d.if_(d.compare("ne", d.uniform(self._entry_error), d.I32(0))):
            self._leave()

    def _require_entered(self, what: str) -> None:
        if not self._entered:
            raise RuntimeError(f"Sync.{what} before Sync.leave_if_failed(): look at the error word first")

    def check_error(self) -> None:
        """Re-read the own error word and end the wave when it is set: before state rows are written."""
        self.leave_if_set(self.error_word())

    def error_word(self) -> Any:
        """Issue the load of the own error word, to be looked at later by ``leave_if_set`` (no trip in between)."""
        return self._d.load(self.own_base, ERROR_OFFSET, self._d.I32, self._d.SYSTEM)

    def leave_if_set(self, error: Any) -> None:
        """End the wave when ``error`` (see ``error_word``) is set."""
        d = self._d
        with d.if_(d.compare("ne", d.uniform(error), d.I32(0))):
            self._leave()

    def barrier(self) -> None:
        """Workgroup barrier after waits: a workgroup with a dead wave ends here, whole."""
        d = self._d
        d.barrier()
        with d.if_(d.compare("ne", d.uniform(self._dead.load(0, d.I32)), d.I32(0))):
            self._leave()

    def _leave(self) -> None:
        """Mark the workgroup dead and end this wave (``stop``: by a GPU fault at address 0 first)."""
        d = self._d
        self._dead.store(d.I32(1), 0)
        d.wait_lds()
        if self._stop:
            d.fault_at_zero()
        d.end_program()

    def _record_and_leave(self, region: Any, index: Any, seen: Any) -> None:
        """Time is up in this wave: the first active lane claims the rank's record, writes it to every rank, then the
        error words."""
        d = self._d
        claim_pointer = d.address(self.own_base, CLAIM_OFFSET)
        lane = d.lane_id()
        with d.if_(d.compare("eq", lane, d.uniform(lane))):
            found = d.fly.compare_exchange(claim_pointer, d.I32(0), d.I32(1), align=4, scope="")
            with d.if_(d.compare("eq", found, d.I32(0))):
                record = d.I32(RECORD_OFFSET) + self.rank * (4 * RECORD_WORDS)
                words = [d.I32(1), self.slot, region, index, self.tag, seen, d.block_id(), self.rank]

                def write_record(rank: Any) -> None:
                    base = self.peer_base(rank)
                    for pair in range(RECORD_WORDS // 2):
                        value = _pair(d, words[2 * pair], words[2 * pair + 1])
                        d.store(value, base, record + 8 * pair, d.SYSTEM)

                d.for_range(0, self.ranks, 1, [], write_record)
                d.wait_stores()
                d.for_range(
                    0, self.ranks, 1, [],
                    lambda rank: d.store(self.rank + 1, self.peer_base(rank), ERROR_OFFSET, d.SYSTEM),
                )  # fmt: skip
                d.wait_stores()
        self._leave()

    # -- mailboxes -----------------------------------------------------------------------------------------------

    def put(self, region: Region, index: Any, value: Any, *, base: Any = None) -> None:
        """Publish a 32-bit ``value`` in pair ``index`` (per lane; guard lanes with ``d.if_``). ``base`` replaces the
        region's base: another rank's copy of the same region."""
        d = self._d
        self._require_entered("put")
        cache = d.SYSTEM if region.system else d.AGENT
        pair = _pair(d, d.bitcast(value, d.I32), self.tag)
        d.store(pair, region.base if base is None else base, _pair_offset(d, region, index), cache)

    def put_all_ranks(self, offset: int, region: Region, index: Any, value: Any) -> None:
        """``put`` into the same place (``offset`` bytes into the peer buffer) of every rank, own rank included."""
        for rank in range(self.ranks):
            self.put(region, index, value, base=self.peer_base(rank) + self._d.I64(offset))

    def poll(self, pairs: Sequence[tuple[Region, Any]], kinds: Sequence[Any] | None = None) -> list[Any]:
        """Wait until all ``pairs`` (region, per-lane index) carry this launch's tag; returns their values.

        One batch is re-loaded together. ``kinds``: 32-bit types of the values (default ``Int32``). Lanes that are
        inactive (an enclosing ``d.if_``) do not wait. A lane's wait that runs out of time ends its whole wave.
        """
        d = self._d
        self._require_entered("poll")
        if not 0 < len(pairs) <= MAX_BATCH:
            raise ValueError(f"a poll batch has 1 .. {MAX_BATCH} pairs, got {len(pairs)}")
        pointers = [d.address(r.base, _pair_offset(d, r, i)) for r, i in pairs]

        def attempt(spin: Any, start: Any, *before: Any) -> tuple[Any, list[Any]]:
            # Every lane active here failed its last try, so both branches are uniform.
            with d.if_(d.compare("ne", spin, d.I32(0))):
                d.sleep(POLL_SLEEP)
            (start,) = d.if_else(
                d.compare("eq", spin & (SPINS_PER_CHECK - 1), d.I32(SPINS_PER_CHECK - 1)),
                lambda: [self._check(start, pairs, before)],
                lambda: [start],
                [d.I64],
            )
            words = [
                d.fly.load(p, d.I64, align=PAIR_BYTES, scope="" if r.system else "agent")
                for p, (r, _) in zip(pointers, pairs, strict=True)
            ]
            missing = d.fx.Boolean(False)
            for word in words:
                missing = missing | d.compare("ne", _tag(d, word), self.tag)
            # The counter's origin is hidden, or the compiler unrolls the loop up to the next check.
            return missing, [d.opaque_uniform(spin + 1), start, *words]

        init = [d.I32(0), d.I64(0), *[d.fly.poison(d.I64) for _ in pairs]]
        _, _, *words = d.loop_while(init, attempt)
        d.compiler_fence()
        kinds = kinds or [d.I32] * len(pairs)
        return [d.bitcast(d.trunc(w, d.I32), k) for w, k in zip(words, kinds, strict=True)]

    def _check(self, start: Any, pairs: Sequence[tuple[Region, Any]], words: Sequence[Any]) -> Any:
        """Every ``SPINS_PER_CHECK`` failed tries: leave when the rank failed, record when the time is up."""
        d = self._d
        tags = [_tag(d, w) for w in words]
        now = d.clock()
        self.check_error()
        with d.if_(d.compare("ne", d.uniform(self._dead.load(0, d.I32)), d.I32(0))):
            self._leave()
        first = d.compare("eq", start, d.I64(0))
        start = d.select(first, now, start)
        order = max(r.order for r, _ in pairs)
        limit = self._deadline + d.shift_right_logical(self._deadline, d.I64(3)) * order if order else self._deadline
        with d.if_(d.compare("ugt", now - start, limit)):
            region, index, seen = d.I32(pairs[-1][0].number), d.I32(pairs[-1][1]), tags[-1]
            for (r, i), tag in zip(reversed(pairs[:-1]), reversed(tags[:-1]), strict=True):
                late = d.compare("ne", tag, self.tag)
                region = d.select(late, d.I32(r.number), region)
                index = d.select(late, d.I32(i), index)
                seen = d.select(late, tag, seen)
            self._record_and_leave(region, index, seen)
        return start

    # -- bulk rows -----------------------------------------------------------------------------------------------

    def publish(self, region: Region, index: Any, value: Any = 0) -> None:
        """Announce bulk data that all waves of this workgroup stored (device or system scope, as ``region``):
        every wave waits for its own stores, the workgroup meets, one thread puts the flag."""
        d = self._d
        d.wait_stores()
        self.barrier()
        with d.if_(d.compare("eq", d.thread_id(), d.I32(0))):
            self.put(region, index, d.I32(value))

    # -- end of a step -------------------------------------------------------------------------------------------

    def step_end(self, last: Any, marks: Region, blocks: int) -> None:
        """In a step's last launch (``last`` = 1) the ranks exchange their failed bits.

        Called by every workgroup when its work is done. Each puts a mark (``marks`` has ``blocks`` pairs in this
        rank's scratch); workgroup 0 waits for all of them, sends (0, tag) to every rank's exchange slot and waits
        for all ranks' pairs. A rank that lost a wait never sends it, and has set every error word: no rank ends a
        step that another one lost.
        """
        d = self._d
        with d.if_(d.compare("ne", last, d.I32(0))):
            d.wait_stores()
            self.barrier()
            with d.if_(d.compare("eq", d.thread_id(), d.I32(0))):
                self.put(marks, d.block_id(), d.I32(1))
            with d.if_(d.compare("eq", d.block_id(), d.I32(0)) & d.compare("eq", d.wave_id(), d.I32(0))):
                self._collect_marks(marks, blocks)
                exchange = Region(
                    REGION_EXCHANGE, self.own_base + d.I64(EXCHANGE_OFFSET), system=True, order=marks.order + 1
                )
                with d.if_(d.compare("eq", d.lane_id(), d.I32(0))):
                    self.put_all_ranks(EXCHANGE_OFFSET, exchange, self.rank, d.I32(0))
                with d.if_(d.compare("ult", d.lane_id(), d.I32(self.ranks))):
                    self.poll([(exchange, d.lane_id())])

    def _collect_marks(self, marks: Region, blocks: int) -> None:
        """One wave waits for every workgroup's mark; each lane polls its share."""
        d = self._d
        number = Region(REGION_MARKS, marks.base, marks.system, marks.stride, marks.order)
        share = [d.lane_id() + d.WAVE_LANES * k for k in range(-(-blocks // d.WAVE_LANES))]
        clamped = [d.select(d.compare("ult", i, d.I32(blocks)), i, d.I32(blocks - 1)) for i in share]
        for first in range(0, len(clamped), MAX_BATCH):
            self.poll([(number, i) for i in clamped[first : first + MAX_BATCH]])


def _pair(d: Any, value: Any, tag: Any) -> Any:
    """(value, tag) as the 64-bit word of a mailbox."""
    return (d.zext(tag, d.I64) << d.I64(32)) | d.zext(value, d.I64)


def _tag(d: Any, word: Any) -> Any:
    """Tag of a mailbox word."""
    return d.trunc(d.shift_right_logical(word, d.I64(32)), d.I32)


def _pair_offset(d: Any, region: Region, index: Any) -> Any:
    return index * region.stride if isinstance(index, int) else index * d.I32(region.stride)
