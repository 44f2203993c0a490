# SPDX-License-Identifier: Apache-2.0
"""Runtimes for `simulate` with planted mistakes (negative controls): the launches by their definitions, and K1 as
compiled with another rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from helpers.spec_double import DoubleKernel, DoubleRuntime
from sgl_amd_mono.qwen38_a95b_mxfp4.step import K2_SLOT

#: (launch, layer) -> what `PlantedRuntime` does wrong there, and the bound that must see it.
PLANTED = {
    ("k1", 0): ("core 1 % too large", "k1.core.rel"),
    ("k1", 1): ("state 1 % too large", "k1.state.rel"),
    ("k1", 2): ("conv taps not moved on", "k1.conv.cosine"),
    ("k2", 0): ("output 20 % too large", "k2.out.rel"),
    ("k2", 1): ("residual 1 % too large", "k2.res_out.rel"),
    ("k2", 2): ("two rows swapped", "k2.out.cosine"),
}


class PlantedRuntime(DoubleRuntime):
    """The definitions with the mistakes of `PLANTED`. Two rows or more, the last one a pad row."""

    def launch(self, kernel: DoubleKernel, args: Sequence[Any]) -> None:
        named = dict(zip(kernel.names, args))
        conv = named["conv_state"].clone() if kernel.kind == "k1" and named["mode"] else None
        super().launch(kernel, args)
        if not named["mode"]:
            return
        layer = named["layer_slot"] - (K2_SLOT if kernel.kind == "k2" else 0)
        if kernel.kind == "k1":
            real = named["state_index"][named["state_index"] > 0].long()
            if layer == 0:
                named["core"].mul_(1.01)
            elif layer == 1:
                named["ssm_state"][real] *= 1.01
            elif layer == 2:
                named["conv_state"].copy_(conv)
        elif layer == 0:
            named["out"].mul_(1.2)
        elif layer == 1:
            named["residual_out"].mul_(1.01)
        elif layer == 2:
            named["out"][:2] = named["out"][:2].flip(0)


class PadWriter(DoubleRuntime):
    """Right, but for a pad row's core, which must be zero."""

    def launch(self, kernel: DoubleKernel, args: Sequence[Any]) -> None:
        super().launch(kernel, args)
        named = dict(zip(kernel.names, args))
        if kernel.kind == "k1" and named["mode"]:
            width = named["core"].shape[0]
            named["core"][named["state_index"][:width] <= 0] = 1.0


UNROUNDED_LAYER = 1


def unrounded_beta(request: Any) -> Any:
    """The simulator's runtime, with K1 of layer UNROUNDED_LAYER built to keep beta in float32: SGLang rounds it."""
    from sgl_amd_mono.common.runtime import simulator_runtime

    runtime = simulator_runtime(request)
    build, launch = runtime.build, runtime.launch
    planted: dict[Any, Any] = {}

    def build_with_planted(keys: Sequence[Any]) -> list[Any]:
        fronts = [key for key in keys if key.launch == "k1" and not key.first_layer]
        planted.update(zip(fronts, build([replace(key, round_beta=False) for key in fronts]), strict=True))
        return build(keys)

    def launch_planted(kernel: Any, args: Sequence[Any]) -> None:
        slot = args[[name for name, _ in kernel.key.abi].index("layer_slot")]
        launch(planted[kernel.key] if kernel.key.launch == "k1" and slot == UNROUNDED_LAYER else kernel, args)

    runtime.build, runtime.launch = build_with_planted, launch_planted
    return runtime
