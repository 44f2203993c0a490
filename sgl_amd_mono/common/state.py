# SPDX-License-Identifier: Apache-2.0
"""How SGLang's model, step and state pools are read: the only module of the plugin that touches SGLang internals.

Every name it reads is declared in `sglang_names.py` and checked by test/unit/test_contract.py. Three kinds of things:

* the tensor-parallel group (`RankGroup`), environment variables and config (`env_value`, `text_config`);
* the loaded model as neutral views: `read_model` -> `ModelView` of `GdnView` / `AttentionView`, one a layer, holding
  the parameters themselves: a pointer read at launch is the current one even after SGLang swapped a parameter's data;
* the step: `StatePools` (conv and SSM pools, state indices, prefix-cache tracking), `attention_core`, `gdn_core`,
  `run_embedding`, `input_norm`, `finish`; for check mode `all_reduce` and `after_replay`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sgl_amd_mono.common.refusals import by_layer, reason
from sgl_amd_mono.common.substitute import replaced

UNKNOWN = object()  # env_value of a variable that this SGLang does not have


# ---- process: group, environment, config


@dataclass(frozen=True)
class RankGroup:
    """The tensor-parallel group as the runtime needs it: CPU-side exchange of small Python objects.

    Attributes:
        rank: this process's rank in the group.
        size: ranks of the group.
        handle: torch.distributed CPU group; None in a group of one.
    """

    rank: int = 0
    size: int = 1
    handle: Any = field(default=None, compare=False, repr=False)

    def all_gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order. All ranks must call it."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return values

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.all_gather(None)


def tensor_parallel_group() -> RankGroup:
    """The tensor-parallel group that SGLang has set up in this process."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return RankGroup(rank=int(group.rank_in_group), size=int(group.world_size), handle=group.cpu_group)


def env_value(name: str) -> Any:
    """The value of SGLang's environment variable, or `UNKNOWN` where this SGLang has no such variable.

    SGLang's own `Requirements.env` raises on a variable it does not know.
    """
    from sglang.srt.environ import envs

    variable = getattr(envs, name, None)
    return UNKNOWN if variable is None else variable.get()


def verify_tokens() -> int | None:
    """Tokens a request of this server's verify steps; None where it decodes without speculation."""
    from sglang.srt.runtime_context import get_spec

    config = get_spec()
    return None if config.speculative_algorithm is None else int(config.speculative_num_draft_tokens or 1)


def verify_differences() -> list[str]:
    """What of this server's verify steps a recurrence over a chain of tokens with a state for each does not cover."""
    from sglang.srt.runtime_context import get_exec, get_spec

    topk, mamba, found = get_spec().speculative_eagle_topk, get_exec().mamba, []
    if topk != 1:
        found.append(f"the drafts are no chain (--speculative-eagle-topk {topk})")
    backend = mamba.linear_attn_verify_backend
    if backend not in (None, "triton"):
        found.append(f"the states are kept for --linear-attn-verify-backend {backend}")
    if mamba.enable_linear_replayssm or mamba.enable_linear_replayssm_spec:
        found.append("ReplaySSM keeps no state a draft token")
    return found


def text_config(hf_config: Any) -> Any:
    """The language model's config: itself, or the `text_config` of a wrapped one."""
    return getattr(hf_config, "text_config", None) or hf_config


def pool_dtypes(cfg: Any, hf_config: Any) -> tuple[torch.dtype, torch.dtype]:
    """(conv, SSM) dtypes of the state pools that SGLang will allocate.

    Args:
        cfg: server arguments while they are being resolved, or None once they are published: `--mamba-ssm-dtype`
            reaches SGLang's own rule through an environment variable that is set late.
        hf_config: the model's config.
    """
    from sglang.srt.configs.mamba_utils import mamba2_state_dtype

    dtypes = mamba2_state_dtype(hf_config)
    asked = None if cfg is None else cfg.mamba_ssm_dtype
    return dtypes.conv, getattr(torch, asked) if asked else dtypes.temporal


# ---- model: one view a layer


@dataclass(frozen=True)
class MoeView:
    """Router, routed experts and shared expert of one layer. Weights are the parameters of SGLang's modules, or None.

    `fused_shared` is True where SGLang has fused the shared expert into the routed ones. `shuffled` is the layout flag
    of w13 and w2, `interleaved` that of w13. The rest describes the routing and the activation.
    """

    is_sparse: bool
    block: Any = field(default=None, repr=False)
    router: torch.Tensor | None = None
    w13: torch.Tensor | None = None
    w13_scale: torch.Tensor | None = None
    w2: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    shared_gate_up: torch.Tensor | None = None
    shared_down: torch.Tensor | None = None
    shared_gate: torch.Tensor | None = None
    fused_shared: bool = False
    shuffled: tuple[bool, bool] = (False, False)
    interleaved: bool = False
    padding: tuple[int, int] = (0, 0)
    activation: str = ""
    gated: bool = True
    unusual: tuple[str, ...] = ()
    top_k: int = 0
    renormalize: bool = True
    scoring: str = "softmax"
    local_experts: int | None = None


@dataclass(frozen=True)
class GdnView:
    """A GDN layer. `conv_bias` is the conv's bias or None; `gated_norm_*` describe the norm after the recurrence.

    `*_scale` are the block scales of a quantised projection, or None. `shuffled` names the projections whose quantised
    weight lies in the layout of AITER's assembly GEMM: its dtype and shape are those of the plain one. `schemes`: name
    of a projection -> class of the Quark scheme that runs it, "" where it is not Quark's.
    """

    layer: int
    module: Any = field(repr=False)
    input_norm: torch.Tensor | None
    input_eps: float
    post_norm: torch.Tensor | None
    post_eps: float
    qkvz: torch.Tensor | None
    ba: torch.Tensor | None
    conv: torch.Tensor | None
    conv_bias: torch.Tensor | None
    conv_activation: str
    a_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    gated_norm: torch.Tensor | None
    gated_norm_bias: torch.Tensor | None
    gated_norm_eps: float
    gated_norm_activation: str
    gated_norm_groups: int | None
    gated_norm_before_gate: bool
    out: torch.Tensor | None
    moe: MoeView
    qkvz_scale: torch.Tensor | None = None
    ba_scale: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    shuffled: tuple[str, ...] = ()
    schemes: Mapping[str, str] = field(default_factory=dict)
    kind: str = "gdn"


@dataclass(frozen=True)
class AttentionView:
    """A full-attention layer. `core_width` is the width of its output projection's input, per rank.

    `out_scale`, `shuffled` and `schemes` as in `GdnView`.
    """

    layer: int
    module: Any = field(repr=False)
    input_norm: torch.Tensor | None
    input_eps: float
    post_norm: torch.Tensor | None
    post_eps: float
    core_width: int
    has_output_gate: bool
    out: torch.Tensor | None
    moe: MoeView
    out_scale: torch.Tensor | None = None
    shuffled: tuple[str, ...] = ()
    schemes: Mapping[str, str] = field(default_factory=dict)
    kind: str = "attention"


@dataclass(frozen=True)
class ModelView:
    """The loaded model: `layers` in order, and what keeps the forward from being covered, if anything."""

    model: Any = field(repr=False)
    layers: tuple[GdnView | AttentionView, ...]
    uncovered: tuple[str, ...] = ()

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Indices of the GDN layers."""
        return tuple(view.layer for view in self.layers if view.kind == "gdn")


def read_model(model: torch.nn.Module) -> ModelView:
    """Views of every layer of a loaded Qwen3.5-family text model (`Qwen3_5MoeForCausalLM`).

    Nothing is checked here: a part that is absent is None in its view, and the spec words the refusal.
    """
    body = model.model
    uncovered = []
    if getattr(body, "flashinfer_mnnvl_cutedsl_fusion", None) is not None:
        uncovered.append("the FlashInfer MNNVL CuTe DSL all-reduce fusion is installed")
    return ModelView(model, tuple(_read_layer(layer) for layer in body.layers), tuple(uncovered))


def _weight(module: Any) -> torch.Tensor | None:
    return None if module is None else getattr(module, "weight", None)


def _scale(module: Any) -> torch.Tensor | None:
    return getattr(module, "weight_scale", None)


def _shuffled(**projections: Any) -> tuple[str, ...]:
    """Names of the projections whose weight SGLang has shuffled for AITER's assembly GEMM."""
    return tuple(name for name, module in projections.items() if getattr(module, "use_aiter_asm_fp4_gemm", False))


def _schemes(**projections: Any) -> dict[str, str]:
    """Projection -> class name of its Quark scheme."""
    schemes = {name: getattr(module, "scheme", None) for name, module in projections.items()}
    return {name: "" if scheme is None else type(scheme).__name__ for name, scheme in schemes.items()}


def _read_layer(layer: Any) -> GdnView | AttentionView:
    common: dict[str, Any] = {
        "layer": int(layer.layer_id),
        "module": layer,
        "input_norm": _weight(layer.input_layernorm),
        "input_eps": float(layer.input_layernorm.variance_epsilon),
        "post_norm": _weight(layer.post_attention_layernorm),
        "post_eps": float(layer.post_attention_layernorm.variance_epsilon),
        "moe": _read_moe(layer.mlp),
    }
    gdn = getattr(layer, "linear_attn", None)
    if gdn is None:
        return AttentionView(
            **common,
            core_width=int(layer.q_size),
            has_output_gate=bool(layer.attn_output_gate),
            out=_weight(layer.o_proj),
            out_scale=_scale(layer.o_proj),
            shuffled=_shuffled(o_proj=layer.o_proj),
            schemes=_schemes(o_proj=layer.o_proj),
        )
    norm = gdn.norm
    projections = {"in_proj_qkvz": gdn.in_proj_qkvz, "in_proj_ba": gdn.in_proj_ba, "out_proj": gdn.out_proj}
    return GdnView(
        **common,
        qkvz=_weight(gdn.in_proj_qkvz),
        ba=_weight(gdn.in_proj_ba),
        conv=_weight(gdn.conv1d),
        conv_bias=gdn.conv1d.bias,
        conv_activation=str(gdn.activation),
        a_log=gdn.A_log,
        dt_bias=gdn.dt_bias,
        gated_norm=_weight(norm),
        gated_norm_bias=getattr(norm, "bias", None),
        gated_norm_eps=float(norm.eps),
        gated_norm_activation=str(norm.activation),
        gated_norm_groups=norm.group_size,
        gated_norm_before_gate=bool(norm.norm_before_gate),
        out=_weight(gdn.out_proj),
        qkvz_scale=_scale(gdn.in_proj_qkvz),
        ba_scale=_scale(gdn.in_proj_ba),
        out_scale=_scale(gdn.out_proj),
        shuffled=_shuffled(**projections),
        schemes=_schemes(**projections),
    )


def _read_moe(block: Any) -> MoeView:
    experts = getattr(block, "experts", None)
    if experts is None:
        return MoeView(is_sparse=False)
    config, routing = experts.moe_runner_config, block.topk.topk_config
    w13, w2 = getattr(experts, "w13_weight", None), getattr(experts, "w2_weight", None)
    # each of these changes the arithmetic of the routed experts or of their weights
    neutral = (
        ("apply_router_weight_on_input", bool(config.apply_router_weight_on_input), False),
        ("routed_scaling_factor", config.routed_scaling_factor or routing.routed_scaling_factor or 1.0, 1.0),
        ("swiglu_limit", config.swiglu_limit or None, None),
        ("gemm1_alpha", config.gemm1_alpha, None),
        ("gemm1_clamp_limit", config.gemm1_clamp_limit, None),
        ("grouped top-k", bool(routing.use_grouped_topk), False),
        ("router correction bias", None if routing.correction_bias is None else "present", None),
    )
    shared = block.shared_expert
    return MoeView(
        is_sparse=True,
        block=block,
        router=_weight(block.gate),
        w13=w13,
        w13_scale=getattr(experts, "w13_weight_scale", None),
        w2=w2,
        w2_scale=getattr(experts, "w2_weight_scale", None),
        shared_gate_up=None if shared is None else _weight(shared.gate_up_proj),
        shared_down=None if shared is None else _weight(shared.down_proj),
        shared_gate=_weight(block.shared_expert_gate),
        fused_shared=bool(block.enable_shared_expert_fusion),
        shuffled=(bool(getattr(w13, "is_shuffled", False)), bool(getattr(w2, "is_shuffled", False))),
        interleaved=bool(getattr(w13, "is_guinterleave", False)),
        padding=(int(getattr(experts, "hidden_pad", 0)), int(getattr(experts, "intermediate_pad", 0))),
        activation=str(config.activation),
        gated=bool(config.is_gated),
        unusual=tuple(f"{what} = {value}" for what, value, plain in neutral if value != plain),
        top_k=int(routing.top_k),
        renormalize=bool(routing.renormalize),
        scoring=str(routing.scoring_func),
        local_experts=config.num_local_experts,
    )


# ---- state pools and the step


class StateLayoutError(RuntimeError):
    """A state pool that the kernels cannot read, found at the first forward: pools do not exist when `build` runs."""


@dataclass(frozen=True)
class LayerState:
    """One GDN layer's slice of the pools.

    Attributes:
        conv: bf16 [slots, channels, taps - 1], any strides.
        ssm: f32 or bf16 [slots, value heads, V, K], slots dense inside.
        draft_conv, draft_ssm: the same behind each draft token, [places, tokens, ...]; None where SGLang keeps none.
            SGLang commits one of a request's tokens to `conv` and `ssm` once it has accepted it.
    """

    conv: torch.Tensor
    ssm: torch.Tensor
    draft_conv: torch.Tensor | None = None
    draft_ssm: torch.Tensor | None = None


class StatePools:
    """The conv and SSM pools of every GDN layer, found at the first step and again whenever SGLang has moved them.

    Args:
        layers: indices of the GDN layers.
        check: called with (layer, LayerState, slots) once per found pool; returns the reasons against it.

    Attributes:
        found: how often pools were found; pointers and strides taken before are of pools that SGLang has left.
    """

    def __init__(self, layers: Sequence[int], check: Callable[[int, LayerState, int], list[str]]) -> None:
        self._layers = tuple(layers)
        self._check = check
        self._anchor: tuple[Any, ...] | None = None
        self._states: dict[int, LayerState] = {}
        self.found = 0
        self._linear: Any = None

    def begin(self, requests: int, *, bind: bool = True) -> torch.Tensor | None:
        """Bind to the running step's attention backend and return its state indices, int32 [>= requests].

        Slot 0 and negative indices mark pad requests. None for a model without GDN layers.

        Args:
            requests: padded requests of the step.
            bind: whether K1 will read the pools; without it only the indices are looked up.

        Raises:
            StateLayoutError: a pool or the indices have a layout that the kernels cannot read.
        """
        if not self._layers:
            return None
        from sglang.srt.model_executor.forward_context import get_attn_backend

        backend = get_attn_backend()
        linear = getattr(backend, "linear_attn_backend", backend)
        if bind:
            pool = linear.req_to_token_pool
            cache = pool.mamba_pool.mamba_cache
            anchor = (id(linear), id(cache), cache.temporal.data_ptr(), cache.conv[0].data_ptr())
            if anchor != self._anchor:
                self._bind(pool)
                self._linear, self._anchor = linear, anchor
        indices = linear.forward_metadata.mamba_cache_indices
        if indices.dtype is not torch.int32 or indices.stride(-1) != 1 or indices.numel() < requests:
            raise StateLayoutError(
                f"state indices: found {indices.dtype} of shape {tuple(indices.shape)}, strides {indices.stride()}; "
                f"needed: contiguous torch.int32, at least {requests} of them; fix: use the SGLang version that "
                "`sgl-amd-mono doctor` names"
            )
        return indices

    def _bind(self, pool: Any) -> None:
        slots = int(pool.mamba_pool.size) + 1  # slot 0 is reserved for padding
        reasons: dict[int, list[str]] = {layer: [] for layer in self._layers}
        states = {}
        for layer in self._layers:
            cache = pool.mamba2_layer_cache(layer)
            if cache.replayssm_d is not None:
                fix = "start without --enable-linear-replayssm"
                reasons[layer].append(reason("states", "a ReplaySSM ring", "states updated in place", fix))
            windows = getattr(cache, "intermediate_conv_window", (None,))
            drafts = windows[0], getattr(cache, "intermediate_ssm", None)
            states[layer] = LayerState(cache.conv[0], cache.temporal, *drafts)
            reasons[layer] += self._check(layer, states[layer], slots)
        if lines := by_layer(reasons):
            raise StateLayoutError("the state pools do not fit the kernels:\n  - " + "\n  - ".join(lines))
        self._states = states
        self.found += 1

    def __getitem__(self, layer: int) -> LayerState:
        return self._states[layer]

    @property
    def draft_index(self) -> torch.Tensor:
        """int32: the place of each request of a verify step among the draft states, in the order of the step."""
        return self._linear.verify_intermediate_state_indices

    def track(self, forward_batch: Any, layer: int, indices: torch.Tensor) -> None:
        """After a GDN layer: copy the states that the prefix cache keeps, exactly as SGLang's decode does."""
        if forward_batch.mamba_track_mask is None:
            return
        state = self._states[layer]
        self._linear._track_mamba_state_decode(forward_batch, state.conv, state.ssm, indices, layer)


def run_embedding(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Token embeddings, bf16 [rows, hidden], summed over the ranks as SGLang does it."""
    return model.model.embed_tokens(input_ids)


def step_positions(model: Any, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
    """The positions that the rotary embedding takes: one row, or three where the model uses M-RoPE."""
    return forward_batch.mrope_positions if model.is_mrope_enabled else positions


def input_norm(
    view: AttentionView | GdnView, hidden: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's input norm of a layer.

    Args:
        hidden: bf16 [rows, H], the previous layer's output.
        residual: bf16 [rows, H], or None on the first layer, whose residual is its input.

    Returns:
        (normed row, residual after the addition). SGLang may work in place: do not use the arguments afterwards.
    """
    norm = view.module.input_layernorm
    if residual is None:
        return norm(hidden), hidden
    return norm(hidden, residual)


def attention_core(
    view: AttentionView, positions: torch.Tensor, hidden: torch.Tensor, forward_batch: Any
) -> torch.Tensor:
    """SGLang's attention up to, not including, o_proj: qkv projection, q/k norm, rotary, attention, output gate.

    There is no seam before o_proj in SGLang, so the same parts are called in the same order. Writes the KV cache.

    Returns:
        bf16 [rows, core width], contiguous.
    """
    layer = view.module
    q, k, v, gate = layer._prepare_qkv_gate(positions=positions, hidden_states=hidden, forward_batch=forward_batch)
    core = layer.attn(q, k, v, forward_batch)
    return _qwen3_5().fused_sigmoid_mul(core, gate, inplace=True).contiguous()


@functools.cache
def _qwen3_5() -> Any:
    """SGLang's module of the model's layers; an import statement costs several calls each time."""
    from sglang.srt.models import qwen3_5

    return qwen3_5


def gdn_core(view: GdnView, hidden: torch.Tensor, forward_batch: Any) -> torch.Tensor:
    """SGLang's GDN layer up to, not including, out_proj, which is the identity for the duration of the call.

    Args:
        hidden: bf16 [rows, H], the normed input.

    Returns:
        bf16 [rows, core width], contiguous. States are updated as SGLang does it in this step's mode.
    """
    with replaced(view.module.linear_attn, "out_proj", lambda core: (core, None)):
        return view.module.linear_attn(hidden, forward_batch).contiguous()


def packed_decode() -> Callable[..., Any]:
    """The packed decode of the gated delta rule that SGLang's GDN layers call in this process."""
    from sglang.srt.layers.attention.linear.kernels import gdn_triton

    return gdn_triton.fused_recurrent_gated_delta_rule_packed_decode


def verify_update() -> Callable[..., Any]:
    """The gated delta rule of several tokens that SGLang's GDN layers call in a verify step."""
    from sglang.srt.layers.attention.linear.kernels import gdn_triton

    return gdn_triton.fused_sigmoid_gating_delta_rule_update


def all_reduce(partial: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' partials by SGLang's own all-reduce."""
    from sglang.srt.distributed import tensor_model_parallel_all_reduce

    return tensor_model_parallel_all_reduce(partial)


def after_replay(model: Any, replayed: Callable[[int], None]) -> None:
    """Call `replayed(batch size of the graph)` after each replay of a decode graph of `model`, inside its context."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    original = DecodeCudaGraphRunner._process_output_after_replay

    def process(self: Any, output: Any, forward_batch: Any) -> Any:
        if self.model_runner.model is model:
            replayed(int(self._replay_graph_key.size))
        return original(self, output, forward_batch)

    DecodeCudaGraphRunner._process_output_after_replay = process


def finish(
    model: Any, input_ids: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor, forward_batch: Any
) -> Any:
    """Final norm and logits of every row, as SGLang's forward ends. Returns what that forward returns."""
    hidden, _ = model.model.norm(hidden, residual)
    return model.logits_processor(input_ids, hidden, model.lm_head, forward_batch, None)


def covers_call(model: Any, extra: Sequence[Any]) -> bool:
    """Whether a routed call can be served: no aux hidden states to capture, none of the optional inputs given."""
    if model.capture_aux_hidden_states or model.model.layers_to_capture:
        return False
    return all(value is None or value is False for value in extra)
