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
    FUSED_WAITS,
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
UNMARKED = {
    ("plain", "qwen38-a95b", 1),
    ("plain", "qwen38-a95b", 8),
    ("plain", "small", 8),
    ("mxfp4", "qwen38-a95b", 5),
}
BUILDS = [
    pytest.param(
        form, g, w,
        id=f"{form}-{g.name}-tp{g.tp}-s{w}",
        marks=() if (form, g.name, w) in UNMARKED else pytest.mark.full,
    )
    for form in kb.VARIANTS
    for g in (TRUE, Geometry.small(1), Geometry.small(2))
    for w in range(1, 9)
]  # fmt: skip
EVERY_FORM = [pytest.param(TRUE, "plain", id="true")] + [
    pytest.param(g, form, id=f"{g.name}-{form}", marks=() if (g, form) in unmarked else pytest.mark.full)
    for form in kb.VARIANTS
    for g in (TRUE, Geometry.small(2))
    for unmarked in [{(Geometry.small(2), "plain"), (Geometry.small(2), "mxfp4"), (Geometry.small(2), "fused")}]
    if (g, form) != (TRUE, "plain")
]


@pytest.mark.parametrize(("form", "geometry", "width"), BUILDS)
def test_resources(form: str, geometry: Geometry, width: int) -> None:
    found = kb.artifact(geometry, width, False, kb.VARIANTS[form]).resources
    assert found.refusals() == []
    assert found.sgpr_spills <= SGPR_SPILLS_MAX
    assert found.agprs == 0


@pytest.mark.parametrize(("geometry", "form"), EVERY_FORM)
def test_scopes_of_hand_offs(geometry: Geometry, form: str) -> None:
    """Pairs are single 8-byte accesses: sc1 inside the GPU, sc0 sc1 between GPUs; rows go and come with sc1."""
    isa = kb.artifact(geometry, 1, False, kb.VARIANTS[form]).isa
    pairs = re.findall(r"global_(load|store)_dwordx2 [^\n]*?((?: sc0)?(?: sc1)?)(?: nt)?\n", isa)
    loads = {scope.strip() for kind, scope in pairs if kind == "load"}
    stores = [scope.strip() for kind, scope in pairs if kind == "store"]
    assert set(stores) - {""} == {"sc1", "sc0 sc1"}
    assert stores.count("") == 1, "a pair is stored without a scope"  # next_z, which a later launch reads
    assert loads <= {"sc1", "sc0 sc1", ""}
    assert re.search(r"buffer_load_dwordx4 [^\n]* sc1\n", isa)
    assert re.search(r"global_store_dword [^\n]*[^0] sc1\n", isa)  # REDUCED


@pytest.mark.parametrize(("geometry", "form"), EVERY_FORM)
def test_weights_are_streamed_once(geometry: Geometry, form: str) -> None:
    """Weight loads carry nt; experts are multiplied by the scaled MFMA on fp4, never converted to bf16."""
    variant = kb.VARIANTS[form]
    isa = kb.artifact(geometry, 1, False, variant).isa
    least = 16 - 4 * (variant.fused_shared + (variant.projection == "mxfp4"))  # w_sd, and three quarters of w_o
    assert len(re.findall(r"_load_dwordx4 [^\n]* nt\n", isa)) >= least
    assert re.search(r"v_mfma_scale_f32_16x16x128_f8f6f4 [^\n]*cbsz:4 blgp:4", isa)
    assert "v_cvt_scalef32_pk_bf16_fp4" not in isa


def test_regions_do_not_overlap_and_are_inside() -> None:
    for geometry in (TRUE, Geometry.small(1), Geometry.small(2)):
        for width in range(1, 9):
            for fused in (False, True):
                assert_disjoint(scratch_regions(geometry, width, fused), scratch_bytes(geometry, width, fused))
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


def test_a_variant_that_does_not_fit_is_refused() -> None:
    small = Geometry.small(1)
    with pytest.raises(GeometryError, match="projection = 'fp8'"):
        LayerKey(geometry=small, width=1, projection="fp8")
    with pytest.raises(GeometryError, match="shared_intermediate = 512, fused into experts of 256"):
        LayerKey(geometry=small.with_(moe_intermediate_total=256), width=1, fused_shared=True)
    with pytest.raises(GeometryError, match="top_k = 15"):
        LayerKey(geometry=small.with_(top_k=14), width=1, fused_shared=True)


@pytest.mark.parametrize("width", [0, 9])
def test_a_width_out_of_range_is_refused(width: int) -> None:
    with pytest.raises(GeometryError, match=f"width = {width}"):
        LayerKey(geometry=Geometry.small(1), width=width)


@pytest.mark.parametrize(("geometry", "form"), EVERY_FORM)
def test_every_wait_is_bounded(geometry: Geometry, form: str) -> None:
    """Each poll loop sleeps, reads the clock and looks at the error word; there is one for each kind of wait."""
    isa = kb.artifact(geometry, 1, False, kb.VARIANTS[form]).isa
    waits = FUSED_WAITS if kb.VARIANTS[form].fused_shared else WAITS
    assert isa_text.unbounded_polls(isa) == []
    assert len(isa_text.poll_loops(isa)) >= len(waits) - 1  # SHARED (or INTER) and GATE are one batch
    blind = "\n".join(line for line in isa.splitlines() if "s_memrealtime" not in line)
    assert isa_text.unbounded_polls(blind)


@pytest.mark.parametrize(("geometry", "form"), EVERY_FORM)
def test_the_rows_are_complete_before_their_flag(geometry: Geometry, form: str) -> None:
    isa = kb.artifact(geometry, 1, False, kb.VARIANTS[form]).isa
    assert flags_before_drain(isa) == []
    undrained = "\n".join(line for line in isa.splitlines() if "s_waitcnt vmcnt(0)" not in line)
    assert flags_before_drain(undrained)


def flags_before_drain(isa: str) -> list[isa_text.Line]:
    """Pair stores that follow a store of a row without `vmcnt(0)` in between (a wave stores both itself)."""
    waiting, bad = False, []
    for line in isa_text.lines_of(isa):
        if line.mnemonic == "global_store_dword" and isa_text.is_scoped_store(line):
            waiting = True
        elif line.mnemonic == "s_waitcnt" and "vmcnt(0)" in line.text:
            waiting = False
        elif waiting and line.mnemonic == "global_store_dwordx2" and isa_text.is_scoped_store(line):
            bad.append(line)
    return bad


@pytest.mark.parametrize(("geometry", "form"), EVERY_FORM)
def test_a_lost_wait_ends_the_process_in_a_stop_build(geometry: Geometry, form: str) -> None:
    """The server's build stores to address 0 before a wave leaves; the tests' build does not."""
    variant = kb.VARIANTS[form]
    stop = build(variant.key(geometry, 1, stop=True))
    waits = FUSED_WAITS if variant.fused_shared else WAITS
    # The kernel's own end may stand between the leaving paths, in a block of its own.
    assert isa_text.leaves_without_fault(stop.isa) in ([], [[]])
    assert len(isa_text.leaves_without_fault(kb.artifact(geometry, 1, False, variant).isa)) > len(waits) - 1


def shares(plan: Plan, workgroup: int) -> tuple[int, int, int]:
    """(output projection tasks, whole rows of the shared expert, further rows) of a workgroup, from the plan."""
    each, more, few = plan.project_tasks
    tasks = each + (workgroup < more) if workgroup < plan.light_blocks else few
    shared = plan.shared_rows if workgroup < plan.shared_blocks else 0
    extra = plan.extra_blocks
    numbers = range(extra.stop - 1 - workgroup, plan.geometry.router_rows + 1, len(extra))
    return tasks, shared, len(numbers) if workgroup in extra else 0


UNEVEN = Geometry.small(2).with_(top_k=3, experts=16)


@pytest.mark.parametrize("form", kb.VARIANTS)
@pytest.mark.parametrize("geometry", [TRUE, Geometry.small(1), Geometry.small(2), UNEVEN])
@pytest.mark.parametrize("width", range(1, 9))
def test_the_shares_of_the_workgroups_are_the_whole(geometry: Geometry, width: int, form: str) -> None:
    plan = Plan(geometry, width, kb.VARIANTS[form].projection, kb.VARIANTS[form].fused_shared)
    tasks, shared, extra = (
        sum(column) for column in zip(*(shares(plan, b) for b in range(geometry.blocks)), strict=True)
    )
    assert tasks == geometry.hidden // 16
    assert shared == (0 if plan.fused_shared else 2 * geometry.shared_intermediate)
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
