# SPDX-License-Identifier: Apache-2.0
"""The spec's forward inside SGLang's own model and runner, with K1 and K2 computed by their definitions.

What is checked is everything around the launches: which run, in which order, with which arguments, on which memory,
and what the forward hands on to SGLang. The launches themselves have tests of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import spec_forward

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = len(spec_forward.TOKENS)
LAYERS = ("gdn", "gdn", "gdn", "attention")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "test"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, spec_forward.__file__, str(tmp_path_factory.mktemp("checkpoint"))],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=540,
    )
    if done.returncode:
        raise AssertionError(f"exit {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def test_every_width_is_warmed_up_before_the_first_step(found: dict[str, Any]) -> None:
    """Two K1 (with and without a residual) and one K2 a width, each once in mode 0."""
    assert found["warm-up"] == [["k1", 0, 0], ["k1", 0, 1], ["k2", 0, 128]] * 8
    assert found["deadline ticks"] == 60 * 100_000_000


def test_the_launches_of_a_step(found: dict[str, Any]) -> None:
    """GDN layers run K1 then K2, the attention layer K2; slots, the `last` flag, and a first layer without residual."""
    step = []
    for layer, kind in enumerate(LAYERS):
        if kind == "gdn":
            step.append(["k1", layer, 1, -1, layer > 0])
        step.append(["k2", 128 + layer, 1, int(layer == len(LAYERS) - 1), True])
    assert found["launches"] == step * STEPS
    assert (found["steps"], found["passed on"], found["epochs"]) == (STEPS, 0, STEPS)


def test_no_launch_writes_what_it_reads(found: dict[str, Any]) -> None:
    assert found["aliased"] == 0


def test_logits_are_those_of_sglang(found: dict[str, Any]) -> None:
    """Rows are equal, but for roundings that move an MXFP4 code or a pick and then show in the states that follow."""
    assert found["first step"] < 0.01
    assert found["cosine"] > 0.999 > found["control cosine"]
    assert found["rows equal"] > 0


def test_a_run_repeats_bit_for_bit(found: dict[str, Any]) -> None:
    assert found["again"]


@pytest.mark.parametrize("width", [4, 8])
def test_pad_rows(found: dict[str, Any], width: int) -> None:
    assert found[f"padded to {width}"], "rows differ beside pad rows"
    assert found[f"slot 0 after {width}"], "a pad row wrote the reserved slot"


def test_a_row_alone_is_the_row_in_a_batch(found: dict[str, Any]) -> None:
    assert found["single row"]


def test_pointers_are_read_at_launch(found: dict[str, Any]) -> None:
    assert found["moved pool"] and found["swapped weight"]


@pytest.mark.parametrize(("call", "steps"), [("input_embeds", 1), ("get_embedding", 1), ("aux hidden states", STEPS)])
def test_calls_that_are_not_covered_run_sglangs_forward(found: dict[str, Any], call: str, steps: int) -> None:
    assert found[f"passed on: {call}"] == [steps, 0, True]


def test_observers(found: dict[str, Any]) -> None:
    assert found["observed"] == [
        ["before", "k1", 0, 3],
        ["after", "k1", 0, 3],
        ["before", "k2", 0, 3],
        ["after", "k2", 0, 3],
    ]
    assert found["observed in all"] == 2 * STEPS * (len(LAYERS) + LAYERS.count("gdn"))
    assert found["observed after"] == 0


def test_prefix_cache_tracking(found: dict[str, Any]) -> None:
    """SGLang's own copy of the states is called after each K1 of a step with marked rows, and only then."""
    assert found["tracking"]["unmarked"] == 0
    assert found["tracking"]["calls"] == [[layer, True] for layer in (0, 1, 2)] * STEPS


def test_a_pool_that_does_not_fit_is_refused_at_the_first_step(found: dict[str, Any]) -> None:
    text = found["refused pools"]
    assert text.startswith("StateLayoutError: the state pools do not fit the kernels:")
    where = "layers 0-2 (3 of 3)"
    assert (
        f"{where}: conv state: found torch.float32; needed: torch.bfloat16; fix: unset SGLANG_MAMBA_CONV_DTYPE" in text
    )
    assert f"{where}: SSM state: found torch.bfloat16; needed: torch.float32, as built; fix: --mamba-ssm-dtype" in text


def test_a_lost_wait_gives_no_logits(found: dict[str, Any]) -> None:
    assert found["fault"] == "StepFault: rank 0 failed and left no record"


def test_close(found: dict[str, Any]) -> None:
    assert found["closed"]
