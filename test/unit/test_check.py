# SPDX-License-Identifier: Apache-2.0
"""Check mode's machinery without a model: metrics, bounds, ties, lines, table; and that it costs nothing when unset."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_amd_mono.common import check
from sgl_amd_mono.common.check import (
    TIE_ULPS,
    Checker,
    CheckFailed,
    CheckReport,
    Compared,
    Kept,
    bf16_ulp,
    row_differences,
    tied_choices,
)

BOUNDS = {"k1.core.cosine": 0.9999, "k1.res_out.max_abs": 0.0, "k2.out.rel": 0.15}


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), ("", False)])
def test_the_variable(monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool) -> None:
    monkeypatch.setenv(check.VARIABLE, value)
    assert check.asked() is wanted


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(check.VARIABLE, raising=False)
    assert not check.asked()
    monkeypatch.setenv(check.VARIABLE, "yes")
    with pytest.raises(ValueError) as error:
        check.asked()
    assert str(error.value) == (
        "SGLANG_AMD_MONO_CHECK: found 'yes'; needed: 1 (check every launch), 0 or unset; "
        "fix: set SGLANG_AMD_MONO_CHECK=1"
    )


def test_metrics_are_those_of_each_row() -> None:
    wanted = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [3.0, 4.0]])
    found = torch.tensor([[1.0, 0.0], [1.0, 2.0], [0.0, 0.0], [float("nan"), 4.0]])
    rows = row_differences(found, wanted)
    assert rows.cosine.tolist() == pytest.approx([1.0, 2 / 5**0.5, 1.0, -1.0])
    assert rows.rel.tolist() == [0.0, 0.5, 0.0, float("inf")]
    assert rows.max_abs.tolist() == [0.0, 1.0, 0.0, float("inf")]


def test_ties() -> None:
    """The gap is measured in bf16 units at the k-th logit: at the bound it is a tie, above it is none."""
    kth = torch.tensor([1.5])
    ulp = float(bf16_ulp(kth))
    gaps = [0.0, TIE_ULPS * ulp, (TIE_ULPS + 1) * ulp]
    logits = torch.tensor([[3.0, 1.5, 1.5 - gap, -1.0] for gap in gaps])
    assert [bool(tied_choices(row, 2)) for row in logits] == [True, True, False]
    assert [bool(tied_choices(row, 1)) for row in logits] == [False, False, False]


def compared(rows: list[int], cosine: list[float], **more: Any) -> Compared:
    values = torch.tensor(cosine, dtype=torch.float64)
    zeros = torch.zeros_like(values)
    same = check.RowDifferences(torch.ones_like(values), zeros, zeros)
    return Compared(rows, {"core": check.RowDifferences(values, zeros, zeros), "res_out": same}, **more)


def test_a_breach_names_layer_launch_row_metric_value_and_bound() -> None:
    report = CheckReport(BOUNDS)
    assert report.add("k1", 4, compared([0, 2], [1.0, 0.99995])) == []
    assert report.add("k1", 5, compared([0, 2], [0.99, 0.5])) == [
        "layer 5, launch k1, row 2: k1.core.cosine = 0.5, bound 0.9999"
    ]
    assert report.add("k2", 5, compared([0], [1.0])) == ["layer 5, launch k2: k2.out.rel: nothing was compared"]
    assert report.add("k1", 6, compared([1], [1.0], wrong=[(3, "the core of a pad row is not zero")])) == [
        "layer 6, launch k1, row 3: the core of a pad row is not zero"
    ]


def test_a_step_line_and_the_table() -> None:
    report = CheckReport({"k1.core.cosine": 0.9999, "k2.out.rel": 0.15})
    report.add("k1", 4, compared([0, 2], [1.0, 0.99995]))
    line = report.end_step()
    start = "check step 1: 2 rows, 1 launches within bounds, 0 rows set aside; "
    assert line == start + "worst: k1.core.cosine 0.99995 (layer 4 row 2)"
    report.add("k1", 7, compared([5], [0.99999]))
    assert "k1.core.cosine 0.99999 (layer 7 row 5)" in report.end_step(), "a step's line is of that step"
    header, _, core, out = report.table().splitlines()
    assert header == "check mode: 2 steps, 2 launches, 3 rows, 0 rows set aside as ties"
    assert core.split() == ["k1.core.cosine", ">=", "0.9999", "0.99995", "3", "step", "1", "layer", "4", "row", "2"]
    assert out.split() == ["k2.out.rel", "<=", "0.15", "-", "0", "not", "seen"]


def test_an_empty_step_has_a_line() -> None:
    report = CheckReport(BOUNDS)
    report.add("k1", 0, compared([], []))
    assert report.end_step().endswith("worst: no row held a request")


@pytest.mark.parametrize(("rows", "aside", "fails"), [(10, 1, False), (10, 2, True), (200, 2, False), (200, 3, True)])
def test_more_than_one_percent_of_ties_fails(rows: int, aside: int, fails: bool) -> None:
    report = CheckReport(BOUNDS)
    report.add("k1", 0, compared(list(range(rows - aside)), [1.0] * (rows - aside), set_aside=aside))
    assert bool(report.too_many_ties()) is fails
    if fails:
        assert report.too_many_ties().startswith(f"{aside} of {rows} rows (")


class Steps:
    """A step object with one launch a step; `cosines` are what its launches compare at."""

    def __init__(self, cosines: list[float]) -> None:
        self.before_launch: list[Any] = []
        self.observers: list[Any] = []
        self.closing: list[Any] = []
        self.steps, self.cosines = 0, list(cosines)

    def forward(self, plan: Any) -> str:
        self.steps += 1
        for hook in (*self.before_launch, *self.observers):
            hook(SimpleNamespace(kind="k1", layer=3))
        return "logits"

    def before(self, event: Any) -> list[Kept]:
        return [Kept(event.kind, event.layer, {}, None, None)]

    def after(self, event: Any, kept: list[Kept]) -> None:
        kept[0].outputs = {"core": torch.tensor(self.cosines.pop(0))}

    def compare(self, kept: Kept) -> Compared:
        return compared([0], [float(kept.outputs["core"])])


PLAN = SimpleNamespace(key=SimpleNamespace(batch_size=2))


def test_an_eager_step_is_checked_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sgl_amd_mono.common.check")
    step = Steps([1.0, 0.5])
    Checker(step, BOUNDS, capturing=lambda: False).attach(step)
    assert step.forward(PLAN) == "logits"
    with pytest.raises(CheckFailed) as error:
        step.forward(PLAN)
    text = "check mode, rank 0, step 2: layer 3, launch k1, row 0: k1.core.cosine = 0.5, bound 0.9999"
    assert str(error.value) == text
    first, breach, table = (record.getMessage() for record in caplog.records)
    assert first.startswith("check step 1: 1 rows, 1 launches within bounds") and breach == text
    assert table.startswith("rank 0: check mode: 1 steps, 2 launches")
    for closing in step.closing:
        closing()
    assert len(caplog.records) == 3, "the table is written once"


def test_a_captured_step_is_checked_at_each_replay() -> None:
    step, capturing = Steps([1.0]), [True]
    checker = Checker(step, BOUNDS, capturing=lambda: capturing[0])
    checker.attach(step)
    step.forward(PLAN)
    capturing[0] = False
    assert checker.report.launches == 0 and len(checker.captured[2]) == 1
    checker.replayed(7)  # a graph of SGLang's own forward
    assert checker.report.steps == 0
    checker.replayed(2)
    assert checker.report.steps == 1
    checker.captured[2][0].outputs["core"].fill_(0.5)  # what a replay left in the graph's copy
    with pytest.raises(CheckFailed, match=r"step 2: layer 3, launch k1, row 0: k1\.core\.cosine = 0\.5"):
        checker.replayed(2)


def test_other_ranks_write_no_step_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sgl_amd_mono.common.check")
    step = Steps([1.0])
    checker = Checker(step, BOUNDS, rank=1, capturing=lambda: False)
    checker.attach(step)
    step.forward(PLAN)
    checker.close()
    assert [record.getMessage().splitlines()[0] for record in caplog.records] == [
        "rank 1: check mode: 1 steps, 1 launches, 1 rows, 0 rows set aside as ties"
    ]


def test_sglangs_layers_track_no_state_beside_a_launch() -> None:
    """Inside `untouched` no row is marked for the prefix cache; mask and residual stream are put back, always."""
    from sgl_amd_mono.qwen38_a95b_mxfp4.check import untouched

    mask, stream = torch.ones(2, dtype=torch.bool), torch.ones(2, 4)
    batch = SimpleNamespace(residual_stream=stream, mamba_track_mask=mask)
    with pytest.raises(RuntimeError), untouched(batch):
        assert batch.mamba_track_mask is None
        batch.residual_stream = None
        raise RuntimeError
    assert batch.mamba_track_mask is mask and batch.residual_stream is stream
