# SPDX-License-Identifier: Apache-2.0
"""K1 (the GDN front) in plain PyTorch: float64 with the rounding points that the kernel states. The definition.

One function a stage, in the kernel's order. Values that the kernel rounds to bf16 are rounded here at the same place
(float64 -> float32 -> bf16, to nearest even); everything between is float64. `z = hidden + residual` is a float32 sum,
because both the residual that is written and the norm start from that sum; the norm states its float32 roundings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.layout import dequantize_mxfp4, quantize_mxfp4, scale_code_even

L2_EPS = 1e-6  # of the q and k norms, added to the sum of squares
SOFTPLUS_LINEAR_ABOVE = 20.0  # softplus(x) = x above


def round_bf16(value: Tensor) -> Tensor:
    """Round float64 to bf16 (to nearest even, through float32); returns float64."""
    return value.to(torch.float32).to(torch.bfloat16).to(torch.float64)


@dataclass
class GdnWeights:
    """Weights of one GDN front. Shapes per rank, see Geometry."""

    norm_w: Tensor  # bf16 [hidden], applied as 1 + w
    w_qkvz: Tensor  # bf16 [qkvz_rows, hidden], or MXFP4: uint8 [qkvz_rows, hidden / 2]
    w_ba: Tensor  # bf16 [ba_rows, hidden], or MXFP4: uint8 [ba_rows, hidden / 2]
    conv_w: Tensor  # bf16 [conv_channels, 4]
    a_log: Tensor  # f32 [value_heads]
    dt_bias: Tensor  # bf16 [value_heads]
    gnorm_w: Tensor  # bf16 [128], applied as w
    w_qkvz_scale: Tensor | None = None  # uint8 e8m0 [qkvz_rows, hidden / 32] of an MXFP4 weight
    w_ba_scale: Tensor | None = None


@dataclass
class GdnTrace:
    """What every stage produced, float64 unless named; rows are the step's rows."""

    residual_out: Tensor  # bf16 [S, hidden]
    x: Tensor  # [S, hidden]
    proj: Tensor  # [S, qkvz_rows]
    ba: Tensor  # [S, ba_rows]
    q: Tensor  # [S, key_heads, 128], normalised and scaled
    k: Tensor  # [S, key_heads, 128], normalised
    v: Tensor  # [S, value_heads, 128]
    decay: Tensor  # [S, value_heads]
    beta: Tensor  # [S, value_heads]
    o: Tensor  # [S, value_heads, 128]
    core: Tensor  # bf16 [S, value_heads * 128]
    ssm_rows: Tensor  # [S, value_heads, 128, 128], state after the row, before it is stored (pad rows: undefined)
    conv_rows: Tensor  # bf16 [S, conv_channels, 3], conv window after the row (pad rows: undefined)
    live: Tensor  # bool [S], False for pad rows


def residual_and_norm(hidden: Tensor, residual: Tensor | None, norm_w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(residual_out bf16, x float64): z = f32(h) + f32(r); residual_out = bf16(z); x = bf16((z*rstd)*(1+w)).

    The mean is float64; rstd, 1 + w and both products of x are rounded to float32, as SGLang's norm does.
    """
    z = hidden.float() if residual is None else hidden.float() + residual.float()
    rstd = torch.rsqrt(z.double().square().mean(-1, keepdim=True) + eps).float()
    x = (z * rstd) * (1.0 + norm_w.float())
    return z.to(torch.bfloat16), round_bf16(x.double())


def project(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """bf16(x @ weight^T): [S, hidden] x [rows, hidden] -> [S, rows].

    With `scale` the weight is MXFP4 (packed uint8 [rows, hidden / 2], codes uint8 [rows, hidden / 32]), and so is x:
    each 32 columns of a row of the bf16 x are rounded to e2m1 (to nearest even) under the power of two of
    `scale_code_even`, as SGLang's Quark W4A4 linear does. The products are exact, the sum is float64.
    """
    if scale is None:
        return round_bf16(x @ weight.double().T)
    quantised = dequantize_mxfp4(*quantize_mxfp4(x.float(), scale_code_even))
    return round_bf16(quantised @ dequantize_mxfp4(weight, scale).T)


def silu(value: Tensor) -> Tensor:
    return value / (1.0 + torch.exp(-value))


def conv_update(new: Tensor, window: Tensor, conv_w: Tensor) -> tuple[Tensor, Tensor]:
    """One conv step: new [S, C], window [S, C, 3] (old to new), weights [C, 4] -> (bf16 outputs [S, C], next window).

    Each product is rounded to bf16, the four are summed left to right, then silu, then bf16.
    """
    taps = torch.cat([window.double(), new.double().unsqueeze(-1)], dim=-1)
    products = round_bf16(taps * conv_w.double())
    total = products[..., 0] + products[..., 1] + products[..., 2] + products[..., 3]
    return round_bf16(silu(total)), taps[..., 1:].to(torch.bfloat16)


def l2norm(value: Tensor) -> Tensor:
    return value * torch.rsqrt((value * value).sum(-1, keepdim=True) + L2_EPS)


def gates(b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, round_beta: bool) -> tuple[Tensor, Tensor]:
    """(decay, beta), each [S, value_heads]: exp(-exp(A_log) * softplus(a + dt_bias)) and sigmoid(b)."""
    t = a + dt_bias.double()
    softplus = torch.where(t > SOFTPLUS_LINEAR_ABOVE, t, torch.log1p(torch.exp(t.clamp(max=SOFTPLUS_LINEAR_ABOVE))))
    decay = torch.exp(-torch.exp(a_log.double()) * softplus)
    beta = torch.sigmoid(b)
    return decay, round_bf16(beta) if round_beta else beta


def delta_rule(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Gated delta rule: state [S, NV, V, K], q and k [S, NV, K], v [S, NV, V] -> (o bf16 values, next state).

    S *= decay; p = S k; S += beta (v - p) k^T; o = bf16(S q).
    """
    state = state * decay[..., None, None]
    p = (state * k[..., None, :]).sum(-1)
    state = state + ((v - p) * beta[..., None])[..., None] * k[..., None, :]
    return round_bf16((state * q[..., None, :]).sum(-1)), state


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """bf16((o * rstd * w) * silu(z)) over heads of 128: o, z [S, NV, 128] -> float64 [S, NV, 128]."""
    rstd = torch.rsqrt((o * o).mean(-1, keepdim=True) + eps)
    return round_bf16(o * rstd * weight.double() * silu(z))


def core_of_parts(o: Tensor, z: Tensor, squares: Tensor, gnorm_w: Tensor, eps: float) -> Tensor:
    """The gated core bf16 [S, NV * 128] of what a one-hop K1 leaves: o, z bf16 [S, NV * 128], the sums of o^2 of the
    units f32 [S, units]."""
    heads = (-1, gnorm_w.shape[0])
    total = squares.double().unflatten(1, (-1, squares.shape[1] * heads[1] // o.shape[1])).sum(-1, keepdim=True)
    rstd = torch.rsqrt(total / heads[1] + eps)
    o, z = o.double().unflatten(1, heads), z.double().unflatten(1, heads)
    return round_bf16(o * rstd * gnorm_w.double() * silu(z)).flatten(1).to(torch.bfloat16)


def gdn_front(
    geometry: Geometry,
    weights: GdnWeights,
    hidden: Tensor,
    residual: Tensor | None,
    state_index: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    *,
    round_beta: bool = True,
    products: tuple[Tensor, Tensor] | None = None,
    draft_tokens: int = 0,
) -> GdnTrace:
    """K1 of one layer on one rank.

    hidden, residual bf16 [S, hidden] (residual None: the model's first layer); state_index int32 [>= S], <= 0 marks a
    pad row; conv_state bf16 [slots, channels, 3]; ssm_state f32 or bf16 [slots, value_heads, 128, 128].
    `products`: (in_proj_qkvz [S, qkvz_rows], in_proj_ba [S, ba_rows]) to go on from, instead of those computed here: a
    kernel's own, so that a product that lies between two bf16 values does not hide what comes after it.
    `draft_tokens`: a verify step; the rows of a request are so many tokens, one after another, and `state_index` names
    requests. The state between two tokens is not rounded to the pool's type, as in SGLang's kernel.
    Nothing is changed in place: the rows after the step are in the trace, `store_rows` writes them into pools.
    """
    g = geometry
    rows, tokens = hidden.shape[0], draft_tokens or 1
    index = state_index[: rows // tokens].long()
    slot = torch.where(index > 0, index, torch.zeros_like(index))
    live = (index > 0).repeat_interleave(tokens)

    residual_out, x = residual_and_norm(hidden, residual, weights.norm_w, g.eps)
    proj = project(x, weights.w_qkvz, weights.w_qkvz_scale) if products is None else products[0].double()
    ba = project(x, weights.w_ba, weights.w_ba_scale) if products is None else products[1].double()

    mixed, window = proj[:, : g.conv_channels], conv_state[slot]
    conv_out, conv_rows = torch.empty_like(mixed), torch.empty(rows, *window.shape[1:], dtype=torch.bfloat16)
    for token in range(tokens):
        at = slice(token, None, tokens)
        conv_out[at], window = conv_update(mixed[at], window, weights.conv_w)
        conv_rows[at] = window
    q = l2norm(conv_out[:, : g.key_width].reshape(rows, g.key_heads, g.head_dim)) * g.head_dim**-0.5
    k = l2norm(conv_out[:, g.key_width : 2 * g.key_width].reshape(rows, g.key_heads, g.head_dim))
    v = conv_out[:, 2 * g.key_width :].reshape(rows, g.value_heads, g.head_dim)

    decay, beta = gates(ba[:, : g.value_heads], ba[:, g.value_heads :], weights.a_log, weights.dt_bias, round_beta)
    state = ssm_state[slot].double()
    o, ssm_rows = torch.empty_like(v), torch.empty(rows, *state.shape[1:], dtype=torch.float64)
    q_heads, k_heads = (value.repeat_interleave(g.heads_per_key, dim=1) for value in (q, k))
    for token in range(tokens):
        at = slice(token, None, tokens)
        o[at], state = delta_rule(state, q_heads[at], k_heads[at], v[at], decay[at], beta[at])
        ssm_rows[at] = state
    z = proj[:, g.z_offset :].reshape(rows, g.value_heads, g.head_dim)
    core = gated_norm(o, z, weights.gnorm_w, g.eps).reshape(rows, g.core_width)
    core = torch.where(live[:, None], core, torch.zeros_like(core)).to(torch.bfloat16)
    return GdnTrace(residual_out, x, proj, ba, q, k, v, decay, beta, o, core, ssm_rows, conv_rows, live)


def store_rows(trace: GdnTrace, state_index: Tensor, conv_state: Tensor, ssm_state: Tensor) -> None:
    """Write the live rows' states into the pools, in place, rounding to the pools' dtypes (to nearest even)."""
    for row in torch.nonzero(trace.live).flatten().tolist():
        slot = int(state_index[row])
        conv_state[slot] = trace.conv_rows[row]
        ssm_state[slot] = trace.ssm_rows[row].to(torch.float32).to(ssm_state.dtype)


def store_drafts(trace: GdnTrace, draft_index: Tensor, draft_conv: Tensor, draft_ssm: Tensor, tokens: int) -> None:
    """Write the states after every token of the live requests to their places, [place, token], in place."""
    for row in torch.nonzero(trace.live).flatten().tolist():
        place, token = int(draft_index[row // tokens]), row % tokens
        draft_conv[place, token] = trace.conv_rows[row]
        draft_ssm[place, token] = trace.ssm_rows[row].to(torch.float32).to(draft_ssm.dtype)
