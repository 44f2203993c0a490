# SPDX-License-Identifier: Apache-2.0
"""AITER's Triton kernels on the simulator against float64: kernels that others wrote for gfx950, MXFP4 among them.

    python benchmarks/aiter_kernels.py

Prints a line a kernel: relative L2 error, bound and wave-instructions. Exit status 1 where a bound is missed. The
package's own import is bypassed (it starts a compiler that needs ROCm); its Triton modules are imported as they are.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "test")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from helpers.aiter_triton import import_stubs  # noqa: E402

from sgl_amd_mono.sim.triton_driver import SimulatorDriver, activate  # noqa: E402

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
ROWS, COLUMNS, INNER, EXPERTS, TOP_K = 40, 96, 512, 4, 2
BF16_ROUNDING = 2.5e-3  # one rounding to bf16 has a relative root mean square of 2^-9 / sqrt(3) to 2^-8 / sqrt(3)
COMMON = {"num_warps": 4, "num_stages": 2, "waves_per_eu": 0, "cache_modifier": None}


def module(name: str) -> Any:
    return importlib.import_module(f"aiter.ops.triton.{name}")


def dequantised(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """Exact values of MXFP4 rows: codes (rows, K / 2), scales (rows, K / 32)."""
    c, s = codes.view(torch.uint8).numpy(), scales.view(torch.uint8).numpy()
    values = np.stack([FP4[c & 15], FP4[c >> 4]], axis=-1).reshape(c.shape[0], -1)
    return values * np.repeat(2.0 ** (s.astype(float) - 127), 32, axis=1)


class Rows:
    """The kernels, each returning (result, wanted)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(ROWS, INNER, generator=generator).bfloat16()
        self.w = torch.randn(COLUMNS, INNER, generator=generator).bfloat16()
        self.norm = torch.randn(INNER, generator=generator).bfloat16()
        self.experts = torch.randn(EXPERTS * COLUMNS, INNER, generator=generator).bfloat16()
        self.picks = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(ROWS)]).int()

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = module("quant").dynamic_mxfp4_quant(x)
        return codes, scales[: len(x)].contiguous()

    def quant(self) -> tuple[np.ndarray, np.ndarray]:
        """The codes give back the values to within half a step of e2m1 (relative root mean square about 0.11)."""
        return dequantised(*self.quantise(self.x)), self.x.double().numpy()

    def fp4_gemm(self, instruction: int, splits: int) -> tuple[np.ndarray, np.ndarray]:
        (x, xs), (w, ws) = self.quantise(self.x), self.quantise(self.w)
        config = {
            "BLOCK_SIZE_M": 32,
            "BLOCK_SIZE_N": 32,
            "BLOCK_SIZE_K": 256 if splits == 1 else 128,
            "GROUP_SIZE_M": 1,
        }
        config |= {"NUM_KSPLIT": splits, "matrix_instr_nonkdim": instruction, **COMMON}
        y = module("gemm_afp4wfp4").gemm_afp4wfp4(x, w, xs, ws, config=config)
        return y.double().numpy(), dequantised(x, xs) @ dequantised(w, ws).T

    def fp8_by_fp4_gemm(self) -> tuple[np.ndarray, np.ndarray]:
        w, ws = self.quantise(self.w)
        x = self.x.to(torch.float8_e4m3fn)
        x_scale = torch.full((ROWS, 1), 0.5)
        y = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
        config = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 256, "GROUP_SIZE_M": 1, "NUM_KSPLIT": 1}
        config |= {"SPLITK_BLOCK_SIZE": 2 * INNER, "matrix_instr_nonkdim": 16, "kpack": 1, **COMMON}
        module("gemm_a8wfp4").gemm_a8wfp4(x, w, y, x_scale, ws, config=config)
        return y.double().numpy(), 0.5 * (x.double().numpy() @ dequantised(w, ws).T)

    def fp8_gemm(self) -> tuple[np.ndarray, np.ndarray]:
        x, w = self.x.to(torch.float8_e4m3fn), self.w.to(torch.float8_e4m3fn)
        config = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
        config |= {"matrix_instr_nonkdim": 16, "kpack": 1, "num_warps": 4, "num_stages": 2, "waves_per_eu": 0}
        x_scale = torch.ones(64, 1)[:ROWS]  # the kernel reads the scales of its last block's absent rows
        y = module("gemm_a8w8").gemm_a8w8(x, w, x_scale, torch.ones(1, COLUMNS), config=config)
        return y.double().numpy(), x.double().numpy() @ w.double().numpy().T

    def bf16_gemm(self) -> tuple[np.ndarray, np.ndarray]:
        config = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "NUM_KSPLIT": 1}
        config |= {"SPLITK_BLOCK_SIZE": INNER, "matrix_instr_nonkdim": 16, "kpack": 1, **COMMON}
        y = module("gemm_a16w16").gemm_a16w16(self.x, self.w, config=config)
        return y.double().numpy(), self.x.double().numpy() @ self.w.double().numpy().T

    def moe(self) -> tuple[np.ndarray, np.ndarray]:
        """Routed experts in MXFP4: every token's rows of its picked experts."""
        import triton.language as tl

        block = 16
        (x, xs), (w, ws) = self.quantise(self.x), self.quantise(self.experts)
        xs = torch.cat([xs, xs[:1]])[:ROWS]  # the kernel reads a scale for the rows that pad a block
        pairs = self.picks.flatten().tolist()
        order, expert_ids = [], []
        for expert in range(EXPERTS):
            mine = [n for n, pick in enumerate(pairs) if pick == expert]
            blocks = -(-len(mine) // block)
            order += mine + [len(pairs)] * (blocks * block - len(mine))
            expert_ids += [expert] * blocks
        out = torch.zeros(ROWS, TOP_K, COLUMNS, dtype=torch.bfloat16)
        config = {
            "BLOCK_SIZE_M": block,
            "BLOCK_SIZE_N": 32,
            "BLOCK_SIZE_K": 256,
            "GROUP_SIZE_M": 1,
            "num_warps": 4,
            "num_stages": 2,
        }
        module("moe_op_mxfp4").fused_moe_mxfp4(
            x, w.view(EXPERTS, COLUMNS, -1), out, torch.ones(1), torch.ones(EXPERTS), xs, ws.view(EXPERTS, COLUMNS, -1),
            torch.ones(ROWS, TOP_K), self.picks, torch.tensor(order, dtype=torch.int32), torch.tensor(expert_ids,
            dtype=torch.int32),
            torch.tensor([len(order)], dtype=torch.int32), False, TOP_K, False, False, config, tl.bfloat16,
        )  # fmt: skip
        values, weights = dequantised(x, xs), dequantised(w, ws).reshape(EXPERTS, COLUMNS, -1)
        want = np.stack([[weights[pick] @ values[row] for pick in self.picks[row]] for row in range(ROWS)])
        return out.double().numpy(), want

    def rms_norm(self) -> tuple[np.ndarray, np.ndarray]:
        rms = module("rmsnorm")
        rms.num_programs = lambda x: ROWS  # asks the GPU for its number of compute units
        y = rms.rms_norm(self.x, self.norm, 1e-6)
        x = self.x.double()
        return y.double().numpy(), (x / torch.sqrt((x * x).mean(1, keepdim=True) + 1e-6) * self.norm.double()).numpy()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="where amd-aiter lies (default: where it is installed)")
    parser.add_argument("--memory", default="consistent", choices=("consistent", "adversarial"))
    options = parser.parse_args()
    driver: SimulatorDriver = activate(options.memory)
    import_stubs(options.folder)
    rows = Rows()
    kernels: list[tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]], float]] = [
        ("dynamic_mxfp4_quant", rows.quant, 0.13),
        ("gemm_afp4wfp4, 16x16x128", lambda: rows.fp4_gemm(16, 1), BF16_ROUNDING),
        ("gemm_afp4wfp4, 16x16x128, split K", lambda: rows.fp4_gemm(16, 4), BF16_ROUNDING),
        ("gemm_afp4wfp4, 32x32x64", lambda: rows.fp4_gemm(32, 1), BF16_ROUNDING),
        ("gemm_a8wfp4", rows.fp8_by_fp4_gemm, BF16_ROUNDING),
        ("gemm_a8w8", rows.fp8_gemm, BF16_ROUNDING),
        ("gemm_a16w16", rows.bf16_gemm, BF16_ROUNDING),
        ("fused_moe_mxfp4", rows.moe, BF16_ROUNDING),
        ("rms_norm", rows.rms_norm, BF16_ROUNDING),
    ]
    missed = 0
    for name, run, bound in kernels:
        before = len(driver.launches)
        got, want = run()
        error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        executed = sum(launch.wave_instructions for launch in driver.launches[before:])
        missed += error > bound
        verdict = "ok" if error <= bound else "MISSED"
        print(f"{name:36} error {error:.2e} (bound {bound:.1e}) {executed:8} wave-instructions  {verdict}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
