# SPDX-License-Identifier: Apache-2.0
"""Verify steps (NEXTN / MTP): K2 runs a hand-built TARGET_VERIFY batch of 4 tokens a request, K1 is not built.

Loaded with SGLang's speculative arguments and check mode, so that every K2 is compared with SGLang's own layer.
In `make test` as compiled, on the simulator; with `--full` by the definition too.
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

pytestmark = pytest.mark.xdist_group("big")


@pytest.fixture(scope="module", params=["simulator", pytest.param("double", marks=pytest.mark.full)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "test"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, verify_run.__file__, str(tmp_path_factory.mktemp("verify")), request.param],
        env=os.environ | {"PYTHONPATH": path, "SGLANG_AMD_MONO_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if done.returncode:
        raise AssertionError(f"exit {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def test_no_k1_is_built_and_the_log_says_so(found: dict[str, Any]) -> None:
    assert found["launches"] == ["k2", "k2"]
    assert re.search(r"^rank 0: \S+: k2, widths 4, 8", found["built"])
    assert found["built"].endswith(
        "; no k1: steps verify 4 tokens a request, and k1 keeps no state a draft token; "
        "SGLang's own GDN runs up to out_proj"
    )


@pytest.mark.parametrize("case", ROWS)
def test_every_k2_is_within_bounds(found: dict[str, Any], case: str) -> None:
    """Rows of a pad request are no rows of the comparison."""
    (line,) = found[case]["log"]
    assert found[case]["steps"] == 1
    assert re.match(rf"check step \d+: {ROWS[case]} rows, {LAYERS} launches within bounds, 0 rows set aside", line)
    assert found[case]["cosine"] > 0.999


@pytest.mark.parametrize("case", ROWS)
def test_all_drafts_rejected(found: dict[str, Any], case: str) -> None:
    """The states that a rejection keeps are bit for bit those of the same step without the plugin."""
    assert found[case]["states as before"] == {"conv": True, "ssm": True}
    # a state a draft token was written; the first layer's inputs are the same in both, so are its draft states
    assert found[case]["draft states of the first layer"] == {"drafts": True, "windows": True}
    rows = 8 if case == "padded" else ROWS[case]
    assert found[case]["draft states written"] >= GDN_LAYERS * ROWS[case]
    assert found[case]["draft states written"] <= GDN_LAYERS * rows


def test_a_pad_request_changes_nothing(found: dict[str, Any]) -> None:
    assert found["padded"]["logits"] == found["4 rows"]["logits"]


def test_other_drafts_are_seen(found: dict[str, Any]) -> None:
    assert found["control"] == {"conv": True, "ssm": True, "drafts": False, "logits": False}


@pytest.mark.parametrize("case", ROWS)
def test_the_batch_is_left_as_sglang_leaves_it(found: dict[str, Any], case: str) -> None:
    """No residual stream stays behind, with check mode on or off."""
    assert found[case]["stream"] == [True, True]
