# SPDX-License-Identifier: Apache-2.0
"""What K2 (the layer tail) computes, in plain PyTorch float64 with the rounding points stated: one function a stage.

Every value that another workgroup or rank reads is rounded where the kernel rounds it; inside a stage all is float64,
except the few sums that the kernel states in f32 (all-reduces in rank order), which are done in f32 here as well. The
combine follows SGLang's ROCm path: the shared expert's gate stays f32, one rounding after the sum.

The variants of `layer.py` show in the weights: an output projection with `w_o_scale` is MXFP4, and without `w_sgu` the
shared expert is fused into the routed ones, as SGLang's ROCm path does it: expert E, the last pick of every live row,
its weight the sigmoid of the gate in f32, its intermediate in MXFP4 like any expert's, one rounding of all picks' sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layout

LOWEST_LOGIT = -3.0e38  # what a NaN logit counts as


def bf16(x: torch.Tensor) -> torch.Tensor:
    """Round to bf16 (nearest even) from f64 through f32, kept as bf16."""
    return x.float().to(torch.bfloat16)


@dataclass(frozen=True)
class Expert:
    """One routed expert, shuffled as the kernel reads it; `w13` f64 [2*RI, H] and `w2` f64 [H, RI] on demand."""

    w13_packed: torch.Tensor
    w13_codes: torch.Tensor
    w2_packed: torch.Tensor
    w2_codes: torch.Tensor

    @cached_property
    def w13(self) -> torch.Tensor:
        return layout.dequantize_shuffled(self.w13_packed, self.w13_codes)

    @cached_property
    def w2(self) -> torch.Tensor:
        return layout.dequantize_shuffled(self.w2_packed, self.w2_codes)


@dataclass(frozen=True)
class LayerWeights:
    """One rank's weights, as K2's arguments hold them; shapes in the ABI of `layer.py`, None where it says 0.

    `experts(e)` gives expert e; `from_shuffled` makes it from the tensors.
    """

    w_o: torch.Tensor
    norm_w: torch.Tensor
    w_router: torch.Tensor
    w_sgu: torch.Tensor | None
    w_sg: torch.Tensor
    w_sd: torch.Tensor | None
    experts: Callable[[int], Expert]
    w_o_scale: torch.Tensor | None = None

    @property
    def fused_shared(self) -> bool:
        """Whether the shared expert is one of `experts`, after the routed ones."""
        return self.w_sgu is None

    @staticmethod
    def from_shuffled(
        w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor
    ) -> Callable[[int], Expert]:
        """Expert look-up in shuffled uint8 tensors [E, N, K/2] and scales [E, N, K/32]."""

        return lambda e: Expert(w13[e], w13_scale[e], w2[e], w2_scale[e])


@dataclass
class RankTrace:
    """One rank's values: o bf16 [S,H]; h bf16 [S,SI]; packed/codes of the intermediates; partial bf16 [S,H].

    `picks` below: top_k, and one more where the shared expert is fused (then there is no h).
    """

    o: torch.Tensor
    h: torch.Tensor | None = None
    inter_packed: torch.Tensor | None = None  # uint8 [S, picks, RI/2]
    inter_codes: torch.Tensor | None = None  # uint8 [S, picks, RI/32]
    partial: torch.Tensor | None = None


@dataclass
class LayerTrace:
    """Values that all ranks share, and each rank's own."""

    ranks: list[RankTrace]
    residual: torch.Tensor  # bf16 [S, H]
    x: torch.Tensor  # bf16 [S, H]
    logits: torch.Tensor  # bf16 [S, E]
    ids: torch.Tensor  # int64 [S, picks]; -1 in a pad row
    weights: torch.Tensor  # f64 [S, picks]
    shared_gate: torch.Tensor  # f64 [S]
    out: torch.Tensor  # bf16 [S, H]


def o_partial(core: torch.Tensor, w_o: torch.Tensor, w_o_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Output projection of one rank: bf16 [S, H] = bf16(core [S, C] @ w_o [H, C]^T).

    With `w_o_scale` (uint8 [H, C/32]; w_o uint8 [H, C/2]; both plain) the core is quantised to MXFP4 first, its codes
    as AITER's `dynamic_mxfp4_quant` picks them.
    """
    if w_o_scale is None:
        return bf16(core.double() @ w_o.double().T)
    quantised = layout.dequantize_mxfp4(*layout.quantize_mxfp4(core, layout.scale_code_even))
    return bf16(quantised @ layout.dequantize_mxfp4(w_o, w_o_scale).T)


def all_reduce(partials: Sequence[torch.Tensor]) -> torch.Tensor:
    """bf16 of the f32 sum of bf16 partials in rank order, the first taken as it is."""
    total = partials[0].float()
    for part in partials[1:]:
        total = total + part.float()
    return total.to(torch.bfloat16)


def norm(
    reduced: torch.Tensor, residual: torch.Tensor, norm_w: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual add and Gemma norm: (bf16(z), x), z = f32 sum; rstd from the unrounded z, x = bf16(z*rstd*(1+w))."""
    z = reduced.float() + residual.float()
    rstd = 1.0 / torch.sqrt((z.double() ** 2).mean(-1, keepdim=True) + eps)
    return z.to(torch.bfloat16), bf16(z.double() * rstd * (1.0 + norm_w.double()))


def logits(x: torch.Tensor, w_router: torch.Tensor) -> torch.Tensor:
    """Router logits: bf16 [S, rows]."""
    return bf16(x.double() @ w_router.double().T)


def route(router_logits: torch.Tensor, top_k: int, live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k of bf16 logits [S, E]: ids int64 [S, k] (lower id on a tie, -1 in a row that is not live) and weights f64.

    The weights are the softmax over the k picks, which equals softmax over all experts and then renormalising. A NaN
    logit counts as -3e38.
    """
    lowest = torch.tensor(LOWEST_LOGIT, dtype=torch.float64)
    values = torch.where(router_logits.isnan(), lowest, router_logits.double())
    picked, ids = torch.sort(values, dim=-1, descending=True, stable=True)
    picked, ids = picked[:, :top_k], ids[:, :top_k]
    weights = torch.exp(picked - picked[:, :1])
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.where(live[:, None], ids, -1), torch.where(live[:, None], weights, 0.0)


def with_shared_pick(
    ids: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor, expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A route with the fused shared expert as every live row's last pick: expert id `expert`, weight `gate` f64 [S]."""
    live = ids[:, :1] >= 0
    shared = torch.where(live, expert, -1)
    return torch.cat([ids, shared], 1), torch.cat([weights, torch.where(live, gate[:, None], 0.0)], 1)


def shared_gate(x: torch.Tensor, w_sg: torch.Tensor) -> torch.Tensor:
    """Gate of the shared expert: f64 [S] = sigmoid(x . w_sg), not rounded."""
    return torch.sigmoid(x.double() @ w_sg.double().reshape(-1))


def shared_up(x: torch.Tensor, w_sgu: torch.Tensor) -> torch.Tensor:
    """Shared expert up to its activation: bf16 [S, SI] = bf16(bf16(silu(bf16 g)) * bf16 u)."""
    gate, up = bf16(x.double() @ w_sgu.double().T).double().chunk(2, dim=-1)
    return bf16(bf16(gate * torch.sigmoid(gate)).double() * up)


def routed_up(
    x: torch.Tensor, ids: torch.Tensor, experts: Callable[[int], Expert]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routed intermediates of bf16 x [S, H]: MXFP4 of silu(g)*u (f32, never rounded to bf16), one [RI] a (row, pick).

    x is quantised to MXFP4 first. Returns packed uint8 [S, k, RI/2] and codes uint8 [S, k, RI/32]; a pick of -1 is 0.
    """
    xq = layout.dequantize_mxfp4(*layout.quantize_mxfp4(x))
    rows, picks = ids.shape
    inter = None
    for e in sorted(set(ids.flatten().tolist()) - {-1}):
        gate, up = (xq @ experts(e).w13.T).chunk(2, dim=-1)
        value = gate * torch.sigmoid(gate) * up
        if inter is None:
            inter = torch.zeros(rows, picks, value.shape[-1], dtype=torch.float64)
        row, pick = (ids == e).nonzero(as_tuple=True)
        inter[row, pick] = value[row]
    if inter is None:  # every row is a pad row
        width = experts(0).w2.shape[-1]
        inter = torch.zeros(rows, picks, width, dtype=torch.float64)
    return layout.quantize_mxfp4(inter.float())


def routed_down(
    packed: torch.Tensor,
    codes: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Callable[[int], Expert],
    hidden: int,
) -> torch.Tensor:
    """Routed output of one rank: bf16 [S, H] = bf16(sum over picks of weight * (intermediate @ w2^T))."""
    inter = layout.dequantize_mxfp4(packed, codes)
    total = torch.zeros(ids.shape[0], hidden, dtype=torch.float64)
    for e in sorted(set(ids.flatten().tolist()) - {-1}):
        w2 = experts(e).w2
        row, pick = (ids == e).nonzero(as_tuple=True)
        total.index_add_(0, row, (inter[row, pick] @ w2.T) * weights[row, pick].double()[:, None])
    return bf16(total)


def combine(routed: torch.Tensor, h: torch.Tensor, w_sd: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """One rank's partial: bf16 [S, H] = bf16(routed + gate * bf16(h @ w_sd^T)), the gate unrounded."""
    shared = bf16(h.double() @ w_sd.double().T)
    return bf16(routed.double() + gate[:, None].double() * shared.double())


def clear_pads(rows: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Rows that are not live are written as zeros."""
    return torch.where(live[:, None], rows, torch.zeros_like(rows))


def layer_post(
    cores: Sequence[torch.Tensor],
    residual: torch.Tensor,
    weights: Sequence[LayerWeights],
    row_index: torch.Tensor,
    geometry: Geometry,
) -> LayerTrace:
    """The whole launch over all ranks: `cores` and `weights` one a rank, `residual` bf16 [S,H], row_index int32 [S]."""
    live = row_index > 0
    first = weights[0]
    ranks = [RankTrace(o_partial(core, w.w_o, w.w_o_scale)) for core, w in zip(cores, weights, strict=True)]
    res_out, x = norm(all_reduce([r.o for r in ranks]), residual, first.norm_w, geometry.eps)
    router_logits = logits(x, first.w_router)
    ids, route_weights = route(router_logits, geometry.top_k, live)
    gate = shared_gate(x, first.w_sg)
    if first.fused_shared:
        ids, route_weights = with_shared_pick(ids, route_weights, gate, geometry.experts)
    for r, w in zip(ranks, weights, strict=True):
        r.inter_packed, r.inter_codes = routed_up(x, ids, w.experts)
        routed = routed_down(r.inter_packed, r.inter_codes, ids, route_weights, w.experts, geometry.hidden)
        r.h = None if w.fused_shared else shared_up(x, w.w_sgu)
        r.partial = routed if w.fused_shared else combine(routed, r.h, w.w_sd, gate)
    out = clear_pads(all_reduce([r.partial for r in ranks]), live)
    return LayerTrace(ranks, clear_pads(res_out, live), x, router_logits, ids, route_weights, gate, out)
