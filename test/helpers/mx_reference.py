# SPDX-License-Identifier: Apache-2.0
"""MXFP4 in plain NumPy, element by element: quantisation, values, and the layouts that gfx950 kernels read."""

from __future__ import annotations

import numpy as np

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BLOCK = 32


def block_codes(x: np.ndarray) -> np.ndarray:
    """e8m0 codes [..., K / 32] of f32 rows: exponent(d) + (mantissa(d) != 0) of d = f32(amax / 6), within 1..253."""
    blocks = np.abs(x.astype(np.float32)).reshape(*x.shape[:-1], -1, BLOCK)
    d = (blocks.max(-1) / np.float32(6)).astype(np.float32)
    bits = d.view(np.uint32)
    code = (bits >> 23).astype(np.int64) + ((bits & 0x7FFFFF) != 0)
    return np.clip(code, 1, 253)


def block_codes_even(x: np.ndarray) -> np.ndarray:
    """e8m0 codes [..., K / 32] of f32 rows: the power of two that the largest magnitude rounds to (up from 1.75 times
    one), less 2 in the exponent; at least 1."""
    blocks = np.abs(x.astype(np.float32)).reshape(*x.shape[:-1], -1, BLOCK).max(-1).astype(np.float64)
    mantissa, exponent = np.frexp(np.where(np.isinf(blocks), 2.0**128, blocks))  # mantissa in [0.5, 1)
    power = exponent - 1 + (mantissa >= 0.875)
    return np.where(blocks == 0, 1, np.clip(power - 2 + 127, 1, None))


def nibbles(x: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """e2m1 codes [..., K] of f32 rows: nearest, ties to the even code, saturating at 6."""
    scale = np.exp2(codes.astype(np.float64) - 127).repeat(BLOCK, -1)
    magnitude = np.abs(x.astype(np.float64)) / scale
    distance = np.abs(magnitude[..., None] - E2M1)
    best = distance.min(-1, keepdims=True)
    ties = distance == best
    # Among two equally near values exactly one has an even code.
    even = ties & (np.arange(8) % 2 == 0)
    index = np.where(even.any(-1), even.argmax(-1), ties.argmax(-1))
    return index | (np.signbit(x).astype(np.int64) << 3)


def values(codes4: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 values of e2m1 codes [..., K] under e8m0 scales [..., K / 32]."""
    sign = np.where(codes4 & 8, -1.0, 1.0)
    return sign * E2M1[codes4 & 7] * np.exp2(scales.astype(np.float64) - 127).repeat(BLOCK, -1)


def pack(codes4: np.ndarray) -> np.ndarray:
    """Bytes [..., K / 2], even elements in the low nibble."""
    return (codes4[..., 0::2] | (codes4[..., 1::2] << 4)).astype(np.uint8)


def shuffle_weight(packed: np.ndarray) -> np.ndarray:
    """(16, 16)-shuffled bytes of [N, K / 2]: groups of 16 rows, 16-byte pieces of K, the row, the byte."""
    rows, width = packed.shape
    out = np.empty(rows * width, np.uint8)
    for row in range(rows):
        for column in range(width):
            place = (row // 16) * 16 * width + (column // 16) * 256 + (row % 16) * 16 + column % 16
            out[place] = packed[row, column]
    return out


def shuffle_scale(scales: np.ndarray) -> np.ndarray:
    """e8m0-shuffled bytes of [rows, K / 32]."""
    rows, columns = scales.shape
    out = np.empty(rows * columns, np.uint8)
    for r in range(rows):
        for c in range(columns):
            place = ((((r // 32 * (columns // 8) + c // 8) * 4 + c % 4) * 16 + r % 16) * 2 + (c // 4) % 2) * 2
            out[place + (r // 16) % 2] = scales[r, c]
    return out
