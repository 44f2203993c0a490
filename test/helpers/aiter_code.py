# SPDX-License-Identifier: Apache-2.0
"""AMD's own MXFP4 machine code on the simulator: the GEMMs and the fused MoE of AITER's wheel, and what they compute.

The fused MoE's launch is `simulate/aiter_moe.py`; the GEMM's arguments and grids are those of AITER's launcher
(csrc/py_itfs_cu/asm_gemm_a4w4.cu). `Moe.contributions` with `add_in_bf16` is the fused MoE in float64 with the kernel's
roundings; with `add_in_float32` it is what K2 computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layout
from sgl_amd_mono.simulate import aiter_moe
from sgl_amd_mono.simulate.aiter_moe import (  # noqa: F401  the tests' names
    MOE_FOLDER,
    SORT_BLOCK,
    code_half_up,
    code_object,
    folder,
    kernels,
    pack,
    rows,
    run,
    sort_tokens,
)

SCALE_ROWS = 256  # rows that AITER pads scales to
GEMM_K_STEP = 256  # a slice of a split K is a multiple of it

# The struct `KernelArgs` in its order; "P" an address, "I" uint32, "f" float. Names of the metadata.
GEMM_ARGUMENTS = (
    ("D", "P"), ("C", "P"), ("A", "P"), ("B", "P"), ("alpha", "f"), ("beta", "f"), ("strideD0", "I"),
    ("strideD1", "I"), ("strideC0", "I"), ("strideC1", "I"), ("strideA0", "I"), ("strideA1", "I"), ("strideB0", "I"),
    ("strideB1", "I"), ("Mdim", "I"), ("Ndim", "I"), ("Kdim", "I"), ("ScaleA", "P"), ("ScaleB", "P"),
    ("strideScaleA0", "I"), ("strideScaleA1", "I"), ("strideScaleB0", "I"), ("strideScaleB1", "I"),
    ("log2_k_split", "I"),
)  # fmt: skip

BF16_GEMM_ARGUMENTS = (*GEMM_ARGUMENTS[:17], ("splitk", "I"))


def padded_scale(codes: Tensor) -> Tensor:
    """AITER's e8m0_shuffle: rows padded to 256 (here with code 127), then shuffled."""
    count = -(-codes.shape[0] // SCALE_ROWS) * SCALE_ROWS
    whole = torch.full((count, codes.shape[1]), 127, dtype=torch.uint8)
    whole[: codes.shape[0]] = codes
    return layout.shuffle_scale(whole)


# ---- GEMM ----


@dataclass(frozen=True)
class Gemm:
    """One f4gemm code object: a row of its table."""

    file: str
    tile_m: int
    tile_n: int
    split_k: bool
    shuffled: bool

    @property
    def name(self) -> str:
        return self.file.removesuffix(".co").rsplit("_", 2)[-2] + "_" + f"{self.tile_m}x{self.tile_n}"

    def __call__(self, a: Tensor, a_codes: Tensor, b: Tensor, b_codes: Tensor, log2_splits: int = 0,
                 memory: str = "consistent") -> Tensor:  # fmt: skip
        """bf16 [M, N] = a @ b^T of packed e2m1 uint8 [M, K/2], [N, K/2] and codes uint8 [M, K/32], [N, K/32]."""
        code = code_object(f"f4gemm/{self.file}")
        m, n, k = a.shape[0], b.shape[0], 2 * a.shape[1]
        out = torch.zeros(-(-m // SORT_BLOCK) * SORT_BLOCK, n, dtype=torch.bfloat16)
        tensors = {
            "D": out, "A": a.contiguous(), "B": layout.shuffle_weight(b) if self.shuffled else b.contiguous(),
            "ScaleA": padded_scale(a_codes), "ScaleB": padded_scale(b_codes),
        }  # fmt: skip
        values: dict[str, int | float] = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        values |= {
            "alpha": 1.0, "strideC0": n, "strideA0": k, "strideB0": k, "Mdim": m, "Ndim": n, "Kdim": k,
            "strideScaleA0": k // 32, "strideScaleB0": k // 32, "log2_k_split": log2_splits,
        }  # fmt: skip
        slice_k = -(-k // (GEMM_K_STEP << log2_splits)) * GEMM_K_STEP
        grid = (-(-n // self.tile_n), -(-m // self.tile_m), -(-k // slice_k))
        run(code, grid, pack(code, GEMM_ARGUMENTS, values), tensors, memory)
        return out[:m]


@cache
def gemms() -> dict[str, Gemm]:
    table = [
        Gemm(r["co_name"], int(r["tile_m"]), int(r["tile_n"]), r["splitK"] == "1", r["bpreshuffle"] == "1")
        for r in rows("f4gemm/f4gemm_bf16_per1x32Fp4.csv")
    ]
    return {g.name: g for g in table}


@dataclass(frozen=True)
class Bf16Gemm:
    """One bf16gemm code object: a row of its table."""

    file: str
    tile_m: int
    tile_n: int

    def __call__(self, a: Tensor, b: Tensor, splits: int = 1) -> Tensor:
        """f32 [M, N] = a @ b^T of bf16 [M, K] and [N, K]; the splits of K add to memory by f32 atomics."""
        code = code_object(f"bf16gemm/{self.file}")
        out = torch.zeros(len(a), len(b))
        tensors = {"D": out, "A": a, "B": b}
        values: dict[str, int | float] = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        values |= {
            "alpha": 1.0, "strideC0": 4 * len(b), "strideA0": 2 * a.shape[1], "strideB0": 2 * b.shape[1],
            "Mdim": len(a), "Ndim": len(b), "Kdim": a.shape[1], "splitk": splits,
        }  # fmt: skip
        grid = (-(-len(b) // self.tile_n), -(-len(a) // self.tile_m), splits)
        run(code, grid, pack(code, BF16_GEMM_ARGUMENTS, values), tensors)
        return out


@cache
def bf16_gemms() -> dict[str, Bf16Gemm]:
    table = rows("bf16gemm/bf16gemm_outf32.csv")
    return {r["knl_file"]: Bf16Gemm(r["knl_file"], int(r["tileM"]), int(r["tileN"])) for r in table}


# ---- fused MoE ----


@dataclass(frozen=True)
class Moe:
    """Routed experts of one rank, shuffled as SGLang leaves them: w13 uint8 [E, 2*RI, H/2], codes [E, 2*RI, H/32] (gate
    rows, then up rows), w2 uint8 [E, H, RI/2], codes [E, H, RI/32]."""

    w13: Tensor
    w13_codes: Tensor
    w2: Tensor
    w2_codes: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Experts, hidden, intermediate."""
        return self.w2.shape[0], self.w2.shape[1], 2 * self.w2.shape[2]

    def kernel(self, file: str, x: Tensor, x_codes: Tensor, ids: Tensor, weights: Tensor, memory: str = "consistent",
               seed: int = 0) -> Tensor:  # fmt: skip
        """bf16 [S, H] by a code object of fmoe/silu, of packed x uint8 [S, H/2] and its codes uint8 [S, H/32]."""
        weighted = (self.w13, self.w13_codes, self.w2, self.w2_codes, ids, weights)
        return aiter_moe.launch(kernels()[file], x, x_codes, *weighted, memory=memory, seed=seed)

    def expert(self, e: int) -> tuple[Tensor, Tensor]:
        """Float64 w13 [2*RI, H] and w2 [H, RI]."""
        return (
            layout.dequantize_shuffled(self.w13[e], self.w13_codes[e]),
            layout.dequantize_shuffled(self.w2[e], self.w2_codes[e]),
        )

    def contributions(self, x: Tensor, x_codes: Tensor, ids: Tensor, weights: Tensor,
                      code: Callable[[Tensor], Tensor]) -> Tensor:  # fmt: skip
        """Weighted outputs of every pick, float64 [S, k, H]: intermediates silu(g) * u in f32, MXFP4 by `code`."""
        values = layout.dequantize_mxfp4(x, x_codes)
        result = torch.zeros(*ids.shape, self.sizes[1], dtype=torch.float64)
        for e in sorted(set(ids.flatten().tolist())):
            w13, w2 = self.expert(e)
            token, pick = torch.where(ids == e)
            gate, up = (values[token] @ w13.T).chunk(2, dim=-1)
            inner = (gate * torch.sigmoid(gate) * up).float()
            inner = layout.dequantize_mxfp4(*layout.quantize_mxfp4(inner, code))
            result[token, pick] = inner @ w2.T * weights[token, pick].double()[:, None]
        return result


def add_in_bf16(contributions: Tensor, order: Sequence[int]) -> Tensor:
    """bf16 [S, H] of [S, k, H]: each contribution rounded to bf16, then added to bf16 memory in that order of picks."""
    total = torch.zeros(contributions.shape[0], contributions.shape[2], dtype=torch.bfloat16)
    for pick in order:
        total = (total.float() + contributions[:, pick].float().bfloat16().float()).bfloat16()
    return total


def add_in_float32(contributions: Tensor, order: Sequence[int]) -> Tensor:
    """bf16 [S, H] of [S, k, H]: f32 sums in that order of picks, one rounding."""
    total = torch.zeros(contributions.shape[0], contributions.shape[2])
    for pick in order:
        total = total + contributions[:, pick].float()
    return total.bfloat16()
