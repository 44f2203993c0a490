# SPDX-License-Identifier: Apache-2.0
"""The spec of Qwen3.8-2.4T-A95B (MXFP4 experts) for SGLang's `--enable-amd-monokernel`.

`SPEC` serves `Qwen3_5MoeForCausalLM` on gfx950 at tensor-parallel size 8. SGLang takes one spec per architecture, so
a family's spec picks its geometry by config from a table; `make_spec` builds the same spec around another table and
another runtime (`sgl-amd-mono simulate` does so with the `small` geometry and the simulator).

Refusals come in two phases: `config_reasons` before a weight is read, `model_reasons` with the weights loaded. Every
line says what was found, what is needed and which fix. Checks of the state pools belong to the first forward: the
pools do not exist when `build` runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from sglang.kernels.plugin_kernels.amd.spec import (
    FLAG,
    BuildContext,
    DeviceLimits,
    Feature,
    MonoSpec,
    Numerics,
    NumericsKind,
    Requirements,
)

from sgl_amd_mono.common import check, state
from sgl_amd_mono.common.flydsl_version import flydsl_reasons
from sgl_amd_mono.common.geometry import GeometryError
from sgl_amd_mono.common.refusals import Weight, by_layer, flag, projection_reasons, reason, weight_reasons
from sgl_amd_mono.common.runtime import Runtime, RuntimeRequest, hip_runtime
from sgl_amd_mono.qwen38_a95b_mxfp4.check import attach as attach_check
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import MX_BLOCK, Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.step import MAX_LAYERS, Step, build_step

logger = logging.getLogger(__name__)

#: The contract version this spec is written against.
API_VERSION = 1

#: Rows of a step that the kernels are built for. SGLang captures each of them below its ceiling.
WIDTHS = tuple(range(1, 9))

#: SGLang features that are served. Speculative decoding: K2 runs the verify steps, K1 those of chains. Each other is
#: refused at start.
FEATURES: frozenset[Feature] = frozenset({Feature.SPECULATIVE_DECODING})

#: The noise floor: how far the order of float32 sums alone moves a row of an output, roundings to bf16 included, as
#: 1 - cosine (`rel`: relative L2). K1's at the true sizes, K2's on two ranks of a small one. test/helpers/noise.py
#: measures them, and a test holds them to these figures.
NOISE = {
    "k1.core": 1e-6,
    "k1.conv": 2e-8,
    "k1.state": 1e-8,
    "k2.out": 3e-6,
    "k2.out.rel": 2.5e-3,
    "k2.res_out.rel": 1e-4,
}

#: Bounds of each launch against SGLang's own layer on the same inputs, in the contract's names, as multiples of NOISE.
#: K1's residual is bit for bit SGLang's. K1's other bounds leave room for one normed element that falls to the other
#: side of a bf16 step: with MXFP4 projections it may flip a code, which moves all products of its row by about 1e-2
#: (5e-5 as 1 - cosine). K2's leave room for SGLang's fused MoE kernel, which rounds in places of its own and was seen
#: at cosine 0.9984 while healthy.
NUMERICS = Numerics(
    kind=NumericsKind.TOLERANCE,
    bounds={
        "k1.core.cosine": 1 - 100 * NOISE["k1.core"],  # 0.9999
        "k1.conv.cosine": 1 - 5_000 * NOISE["k1.conv"],  # 0.9999
        "k1.state.cosine": 1 - 10_000 * NOISE["k1.state"],  # 0.9999
        "k1.res_out.max_abs": 0.0,
        "k2.out.cosine": 1 - 3_333 * NOISE["k2.out"],  # 0.990
        "k2.out.rel": 60 * NOISE["k2.out.rel"],  # 0.15
        # 0.02: ten times a bf16 rounding of every element; the next layer starts from it unchecked
        "k2.res_out.rel": 200 * NOISE["k2.res_out.rel"],
    },
)

#: Set to 1: K1 has one hop, and K2 forms the core of what it leaves.
ONE_HOP = "SGLANG_AMD_MONO_ONE_HOP"
#: Set to 1: K2 of a GDN layer and K1 of the next one are one launch.
ONE_LAUNCH = "SGLANG_AMD_MONO_ONE_LAUNCH"
#: Variable -> what it turns on.
OPTIONS = {ONE_HOP: "K1 leaves the gated norm to K2", ONE_LAUNCH: "K2 and the next layer's K1 are one launch"}

#: Environment variables of SGLang: name -> (value needed, why). One that this SGLang does not have is not asked for.
ENVIRONMENT: dict[str, tuple[Any, str]] = {
    "SGLANG_USE_AITER": (True, "the experts stay in AITER's shuffled layout, which the kernels read"),
    "SGLANG_ROCM_GDN_ONLINE_MXFP4": (False, "the kernels read the GDN projections as the checkpoint has them"),
}

#: State dtypes of the SSM pool that the kernels are tested for.
STATE_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

SILU = ("silu", "swish")
NO_FLAG = f"start without {FLAG}"
OTHER_CHECKPOINT = f"serve a Qwen3.8-2.4T-A95B checkpoint, or {NO_FLAG}"
BF16_WEIGHT = f"serve a checkpoint that leaves this weight in bfloat16 (exclude it from quantisation), or {NO_FLAG}"
PROJECTION = f"serve a checkpoint with this weight in bfloat16 or in Quark's MXFP4 (W4A4), or {NO_FLAG}"
MXFP4_EXPERTS = (
    "serve the MXFP4 (Quark) checkpoint with SGLANG_USE_AITER=1 and without options that change the experts' layout, "
    f"or {NO_FLAG}"
)

GeometryTable = Mapping[str, Callable[[int], Geometry]]


# ---- the geometry of a config


def expected_config(geometry: Geometry) -> dict[str, Any]:
    """What the Hugging Face config must say for this geometry: field -> value. Sizes are the model's, not a rank's."""
    return {
        "hidden_size": geometry.hidden,
        "linear_num_key_heads": geometry.key_heads_total,
        "linear_num_value_heads": geometry.value_heads_total,
        "linear_key_head_dim": geometry.head_dim,
        "linear_value_head_dim": geometry.head_dim,
        "linear_conv_kernel_dim": geometry.conv_width,
        "num_experts": geometry.experts,
        "num_experts_per_tok": geometry.top_k,
        "moe_intermediate_size": geometry.moe_intermediate_total,
        "shared_expert_intermediate_size": geometry.shared_intermediate_total,
        "norm_topk_prob": True,
        "attn_output_gate": True,
        "rms_norm_eps": geometry.eps,
    }


def choose(table: GeometryTable, tp: int, hf_config: Any) -> tuple[Geometry | None, list[str]]:
    """The table's geometry that fits the config, or None and why the nearest one does not."""
    config = state.text_config(hf_config)
    nearest: list[str] | None = None
    for label, make in table.items():
        try:
            geometry = make(tp)
        except GeometryError as error:
            wrong = [reason(f"tensor-parallel size {tp}", str(error), f"sizes that divide ({label})", "--tp-size 8")]
        else:
            wrong = _config_differences(geometry, config)
            if not wrong:
                return geometry, []
        if nearest is None or len(wrong) < len(nearest):
            nearest = wrong
    return None, nearest or []


def _config_differences(geometry: Geometry, config: Any) -> list[str]:
    wrong = []
    # SGLang's attention takes an absent output gate for True
    absent = {"attn_output_gate": True}
    for name, need in expected_config(geometry).items():
        found = getattr(config, name, absent.get(name))
        if found != need:
            wrong.append(reason(f"config.{name}", repr(found), repr(need), OTHER_CHECKPOINT))
    heads = getattr(config, "num_attention_heads", None) or 0
    # SGLang takes an absent head size for hidden / heads
    head_dim = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // heads if heads else 0)
    width, need_width = heads * head_dim, geometry.q_heads_total * geometry.attn_head_dim
    if width != need_width:
        found = f"{heads} x {head_dim} = {width}"
        wrong.append(reason("config.num_attention_heads x head_dim", found, need_width, OTHER_CHECKPOINT))
    activation = getattr(config, "hidden_act", None)
    if activation not in SILU:
        wrong.append(reason("config.hidden_act", repr(activation), "'silu'", OTHER_CHECKPOINT))
    gate = getattr(config, "output_gate_type", None)
    if gate is not None and gate not in SILU:
        wrong.append(reason("config.output_gate_type", repr(gate), "'swish' or none", OTHER_CHECKPOINT))
    return wrong


# ---- phase 1: arguments


def config_reasons(
    cfg: Any,
    hf_config: Any,
    *,
    table: GeometryTable,
    tp_sizes: Sequence[int],
    environment: Mapping[str, tuple[Any, str]],
    check_flydsl: bool,
) -> list[str]:
    """Why these server arguments, this config or this environment cannot be served, before a weight is read.

    SGLang itself checks GPU, tensor-parallel size, features and dtype, and words those lines.
    """
    config = state.text_config(hf_config)
    # a TP size outside the spec's is SGLang's line; the config is then checked at a size that divides
    tp = cfg.tp_size if cfg.tp_size in tp_sizes else tp_sizes[-1]
    _, reasons = choose(table, tp, hf_config)
    layers = getattr(config, "num_hidden_layers", 0)
    if layers > MAX_LAYERS:
        reasons.append(
            reason("config.num_hidden_layers", layers, f"at most {MAX_LAYERS}, one tag slot a layer", OTHER_CHECKPOINT)
        )
    reasons += _argument_reasons(cfg, config) + _variable_reasons()
    for name, (need, why) in environment.items():
        found = state.env_value(name)
        if found is not state.UNKNOWN and found != need:
            reasons.append(reason(name, found, f"{need}: {why}", f"set {name}={int(need)}"))
    return reasons + (flydsl_reasons() if check_flydsl else [])


def _variable_reasons() -> list[str]:
    """The plugin's own variables that hold neither 1 nor 0 nor nothing."""
    reasons = []
    for read in (check.asked, *(partial(flag, name, meaning) for name, meaning in OPTIONS.items())):
        try:
            read()
        except ValueError as error:
            reasons.append(str(error))
    return reasons


def _argument_reasons(cfg: Any, config: Any) -> list[str]:
    reasons = []
    backend = cfg.linear_attn_decode_backend or cfg.linear_attn_backend
    if backend != "triton":
        reasons.append(
            reason("GDN decode backend", repr(backend), "'triton', whose state layout K1 reads",
                   "--linear-attn-decode-backend triton")
        )  # fmt: skip
    decodes = cfg.speculative_algorithm is None  # else K1 is built only where it can keep the states as SGLang does
    if decodes and cfg.enable_linear_replayssm:
        reasons.append(
            reason("--enable-linear-replayssm", "on", "off: K1 updates the state in place",
                   "start without --enable-linear-replayssm")
        )  # fmt: skip
    if cfg.enable_unified_memory:
        reasons.append(
            reason("--enable-unified-memory", "on", "off: its state slots move while a step runs",
                   "start without --enable-unified-memory")
        )  # fmt: skip
    if (cfg.moe_a2a_backend or "none") != "none":
        reasons.append(
            reason("--moe-a2a-backend", repr(cfg.moe_a2a_backend), "'none': K2 holds a share of every expert",
                   "--moe-a2a-backend none")
        )  # fmt: skip
    if cfg.expert_distribution_recorder_mode is not None:
        reasons.append(
            reason("--expert-distribution-recorder-mode", repr(cfg.expert_distribution_recorder_mode),
                   "none: K2 routes inside the kernel and records nothing",
                   "start without --expert-distribution-recorder-mode")
        )  # fmt: skip
    conv, ssm = state.pool_dtypes(cfg, config)
    if decodes and ssm not in STATE_DTYPES:
        reasons.append(
            reason("SSM state dtype", ssm, "torch.float32 or torch.bfloat16, the ones tested for drift",
                   "--mamba-ssm-dtype float32")
        )  # fmt: skip
    if decodes and conv is not torch.bfloat16:
        reasons.append(
            reason("conv state dtype", conv, "torch.bfloat16", "unset SGLANG_MAMBA_CONV_DTYPE")
        )  # fmt: skip
    return reasons


# ---- phase 2: loaded weights


def gdn_weights(g: Geometry) -> dict[str, Weight]:
    """The weights of a GDN layer: field of GdnView -> what is needed."""
    bf16, at = torch.bfloat16, "linear_attn."
    return {
        "input_norm": Weight("input_layernorm.weight", (g.hidden,), bf16, BF16_WEIGHT),
        "conv": Weight(at + "conv1d.weight", (g.conv_channels, 1, g.conv_width), bf16, BF16_WEIGHT),
        "a_log": Weight(at + "A_log", (g.value_heads,), torch.float32, OTHER_CHECKPOINT),
        "dt_bias": Weight(at + "dt_bias", (g.value_heads,), bf16, OTHER_CHECKPOINT),
        "gated_norm": Weight(at + "norm.weight", (g.head_dim,), bf16, BF16_WEIGHT),
        "post_norm": Weight("post_attention_layernorm.weight", (g.hidden,), bf16, BF16_WEIGHT),
    }


def gdn_projections(g: Geometry) -> dict[str, Weight]:
    """The weights of a GDN layer that may be bf16 or MXFP4, in their bf16 form: field of GdnView -> what is needed."""
    bf16, at = torch.bfloat16, "linear_attn."
    return {
        "qkvz": Weight(at + "in_proj_qkvz.weight", (g.qkvz_rows, g.hidden), bf16, PROJECTION),
        "ba": Weight(at + "in_proj_ba.weight", (g.ba_rows, g.hidden), bf16, PROJECTION),
        "out": Weight(at + "out_proj.weight", (g.hidden, g.core_width), bf16, PROJECTION),
    }


def attention_weights(g: Geometry) -> dict[str, Weight]:
    """The weights that the kernels read of an attention layer: field of AttentionView -> what is needed."""
    return {"post_norm": Weight("post_attention_layernorm.weight", (g.hidden,), torch.bfloat16, BF16_WEIGHT)}


def attention_projections(g: Geometry) -> dict[str, Weight]:
    """As `gdn_projections`, of an attention layer."""
    return {"out": Weight("self_attn.o_proj.weight", (g.hidden, g.core_width), torch.bfloat16, PROJECTION)}


def moe_weights(g: Geometry, fused_shared: bool = False) -> dict[str, Weight]:
    """Router, shared and routed experts: field of MoeView -> what is needed. Experts are uint8, two fp4 a byte.

    With `fused_shared` the shared expert is the last of the experts, and has no weights of its own but the gate's.
    """
    bf16, u8 = torch.bfloat16, torch.uint8
    ri, si, h = g.moe_intermediate, g.shared_intermediate, g.hidden
    e = g.experts + fused_shared
    shared = {
        "shared_gate_up": Weight("mlp.shared_expert.gate_up_proj.weight", (2 * si, h), bf16, BF16_WEIGHT),
        "shared_down": Weight("mlp.shared_expert.down_proj.weight", (h, si), bf16, BF16_WEIGHT),
    }
    return {
        "router": Weight("mlp.gate.weight", (g.experts, h), bf16, BF16_WEIGHT),
        **({} if fused_shared else shared),
        "shared_gate": Weight("mlp.shared_expert_gate.weight", (1, h), bf16, BF16_WEIGHT),
        "w13": Weight("mlp.experts.w13_weight", (e, 2 * ri, h // 2), u8, MXFP4_EXPERTS),
        "w13_scale": Weight("mlp.experts.w13_weight_scale", (e, 2 * ri, h // MX_BLOCK), u8, MXFP4_EXPERTS),
        "w2": Weight("mlp.experts.w2_weight", (e, h, ri // 2), u8, MXFP4_EXPERTS),
        "w2_scale": Weight("mlp.experts.w2_weight_scale", (e, h, ri // MX_BLOCK), u8, MXFP4_EXPERTS),
    }


def model_reasons(model: torch.nn.Module, hf_config: Any, *, table: GeometryTable, check_flydsl: bool) -> list[str]:
    """Why the loaded weights cannot be served: every layer, every weight, its dtype, shape, strides and address."""
    group = state.tensor_parallel_group()
    geometry, reasons = choose(table, group.size, hf_config)
    if geometry is None:
        return reasons
    view = state.read_model(model)
    device = next(model.parameters()).device
    reasons += [reason("model", found, "SGLang's own layer boundaries", NO_FLAG) for found in view.uncovered]
    if len(view.layers) > MAX_LAYERS:
        reasons.append(reason("layers", len(view.layers), f"at most {MAX_LAYERS}", OTHER_CHECKPOINT))
    reasons += by_layer({layer.layer: layer_reasons(layer, geometry, device) for layer in view.layers})
    return reasons + (flydsl_reasons() if check_flydsl else [])


def layer_reasons(view: state.GdnView | state.AttentionView, g: Geometry, device: torch.device) -> list[str]:
    """Why one layer's weights or form cannot be served; the lines do not name the layer."""
    is_gdn = view.kind == "gdn"
    wrong: list[str] = []
    for name, weight in (gdn_weights(g) if is_gdn else attention_weights(g)).items():
        wrong += weight_reasons(getattr(view, name), weight, device)
    for name, weight in (gdn_projections(g) if is_gdn else attention_projections(g)).items():
        module = weight.name.split(".")[-2]
        scale = getattr(view, f"{name}_scale")
        how = {"scheme": view.schemes[module], "shuffled": module in view.shuffled, "device": device}
        wrong += projection_reasons(getattr(view, name), scale, weight, **how)
    for name, eps in (("input_layernorm", view.input_eps), ("post_attention_layernorm", view.post_eps)):
        if eps != g.eps:
            wrong.append(reason(f"{name} epsilon", eps, g.eps, OTHER_CHECKPOINT))
    wrong += _gdn_form(view, g) if is_gdn else _attention_form(view, g)
    return wrong + _moe_reasons(view.moe, g, device)


def _gdn_form(view: state.GdnView, g: Geometry) -> list[str]:
    wrong = []
    if view.conv_bias is not None:
        wrong.append(reason("linear_attn.conv1d.bias", "a bias", "no bias", OTHER_CHECKPOINT))
    if view.conv_activation not in SILU:
        wrong.append(reason("linear_attn conv activation", repr(view.conv_activation), "'silu'", OTHER_CHECKPOINT))
    if view.gated_norm_bias is not None:
        wrong.append(reason("linear_attn.norm.bias", "a bias", "no bias", OTHER_CHECKPOINT))
    if view.gated_norm_activation not in SILU:
        found = repr(view.gated_norm_activation)
        wrong.append(reason("linear_attn.norm activation", found, "'swish'", OTHER_CHECKPOINT))
    if view.gated_norm_groups not in (None, g.head_dim):
        found = f"groups of {view.gated_norm_groups}"
        wrong.append(reason("linear_attn.norm", found, f"one group of {g.head_dim}", OTHER_CHECKPOINT))
    if not view.gated_norm_before_gate:
        wrong.append(reason("linear_attn.norm", "the norm after the gate", "the norm before it", OTHER_CHECKPOINT))
    if view.gated_norm_eps != g.eps:
        wrong.append(reason("linear_attn.norm epsilon", view.gated_norm_eps, g.eps, OTHER_CHECKPOINT))
    return wrong


def _attention_form(view: state.AttentionView, g: Geometry) -> list[str]:
    wrong = []
    if not view.has_output_gate:
        wrong.append(reason("self_attn output gate", "none", "an output gate", OTHER_CHECKPOINT))
    if view.core_width != g.core_width:
        wrong.append(reason("self_attn.o_proj input width", view.core_width, g.core_width, OTHER_CHECKPOINT))
    return wrong


def _moe_reasons(moe: state.MoeView, g: Geometry, device: torch.device) -> list[str]:
    if not moe.is_sparse:
        return [reason("mlp", "a dense MLP", "a sparse MoE block", OTHER_CHECKPOINT)]
    wrong = []
    fused, count = moe.fused_shared, g.experts + moe.fused_shared
    if fused and (moe.w13 is None or moe.w13.shape[0] != count or g.shared_intermediate != g.moe_intermediate):
        # not what K2 takes as a fused one: the experts' shapes would only repeat the same cause
        found = "no experts" if moe.w13 is None else f"{moe.w13.shape[0]} experts"
        need = f"{count}: the shared one last, {g.moe_intermediate} wide like the others"
        fix = "--disable-shared-experts-fusion"
        return [reason("mlp shared expert", f"fused into the routed ones, {found}", need, fix)]
    for name, weight in moe_weights(g, fused).items():
        wrong += weight_reasons(getattr(moe, name), weight, device)
    experts = (moe.w13, moe.w2)
    if all(w is not None and w.dtype is torch.uint8 for w in experts):
        if not all(moe.shuffled):
            names = " and ".join(n for n, ok in zip(("w13", "w2"), moe.shuffled) if not ok)
            found = f"{names} not shuffled (is_shuffled is unset)"
            wrong.append(reason("mlp.experts layout", found, "AITER's (16, 16) shuffle", MXFP4_EXPERTS))
        if moe.interleaved:
            found = "gate and up interleaved, although is_shuffled is set"
            fix = "set SGLANG_USE_AITER_MOE_GU_ITLV=0, or " + NO_FLAG
            wrong.append(reason("mlp.experts.w13 layout", found, "gate rows, then up rows", fix))
    if any(moe.padding):
        found = f"{moe.padding[0]} columns of hidden, {moe.padding[1]} of the intermediate"
        wrong.append(reason("mlp.experts padding", found, "none", OTHER_CHECKPOINT))
    if moe.local_experts not in (None, count):
        wrong.append(reason("mlp.experts on this rank", moe.local_experts, f"all {count}", "--ep-size 1"))
    if moe.activation not in SILU or not moe.gated:
        found = f"{moe.activation!r}{'' if moe.gated else ', not gated'}"
        wrong.append(reason("mlp.experts activation", found, "gated 'silu'", OTHER_CHECKPOINT))
    if moe.scoring != "softmax":
        wrong.append(reason("mlp.topk scoring", repr(moe.scoring), "'softmax'", OTHER_CHECKPOINT))
    if moe.top_k != g.top_k:
        wrong.append(reason("mlp.topk", f"{moe.top_k} experts a token", g.top_k, OTHER_CHECKPOINT))
    if not moe.renormalize:
        wrong.append(reason("mlp.topk weights", "not renormalised", "renormalised over the top k", OTHER_CHECKPOINT))
    return wrong + [reason("mlp", found, "the plain form", OTHER_CHECKPOINT) for found in moe.unusual]


# ---- the spec


def make_spec(
    *,
    name: str,
    geometries: GeometryTable,
    tp_sizes: tuple[int, ...],
    runtime_factory: Callable[[RuntimeRequest], Runtime],
    isa: str = "gfx950",
    widths: tuple[int, ...] = WIDTHS,
    resident_blocks: int | None = None,
    stop: bool = True,
    requires: Requirements | None = None,
    environment: Mapping[str, tuple[Any, str]] | None = None,
    check_flydsl: bool = True,
) -> MonoSpec:
    """A spec of this model family around a geometry table and a runtime.

    Args:
        name: what SGLang's log calls it.
        geometries: label -> geometry of a tensor-parallel size; the config picks one.
        tp_sizes: the union over the table.
        runtime_factory: called once a build on every rank; the HIP runtime, or the simulator's.
        isa: the ISA that SGLang reports.
        widths: rows of a step, ascending.
        resident_blocks: compute units needed; default: the first geometry's workgroups.
        stop: True: a failed wait ends the process with a GPU fault at address 0. False: the launch returns with its
            error word set (tests).
        requires: default: bfloat16, any attention backend.
        environment: default: `ENVIRONMENT`.
        check_flydsl: whether a missing or untested FlyDSL refuses.
    """
    environment = ENVIRONMENT if environment is None else environment
    blocks = resident_blocks or next(iter(geometries.values()))(tp_sizes[-1]).blocks

    def config_disable_reasons(cfg: Any, hf_config: Any) -> list[str]:
        return config_reasons(
            cfg, hf_config, table=geometries, tp_sizes=tp_sizes, environment=environment, check_flydsl=check_flydsl
        )

    def model_disable_reasons(model: torch.nn.Module, hf_config: Any, copies: dict) -> list[str]:
        return model_reasons(model, hf_config, table=geometries, check_flydsl=check_flydsl)

    def build(model: torch.nn.Module, hf_config: Any, ctx: BuildContext) -> Step:
        group = state.tensor_parallel_group()
        geometry, reasons = choose(geometries, group.size, hf_config)
        if geometry is None:  # SGLang asks model_disable_reasons first
            raise ValueError(f"{name}: " + "; ".join(reasons))
        step = build_step(
            model=model,
            hf_config=hf_config,
            geometry=geometry,
            group=group,
            runtime_factory=runtime_factory,
            isa=ctx.isa,
            widths=ctx.widths,
            deadline_s=ctx.deadline_s,
            stop=stop,
            name=name,
            verify_tokens=state.verify_tokens(),
            verify_differences=state.verify_differences() if state.verify_tokens() is not None else (),
            one_hop=flag(ONE_HOP, OPTIONS[ONE_HOP]),
            one_launch=flag(ONE_LAUNCH, OPTIONS[ONE_LAUNCH]),
        )
        if check.asked():
            attach_check(step, NUMERICS.bounds)
        return step

    return MonoSpec(
        name=name,
        devices={isa: DeviceLimits(widths=widths, tp_sizes=tp_sizes, resident_blocks=blocks)},
        features=FEATURES,
        requires=Requirements(dtypes=frozenset({"bfloat16"})) if requires is None else requires,
        numerics=NUMERICS,
        model_disable_reasons=model_disable_reasons,
        build=build,
        api_version=API_VERSION,
        config_disable_reasons=config_disable_reasons,
    )


SPEC = make_spec(
    name="qwen38-a95b-mxfp4",
    geometries={"Qwen3.8-2.4T-A95B": Geometry.a95b},
    tp_sizes=(8,),
    runtime_factory=hip_runtime,
)
