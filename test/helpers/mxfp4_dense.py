# SPDX-License-Identifier: Apache-2.0
"""SGLang's dense MXFP4 path in float64: AITER's activation quantiser (EVEN) and its GEMM with split K.

The path is `dynamic_mxfp4_quant` and `gemm_afp4wfp4`, Triton kernels of AITER. Everything here is arithmetic of our own
in NumPy; `aiter_triton` runs theirs. Two AITER releases differ in one rule: how a value half way between two e2m1
values is rounded (`TIES`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from helpers.mx_reference import BLOCK, E2M1

TIES = ("up", "even")
"""A tie goes to the larger magnitude ("up": the wheel of November 2025) or to the even code ("even": AITER of August
2026, and the hardware's conversion)."""


def even_codes(x: np.ndarray) -> np.ndarray:
    """e8m0 codes uint8 [.., K / 32] of f32 rows by EVEN.

    The largest magnitude, its exponent one more from 1.75 times a power of two on, less 2: it lies in [3.5, 7) after
    scaling. Code 0 below 1.75 * 2^-125, and for zeros.
    """
    amax = np.abs(x.astype(np.float32)).reshape(*x.shape[:-1], -1, BLOCK).max(-1)
    exponent = ((amax.view(np.uint32).astype(np.int64) + 0x200000) >> 23) & 0xFF
    return np.clip(exponent - 2, 0, 254).astype(np.uint8)


def e2m1(x: np.ndarray, codes: np.ndarray, ties: str = "even") -> np.ndarray:
    """e2m1 codes [.., K] (4 bits) of f32 rows scaled by 2^(127 - code): nearest, saturating at 6, the sign kept."""
    scaled = np.abs(x.astype(np.float64)) * np.exp2(127.0 - codes.astype(np.float64)).repeat(BLOCK, -1)
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    magnitude = np.searchsorted(middles, scaled, side="right" if ties == "up" else "left")
    if ties == "even":
        tie = np.isin(scaled, middles)
        magnitude = magnitude + (tie & (magnitude % 2 == 1))
    return magnitude | np.signbit(x).astype(np.int64) << 3


def split_k(k: int, block_k: int, wanted: int) -> tuple[int, int]:
    """How AITER cuts K columns: (columns of a split, splits), where a configuration wants `wanted` splits.

    On the packed width K / 2: a split is a whole number of blocks; the wanted number is halved until the width is a
    multiple of the split. So the splits are fewer than wanted where the last would be empty.
    """
    packed, splits = k // 2, wanted
    while True:
        columns = -(-2 * -(-packed // splits) // block_k) * block_k
        if splits == 1 or packed % (columns // 2) == 0:
            return columns, -(-packed // (columns // 2))
        splits //= 2


@dataclass(frozen=True)
class Bucket:
    """Launch parameters of gemm_afp4wfp4 for a range of rows, and the splits that they ask for."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    waves_per_eu: int
    instruction: int
    splits: int

    def configuration(self) -> dict[str, object]:
        return {
            "BLOCK_SIZE_M": self.block_m, "BLOCK_SIZE_N": self.block_n, "BLOCK_SIZE_K": self.block_k,
            "GROUP_SIZE_M": 1, "NUM_KSPLIT": self.splits, "num_warps": 4, "num_stages": self.stages,
            "waves_per_eu": self.waves_per_eu, "matrix_instr_nonkdim": self.instruction, "cache_modifier": ".cg",
        }  # fmt: skip


def bucket(rows: int) -> Bucket:
    """AITER's default configuration for gfx950 (August 2026) at 1 to 16 rows."""
    return Bucket(8, 64, 512, 2, 2, 32, 4) if rows <= 8 else Bucket(32, 32, 1024, 3, 1, 16, 1)


def partials(x: np.ndarray, w: np.ndarray, columns: int) -> np.ndarray:
    """f32 [splits, M, N] of float64 x [M, K] @ w [N, K]^T, cut in K after every `columns`: the exact sum of a split,
    rounded once. A chain of float32 additions gives the same where its partial sums fit in 24 bits."""
    starts = range(0, x.shape[1], columns)
    return np.stack([x[:, s : s + columns] @ w[:, s : s + columns].T for s in starts]).astype(np.float32)


def reduce_tree(parts: np.ndarray) -> np.ndarray:
    """f32 [M, N]: neighbours first, the count padded with zeros to a power of two. Triton 3.8's order."""
    count = 1 << (len(parts) - 1).bit_length()
    level = [*parts, *[np.zeros_like(parts[0])] * (count - len(parts))]
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2])]
    return level[0]


def reduce_in_order(parts: np.ndarray) -> np.ndarray:
    """f32 [M, N]: one after the other. Triton 3.7's order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
