# SPDX-License-Identifier: Apache-2.0
"""The one declaration of every SGLang name that this package reads, and the check of it against an installed SGLang.

The check reads SGLang's source files and imports nothing of them, so it also serves on a machine where SGLang does not
import. A name is written

* ``name``: a function, class or variable of the module;
* ``name(a, b)``: a function with parameters of these names;
* ``Class.name``, ``Class.name(a, b)``, ``Outer.Class.name``: an attribute or a method that the class, or a base of it
  in the same module, defines, annotates, assigns on some object, or registers as a parameter or buffer.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

#: Read by the plugin itself: spec.py (the contract) and common/state.py (everything else).
PLUGIN_NAMES: dict[str, tuple[str, ...]] = {
    "sglang.srt.layers.attention.linear.kernels.gdn_triton": (
        "fused_recurrent_gated_delta_rule_packed_decode",
        "fused_sigmoid_gating_delta_rule_update",
    ),
    "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent": (
        "fused_sigmoid_gating_delta_rule_update(A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, "
        "initial_state_source, initial_state_indices, cu_seqlens, use_qk_l2norm_in_kernel, disable_state_update, "
        "intermediate_states_buffer, intermediate_state_indices, cache_steps)",
    ),
    "sglang.kernels.ops.attention.fla.fused_recurrent": (
        "fused_recurrent_gated_delta_rule_packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, "
        "ssm_state_indices, use_qk_l2norm_in_kernel)",
    ),
    "sglang.kernels.plugin_kernels.amd.spec": (
        "BACKEND",
        "FLAG",
        "MONOKERNEL_API_VERSION",
        "register(backend, architecture, path)",
        "find_spec(backend, architectures, isa)",
        "Feature",
        "Feature.SPECULATIVE_DECODING",
        "Requirements.dtypes",
        "Numerics.kind",
        "Numerics.bounds",
        "NumericsKind.TOLERANCE",
        "DeviceLimits.widths",
        "DeviceLimits.tp_sizes",
        "DeviceLimits.resident_blocks",
        "ShapeKey.forward_mode",
        "ShapeKey.rows",
        "ShapeKey.batch_size",
        "ShapeKey.tokens_per_request",
        "Plan.key",
        "BuildContext.isa",
        "BuildContext.widths",
        "BuildContext.deadline_s",
        "BuildContext.copies",
        "BuiltMonokernels.forward(self, plan)",
        "MonoSpec.name",
        "MonoSpec.devices",
        "MonoSpec.features",
        "MonoSpec.requires",
        "MonoSpec.numerics",
        "MonoSpec.model_disable_reasons",
        "MonoSpec.build",
        "MonoSpec.api_version",
        "MonoSpec.config_disable_reasons",
    ),
    "sglang.srt.kernel_plugins.amd.binding": (
        "install_monokernel_forward(model, hf_config, capture_tail_hooks)",
        "monokernel_disable_reasons(cfg, model_config, isa)",
        "device_isa",
    ),
    "sglang.srt.environ": (
        "envs",
        "Envs.SGLANG_USE_AITER",
    ),
    # server arguments that config_disable_reasons reads
    "sglang.srt.arg_groups.fields.exec_": (
        "ExecMamba.linear_attn_backend",
        "ExecMamba.linear_attn_decode_backend",
        "ExecMamba.enable_linear_replayssm",
        "ExecMamba.enable_linear_replayssm_spec",
        "ExecMamba.linear_attn_verify_backend",
        "ExecMamba.mamba_ssm_dtype",
        "ExecMoe.moe_a2a_backend",
        "ExecMoe.expert_distribution_recorder_mode",
    ),
    "sglang.srt.arg_groups.fields.parallel": ("Parallel.tp_size",),
    "sglang.srt.arg_groups.fields.memory": ("Memory.enable_unified_memory",),
    "sglang.srt.distributed.parallel_state": (
        "get_tp_group",
        "GroupCoordinator.world_size",
        "GroupCoordinator.rank_in_group",
        "GroupCoordinator.cpu_group",
    ),
    "sglang.srt.distributed": ("tensor_model_parallel_all_reduce",),
    "sglang.srt.runtime_context": ("get_spec", "get_exec"),
    "sglang.srt.layers.attention.linear.gdn_backend": ("GDNAttnBackend.verify_intermediate_state_indices",),
    "sglang.srt.arg_groups.fields.spec": (
        "Spec.speculative_algorithm",
        "Spec.speculative_num_draft_tokens",
        "Spec.speculative_eagle_topk",
    ),
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner": (
        "DecodeCudaGraphRunner._process_output_after_replay(self, output, forward_batch)",
        "DecodeCudaGraphRunner._replay_graph_key",
    ),
    "sglang.srt.model_executor.runner.base_runner": ("BaseRunner.model_runner",),
    "sglang.srt.model_executor.runner.shape_key": ("ShapeKey.size",),
    "sglang.srt.model_executor.forward_context": ("get_attn_backend",),
    "sglang.srt.model_executor.forward_batch_info": (
        "ForwardBatch.mrope_positions",
        "ForwardBatch.mamba_track_mask",
        "ForwardBatch.residual_stream",
    ),
    "sglang.srt.layers.attention.hybrid_linear_attn_backend": (
        "HybridLinearAttnBackend.linear_attn_backend",
        "MambaAttnBackendBase.forward_metadata",
        "MambaAttnBackendBase.req_to_token_pool",
        "MambaAttnBackendBase._track_mamba_state_decode("
        "self, forward_batch, conv_states, ssm_states, cache_indices, layer_id)",
    ),
    "sglang.srt.layers.attention.mamba.mamba2_metadata": ("ForwardMetadata.mamba_cache_indices",),
    "sglang.srt.mem_cache.memory_pool": (
        "HybridReqToTokenPool.mamba2_layer_cache(self, layer_id)",
        "HybridReqToTokenPool.mamba_pool",
        "MambaPool.size",
        "MambaPool.mamba_cache",
        "MambaPool.State.conv",
        "MambaPool.State.temporal",
        "MambaPool.State.replayssm_d",
        "MambaPool.SpeculativeState.intermediate_ssm",
        "MambaPool.SpeculativeState.intermediate_conv_window",
    ),
    "sglang.srt.models.qwen3_5_text": (
        "Qwen3_5MoeForCausalLM.model",
        "Qwen3_5MoeForCausalLM.lm_head",
        "Qwen3_5MoeForCausalLM.logits_processor",
        "Qwen3_5MoeForCausalLM.is_mrope_enabled",
        "Qwen3_5MoeForCausalLM.capture_aux_hidden_states",
        "Qwen3_5MoeForCausalLM.forward("
        "self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors, get_embedding)",
    ),
    "sglang.srt.models.qwen3_5": (
        "Qwen3_5ForCausalLM.embed_tokens",
        "Qwen3_5ForCausalLM.layers",
        "Qwen3_5ForCausalLM.norm",
        "Qwen3_5ForCausalLM.layers_to_capture",
        "Qwen3_5ForCausalLM.flashinfer_mnnvl_cutedsl_fusion",
        "Qwen3_5LinearDecoderLayer.linear_attn",
        "Qwen3_5LinearDecoderLayer.mlp",
        "Qwen3_5LinearDecoderLayer.layer_id",
        "Qwen3_5LinearDecoderLayer.input_layernorm",
        "Qwen3_5LinearDecoderLayer.post_attention_layernorm",
        "Qwen3_5AttentionDecoderLayer.mlp",
        "Qwen3_5AttentionDecoderLayer.layer_id",
        "Qwen3_5AttentionDecoderLayer.input_layernorm",
        "Qwen3_5AttentionDecoderLayer.post_attention_layernorm",
        "Qwen3_5AttentionDecoderLayer.attn",
        "Qwen3_5AttentionDecoderLayer.o_proj",
        "Qwen3_5AttentionDecoderLayer.q_size",
        "Qwen3_5AttentionDecoderLayer.attn_output_gate",
        "Qwen3_5AttentionDecoderLayer._prepare_qkv_gate(self, positions, hidden_states, forward_batch)",
        "Qwen3_5GatedDeltaNet.in_proj_qkvz",
        "Qwen3_5GatedDeltaNet.in_proj_ba",
        "Qwen3_5GatedDeltaNet.conv1d",
        "Qwen3_5GatedDeltaNet.A_log",
        "Qwen3_5GatedDeltaNet.dt_bias",
        "Qwen3_5GatedDeltaNet.norm",
        "Qwen3_5GatedDeltaNet.out_proj",
        "Qwen3_5GatedDeltaNet.activation",
        "fused_sigmoid_mul",
    ),
    "sglang.srt.models.qwen2_moe": (
        "Qwen2MoeSparseMoeBlock.experts",
        "Qwen2MoeSparseMoeBlock.gate",
        "Qwen2MoeSparseMoeBlock.topk",
        "Qwen2MoeSparseMoeBlock.shared_expert",
        "Qwen2MoeSparseMoeBlock.shared_expert_gate",
        "Qwen2MoeSparseMoeBlock.enable_shared_expert_fusion",
        "Qwen2MoeMLP.gate_up_proj",
        "Qwen2MoeMLP.down_proj",
    ),
    "sglang.srt.layers.moe.topk": (
        "TopK.topk_config",
        "TopKConfig.top_k",
        "TopKConfig.renormalize",
        "TopKConfig.scoring_func",
        "TopKConfig.use_grouped_topk",
        "TopKConfig.correction_bias",
        "TopKConfig.routed_scaling_factor",
    ),
    "sglang.srt.layers.moe.fused_moe_triton.layer": ("FusedMoE.moe_runner_config",),
    "sglang.srt.layers.moe.moe_runner.base": (
        "MoeRunnerConfig.activation",
        "MoeRunnerConfig.is_gated",
        "MoeRunnerConfig.apply_router_weight_on_input",
        "MoeRunnerConfig.routed_scaling_factor",
        "MoeRunnerConfig.swiglu_limit",
        "MoeRunnerConfig.gemm1_alpha",
        "MoeRunnerConfig.gemm1_clamp_limit",
        "MoeRunnerConfig.num_experts",
        "MoeRunnerConfig.num_local_experts",
    ),
    "sglang.srt.layers.quantization.quark.schemes.quark_w4a4_mxfp4_moe": (
        "QuarkW4A4MXFp4MoE.w13_weight",
        "QuarkW4A4MXFp4MoE.w13_weight_scale",
        "QuarkW4A4MXFp4MoE.w2_weight",
        "QuarkW4A4MXFp4MoE.w2_weight_scale",
        "QuarkW4A4MXFp4MoE.is_shuffled",
        "QuarkW4A4MXFp4MoE.intermediate_pad",
        "QuarkW4A4MXFp4MoE.hidden_pad",
    ),
    "sglang.srt.layers.quantization.quark.quark": ("QuarkConfig.scheme",),
    "sglang.srt.layers.quantization.quark.schemes.quark_w4a4_mxfp4": (
        "QuarkW4A4MXFP4.weight",
        "QuarkW4A4MXFP4.weight_scale",
        "QuarkW4A4MXFP4.use_aiter_asm_fp4_gemm",
    ),
    "sglang.srt.layers.quantization.unquant": ("UnquantizedLinearMethod.weight",),
    "sglang.srt.layers.linear": ("ColumnParallelLinear.bias", "RowParallelLinear.bias", "ReplicatedLinear.bias"),
    "sglang.srt.layers.layernorm": (
        "GemmaRMSNorm.weight",
        "GemmaRMSNorm.variance_epsilon",
    ),
    "sglang.kernels.ops.attention.fla.layernorm_gated": (
        "RMSNorm.weight",
        "RMSNorm.bias",
        "RMSNorm.eps",
        "RMSNorm.activation",
        "RMSNorm.group_size",
        "RMSNorm.norm_before_gate",
    ),
    "sglang.srt.configs.mamba_utils": (
        "mamba2_state_dtype(config)",
        "Mamba2StateDType.conv",
        "Mamba2StateDType.temporal",
    ),
    "sglang.srt.configs.qwen3_next": (
        "Qwen3NextConfig.hidden_size",
        "Qwen3NextConfig.num_hidden_layers",
        "Qwen3NextConfig.num_attention_heads",
        "Qwen3NextConfig.head_dim",
        "Qwen3NextConfig.hidden_act",
        "Qwen3NextConfig.output_gate_type",
        "Qwen3NextConfig.rms_norm_eps",
        "Qwen3NextConfig.linear_num_key_heads",
        "Qwen3NextConfig.linear_num_value_heads",
        "Qwen3NextConfig.linear_key_head_dim",
        "Qwen3NextConfig.linear_value_head_dim",
        "Qwen3NextConfig.linear_conv_kernel_dim",
        "Qwen3NextConfig.num_experts",
        "Qwen3NextConfig.num_experts_per_tok",
        "Qwen3NextConfig.moe_intermediate_size",
        "Qwen3NextConfig.shared_expert_intermediate_size",
        "Qwen3NextConfig.norm_topk_prob",
    ),
}

#: Set by AITER's weight shuffle on the tensors that it returns.
AITER_NAMES: tuple[str, ...] = ("is_guinterleave",)

#: Read or replaced by `sgl-amd-mono simulate` alone: its harness that runs SGLang on a machine without a GPU.
SIMULATE_NAMES: dict[str, tuple[str, ...]] = {
    "sglang.benchmark.one_batch": (
        "SpawnRanks",
        "_init_process_global_configs",
        "get_tokenizer",
        "load_model(server_args, port_args, gpu_id, tp_rank)",
        "prepare_synthetic_inputs_for_latency_test",
        "extend",
        "publish",
        "spawn_world_rank",
    ),
    "sglang.srt.distributed.bootstrap": ("_bind_threads_if_cpu",),
    "sglang.srt.plugins": ("load_plugins",),
    "sglang.srt.server_args": ("PortArgs", "prepare_server_args"),
    "sglang.srt.kernel_plugins.amd.binding": ("device_isa", "torch"),
    "sglang.srt.model_executor.forward_batch_info": ("ForwardBatch.init_new",),
    "sglang.srt.layers.activation": ("SiluAndMul.forward_native",),
    "sglang.srt.layers.layernorm": (
        "GemmaRMSNorm.forward_native",
        "GemmaRMSNorm.forward_hip",
        "_has_rocm_triton_gemma_rms_norm",
        "_use_aiter",
        "rocm_triton_gemma_fused_add_rmsnorm",
        "rocm_triton_gemma_rmsnorm",
    ),
    "sglang.srt.layers.logits_processor": ("LogitsProcessor._compute_lm_head",),
    "sglang.srt.layers.quantization.unquant": ("UnquantizedLinearMethod.apply",),
    "sglang.srt.layers.attention.linear.gdn_backend": (
        "causal_conv1d_update",
        "causal_conv1d_fn",
        "fused_gdn_gating",
        "_is_hip",
        "is_hip",
        "fused_qkv_split_gdn_prefill",
    ),
    "sglang.srt.layers.attention.linear.kernels.gdn_triton": (
        "chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule_packed_decode",
    ),
    "sglang.kernels.ops.attention.decode_attention": ("decode_attention_fwd",),
    "sglang.kernels.ops.attention.extend_attention": ("extend_attention_fwd",),
    "sglang.kernels.ops.attention.fla.chunk": ("chunk_gated_delta_rule",),
    "sglang.kernels.ops.attention.fla.chunk_delta_h": ("chunk_gated_delta_rule_fwd_h",),
    "sglang.kernels.ops.attention.fla.chunk_o": ("chunk_fwd_o",),
    "sglang.kernels.ops.attention.fla.cumsum": ("chunk_local_cumsum",),
    "sglang.kernels.ops.attention.fla.index": ("prepare_chunk_indices",),
    "sglang.kernels.ops.attention.fla.l2norm": ("l2norm_fwd",),
    "sglang.kernels.ops.attention.fla.op": ("exp",),
    "sglang.kernels.ops.attention.fla.wy_fast": ("recompute_w_u_fwd",),
    "sglang.kernels.ops.attention.fla.fused_recurrent": ("fused_recurrent_gated_delta_rule_packed_decode",),
    "sglang.kernels.ops.attention.linear.fused_gdn_gating": ("fused_gdn_gating",),
    "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent": ("fused_sigmoid_gating_delta_rule_update",),
    "sglang.kernels.ops.elementwise.elementwise": ("fused_gate_sigmoid_mul_add", "fused_sigmoid_mul"),
    "sglang.kernels.ops.mamba.causal_conv1d_triton": ("causal_conv1d_fn", "causal_conv1d_update"),
    "sglang.kernels.ops.attention.fla.chunk_fwd": ("chunk_gated_delta_rule_fwd_kkt_solve_kernel",),
    "sglang.kernels.ops.attention.fla.layernorm_gated": ("RMSNorm.forward", "_get_sm_count", "device_context"),
    "sglang.kernels.ops.attention.fla.utils": ("custom_device_ctx",),
    "sglang.kernels.ops.attention.triton_gdn_fused_proj": ("fused_qkv_split_gdn_prefill",),
    "sglang.kernels.ops.layernorm.minimax_m3_rmsnorm": ("gemma_fused_add_rmsnorm", "gemma_rmsnorm"),
    "sglang.srt.models.qwen3_5": ("fused_sigmoid_mul", "_GDN_FUSED_QKVZBA_RATIOS", "_is_hip"),
    "sglang.srt.utils.common": ("is_hip",),
    "sglang.srt.models.qwen2_moe": ("fused_gate_sigmoid_mul_add",),
    "sglang.srt.layers.quantization.quark.schemes.quark_w4a4_mxfp4_moe": (
        "_use_aiter",
        "_is_gfx95",
        "_is_shuffle_moe_mxfp4",
        "shuffle_weight",
        "e8m0_shuffle",
    ),
    "sglang.srt.layers.quantization.quark.quark": ("get_device_capability",),
    "sglang.srt.layers.quantization.quark.schemes.quark_w4a4_mxfp4": ("dynamic_mxfp4_quant", "gemm_afp4wfp4"),
    "sglang.srt.layers.moe.moe_runner.aiter": ("_SMALLM_MOE_ON", "is_gfx95_supported"),
    "sglang.srt.layers.moe.topk": ("fused_topk_native",),
}


def declared() -> dict[str, tuple[str, ...]]:
    """Every declared name: module -> names."""
    merged = {module: list(names) for module, names in PLUGIN_NAMES.items()}
    for module, names in SIMULATE_NAMES.items():
        merged.setdefault(module, []).extend(n for n in names if n not in merged.get(module, []))
    return {module: tuple(names) for module, names in merged.items()}


def leaf(name: str) -> str:
    """The attribute that a declared name ends in: `Class.attr(a, b)` -> `attr`."""
    return name.partition("(")[0].rsplit(".", 1)[-1]


def sglang_root() -> Path | None:
    """The folder of the installed `sglang` package, or None; SGLang is not imported."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def missing(names: Mapping[str, tuple[str, ...]] | None = None, root: Path | None = None) -> list[str]:
    """Declared names that SGLang's source does not provide, each as `module: name: what was found`.

    Args:
        names: module -> names; default: `declared()`.
        root: folder of the sglang package; default: the installed one.

    Raises:
        FileNotFoundError: SGLang is not installed.
    """
    root = root or sglang_root()
    if root is None:
        raise FileNotFoundError("SGLang is not installed in this environment")
    wrong = []
    for module, wanted in (declared() if names is None else names).items():
        path = _source(root, module)
        if path is None:
            wrong.append(f"{module}: no such module")
            continue
        # a package often re-exports its modules' names: `from .module import *`
        trees = [_parsed(source) for source in (path, *_star_imports(root, module, path))]
        for name in wanted:
            said = [_absent(tree, name) for tree in trees]
            if all(said):
                wrong.append(f"{module}: {said[0]}")
    return wrong


def _star_imports(root: Path, module: str, path: Path) -> list[Path]:
    """Source files of the modules that `module` imports all names of."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in _walk(_parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = _source(root, ".".join(part for part in (base, node.module or "") if part))
            found += [source] if source else []
    return found


def _source(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@lru_cache(maxsize=64)
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _absent(tree: ast.Module, name: str) -> str:
    """Why the module does not provide the name, or an empty text."""
    dotted, _, rest = name.partition("(")
    *owners, attribute = dotted.split(".")
    scope: ast.AST = tree
    for owner in owners:
        found = next((n for n in _walk(scope) if isinstance(n, ast.ClassDef) and n.name == owner), None)
        if found is None:
            return f"{dotted}: no class {owner}"
        scope = found
    nodes = list(_defining(tree, scope)) if owners else [tree]
    parameters = [p.strip() for p in rest.rstrip(")").split(",") if p.strip()]
    if parameters:
        functions = [f for node in nodes for f in _functions(node) if f.name == attribute]
        if not functions:
            return f"{dotted}: no such function"
        have = {a.arg for f in functions for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)}
        lost = [p for p in parameters if p not in have]
        return f"{dotted}: no parameter {', '.join(lost)}" if lost else ""
    if any(_provides(node, attribute, bool(owners)) for node in nodes):
        return ""
    return f"{dotted}: no such name"


def _defining(tree: ast.Module, cls: ast.AST, seen: frozenset[str] = frozenset()) -> Iterator[ast.AST]:
    """The class and its bases in the same module."""
    yield cls
    for base in getattr(cls, "bases", ()):
        if isinstance(base, ast.Name) and base.id not in seen:
            for node in _walk(tree):
                if isinstance(node, ast.ClassDef) and node.name == base.id and node is not cls:
                    yield from _defining(tree, node, seen | {base.id})


def _walk(scope: ast.AST) -> Iterator[ast.AST]:
    """Statements of a module or class, through `if`, `try` and `with`, not into functions."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            yield from _walk(node)


def _functions(scope: ast.AST) -> list[ast.FunctionDef]:
    return [n for n in _walk(scope) if isinstance(n, ast.FunctionDef)]


def _provides(scope: ast.AST, attribute: str, is_class: bool) -> bool:
    for node in ast.walk(scope) if is_class else _walk(scope):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == attribute:
            return True
        if isinstance(node, ast.alias) and attribute == (node.asname or node.name):
            return True
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (t for outer in targets for t in ast.walk(outer)):
                if isinstance(target, ast.Name) and target.id == attribute and not isinstance(target.ctx, ast.Load):
                    return True
                if is_class and isinstance(target, ast.Attribute) and target.attr == attribute:
                    return True
        if (
            is_class
            and isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("register_parameter", "register_buffer")
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and node.args[0].value == attribute
        ):
            return True
    return False
