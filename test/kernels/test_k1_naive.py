# SPDX-License-Identifier: Apache-2.0
"""K1's definition (gdn_naive) against formulas written another way; no kernel is built."""

from __future__ import annotations

import pytest
import torch
from helpers.k1_inputs import make_case

from sgl_amd_mono.common.geometry import GeometryError
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import gdn_naive
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey

SMALL = Geometry.small(1)
SEEN = 6  # a swapped order moves the core that many times further than the roundings do


def independent_front(case):
    """The layer without roundings, one row and one head at a time, in float64: the textbook form.

    norm by torch.nn.functional.rms_norm, conv by conv1d, the delta rule as S (decay) (I - beta k k^T) + beta v k^T.
    """
    g, w = case.key.geometry, case.weights
    functional = torch.nn.functional
    z = case.hidden.double() + (0 if case.residual is None else case.residual.double())
    x = functional.rms_norm(z, (g.hidden,), 1.0 + w.norm_w.double(), g.eps)
    core = torch.zeros(len(x), g.core_width, dtype=torch.float64)
    states = {}
    for t, slot in enumerate(case.state_index.tolist()):
        if slot <= 0:
            continue
        proj = w.w_qkvz.double() @ x[t]
        b, a = (w.w_ba.double() @ x[t]).chunk(2)
        signal = torch.cat([case.conv_state[slot].double(), proj[: g.conv_channels, None]], 1)
        mixed = functional.conv1d(signal[None], w.conv_w.double()[:, None], groups=g.conv_channels)[0, :, 0]
        q, k, v = functional.silu(mixed).split([g.key_width, g.key_width, g.value_width])
        gate = proj[g.conv_channels :].reshape(g.value_heads, g.head_dim)
        for h in range(g.value_heads):
            kh = h // g.heads_per_key
            head = slice(kh * g.head_dim, (kh + 1) * g.head_dim)
            qh = q[head] / (q[head].pow(2).sum() + 1e-6).sqrt() / g.head_dim**0.5
            kk = k[head] / (k[head].pow(2).sum() + 1e-6).sqrt()
            vh = v[h * g.head_dim : (h + 1) * g.head_dim]
            beta = 1 / (1 + torch.exp(-b[h]))
            decay = torch.exp(-w.a_log[h].double().exp() * functional.softplus(a[h] + w.dt_bias[h].double()))
            keep = torch.eye(g.head_dim, dtype=torch.float64) - beta * torch.outer(kk, kk)
            state = decay * case.ssm_state[slot, h].double() @ keep + beta * torch.outer(vh, kk)
            o = functional.rms_norm(state @ qh, (g.head_dim,), w.gnorm_w.double(), g.eps)
            core[t, h * g.head_dim : (h + 1) * g.head_dim] = o * functional.silu(gate[h])
            states[t, h] = state
    return core, states


@pytest.mark.parametrize("first_layer", [False, True])
@pytest.mark.parametrize("geometry", [SMALL, Geometry.small(2)], ids=["tp1", "tp2"])
def test_naive_agrees_with_the_unrounded_formula(geometry: Geometry, first_layer: bool) -> None:
    case = make_case(GdnKey(geometry, 3, first_layer=first_layer), seed=1, pads=(1,))
    core, states = independent_front(case)
    trace = case.naive()
    live = [0, 2]
    error = (trace.core.double() - core)[live].norm(dim=1) / core[live].norm(dim=1)
    assert error.max() < 2e-2  # bf16 roundings of x, the projections and the conv
    assert error.min() > 1e-4  # and they are there
    assert torch.equal(trace.core[1], torch.zeros_like(trace.core[1]))
    for (t, h), state in states.items():
        assert (trace.ssm_rows[t, h] - state).norm() / state.norm() < 2e-2


def test_naive_without_roundings_is_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rounding points switched off the two agree to float64, so nothing but rounding separates them."""
    case = make_case(GdnKey(SMALL, 2, first_layer=True, round_beta=False), seed=2)
    monkeypatch.setattr(gdn_naive, "round_bf16", lambda value: value)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    core, states = independent_front(case)
    trace = case.naive()
    assert (trace.o - 0).isfinite().all()
    for (t, h), state in states.items():
        torch.testing.assert_close(trace.ssm_rows[t, h], state, rtol=1e-11, atol=1e-13)
    error = (trace.core.double() - core).norm() / core.norm()
    assert error < 3e-3  # the core itself is stored as bf16


@pytest.mark.parametrize("swap", ["qk", "ba"])
def test_a_swapped_order_is_seen(swap: str) -> None:
    """Negative control of the oracle: rows of in_proj in another order give another core."""
    case = make_case(GdnKey(SMALL, 1), seed=3)
    core, _ = independent_front(case)
    w, g = case.weights, SMALL
    clean = (case.naive().core.double() - core).norm() / core.norm()
    if swap == "qk":
        w.w_qkvz = torch.cat(
            [w.w_qkvz[g.key_width : 2 * g.key_width], w.w_qkvz[: g.key_width], w.w_qkvz[2 * g.key_width :]]
        )
    else:
        b, a = w.w_ba.chunk(2)
        w.w_ba = torch.cat([a, b])
    trace = case.naive()
    assert (trace.core.double() - core).norm() / core.norm() > SEEN * clean


def test_store_rows_touches_only_live_slots() -> None:
    case = make_case(GdnKey(SMALL, 4), seed=4, pads=(0, 2))
    conv, ssm = case.conv_state.clone(), case.ssm_state.clone()
    trace = case.naive()
    gdn_naive.store_rows(trace, case.state_index, case.conv_state, case.ssm_state)
    named = {int(case.state_index[t]) for t in (1, 3)}
    for slot in range(len(conv)):
        changed = not torch.equal(case.ssm_state[slot].nan_to_num(), ssm[slot].nan_to_num())
        assert changed == (slot in named)
        assert (
            torch.equal(case.conv_state[slot, :, :2].nan_to_num(), conv[slot, :, 1:].nan_to_num()) or slot not in named
        )


class TestGeometry:
    def test_true_sizes(self) -> None:
        g = Geometry.a95b()
        assert (g.qkvz_rows, g.ba_rows, g.conv_channels, g.core_width) == (4608, 32, 2560, 2048)
        assert (g.k_offset, g.v_offset, g.z_offset) == (256, 512, 2560)
        assert (g.whole_tasks, g.leftover_groups, g.leftover_slices, g.ba_slices) == (1, 32, 8, 16)
        assert (g.moe_intermediate, g.shared_intermediate, g.router_rows, g.q_heads) == (256, 256, 64, 8)
        assert [layer for layer in range(8) if g.is_attention(layer)] == [3, 7]
        assert sum(g.is_attention(layer) for layer in range(g.layers)) == 23

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"hidden": 1000}, "hidden"),
            ({"key_heads_total": 3}, "16 / 3 = 5 remainder 1"),
            ({"blocks": 36}, "only z rows may be left over|remainder|need 1, 2, 4, 8"),
            ({"q_heads_total": 16}, "one width"),
            ({"moe_intermediate_total": 100}, "100 / 32 = 3 remainder 4"),
            ({"head_dim": 64}, "head_dim = 64"),
            ({"hidden": 16384}, "at most 64"),
        ],
    )
    def test_refusals_show_the_sum(self, changes: dict, text: str) -> None:
        with pytest.raises(GeometryError, match=text):
            Geometry.small(1).with_(**changes)
