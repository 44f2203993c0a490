# SPDX-License-Identifier: Apache-2.0
"""K1 beside SGLang's own GDN kernels, both as gfx950 instructions on the simulator, from the same projections.

The projections are K1's own (bf16, as it handed them over), so that an order of the GEMM's sums does not hide what
comes after it. Pad rows: K1 takes 0 and -1, SGLang's kernels -1 (its slot 0 is reserved and never a request's).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from helpers import noise
from helpers.k1_gates import same_bits
from helpers.k1_inputs import K1Case, make_case, make_weights, run
from helpers.stock_definition import ulps
from helpers.stock_kernels import run_stock
from sgl_amd_mono.common.check import bf16_ulp
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn_naive import GdnWeights

CORE_DIFFER = 5 * noise.FRONT_FLOORS["core share"]  # 1 in 1,000; the floor is 1 in 5,000
STATE_REL = 10 * noise.FRONT_FLOORS["state rel"]  # 3e-7 of an f32 state row; the floor is 3e-8
SMALL_BY = 2.0**-11  # makes a row whose mean square is of the order of the norm's epsilon
BF16_STATE_DIFFER = 10 * noise.FRONT_FLOORS["bf16 state share"]  # 1 in 10,000; the floor is 1 in 100,000


def weights_with_edges(geometry: Geometry, seed: int) -> GdnWeights:
    """Random weights with a key head whose q and k are tiny and a value head whose softplus is linear (`noise`)."""
    weights, head = make_weights(geometry, seed), geometry.head_dim
    for first in (0, geometry.k_offset):
        weights.conv_w[first : first + head] *= noise.TINY_HEAD
    weights.a_log[noise.LINEAR_HEAD], weights.dt_bias[noise.LINEAR_HEAD] = noise.LINEAR_A_LOG, noise.LINEAR_BIAS
    return weights


def edge_case(key: GdnKey, seed: int, pads: tuple[int, ...] = ()) -> K1Case:
    return make_case(key, seed, pads=pads, weights=weights_with_edges(key.geometry, seed))


@dataclass
class Compared:
    """K1 against the stock chain: counts and what is not as it has to be, in words."""

    core_elements: int
    core_differ: int
    core_steps: int
    state: float
    state_differ: int
    failures: list[str]

    def __str__(self) -> str:
        return (
            f"core: {self.core_differ} of {self.core_elements} elements differ, by {self.core_steps} ulp at most; "
            f"state: relative L2 {self.state:.2e}, {self.state_differ} elements differ"
        )


def _one_step_of_o(stock: dict[str, Tensor], weight: Tensor, eps: float) -> Tensor:
    """What one bf16 step of o moves an element of the gated core by: [rows, value heads * head], float64.

    o is rounded before the norm, so where the two sides' float32 sums lie on two sides of a rounding boundary they
    differ by a step of o, which can be two of the core. Where an element of o cancels to less than the noise of its
    sum, that noise is the step.
    """
    o, z = stock["core"].double(), stock["z"].double()
    gain = (weight.double() * z * torch.sigmoid(z)).abs() / torch.sqrt(o.square().mean(-1, keepdim=True) + eps)
    return (torch.maximum(bf16_ulp(o.float()).double(), noise.FLOORS["core"] * noise.largest(o, 2)) * gain).flatten(1)


def compare(case: K1Case, plant: str | None = None) -> Compared:
    """Run K1 (the case is changed in place) and SGLang's chain on the same inputs."""
    g, width, w = case.key.geometry, case.key.width, case.weights
    conv_before, ssm_before = case.conv_state.clone(), case.ssm_state.clone()
    run(case)
    qkvz, ba = case.products()
    given = {
        "qkvz": qkvz,
        "ba": ba,
        "key_heads": g.key_heads,
        "value_heads": g.value_heads,
        "head": g.head_dim,
        "conv_state": conv_before,
        "conv_weight": w.conv_w,
        "A_log": w.a_log,
        "dt_bias": w.dt_bias,
        "norm_weight": w.gnorm_w,
        "ssm_state": ssm_before,
        "state_indices": torch.where(case.state_index > 0, case.state_index, -1).to(torch.int32),
        "scale": g.head_dim**-0.5,
        "eps": g.eps,
    }
    stock = run_stock("gdn_front", given, plant=plant)
    norm = {"hidden": case.hidden, "norm_weight": w.norm_w, "eps": g.eps}
    if case.residual is not None:
        norm["residual"] = case.residual
    residual_out = run_stock("gemma_norm", norm)["residual_out"]

    failures = []
    live = case.state_index > 0
    slots = case.state_index[live].long()
    gated = stock["gated"].reshape(width, -1)
    steps = ulps(case.core[live], gated[live])
    differ = int((steps > 0).sum())
    if differ > CORE_DIFFER * steps.numel():
        failures.append(f"core: {differ} of {steps.numel()} elements differ, more than 1 in {1 / CORE_DIFFER:g}")
    beyond = ulps(case.core[live], gated[live], _one_step_of_o(stock, w.gnorm_w, g.eps)[live])
    if beyond.numel() and beyond.max() > 1:
        failures.append(f"core: an element is off by {int(beyond.max())} ulp beyond a step of o")
    if case.core[~live].any():
        failures.append("core: a pad row is not zero")
    if not same_bits(case.residual_out, residual_out):
        failures.append("residual: not SGLang's bits")
    if not same_bits(case.conv_state, stock["conv_state"]):
        failures.append("conv state: not SGLang's bits")
    ours, theirs = case.ssm_state[slots].flatten(1), stock["ssm_state"][slots].flatten(1)
    relative = ((ours.double() - theirs.double()).norm(dim=1) / theirs.double().norm(dim=1)).tolist()
    state, state_differ = max(relative, default=0.0), int((ours != theirs).sum())
    if case.ssm_state.dtype == torch.float32:
        if not state <= STATE_REL:
            failures.append(f"state: relative L2 {state:.2e} > {STATE_REL}")
    elif live.any():
        wanted = stock["ssm_state"][slots]
        beyond = int(ulps(case.ssm_state[slots], wanted, noise.FLOORS["state"] * noise.largest(wanted, 2)).max())
        if state_differ > BF16_STATE_DIFFER * ours.numel():
            failures.append(f"state: {state_differ} of {ours.numel()} bf16 elements differ")
        if beyond > 1:
            failures.append(f"state: a bf16 element is off by {beyond} ulp")
    others = [slot for slot in range(len(ssm_before)) if slot not in slots.tolist()]
    if not same_bits(case.ssm_state[others], stock["ssm_state"][others]):
        failures.append("state: a slot that no row names has not SGLang's bits")
    return Compared(steps.numel(), differ, int(steps.max()) if steps.numel() else 0, state, state_differ, failures)


def _case_with_a_small_row(key: GdnKey, seed: int) -> K1Case:
    """The last of several rows has a size at which the norm's epsilon is of the order of its mean square."""
    case = make_case(key, seed)
    if key.width > 1:
        for tensor in (case.hidden, case.residual):
            if tensor is not None:
                tensor[-1] *= SMALL_BY
    return case


def normed_rows(key: GdnKey, seed: int) -> tuple[Tensor, Tensor]:
    """(K1's normed rows, SGLang's), [width, hidden] bf16.

    K1 keeps its normed rows to itself: in_proj_qkvz is made of rows that select one column each, so that its products
    are the normed rows, column by column, exactly. As many launches as it takes to see every column.
    """
    g = key.geometry
    case = _case_with_a_small_row(key, seed)
    found = torch.empty(key.width, g.hidden, dtype=torch.bfloat16)
    for first in range(0, g.hidden, g.qkvz_rows):
        columns = torch.arange(first, first + g.qkvz_rows) % g.hidden
        case.weights.w_qkvz = torch.zeros(g.qkvz_rows, g.hidden, dtype=torch.bfloat16)
        case.weights.w_qkvz[torch.arange(g.qkvz_rows), columns] = 1
        run(case)
        found[:, columns] = case.products()[0]
        case = _case_with_a_small_row(key, seed)
    norm = {"hidden": case.hidden, "norm_weight": case.weights.norm_w, "eps": g.eps}
    if case.residual is not None:
        norm["residual"] = case.residual
    return found, run_stock("gemma_norm", norm)["x"]
