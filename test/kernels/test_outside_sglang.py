# SPDX-License-Identifier: Apache-2.0
"""SGLang's stock GDN and attention kernels on the simulator against their definitions in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.stock_kernels import run_stock

KEY_HEADS, VALUE_HEADS, HEAD, ROWS, SLOTS = 2, 16, 128, 3, 6
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * HEAD
EPS, SOFTPLUS_LIMIT, L2_EPS = 1e-6, 20.0, 1e-6


def _inputs(state_dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(31)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    return {
        "mixed_qkv": normal(ROWS, CHANNELS).bfloat16(),
        # The state pool keeps channels innermost, as SGLang's does.
        "conv_state": normal(SLOTS, 3, CHANNELS).bfloat16().transpose(1, 2),
        "conv_weight": normal(CHANNELS, 4, scale=0.5).bfloat16(),
        "a": normal(ROWS, VALUE_HEADS).bfloat16(),
        "b": normal(ROWS, VALUE_HEADS).bfloat16(),
        "A_log": normal(VALUE_HEADS, scale=0.3),
        "dt_bias": normal(VALUE_HEADS, scale=0.3),
        "z": normal(ROWS, VALUE_HEADS, HEAD).bfloat16(),
        "norm_weight": 1 + normal(HEAD, scale=0.1),
        "ssm_state": normal(SLOTS, VALUE_HEADS, HEAD, HEAD, scale=0.2).to(state_dtype),
        "state_indices": torch.tensor([4, 1, 3], dtype=torch.int32),
        "scale": HEAD**-0.5,
        "eps": EPS,
    }


def _conv(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(convolved rows in float64 before rounding, conv state after); the kernel multiplies in bf16, so every product
    is rounded.
    """
    slots = given["state_indices"].long()
    window = torch.cat([given["conv_state"][slots], given["mixed_qkv"][:, :, None]], dim=2)
    total = (window * given["conv_weight"]).double().sum(2)
    after = given["conv_state"].clone()
    after[slots] = window[:, :, 1:]
    return total * torch.sigmoid(total), after


def _delta_rule(given: dict[str, Any], qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(core, state after) in float64 from the convolved bf16 rows; beta is rounded to bf16, as the packed kernel
    does.
    """
    rows = qkv.double()
    q, k, v = rows.split([KEY_HEADS * HEAD, KEY_HEADS * HEAD, VALUE_HEADS * HEAD], dim=1)
    group = VALUE_HEADS // KEY_HEADS
    q, k = (x.view(ROWS, KEY_HEADS, HEAD).repeat_interleave(group, dim=1) for x in (q, k))
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    v = v.view(ROWS, VALUE_HEADS, HEAD)
    x = given["a"].double() + given["dt_bias"].double()
    softplus = torch.where(x <= SOFTPLUS_LIMIT, torch.log1p(torch.exp(x)), x)
    decay = torch.exp(-torch.exp(given["A_log"].double()) * softplus)
    beta = torch.sigmoid(given["b"].float()).bfloat16().double()
    slots = given["state_indices"].long()
    state = given["ssm_state"][slots].double() * decay[:, :, None, None]
    residual = (v - torch.einsum("rhvk,rhk->rhv", state, k)) * beta[:, :, None]
    state = state + residual[..., None] * k[:, :, None, :]
    return torch.einsum("rhvk,rhk->rhv", state, q * given["scale"]), state


def _gated(given: dict[str, Any], core: torch.Tensor) -> torch.Tensor:
    x, z = core.double(), given["z"].double()
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * given["norm_weight"].double()
    return normed * z * torch.sigmoid(z)


def _assert_bf16(got: torch.Tensor, want: torch.Tensor, differ: float) -> None:
    """bf16 results equal the rounded float64 ones but for a few ties, which are next to them."""
    rounded = want.bfloat16()
    wrong = got != rounded
    assert wrong.float().mean() <= differ, f"{int(wrong.sum())} of {wrong.numel()} elements differ"
    # The difference of a flipped rounding: one unit in the last place, 2^-7 of the value at most, and the noise of
    # f32 sums.
    assert ((got.double() - want).abs() <= want.abs() * 2**-7 + 1e-5).all()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stock_gdn_kernels(state_dtype: torch.dtype) -> None:
    given = _inputs(state_dtype)
    out = run_stock("gdn_decode", given)
    conv, conv_state = _conv(given)
    _assert_bf16(out["conv"], conv, 0.001)
    assert torch.equal(out["conv_state"], conv_state)
    core, state = _delta_rule(given, out["conv"])
    _assert_bf16(out["core"], core, 0.005)
    slots = given["state_indices"].long()
    got = out["ssm_state"][slots].double()
    limit = 2e-6 if state_dtype is torch.float32 else 2**-8
    assert (got - state).norm() / state.norm() < limit
    untouched = [slot for slot in range(SLOTS) if slot not in slots.tolist()]
    assert torch.equal(out["ssm_state"][untouched], given["ssm_state"][untouched])
    _assert_bf16(out["gated"], _gated(given, out["core"]), 0.005)
    # Negative control: a rule that forgets beta is far outside the gate.
    wrong, _ = _delta_rule({**given, "b": given["b"] + 1}, out["conv"])
    assert (out["core"] != wrong.bfloat16()).float().mean() > 0.5


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


@pytest.mark.full
def test_stock_gdn_prefill_in_chunks() -> None:
    """Two sequences of unequal length through the chunked kernels (MFMA, triangular solve, scans) against token by
    token.
    """
    key_heads, value_heads, bounds, slots = 2, 4, (0, 60, 100), (2, 0)
    generator = torch.Generator().manual_seed(32)
    tokens = bounds[-1]
    q, k = (torch.randn(1, tokens, key_heads, HEAD, generator=generator).bfloat16() for _ in range(2))
    v = torch.randn(1, tokens, value_heads, HEAD, generator=generator).bfloat16()
    given = {
        "q": q,
        "k": k,
        "v": v,
        "g": -0.3 * torch.rand(1, tokens, value_heads, generator=generator),
        "beta": torch.rand(1, tokens, value_heads, generator=generator).bfloat16(),
        "state": 0.1 * torch.randn(3, value_heads, HEAD, HEAD, generator=generator),
        "state_indices": torch.tensor(slots, dtype=torch.int32),
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
        "scale": HEAD**-0.5,
    }
    out = run_stock("gdn_prefill", given)
    group = value_heads // key_heads
    qn, kn = (_normalised(x[0].double()).repeat_interleave(group, dim=1) for x in (q, k))
    want = torch.zeros(tokens, value_heads, HEAD, dtype=torch.float64)
    for first, end, slot in zip(bounds, bounds[1:], slots):
        state = given["state"][slot].double()
        for t in range(first, end):
            state = state * torch.exp(given["g"][0, t].double())[:, None, None]
            residual = v[0, t].double() - torch.einsum("hvk,hk->hv", state, kn[t])
            state = state + (residual * given["beta"][0, t].double()[:, None])[..., None] * kn[t][:, None, :]
            want[t] = torch.einsum("hvk,hk->hv", state, qn[t] * given["scale"])
        # The chunk's operands are rounded to bf16: 2^-9 relative each.
        assert (out["state"][slot].double() - state).norm() / state.norm() < 1e-2
    assert (out["out"][0].double() - want).norm() / want.norm() < 1e-2
    assert torch.equal(out["state"][1], given["state"][1]), "a slot that no sequence names was written"


def test_stock_decode_attention() -> None:
    """Grouped-query decode attention over a scattered cache, one to four splits a row."""
    heads, key_heads, head, slots, lengths = 8, 2, 256, 200, (70, 33, 5)
    generator = torch.Generator().manual_seed(33)
    q = torch.randn(len(lengths), heads, head, generator=generator).bfloat16()
    k, v = (torch.randn(slots, key_heads, head, generator=generator).bfloat16() for _ in range(2))
    ends = torch.tensor(lengths).cumsum(0)
    given = {
        "q": q,
        "k": k,
        "v": v,
        "indptr": torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
        "indices": torch.randperm(slots, generator=generator)[: sum(lengths)],
        "splits": torch.tensor([4, 2, 1], dtype=torch.int32),
        "max_splits": 4,
        "scale": head**-0.5,
    }
    out = run_stock("decode_attention", given)["out"]
    want = torch.zeros_like(q, dtype=torch.float64)
    for row, end in enumerate(ends.tolist()):
        mine = given["indices"][end - lengths[row] : end]
        for h in range(heads):
            scores = k[mine, h // (heads // key_heads)].double() @ q[row, h].double() * given["scale"]
            want[row, h] = torch.softmax(scores, 0) @ v[mine, h // (heads // key_heads)].double()
    # One rounding of the probabilities and one of the result to bf16.
    assert (out.double() - want).norm() / want.norm() < 4e-3
