# SPDX-License-Identifier: Apache-2.0
"""The noise floor: what the order of float32 sums alone moves a tensor by.

A definition is evaluated in float32 several times, each with all its sums in another seeded order. The spread of the
results is the floor: two correct kernels may differ by it, and a threshold is a stated multiple of it.

    python -m helpers.noise        prints the floors beside what is stated

A test measures the stated figures again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import stock_definition as definition
from helpers.stock_definition import Float32
from sgl_amd_mono.common.check import row_differences
from sgl_amd_mono.qwen38_a95b_mxfp4 import trial_k2
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layer_naive

SEEDS = tuple(range(6))  # 0 takes the terms as they come
EPS = 1e-6

FLOORS = {"x": 2e-7, "conv": 3e-8, "core": 2.5e-7, "state": 2e-7, "gated": 2.5e-7}
"""Largest spread of an element before it is rounded, of the largest value of its row (x, conv, core) or of its row's
value head (state, gated)."""

FRONT_FLOORS = {"core share": 2e-4, "state rel": 3e-8, "bf16 state share": 1e-5}
"""The whole front from given projections, what is stored: share of elements that differ, relative L2 of a state row."""

LAYER_SEEDS = (20, 22, 23)
LAYER_FLOORS = {"core": 1e-6, "conv": 2e-8, "state": 1e-8}
"""The whole front from hidden and residual on, projections included, what is stored: 1 - cosine of a row, worst over
LAYER_SEEDS. A projection that falls to the other side of a bf16 step makes nearly all of it. They are the spec's."""

TAIL_FLOORS = {
    "residual share": 1.5e-4,
    "residual rel": 1e-4,
    "x rel": 2.5e-4,
    "logits share": 2e-2,
    "given_x share": 4e-3,
    "logits max_abs": 7.8e-3,
    "out angle": 3e-6,
    "out rel": 2.5e-3,
    "out share": 3e-2,
}
"""The whole tail (K2) of two ranks at `small`, what is stored, worst over TAIL_SEEDS: share of elements that differ,
relative L2 and 1 - cosine of a row, largest difference of a logit (a bf16 unit). `given_x`: the logits of one x. `out`
moves where a code of MXFP4 flips."""
TAIL_SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Shape:
    """Sizes of a GDN layer on one rank."""

    name: str
    key_heads: int
    value_heads: int
    hidden: int
    head: int = 128

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.head

    @property
    def qkvz(self) -> int:
        return self.channels + self.value_heads * self.head


A95B = Shape("A95B TP8", 2, 16, 8192)
SHAPES = (A95B, Shape("27B TP1", 16, 48, 5120), Shape("27B TP2", 8, 24, 5120))

SMALL = Shape("small", 2, 16, 1024)
DTYPES = (torch.float32, torch.bfloat16)

TINY_HEAD = 1e-3  # q and k of key head 0 are this small, so that the norms' epsilon matters
LINEAR_HEAD = 1  # this value head's a + dt_bias is about 100: softplus is linear there, and exp of it overflows
LINEAR_BIAS, LINEAR_A_LOG = 100.0, -8.0


def inputs(shape: Shape, rows: int, state_dtype: torch.dtype, seed: int, slots: int = 10) -> dict[str, Tensor]:
    """A front's inputs from its projections on, in the names of `stock_kernels`; the second of three or more rows is a
    pad row, slot 0 holds NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(*size, generator=generator) * scale + mean

    heads, head = shape.value_heads, shape.head
    conv_weight = normal(shape.channels, 4, scale=0.4)
    for first in (0, shape.key_heads * head):
        conv_weight[first : first + head] *= TINY_HEAD
    a_log, dt_bias = normal(heads, scale=0.5), normal(heads, scale=0.5)
    a_log[LINEAR_HEAD], dt_bias[LINEAR_HEAD] = LINEAR_A_LOG, LINEAR_BIAS
    indices = (torch.randperm(slots - 1, generator=generator)[:rows] + 1).to(torch.int32)
    if rows > 2:
        indices[1] = -1
    conv_state = normal(slots, shape.channels, 3).bfloat16()
    ssm_state = normal(slots, heads, head, head, scale=0.25).to(state_dtype)
    conv_state[0], ssm_state[0] = float("nan"), float("nan")
    return {
        "qkvz": normal(rows, shape.qkvz).bfloat16(),
        "ba": normal(rows, 2 * heads).bfloat16(),
        "key_heads": shape.key_heads,
        "value_heads": heads,
        "head": head,
        "conv_state": conv_state,
        "conv_weight": conv_weight.bfloat16(),
        "A_log": a_log,
        "dt_bias": dt_bias.bfloat16(),
        "norm_weight": normal(head, scale=0.1, mean=1.0).bfloat16(),
        "ssm_state": ssm_state,
        "state_indices": indices,
        "scale": head**-0.5,
        "eps": EPS,
    }


def norm_inputs(shape: Shape, rows: int, seed: int, first_layer: bool = False) -> dict[str, Tensor]:
    """Inputs of the layer's input norm, in the names of `stock_kernels`."""
    generator = torch.Generator().manual_seed(seed)
    given = {
        "hidden": (torch.randn(rows, shape.hidden, generator=generator) * 0.5).bfloat16(),
        "norm_weight": (torch.randn(shape.hidden, generator=generator) * 0.1).bfloat16(),
        "eps": EPS,
    }
    if not first_layer:
        given["residual"] = (torch.randn(rows, shape.hidden, generator=generator) * 2).bfloat16()
    return given


@dataclass(frozen=True)
class Moved:
    """How far two results of one tensor lie apart, worst over its rows: 1 - cosine, relative L2, share of elements that
    differ."""

    angle: float
    rel: float
    share: float


def moved(found: Tensor, wanted: Tensor) -> Moved:
    """Rows first."""
    worst = row_differences(found.flatten(1), wanted.flatten(1)).worst()
    return Moved(1 - worst.cosine, worst.rel, float((found != wanted).float().mean()))


def measure_front(
    shape: Shape = A95B, rows: int = 8, state_dtype: torch.dtype = torch.float32, seed: int = 3, layer: bool = False
) -> dict[str, Moved]:
    """The stored core, conv rows and state rows of the whole front, between orders of its float32 sums, roundings to
    bf16 included; the worst order against the plain one.

    layer: from hidden and residual, with random projections, as check mode compares; else from given projections.
    """
    given, norm = inputs(shape, rows, state_dtype, seed), norm_inputs(shape, rows, seed)
    live = given["state_indices"] > 0
    slots = given["state_indices"][live].long()
    generator = torch.Generator().manual_seed(seed)
    rank = (shape.qkvz + 2 * shape.value_heads, shape.hidden)
    weight = (torch.randn(rank, generator=generator) * shape.hidden**-0.5).bfloat16().float() if layer else None

    def run(f: Float32) -> definition.Front:
        qkvz, ba = given["qkvz"], given["ba"]
        if weight is not None:
            x, _ = definition.gemma_norm(norm["hidden"], norm["residual"], norm["norm_weight"], EPS, f)
            order = f.order(shape.hidden)
            products = (definition.to_bf16(x).float()[:, order] @ weight[:, order].T).bfloat16()
            qkvz, ba = products[:, : shape.qkvz], products[:, shape.qkvz :]
        mixed, z, b, a = definition.split(qkvz, ba, shape.key_heads, shape.value_heads, shape.head)
        states = given["conv_state"][slots], given["ssm_state"][slots]
        return definition.front(mixed[live], z[live], b[live], a[live], given, *states, EPS, arithmetic=f)

    plain, *others = [run(Float32(seed)) for seed in SEEDS]
    found = {}
    for name, field in (("core", "gated"), ("conv", "windows"), ("state", "state")):
        runs = [moved(getattr(other, field), getattr(plain, field)) for other in others]
        found[name] = Moved(*(max(getattr(r, m) for r in runs) for m in ("angle", "rel", "share")))
    return found


def spread(evaluate: Callable[[Float32], Sequence[Tensor]], seeds: tuple[int, ...] = SEEDS) -> list[Tensor]:
    """Largest less smallest result over the orders, element by element, float64, of each tensor that is returned."""
    runs = [evaluate(Float32(seed)) for seed in seeds]
    out = []
    for results in zip(*runs, strict=True):
        stacked = torch.stack([result.double() for result in results])
        out.append(stacked.amax(0) - stacked.amin(0))
    return out


def largest(value: Tensor, dims: int) -> Tensor:
    """The largest size over the last `dims` dimensions, kept for broadcasting."""
    return value.double().abs().amax(tuple(range(-dims, 0)), keepdim=True)


def measure(shape: Shape = A95B, rows: int = 4, seed: int = 1) -> dict[str, float]:
    """The floors in `FLOORS`, measured: each kernel from the exact results of the one before."""
    given = inputs(shape, rows, torch.float32, seed)
    live = given["state_indices"] > 0
    slots = given["state_indices"][live].long()
    mixed, z, b, a = definition.split(given["qkvz"], given["ba"], shape.key_heads, shape.value_heads, shape.head)
    windows, state = given["conv_state"][slots], given["ssm_state"][slots]
    weights = given["conv_weight"]
    conv = definition.conv(mixed[live], windows, weights)[0]
    rule = (definition.to_bf16(conv), b[live], a[live], given["A_log"], given["dt_bias"], state, given["scale"])
    core, after = definition.packed_decode(*rule)
    norm = (definition.to_bf16(core), z[live], given["norm_weight"], EPS)
    gemma = norm_inputs(shape, rows, seed)
    gemma = (gemma["hidden"], gemma["residual"], gemma["norm_weight"], EPS)

    found = {}

    def note(
        names: str, wants: Sequence[Tensor], dims: Sequence[int], run: Callable[[Float32], Sequence[Tensor]]
    ) -> None:
        for name, want, n, moved in zip(names.split(), wants, dims, spread(run), strict=True):
            found[name] = float((moved / largest(want, n)).max())

    note("x", [definition.gemma_norm(*gemma)[0]], [1], lambda f: [definition.gemma_norm(*gemma, f)[0]])
    note("conv", [conv], [1], lambda f: [definition.conv(mixed[live], windows, weights, arithmetic=f)[0]])
    note("core state", [core, after], [2, 2], lambda f: definition.packed_decode(*rule, arithmetic=f))
    note("gated", [definition.gated_norm(*norm)], [1], lambda f: [definition.gated_norm(*norm, arithmetic=f)])
    return found


def measure_stored() -> dict[str, float]:
    """FRONT_FLOORS and LAYER_FLOORS, measured at the A95B shape."""
    f32, bf16 = (measure_front(state_dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    found = {
        "core share": max(f32["core"].share, bf16["core"].share),
        "state rel": f32["state"].rel,
        "bf16 state share": bf16["state"].share,
    }
    layers = [measure_front(seed=seed, layer=True) for seed in LAYER_SEEDS]
    return found | {name: max(layer[name].angle for layer in layers) for name in LAYER_FLOORS}


class Reordered(TorchDispatchMode):
    """Inside, float64 matrix products and means over the last dimension are float32 sums in the seeded order.

    For definitions that are written in float64: all that is not a sum stays as it is.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.arithmetic = Float32(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        wide = bool(args) and isinstance(args[0], Tensor) and args[0].dtype is torch.float64
        if wide and func is torch.ops.aten.mm.default:
            order = self.arithmetic.order(args[0].shape[1])
            return (args[0][:, order].float() @ args[1][order].float()).double()
        if wide and func is torch.ops.aten.mean.dim:
            return (self.arithmetic.sum(args[0].float()) / args[0].shape[-1]).double().unsqueeze(-1)
        return func(*args, **(kwargs or {}))


def measure_tail() -> dict[str, float]:
    """TAIL_FLOORS, measured: K2's definition on two ranks, eight rows."""
    geometry = Geometry.small(2)
    found = dict.fromkeys(TAIL_FLOORS, 0.0)
    for seed in TAIL_SEEDS:
        weights = [rank.naive() for rank in trial_k2.random_weights(geometry, seed)]
        step = trial_k2.random_inputs(geometry, 8, seed)
        traces = []
        for order in SEEDS:
            with Reordered(order):
                traces.append(layer_naive.layer_post(step.cores, step.residual, weights, step.row_index, geometry))
                traces[-1].given_x = layer_naive.logits(traces[0].x, weights[0].w_router)
        plain, *others = traces
        for name in found:
            tensor, metric = name.split()
            for other in others:
                got, want = getattr(other, tensor), getattr(plain, tensor)
                value = float((got.double() - want.double()).abs().max())
                if metric != "max_abs":
                    value = getattr(moved(got, want), metric)
                found[name] = max(found[name], value)
    return found


if __name__ == "__main__":
    for part, stated, measured in (
        ("K1, before rounding", FLOORS, measure()),
        ("K1, what is stored", {**FRONT_FLOORS, **LAYER_FLOORS}, measure_stored()),
        ("K2, what is stored", TAIL_FLOORS, measure_tail()),
    ):
        for name, value in measured.items():
            print(f"{part:20} {name:16} {value:.2e}  (stated {stated[name]:.1e})")
