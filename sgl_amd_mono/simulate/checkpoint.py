# SPDX-License-Identifier: Apache-2.0
"""A small random-weight checkpoint of Qwen3_5MoeForCausalLM, its routed experts in Quark's MXFP4 (W4A4) form.

The tensors carry the names of a published checkpoint, so they come in through SGLang's own loader: per-expert
``gate_proj``, ``up_proj`` and ``down_proj`` as uint8 (two e2m1 values a byte, the even column in the low nibble) with
one e8m0 byte per 32 columns, everything else bf16 (A_log float32).
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

MX_BLOCK = 32
"""Columns that share one e8m0 scale (OCP Microscaling, MXFP4)."""

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the eight e2m1 codes without their sign bit (OCP Microscaling, table of FP4 E2M1)."""


PROJECTION = re.compile(r"\.(linear_attn|self_attn)\.\w+_?proj(_\w+)?$")
"""Names of the linear layers of GDN and attention layers."""


@dataclass(frozen=True)
class CheckpointShape:
    """Sizes of a whole model (not of one rank), under the names that its config.json uses."""

    hidden_size: int
    num_hidden_layers: int
    full_attention_interval: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    vocab_size: int
    rms_norm_eps: float = 1e-6

    def layer_types(self) -> list[str]:
        """``linear_attention`` but for every ``full_attention_interval``-th layer."""
        every = self.full_attention_interval
        return [
            "full_attention" if (layer + 1) % every == 0 else "linear_attention"
            for layer in range(self.num_hidden_layers)
        ]

    def hf_config(self) -> dict:
        """The config.json of the checkpoint, quantization_config included."""
        sizes = asdict(self)
        rope = {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        }
        return {
            **sizes,
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "layer_types": self.layer_types(),
            "hidden_act": "silu",
            "norm_topk_prob": True,
            "attn_output_gate": True,
            "attention_bias": False,
            "partial_rotary_factor": 0.25,
            "rope_parameters": rope,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "quantization_config": quark_config(),
        }


def shape_of(geometry: Any) -> CheckpointShape:
    """The whole model that a rank's geometry (``qwen38_a95b_mxfp4.geometry.Geometry``) is a shard of."""
    return CheckpointShape(
        hidden_size=geometry.hidden,
        num_hidden_layers=geometry.layers,
        full_attention_interval=geometry.attention_interval,
        linear_num_key_heads=geometry.key_heads_total,
        linear_num_value_heads=geometry.value_heads_total,
        linear_key_head_dim=geometry.head_dim,
        linear_value_head_dim=geometry.head_dim,
        linear_conv_kernel_dim=geometry.conv_width,
        num_attention_heads=geometry.q_heads_total,
        num_key_value_heads=geometry.kv_heads_total,
        head_dim=geometry.attn_head_dim,
        num_experts=geometry.experts,
        num_experts_per_tok=geometry.top_k,
        moe_intermediate_size=geometry.moe_intermediate_total,
        shared_expert_intermediate_size=geometry.shared_intermediate_total,
        vocab_size=geometry.vocab,
        rms_norm_eps=geometry.eps,
    )


KEPT = ("re:.*linear_attn.*", "re:.*self_attn.*")
"""Quark's exclude patterns of the layers around the experts, which a checkpoint usually keeps in bf16."""


def quark_config(kept: tuple[str, ...] = KEPT) -> dict:
    """``quantization_config`` as Quark exports it: MXFP4 weights and activations but for what is excluded.

    ``kept``: names or ``re:`` patterns of the projections outside the experts that stay bf16.
    """
    mxfp4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": MX_BLOCK, "scale_format": "e8m0", "ch_axis": -1}
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        "exclude": [
            "lm_head",
            *kept,
            "re:.*mlp\\.gate$",
            "re:.*shared_expert.*",
            "re:.*conv1d$",
        ],
        "global_quant_config": {
            "weight": {**mxfp4, "is_dynamic": False},
            "input_tensors": {**mxfp4, "is_dynamic": True},
            "output_tensors": None,
            "bias": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
    }


def quantise_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 codes and scales of a float matrix, as a quantiser writes them into a checkpoint.

    ``weight`` is float32 ``[N, K]``, K a multiple of 32. Returns ``(packed, scale)``: uint8 ``[N, K/2]`` with the even
    column in the low nibble, and uint8 ``[N, K/32]`` e8m0 codes. The scale puts the block's largest magnitude into
    [3.5, 7): the exponent is rounded up where the mantissa is at least 1.75 (Quark's "even" rule).
    """
    rows, columns = weight.shape
    if columns % MX_BLOCK:
        raise ValueError(f"K={columns} is not a multiple of the MX block of {MX_BLOCK} columns")
    blocks = weight.float().reshape(rows, columns // MX_BLOCK, MX_BLOCK)
    amax_bits = blocks.abs().amax(-1).view(torch.int32)
    exponent = ((amax_bits + 0x200000) >> 23) & 0xFF
    code = (exponent - 2).clamp(1, 253)
    scaled = torch.ldexp(blocks, (127 - code).unsqueeze(-1).float())
    nibbles = e2m1_codes(scaled).reshape(rows, columns)
    packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    return packed.to(torch.uint8), code.to(torch.uint8)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """The 4-bit e2m1 codes (uint8) of float32 values: round to nearest, ties to even, saturating at 6; sign kept."""
    magnitude = values.abs().clamp(max=E2M1_MAGNITUDES[-1])
    # three ranges of equal steps: 0.5 below 2, 1 below 4, 2 above; the codes count on from one range to the next
    above_two, above_four = magnitude >= 2.0, magnitude >= 4.0
    step = 0.5 * (1 + above_two.float()) * (1 + above_four.float())
    code = torch.round(magnitude / step) + 2 * (above_two.float() + above_four.float())
    return code.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


@dataclass(frozen=True)
class Gains:
    """Standard deviations of the parts' outputs for inputs of unit variance.

    Chosen so that each part of a layer moves the logits by more than re-ordered sums do. MXFP4 activations amplify a
    small difference (a code that flips moves its value by a quarter), so the stream is carried by a strong embedding,
    which keeps one layer's flips from growing through the next; and the router decides clearly, because a swapped
    expert is the largest single effect of a rounding.
    """

    embedding: float = 12.0
    router: float = 4.0
    routed_down: float = 1.0
    shared_down: float = 1.4
    shared_gate: float = 3.0
    attention_out: float = 2.0
    head: float = 3.0


class _Draw:
    """Seeded normal draws, one stream in the order of the calls."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, sigma: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * sigma + mean

    def linear(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        """``[rows, columns]`` so that a unit-variance input gives outputs of standard deviation ``gain``."""
        return self.normal(rows, columns, sigma=gain * columns**-0.5)


def tensors(shape: CheckpointShape, seed: int, gains: Gains):
    """Yield ``(name, tensor)`` of the whole checkpoint, under the names of a published one."""
    draw = _Draw(seed)
    bf16 = torch.bfloat16
    hidden = shape.hidden_size
    key_dim = shape.linear_num_key_heads * shape.linear_key_head_dim
    value_dim = shape.linear_num_value_heads * shape.linear_value_head_dim
    conv_channels = 2 * key_dim + value_dim

    yield "model.embed_tokens.weight", draw.normal(shape.vocab_size, hidden, sigma=gains.embedding).to(bf16)
    for layer, kind in enumerate(shape.layer_types()):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}.weight", draw.normal(hidden, sigma=0.1).to(bf16)
        if kind == "linear_attention":
            gdn = f"{at}.linear_attn"
            yield f"{gdn}.in_proj_qkv.weight", draw.linear(conv_channels, hidden).to(bf16)
            yield f"{gdn}.in_proj_z.weight", draw.linear(value_dim, hidden).to(bf16)
            yield f"{gdn}.in_proj_b.weight", draw.linear(shape.linear_num_value_heads, hidden).to(bf16)
            yield f"{gdn}.in_proj_a.weight", draw.linear(shape.linear_num_value_heads, hidden).to(bf16)
            yield (
                f"{gdn}.conv1d.weight",
                draw.normal(conv_channels, 1, shape.linear_conv_kernel_dim, sigma=0.5).to(bf16),
            )
            yield f"{gdn}.A_log", draw.normal(shape.linear_num_value_heads, sigma=0.5)
            yield f"{gdn}.dt_bias", draw.normal(shape.linear_num_value_heads, sigma=0.5, mean=-1.0).to(bf16)
            yield f"{gdn}.norm.weight", draw.normal(shape.linear_value_head_dim, sigma=0.1, mean=1.0).to(bf16)
            yield f"{gdn}.out_proj.weight", draw.linear(hidden, value_dim, gain=gains.attention_out).to(bf16)
        else:
            attention = f"{at}.self_attn"
            q_rows = shape.num_attention_heads * shape.head_dim * 2  # the query and its output gate
            kv_rows = shape.num_key_value_heads * shape.head_dim
            yield f"{attention}.q_proj.weight", draw.linear(q_rows, hidden).to(bf16)
            yield f"{attention}.k_proj.weight", draw.linear(kv_rows, hidden).to(bf16)
            yield f"{attention}.v_proj.weight", draw.linear(kv_rows, hidden, gain=2.0).to(bf16)
            yield f"{attention}.o_proj.weight", draw.linear(hidden, q_rows // 2, gain=gains.attention_out).to(bf16)
            yield f"{attention}.q_norm.weight", draw.normal(shape.head_dim, sigma=0.1).to(bf16)
            yield f"{attention}.k_norm.weight", draw.normal(shape.head_dim, sigma=0.1).to(bf16)
        mlp = f"{at}.mlp"
        yield f"{mlp}.gate.weight", draw.linear(shape.num_experts, hidden, gain=gains.router).to(bf16)
        yield f"{mlp}.shared_expert_gate.weight", draw.linear(1, hidden, gain=gains.shared_gate).to(bf16)
        shared = shape.shared_expert_intermediate_size
        yield f"{mlp}.shared_expert.gate_proj.weight", draw.linear(shared, hidden, gain=1.5).to(bf16)
        yield f"{mlp}.shared_expert.up_proj.weight", draw.linear(shared, hidden).to(bf16)
        yield f"{mlp}.shared_expert.down_proj.weight", draw.linear(hidden, shared, gain=gains.shared_down).to(bf16)
        routed = shape.moe_intermediate_size
        for expert in range(shape.num_experts):
            for name, rows, columns, gain in (
                ("gate_proj", routed, hidden, 1.5),
                ("up_proj", routed, hidden, 1.0),
                ("down_proj", hidden, routed, gains.routed_down),
            ):
                packed, scale = quantise_mxfp4(draw.linear(rows, columns, gain))
                yield f"{mlp}.experts.{expert}.{name}.weight", packed
                yield f"{mlp}.experts.{expert}.{name}.weight_scale", scale
    yield "model.norm.weight", draw.normal(hidden, sigma=0.1).to(bf16)
    yield "lm_head.weight", draw.linear(shape.vocab_size, hidden, gain=gains.head).to(bf16)


def write(
    folder: Path,
    shape: CheckpointShape | None = None,
    seed: int = 0,
    gains: Gains | None = None,
    mxfp4: str | None = None,
) -> Path:
    """Write config.json and model.safetensors into ``folder`` (made if missing); returns the folder.

    ``shape`` defaults to the model whose TP 1 and TP 2 shards are the ``small`` geometry. ``mxfp4``: a regular
    expression; the projections of GDN and attention layers whose names it matches, such as
    ``model.layers.0.linear_attn.in_proj_qkv``, are MXFP4 as well.
    """
    from safetensors.torch import save_file

    from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry

    shape = shape or shape_of(Geometry.small(1))
    folder.mkdir(parents=True, exist_ok=True)
    config, kept, found = shape.hf_config(), [], {}
    for name, tensor in tensors(shape, seed, gains or Gains()):
        module = name.removesuffix(".weight")
        if PROJECTION.search(module) and mxfp4 is not None and re.search(mxfp4, module):
            found[name], found[f"{name}_scale"] = quantise_mxfp4(tensor)
            continue
        found[name] = tensor.contiguous()
        kept += [module] if PROJECTION.search(module) else []
    if mxfp4 is not None:
        config["quantization_config"] = quark_config(tuple(kept))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(found, folder / "model.safetensors")
    return folder
