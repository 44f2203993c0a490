# SPDX-License-Identifier: Apache-2.0
"""Imports SGLang's Triton kernel modules as a ROCm machine would, and every other module of SGLang as it stands.

SGLang's modules decide when they are imported which platform they run on (``_is_hip = is_hip()``), and choose launch
parameters by it. ``install()`` puts a finder in front of Python's: while one of ``MODULES`` is executed, torch claims
to be a ROCm build on an MI355X and AITER is asked for; while any other module of SGLang is, also one that such a kernel
module imports, nothing of this shows. Triton's driver is the simulator's, from the first module of SGLang on.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

HIP_VERSION = "7.0"
"""What torch.version.hip says while a kernel module is imported; only that it is set matters."""

COMPUTE_UNITS = 256
ARCH = "gfx950:sramecc+:xnack-"

MODULES = (
    "sglang.kernels.ops.attention.decode_attention",
    "sglang.kernels.ops.attention.extend_attention",
    "sglang.kernels.ops.attention.fla.chunk",
    "sglang.kernels.ops.attention.fla.chunk_delta_h",
    "sglang.kernels.ops.attention.fla.chunk_fwd",
    "sglang.kernels.ops.attention.fla.chunk_o",
    "sglang.kernels.ops.attention.fla.cumsum",
    "sglang.kernels.ops.attention.fla.fused_recurrent",
    "sglang.kernels.ops.attention.fla.index",
    "sglang.kernels.ops.attention.fla.l2norm",
    "sglang.kernels.ops.attention.fla.layernorm_gated",
    "sglang.kernels.ops.attention.fla.op",
    "sglang.kernels.ops.attention.fla.utils",
    "sglang.kernels.ops.attention.fla.wy_fast",
    "sglang.kernels.ops.attention.linear.fused_gdn_gating",
    "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent",
    "sglang.kernels.ops.attention.triton_gdn_fused_proj",
    "sglang.kernels.ops.elementwise.elementwise",
    "sglang.kernels.ops.layernorm.minimax_m3_rmsnorm",
    "sglang.kernels.ops.mamba.causal_conv1d_triton",
)
"""Modules that are imported as on ROCm."""

_PLATFORM = "sglang.srt.utils.common"
"""Where SGLang keeps its cached answers to which platform this is."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finds SGLang's modules as Python does, and puts the platform that they shall see around their execution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("sglang."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            _activate()
            with _platform(name in MODULES):
                execute(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Before SGLang's kernel modules are imported. Idempotent; RuntimeError where one of them already is."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    early = [name for name in MODULES if name in sys.modules]
    if early:
        raise RuntimeError(
            f"SGLang's kernels are already imported ({', '.join(early[:3])}), for another platform; needed: "
            "harness.prepare() before SGLang"
        )
    sys.meta_path.insert(0, _Finder())


def driver() -> Any:
    """The simulator's Triton driver that this process runs SGLang's kernels with: ``launches`` lists what ran."""
    from triton.runtime import driver as triton_driver

    from sgl_amd_mono.sim.triton_driver import SimulatorDriver

    active = triton_driver.active
    if not isinstance(active, SimulatorDriver):
        raise RuntimeError("Triton's driver is not the simulator's: harness.prepare() was not called with triton")
    return active


_activated = False


def _activate() -> None:
    global _activated
    if _activated:
        return
    _activated = True
    from sgl_amd_mono.common.build import cache_root
    from sgl_amd_mono.sim.triton_driver import activate

    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_root() / "triton"))
    activate()


_claimed = False


@contextmanager
def _platform(rocm: bool) -> Iterator[None]:
    """Inside, torch claims to be what SGLang shall find, ROCm or not; nests either way round."""
    global _claimed
    before = _claimed
    if rocm == before:
        yield
        return
    _claim(rocm)
    try:
        yield
    finally:
        _claim(before)


_truth: dict[str, Any] = {}


def _claim(rocm: bool) -> None:
    global _claimed
    import torch

    _claimed = rocm
    if not _truth:
        _truth.update(
            hip=torch.version.hip,
            count=torch.cuda.device_count,
            properties=torch.cuda.get_device_properties,
            capability=torch.cuda.get_device_capability,
            aiter=os.environ.get("SGLANG_USE_AITER"),
        )
    if rocm:
        properties = types.SimpleNamespace(gcnArchName=ARCH, multi_processor_count=COMPUTE_UNITS, warp_size=64)
        torch.version.hip = HIP_VERSION
        torch.cuda.device_count = lambda: 1
        torch.cuda.get_device_properties = lambda *device: properties
        torch.cuda.get_device_capability = lambda *device: (9, 5)
        os.environ["SGLANG_USE_AITER"] = "1"
    else:
        torch.version.hip = _truth["hip"]
        torch.cuda.device_count = _truth["count"]
        torch.cuda.get_device_properties = _truth["properties"]
        torch.cuda.get_device_capability = _truth["capability"]
        if _truth["aiter"] is None:
            os.environ.pop("SGLANG_USE_AITER", None)
        else:
            os.environ["SGLANG_USE_AITER"] = _truth["aiter"]
    # What SGLang has answered before holds for the other platform.
    for value in vars(sys.modules.get(_PLATFORM, types.ModuleType(""))).values():
        forget = getattr(value, "cache_clear", None)
        if forget is not None and getattr(value, "__name__", "").startswith("is_"):
            forget()
