# SPDX-License-Identifier: Apache-2.0
"""AMD's own MXFP4 machine code on the simulator: the GEMMs and the fused MoE of AITER's wheel, and what they compute.

The wheel `amd-aiter` carries gfx950 code objects (`aiter_meta/hsa/gfx950`); `aiter` itself is never imported. The
arguments, grids and token sorting are those of its C++ and Python launchers (csrc/py_itfs_cu/asm_gemm_a4w4.cu and
asm_fmoe.cu, aiter/fused_moe.py), in code of our own. `Moe.contributions` with `add_in_bf16` is the fused MoE in float64
with the kernel's roundings; with `add_in_float32` it is what K2 computes.
"""

from __future__ import annotations

import csv
import importlib.metadata
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layout
from sgl_amd_mono.sim import CodeObject, Launch, Machine, Report

CUS = 256  # AITER picks grids by the number of compute units
THREADS = 256
FIELD_BYTES = 16  # every field of AITER's argument structs is padded to this
SORT_BLOCK = 32  # rows of a block of sorted tokens
SCALE_ROWS = 256  # rows that AITER pads scales to
TOKEN_BITS = 24  # a sorted entry is pick << 24 | token
GEMM_K_STEP = 256  # a slice of a split K is a multiple of it

# The structs `KernelArgs` of the two launchers, in order; "P" an address, "I" uint32, "f" float. Names of the metadata.
GEMM_ARGUMENTS = (
    ("D", "P"), ("C", "P"), ("A", "P"), ("B", "P"), ("alpha", "f"), ("beta", "f"), ("strideD0", "I"),
    ("strideD1", "I"), ("strideC0", "I"), ("strideC1", "I"), ("strideA0", "I"), ("strideA1", "I"), ("strideB0", "I"),
    ("strideB1", "I"), ("Mdim", "I"), ("Ndim", "I"), ("Kdim", "I"), ("ScaleA", "P"), ("ScaleB", "P"),
    ("strideScaleA0", "I"), ("strideScaleA1", "I"), ("strideScaleB0", "I"), ("strideScaleB1", "I"),
    ("log2_k_split", "I"),
)  # fmt: skip
MOE_ARGUMENTS = (
    ("O", "P"), ("X", "P"), ("G", "P"), ("U", "P"), ("D", "P"), ("XQ", "P"), ("GQ", "P"), ("DQ", "P"), ("SMQ", "P"),
    ("STP", "P"), ("SW", "P"), ("SEP", "P"), ("dim", "I"), ("hdim", "I"), ("batch", "I"), ("eprt", "I"), ("Xs", "I"),
    ("GUs", "I"), ("Ds", "I"), ("Os", "I"), ("eGUs", "I"), ("eDs", "I"), ("eGUQs", "I"), ("eDQs", "I"),
    ("eSMQs", "I"), ("topk", "I"), ("total_tgs", "I"), ("ps_deno", "I"),
)  # fmt: skip


def folder() -> Path:
    """Where the installed wheel keeps its gfx950 code objects."""
    return Path(str(importlib.metadata.distribution("amd-aiter").locate_file("aiter_meta/hsa/gfx950")))


def rows(file: str) -> list[dict[str, str]]:
    """A configuration table of the wheel."""
    with open(folder() / file, newline="") as table:
        return list(csv.DictReader(table))


@cache
def code_object(file: str) -> CodeObject:
    return CodeObject.load(folder() / file)


def pack(code: CodeObject, fields: Sequence[tuple[str, str]], values: dict[str, int | float]) -> bytes:
    """The argument block of AITER's struct; its names, places and sizes are checked against the code object's own."""
    own = {arg.name: (arg.offset, arg.size) for arg in code.args if arg.name != "pad"}
    block = bytearray(FIELD_BYTES * len(fields))
    for k, (name, kind) in enumerate(fields):
        form = {"P": "<Q", "I": "<I", "f": "<f"}[kind]
        if name in own:
            assert own[name] == (FIELD_BYTES * k, struct.calcsize(form)), f"{code.name}: {name} is at {own[name]}"
        struct.pack_into(form, block, FIELD_BYTES * k, values.get(name, 0))
    assert set(own) <= {name for name, _ in fields} and set(values) <= {name for name, _ in fields}
    return bytes(block[: code.kernarg_size])


def run(code: CodeObject, grid: tuple[int, int, int], kernargs: bytes, tensors: dict[str, Tensor],
        memory: str = "consistent", seed: int = 0) -> Report:  # fmt: skip
    machine = Machine(cus=CUS, memory=memory, seed=seed)
    for name, tensor in tensors.items():
        machine.map_tensor(0, tensor, name)
    launch = Launch(rank=0, code=code, grid=grid, block=THREADS, kernargs=kernargs, persistent=False)
    return machine.launch([launch])


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

    def __call__(self, a: Tensor, a_codes: Tensor, b: Tensor, b_codes: Tensor, log2_splits: int = 0) -> Tensor:
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
        run(code, grid, pack(code, GEMM_ARGUMENTS, values), tensors)
        return out[:m]


@cache
def gemms() -> dict[str, Gemm]:
    table = [
        Gemm(r["co_name"], int(r["tile_m"]), int(r["tile_n"]), r["splitK"] == "1", r["bpreshuffle"] == "1")
        for r in rows("f4gemm/f4gemm_bf16_per1x32Fp4.csv")
    ]
    return {g.name: g for g in table}


# ---- fused MoE ----


def sort_tokens(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """AITER's moe_sorting of ids int64 [S, k] and weights [S, k].

    Expert by expert, its (token, pick) pairs in token order, padded to blocks of 32 with pick k of token S. Returns
    entries int32 (pick << 24 | token), weights f32, the expert of each block int32, and [entries used, S] int32.
    """
    tokens, picks = ids.shape
    room = ids.numel() + experts * SORT_BLOCK - picks
    entries = torch.full((room,), picks << TOKEN_BITS | tokens, dtype=torch.int32)
    sorted_weights = torch.zeros(room)
    block_expert = torch.zeros(-(-room // SORT_BLOCK), dtype=torch.int32)
    at = 0
    for expert in range(experts):
        token, pick = torch.where(ids == expert)
        count = len(token)
        entries[at : at + count] = (pick << TOKEN_BITS | token).int()
        sorted_weights[at : at + count] = weights[token, pick].float()
        blocks = -(-count // SORT_BLOCK)
        block_expert[at // SORT_BLOCK : at // SORT_BLOCK + blocks] = expert
        at += blocks * SORT_BLOCK
    return entries, sorted_weights, block_expert, torch.tensor([at, tokens], dtype=torch.int32)


def sort_scales(codes: Tensor, entries: Tensor) -> Tensor:
    """AITER's moe_mxfp4_sort: the token's codes of every sorted entry, shuffled; pad entries get 0."""
    whole = torch.zeros(-(-len(entries) // SORT_BLOCK) * SORT_BLOCK, codes.shape[1], dtype=torch.uint8)
    token = (entries & ((1 << TOKEN_BITS) - 1)).long()
    live = token < len(codes)
    whole[: len(entries)][live] = codes[token[live]]
    return layout.shuffle_scale(whole)


def code_half_up(amax: Tensor) -> Tensor:
    """The installed AITER's e8m0 code (int32) of a block: amax / 4, its exponent one more where its fraction is at
    least one half. It differs from RCEIL (`layout.scale_code`) where amax is 1.5 times a power of two: one more here.
    """
    bits = amax.float().contiguous().view(torch.int32)
    return (bits + 0x400000 >> 23) - 2


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
        experts, hidden, inter = self.sizes
        code = code_object(f"fmoe/silu/{file}")
        slice_n = int(re.search(r"_32x(\d+)\.co", file).group(1))
        entries, sorted_weights, block_expert, used = sort_tokens(ids, weights, experts)
        out = torch.zeros(len(x), hidden, dtype=torch.bfloat16)
        tensors = {
            "O": out, "X": x.contiguous(), "G": self.w13, "U": used, "D": self.w2,
            "XQ": sort_scales(x_codes, entries), "GQ": self.w13_codes, "DQ": self.w2_codes, "STP": entries,
            "SW": sorted_weights, "SEP": block_expert,
        }  # fmt: skip
        slices = -(-inter // slice_n)
        persistent = "_ps_" in file
        groups = CUS * (2 if "_2tg_" in file else 1) if persistent else 0
        values: dict[str, int | float] = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        values |= {
            "dim": hidden, "hdim": inter, "batch": len(x), "eprt": experts, "Xs": hidden // 2, "GUs": hidden // 2,
            "Ds": inter // 2, "Os": 2 * hidden, "eGUs": hidden * inter, "eDs": inter // 2 * hidden,
            "eGUQs": 2 * inter * hidden // 32, "eDQs": hidden * inter // 32, "eSMQs": 4 * inter, "topk": ids.shape[1],
            "ps_deno": slices, "total_tgs": groups // slices * slices,
        }  # fmt: skip
        grid = (groups, 1, 1) if persistent else (slices, len(block_expert), 1)
        run(code, grid, pack(code, MOE_ARGUMENTS, values), tensors, memory, seed)
        return out

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
