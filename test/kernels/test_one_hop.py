# SPDX-License-Identifier: Apache-2.0
"""K1 of one hop and the K2 that forms the core of what it leaves: the gates of both, the bits of the two-hop pair."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from helpers import k2_bench as kb
from helpers.k1_gates import Before, checked, failures, same_bits
from helpers.k1_inputs import DEADLINE_TICKS, K1Case, make_case, make_weights, run

from sgl_amd_mono.common.build import build, compile_artifact
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import gdn
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import REGION_NAMES, GdnKey
from sgl_amd_mono.qwen38_a95b_mxfp4.trial_k2 import CoreParts

TP1, TP2, TRUE = Geometry.small(1), Geometry.small(2), Geometry.a95b()
full = pytest.mark.full
PADS = {1: (0,), 2: (1,), 3: (1,), 4: (0, 2), 5: (4,), 6: (0, 5), 7: (3, 4), 8: (0, 2, 7)}
STALL_DEADLINE = 200_000  # 2 ms of the virtual clock
SEEDS, CONTROL_SEEDS, CONTROL_SEEN = 24, 20, 19
OUT_REL_L2 = 2e-2  # of K2's out at the small geometry: a bf16 flip of x that moves an MXFP4 code


def key(geometry: Geometry, width: int, **more: object) -> GdnKey:
    return GdnKey(geometry, width, one_hop=True, stop=False, **more)


# (geometry, width, first layer, state dtype, with pad rows) that `make test` runs; `make test-full` runs the product
SUBSET = {(1, 1, False, "float32", False), (1, 3, False, "bfloat16", True), (2, 8, True, "float32", True)}
PRODUCT = [
    pytest.param(*row, marks=() if row in SUBSET else full, id="-".join(map(str, row)))
    for row in (
        (tp, width, first, dtype, pads)
        for tp in (1, 2)
        for width in range(1, 9)
        for first in (False, True)
        for dtype in ("float32", "bfloat16")
        for pads in (False, True)
    )
]


@pytest.mark.parametrize(("tp", "width", "first", "dtype", "pads"), PRODUCT)
def test_k1_against_the_definition(tp: int, width: int, first: bool, dtype: str, pads: bool) -> None:
    """One hop at every width, also where a wave has units of several rows; a pad row leaves zeros."""
    case = make_case(
        key(Geometry.small(tp), width, first_layer=first, state_dtype=dtype),
        10 * tp + width,
        pads=PADS[width] if pads else (),
    )
    checked(case)
    for row in torch.nonzero(case.state_index <= 0).flatten().tolist():
        assert not case.core[row].any() and not case.core_z[row].any() and not case.core_squares[row].any()


@pytest.mark.parametrize("width", [1, pytest.param(8, marks=full)])
def test_k1_at_the_true_size(width: int) -> None:
    case = make_case(key(TRUE, width), 91, weights=make_weights(TRUE, 90))
    before = Before.of(case)
    result = run(case)
    assert not failures(case, before)
    assert result.hop_chain == [("scratch.PROJ", "device")]


@pytest.mark.parametrize(
    ("geometry", "width"), [(TP2, 2), (TRUE, 1), (TRUE, 8), *(pytest.param(TRUE, w, marks=full) for w in range(2, 8))]
)
def test_resources(geometry: Geometry, width: int) -> None:
    resources = build(key(geometry, width)).resources
    assert resources.vgprs <= 256
    assert (resources.vgpr_spills, resources.scratch_bytes, resources.agprs) == (0, 0, 0)


@cache
def k2_weights(tp: int, form: str = "plain") -> list[kb.RankWeights]:
    return kb.random_weights(Geometry.small(tp), 7, variant=kb.VARIANTS[form])


def behind(case: K1Case, form: str = "plain", **how: object) -> kb.Result:
    """K2 (of a variant) of one rank behind a K1."""
    parts = [CoreParts(case.core, case.core_z, case.core_squares, case.weights.gnorm_w)] if case.key.one_hop else None
    index = case.state_index[: case.key.width].clone()
    step = kb.Inputs([case.core], case.residual_out, index, parts)
    return kb.Bench(TP1, k2_weights(1, form), **how).run(step)


def pair(width: int, one_hop: bool, form: str = "plain", **parts: torch.Tensor) -> tuple[K1Case, kb.Result]:
    """K1 and K2 of a layer; `parts` replace what K1 left."""
    case = make_case(GdnKey(TP1, width, one_hop=one_hop, stop=False), 50 + width, pads=PADS[width] if width > 1 else ())
    run(case)
    for name, change in parts.items():
        getattr(case, name).copy_(change(getattr(case, name)))
    return case, behind(case, form)


PAIRS = {("plain", 1), ("plain", 5), ("mxfp4", 1)}  # that `make test` runs


@pytest.mark.parametrize(
    ("form", "width"),
    [
        pytest.param(form, w, marks=() if (form, w) in PAIRS else full)
        for form in ("plain", "mxfp4", "mxfp4-fused")
        for w in range(1, 9)
    ],
)
def test_the_pair_has_the_bits_of_two_hops(form: str, width: int) -> None:
    (two, want), (one, got) = pair(width, False, form), pair(width, True, form)
    for name in ("out", "residual", "next_z", "next_squares"):
        assert torch.equal(getattr(got, name)[0], getattr(want, name)[0]), name
    for name in ("residual_out", "conv_state", "ssm_state"):
        assert same_bits(getattr(one, name), getattr(two, name)), name


@pytest.mark.parametrize("part", ["core", "core_z", "core_squares"])
def test_a_wrong_part_is_seen(part: str) -> None:
    """Control: two heads' values exchanged in what K1 leaves, in one part."""
    want = pair(1, False)[1]
    got = pair(1, True, **{part: lambda t: t.unflatten(1, (TP1.value_heads, -1)).roll(1, 1).flatten(1)})[1]
    assert not torch.equal(got.out[0], want.out[0])


@pytest.mark.parametrize("width", [2, pytest.param(7, marks=full)])
@pytest.mark.parametrize("memory", ["consistent", "adversarial"])
def test_k2_against_the_definition(width: int, memory: str) -> None:
    """On two ranks, with a pad row whose parts are NaN."""
    step = kb.random_inputs(TP2, width, 12, pads=(1,), gates=True)
    result = kb.Bench(TP2, k2_weights(2), memory=memory, seed=2).run(step)
    want = kb.definition(TP2, k2_weights(2), step)
    live = step.row_index > 0
    assert kb.relative_l2(result.residual[0][live], want.residual[live]) <= 1e-3
    assert kb.relative_l2(result.out[0][live], want.out[live]) <= OUT_REL_L2
    assert not result.out[0][~live].any() and torch.equal(result.out[0], result.out[1])


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s in (3, 8) else full) for s in range(SEEDS)])
def test_bits_do_not_depend_on_the_schedule(seed: int) -> None:
    """Adversarial memory; half of the seeds with several units a wave."""
    width = 1 + seed % 8
    cases = [make_case(key(TP2 if seed % 2 else TP1, width), 60 + seed) for _ in range(2)]
    run(cases[0])
    run(cases[1], memory="adversarial", seed=seed)
    for name in ("core", "core_z", "core_squares", "residual_out", "conv_state", "ssm_state"):
        assert same_bits(*(getattr(case, name) for case in cases)), name


@pytest.mark.parametrize("widths", [(1, 5), pytest.param((2, 3, 4, 6, 7, 8), marks=full)])
def test_batch_invariance(widths: tuple[int, ...]) -> None:
    """A row alone and among others: the same parts, states and residual."""
    wide = make_case(key(TP1, 8), 77)
    for width in widths:
        rows = list(range(width))
        case = dataclasses.replace(
            wide,
            key=key(TP1, width),
            hidden=wide.hidden[rows].clone(),
            residual=wide.residual[rows].clone(),
            state_index=wide.state_index[rows].clone(),
            conv_state=wide.conv_state.clone(),
            ssm_state=wide.ssm_state.clone(),
        )
        run(case)
        if width == widths[0]:
            first = case
        for name in ("core", "core_z", "core_squares", "residual_out"):
            assert same_bits(getattr(case, name)[0], getattr(first, name)[0]), (width, name)


@pytest.mark.parametrize(
    ("workgroup", "at", "regions"),
    [(3, "start", ("PROJ", "BA")), (1, ("store", "BA"), ("BA",)), (20, ("store", "PROJ"), ("PROJ", "LEFT", "WINDOW"))],
    ids=["nothing", "b-rows", "whole-rows"],
)
def test_a_stall_ends_the_launch(workgroup: int, at: object, regions: tuple[str, ...]) -> None:
    from sgl_amd_mono.sim import Stall

    case = make_case(key(TP1, 1), 31)
    before = Before.of(case)
    report = run(case, faults=[Stall(rank=0, workgroup=workgroup, wave=None, at=at)], deadline_ticks=STALL_DEADLINE)
    assert report.stalled and case.fault.failed
    (record,) = case.fault.records
    assert REGION_NAMES[record.region] in regions
    assert STALL_DEADLINE <= report.clock_end - report.clock_start < 3 * STALL_DEADLINE
    slot = int(case.state_index[0])
    written = (case.ssm_state[slot] != before.ssm[slot]).flatten(1).any(1)
    if "BA" in regions and workgroup == 1:  # slice 1 of group 0: b of every head
        assert not written.any()
    assert same_bits(case.conv_state[slot, :128], before.conv[slot, :128]), "the first q window was written"


@full
def test_an_owner_that_does_not_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: q and k windows written without waiting for the workgroups that read them."""
    from sgl_amd_mono.common.sync import Sync
    from sgl_amd_mono.sim import CodeObject, Stall

    poll = Sync.poll

    def no_window(self: Sync, pairs: list, *args: object) -> list | None:
        return None if pairs[0][0].number == REGION_NAMES.index("WINDOW") else poll(self, pairs, *args)

    case = make_case(key(TP1, 1), 35)
    build(case.key)  # not while the mistake is planted
    before = Before.of(case)
    monkeypatch.setattr(Sync, "poll", no_window)
    code = CodeObject.parse(compile_artifact(case.key).isa)
    stall = Stall(rank=0, workgroup=31, wave=None, at=("store", "PROJ"))
    run(case, code=code, faults=[stall], deadline_ticks=STALL_DEADLINE)
    slot = int(case.state_index[0])
    assert not same_bits(case.conv_state[slot, :128], before.conv[slot, :128])


@full
def test_windows_read_behind_the_hand_off_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: workgroups that publish before they have read the windows of their further units."""
    from sgl_amd_mono.sim import CodeObject, SimFault

    width = 8
    build(key(TP1, width))  # not while the mistake is planted
    monkeypatch.setattr(gdn, "windows_read", lambda *_: None)
    load_unit = gdn.load_unit
    monkeypatch.setattr(gdn, "load_unit", lambda c, u, parked=False: load_unit(c, u))
    code = CodeObject.parse(compile_artifact(key(TP1, width)).isa)

    def caught(seed: int) -> bool:
        case = make_case(key(TP1, width), 71)
        before = Before.of(case)
        try:
            run(case, memory="adversarial", seed=seed, code=code, deadline_ticks=DEADLINE_TICKS)
        except SimFault:
            return True
        return case.fault.failed or bool(failures(case, before))

    assert sum(caught(seed) or caught(seed + CONTROL_SEEDS) for seed in range(CONTROL_SEEDS)) >= CONTROL_SEEN
