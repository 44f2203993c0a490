# SPDX-License-Identifier: Apache-2.0
"""K2 and its variants at the true size, eight ranks of 256 workgroups in one simulation: the gates of the small tests.

Experts are mapped lazily and only those that some row can pick are filled, so that eight ranks fit in memory.
"""

from __future__ import annotations

import resource
from functools import cache

import pytest
import torch
from helpers import k2_bench as kb
from helpers.noise import TAIL_FLOORS

from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layer_naive as naive

GEOMETRY = Geometry.a95b(8)
WEIGHT_SEED, INPUT_SEED = 31, 32
ROWS = 8
SPARE_EXPERTS = 2  # filled beyond top_k, for a pick that a rounding turns
MEMORY_GIB = 12
LOGIT_SCALE = 0.25  # a smaller logit has the errors of its 8192 terms, whose root mean square is 1.5
# The noise floor of `helpers.noise` is measured at `small`; a row of the true size has eight times the elements, so one
# of them moves it less.
RESIDUAL_SHARE = 60 * TAIL_FLOORS["residual share"]  # 0.009; floor 1.5e-4
OUT_REL = 1.2 * TAIL_FLOORS["out rel"]  # 3e-3; floor 2.5e-3

pytestmark = pytest.mark.xdist_group("big")
WIDTHS = [
    pytest.param("plain", 1, id="s1"),
    pytest.param("plain", 2, id="s2", marks=pytest.mark.full),
    pytest.param("plain", 8, id="s8", marks=pytest.mark.full),
    *(pytest.param(form, 1, id=f"{form}-s1", marks=pytest.mark.full) for form in kb.VARIANTS if form != "plain"),
]
widths = pytest.mark.parametrize(("form", "width"), WIDTHS)


@cache
def weights(form: str) -> list[kb.RankWeights]:
    ranks = kb.random_weights(GEOMETRY, WEIGHT_SEED, experts=(), variant=kb.VARIANTS[form])
    for rank in ranks:
        rank.keep_experts = False
    return ranks


@cache
def inputs(width: int) -> kb.Inputs:
    return kb.random_inputs(GEOMETRY, ROWS, INPUT_SEED).rows(range(width))


filled: dict[str, set[int]] = {form: set() for form in kb.VARIANTS}


@cache
def launch(form: str, width: int) -> kb.Result:
    step = inputs(width)
    likely = set(kb.likely_experts(GEOMETRY, weights(form), step, SPARE_EXPERTS))
    if kb.VARIANTS[form].fused_shared:
        likely.add(GEOMETRY.experts)
    for e in sorted(likely - filled[form]):
        filled[form].add(e)
        for rank, w in enumerate(weights(form)):
            kb.fill_expert(GEOMETRY, w, e, 7_919 * e + rank)
    return kb.Bench(GEOMETRY, weights(form)).run(step, last=1)


@cache
def expected(form: str, width: int) -> naive.LayerTrace:
    launch(form, width)  # fills the experts
    return kb.definition(GEOMETRY, weights(form), inputs(width))


def differing(steps: torch.Tensor) -> float:
    return float((steps > 0).double().mean())


@widths
def test_residual_and_logits(form: str, width: int) -> None:
    result, want = launch(form, width), expected(form, width)
    assert not any(f.failed for f in result.faults)
    steps = kb.ulps(result.residual[0], want.residual)
    assert int(steps.max()) <= 1
    assert differing(steps) <= RESIDUAL_SHARE
    own = naive.logits(result.x(), weights(form)[0].tensors["w_router"])
    assert float(kb.ulps_at(result.logits(), own, LOGIT_SCALE).max()) <= 1
    assert float(kb.ulps_at(result.logits(), want.logits, LOGIT_SCALE).max()) <= 1


@widths
def test_route(form: str, width: int) -> None:
    result = launch(form, width)
    ids, route_weights = kb.route_given_logits(result, inputs(width).row_index > 0)
    got_ids, got_weights = result.route(7)
    assert torch.equal(got_ids, ids)
    assert float((got_weights - route_weights).abs().max()) <= 1e-6
    assert set(ids.flatten().tolist()) <= filled[form]


@widths
def test_output(form: str, width: int) -> None:
    result, want = launch(form, width), expected(form, width)
    for t in range(width):
        assert kb.relative_l2(result.out[0][t], want.out[t]) <= OUT_REL
    given, size = kb.out_given_stages(result, inputs(width))
    assert float(kb.ulps_at(result.out[0], given, size).max()) <= 2
    assert float((result.out[0] != given).double().mean()) <= 0.01


@widths
def test_ranks_agree_bit_for_bit(form: str, width: int) -> None:
    result = launch(form, width)
    for rank in range(1, GEOMETRY.tp):
        assert torch.equal(result.out[rank], result.out[0])
        assert torch.equal(result.residual[rank], result.residual[0])


@pytest.mark.full
@pytest.mark.parametrize("width", [1, 2])
def test_widths_agree_bit_for_bit(width: int) -> None:
    result, widest = launch("plain", width), launch("plain", ROWS)
    assert torch.equal(result.out[0], widest.out[0][:width])
    assert torch.equal(result.residual[0], widest.residual[0][:width])


def test_memory_stays_within_bounds() -> None:
    """Resident memory of the process after a launch; the eight ranks' experts alone are mapped at 13 GiB."""
    launch("plain", 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 <= MEMORY_GIB


@pytest.mark.parametrize(
    "form", ["plain", *(pytest.param(f, marks=pytest.mark.full) for f in kb.VARIANTS if f != "plain")]
)
def test_hops(form: str) -> None:
    """Three hand-offs over peer memory and two inside the GPU, then those that end a step."""
    chain = [region.removesuffix(".odd").split(".")[1] for region, _ in launch(form, 1).report.hop_chain]
    assert chain == ["AR", "MSQ", "RLOG", "INTER", "FINAL", "MARKS", "fault"]
