# SPDX-License-Identifier: Apache-2.0
"""K2's emitted code: resources of every width, the scopes of its hand-offs, and what a build refuses."""

from __future__ import annotations

import re

import pytest
from helpers import isa_text
from helpers import k2_bench as kb

from sgl_amd_mono.common.build import build
from sgl_amd_mono.common.geometry import GeometryError
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.layer import (
    ABI,
    WAITS,
    LayerKey,
    Plan,
    peer_bytes,
    peer_regions,
    scratch_bytes,
    scratch_regions,
)

SGPR_SPILLS_MAX = 16
TRUE = Geometry.a95b(8)
BUILDS = [
    pytest.param(g, w, id=f"{g.name}-tp{g.tp}-s{w}", marks=() if (g.name, w) in unmarked else pytest.mark.full)
    for g in (TRUE, Geometry.small(1), Geometry.small(2))
    for w in range(1, 9)
    for unmarked in [{("qwen38-a95b", 1), ("qwen38-a95b", 8), ("small", 8)}]
]


@pytest.mark.parametrize(("geometry", "width"), BUILDS)
def test_resources(geometry: Geometry, width: int) -> None:
    found = kb.artifact(geometry, width).resources
    assert found.refusals() == []
    assert found.sgpr_spills <= SGPR_SPILLS_MAX
    assert found.agprs == 0


@pytest.mark.parametrize("geometry", [TRUE, Geometry.small(2)], ids=["true", "small"])
def test_scopes_of_hand_offs(geometry: Geometry) -> None:
    """Pairs are single 8-byte accesses: sc1 inside the GPU, sc0 sc1 between GPUs; z goes and comes with sc1."""
    isa = kb.artifact(geometry, 1).isa
    pairs = re.findall(r"global_(load|store)_dwordx2 [^\n]*?((?: sc0)?(?: sc1)?)(?: nt)?\n", isa)
    loads = {scope.strip() for kind, scope in pairs if kind == "load"}
    stores = [scope.strip() for kind, scope in pairs if kind == "store"]
    assert set(stores) - {""} == {"sc1", "sc0 sc1"}
    assert stores.count("") == 1, "a pair is stored without a scope"  # next_z, which a later launch reads
    assert loads <= {"sc1", "sc0 sc1", ""}
    assert re.search(r"buffer_load_dwordx4 [^\n]* sc1\n", isa)
    assert re.search(r"global_store_short [^\n]* sc1\n", isa)
    assert not re.search(r"global_store_short [^\n]*, off(?: offset:\d+)?\n", isa)


@pytest.mark.parametrize("geometry", [TRUE, Geometry.small(2)], ids=["true", "small"])
def test_weights_are_streamed_once(geometry: Geometry) -> None:
    """Weight loads carry nt; experts are multiplied by the scaled MFMA on fp4, never converted to bf16."""
    isa = kb.artifact(geometry, 1).isa
    assert len(re.findall(r"_load_dwordx4 [^\n]* nt\n", isa)) >= 16
    assert re.search(r"v_mfma_scale_f32_16x16x128_f8f6f4 [^\n]*cbsz:4 blgp:4", isa)
    assert "v_cvt_scalef32_pk_bf16_fp4" not in isa


def test_regions_do_not_overlap_and_are_inside() -> None:
    for geometry in (TRUE, Geometry.small(1), Geometry.small(2)):
        for width in range(1, 9):
            assert_disjoint(scratch_regions(geometry, width), scratch_bytes(geometry, width))
        assert_disjoint(peer_regions(geometry), peer_bytes(geometry))


def assert_disjoint(regions, total: int) -> None:
    top = 0
    for name, span in regions.items():
        assert span.offset >= top, name
        assert span.offset % 256 == 0, name
        top = span.offset + span.nbytes
    assert top <= total


def test_the_abi_names_every_pointer_once() -> None:
    names = [name for name, _ in ABI]
    assert len(set(names)) == len(names)
    assert dict(ABI)["deadline_ticks"] == "i64"
    assert LayerKey.readonly.isdisjoint({"out", "residual_out", "scratch"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": 64}, r"32 columns x 64 workgroups = 2048"),
        ({"shared_intermediate_total": 544}, r"17 / 4 = 4 remainder 1"),
        ({"moe_intermediate_total": 384}, r"moe_intermediate / 256"),
        ({"top_k": 15}, r"top_k = 15"),
        ({"experts": 1024}, r"experts = 1024, at most 512"),
    ],
)
def test_a_geometry_that_does_not_divide_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        LayerKey(geometry=Geometry.small(1).with_(**change), width=1)


@pytest.mark.parametrize("width", [0, 9])
def test_a_width_out_of_range_is_refused(width: int) -> None:
    with pytest.raises(GeometryError, match=f"width = {width}"):
        LayerKey(geometry=Geometry.small(1), width=width)


def test_every_wait_is_bounded() -> None:
    """Each poll loop sleeps, reads the clock and looks at the error word; there is one for each kind of wait."""
    isa = kb.artifact(TRUE, 1).isa
    assert isa_text.unbounded_polls(isa) == []
    assert len(isa_text.poll_loops(isa)) >= len(WAITS) - 1  # SHARED and GATE are one batch
    blind = "\n".join(line for line in isa.splitlines() if "s_memrealtime" not in line)
    assert isa_text.unbounded_polls(blind)


def test_z_is_complete_before_its_flag() -> None:
    isa = kb.artifact(TRUE, 1).isa
    assert flags_before_drain(isa) == []
    undrained = "\n".join(line for line in isa.splitlines() if "s_waitcnt vmcnt(0)" not in line)
    assert flags_before_drain(undrained)


def flags_before_drain(isa: str) -> list[isa_text.Line]:
    """Pair stores that follow a store of z without `vmcnt(0)` in between (a wave stores z and its flag itself)."""
    waiting, bad = False, []
    for line in isa_text.lines_of(isa):
        if line.mnemonic == "global_store_short" and isa_text.is_scoped_store(line):
            waiting = True
        elif line.mnemonic == "s_waitcnt" and "vmcnt(0)" in line.text:
            waiting = False
        elif waiting and line.mnemonic == "global_store_dwordx2" and isa_text.is_scoped_store(line):
            bad.append(line)
    return bad


@pytest.mark.parametrize("geometry", [TRUE, Geometry.small(2)], ids=["true", "small"])
def test_a_lost_wait_ends_the_process_in_a_stop_build(geometry: Geometry) -> None:
    """The server's build stores to address 0 before a wave leaves; the tests' build does not."""
    stop = build(LayerKey(geometry=geometry, width=1, stop=True))
    # The kernel's own end may stand between the leaving paths, in a block of its own.
    assert isa_text.leaves_without_fault(stop.isa) in ([], [[]])
    assert len(isa_text.leaves_without_fault(kb.artifact(geometry, 1).isa)) > len(WAITS)


def shares(plan: Plan, workgroup: int) -> tuple[int, int, int]:
    """(output projection tasks, whole rows of the shared expert, further rows) of a workgroup, from the plan."""
    each, more, few = plan.project_tasks
    tasks = each + (workgroup < more) if workgroup < plan.light_blocks else few
    shared = plan.shared_rows if workgroup < plan.shared_blocks else 0
    extra = plan.extra_blocks
    numbers = range(extra.stop - 1 - workgroup, plan.geometry.router_rows + 1, len(extra))
    return tasks, shared, len(numbers) if workgroup in extra else 0


UNEVEN = Geometry.small(2).with_(top_k=3, experts=16)


@pytest.mark.parametrize("geometry", [TRUE, Geometry.small(1), Geometry.small(2), UNEVEN])
@pytest.mark.parametrize("width", range(1, 9))
def test_the_shares_of_the_workgroups_are_the_whole(geometry: Geometry, width: int) -> None:
    plan = Plan(geometry, width)
    tasks, shared, extra = (
        sum(column) for column in zip(*(shares(plan, b) for b in range(geometry.blocks)), strict=True)
    )
    assert tasks == geometry.hidden // 16
    assert shared == 2 * geometry.shared_intermediate
    assert extra == geometry.router_rows + 1  # and the shared gate's
    for workgroup in range(geometry.blocks):
        own = shares(plan, workgroup)
        assert own[0] <= plan.project_tiles
        assert own[1] + own[2] <= plan.rows


MOST_OVER_MEAN = 1.15
# Fewest different experts for which the balance is promised: 4 % below the mean of independent rows (512, top 10).
LIKELY = {width: int(0.96 * 512 * (1 - (1 - 10 / 512) ** width)) for width in range(1, 9)}


@pytest.mark.parametrize("width", range(1, 9))
def test_workgroups_stream_the_same_weight_bytes(width: int) -> None:
    """Most over mean, weights only, over every number of experts from the likely ones to the most."""
    plan, g = Plan(TRUE, width), TRUE
    fewest = plan.slots if width == 1 else LIKELY[width]  # a row picks ten different ones
    for slots in range(fewest, plan.slots + 1):
        tasks = slots * plan.mx_blocks
        streamed = []
        for b in range(g.blocks):
            project, shared, extra = shares(plan, b)
            up = len(range(g.blocks - 1 - b, tasks, g.blocks))
            down = 32 * (2 * g.shared_intermediate + slots * (g.moe_intermediate // 2 + g.moe_intermediate // 32))
            streamed.append(
                project * plan.project_tile_bytes + (shared + extra) * 2 * g.hidden + up * plan.up_task_bytes + down
            )
        assert max(streamed) <= MOST_OVER_MEAN * sum(streamed) / g.blocks, f"{slots} experts"
