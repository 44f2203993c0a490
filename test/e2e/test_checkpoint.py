# SPDX-License-Identifier: Apache-2.0
"""The random-weight checkpoint is one on which a difference of the arms means something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.simulate import checkpoint, plugin

HELPERS = Path(__file__).resolve().parents[1] / "helpers"


def test_config_is_that_of_the_geometry() -> None:
    """Both shards are shards of one model; its layers are three GDN layers and one attention layer."""
    shape = checkpoint.shape_of(Geometry.small(1))
    assert shape == checkpoint.shape_of(Geometry.small(2))
    config = shape.hf_config()
    assert config["architectures"] == [plugin.ARCHITECTURE]
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert config["hidden_size"] == 1024 and config["num_experts_per_tok"] == 4


def test_weights_depend_on_the_seed_alone() -> None:
    shape = checkpoint.shape_of(Geometry.small(1))

    def first(seed: int) -> list[tuple[str, int]]:
        stream = checkpoint.tensors(shape, seed, checkpoint.Gains())
        return [(name, hash(tensor.float().sum().item())) for name, tensor in (next(stream) for _ in range(4))]

    assert first(0) == first(0) != first(1)


@pytest.mark.full
@pytest.mark.xdist_group("big")
def test_each_part_moves_the_logits_by_more_than_the_noise(tmp_path: Path) -> None:
    """A part that a launch left out would show in the logits. Twice the noise at least, in root mean square."""
    model, out = checkpoint.write(tmp_path / "model"), tmp_path / "moved.json"
    environment = plugin.environment(tmp_path / "entry_point", "consistent", 0, (1,))
    script = str(HELPERS / "ablation_run.py")
    done = subprocess.run(
        [sys.executable, script, str(model), str(out)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    moved = json.loads(out.read_text())
    assert moved.pop("repeat") == 0.0
    noise = max(value for name, value in moved.items() if name.startswith("noise"))
    assert noise > 0
    weak = {name: value for name, value in moved.items() if not name.startswith("noise") and value < 2 * noise}
    assert weak == {}, f"noise {noise:.4f}"
