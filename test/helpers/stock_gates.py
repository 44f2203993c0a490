# SPDX-License-Identifier: Apache-2.0
"""Gates of SGLang's GDN kernels against their definition, each kernel from the values of the one before it.

A bf16 output lies within one unit in the last place of what its definition rounds to, where float32 sums may have moved
that by the noise floor (a sum that cancels is smaller than its own noise), and equals it but for DIFFER of the
elements, so that a mistake of less than a unit shows too. A float32 state lies within STATE_BOUND of the largest value
of its row's head.

"Its row's head" is the part of a request's state that one value head keeps. Of a single line of 128 values the noise
floor itself is 6e-7, where a strong decay has left little of it: float32 has 1e-6 of exp(-18).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from helpers import stock_definition as definition
from helpers.noise import FLOORS, largest

STATE_BOUND = 5e-7  # 2.5 times the noise floor of 2e-7
DIFFER = 1e-3  # noise of 2.5e-7 crosses a rounding boundary, 2^-8 to 2^-9 apart, once in 10,000: 10 times that
FEW = 2  # elements that may differ however few there are


@dataclass
class Count:
    """One compared tensor: elements, how many differ from the rounded definition, by how many steps at most."""

    name: str
    elements: int
    differ: int
    steps: int

    def __str__(self) -> str:
        return f"{self.name}: {self.differ} of {self.elements} differ, by {self.steps} ulp at most"


def _bf16(name: str, got: Tensor, want: Tensor, dims: int, counts: list[Count], failures: list[str]) -> None:
    steps = definition.ulps(got, want)
    counts.append(Count(name, steps.numel(), int((steps > 0).sum()), int(steps.max())))
    if counts[-1].differ > max(FEW, DIFFER * steps.numel()):
        failures.append(
            f"{name}: {counts[-1].differ} of {steps.numel()} elements differ, more than 1 in {1 / DIFFER:g}"
        )
    beyond = definition.ulps(got, want, FLOORS[name] * largest(want, dims)) > 1
    if beyond.any():
        failures.append(f"{name}: {int(beyond.sum())} of {beyond.numel()} elements are off by more than 1 ulp")


def front_failures(given: dict[str, Any], out: dict[str, Any]) -> tuple[list[str], list[Count], float]:
    """(failures, counts, largest error of an f32 state by its head's largest value) of one `gdn_front` run."""
    failures: list[str] = []
    counts: list[Count] = []
    live = given["state_indices"] > 0
    slots = given["state_indices"][live].long()
    mixed, z, b, a = definition.split(
        given["qkvz"], given["ba"], given["key_heads"], given["value_heads"], given["head"]
    )
    failures += [
        f"split: {name} is not a copy"
        for name, want in (("mixed_qkv", mixed), ("z", z), ("b", b), ("a", a))
        if not torch.equal(out[name], want)
    ]
    conv, windows = definition.conv(mixed[live], given["conv_state"][slots], given["conv_weight"])
    _bf16("conv", out["conv"][live], conv, 1, counts, failures)
    if not torch.equal(out["conv_state"][slots], windows):
        failures.append("conv state: not the shifted windows")
    core, state = definition.packed_decode(
        out["conv"][live],
        b[live],
        a[live],
        given["A_log"],
        given["dt_bias"],
        given["ssm_state"][slots],
        given["scale"],
    )
    _bf16("core", out["core"][live], core, 2, counts, failures)
    if out["core"][~live].any():
        failures.append("core: a pad row is not zero")
    got, error = out["ssm_state"][slots], 0.0
    if got.dtype == torch.bfloat16:
        _bf16("state", got, state, 2, counts, failures)
    else:
        error = float(((got.double() - state).abs() / largest(state, 2)).max())
        if not error <= STATE_BOUND:
            failures.append(f"state: {error:.2e} of its head's largest value > {STATE_BOUND}")
    gated = definition.gated_norm(out["core"][live], z[live], given["norm_weight"], given["eps"])
    _bf16("gated", out["gated"][live], gated, 1, counts, failures)
    others = [slot for slot in range(len(given["ssm_state"])) if slot not in slots.tolist()]
    for name in ("conv_state", "ssm_state"):
        if not torch.equal(out[name][others].nan_to_num(7.0), given[name][others].nan_to_num(7.0)):
            failures.append(f"{name}: a slot that no row names changed")
    return failures, counts, error


def norm_failures(given: dict[str, Any], out: dict[str, Any]) -> tuple[list[str], list[Count]]:
    """(failures, counts) of one `gemma_norm` run; the residual is bit for bit."""
    failures: list[str] = []
    counts: list[Count] = []
    x, residual = definition.gemma_norm(given["hidden"], given.get("residual"), given["norm_weight"], given["eps"])
    _bf16("x", out["x"], x, 1, counts, failures)
    if not torch.equal(out["residual_out"], residual):
        failures.append("residual: not the rounded sum")
    return failures, counts
