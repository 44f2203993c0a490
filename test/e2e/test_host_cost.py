# SPDX-License-Identifier: Apache-2.0
"""Host cost of a decode step: at most half of the calls of SGLang's own layer, and no tensor of its own in a GDN layer.

What is counted, and down to where, is told in `sgl_amd_mono.simulate.host_cost`. Nothing is timed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sgl_amd_mono.simulate import host_cost
from sgl_amd_mono.simulate.host_cost import MOST, Compared, Counter, render, too_much

TEST_FOLDER = Path(__file__).resolve().parents[1]
KINDS = ["gdn", "gdn", "gdn", "attention"]


@pytest.fixture(scope="module")
def layers() -> list[Compared]:
    return host_cost.run()


def test_a_layer_costs_at_most_half_of_sglangs(layers: list[Compared]) -> None:
    assert [layer.plugin.kind for layer in layers] == KINDS
    assert too_much(layers) == []
    assert all(layer.sglang.calls > 300 for layer in layers), "SGLang's layer was not counted whole"


def test_two_launches_make_a_handful_of_calls(layers: list[Compared]) -> None:
    """K1 and K2 of a GDN layer; more would be work that can be done once."""
    assert layers[1].plugin == layers[2].plugin, "layers of a kind cost the same"
    assert 4 <= layers[1].plugin.calls <= 20 and layers[1].plugin.tensors == 0


def test_the_table(layers: list[Compared]) -> None:
    head, _, *rows, note = render(layers).splitlines()
    assert head.startswith("Host cost of a decode step") and len(rows) == len(KINDS) and "layer 0" in note


@pytest.mark.full
@pytest.mark.parametrize(("control", "line"), [("repacking", "calls, "), ("allocating", "tensors are allocated")])
def test_a_launch_that_does_more_is_seen(monkeypatch: pytest.MonkeyPatch, control: str, line: str) -> None:
    path = os.pathsep.join([str(TEST_FOLDER), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    wrong = too_much(host_cost.run(f"helpers.host_controls:{control}"))
    assert len([text for text in wrong if text.startswith("layer 1 (gdn)") and line in text]) == 1, wrong


# ---- the counter itself


def inner(values: torch.Tensor) -> torch.Tensor:
    return torch.add(values, abs(-1))


def outer(values: torch.Tensor) -> torch.Tensor:
    return inner(inner(values))


def counted(*, tensors: bool = False) -> host_cost.Count:
    counter, values = Counter(["gdn"]), torch.zeros(2)
    with counter.tensors() if tensors else counter.calls():
        counter.layer = 0
        outer(values)
        counter.layer = None
    return counter.counts[0]


def test_calls_are_counted_down_to_the_operation() -> None:
    count = counted()
    assert (count.python, count.c) == (3, 4), "outer, twice inner; each calls abs and torch.add"


def test_allocated_tensors_are_counted() -> None:
    assert counted(tensors=True).tensors == 2


def test_too_much_names_layer_count_and_share() -> None:
    ours, theirs = host_cost.Count("gdn", 60, 1), host_cost.Count("gdn", 100, 0)
    plain = Compared(host_cost.Count("gdn", 1, 0), theirs)
    assert too_much([Compared(ours, theirs), plain]) == [], "layer 0 holds the step's own work"
    assert too_much([plain, Compared(ours, theirs)]) == [
        f"layer 1 (gdn): 61 calls, 61% of SGLang's 100, at most {MOST:.0%}"
    ]
