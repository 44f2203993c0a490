# SPDX-License-Identifier: Apache-2.0
"""What the real SGLang needs on a machine without a GPU. Everything that is put in another's place is listed here.

Two calls: ``prepare()`` before SGLang is imported (environment, and packages that are only imported, never used), and
``install()`` after (functions that need a GPU). SGLang on such a machine takes neither its HIP nor its CPU branches;
``REPLACEMENTS`` says for each function which arithmetic of the HIP path stands in for it, and ``NOT_COVERED`` which
branches of that path a simulated run does not take.
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

ISA = "gfx950"
"""The ISA that the machine claims towards SGLang's plugin binding."""

COMPUTE_UNITS = 256
"""The compute units that it claims: those of an MI355X."""

NOT_COVERED = (
    "the fused split of in_proj_qkvz (a copy without arithmetic) and the join of in_proj_qkvz with in_proj_ba",
    "AITER's and hipBLASLt's GEMMs: bf16 GEMMs are float32 sums rounded once, in another order than theirs",
    "shared-expert fusion into the routed experts (off where Quark leaves the shared expert in bf16)",
    "AITER's custom all-reduce and its fusion with the norm: ranks add over gloo",
    "HIP graphs: every step runs eagerly",
)
"""Branches of SGLang's ROCm path that a run on this harness does not take."""


@dataclass(frozen=True)
class Replacement:
    """One function of SGLang that the harness replaces: ``module``, dotted ``attribute``, and why."""

    module: str
    attribute: str
    why: str
    make: Callable[[Any], Any]
    """Takes what stands there now, returns what shall stand there."""


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _standin(name: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        from sgl_amd_mono.simulate import gdn_standin

        return getattr(gdn_standin, name)

    return make


def _aiter(name: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        from sgl_amd_mono.simulate import aiter_standin

        return getattr(aiter_standin, name)

    return make


class _TorchWithGpu:
    """``torch`` as the plugin binding sees it: one MI355X is there, of which no memory is in use."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        properties = types.SimpleNamespace(multi_processor_count=COMPUTE_UNITS, gcnArchName=ISA)
        self.cuda = types.SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 0,
            get_device_properties=lambda device: properties,
            memory_allocated=lambda: 0,
            is_current_stream_capturing=lambda: False,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def _linear_apply(original: Any) -> Any:
    from sgl_amd_mono.simulate import gdn_standin

    @functools.wraps(original)
    def apply(self, layer, x, bias=None):
        return gdn_standin.linear(x, layer.weight, bias)

    return apply


def _lm_head(original: Any) -> Any:
    from sgl_amd_mono.simulate import gdn_standin

    @functools.wraps(original)
    def compute(self, hidden_states, lm_head, embedding_bias=None, *, out=None):
        return gdn_standin.linear(hidden_states, lm_head.weight, embedding_bias)

    return compute


def _no_binding(original: Any) -> Any:
    return lambda **unused: None


_BINDING = "sglang.srt.kernel_plugins.amd.binding"
_GDN = "sglang.srt.layers.attention.linear.gdn_backend"
_GDN_KERNELS = "sglang.srt.layers.attention.linear.kernels.gdn_triton"
_QUARK_MOE = "sglang.srt.layers.quantization.quark.schemes.quark_w4a4_mxfp4_moe"
_QUARK_LINEAR = "sglang.srt.layers.quantization.quark.schemes.quark_w4a4_mxfp4"
_AITER_RUNNER = "sglang.srt.layers.moe.moe_runner.aiter"

REPLACEMENTS = (
    # the device
    Replacement(_BINDING, "device_isa", "the plugin's flag is refused where no GPU is visible", _constant(lambda: ISA)),
    Replacement(_BINDING, "torch", "the binding asks for compute units and allocated memory", _TorchWithGpu),
    Replacement(
        "sglang.srt.distributed.bootstrap", "_bind_threads_if_cpu", "needs SGLang's CPU extension", _no_binding
    ),
    # bf16 GEMMs and norms
    Replacement(
        "sglang.srt.layers.quantization.unquant",
        "UnquantizedLinearMethod.apply",
        "float32 sums, one rounding, in an order that can be changed",
        _linear_apply,
    ),
    Replacement(
        "sglang.srt.layers.logits_processor",
        "LogitsProcessor._compute_lm_head",
        "float32 sums, one rounding, in an order that can be changed",
        _lm_head,
    ),
    Replacement(
        "sglang.srt.layers.layernorm",
        "GemmaRMSNorm.forward_native",
        "the native form normalises the rounded sum; the HIP path's Triton kernel the unrounded one",
        _standin("gemma_rms_norm"),
    ),
    Replacement(
        "sglang.srt.layers.activation",
        "SiluAndMul.forward_native",
        "the HIP path rounds silu to bf16 before the product",
        _standin("silu_and_mul"),
    ),
    # GDN layers: Triton kernels
    Replacement(_GDN, "causal_conv1d_update", "Triton kernel", _standin("causal_conv1d_update")),
    Replacement(_GDN, "causal_conv1d_fn", "Triton kernel (prefill)", _standin("causal_conv1d_fn")),
    Replacement(_GDN, "fused_gdn_gating", "Triton kernel (prefill)", _standin("fused_gdn_gating")),
    Replacement(_GDN_KERNELS, "chunk_gated_delta_rule", "Triton kernels (prefill)", _standin("chunk_gated_delta_rule")),
    Replacement(
        _GDN_KERNELS,
        "fused_recurrent_gated_delta_rule_packed_decode",
        "Triton kernel; beta rounded to bf16 as it does",
        _standin("packed_decode"),
    ),
    Replacement(
        "sglang.kernels.ops.attention.fla.layernorm_gated",
        "RMSNorm.forward",
        "Triton kernel",
        _standin("rms_norm_gated"),
    ),
    Replacement("sglang.srt.models.qwen3_5", "fused_sigmoid_mul", "Triton kernel", _standin("fused_sigmoid_mul")),
    Replacement(
        "sglang.srt.layers.moe.topk",
        "fused_topk_native",
        "of equal logits the HIP path's kernel takes the lower id; torch.topk any",
        _standin("fused_topk"),
    ),
    Replacement(
        "sglang.srt.models.qwen2_moe",
        "fused_gate_sigmoid_mul_add",
        "Triton kernel",
        _standin("fused_gate_sigmoid_mul_add"),
    ),
    # MXFP4 projections: SGLang's own Quark linear, driven with the AITER stand-in
    Replacement(
        "sglang.srt.layers.quantization.quark.quark",
        "get_device_capability",
        "Quark's linears ask for a GPU of at least 7.0; gfx950's is named",
        _constant(lambda: (9, 5)),
    ),
    Replacement(_QUARK_LINEAR, "dynamic_mxfp4_quant", "AITER's Triton kernel", _aiter("dynamic_mxfp4_quant")),
    Replacement(_QUARK_LINEAR, "gemm_afp4wfp4", "AITER's Triton kernel", _aiter("gemm_afp4wfp4")),
    # MXFP4 experts: SGLang's own gfx950 path, driven with the AITER stand-in
    Replacement(_QUARK_MOE, "_use_aiter", "the gfx950 path of the Quark MXFP4 MoE", _constant(True)),
    Replacement(_QUARK_MOE, "_is_gfx95", "the gfx950 path of the Quark MXFP4 MoE", _constant(True)),
    Replacement(_QUARK_MOE, "_is_shuffle_moe_mxfp4", "weights are shuffled (16, 16) there", _constant(True)),
    Replacement(_QUARK_MOE, "shuffle_weight", "AITER", _aiter("shuffle_weight")),
    Replacement(_QUARK_MOE, "e8m0_shuffle", "AITER", _aiter("e8m0_shuffle")),
    Replacement(_AITER_RUNNER, "_SMALLM_MOE_ON", "SGLang's small-batch gfx950 MoE needs the GPU", _constant(False)),
    Replacement(_AITER_RUNNER, "is_gfx95_supported", "the gfx950 path of the runner", _constant(lambda: True)),
)
"""In the order in which a step meets them. A name that the installed SGLang lacks is an error at start."""

OPTIONAL_NAMES = frozenset(
    {
        (_QUARK_MOE, "shuffle_weight"),
        (_QUARK_MOE, "e8m0_shuffle"),
        (_QUARK_LINEAR, "dynamic_mxfp4_quant"),
        (_QUARK_LINEAR, "gemm_afp4wfp4"),
    }
)
"""Names that SGLang binds only where AITER is installed: created, not replaced."""


def prepare() -> None:
    """Before SGLang is imported: environment and import-only packages. Idempotent."""
    os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _stub_vllm()
    _stub_torchvision()
    from sgl_amd_mono.simulate import aiter_standin

    aiter_standin.install()


def _module(name: str, **attributes: Any) -> types.ModuleType:
    """A stub module (a package, so that submodules may be looked up) under ``name``."""
    module = types.ModuleType(name, doc="stub of sgl_amd_mono.simulate")
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(attributes)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def _stub_vllm() -> None:
    """SGLang's rotary embedding imports one name of vLLM outside CUDA and never calls it on its native path."""
    if "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None:
        return

    def rotary_embedding(*args, **kwargs):
        raise NotImplementedError("vLLM is not installed: the native rotary embedding is the one that runs here")

    _module("vllm")
    _module("vllm._custom_ops", rotary_embedding=rotary_embedding)


class _Interpolation(enum.Enum):
    """torchvision's InterpolationMode, which SGLang's image code reads at import."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


def _stub_torchvision() -> None:
    """SGLang imports torchvision for images; the simulated model takes text, and torchvision's wheel needs CUDA."""
    if "torchvision" in sys.modules:
        return
    # transformers asks once whether torchvision is there and remembers: let it see that it is not
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    import_utils = importlib.import_module("transformers.utils.import_utils")
    if import_utils.is_torchvision_available():
        raise RuntimeError("prepare() comes too late: transformers has already found torchvision in this process")

    def absent(module: str, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(
                f"{module}.{name}: torchvision is a stub here, the simulated model takes text only"
            )

        return unavailable

    for name in ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional"):
        module = _module(name, __version__="0", InterpolationMode=_Interpolation)
        module.__getattr__ = functools.partial(absent, name)  # type: ignore[attr-defined]


_installed = False


def install() -> None:
    """Put every replacement in its place. After ``prepare()``; imports SGLang's modules. Idempotent."""
    global _installed
    if _installed:
        return
    for replacement in REPLACEMENTS:
        _replace(replacement)
    _installed = True


def _replace(replacement: Replacement) -> None:
    owner: Any = importlib.import_module(replacement.module)
    *path, name = replacement.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    if not hasattr(owner, name) and (replacement.module, name) not in OPTIONAL_NAMES:
        raise RuntimeError(
            f"the installed SGLang has no {replacement.module}.{replacement.attribute}, which the harness replaces "
            f"({replacement.why}); the harness is written for sglang 0.5.23"
        )
    setattr(owner, name, replacement.make(getattr(owner, name, None)))
