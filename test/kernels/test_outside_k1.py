# SPDX-License-Identifier: Apache-2.0
"""K1 against SGLang's stock GDN kernels (Triton), both as gfx950 instructions on the simulator, from the same
projections.
"""

from __future__ import annotations

import pytest
import torch
from helpers.k1_inputs import make_case, run
from helpers.stock_kernels import run_stock

from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey

GEOMETRY = Geometry.small(1)
STOCK_SUM_NOISE = 2e-6  # relative L2 of an f32 state after one step, summed in another order


def _compare(width: int, round_beta: bool, state_dtype: str) -> tuple[float, float, bool]:
    """(share of core elements that differ, relative L2 of the states, conv states equal bit for bit)."""
    g = GEOMETRY
    case = make_case(GdnKey(g, width, round_beta=round_beta, state_dtype=state_dtype, stop=False), seed=40 + width)
    conv_before, ssm_before = case.conv_state.clone(), case.ssm_state.clone()
    # Slot 0 holds NaN as a guard; no row of this case names it.
    run(case)
    qkvz, ba = case.products()
    b, a = ba.split(g.value_heads, dim=1)
    stock = run_stock(
        "gdn_decode",
        {
            "mixed_qkv": qkvz[:, : g.conv_channels].contiguous(),
            "conv_state": conv_before,
            "conv_weight": case.weights.conv_w,
            "a": a.contiguous(),
            "b": b.contiguous(),
            "A_log": case.weights.a_log,
            "dt_bias": case.weights.dt_bias,
            "z": qkvz[:, g.conv_channels :].reshape(width, g.value_heads, g.head_dim).contiguous(),
            "norm_weight": case.weights.gnorm_w,
            "ssm_state": ssm_before,
            "state_indices": case.state_index,
            "scale": g.head_dim**-0.5,
            "eps": g.eps,
        },
    )
    slots = case.state_index.long()
    ours, theirs = case.ssm_state[slots].double(), stock["ssm_state"][slots].double()
    differ = (case.core != stock["gated"].reshape(case.core.shape)).float().mean().item()
    relative = ((ours - theirs).norm() / theirs.norm()).item()
    return differ, relative, torch.equal(case.conv_state[slots], stock["conv_state"][slots])


@pytest.mark.parametrize("width", [1, 4])
def test_k1_agrees_with_the_stock_kernels(width: int) -> None:
    """The conv state bit for bit, the core but for a few ties of the last rounding, the f32 state to the noise of its
    sums.
    """
    differ, relative, same_conv = _compare(width, round_beta=True, state_dtype="float32")
    assert same_conv
    assert differ <= 2e-3, f"{differ:.4%} of the core differs"
    assert relative <= STOCK_SUM_NOISE, f"state off by {relative:.2e}"


def test_unrounded_beta_is_another_kernel() -> None:
    """Negative control: with beta kept in f32 the state is off by what one bf16 rounding of beta costs."""
    differ, relative, same_conv = _compare(2, round_beta=False, state_dtype="float32")
    assert same_conv
    assert relative > 100 * STOCK_SUM_NOISE
    assert differ > 0.01
