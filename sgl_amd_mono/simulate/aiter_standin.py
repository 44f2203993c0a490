# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the few names of AITER that SGLang's Quark MXFP4 MoE and linear paths call on gfx950.

SGLang's own code drives it: ``QuarkW4A4MXFp4MoE.process_weights_after_loading`` shuffles through it, and
``AiterRunnerCore.run`` calls its ``fused_moe``. Layouts follow the index formulas of AITER's ``shuffle_weight``
(16, 16) and ``e8m0_shuffle``; activations are quantised as its one-stage MXFP4 kernels do (1x32, scale rounded up).
It is named a stand-in because it is one: nothing of AITER is in it, and it says nothing of AITER's speed or order of
sums. Where AMD's own code object can run (``harness.chosen_moe``), ``fused_moe`` hands over to it.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from importlib.machinery import ModuleSpec

import torch

from sgl_amd_mono.simulate import sums
from sgl_amd_mono.simulate.checkpoint import E2M1_MAGNITUDES, MX_BLOCK, e2m1_codes, quantise_mxfp4

ROW_GROUP = 16
"""Rows of one shuffled weight tile."""

CHUNK_BYTES = 16
"""Bytes (32 e2m1 values) of one row that stay together in a shuffled weight tile."""

SCALE_ROWS = 32
SCALE_COLUMNS = 8
"""One shuffled scale tile: 32 rows x 8 codes in 256 bytes."""


def shuffle_weight(weight: torch.Tensor, layout: tuple[int, int] = (16, 16), **unused) -> torch.Tensor:
    """AITER's ``shuffle_weight``: uint8 ``[.., N, K/2]`` with byte (n, kb) at
    ``(n/16)*16*Kb + (kb/16)*256 + (n%16)*16 + kb%16``; the shape is kept."""
    if tuple(layout) != (16, 16):
        raise NotImplementedError(f"the stand-in shuffles in the layout (16, 16) only, not {layout}")
    rows, width = weight.shape[-2:]
    if rows % ROW_GROUP or width % (2 * CHUNK_BYTES):
        raise ValueError(f"[{rows}, {width}] does not divide into tiles of {ROW_GROUP} rows x {2 * CHUNK_BYTES} bytes")
    tiles = weight.reshape(-1, rows // ROW_GROUP, ROW_GROUP, width // CHUNK_BYTES, CHUNK_BYTES)
    return tiles.transpose(2, 3).contiguous().reshape(weight.shape)


def unshuffle_weight(weight: torch.Tensor) -> torch.Tensor:
    """The inverse of ``shuffle_weight``."""
    rows, width = weight.shape[-2:]
    tiles = weight.reshape(-1, rows // ROW_GROUP, width // CHUNK_BYTES, ROW_GROUP, CHUNK_BYTES)
    return tiles.transpose(2, 3).contiguous().reshape(weight.shape)


def e8m0_shuffle(scale: torch.Tensor) -> torch.Tensor:
    """AITER's ``e8m0_shuffle``: uint8 ``[R, C]`` with code (r, c) at
    ``((r/32)*(C/8) + c/8)*256 + (c%4)*64 + (r%16)*4 + ((c/4)%2)*2 + (r/16)%2``; the shape is kept."""
    rows, columns = scale.shape
    if rows % SCALE_ROWS or columns % SCALE_COLUMNS:
        raise ValueError(f"[{rows}, {columns}] does not divide into tiles of {SCALE_ROWS} x {SCALE_COLUMNS} codes")
    # axes: row tile, row half, row % 16, column tile, column half, column % 4
    tiles = scale.reshape(rows // SCALE_ROWS, 2, ROW_GROUP, columns // SCALE_COLUMNS, 2, 4)
    return tiles.permute(0, 3, 5, 2, 4, 1).contiguous().reshape(rows, columns)


def e8m0_unshuffle(scale: torch.Tensor) -> torch.Tensor:
    """The inverse of ``e8m0_shuffle``."""
    rows, columns = scale.shape
    tiles = scale.reshape(rows // SCALE_ROWS, columns // SCALE_COLUMNS, 4, ROW_GROUP, 2, 2)
    return tiles.permute(0, 5, 3, 1, 4, 2).contiguous().reshape(rows, columns)


@functools.cache
def _byte_values() -> torch.Tensor:
    """int32 ``[256]``: the two bf16 values of a byte of codes, the even column's in the low half."""
    magnitudes = torch.tensor(E2M1_MAGNITUDES)
    values = torch.cat([magnitudes, -magnitudes]).to(torch.bfloat16)
    byte = torch.arange(256)
    return torch.stack([values[byte & 0xF], values[byte >> 4]], dim=-1).view(torch.int32).flatten()


def dequantise(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values of MXFP4 codes as bf16, which holds them exactly: packed ``[N, K/2]``, scale ``[N, K/32]``."""
    values = _byte_values().index_select(0, packed.flatten().int()).view(torch.bfloat16)
    blocks = values.view(*scale.shape, MX_BLOCK)
    return (blocks * e8m0_value(scale).to(torch.bfloat16).unsqueeze(-1)).flatten(-2)


def e8m0_value(code: torch.Tensor) -> torch.Tensor:
    """2^(code - 127) as float32."""
    return torch.ldexp(torch.ones_like(code, dtype=torch.float32), code.to(torch.int32) - 127)


def quantise_activation(x: torch.Tensor) -> torch.Tensor:
    """What an MXFP4 activation keeps of float32 ``x [.., K]``: blocks of 32, scale rounded up (RCEIL).

    d = amax / 6, correctly rounded; the scale's exponent is that of d, one more when its mantissa is not zero, clamped
    to 1..253; codes round to nearest even and saturate at 6. Returns float32 values, exact.
    """
    blocks = x.float().unflatten(-1, (-1, MX_BLOCK))
    bits = (blocks.abs().amax(-1) / E2M1_MAGNITUDES[-1]).view(torch.int32)
    code = (((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()).clamp(1, 253)
    scale = e8m0_value(code).unsqueeze(-1)
    codes = e2m1_codes(blocks / scale).int()
    magnitudes = torch.tensor(E2M1_MAGNITUDES)
    return (torch.cat([magnitudes, -magnitudes])[codes] * scale).flatten(-2)


def dynamic_mxfp4_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """AITER's ``dynamic_mxfp4_quant``, before SGLang's MXFP4 linears: bf16 ``[M, K]`` to packed uint8 ``[M, K/2]`` and
    e8m0 ``[M, K/32]``, the scale's exponent rounded up from 1.75. A block of zeros has code 1; AITER's has 0."""
    return quantise_mxfp4(x)


def gemm_afp4wfp4(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scales: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype,
    y: torch.Tensor,
) -> torch.Tensor:
    """AITER's ``gemm_afp4wfp4`` of plain MXFP4 operands: ``y [M, N]`` = x w^T, float32 sums rounded once."""
    return y.copy_(sums.matmul(dequantise(x, x_scales), dequantise(w, w_scales)).to(dtype))


class ActivationType(enum.Enum):
    """Activations that SGLang may name; the stand-in computes Silu."""

    Silu = "Silu"
    Gelu = "Gelu"
    Swiglu = "Swiglu"
    Situv2 = "Situv2"


class QuantType(enum.Enum):
    """Quantisations that SGLang may name; the stand-in computes per_1x32."""

    No = "No"
    per_Token = "per_Token"
    per_128x128 = "per_128x128"
    per_1x32 = "per_1x32"


class GateMode(enum.Enum):
    """Where gate and up rows lie in w13; the stand-in reads them separated."""

    SEPARATED = "separated"
    INTERLEAVE = "interleave"


_plain: dict[tuple[int, int], dict[int, torch.Tensor]] = {}


def _plain_values(weight: torch.Tensor, scale: torch.Tensor, expert: int) -> torch.Tensor:
    """One expert's dequantised values, computed at its first use from the shuffled bytes that the launches read too."""
    experts = _plain.setdefault((weight.data_ptr(), weight.numel()), {})
    if expert not in experts:
        rows, columns = scale.shape[-2:]
        codes = scale.view(torch.uint8).reshape(-1, columns)[expert * rows : (expert + 1) * rows]
        experts[expert] = dequantise(unshuffle_weight(weight[expert].view(torch.uint8)), e8m0_unshuffle(codes))
    return experts[expert]


def forget_weights() -> None:
    """Drop the dequantised copies (a new model may be loaded at the same addresses)."""
    _plain.clear()


def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    quant_type: QuantType,
    activation: ActivationType,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    gate_mode: str = GateMode.SEPARATED.value,
    moe_sorting_dispatch_policy: int = 0,
    **unused,
) -> torch.Tensor:
    """AITER's ``fused_moe`` for MXFP4 experts: ``hidden_states`` bf16 ``[rows, H]`` to bf16 ``[rows, H]``.

    ``w1 [E, 2I, H/2]`` and ``w2 [E, H, I/2]`` packed and shuffled, gate rows before up rows. x is quantised from bf16,
    silu(g) * u from float32; the weighted sum over the picks runs in float32 in rank order and is rounded once (AMD's
    code object adds the picks' bf16 outputs in bf16, in the order in which its workgroups arrive).
    """
    if quant_type is not QuantType.per_1x32 or activation is not ActivationType.Silu:
        raise NotImplementedError(f"the stand-in computes per_1x32 with Silu, not {quant_type} with {activation}")
    if gate_mode != GateMode.SEPARATED.value:
        raise NotImplementedError(f"the stand-in reads separated gate and up rows, not {gate_mode!r}")
    for name, tensor in (("w1", w1), ("w2", w2)):
        if not getattr(tensor, "is_shuffled", False):
            raise ValueError(f"{name} is not marked is_shuffled: SGLang's post-processing did not shuffle it")
    given = {name for name, value in unused.items() if value not in (None, False, 0, 0.0)}
    if given:
        raise NotImplementedError(f"the stand-in does not cover the arguments {sorted(given)}")
    if _amd_moe():
        from sgl_amd_mono.simulate import aiter_moe

        return aiter_moe.fused_moe(
            hidden_states, w1, w2, topk_weight, topk_ids, w1_scale=w1_scale, w2_scale=w2_scale, seed=sums.order() or 0
        )
    width = w1.shape[1] // 2
    x = quantise_activation(hidden_states)
    per_pick = hidden_states.new_zeros(*topk_ids.shape, hidden_states.shape[-1], dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        row, pick = (topk_ids == expert).nonzero(as_tuple=True)
        projected = sums.matmul(x[row], _plain_values(w1, w1_scale, expert))
        gate, up = projected[:, :width], projected[:, width:]
        intermediate = quantise_activation(gate / (1.0 + torch.exp(-gate)) * up)
        per_pick[row, pick] = sums.matmul(intermediate, _plain_values(w2, w2_scale, expert))
    weighted = per_pick * topk_weight.float().unsqueeze(-1)
    return sums.add(weighted.transpose(-1, -2)).to(hidden_states.dtype)


@functools.cache
def _amd_moe() -> bool:
    """Whether this process runs AMD's code object."""
    from sgl_amd_mono.simulate import harness

    return harness.chosen_moe() == "amd"


def install() -> None:
    """Put the stand-in under the names ``aiter.*``; refuses where a real AITER is loaded."""
    present = sys.modules.get("aiter")
    if present is not None and not getattr(present, "is_sgl_amd_mono_standin", False):
        raise RuntimeError("AITER is loaded in this process: the stand-in is for machines without it")
    names = {
        "aiter": {"ActivationType": ActivationType, "QuantType": QuantType, "is_sgl_amd_mono_standin": True},
        "aiter.fused_moe": {"fused_moe": fused_moe},
        "aiter.ops": {},
        "aiter.ops.shuffle": {"shuffle_weight": shuffle_weight},
        "aiter.ops.flydsl": {},
        "aiter.ops.flydsl.moe_common": {"GateMode": GateMode},
        "aiter.utility": {},
        "aiter.utility.fp4_utils": {"e8m0_shuffle": e8m0_shuffle},
    }
    for name, attributes in names.items():
        module = types.ModuleType(name, doc="stand-in of sgl_amd_mono.simulate, not AITER")
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(attributes)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
