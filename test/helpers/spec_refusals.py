# SPDX-License-Identifier: Apache-2.0
"""Every refusal of the spec, raised on SGLang's real argument, config and model classes; printed as JSON.

SGLang's runtime is one a process, so this runs as a process of its own: `python [-O] spec_refusals.py FOLDER PHASE`,
PHASE `arguments` or `weights`. Output: the last line, {case: [lines]}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def a95b_config() -> dict[str, Any]:
    """The config.json of the true model, as far as SGLang and the spec read it."""
    from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
    from sgl_amd_mono.simulate.checkpoint import CheckpointShape

    g = Geometry.a95b()
    shape = CheckpointShape(
        hidden_size=g.hidden,
        num_hidden_layers=g.layers,
        full_attention_interval=g.attention_interval,
        linear_num_key_heads=g.key_heads_total,
        linear_num_value_heads=g.value_heads_total,
        linear_key_head_dim=g.head_dim,
        linear_value_head_dim=g.head_dim,
        linear_conv_kernel_dim=g.conv_width,
        num_attention_heads=g.q_heads_total,
        num_key_value_heads=g.kv_heads_total,
        head_dim=g.attn_head_dim,
        num_experts=g.experts,
        num_experts_per_tok=g.top_k,
        moe_intermediate_size=g.moe_intermediate_total,
        shared_expert_intermediate_size=g.shared_intermediate_total,
        vocab_size=g.vocab,
    )
    return shape.hf_config()


ONLINE_MXFP4 = "SGLANG_ROCM_GDN_ONLINE_MXFP4"

LAYER_PERIOD = ["linear_attention"] * 3 + ["full_attention"]

SPECULATIVE = ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1",
               "--speculative-num-draft-tokens", "4"]  # fmt: skip

# case -> (config fields changed, arguments added, environment)
ARGUMENTS: dict[str, tuple[dict[str, Any], list[str], dict[str, str]]] = {
    "accepted": ({}, [], {}),
    "bf16 state": ({}, ["--mamba-ssm-dtype", "bfloat16"], {}),
    "tp 4": ({}, ["--tp-size", "4"], {}),
    "tp 3": ({}, ["--tp-size", "3"], {}),
    "dtype": ({}, ["--dtype", "float16"], {}),
    "hidden": ({"hidden_size": 4096}, [], {}),
    "key heads": ({"linear_num_key_heads": 32}, [], {}),
    "value heads": ({"linear_num_value_heads": 64}, [], {}),
    "key dim": ({"linear_key_head_dim": 64}, [], {}),
    "value dim": ({"linear_value_head_dim": 256}, [], {}),
    "conv": ({"linear_conv_kernel_dim": 3}, [], {}),
    "experts": ({"num_experts": 256}, [], {}),
    "top-k": ({"num_experts_per_tok": 8}, [], {}),
    "expert size": ({"moe_intermediate_size": 1024}, [], {}),
    "shared size": ({"shared_expert_intermediate_size": 1024}, [], {}),
    "activation": ({"hidden_act": "gelu"}, [], {}),
    "norm_topk_prob": ({"norm_topk_prob": False}, [], {}),
    "output gate": ({"attn_output_gate": False}, [], {}),
    "gate type": ({"output_gate_type": "sigmoid"}, [], {}),
    "eps": ({"rms_norm_eps": 1e-5}, [], {}),
    "attention heads": ({"num_attention_heads": 32}, [], {}),
    "layers": ({"num_hidden_layers": 128, "layer_types": LAYER_PERIOD * 32}, [], {}),
    "aiter": ({}, [], {"SGLANG_USE_AITER": "0"}),
    "conv dtype": ({}, [], {"SGLANG_MAMBA_CONV_DTYPE": "float16"}),
    "state dtype": ({}, ["--mamba-ssm-dtype", "float16"], {}),
    "state dtype config": ({"mamba_ssm_dtype": "float16"}, [], {}),
    "replayssm": ({}, ["--enable-linear-replayssm"], {}),
    "verify steps": ({}, SPECULATIVE, {}),
    "replayssm with verify steps": ({}, ["--enable-linear-replayssm", *SPECULATIVE], {}),
    "ragged verify": ({}, SPECULATIVE, {"SGLANG_RAGGED_VERIFY_MODE": "compact"}),
    "eagle3": ({}, ["--speculative-algorithm", "EAGLE3", *SPECULATIVE[2:]], {}),
    "check mode": ({}, [], {"SGLANG_AMD_MONO_CHECK": "yes"}),
    "two options": ({}, [], {"SGLANG_AMD_MONO_ONE_HOP": "on", "SGLANG_AMD_MONO_ONE_LAUNCH": "2"}),
    "on policy": ({}, ["--rl-on-policy-target", "fsdp", "--attention-backend", "triton"], {}),
    "deterministic": ({}, ["--enable-deterministic-inference", "--attention-backend", "triton"], {}),
    "eplb": ({}, ["--enable-eplb", "--ep-size", "8"], {}),
    "watchdog": ({}, ["--watchdog-timeout", "8"], {}),
    "a2a backend": ({}, ["--moe-a2a-backend", "mori"], {}),
    "unified memory": ({}, ["--enable-unified-memory", "--attention-backend", "triton"], {}),
    "recorder": ({}, ["--expert-distribution-recorder-mode", "stat"], {}),
    "enforced fusion": ({}, ["--enforce-shared-experts-fusion"], {}),
    "gdn backend": ({}, ["--linear-attn-decode-backend", "cutedsl"], {}),
    "two at once": ({"hidden_size": 4096, "num_experts": 256}, ["--tp-size", "4"], {"SGLANG_USE_AITER": "0"}),
}  # fmt: skip

# SGLang's features: case -> (arguments, SGLang's word for the feature)
FEATURES: dict[str, tuple[list[str], str]] = {
    "pipeline": (["--pp-size", "2"], "pipeline parallelism"),
    "expert parallel": (["--ep-size", "8"], "expert parallelism"),
    "lora": (["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "qkv_proj"], "LoRA"),
    "pd": (["--disaggregation-mode", "decode"], "PD disaggregation"),
    "routed experts": (["--enable-return-routed-experts"], "--enable-return-routed-experts"),
    "lmcache": (["--enable-lmcache"], "KV offload"),
    "memory saver": (["--enable-memory-saver"], "memory release"),
    "cpu offload": (["--cpu-offload-gb", "1"], "CPU offload"),
    "context parallel": (["--attn-cp-size", "8"], "context parallelism"),
    "dp attention": (["--enable-dp-attention", "--dp-size", "8"], "DP attention"),
    "multi-node": (
        ["--nnodes", "2", "--node-rank", "0", "--dist-init-addr", "localhost:1"],
        "multi-node tensor parallelism",
    ),
    "torch compile": (["--enable-torch-compile"], "torch-compiled decode"),
    "hicache": (["--enable-hierarchical-cache"], "KV offload"),
    "single batch overlap": (["--enable-single-batch-overlap"], "two-batch / single-batch overlap"),
    "indexer top-k": (["--enable-return-indexer-topk"], "--enable-return-indexer-topk"),
}


def arguments_phase(folder: Path) -> dict[str, list[str]]:
    """Each case through `ServerArgs.resolve_once`, as a server start does it: the lines of its ValueError."""
    from sgl_amd_mono.simulate import harness

    harness.prepare()
    import sgl_amd_mono

    sgl_amd_mono.register()
    harness.install()
    cases = dict(ARGUMENTS) | {name: ({}, argv, {}) for name, (argv, _) in FEATURES.items()}
    found = {name: _refused(folder / name.replace(" ", "-"), *case) for name, case in cases.items()}
    import sglang.srt.kernel_plugins.amd.binding as binding

    for name, isa in (("no gpu", None), ("gfx942", "gfx942")):
        binding.device_isa = lambda isa=isa: isa
        found[name] = _refused(folder / name.replace(" ", "-"), {}, [], {})
    binding.device_isa = lambda: harness.ISA
    found["features"] = sorted(feature.value for feature in binding.Feature)
    from sglang.srt import environ

    for name, value in (("online mxfp4", "1"), ("online mxfp4 off", "0")):  # a variable of newer SGLang
        variable = environ.EnvBool(False)
        variable.name = ONLINE_MXFP4
        setattr(type(environ.envs), ONLINE_MXFP4, variable)
        found[name] = _refused(folder / name.replace(" ", "-"), {}, [], {ONLINE_MXFP4: value})
    delattr(type(environ.envs), ONLINE_MXFP4)
    from sgl_amd_mono.common import flydsl_version

    for name, version in (("no flydsl", None), ("old flydsl", "0.4.0"), ("new flydsl", "0.6.0")):
        flydsl_version.installed = lambda version=version: version
        found[name] = _refused(folder / name.replace(" ", "-"), {}, [], {})
    return found


def _refused(folder: Path, fields: dict[str, Any], argv: list[str], environment: dict[str, str]) -> list[str]:
    from sglang.srt.server_args import prepare_server_args

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(a95b_config() | fields))
    base = ["--model-path", str(folder), "--device", "cpu", "--attention-backend", "torch_native", "--tp-size", "8",
            "--skip-tokenizer-init", "--disable-cuda-graph", "--moe-runner-backend", "aiter",
            "--grammar-backend", "none", "--sampling-backend", "pytorch", "--enable-amd-monokernel"]  # fmt: skip
    # the prefix cache of this model's states needs a GPU platform, or the form that keeps no extra buffer
    no_buffer = ["--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"]
    base += no_buffer if {"--enable-lmcache", "--enable-hierarchical-cache"} & set(argv) else ["--disable-radix-cache"]
    with _environment({"SGLANG_USE_AITER": "1"} | environment):
        try:
            prepare_server_args([*base, *argv]).resolve_once()
        except ValueError as error:
            head, *lines = str(error).split("\n  - ")
            return lines or [f"not the plugin: {head}"]
        except Exception as error:  # another refusal of SGLang's: visible, never taken for ours
            return [f"not the plugin: {type(error).__name__}: {error}"]
    return []


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---- loaded weights


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set a plain attribute of an object; returns what undoes it."""
    held = getattr(owner, "_parameters", {})
    if name in held:  # a parameter is found before a plain attribute of that name
        before = held[name]
        held[name] = value
        return lambda: held.__setitem__(name, before)
    before = owner.__dict__.get(name, getattr(owner, name, None))
    object.__setattr__(owner, name, value)
    return lambda: object.__setattr__(owner, name, before)


def _weight(owner: Any, name: str, change: Callable[[Any], Any] | None) -> Callable[[], None]:
    """Put another tensor, or none, in a parameter's place; returns what undoes it."""
    import torch

    before = owner._parameters[name]
    if change is None:
        owner._parameters[name] = None
        return lambda: owner._parameters.__setitem__(name, before)
    tensor = change(before.data)
    after = torch.nn.Parameter(tensor, requires_grad=False)
    for flag in ("is_shuffled",):
        if hasattr(before, flag):
            setattr(after, flag, getattr(before, flag))
    owner._parameters[name] = after
    return lambda: owner._parameters.__setitem__(name, before)


def _shifted(tensor: Any) -> Any:
    """The same values one element into a larger storage: an address that 16-byte loads cannot take."""
    flat = tensor.new_empty(tensor.numel() + 1)
    view = flat[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


def _strided(tensor: Any) -> Any:
    """The same values with rows further apart."""
    wide = tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] + 16))
    view = wide[..., : tensor.shape[-1]]
    view.copy_(tensor)
    return view


def weight_cases(model: Any) -> dict[str, Callable[[], list[Callable[[], None]]]]:
    """case -> what changes the loaded model; each returns what undoes it. Layers 0-2 are GDN, layer 3 attention.

    Layer 2 has its projections in MXFP4, layer 3 its output projection."""
    import torch
    from sglang.srt.layers.quantization.quark.schemes import QuarkW8A8Fp8

    layers = model.model.layers
    f3 = layers[1].mlp  # whose shared expert is fused
    g0, g1, g2, a3 = *(layers[n].linear_attn for n in range(3)), layers[3]
    mlp = layers[2].mlp
    experts = mlp.experts
    f32, f16 = torch.float32, torch.float16
    return {
        "accepted": list,
        "input norm": lambda: [_weight(layers[0].input_layernorm, "weight", lambda t: t.to(f32))],
        "qkvz dtype": lambda: [_weight(g0.in_proj_qkvz, "weight", lambda t: t.to(torch.float8_e4m3fn))],
        "qkvz shape": lambda: [_weight(g0.in_proj_qkvz, "weight", lambda t: t[:-16])],
        "qkvz stride": lambda: [_weight(g0.in_proj_qkvz, "weight", _strided)],
        "qkvz offset": lambda: [_weight(g0.in_proj_qkvz, "weight", _shifted)],
        "ba": lambda: [_weight(g1.in_proj_ba, "weight", lambda t: t.to(f16))],
        "ba uint8": lambda: [_weight(g1.in_proj_ba, "weight", lambda t: t.to(torch.uint8))],
        "mxfp4 shape": lambda: [_weight(g2.in_proj_qkvz, "weight", lambda t: t[:, :-16].contiguous())],
        "mxfp4 codes": lambda: [_weight(g2.in_proj_ba, "weight_scale", lambda t: t.to(f32))],
        "mxfp4 no codes": lambda: [_weight(g2.in_proj_ba, "weight_scale", None)],
        "mxfp4 transposed codes": lambda: [_weight(g2.in_proj_qkvz, "weight_scale", lambda t: t.t().contiguous().t())],
        "mxfp4 scheme": lambda: [_set(g2.in_proj_ba, "scheme", QuarkW8A8Fp8.__new__(QuarkW8A8Fp8))],
        "mxfp4 shuffled": lambda: [_set(g2.in_proj_qkvz, "use_aiter_asm_fp4_gemm", True)],
        "conv": lambda: [_weight(g0.conv1d, "weight", lambda t: t.to(f32))],
        "conv bias": lambda: [_set(g0.conv1d, "bias", torch.zeros(4))],
        "conv activation": lambda: [_set(g0, "activation", "gelu")],
        "A_log": lambda: [_weight(g0, "A_log", lambda t: t.to(torch.bfloat16))],
        "dt_bias": lambda: [_weight(g0, "dt_bias", lambda t: t.to(f32))],
        "gated norm dtype": lambda: [_weight(g0.norm, "weight", lambda t: t.to(f32))],
        "gated norm groups": lambda: [_set(g0.norm, "group_size", 64)],
        "gated norm order": lambda: [_set(g0.norm, "norm_before_gate", False)],
        "gated norm activation": lambda: [_set(g0.norm, "activation", "sigmoid")],
        "gated norm bias": lambda: [_set(g0.norm, "bias", torch.zeros(4))],
        "gated norm eps": lambda: [_set(g0.norm, "eps", 1e-5)],
        "out_proj": lambda: [_weight(g0.out_proj, "weight", lambda t: t.to(torch.uint8))],
        "mxfp4 out_proj shape": lambda: [_weight(g2.out_proj, "weight", lambda t: t[:-16].contiguous())],
        "mxfp4 out_proj stride": lambda: [_weight(g2.out_proj, "weight", _strided)],
        "mxfp4 o_proj codes": lambda: [_weight(a3.o_proj, "weight_scale", lambda t: t[:, :-8].contiguous())],
        "mxfp4 o_proj offset": lambda: [_weight(a3.o_proj, "weight_scale", _shifted)],
        "mxfp4 o_proj shuffled": lambda: [_set(a3.o_proj, "use_aiter_asm_fp4_gemm", True)],
        "post norm": lambda: [_weight(layers[1].post_attention_layernorm, "weight", lambda t: t.to(f32))],
        "norm eps": lambda: [_set(layers[1].input_layernorm, "variance_epsilon", 1e-5)],
        "o_proj": lambda: [_weight(a3.o_proj, "weight", lambda t: t.to(f32))],
        "attention width": lambda: [_set(a3, "q_size", 1024)],
        "attention post norm": lambda: [_weight(a3.post_attention_layernorm, "weight", lambda t: t.to(f32))],
        "output gate": lambda: [_set(a3, "attn_output_gate", False)],
        "router": lambda: [_weight(mlp.gate, "weight", lambda t: t.to(f32))],
        "shared gate_up": lambda: [_weight(mlp.shared_expert.gate_up_proj, "weight", lambda t: t.to(torch.uint8))],
        "shared down": lambda: [_weight(mlp.shared_expert.down_proj, "weight", lambda t: t[:, :-32])],
        "shared gate": lambda: [_weight(mlp.shared_expert_gate, "weight", lambda t: t.to(f32))],
        "shared down dtype": lambda: [_weight(mlp.shared_expert.down_proj, "weight", lambda t: t.to(f16))],
        "no router": lambda: [_set(mlp.gate, "weight", None)],
        "offloaded": lambda: [_weight(mlp.gate, "weight", lambda t: t.to("meta"))],
        "dense": lambda: [_absent(mlp, "experts")],
        "fused shared": lambda: _fused(f3),
        "fused shared, as many experts": lambda: [_set(f3, "enable_shared_expert_fusion", True)],
        "fused shared scale": lambda: [
            *_fused(f3),
            _weight(f3.experts, "w2_weight_scale", lambda t: t[:, :-32].contiguous()),
        ],
        "fused shared gate": lambda: [*_fused(f3), _weight(f3.shared_expert_gate, "weight", lambda t: t.to(f32))],
        "fused shared not shuffled": lambda: [*_fused(f3), _set(f3.experts.w2_weight, "is_shuffled", False)],
        "fused shared on some ranks": lambda: [
            *_fused(f3),
            _set(f3.experts.moe_runner_config, "num_local_experts", 17),
        ],
        "experts bf16": lambda: [_weight(experts, "w13_weight", lambda t: t.to(torch.bfloat16))],
        "experts shape": lambda: [_weight(experts, "w13_weight", lambda t: t[:, :-32])],
        "scale shape": lambda: [_weight(experts, "w2_weight_scale", lambda t: t.reshape(-1, t.shape[-1]))],
        "experts stride": lambda: [_weight(experts, "w2_weight", _strided)],
        "not shuffled": lambda: [_set(experts.w13_weight, "is_shuffled", False)],
        "half shuffled": lambda: [_set(experts.w2_weight, "is_shuffled", False)],
        "scale dtype": lambda: [_weight(experts, "w13_weight_scale", lambda t: t.view(torch.int8))],
        "interleaved": lambda: [_interleave(experts.w13_weight)],
        "padded hidden": lambda: [_set(experts, "hidden_pad", 256)],
        "padded": lambda: [_set(experts, "intermediate_pad", 128)],
        "not gated": lambda: [_set(experts.moe_runner_config, "is_gated", False)],
        "weights on the input": lambda: [_set(experts.moe_runner_config, "apply_router_weight_on_input", True)],
        "alpha": lambda: [_set(experts.moe_runner_config, "gemm1_alpha", 1.702)],
        "clamp of gemm 1": lambda: [_set(experts.moe_runner_config, "gemm1_clamp_limit", 7.0)],
        "grouped": lambda: [_set(mlp.topk.topk_config, "use_grouped_topk", True)],
        "another all-reduce": lambda: [_set(model.model, "flashinfer_mnnvl_cutedsl_fusion", object())],
        "expert activation": lambda: [_set(experts.moe_runner_config, "activation", "gelu")],
        "clamp": lambda: [_set(experts.moe_runner_config, "swiglu_limit", 7.0)],
        "scaling": lambda: [_set(experts.moe_runner_config, "routed_scaling_factor", 2.5)],
        "top-k": lambda: [_set(mlp.topk.topk_config, "top_k", 8)],
        "renormalise": lambda: [_set(mlp.topk.topk_config, "renormalize", False)],
        "scoring": lambda: [_set(mlp.topk.topk_config, "scoring_func", "sigmoid")],
        "correction bias": lambda: [_set(mlp.topk.topk_config, "correction_bias", torch.zeros(4))],
        "half the experts": lambda: [_set(experts.moe_runner_config, "num_local_experts", 16)],
        "every layer": lambda: [_weight(layer.mlp.gate, "weight", lambda t: t.to(f32)) for layer in layers],
        "two wrong": lambda: [
            _weight(g0.in_proj_ba, "weight", lambda t: t.to(f16)),
            _weight(a3.o_proj, "weight", lambda t: t.to(f32)),
        ],
    }


def _fused(block: Any) -> list[Callable[[], None]]:
    """What SGLang leaves where it fuses the shared expert: no module of its own, one expert more, the last."""
    import torch

    experts = block.experts
    names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    return [
        _set(block, "enable_shared_expert_fusion", True),
        _set(block, "shared_expert", None),
        _set(experts.moe_runner_config, "num_local_experts", len(experts.w13_weight) + 1),
        *(_weight(experts, name, lambda t: torch.cat([t, t[:1]])) for name in names),
    ]


def _absent(module: Any, name: str) -> Callable[[], None]:
    """Take a submodule away; returns what undoes it."""
    before = module._modules.pop(name)
    return lambda: module._modules.__setitem__(name, before)


def _interleave(weight: Any) -> Callable[[], None]:
    weight.is_guinterleave = True
    return lambda: delattr(weight, "is_guinterleave")


def weights_phase(folder: Path) -> dict[str, list[str]]:
    """Each case through the spec's `model_disable_reasons`, on a model that SGLang has loaded."""
    from helpers.spec_double import load_with_double

    model, spec, config = load_with_double(folder, mxfp4=r"\.2\.linear_attn\.|\.3\.self_attn\.o_proj")
    found = {}
    for name, change in weight_cases(model).items():
        undo = change()
        try:
            found[name] = spec.model_disable_reasons(model, config, {})
        finally:
            for step in reversed(undo):
                step()
    found["compute units"] = _few_compute_units(model, config)
    found["undone"] = spec.model_disable_reasons(model, config, {})
    return found


def _few_compute_units(model: Any, config: Any) -> list[str]:
    """The lines of SGLang's installation on a GPU with fewer compute units than the launches have workgroups."""
    import sglang.srt.kernel_plugins.amd.binding as binding

    properties = binding.torch.cuda.get_device_properties(0)
    before, properties.multi_processor_count = properties.multi_processor_count, 16
    undo = _weight(model.model.layers[0].mlp.gate, "weight", lambda t: t.float())  # a second cause: both are told
    try:
        binding.install_monokernel_forward(model=model, hf_config=config, capture_tail_hooks=[])
    except ValueError as error:
        return str(error).split("; rank ")
    finally:
        undo()
        properties.multi_processor_count = before
    return []


if __name__ == "__main__":
    phase = {"arguments": arguments_phase, "weights": weights_phase}[sys.argv[2]]
    print(json.dumps(phase(Path(sys.argv[1]))))
