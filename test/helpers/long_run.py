# SPDX-License-Identifier: Apache-2.0
"""Many steps of K1 on one simulated machine beside the same steps in float64, which never round a state."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from helpers.k1_inputs import K1Case, bf16, built, make_case, map_case
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn_naive import gdn_front


@dataclass
class Drift:
    """Relative L2 errors against float64, one a step: of the SSM state and of the core, worst row."""

    state: list[float] = field(default_factory=list)
    core: list[float] = field(default_factory=list)


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest relative L2 error of a row."""
    found, wanted = found.double().flatten(1), wanted.double().flatten(1)
    return float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


def drift(key: GdnKey, steps: int, seed: int = 0, leak: float = 0.0) -> Drift:
    """Run `steps` decode steps of K1 with a new token each; both sides start from the same states and see the same
    inputs, and each goes on from its own. `leak` is the share of its states that the launch's side loses at each step
    (a control)."""
    from sgl_amd_mono.sim import CodeObject, Launch, Machine

    case: K1Case = make_case(key, seed=seed)
    artifact = built(key)
    machine = Machine(ranks=1, cus=max(256, key.grid))
    map_case(machine, case)
    code = CodeObject.parse(artifact.isa)
    generator = torch.Generator().manual_seed(seed + 1)
    slots = case.state_index.long()
    conv, ssm = case.conv_state.clone(), case.ssm_state.double()
    found = Drift()
    for _ in range(steps):
        case.epoch.add_(1)
        case.hidden.copy_(bf16(generator, *case.hidden.shape, scale=0.5))
        case.residual.copy_(bf16(generator, *case.residual.shape, scale=2.0))
        trace = gdn_front(key.geometry, case.weights, case.hidden, case.residual, case.state_index, conv, ssm,
                          round_beta=key.round_beta)  # fmt: skip
        conv[slots], ssm[slots] = trace.conv_rows.to(conv.dtype), trace.ssm_rows.double()
        block = artifact.pack(case.arguments())
        machine.launch([Launch(rank=0, code=code, grid=artifact.grid, block=artifact.block, kernargs=block)])
        if case.fault.failed:
            raise AssertionError(case.fault.describe())
        if leak:
            case.ssm_state[slots] *= 1.0 - leak
        found.state.append(error(case.ssm_state[slots], ssm[slots]))
        found.core.append(error(case.core, trace.core))
    return found
