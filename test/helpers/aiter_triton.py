# SPDX-License-Identifier: Apache-2.0
"""AITER's Triton modules, imported without AITER: its own import starts a compiler that needs ROCm."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def import_stubs(folder: str | None = None) -> None:
    """Parent packages whose __init__ does not run; `folder`: where the wheel lies (default: where it is installed)."""
    root = Path(folder) if folder else Path(str(importlib.metadata.distribution("amd-aiter").locate_file("")))
    for name in ("aiter", "aiter.ops", "aiter.utility"):
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = module
    sys.modules["aiter"].logger = logging.getLogger("aiter")  # type: ignore[attr-defined]


class Kernels:
    """The quantiser and the GEMM. Use it while the simulator is Triton's driver; it leaves no `aiter` in sys.modules,
    where other tests' imports would find it."""

    def __init__(self) -> None:
        before = {name: sys.modules[name] for name in sys.modules if name.split(".")[0] == "aiter"}
        import_stubs()
        try:
            self._quant = importlib.import_module("aiter.ops.triton.quant")
            self._gemm = importlib.import_module("aiter.ops.triton.gemm_afp4wfp4")
        finally:
            for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
                del sys.modules[name]
            sys.modules.update(before)

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """dynamic_mxfp4_quant of bf16 [M, K]: packed uint8 [M, K / 2], codes uint8 [M, K / 32] (strides (1, M))."""
        return self._quant.dynamic_mxfp4_quant(x)

    def gemm(self, x: Tensor, x_codes: Tensor, w: Tensor, w_codes: Tensor, configuration: dict[str, Any]) -> Tensor:
        """gemm_afp4wfp4 with a stated configuration: bf16 [M, N]."""
        return self._gemm.gemm_afp4wfp4(x, w, x_codes, w_codes, config=dict(configuration))

    def partials(self, x: Tensor, x_codes: Tensor, w: Tensor, w_codes: Tensor, configuration: dict[str, Any],
                 ) -> Tensor:  # fmt: skip
        """The float32 sums of the splits [splits, M, N] that `gemm` adds up: its first kernel by itself."""
        (rows, packed), columns = x.shape, w.shape[0]
        width, block, splits = self._gemm.get_splitk(packed, configuration["BLOCK_SIZE_K"], configuration["NUM_KSPLIT"])
        options = configuration | {"SPLITK_BLOCK_SIZE": width, "BLOCK_SIZE_K": block, "NUM_KSPLIT": splits}
        out = torch.full((splits, rows, columns), float("nan"))
        groups = -(-rows // options["BLOCK_SIZE_M"]) * -(-columns // options["BLOCK_SIZE_N"])
        self._gemm._gemm_afp4_wfp4_kernel[(splits * groups,)](
            x, w.T, out, x_codes, w_codes, rows, columns, packed, x.stride(0), x.stride(1), w.T.stride(0),
            w.T.stride(1), out.stride(0), out.stride(1), out.stride(2), x_codes.stride(0), x_codes.stride(1),
            w_codes.stride(0), w_codes.stride(1), **options,
        )  # fmt: skip
        return out[: -(-packed // (width // 2))]
