# SPDX-License-Identifier: Apache-2.0
"""SGLang's own Triton kernels under its own model: prefill, and check mode's replay beside each launch of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from helpers import stock_run

from sgl_amd_mono.simulate import harness, rocm_import

REPOSITORY = Path(__file__).resolve().parents[2]
FRONTS, LAYERS = 3, 4  # GDN layers of the `small` geometry, and all of them

pytestmark = pytest.mark.xdist_group("stock")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "test"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "SGLANG_AMD_MONO_SIMULATE_STOCK": "triton"}
    command = [sys.executable, stock_run.__file__, str(tmp_path_factory.mktemp("stock"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise AssertionError(f"exit {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def test_only_the_kernel_modules_see_rocm(found: dict[str, Any]) -> None:
    """The kernels' launch parameters are those of ROCm; the rest of SGLang and the process afterwards are not on it."""
    seen = found["platforms"]
    assert seen["kernels"] == [True] * 6
    assert not any(seen["others"])
    assert seen["imported by a kernel"] == [True, False]
    assert seen["device count"] == 0 and not seen["aiter asked for"]
    assert seen["bound on ROCm only"] == "sglang.kernels.ops.attention.triton_gdn_fused_proj"


def test_the_prefill_runs_them(found: dict[str, Any]) -> None:
    prefill = found["prefill"]
    for kernel in (
        "_causal_conv1d_fwd_kernel",
        "chunk_fwd_kernel_o",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "chunk_gated_delta_rule_fwd_kkt_solve_kernel",
        "chunk_local_cumsum_scalar_kernel",
        "fused_gdn_gating_kernel",
        "fused_qkv_split_gdn_prefill_kernel",
        "fused_qkvzba_split_reshape_cat_contiguous_kernel",
        "recompute_w_u_fwd_kernel",
        "_layer_norm_fwd_1pass_kernel",
    ):
        assert prefill[kernel] == FRONTS, kernel
    assert prefill["l2norm_fwd_kernel"] == 2 * FRONTS  # q and k
    assert prefill["_fwd_kernel"] == LAYERS - FRONTS  # the attention layer's prefill
    assert prefill["_gemma_rmsnorm_kernel"] == 1
    assert prefill["_gemma_fused_add_rmsnorm_kernel"] == 2 * LAYERS


def test_check_mode_replays_them_beside_each_launch(found: dict[str, Any]) -> None:
    """A step without check mode runs SGLang's attention layer; with it, each launch's own layer as well."""
    beside = found["beside a step"]
    for kernel in (
        "_causal_conv1d_update_kernel",
        "fused_recurrent_gated_delta_rule_packed_decode_kernel",
        "fused_qkvzba_split_reshape_cat_contiguous_kernel",
        "_layer_norm_fwd_1pass_kernel",
    ):
        assert beside[kernel] == FRONTS, kernel
    assert beside["_fused_gate_sigmoid_mul_add_kernel"] >= LAYERS  # K2's MoE block, again where experts tie
    assert beside["_fwd_grouped_kernel_stage1"] == 2 * (LAYERS - FRONTS)
    assert "chunk_fwd_kernel_o" not in beside
    checked = found["checked"]
    assert checked["equal"], "checking changed the logits"
    assert checked["log"][0].startswith("check step 1: 3 rows, 7 launches within bounds, ")


def test_a_planted_mistake_stops_the_step(found: dict[str, Any]) -> None:
    assert "layer 1, launch k1" in found["weight"]["error"] and "bound" in found["weight"]["error"]


def test_what_is_there_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that were imported for another platform cannot be moved to this one."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, rocm_import.MODULES[2], types.ModuleType("early"))
    with pytest.raises(RuntimeError, match=rf"{rocm_import.MODULES[2]}.*needed: harness.prepare\(\) before SGLang"):
        rocm_import.install()


@pytest.mark.parametrize("asked", ["triton", "interpreter"])
def test_a_process_has_one_form_of_the_kernels(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_stock", "torch")
    with pytest.raises(ValueError, match=asked):
        harness.chosen_stock(asked)
    assert harness.chosen_stock() == "torch"
