# SPDX-License-Identifier: Apache-2.0
"""A stalled workgroup or wave at every wait of K1: the launch returns, says what it waited for, and writes no state."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers.k1_gates import Before, nothing_written, untouched
from helpers.k1_inputs import DEADLINE_TICKS, EPOCH, JUNK, LAYER, K1Case, make_case, run

from sgl_amd_mono.common.sync import decode_fault_block, tag_of
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import REGION_NAMES, GdnKey

full = pytest.mark.full
STALL_DEADLINE = 200_000  # 2 ms of the virtual clock, ten times what a launch takes under the adversarial model
TP1, TRUE = Geometry.small(1), Geometry.a95b()


@dataclass(frozen=True)
class Place:
    """Where a wave stops, and which wait must then run out of time."""

    name: str
    geometry: Geometry
    workgroup: int | None
    wave: int | None
    at: object
    regions: tuple[str, ...]  # what the record may name


# Small TP 1: wave w of workgroup b has head 2w + b / 16. A wave that stops takes its unit with it; at the true
# size and one row only wave 0 has a unit, and the whole and left-over rows are published by waves 1 and 2.
PLACES = [
    Place("nothing published", TP1, 3, None, "start", ("PROJ", "BA")),
    Place("q rows", TRUE, 5, None, ("store", "PROJ"), ("PROJ",)),
    Place("b rows", TP1, 1, None, ("store", "BA"), ("BA",)),
    Place("chunk sums", TP1, 20, 2, ("store", "ONRM"), ("ONRM",)),
    Place("left-over z rows", TRUE, 9, None, ("store", "LEFT"), ("LEFT",)),
    Place("readers of the window", TP1, None, 3, ("store", "ONRM"), ("WINDOW",)),
]
ROWS = [
    pytest.param(
        place,
        width,
        memory,
        marks=() if (width, memory) == (1, "consistent") else full,
        id=f"{place.name}-{width}-{memory}".replace(" ", "-"),
    )
    for place in PLACES
    for width in ((1,) if place.geometry is TRUE else (1, 8))
    for memory in ("consistent", "adversarial")
]
MXFP4_ROWS = ("b rows", "left-over z rows")  # of the places, those that `make test` runs in MXFP4 as well


@pytest.mark.parametrize(("place", "width", "memory"), ROWS)
def test_a_stall_ends_the_launch(place: Place, width: int, memory: str) -> None:
    stalled(place, GdnKey(place.geometry, width, stop=False), memory)


@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=() if p.name in MXFP4_ROWS else full, id=p.name.replace(" ", "-")) for p in PLACES]
)
def test_a_stall_ends_the_launch_in_mxfp4(place: Place) -> None:
    key = GdnKey(place.geometry, 1, stop=False, qkvz_format="mxfp4", ba_format="mxfp4")
    stalled(place, key, "consistent")


def stalled(place: Place, key: GdnKey, memory: str) -> None:
    """Run with a stall at the place, and hold the gates of the class."""
    from sgl_amd_mono.sim import Stall

    width = key.width
    case = make_case(key, seed=31)
    before = Before.of(case)
    stall = Stall(rank=0, workgroup=place.workgroup, wave=place.wave, at=place.at)
    report = run(case, memory=memory, faults=[stall], deadline_ticks=STALL_DEADLINE)
    assert report.stalled

    assert case.fault.error_word == 1  # 1 + the rank that failed
    (record,) = case.fault.records
    tag = tag_of(EPOCH, LAYER)
    assert record.launch == LAYER and record.rank == 0
    # With several rows, a wave behind a stalled one is itself awaited in its later rows.
    assert REGION_NAMES[record.region] in (place.regions if width == 1 else (*place.regions, "ONRM"))
    assert record.expected_tag == tag and record.seen_tag != tag
    assert 0 <= record.workgroup < place.geometry.blocks
    for block in case.fault_blocks[1:]:  # every other rank was told
        assert int(block[0]) == 1
    # A step's ticks: the deadline, and little more.
    assert STALL_DEADLINE <= report.clock_end - report.clock_start < 3 * STALL_DEADLINE

    # No state row is torn (each is as it was, or as the definition has it), and the stalled ones are as they were.
    written = torn_rows(case, before)
    blocked = blocked_units(place, width)
    for t, head, first in blocked:
        assert not written[t, head, first : first + 8].any(), f"row {t}, head {head}, state row {first} was written"
    if place.regions == ("WINDOW",) or "PROJ" in place.regions:
        slot = int(case.state_index[0])
        assert torch.equal(case.conv_state[slot, :128], before.conv[slot, :128]), "the first q window was written"


def torn_rows(case: K1Case, before: Before) -> torch.Tensor:
    """bool [width, heads, 128]: state rows that were written; fails where a row is neither old nor new."""
    slots = case.state_index.long()
    now, old, new = case.ssm_state[slots].double(), before.ssm[slots].double(), before.trace.ssm_rows
    is_old = (now == old).all(-1)
    is_new = (now - new).norm(dim=-1) <= 1e-2 * new.norm(dim=-1) + 1e-9  # a bf16 step of v
    assert bool((is_old | is_new).all())
    return ~is_old


def blocked_units(place: Place, width: int) -> list[tuple[int, int, int]]:
    """(row, head, first state row) of units that cannot have all their inputs."""
    g = place.geometry
    units = []
    for number in range(width * g.gdn_units):
        t, index = divmod(number, g.gdn_units)
        head, unit = divmod(index, g.units_per_head)
        wave = number // g.blocks % g.waves
        if place.name in ("nothing published", "q rows"):
            blocked = head < g.heads_per_key  # group 3 or 5 lies in the q rows of key head 0
        elif place.name == "b rows":
            blocked = True  # slice 1 of group 0: b of every head
        elif place.name == "chunk sums":
            blocked = head == 2 * place.wave + 1
        elif place.name == "left-over z rows":
            row = g.z_offset + index * 8
            group = g.whole_tasks * g.blocks + place.workgroup // g.leftover_slices
            blocked = row // 16 == group
        else:
            blocked = wave == place.wave
        if blocked:
            units.append((t, head, unit * 8))
    return units


def test_every_rank_learns_which_rank_failed() -> None:
    """Rank 1 of 2 runs out of time: both fault blocks hold its record and its error word."""
    from sgl_amd_mono.sim import Stall

    case = make_case(GdnKey(Geometry.small(2), 1, stop=False), seed=36)
    run(case, faults=[Stall(rank=0, workgroup=2, at="start")], deadline_ticks=STALL_DEADLINE, rank=1)
    for block in case.fault_blocks:
        state = decode_fault_block(block.tolist())
        assert state.error_word == 2 and [record.rank for record in state.records] == [1]


@pytest.mark.parametrize("width", [1, 2])
def test_a_failure_behind_the_entry_still_stops_the_stores(width: int) -> None:
    """A launch that did not see the error word when it began (the look is taken out here) and whose waits all succeed
    sees it before its stores: no state and no core row is written. Its products are, as nothing hangs on them."""
    from sgl_amd_mono.common import device
    from sgl_amd_mono.common.build import compile_artifact
    from sgl_amd_mono.common.sync import Sync
    from sgl_amd_mono.sim import CodeObject

    def enter(self: Sync) -> None:
        self._entered = True
        device.barrier()

    case = make_case(GdnKey(TP1, width, stop=False), seed=37)
    before = Before.of(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sync, "leave_if_failed", enter)
        code = CodeObject.parse(compile_artifact(case.key).isa)
    case.fault_blocks[0][0] = 1
    run(case, code=code)
    assert not untouched(case, before) and bool((case.core == JUNK).all())
    assert bool(case.scratch.any())


def test_an_earlier_failure_ends_the_next_launch() -> None:
    """The error word set by an earlier launch: nothing is written, nothing is waited for."""
    case = make_case(GdnKey(TP1, 2, stop=False), seed=32)
    before = Before.of(case)
    case.fault_blocks[0][0] = 1
    report = run(case)
    assert not nothing_written(case, before)
    assert report.clock_end - report.clock_start < DEADLINE_TICKS


def test_a_wrong_tag_runs_out_of_time() -> None:
    """Negative control: products published under another launch's tag are never taken."""
    from sgl_amd_mono.common.build import compile_artifact
    from sgl_amd_mono.common.sync import Sync
    from sgl_amd_mono.sim import CodeObject

    case = make_case(GdnKey(TP1, 1, stop=False), seed=33)
    before = Before.of(case)
    put = Sync.put

    def wrong(self: Sync, region: object, *args: object, **kwargs: object) -> None:
        tag = self.tag
        if region.number == REGION_NAMES.index("BA"):
            self.tag = tag + 1
        put(self, region, *args, **kwargs)
        self.tag = tag

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sync, "put", wrong)
        code = CodeObject.parse(compile_artifact(case.key).isa)
    run(case, code=code, deadline_ticks=STALL_DEADLINE)
    (record,) = case.fault.records
    assert REGION_NAMES[record.region] == "BA"
    assert (record.expected_tag, record.seen_tag) == (tag_of(EPOCH, LAYER), tag_of(EPOCH, LAYER) + 1)
    assert not untouched(case, before)


def test_stop_builds_raise_a_gpu_fault_at_address_zero() -> None:
    """The server's build: a wait that runs out of time ends the process, not just the launch."""
    from sgl_amd_mono.sim import SimFault, Stall

    case = make_case(GdnKey(TP1, 1, stop=True), seed=34)
    before = Before.of(case)
    with pytest.raises(SimFault) as caught:
        run(case, faults=[Stall(rank=0, workgroup=1, wave=None, at=("store", "BA"))], deadline_ticks=STALL_DEADLINE)
    assert caught.value.kind == "gpu-fault"
    assert case.fault.failed and not untouched(case, before)


def test_the_window_waits_for_its_readers() -> None:
    """Negative control: an owner that does not wait for the window's readers writes it under a stalled one."""
    from sgl_amd_mono.common.build import compile_artifact
    from sgl_amd_mono.common.sync import Sync
    from sgl_amd_mono.sim import CodeObject, Stall

    case = make_case(GdnKey(TP1, 1, stop=False), seed=35)
    before = Before.of(case)
    poll = Sync.poll

    def no_window(self: Sync, pairs: list, *args: object) -> list | None:
        return None if pairs[0][0].number == REGION_NAMES.index("WINDOW") else poll(self, pairs, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sync, "poll", no_window)
        code = CodeObject.parse(compile_artifact(case.key).isa)
    stall = Stall(rank=0, workgroup=None, wave=3, at=("store", "ONRM"))
    run(case, code=code, faults=[stall], deadline_ticks=STALL_DEADLINE)
    slot = int(case.state_index[0])
    assert not torch.equal(case.conv_state[slot, :128], before.conv[slot, :128])
