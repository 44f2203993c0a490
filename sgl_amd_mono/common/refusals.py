# SPDX-License-Identifier: Apache-2.0
"""How a refusal is worded: what was found, what is needed, which fix. The same fault in many layers is one line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

#: Columns of an MXFP4 weight that share one scale.
MX_BLOCK = 32

#: Class of Quark's scheme with MXFP4 weights and activations, and SGLang's variable that gives it another layout.
QUARK_MXFP4 = "QuarkW4A4MXFP4"
ASSEMBLY_GEMM = "SGLANG_ROCM_USE_AITER_FP4_ASM_GEMM"

#: Bytes that the widest load of the kernels takes at once: every weight starts at a multiple of it.
LOAD_BYTES = 16


def reason(what: str, found: Any, needed: Any, fix: str) -> str:
    """One refusal line: `what: found X; needed: Y; fix: Z`."""
    return f"{what}: found {found}; needed: {needed}; fix: {fix}"


def flag(variable: str, meaning: str) -> bool:
    """Whether an environment variable is 1; `meaning`: what it asks for.

    Raises:
        ValueError: it holds neither 1 nor 0 nor nothing.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ValueError(reason(variable, repr(value), f"1 ({meaning}), 0 or unset", f"set {variable}=1"))
    return value == "1"


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


def projection_reasons(
    tensor: torch.Tensor | None,
    scale: torch.Tensor | None,
    weight: Weight,
    *,
    scheme: str,
    shuffled: bool,
    device: torch.device | None = None,
) -> list[str]:
    """Why the kernels cannot read a projection that may be bf16, or MXFP4 as Quark stores it; empty where they can.

    Args:
        tensor, scale: the layer's `weight` and `weight_scale`.
        weight: the bf16 form, shape [N, K]. MXFP4: uint8 [N, K / 2], low nibble first, with uint8 e8m0 [N, K / 32].
        scheme: class name of the Quark scheme that runs the projection; its activations are what the kernels repeat.
        shuffled: whether SGLang has re-arranged weight and scale for AITER's assembly GEMM.
    """
    if tensor is None or tensor.dtype is weight.dtype:
        return weight_reasons(tensor, weight, device)
    if tensor.dtype is not torch.uint8 or scheme != QUARK_MXFP4:
        of = f" of {scheme or 'another method than Quark'}" if tensor.dtype is torch.uint8 else ""
        need = f"{weight.dtype}, or torch.uint8 of {QUARK_MXFP4}"
        return [reason(weight.name, f"{tensor.dtype}{of}", need, weight.fix)]
    if shuffled:
        found = "MXFP4 in the layout of AITER's assembly GEMM"
        return [reason(weight.name, found, "MXFP4 in Quark's plain layout", f"unset {ASSEMBLY_GEMM}")]
    rows, columns = weight.shape
    packed = Weight(weight.name, (rows, columns // 2), torch.uint8, weight.fix)
    codes = Weight(weight.name + "_scale", (rows, columns // MX_BLOCK), torch.uint8, weight.fix)
    return weight_reasons(tensor, packed, device) + weight_reasons(scale, codes, device)


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
