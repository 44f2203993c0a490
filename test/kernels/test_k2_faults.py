# SPDX-License-Identifier: Apache-2.0
"""K2 when a hand-off does not come: every wait ends in time, on every rank, with a record that names it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers import k2_bench as kb

from sgl_amd_mono.common.build import build
from sgl_amd_mono.common.sync import COMMON_REGIONS, FAULT_BLOCK_BYTES, decode_fault_block, tag_of
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.layer import CROSS_WAITS, FUSED_WAITS, REGION_NAMES, WAITS, LayerKey, Plan

GEOMETRY = Geometry.small(2)
WIDTH = 2
EPOCH = 2  # even: the first half of a peer buffer, whose regions have plain names
DEADLINE = 200_000  # 2 ms of the virtual clock
full = pytest.mark.full


def writer(region: str, form: str = "plain", width: int = WIDTH) -> int:
    """A workgroup that publishes the region; the last of those with further rows has the rank's first router row."""
    plan = Plan(GEOMETRY, width, kb.VARIANTS[form].projection, kb.VARIANTS[form].fused_shared)
    last = plan.extra_blocks.stop - 1
    others = {"AR": 9, "MSQ": 2, "SHARED": 17, "INTER": GEOMETRY.blocks - 1, "FINAL": 4}
    return others.get(region, last - (GEOMETRY.router_rows if region == "GATE" else 0))


# (wait, variant) of each stalled hand-off; a variant's own stages make `make test`, the others `full`.
OWN = {("AR", "mxfp4"), ("GATE", "fused"), ("INTER", "fused")}
STALLS = [
    pytest.param(region, form, marks=() if form == "plain" or (region, form) in OWN else full)
    for form, variant in kb.VARIANTS.items()
    for region in (FUSED_WAITS if variant.fused_shared else WAITS)
]


@cache
def weights(form: str = "plain") -> list[kb.RankWeights]:
    return kb.random_weights(GEOMETRY, 21, variant=kb.VARIANTS[form])


def inputs() -> kb.Inputs:
    return kb.random_inputs(GEOMETRY, WIDTH, 22)


def assert_recorded(bench: kb.Bench, result: kb.Result, regions: set[str]) -> None:
    """Every rank is failed, and some rank's record names launch, wait, rank, workgroup and both tags."""
    assert all(f.failed for f in result.faults)
    records = {r.rank: r for f in result.faults for r in f.records}
    assert records
    names = [COMMON_REGIONS.get(r.region) or REGION_NAMES[r.region]
             for r in records.values()]  # fmt: skip
    assert set(names) <= regions, names
    for record in records.values():
        assert record.launch == kb.SLOT
        assert record.expected_tag == tag_of(EPOCH, kb.SLOT)
        assert record.seen_tag != record.expected_tag
        assert 0 <= record.workgroup < GEOMETRY.blocks
        assert 0 <= record.rank < GEOMETRY.tp
    for fault in result.faults:  # every rank holds every record
        assert {r.rank for r in fault.records} == set(records)


@pytest.mark.parametrize("memory", ["consistent", pytest.param("adversarial", marks=full)])
@pytest.mark.parametrize(("region", "form"), STALLS)
def test_a_stalled_workgroup(region: str, form: str, memory: str) -> None:
    """A workgroup stops where it would publish `region`: the wait on it runs out of time, all ranks return."""
    from sgl_amd_mono.sim import Stall

    bench = kb.Bench(GEOMETRY, weights(form), memory=memory, seed=5)
    bench.machine.inject(Stall(rank=1, workgroup=writer(region, form), at=("store", region)))
    result = bench.run(inputs(), epoch=EPOCH, deadline=DEADLINE)
    assert_recorded(bench, result, {region})


@pytest.mark.parametrize("form", ["plain", *(pytest.param(f, marks=full) for f in kb.VARIANTS if f != "plain")])
@pytest.mark.parametrize("region", CROSS_WAITS)
def test_a_stalled_rank(region: str, form: str) -> None:
    """All workgroups of rank 1 stop at a cross-GPU hand-off: rank 0 returns and names that wait."""
    from sgl_amd_mono.sim import Stall

    bench = kb.Bench(GEOMETRY, weights(form))
    bench.machine.inject(Stall(rank=1, at=("store", region)))
    result = bench.run(inputs(), epoch=EPOCH, deadline=DEADLINE)
    assert_recorded(bench, result, {region})


def test_a_rank_that_never_starts() -> None:
    from sgl_amd_mono.sim import Stall

    bench = kb.Bench(GEOMETRY, weights())
    bench.machine.inject(Stall(rank=1, at="start"))
    result = bench.run(inputs(), epoch=EPOCH, deadline=DEADLINE)
    assert result.faults[0].failed
    assert {r.region for r in result.faults[0].records} == {REGION_NAMES.index("AR")}


def test_a_later_launch_leaves_at_once() -> None:
    """After a lost wait every later launch of the step ends without writing anything."""
    from sgl_amd_mono.sim import Stall

    bench = kb.Bench(GEOMETRY, weights())
    bench.machine.inject(Stall(rank=1, workgroup=writer("FINAL"), at=("store", "FINAL")))
    bench.run(inputs(), epoch=EPOCH, deadline=DEADLINE)
    bench.machine.clear_faults()
    before = [p.clone() for p in bench.peers], [s.clone() for s in bench.scratch[WIDTH]]
    start = bench.machine.clock
    result = bench.run(inputs(), epoch=EPOCH, slot=kb.SLOT + 1, deadline=DEADLINE)
    assert bench.machine.clock - start < DEADLINE
    assert all(t.isnan().all() for t in result.out + result.residual)
    assert all(torch.equal(a, b) for a, b in zip(before[0], bench.peers, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before[1], bench.scratch[WIDTH], strict=True))


def test_the_last_launch_waits_for_every_rank() -> None:
    """A rank whose workgroup is lost after its last publication: with `last` the other rank does not finish."""
    from sgl_amd_mono.sim import Stall

    for last, failed in ((0, False), (1, True)):
        bench = kb.Bench(GEOMETRY, weights())
        bench.machine.inject(Stall(rank=1, workgroup=3, at=("load", "FINAL")))
        result = bench.run(inputs(), epoch=EPOCH, deadline=DEADLINE, last=last)
        assert result.faults[0].failed == failed
    regions = {r.region for r in result.faults[0].records}
    assert regions <= set(COMMON_REGIONS)


def test_a_stop_build_ends_the_process() -> None:
    """The server's build: the rank that loses a wait raises a GPU fault at address 0."""
    from sgl_amd_mono.sim import CodeObject, SimFault, Stall

    program = CodeObject.parse(build(LayerKey(geometry=GEOMETRY, width=1, stop=True)).isa)
    step = inputs().rows([0])
    bench = kb.Bench(GEOMETRY, weights())
    assert not any(f.failed for f in bench.run(step, epoch=EPOCH, program=program).faults)
    bench.machine.inject(Stall(rank=1, workgroup=writer("RLOG", width=1), at=("store", "RLOG")))
    with pytest.raises(SimFault) as fault:
        bench.run(step, epoch=EPOCH, slot=kb.SLOT + 1, deadline=DEADLINE, program=program)
    assert fault.value.kind == "gpu-fault"
    assert fault.value.address < 4096
    state = decode_fault_block(bench.peers[0][:FAULT_BLOCK_BYTES].view(torch.int32).tolist())
    assert {REGION_NAMES[r.region] for r in state.records} == {"RLOG"}


def test_a_slow_workgroup_is_no_fault() -> None:
    """Control: a delay shorter than the deadline changes nothing."""
    from sgl_amd_mono.sim import DelayStores

    step = inputs()
    bench = kb.Bench(GEOMETRY, weights())
    plain = bench.run(step, epoch=EPOCH, deadline=DEADLINE)
    late = kb.Bench(GEOMETRY, weights())
    late.machine.inject(DelayStores(rank=1, to_rank=0, region="RLOG", ticks=DEADLINE // 4))
    result = late.run(step, epoch=EPOCH, deadline=DEADLINE)
    assert not any(f.failed for f in result.faults)
    assert torch.equal(result.out[0], plain.out[0])
