# SPDX-License-Identifier: Apache-2.0
"""A server with a prefix cache, plugin off and on: what the second pass takes from the cache, the plugin's steps wrote.

Each request comes again, continued by its own answer: its prefill starts from the states behind the first answer's last
decode step. SGLang keeps those states in the form without an extra buffer here; the form with one (a copy of marked
rows after each step) needs a GPU platform, and its call is tested in test_spec_forward.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sgl_amd_mono.simulate import checkpoint, plugin

TEST_FOLDER = Path(__file__).resolve().parents[1]
PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16]]
TOKENS = 6
ALLOWED = 1.0
"""Log-probabilities may differ by so much: four times the noise that `simulate` measures on this model."""


def passes(folder: Path, model: Path, on: bool) -> list[list[dict[str, Any]]]:
    out, job = folder / f"on-{on}.json", folder / f"job-{on}.json"
    job.write_text(
        json.dumps({"checkpoint": str(model), "plugin": on, "prompts": PROMPTS, "tokens": TOKENS, "out": str(out)})
    )
    values = plugin.environment(folder / "entry_point", "consistent", 0, (1, 2), spawned=True)
    values |= {
        plugin.RUNTIME_VARIABLE: "helpers.spec_double:DoubleRuntime",
        "PYTHONPATH": os.pathsep.join([values["PYTHONPATH"], str(TEST_FOLDER)]),
    }
    script = TEST_FOLDER / "helpers" / "prefix_run.py"
    done = subprocess.run(
        [sys.executable, str(script), str(job)], env=values, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert ("monokernel qwen38" in done.stdout + done.stderr) == on
    return json.loads(out.read_text())


@pytest.mark.full
@pytest.mark.xdist_group("big")
def test_the_second_pass_starts_from_the_cached_states(tmp_path: Path) -> None:
    model = checkpoint.write(tmp_path / "model")
    off, on = passes(tmp_path, model, False), passes(tmp_path, model, True)
    for first_off, first_on, prompt in zip(off[0], on[0], PROMPTS, strict=True):
        assert first_off["tokens"] == first_on["tokens"], "the second prompts are the same"
        assert first_off["cached"] == first_on["cached"] == 0 < len(prompt)
    for second_off, second_on in zip(off[1], on[1], strict=True):
        assert second_off["cached"] == second_on["cached"] > len(PROMPTS[0]), "states behind decode steps were taken"
        for token, (best_off, best_on) in enumerate(zip(second_off["best"], second_on["best"], strict=True)):
            assert abs(best_off[0] - best_on[0]) <= ALLOWED
            if second_off["tokens"][token] != second_on["tokens"][token]:
                assert token and best_off[0] - best_off[1] <= ALLOWED
                break  # a tie: what follows has another prefix
