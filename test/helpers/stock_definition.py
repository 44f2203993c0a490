# SPDX-License-Identifier: Apache-2.0
"""What SGLang's five GDN kernels compute, one function each, with the roundings of the HIP path stated.

Written from SGLang 0.5.23's Triton sources, apart from K1's own definition (`gdn_naive`). A value is rounded only where
a function says so; everything else has the precision of `arithmetic`: EXACT (float64), so that what is left between a
kernel and its definition is the noise of float32, or `Float32(seed)`, whose sums run in a seeded order, to measure that
noise (`helpers.noise`). Every function takes the values that the kernel before it produced.

`Rule` holds what a mistake would change; `Rule()` is SGLang 0.5.23.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """round_beta: the packed kernel rounds beta to bf16. l2_eps: added to the sum of squares, under the root.
    round_products: the conv's products are bf16. softplus_threshold: softplus(x) is x above it.
    norm_before_gate: the gated norm's order."""

    round_beta: bool = True
    l2_eps: float = 1e-6
    round_products: bool = True
    softplus_threshold: float = 20.0
    norm_before_gate: bool = True


SGLANG = Rule()


class Exact:
    """Float64, sums in any order."""

    wide = torch.float64

    def sum(self, values: Tensor) -> Tensor:
        """Over the last dimension."""
        return values.sum(-1)


class Float32(Exact):
    """Float32; the n terms of a sum in the seeded permutation of n, neighbours added first, as in a tree of lanes.

    Seed 0 takes the terms as they come.
    """

    wide = torch.float32

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def order(self, terms: int) -> Tensor:
        """The permutation that sums of so many terms take."""
        if self.seed == 0:
            return torch.arange(terms)
        return torch.randperm(terms, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + terms))

    def sum(self, values: Tensor) -> Tensor:
        values = values.index_select(-1, self.order(values.shape[-1]))
        while values.shape[-1] > 1:
            even = values.shape[-1] // 2 * 2
            left_over = values[..., even:]
            values = torch.cat([values[..., 0:even:2] + values[..., 1:even:2], left_over], dim=-1)
        return values[..., 0]


EXACT = Exact()


def rounded(value: Tensor) -> Tensor:
    """To bf16, to nearest even, in one rounding also from float64; keeps the type."""
    single = value.to(torch.float32)
    # A float64 that float32 rounds onto the middle of two bf16 values is moved back to its own side.
    off = (single.double() - value.double()).sign()
    tie = (single.view(torch.int32) & 0xFFFF) == 0x8000
    step = torch.where(single > 0, -off, off).to(torch.int32)
    single = torch.where(tie, (single.view(torch.int32) + step).view(torch.float32), single)
    return single.to(torch.bfloat16).to(value.dtype)


def to_bf16(value: Tensor) -> Tensor:
    """`rounded`, as a bf16 tensor."""
    return rounded(value).to(torch.bfloat16)


def gemma_norm(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float, arithmetic: Exact = EXACT
) -> tuple[Tensor, Tensor]:
    """(x, residual_out bf16): z = f32(hidden + residual); x = z / sqrt(mean(z^2) + eps) * (1 + w)."""
    z = hidden.float() if residual is None else hidden.float() + residual.float()
    wide = z.to(arithmetic.wide)
    mean = arithmetic.sum(wide.square())[:, None] / z.shape[-1]
    return wide * (1 / torch.sqrt(mean + eps)) * (1 + weight.to(arithmetic.wide)), z.to(torch.bfloat16)


def split(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, head: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(mixed_qkv, z, b, a): the columns of the projections, copied."""
    channels = (2 * key_heads + value_heads) * head
    return qkvz[:, :channels], qkvz[:, channels:].unflatten(1, (value_heads, head)), *ba.split(value_heads, dim=1)


def conv(
    mixed: Tensor, window: Tensor, weight: Tensor, rule: Rule = SGLANG, arithmetic: Exact = EXACT
) -> tuple[Tensor, Tensor]:
    """(outputs, next windows): mixed (rows, channels), window (rows, channels, 3) old to new, weight (channels, 4).

    Products rounded to bf16; silu of their sum.
    """
    taps = torch.cat([window, mixed[:, :, None]], dim=2)
    products = taps.to(arithmetic.wide) * weight.to(arithmetic.wide)
    total = arithmetic.sum(rounded(products) if rule.round_products else products)
    return total / (1 + torch.exp(-total)), taps[:, :, 1:]


def gates(
    b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, rule: Rule = SGLANG, arithmetic: Exact = EXACT
) -> tuple[Tensor, Tensor]:
    """(decay, beta): exp(-exp(A_log) * softplus(a + dt_bias)); sigmoid(b), rounded to bf16."""
    wide = arithmetic.wide
    x = a.to(wide) + dt_bias.to(wide)
    softplus = torch.where(x <= rule.softplus_threshold, torch.log1p(torch.exp(x)), x)
    beta = torch.sigmoid(b.to(wide))
    return torch.exp(-torch.exp(a_log.to(wide)) * softplus), rounded(beta) if rule.round_beta else beta


def packed_decode(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    scale: float,
    rule: Rule = SGLANG,
    arithmetic: Exact = EXACT,
) -> tuple[Tensor, Tensor]:
    """(core, next state), of mixed (rows, channels) bf16 after the conv and state (rows, value heads, V, K)."""
    _, heads, value, key = state.shape
    width = (mixed.shape[1] - heads * value) // 2
    q, k, v = mixed.to(arithmetic.wide).split([width, width, heads * value], dim=1)
    q, k = (part.unflatten(1, (-1, key)) for part in (q, k))
    q, k = (part / torch.sqrt(arithmetic.sum(part.square())[..., None] + rule.l2_eps) for part in (q, k))
    q, k = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (q * scale, k))
    decay, beta = gates(b, a, a_log, dt_bias, rule, arithmetic)
    state = state.to(arithmetic.wide) * decay[..., None, None]
    new = (v.unflatten(1, (heads, value)) - arithmetic.sum(state * k[:, :, None, :])) * beta[..., None]
    state = state + new[..., None] * k[:, :, None, :]
    return arithmetic.sum(state * q[:, :, None, :]), state


def gated_norm(
    core: Tensor, z: Tensor, weight: Tensor, eps: float, rule: Rule = SGLANG, arithmetic: Exact = EXACT
) -> Tensor:
    """rms_norm(core) * w * silu(z) over the head."""
    x, z = core.to(arithmetic.wide), z.to(arithmetic.wide)
    gate = z / (1 + torch.exp(-z))
    if not rule.norm_before_gate:
        x = x * gate
    mean = arithmetic.sum(x.square())[..., None] / x.shape[-1]
    y = x * (1 / torch.sqrt(mean + eps)) * weight.to(arithmetic.wide)
    return y * gate if rule.norm_before_gate else y


# ---- distances ---------------------------------------------------------------------------------------------------


def _place(value: Tensor) -> Tensor:
    """bf16 values in their order, one step apart; zeros of both signs are one."""
    bits = value.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def ulps(got: Tensor, want: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """Steps of bf16 between `got` (bf16) and the nearest value that `want` +- `noise` rounds to: int32.

    want: bf16, or wider and not rounded yet. noise: what float32 sums may have moved it by, absolute.
    """
    low, high = (_place(to_bf16(want.double() + side * noise)) for side in (-1, 1))
    place = _place(got)
    return torch.maximum(low - place, place - high).clamp(min=0)


# ---- the whole front ---------------------------------------------------------------------------------------------


@dataclass
class Front:
    """What the chain produced: the step's rows in order, every tensor as it is stored (bf16, or the pool's type)."""

    conv: Tensor
    windows: Tensor
    core: Tensor
    state: Tensor
    gated: Tensor


def front(
    mixed: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: dict[str, Tensor],
    windows: Tensor,
    state: Tensor,
    eps: float,
    rule: Rule = SGLANG,
    arithmetic: Exact = EXACT,
) -> Front:
    """Conv update, packed decode and gated norm, each from the stored values of the one before.

    weights: conv_weight, A_log, dt_bias, norm_weight. windows (rows, channels, 3) and state (rows, value heads, V, K):
    the rows' own, before the step.
    """
    conv_out, after = conv(mixed, windows, weights["conv_weight"], rule, arithmetic)
    conv_out = to_bf16(conv_out)
    scale = state.shape[-1] ** -0.5
    core, new = packed_decode(conv_out, b, a, weights["A_log"], weights["dt_bias"], state, scale, rule, arithmetic)
    core = to_bf16(core)
    gated = to_bf16(gated_norm(core, z, weights["norm_weight"], eps, rule, arithmetic))
    new = to_bf16(new) if state.dtype == torch.bfloat16 else new.to(state.dtype)
    return Front(conv_out, after, core, new, gated)
