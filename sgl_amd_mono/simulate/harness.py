# SPDX-License-Identifier: Apache-2.0
"""What the real SGLang needs on a machine without a GPU. Everything that is put in another's place is listed here.

Two calls: ``prepare()`` before SGLang is imported (environment, and packages that are only imported, never used), and
``install()`` after (functions that need a GPU). SGLang on such a machine takes neither its HIP nor its CPU branches;
``REPLACEMENTS`` says what is put where, and ``not_covered()`` which branches of the HIP path a simulated run does not
take.

SGLang's Triton kernels come in two forms (``STOCK``): "triton" runs them from SGLang's unchanged wrappers, as gfx950
machine code on the simulator; "torch" puts PyTorch with their roundings in their place, which needs no compilation.
"""

from __future__ import annotations

import contextlib
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

STOCK = ("triton", "torch")
"""What SGLang's Triton kernels run as."""

STOCK_VARIABLE = "SGLANG_AMD_MONO_SIMULATE_STOCK"
"""Tells a simulated run's processes which of STOCK; the first where it is not set."""

MOE = ("auto", "amd", "torch")
"""What runs AITER's fused MoE: AMD's code object on the simulator, or its stand-in; "auto": AMD's where it can run."""

MOE_VARIABLE = "SGLANG_AMD_MONO_SIMULATE_MOE"
"""Tells a simulated run's processes which of MOE; the first where it is not set."""

ATTENTION = {"triton": "triton", "torch": "torch_native"}
"""SGLang's attention backend that goes with each form."""

_NOT_COVERED = (
    "the join of in_proj_qkvz with in_proj_ba into one GEMM",
    "AITER's and hipBLASLt's GEMMs: bf16 GEMMs are float32 sums rounded once, in another order than theirs",
    "shared-expert fusion into the routed experts (off where Quark leaves the shared expert in bf16)",
    "AITER's custom all-reduce and its fusion with the norm: ranks add over gloo",
    "HIP graphs: every step runs eagerly",
)
_NOT_COVERED_BY_TORCH = (
    "the fused split of in_proj_qkvz (a copy without arithmetic)",
    "SGLang's Triton attention: the backend is torch_native",
)


def not_covered(stock: str) -> tuple[str, ...]:
    """Branches of SGLang's ROCm path that a run with this form of its kernels does not take."""
    return _NOT_COVERED + (_NOT_COVERED_BY_TORCH if stock == "torch" else ())


@dataclass(frozen=True)
class Replacement:
    """One function of SGLang that the harness replaces: ``module``, dotted ``attribute``, and why."""

    module: str
    attribute: str
    why: str
    make: Callable[[Any], Any]
    """Takes what stands there now, returns what shall stand there."""

    stock: str = ""
    """The form of SGLang's kernels (``STOCK``) that it belongs to; empty: both."""

    creates: bool = False
    """A name that SGLang binds only on ROCm or where AITER is installed: it need not be there."""


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _imported(module: str, name: str) -> Callable[[Any], Any]:
    """What ``module`` holds: the name that SGLang would have imported from there on ROCm."""
    return lambda original: getattr(importlib.import_module(module), name)


def _no_device(*unused: Any, **also_unused: Any) -> Any:
    return contextlib.nullcontext()


def _hip_method(original: Any) -> Any:
    from sglang.srt.layers.layernorm import GemmaRMSNorm

    return GemmaRMSNorm.forward_hip


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
_NORM = "sglang.srt.layers.layernorm"
_MODEL = "sglang.srt.models.qwen3_5"
_GATED = "sglang.kernels.ops.attention.fla.layernorm_gated"
_GEMMA_KERNELS = "sglang.kernels.ops.layernorm.minimax_m3_rmsnorm"
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
    # bf16 GEMMs and activations
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
        "sglang.srt.layers.activation",
        "SiluAndMul.forward_native",
        "the HIP path rounds silu to bf16 before the product",
        _standin("silu_and_mul"),
    ),
    Replacement(
        "sglang.srt.layers.moe.topk",
        "fused_topk_native",
        "of equal logits the HIP path's kernel takes the lower id; torch.topk any",
        _standin("fused_topk"),
    ),
    # SGLang's Triton kernels, as they are: its HIP branches are taken, and what asks for a GPU is answered
    Replacement(_NORM, "_use_aiter", "the norm's HIP branch", _constant(True), "triton"),
    Replacement(_NORM, "_has_rocm_triton_gemma_rms_norm", "the norm's HIP branch", _constant(True), "triton"),
    Replacement(
        _NORM,
        "rocm_triton_gemma_rmsnorm",
        "imported on ROCm only",
        _imported(_GEMMA_KERNELS, "gemma_rmsnorm"),
        "triton",
        creates=True,
    ),
    Replacement(
        _NORM,
        "rocm_triton_gemma_fused_add_rmsnorm",
        "imported on ROCm only",
        _imported(_GEMMA_KERNELS, "gemma_fused_add_rmsnorm"),
        "triton",
        creates=True,
    ),
    Replacement(_NORM, "GemmaRMSNorm.forward_native", "SGLang's own GemmaRMSNorm.forward_hip", _hip_method, "triton"),
    Replacement(_MODEL, "_is_hip", "the HIP branch of the attention's q and k norms", _constant(True), "triton"),
    Replacement(
        _MODEL,
        "_GDN_FUSED_QKVZBA_RATIOS",
        "value heads a key head for which the HIP branch splits in_proj_qkvz by a kernel",
        _constant((1, 2, 4, 8)),
        "triton",
    ),
    Replacement(_GDN, "_is_hip", "the HIP branch of GDN layers", _constant(True), "triton"),
    Replacement(_GDN, "is_hip", "the HIP branch of the prefill's split", _constant(lambda: True), "triton"),
    Replacement(
        _GDN,
        "fused_qkv_split_gdn_prefill",
        "imported on ROCm only",
        _imported("sglang.kernels.ops.attention.triton_gdn_fused_proj", "fused_qkv_split_gdn_prefill"),
        "triton",
        creates=True,
    ),
    Replacement(_GATED, "_get_sm_count", "asks for the GPU", _constant(lambda device: COMPUTE_UNITS), "triton"),
    Replacement(_GATED, "device_context", "selects a GPU", _constant(_no_device), "triton"),
    Replacement(
        "sglang.kernels.ops.attention.fla.utils", "custom_device_ctx", "selects a GPU", _constant(_no_device), "triton"
    ),
    # or PyTorch in their place
    Replacement(
        _NORM,
        "GemmaRMSNorm.forward_native",
        "the native form normalises the rounded sum; the HIP path's Triton kernel the unrounded one",
        _standin("gemma_rms_norm"),
        "torch",
    ),
    Replacement(_GDN, "causal_conv1d_update", "Triton kernel", _standin("causal_conv1d_update"), "torch"),
    Replacement(_GDN, "causal_conv1d_fn", "Triton kernel (prefill)", _standin("causal_conv1d_fn"), "torch"),
    Replacement(_GDN, "fused_gdn_gating", "Triton kernel (prefill)", _standin("fused_gdn_gating"), "torch"),
    Replacement(
        _GDN_KERNELS,
        "chunk_gated_delta_rule",
        "Triton kernels (prefill)",
        _standin("chunk_gated_delta_rule"),
        "torch",
    ),
    Replacement(
        _GDN_KERNELS,
        "fused_recurrent_gated_delta_rule_packed_decode",
        "Triton kernel; beta rounded to bf16 as it does",
        _standin("packed_decode"),
        "torch",
    ),
    Replacement(_GATED, "RMSNorm.forward", "Triton kernel", _standin("rms_norm_gated"), "torch"),
    Replacement(_MODEL, "fused_sigmoid_mul", "Triton kernel", _standin("fused_sigmoid_mul"), "torch"),
    Replacement(
        "sglang.srt.models.qwen2_moe",
        "fused_gate_sigmoid_mul_add",
        "Triton kernel",
        _standin("fused_gate_sigmoid_mul_add"),
        "torch",
    ),
    # MXFP4 projections: SGLang's own Quark linear, driven with the AITER stand-in
    Replacement(
        "sglang.srt.layers.quantization.quark.quark",
        "get_device_capability",
        "Quark's linears ask for a GPU of at least 7.0; gfx950's is named",
        _constant(lambda: (9, 5)),
    ),
    Replacement(
        _QUARK_LINEAR, "dynamic_mxfp4_quant", "AITER's Triton kernel", _aiter("dynamic_mxfp4_quant"), creates=True
    ),
    Replacement(_QUARK_LINEAR, "gemm_afp4wfp4", "AITER's Triton kernel", _aiter("gemm_afp4wfp4"), creates=True),
    # MXFP4 experts: SGLang's own gfx950 path, driven with the AITER stand-in
    Replacement(_QUARK_MOE, "_use_aiter", "the gfx950 path of the Quark MXFP4 MoE", _constant(True)),
    Replacement(_QUARK_MOE, "_is_gfx95", "the gfx950 path of the Quark MXFP4 MoE", _constant(True)),
    Replacement(_QUARK_MOE, "_is_shuffle_moe_mxfp4", "weights are shuffled (16, 16) there", _constant(True)),
    Replacement(_QUARK_MOE, "shuffle_weight", "AITER", _aiter("shuffle_weight"), creates=True),
    Replacement(_QUARK_MOE, "e8m0_shuffle", "AITER", _aiter("e8m0_shuffle"), creates=True),
    Replacement(_AITER_RUNNER, "_SMALLM_MOE_ON", "SGLang's small-batch gfx950 MoE needs the GPU", _constant(False)),
    Replacement(_AITER_RUNNER, "is_gfx95_supported", "the gfx950 path of the runner", _constant(lambda: True)),
)
"""A name that the installed SGLang lacks, and that is not one it creates on ROCm, is an error at start."""


CONFIGURATIONS: tuple[tuple[str, str, dict[str, int]], ...] = (
    (
        "sglang.kernels.ops.attention.fla.chunk_fwd",
        "chunk_gated_delta_rule_fwd_kkt_solve_kernel",
        {"BK": 64, "num_warps": 4},
    ),
)
"""(module, autotuned Triton kernel, configuration). A GPU measures and takes one of the kernel's; here it is this."""


def replacements(stock: str) -> tuple[Replacement, ...]:
    """What a run with this form of SGLang's kernels replaces."""
    return tuple(r for r in REPLACEMENTS if r.stock in ("", stock))


_stock: str | None = None


def chosen_stock(asked: str | None = None) -> str:
    """The form of SGLang's kernels in this process: as first asked for, else by STOCK_VARIABLE, else the first.

    Raises ValueError for an unknown one, and where the process has been prepared for the other.
    """
    global _stock
    wanted = asked or _stock or os.environ.get(STOCK_VARIABLE) or STOCK[0]
    if wanted not in STOCK:
        raise ValueError(f"SGLang's kernels as {wanted!r}; needed: {' or '.join(STOCK)} ({STOCK_VARIABLE})")
    if _stock not in (None, wanted):
        raise ValueError(f"SGLang's kernels are prepared as {_stock!r} in this process, and asked for as {wanted!r}")
    _stock = wanted
    return wanted


def chosen_moe(asked: str | None = None) -> str:
    """ "amd" or "torch": as asked for, else by MOE_VARIABLE, else by what this machine can run.

    Raises ValueError for an unknown one, and for "amd" where AMD's code object cannot run, with the reason.
    """
    from sgl_amd_mono.simulate import aiter_moe

    wanted = asked or os.environ.get(MOE_VARIABLE) or MOE[0]
    if wanted not in MOE:
        raise ValueError(f"AITER's fused MoE as {wanted!r}; needed: {', '.join(MOE)} ({MOE_VARIABLE})")
    if wanted == "torch":
        return wanted
    missing = aiter_moe.unavailable()
    if wanted == "amd" and missing:
        raise ValueError(f"AITER's fused MoE as AMD's code object: {missing}")
    return "torch" if missing else "amd"


def prepare(stock: str | None = None) -> None:
    """Before SGLang is imported: environment, import-only packages, and how its kernels run. Idempotent."""
    os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _stub_vllm()
    _stub_torchvision()
    from sgl_amd_mono.simulate import aiter_standin

    aiter_standin.install()
    if chosen_stock(stock) == "triton":
        from sgl_amd_mono.simulate import rocm_import

        rocm_import.install()


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
    for replacement in replacements(chosen_stock()):
        _replace(replacement)
    if chosen_stock() == "triton":
        from sgl_amd_mono.sim.triton_driver import use_configuration

        for module, kernel, stated in CONFIGURATIONS:
            use_configuration(getattr(importlib.import_module(module), kernel), **stated)
    _installed = True


def _replace(replacement: Replacement) -> None:
    owner: Any = importlib.import_module(replacement.module)
    *path, name = replacement.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    if not hasattr(owner, name) and not replacement.creates:
        raise RuntimeError(
            f"the installed SGLang has no {replacement.module}.{replacement.attribute}, which the harness replaces "
            f"({replacement.why}); the harness is written for sglang 0.5.23"
        )
    setattr(owner, name, replacement.make(getattr(owner, name, None)))
