# SPDX-License-Identifier: Apache-2.0
"""PyTorch in the place of SGLang's Triton kernels, with the roundings of the HIP path.

Each function has the signature of the SGLang function that it stands in for (named in its docstring; ``harness``
installs them). Computed in float32 and rounded where the Triton kernel rounds; sums run through ``sums``, so that their
order can be changed. What a GPU would do inside a sum (wave trees, fused multiply-adds) is not reproduced.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from sgl_amd_mono.simulate import sums

SOFTPLUS_THRESHOLD = 20.0
"""Above it SGLang's gating takes x itself for log(1 + exp(x))."""

L2NORM_EPS = 1e-6
"""Added to the sum of squares of q and of k (SGLang's use_qk_l2norm_in_kernel)."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A bf16 GEMM as on the GPU: float32 sums of exact products, rounded once. ``x [.., K]``, ``weight [N, K]``."""
    out = sums.matmul(x, weight)
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


def gemma_rms_norm(norm, x: torch.Tensor, residual=None, post_residual_addition=None):
    """``GemmaRMSNorm`` as AITER's ROCm build runs it: the unrounded float32 sum is normalised, (1 + w) applied.

    ``norm`` is SGLang's module (``weight``, ``variance_epsilon``); returns ``y`` or ``(y, residual_out)``, rounded to
    the type of ``x``.
    """
    total = x.float()
    residual_out = None
    if residual is not None:
        if post_residual_addition is not None:
            residual = residual + post_residual_addition
        total = total + residual.float()
        residual_out = total.to(x.dtype)
    mean_square = sums.add(total * total).unsqueeze(-1) / total.shape[-1]
    y = (total * (1.0 / torch.sqrt(mean_square + norm.variance_epsilon))) * (1.0 + norm.weight.float())
    y = y.to(x.dtype)
    return y if residual_out is None else (y, residual_out)


def rms_norm_gated(module, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
    """``fla.layernorm_gated.RMSNorm.forward``: RMS norm over the head, times w, times silu(z), one rounding.

    ``x`` and ``z``: ``[rows, head_dim]``.
    """
    if module.group_size is not None or not module.norm_before_gate or module.activation not in ("swish", "silu"):
        raise NotImplementedError("the gated norm's stand-in covers norm-before-gate with SiLU and without groups only")
    value = x.float()
    mean_square = sums.add(value * value).unsqueeze(-1) / value.shape[-1]
    y = value * torch.rsqrt(mean_square + module.eps) * module.weight.float()
    if z is not None:
        gate = z.float()
        y = y * (gate / (1.0 + torch.exp(-gate)))
    return y.to(x.dtype)


def _silu(x: torch.Tensor) -> torch.Tensor:
    """silu as the Triton conv writes it: a division."""
    return x / (1.0 + torch.exp(-x))


def _convolve(window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``window [.., channels, taps]``, oldest first; each product rounded to the input's type, sums left to right."""
    products = (window.float() * weight.float()).to(window.dtype).float()
    total = torch.zeros_like(products[..., 0]) if bias is None else bias.float().expand_as(products[..., 0]).clone()
    for tap in range(weight.shape[-1]):
        total = total + products[..., tap]
    return total


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    **unused,
) -> torch.Tensor:
    """``causal_conv1d_update``, one token a row: ``x [rows, channels]``, ``conv_state [slots, channels, taps - 1]``.

    Rows whose index is negative (pads) read and write nothing and give zeros.
    """
    _refuse(unused)
    slots = conv_state_indices[: x.shape[0]].long()
    real = slots >= 0
    out = torch.zeros_like(x)
    if bool(real.any()):
        state = conv_state[slots[real]].to(x.dtype)
        window = torch.cat([state, x[real].unsqueeze(-1)], dim=-1)
        total = _convolve(window, weight, bias)
        out[real] = (_silu(total) if activation in ("silu", "swish", True) else total).to(x.dtype)
        conv_state[slots[real]] = window[..., 1:].to(conv_state.dtype)
    return out


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu=None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    **unused,
) -> torch.Tensor:
    """``causal_conv1d_fn`` (prefill): ``x [channels, tokens]`` of several sequences; states updated in place."""
    _refuse(unused)
    out = torch.empty_like(x)
    history = weight.shape[-1] - 1
    bounds = query_start_loc.tolist()
    for sequence, (begin, end) in enumerate(pairwise(bounds)):
        slot = int(cache_indices[sequence])
        if slot < 0 or end == begin:
            continue
        before = conv_states[slot].to(x.dtype)
        if has_initial_state is None or not bool(has_initial_state[sequence]):
            before = torch.zeros_like(before)
        line = torch.cat([before, x[:, begin:end]], dim=-1)
        total = _convolve(
            line.unfold(-1, history + 1, 1), weight.unsqueeze(1), bias.unsqueeze(1) if bias is not None else None
        )
        out[:, begin:end] = (_silu(total) if activation in ("silu", "swish", True) else total).to(x.dtype)
        conv_states[slot] = line[:, line.shape[1] - history :].to(conv_states.dtype)
    return out


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x <= SOFTPLUS_THRESHOLD, torch.log(1.0 + torch.exp(x)), x)


def fused_gdn_gating(a_log, a, b, dt_bias, beta: float = 1.0, threshold: float = SOFTPLUS_THRESHOLD):
    """``fused_gdn_gating`` (prefill): ``(g, beta)`` float32 ``[1, tokens, heads]``, beta rounded to b's type."""
    if beta != 1.0 or threshold != SOFTPLUS_THRESHOLD:
        raise NotImplementedError("the gating's stand-in covers softplus beta 1 and threshold 20 only")
    g = -torch.exp(a_log.float()) * _softplus(a.float() + dt_bias.float())
    write = (1.0 / (1.0 + torch.exp(-b.float()))).to(b.dtype).float()
    return g.unsqueeze(0), write.unsqueeze(0)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """L2 norm over the head: ``x / sqrt(sum(x^2) + eps)``, float32."""
    return x / torch.sqrt(sums.add(x * x).unsqueeze(-1) + L2NORM_EPS)


def _delta_step(state, q, k, v, decay, beta):
    """One token of the gated delta rule, float32: ``state [.., V, K]``; q, k ``[.., K]``; v ``[.., V]``.

    Returns ``(output [.., V], new state)``: the state decays, the part of v that k does not recall is written along k.
    """
    state = state * decay[..., None, None]
    recalled = sums.add(state * k.unsqueeze(-2))
    written = (v - recalled) * beta.unsqueeze(-1)
    state = state + written.unsqueeze(-1) * k.unsqueeze(-2)
    return sums.add(state * q.unsqueeze(-2)), state


def _per_value_head(x: torch.Tensor, value_heads: int) -> torch.Tensor:
    """``[.., key heads, K]`` to ``[.., value heads, K]``: consecutive value heads share a key head."""
    return x.repeat_interleave(value_heads // x.shape[-2], dim=-2)


def packed_decode(
    mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel
):
    """``fused_recurrent_gated_delta_rule_packed_decode``: one token a row, states updated in place.

    ``mixed_qkv [rows, q | k | v]``; ``a``, ``b`` ``[rows, value heads]``; ``initial_state [slots, value heads, V, K]``;
    ``out [rows, 1, value heads, V]``. Beta is rounded to bf16, as the packed kernel of SGLang 0.5.23 does. A negative
    index gives a zero row and touches no state.
    """
    rows, heads = a.shape
    value_dim, key_dim = initial_state.shape[-2:]
    key_columns = (mixed_qkv.shape[-1] - heads * value_dim) // 2
    slots = ssm_state_indices[:rows].long()
    real = slots >= 0
    out.zero_()
    if not bool(real.any()):
        return out, initial_state
    q, k, v = mixed_qkv[real].float().split([key_columns, key_columns, heads * value_dim], dim=-1)
    q, k = q.unflatten(-1, (-1, key_dim)), k.unflatten(-1, (-1, key_dim))
    if use_qk_l2norm_in_kernel:
        q, k = _unit(q), _unit(k)
    q, k = _per_value_head(q * scale, heads), _per_value_head(k, heads)
    decay = torch.exp(-(torch.exp(A_log.float()) * _softplus(a[real].float() + dt_bias.float())))
    beta = (1.0 / (1.0 + torch.exp(-b[real].float()))).to(b.dtype).float()
    value = v.unflatten(-1, (heads, value_dim))
    output, state = _delta_step(initial_state[slots[real]].float(), q, k, value, decay, beta)
    out[real] = output.to(out.dtype).unsqueeze(1)
    initial_state[slots[real]] = state.to(initial_state.dtype)
    return out, initial_state


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale: float | None = None,
    initial_state=None,
    initial_state_indices=None,
    cu_seqlens=None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
):
    """``chunk_gated_delta_rule`` (prefill), token by token: q, k ``[1, T, key heads, K]``, v ``[1, T, heads, V]``.

    Returns ``(o, None, None)`` as SGLang's caller unpacks it; states of the given slots are updated in place.
    """
    if head_first:
        raise NotImplementedError("the prefill's stand-in covers head_first=False only")
    heads = v.shape[-2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q32, k32, v32 = q[0].float(), k[0].float(), v[0].float()
    if use_qk_l2norm_in_kernel:
        # the stock prefill stores the normalised q and k in the input's type
        q32, k32 = _unit(q32).to(q.dtype).float(), _unit(k32).to(k.dtype).float()
    q32, k32 = _per_value_head(q32 * scale, heads), _per_value_head(k32, heads)
    decay = torch.exp(g[0].float())
    out = torch.empty_like(v)
    bounds = cu_seqlens.tolist()
    for sequence, (begin, end) in enumerate(pairwise(bounds)):
        slot = int(initial_state_indices[sequence])
        if slot < 0:
            out[0, begin:end] = 0
            continue
        state = initial_state[slot].float()
        for token in range(begin, end):
            o, state = _delta_step(state, q32[token], k32[token], v32[token], decay[token], beta[0, token].float())
            out[0, token] = o.to(v.dtype)
        if inplace_update:
            initial_state[slot] = state.to(initial_state.dtype)
    return out, None, None


def fused_sigmoid_mul(attn_output: torch.Tensor, gate: torch.Tensor, inplace: bool = False, quant: bool = False):
    """``fused_sigmoid_mul``: ``attn_output [rows, heads * D] * sigmoid(gate)``, in float32, one rounding."""
    if quant:
        raise NotImplementedError("the output gate's stand-in does not quantise to FP8")
    gated = attn_output.float() * torch.sigmoid(gate.reshape(attn_output.shape).float())
    if not inplace:
        return gated.to(attn_output.dtype)
    return attn_output.copy_(gated)


def fused_gate_sigmoid_mul_add(hidden_states, gate_weight, shared_output, final_hidden_states) -> None:
    """``fused_gate_sigmoid_mul_add``, in place: ``final += sigmoid(x . w_gate) * shared``, float32, one rounding."""
    gate = torch.sigmoid(sums.matmul(hidden_states, gate_weight.unsqueeze(0)))
    final_hidden_states.copy_(final_hidden_states.float() + gate * shared_output.float())


def fused_topk(
    hidden_states, gating_output, topk, renormalize, correction_bias=None, scoring_func="softmax"
) -> tuple[torch.Tensor, torch.Tensor]:
    """``fused_topk_torch_native``, but of equal logits the lower id wins, as in the ROCm kernel (topkGatingSoftmax).

    ``gating_output [rows, experts]``; returns float32 weights and int32 ids, ``[rows, topk]``, largest first.
    """
    if correction_bias is not None or scoring_func != "softmax":
        raise NotImplementedError("the router's stand-in covers softmax without a bias only")
    scores = gating_output.float()
    ids = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = scores.softmax(dim=-1).gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids.to(torch.int32)


def silu_and_mul(module, x: torch.Tensor) -> torch.Tensor:
    """``SiluAndMul`` on ROCm: silu rounded to the input's type before the product. ``x [.., 2 * n]``, gate then up."""
    gate, up = x.chunk(2, dim=-1)
    return (_silu(gate.float()).to(x.dtype).float() * up.float()).to(x.dtype)


def _refuse(unused: dict) -> None:
    """Raise when SGLang passes an argument that a stand-in would ignore."""
    given = {name for name, value in unused.items() if value is not None and name not in ("pad_slot_id",)}
    if given:
        raise NotImplementedError(f"the stand-in does not cover the arguments {sorted(given)}")
