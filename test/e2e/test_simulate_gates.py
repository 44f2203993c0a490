# SPDX-License-Identifier: Apache-2.0
"""The gates of a simulated run turn red for what they are there for. No SGLang process is started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sgl_amd_mono.common.check import Difference, bf16_ulp, difference, failures, tied_choices
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.simulate import report
from sgl_amd_mono.simulate.compare import NOISE_MULTIPLE, LaunchRecord, digest, judge_logits
from sgl_amd_mono.simulate.session import Options, Outcome


def test_difference_is_the_worst_row() -> None:
    wanted = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    found = torch.tensor([[1.0, 0.0], [1.0, 2.0], [0.0, 0.0]])
    worst = difference(found, wanted)
    assert worst.cosine == pytest.approx(2 / 5**0.5)
    assert worst.rel == pytest.approx(0.5)
    assert worst.max_abs == 1.0
    assert difference(wanted, wanted) == Difference(1.0, 0.0, 0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_breaks_every_bound(value: float) -> None:
    worst = difference(torch.tensor([[value, 1.0]]), torch.tensor([[1.0, 1.0]]))
    assert failures("k1", {"core": worst}, {"k1.core.cosine": 0.5, "k1.core.rel": 1.0, "k1.core.max_abs": 9.0}) != []
    assert len(failures("k1", {"core": worst}, {"k1.core.rel": 1.0, "k1.core.max_abs": 9.0})) == 2


def test_a_zero_row_against_something_is_wrong() -> None:
    assert difference(torch.zeros(1, 4), torch.ones(1, 4)).cosine == 0.0
    assert difference(torch.ones(1, 4), torch.zeros(1, 4)).rel == float("inf")


def test_bounds_apply_to_their_launch_and_need_their_output() -> None:
    bounds = {"k1.core.cosine": 0.9999, "k2.out.rel": 0.1}
    good = Difference(1.0, 0.0, 0.0)
    assert failures("k1", {"core": good}, bounds) == []
    assert failures("k2", {"out": Difference(1.0, 0.2, 0.0)}, bounds) == ["k2.out.rel: 0.2, bound 0.1"]
    assert failures("k2", {}, bounds) == ["k2.out.rel: nothing was compared"]


def test_bf16_ulp() -> None:
    values = torch.tensor([1.0, 1.99, 2.0, -8.5])
    for value, ulp in zip(values, bf16_ulp(values), strict=True):
        assert float(ulp) == float(2.0 ** (torch.floor(torch.log2(value.abs())) - 7))


def logits(rows: int = 2, vocab: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_logits_are_judged_by_the_noise() -> None:
    off = [logits()]
    noise = [[off[0] + 0.01 * torch.sign(off[0])]]
    assert judge_logits(off, [off[0] + 0.03], noise).ok
    assert not judge_logits(off, [off[0] + 0.05], noise).ok
    spike = off[0].clone()
    spike[0, 3] += 0.05
    assert not judge_logits(off, [spike], noise).ok
    assert not judge_logits(off, [off[0] * float("nan")], noise).ok
    with pytest.raises(ValueError, match="at least one run"):
        judge_logits(off, off, [])


def test_a_decided_token_must_not_flip() -> None:
    off = [torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.99, 0.0]])]
    noise = [[off[0] + 0.01]]
    swapped = off[0][:, [1, 0, 2]]
    verdict = judge_logits(off, [swapped], noise)
    assert (verdict.rows, verdict.decided, verdict.flipped) == (2, 1, 1)
    assert NOISE_MULTIPLE * verdict.noise == pytest.approx(0.04, rel=1e-4)


def outcome(**changes: Any) -> Outcome:
    """A run that passes: one case, one step, on the small geometry."""
    options = Options(rows=((1, 1),), steps=1, moe="torch")
    geometry = Geometry.small(1)
    a, b = logits(1, seed=1), logits(1, seed=2)
    records = [
        LaunchRecord(0, 0, kind, layer, 1, 1, row_errors=[1e-4 if kind == "k2" else 1e-7])
        for layer in range(geometry.layers)
        for kind in (("k2",) if geometry.is_attention(layer) else ("k1", "k2"))
    ]
    fronts = sum(not geometry.is_attention(layer) for layer in range(geometry.layers))
    stock = dict.fromkeys(report.STOCK_OF_A_STEP, (fronts, 1000))
    off = {"logits": [[a, b]], "noise": [[[a, b + 0.01]]], "ranks_agree": True, "moe": {}}
    off["stock"] = {kernel: (2 * ran, 2000) for kernel, (ran, _) in stock.items()}  # as it is, and in another order
    on = {"logits": [[a.clone(), b + 0.005]], "records": records, "routed": (1, 0), "ranks_agree": True, "stock": stock}
    on["moe"] = {}
    on.update(changes)
    return Outcome(options, off, on, {"plugin off": 1.0})


def test_a_right_run_passes_and_prints() -> None:
    run = outcome()
    verdict = report.judge(run)
    assert verdict.problems == []
    text = report.render(run, verdict)
    assert "PASS" in text and "k1 on layers [0, 1, 2]; k2 on layers [0, 1, 2, 3]" in text
    assert report.as_dict(run, verdict)["ok"] is True


def test_a_launch_that_did_not_run_fails() -> None:
    run = outcome()
    del run.on["records"][2]
    assert any("1 launches did not run" in problem for problem in report.judge(run).problems)
    assert any("passed 1 on" in problem for problem in report.judge(outcome(routed=(0, 1))).problems)


def test_a_broken_bound_fails_and_names_the_launch() -> None:
    run = outcome()
    run.on["records"][3].failures = ["k2.out.rel: 1, bound 0.1"]
    verdict = report.judge(run)
    assert verdict.problems == ["case 1 step 1 layer 1 k2: k2.out.rel: 1, bound 0.1"]
    assert "FAIL" in report.render(run, verdict)


def test_a_prefill_that_differs_fails() -> None:
    run = outcome()
    run.on["logits"][0][0] = run.on["logits"][0][0] + 1e-6
    assert any("prefill" in problem for problem in report.judge(run).problems)


def test_ranks_that_differ_fail() -> None:
    run = outcome()
    run.on["records"].append(replace(run.on["records"][1], digest="other"))
    assert "case 1 step 1 layer 0 k2: the ranks' outputs differ" in report.judge(run).problems
    assert "plugin on: the ranks' logits differ" in report.judge(outcome(ranks_agree=False)).problems
    one, other = torch.ones(2, 3), torch.ones(2, 3)
    assert digest(one) == digest(other) != digest(one + 1)


def test_an_error_of_every_row_fails_although_each_is_in_bounds() -> None:
    run = outcome()
    for record in run.on["records"]:
        record.row_errors = [0.02 if record.kind == "k2" else 1e-7]
    assert any("in the median row" in problem for problem in report.judge(run).problems)


def test_a_rounding_that_shows_in_every_row_of_a_layer_fails() -> None:
    """A single row may be off by what a flipped bf16 unit costs; a layer whose rows all are has another rounding."""
    run = outcome()
    first = next(record for record in run.on["records"] if record.kind == "k1" and record.layer == 1)
    first.row_errors = [3e-4, 1e-7, 1e-7]
    assert report.judge(run).problems == []
    first.row_errors = [1e-3, 1.1e-3, 1e-7]
    assert report.judge(run).problems == ["layer 1 k1.state: relative error 0.001 in the median row, bound 1e-05"]
    first.row_errors = [float("nan")]
    assert any("layer 1 k1.state" in problem for problem in report.judge(run).problems)


@pytest.mark.parametrize("arm", ["off", "on"])
def test_a_stock_kernel_that_did_not_run_fails(arm: str) -> None:
    run = outcome()
    del getattr(run, arm)["stock"][report.STOCK_OF_A_STEP[1]]
    (problem,) = report.judge(run).problems
    assert problem.startswith(f"plugin {arm}: SGLang's {report.STOCK_OF_A_STEP[1]} ran 0 times, needed: ")
    run.options = replace(run.options, stock="torch")
    assert report.judge(run).problems == []


def test_amd_s_moe_that_did_not_run_fails() -> None:
    run = outcome()
    run.options = replace(run.options, moe="amd")
    layers = Geometry.small(1).layers
    run.off["moe"], run.on["moe"] = {"a.co": 3 * layers, "b.co": layers}, {"a.co": 2 * layers}
    assert report.judge(run).problems == []
    for record in run.on["records"]:  # what is too much for the stand-in is within the bf16 additions of AMD's
        record.row_errors = [8e-3 if record.kind == "k2" else 1e-7]
    assert report.judge(run).problems == []
    run.on["moe"]["a.co"] -= 1
    (problem,) = report.judge(run).problems
    assert problem == f"plugin on: AMD's fused MoE ran {2 * layers - 1} times, needed: {2 * layers}"


def test_choices_of_tied_experts() -> None:
    logits = torch.tensor([3.0, 1.0, 5.0, 1.0, 1.0, -2.0])
    assert tied_choices(logits, 2) == []
    assert tied_choices(logits, 3) == [[2, 0, 1], [2, 0, 3], [2, 0, 4]]
    assert tied_choices(logits, 4) == [[2, 0, 1, 3], [2, 0, 1, 4], [2, 0, 3, 4]]
    near = torch.tensor([1.0, 1.0 - 2 / 256, 1.0 - 9 / 256])  # two bf16 units at 1 are 4/256
    assert tied_choices(near, 1) == [[0], [1]]


def test_too_many_ties_fail() -> None:
    run = outcome()
    for record in run.on["records"]:
        record.ties = 1
    assert any("another choice of tied experts" in problem for problem in report.judge(run).problems)
