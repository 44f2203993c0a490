# SPDX-License-Identifier: Apache-2.0
"""How much each part of the simulated model moves its logits: `python ablation_run.py CHECKPOINT OUT.json`.

SGLang's own model without the plugin, all runs fed the same tokens: with re-ordered sums (the noise), then with one
weight zeroed at a time. The result maps names to root-mean-square differences of the logits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16], [3, 400, 77, 21, 9]]
STEPS = 2
ORDERS = (1, 2)


def parts(model: Any) -> dict[str, torch.Tensor]:
    """Name -> the weight whose zeroing takes a part away."""
    found = {}
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer, "linear_attn"):
            gdn = layer.linear_attn
            found[f"{index}.gdn"] = gdn.out_proj.weight
            found[f"{index}.gates"] = gdn.in_proj_ba.weight
            found[f"{index}.z"] = gdn.in_proj_qkvz.weight[-gdn.value_dim :]
        else:
            found[f"{index}.attention"] = layer.o_proj.weight
        found[f"{index}.router"] = layer.mlp.gate.weight
        found[f"{index}.routed"] = layer.mlp.experts.w2_weight
        found[f"{index}.shared"] = layer.mlp.shared_expert.down_proj.weight
        found[f"{index}.shared gate"] = layer.mlp.shared_expert_gate.weight
    return found


def main() -> int:
    checkpoint, out = sys.argv[1:]
    torch.set_num_threads(1)
    from sgl_amd_mono.simulate import aiter_standin, sums
    from sgl_amd_mono.simulate.runner import Rank, SglangModel

    model = SglangModel(Path(checkpoint), False, Rank())

    def run(order: int | None = None) -> torch.Tensor:
        aiter_standin.forget_weights()
        with sums.reordered(order):
            seen = [model.prefill(PROMPTS)]
            for step in range(STEPS):
                seen.append(model.decode(tokens[step] if tokens else seen[-1].argmax(-1)))
        return torch.stack(seen)

    tokens: list[torch.Tensor] = []
    base = run()
    tokens.extend(base.argmax(-1)[:-1])

    def moved(other: torch.Tensor) -> float:
        return float((other - base).double().square().mean().sqrt())

    result = {f"noise.{order}": moved(run(order)) for order in ORDERS}
    for name, weight in parts(model.model).items():
        kept = weight.detach().clone()
        weight.data.zero_()
        result[name] = moved(run())
        weight.data.copy_(kept)
    result["repeat"] = moved(run())
    Path(out).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
