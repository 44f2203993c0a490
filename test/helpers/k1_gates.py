# SPDX-License-Identifier: Apache-2.0
"""K1's gates: what a run must have written, against the definition or against another run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from helpers.k1_inputs import JUNK, K1Case
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn_naive import GdnTrace

CORE_REL_L2 = 1e-3
CORE_COSINE = 0.999999
STATE_REL_L2 = 1e-3
CONV_NEW_DIFFER = 0.01  # share of new conv inputs that may lie one bf16 step from the definition's
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits (NaNs compare equal to themselves)."""
    return tensor.contiguous().view(BITS[tensor.dtype])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit."""
    return torch.equal(bits(a), bits(b))


def relative_l2(value: Tensor, reference: Tensor) -> Tensor:
    """Per row."""
    value, reference = value.double().flatten(1), reference.double().flatten(1)
    return (value - reference).norm(dim=1) / reference.norm(dim=1)


def bf16_steps(a: Tensor, b: Tensor) -> Tensor:
    """Distance in bf16 steps."""
    ordered = [torch.where(v < 0, -32768 - v, v) for v in (bits(t).int() for t in (a, b))]
    return (ordered[0] - ordered[1]).abs()


@dataclass
class Before:
    """Copies of the pools before a launch."""

    conv: Tensor
    ssm: Tensor

    @classmethod
    def of(cls, case: K1Case) -> Before:
        return cls(case.conv_state.clone(), case.ssm_state.clone())


def failures(case: K1Case, trace: GdnTrace, before: Before) -> list[str]:
    """Gates that the launch's outputs do not pass, in words; empty when all pass."""
    out = []
    live = torch.nonzero(trace.live).flatten().tolist()
    if not same_bits(case.residual_out, trace.residual_out):
        out.append(f"residual_out: {int((bits(case.residual_out) != bits(trace.residual_out)).sum())} elements differ")
    if live:
        core, want = case.core[live].double(), trace.core[live].double()
        error = relative_l2(core, want)
        cosine = torch.nn.functional.cosine_similarity(core, want, dim=1)
        if not bool((error <= CORE_REL_L2).all()):
            out.append(f"core: relative L2 {error.max():.3g} > {CORE_REL_L2}")
        if not bool((cosine >= CORE_COSINE).all()):
            out.append(f"core: cosine {cosine.min():.9f} < {CORE_COSINE}")
        slots = case.state_index[live].long()
        error = relative_l2(case.ssm_state[slots], trace.ssm_rows[live])
        if not bool((error <= STATE_REL_L2).all()):
            out.append(f"SSM state: relative L2 {error.max():.3g} > {STATE_REL_L2}")
        conv = case.conv_state[slots]
        if not same_bits(conv[..., :2], before.conv[slots][..., 1:]):
            out.append("conv state: the shifted inputs differ")
        steps = bf16_steps(conv[..., 2], trace.conv_rows[live][..., 2])
        if int(steps.max()) > 1 or float((steps > 0).double().mean()) > CONV_NEW_DIFFER:
            out.append(f"conv state: new inputs {int(steps.max())} bf16 steps off, {int((steps > 0).sum())} differ")
    for row in torch.nonzero(~trace.live).flatten().tolist():
        if not same_bits(case.core[row], torch.zeros_like(case.core[row])):
            out.append(f"core: pad row {row} is not zero")
    out += untouched(case, before, {int(case.state_index[t]) for t in live})
    return out


def untouched(case: K1Case, before: Before, named: set[int] = frozenset()) -> list[str]:
    """Slots outside `named` whose bits changed, in words."""
    out = []
    for slot in range(len(before.ssm)):
        if slot not in named:
            if not same_bits(case.ssm_state[slot], before.ssm[slot]):
                out.append(f"SSM state of slot {slot} changed")
            if not same_bits(case.conv_state[slot], before.conv[slot]):
                out.append(f"conv state of slot {slot} changed")
    return out


def nothing_written(case: K1Case, before: Before) -> list[str]:
    """What a launch wrote although it had to leave at once."""
    out = untouched(case, before)
    for name in ("core", "residual_out"):
        tensor = getattr(case, name)
        if not bool((tensor == JUNK).all()):
            out.append(f"{name} was written")
    return out


def report(case: K1Case, trace: GdnTrace) -> str:
    """Figures of one comparison, for a log."""
    live = torch.nonzero(trace.live).flatten().tolist()
    error = relative_l2(case.core[live], trace.core[live])
    equal = (bits(case.core[live]) == bits(trace.core[live])).double().mean()
    slots = case.state_index[live].long()
    ssm = relative_l2(case.ssm_state[slots], trace.ssm_rows[live])
    return f"core rel L2 {error.max():.2e}, {100 * equal:.3f} % equal; SSM rel L2 {ssm.max():.2e}"
