# SPDX-License-Identifier: Apache-2.0
"""Verify steps (NEXTN / MTP): a hand-built TARGET_VERIFY batch of 4 tokens a request, by K1 and K2, and by K2 alone.

Loaded with SGLang's speculative arguments and check mode, so that every launch is compared with SGLang's own layer.
K2 alone is what a server gets whose drafts K1 does not cover: SGLang's own GDN then keeps the states. In `make test` K1
and K2 as compiled, on the simulator, and K2 by its definition; with `--full` the others too, and K1 beside SGLang's own
Triton kernels as compiled for gfx950.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import verify_run

REPOSITORY = Path(__file__).resolve().parents[2]
LAYERS, GDN_LAYERS = 4, 3
ROWS = {"4 rows": 4, "8 rows": 8, "padded": 4}
STATE_COSINE = 0.9999  # of the spec's NUMERICS
full = pytest.mark.full

pytestmark = pytest.mark.xdist_group("big")


def run(folder: Path, runtime: str, front: str, kernels: str = "torch") -> dict[str, Any]:
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "test"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, verify_run.__file__, str(folder), runtime, front],
        env=os.environ | {"PYTHONPATH": path, "SGLANG_AMD_MONO_CHECK": "1", "SGLANG_AMD_MONO_SIMULATE_STOCK": kernels},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if done.returncode:
        raise AssertionError(f"exit {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1]) | {"front": front}


@pytest.fixture(
    scope="module",
    params=[
        "simulator-k1",
        "double-stock",
        pytest.param("double-k1", marks=full),
        pytest.param("simulator-stock", marks=full),
        pytest.param("simulator-k1-triton", marks=full),
    ],
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("verify"), *request.param.split("-"))


def by_k1(found: dict[str, Any]) -> bool:
    return found["front"] == "k1"


def test_what_is_built_and_the_log_says_so(found: dict[str, Any]) -> None:
    """Two K1 a width (the first layer's and the others'), or none and why."""
    built = found["built"]
    if by_k1(found):
        assert found["launches"] == ["k1"] * 4 + ["k2"] * 2
        assert re.search(r"^rank 0: \S+: k1 of the first layer with float32 state, 4 draft tokens a request, ", built)
        assert re.search(r"; k1 with float32 state, 4 draft tokens a request, widths 4, 8", built)
        assert "no k1" not in built
    else:
        assert found["launches"] == ["k2", "k2"]
        assert re.search(r"^rank 0: \S+: k2, widths 4, 8", built)
        assert built.endswith(
            f"; no k1 for the steps that verify 4 tokens a request: {verify_run.DIFFERENCE}; "
            "SGLang's own GDN runs up to out_proj"
        )


@pytest.mark.parametrize("case", ROWS)
def test_every_launch_is_within_bounds(found: dict[str, Any], case: str) -> None:
    """Rows of a pad request are no rows of the comparison."""
    (line,) = found[case]["log"]
    launches = LAYERS + (GDN_LAYERS if by_k1(found) else 0)
    assert found[case]["steps"] == 1
    assert re.match(rf"check step \d+: {ROWS[case]} rows, {launches} launches within bounds, 0 rows set aside", line)
    assert found[case]["cosine"] > 0.999


@pytest.mark.parametrize("case", ROWS)
def test_states_and_draft_states(found: dict[str, Any], case: str) -> None:
    """A state and a window behind each draft token of every layer; K1 leaves the requests' own states alone."""
    if by_k1(found):
        assert found[case]["states left alone"] == [True, True]
    else:  # the first layer's inputs are the same with the plugin off, and so is SGLang's own GDN on them
        assert found[case]["draft states of the first layer"] == {"drafts": True, "windows": True}
    rows = 8 if case == "padded" and not by_k1(found) else ROWS[case]
    assert GDN_LAYERS * ROWS[case] <= found[case]["draft states written"] <= GDN_LAYERS * rows


@pytest.mark.parametrize("accepted", verify_run.ACCEPTED)
@pytest.mark.parametrize("case", ROWS)
def test_accepted_and_rejected_drafts(found: dict[str, Any], case: str, accepted: str) -> None:
    """After SGLang's commit the states are those of the same step without the plugin: within NUMERICS, and bit for bit
    where SGLang's own GDN ran on equal inputs, which those of the first layer are."""
    states = found[case]["committed"][accepted]
    if not by_k1(found):
        assert states["conv equal in the first layer"] and states["ssm equal in the first layer"]
    assert min(states["conv cosine"], states["ssm cosine"]) >= STATE_COSINE


def test_checking_changes_nothing(found: dict[str, Any]) -> None:
    """Logits, states and draft states of a step are those of the launches, not of SGLang's layers beside them."""
    assert found["checking changes"] == []


def test_a_pad_request_changes_nothing(found: dict[str, Any]) -> None:
    assert found["padded"]["logits"] == found["4 rows"]["logits"]


def test_other_drafts_are_seen(found: dict[str, Any]) -> None:
    """Another draft token: other draft states and logits, another state where it is accepted, none where it is not."""
    assert found["control"] == {"drafts": False, "logits": False, "all rejected": True, "a part": False}


@pytest.mark.parametrize("case", ROWS)
def test_the_batch_is_left_as_sglang_leaves_it(found: dict[str, Any], case: str) -> None:
    """No residual stream stays behind, with check mode on or off."""
    assert found[case]["stream"] == [True, True]
