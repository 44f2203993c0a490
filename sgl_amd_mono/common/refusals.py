# SPDX-License-Identifier: Apache-2.0
"""How a refusal is worded: what was found, what is needed, which fix. The same fault in many layers is one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

#: Bytes that the widest load of the kernels takes at once: every weight starts at a multiple of it.
LOAD_BYTES = 16


def reason(what: str, found: Any, needed: Any, fix: str) -> str:
    """One refusal line: `what: found X; needed: Y; fix: Z`."""
    return f"{what}: found {found}; needed: {needed}; fix: {fix}"


@dataclass(frozen=True)
class Weight:
    """What the kernels need of one weight.

    Attributes:
        name: SGLang's name below the layer, e.g. `linear_attn.in_proj_qkvz.weight`.
        shape: per rank.
        dtype: the only one that is read.
        fix: what a person changes where the dtype or the shape differs.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fix: str


def weight_reasons(tensor: torch.Tensor | None, weight: Weight, device: torch.device | None = None) -> list[str]:
    """Why the kernels cannot read `tensor` as `weight`; empty where they can. The lines do not name the layer."""
    if tensor is None:
        return [reason(weight.name, "no such weight", _describe(weight.dtype, weight.shape), weight.fix)]
    wrong = []
    if tensor.dtype is not weight.dtype:
        wrong.append(reason(weight.name, tensor.dtype, weight.dtype, weight.fix))
    if tuple(tensor.shape) != weight.shape:
        wrong.append(reason(weight.name, f"shape {list(tensor.shape)}", f"shape {list(weight.shape)}", weight.fix))
    elif not tensor.is_contiguous():
        need = _dense_strides(weight.shape)
        wrong.append(
            reason(
                weight.name,
                f"strides {list(tensor.stride())}",
                f"rows stored one after another, strides {list(need)}",
                "start without what re-arranges this weight after loading (LoRA, another weight layout option)",
            )
        )
    if tensor.data_ptr() % LOAD_BYTES:
        wrong.append(
            reason(
                weight.name,
                f"storage offset {tensor.storage_offset()}, {tensor.data_ptr() % LOAD_BYTES} bytes past an aligned one",
                f"an address that is a multiple of {LOAD_BYTES} bytes",
                "start without what packs this weight into a larger tensor",
            )
        )
    if device is not None and tensor.device != device:
        wrong.append(reason(weight.name, f"on {tensor.device}", f"on {device}", "start without CPU offload"))
    return wrong


def by_layer(reasons: Mapping[int, Iterable[str]]) -> list[str]:
    """Lines with their layers: `layers 0-2, 4 (4 of 92): ...`; a fault that several layers share is one line.

    Args:
        reasons: layer -> its lines, every layer of the model a key.
    """
    layers: dict[str, list[int]] = {}
    for layer, lines in reasons.items():
        for line in lines:
            layers.setdefault(line, []).append(layer)
    return [f"{_ranges(where, len(reasons))}: {line}" for line, where in layers.items()]


def _ranges(layers: list[int], total: int) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
    return f"layers {text} ({len(layers)} of {total})"


def _describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
