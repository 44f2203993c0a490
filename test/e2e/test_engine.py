# SPDX-License-Identifier: Apache-2.0
"""SGLang's own Engine with two tensor-parallel ranks in two processes, plugin off and on, over its scheduler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.counting_runtime import COUNT_VARIABLE

from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.simulate import checkpoint, plugin
from sgl_amd_mono.simulate.harness import STOCK

TEST_FOLDER = Path(__file__).resolve().parents[1]
PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16]]
TOKENS = 5
ALLOWED = 1.0
"""Log-probabilities may differ by so much: four times the noise that `simulate --ranks 2` measures on this model."""


def generate(folder: Path, model: Path, *, on: bool, ranks: int, stock: str) -> list[dict[str, Any]]:
    """Tokens and best log-probabilities of each request, by an Engine in a process of its own."""
    out, job = folder / f"on-{on}.json", folder / f"job-{on}.json"
    job.write_text(
        json.dumps(
            {
                "checkpoint": str(model),
                "ranks": ranks,
                "plugin": on,
                "prompts": PROMPTS,
                "tokens": TOKENS,
                "out": str(out),
            }
        )
    )
    environment = plugin.environment(folder / "entry_point", "consistent", 0, (1, 2), spawned=True, stock=stock)
    environment |= {
        plugin.RUNTIME_VARIABLE: "helpers.counting_runtime:factory",
        COUNT_VARIABLE: str(folder),
        "PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], str(TEST_FOLDER)]),
    }
    script = TEST_FOLDER / "helpers" / "engine_run.py"
    done = subprocess.run(
        [sys.executable, str(script), str(job)], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.full
@pytest.mark.xdist_group("big")
@pytest.mark.parametrize("stock", STOCK)
def test_two_ranks_generate_alike(stock: str, tmp_path: Path) -> None:
    """Greedy answers agree up to the first token that is no more decided than the noise; both ranks launched alike.

    With "triton" the prefill is that of SGLang's own kernels, in each of the processes that its Engine starts.
    """
    model = checkpoint.write(tmp_path / "model")
    off = generate(tmp_path, model, on=False, ranks=2, stock=stock)
    assert not list(tmp_path.glob("rank*.txt")), "the plugin ran although its flag was not given"
    on = generate(tmp_path, model, on=True, ranks=2, stock=stock)
    launches = [(tmp_path / f"rank{rank}.txt").read_text().split() for rank in range(2)]
    assert launches[0] == launches[1]
    kernels = [(tmp_path / f"stock{rank}.txt").read_text().split() for rank in range(2)]
    assert kernels[0] == kernels[1]
    assert ("chunk_fwd_kernel_o" in kernels[0]) == (stock == "triton")
    geometry = Geometry.small(2)
    a_step = [
        k for layer in range(geometry.layers) for k in (("k2",) if geometry.is_attention(layer) else ("k1", "k2"))
    ]
    assert launches[0] == a_step * (len(launches[0]) // len(a_step)) and len(launches[0]) >= len(a_step) * (TOKENS - 1)
    compared = 0
    for request_off, request_on in zip(off, on, strict=True):
        assert len(request_off["tokens"]) == TOKENS
        assert request_off["tokens"][0] == request_on["tokens"][0], "the prefill is SGLang's in both"
        for token in range(TOKENS):
            best_off, best_on = request_off["best"][token], request_on["best"][token]
            same = request_off["tokens"][token] == request_on["tokens"][token]
            assert same or best_off[0] - best_off[1] <= ALLOWED
            if not same:
                break  # the answers have parted: what follows has another prefix
            assert abs(best_off[0] - best_on[0]) <= ALLOWED
            compared += 1
    assert compared >= TOKENS
