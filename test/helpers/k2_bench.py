# SPDX-License-Identifier: Apache-2.0
"""Comparisons of K2's results with the definition, and its trial inputs under the names that the tests use."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layer_naive as naive
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layout
from sgl_amd_mono.qwen38_a95b_mxfp4.trial_k2 import (  # noqa: F401  the tests' names
    DEADLINE,
    PLAIN,
    SLOT,
    VARIANTS,
    Bench,
    Inputs,
    RankWeights,
    Result,
    Variant,
    artifact,
    code,
    fill_expert,
    lazy_bytes,
    random_inputs,
    random_weights,
)


def bf16_order(x: torch.Tensor) -> torch.Tensor:
    """Integers in which neighbouring bf16 values differ by one (both zeros are 0)."""
    bits = x.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance of two bf16 tensors in bf16 steps."""
    return (bf16_order(a) - bf16_order(b)).abs()


def ulps_at(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Distance of two tensors in bf16 steps of the largest of |a|, |b| and `scale`.

    A sum that cancels has the rounding errors of its terms: its steps are counted at their size (`scale`).
    """
    a, b = a.double(), b.double()
    size = torch.maximum(torch.maximum(a.abs(), b.abs()), torch.as_tensor(scale, dtype=torch.float64))
    step = torch.exp2(torch.floor(torch.log2(size.clamp_min(1e-30))) - 7)
    return (a - b).abs() / step


def relative_l2(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def likely_experts(geometry: Geometry, weights: Sequence[RankWeights], inputs: Inputs, more: int) -> list[int]:
    """Experts among the `top_k + more` largest logits of any live row, by the definition; no expert is read."""
    named = [w.naive() for w in weights]
    live = inputs.row_index > 0
    reduced = naive.all_reduce(
        [naive.o_partial(c, w.w_o, w.w_o_scale) for c, w in zip(inputs.cores, named, strict=True)]
    )
    _, x = naive.norm(reduced, inputs.residual, named[0].norm_w, geometry.eps)
    ids, _ = naive.route(naive.logits(x, named[0].w_router), geometry.top_k + more, live)
    return sorted(set(ids.flatten().tolist()) - {-1})


def definition(geometry: Geometry, weights: Sequence[RankWeights], inputs: Inputs) -> naive.LayerTrace:
    """The naive layer over the same tensors."""
    return naive.layer_post(inputs.cores, inputs.residual, [w.naive() for w in weights], inputs.row_index, geometry)


def route_given_logits(result: Result, live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights of every row's picks by the definition, from the kernel's own logits and normed rows."""
    g, first = result.bench.geometry, result.bench.weights[0].naive()
    ids, weights = naive.route(result.logits(), g.top_k, live)
    if first.fused_shared:
        ids, weights = naive.with_shared_pick(ids, weights, naive.shared_gate(result.x(), first.w_sg), g.experts)
    return ids, weights


def out_given_stages(result: Result, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` by the definition from the kernel's own normed rows, logits and quantised intermediates.

    Returns it and the size of the largest value that was rounded to bf16 on the way to each element.
    """
    g = result.bench.geometry
    live = inputs.row_index > 0
    ids, weights = route_given_logits(result, live)
    x = result.x()
    partials, size = [], torch.zeros(result.width, g.hidden, dtype=torch.float64)
    for rank, w in enumerate(result.bench.weights):
        named = w.naive()
        packed, codes = result.inter(rank)
        routed = naive.routed_down(packed, codes, ids, weights, named.experts, g.hidden)
        if named.fused_shared:
            partials.append(routed)
        else:
            gate = naive.shared_gate(x, named.w_sg)
            partials.append(naive.combine(routed, naive.shared_up(x, named.w_sgu), named.w_sd, gate))
        size = torch.maximum(size, torch.maximum(routed.double().abs(), partials[-1].double().abs()))
    return naive.clear_pads(naive.all_reduce(partials), live), size


def inter_given_x(result: Result, inputs: Inputs, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantised intermediates (kernel's, definition's) from the kernel's own normed rows, live rows only."""
    live = inputs.row_index > 0
    ids, _ = route_given_logits(result, live)
    expected = naive.routed_up(result.x(), ids, result.bench.weights[rank].naive().experts)
    got = result.inter(rank)
    return layout.dequantize_mxfp4(*got)[live], layout.dequantize_mxfp4(*expected)[live]
