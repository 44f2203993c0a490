# SPDX-License-Identifier: Apache-2.0
"""Layouts of MXFP4 weights as SGLang leaves them on gfx950, their inverses, the activation quantiser (plain PyTorch).

An MXFP4 matrix of N rows and K columns is uint8 [N, K/2] (even column = low nibble, e2m1) and one e8m0 code, uint8
[N, K/32], for each 32 columns of a row: value = e2m1 * 2^(code - 127).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MX_BLOCK = 32  # columns that share one e8m0 code
TILE_ROWS = 16  # rows of one weight tile
CHUNK_BYTES = 16  # bytes of one row that stay together: 32 columns, one lane's operand of a scaled MFMA
SCALE_ROWS = 32  # rows of one scale tile
SCALE_COLUMNS = 8  # codes of a row in one scale tile
CODE_MIN, CODE_MAX = 1, 253  # clamp of an activation's scale code
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by the low three bits of a nibble


def _tiles(shape: torch.Size, rows: int, columns: int, what: str) -> None:
    """Raise ValueError unless the last two axes divide into tiles of [rows, columns]."""
    n, k = shape[-2:]
    if n % rows or k % columns:
        raise ValueError(f"{what} of shape [{n}, {k}] does not divide into tiles of {rows} rows x {columns} bytes")


def shuffle_weight(packed: torch.Tensor) -> torch.Tensor:
    """Shuffle uint8 [.., N, K/2] by (16, 16): byte (n, b) goes to (n/16)*16*Kb + (b/16)*256 + (n%16)*16 + b%16.

    So 128 columns of 16 rows are 1024 contiguous bytes, lane l's operand of a scaled 16x16x128 MFMA at byte 16*l. The
    shape is kept. Raises ValueError where N % 16 or (K/2) % 32 is not 0.
    """
    _tiles(packed.shape, TILE_ROWS, 2 * CHUNK_BYTES, "a weight")
    n, kb = packed.shape[-2:]
    tiles = packed.reshape(-1, n // TILE_ROWS, TILE_ROWS, kb // CHUNK_BYTES, CHUNK_BYTES)
    return tiles.transpose(2, 3).contiguous().reshape(packed.shape)


def unshuffle_weight(shuffled: torch.Tensor) -> torch.Tensor:
    """The inverse of `shuffle_weight`."""
    _tiles(shuffled.shape, TILE_ROWS, 2 * CHUNK_BYTES, "a weight")
    n, kb = shuffled.shape[-2:]
    tiles = shuffled.reshape(-1, n // TILE_ROWS, kb // CHUNK_BYTES, TILE_ROWS, CHUNK_BYTES)
    return tiles.transpose(2, 3).contiguous().reshape(shuffled.shape)


def shuffle_scale(codes: torch.Tensor) -> torch.Tensor:
    """AITER's e8m0_shuffle of uint8 [.., R, C], leading axes counted as rows: code (r, c) goes to
    ((r/32)*(C/8) + c/8)*256 + (c%4)*64 + (r%16)*4 + ((c/4)%2)*2 + (r/16)%2.

    So one 32-bit word serves two 128-column steps of two adjacent 16-row groups. The shape is kept. Raises ValueError
    where the rows do not divide by 32 or C by 8 (AITER pads there; no matrix of this model needs it).
    """
    _tiles(codes.shape, SCALE_ROWS, SCALE_COLUMNS, "a scale")
    c = codes.shape[-1]
    tiles = codes.reshape(-1, 2, 16, c // SCALE_COLUMNS, 2, 4)  # r/32, r/16%2, r%16, c/8, c/4%2, c%4
    return tiles.permute(0, 3, 5, 2, 4, 1).contiguous().reshape(codes.shape)


def unshuffle_scale(shuffled: torch.Tensor) -> torch.Tensor:
    """The inverse of `shuffle_scale`."""
    _tiles(shuffled.shape, SCALE_ROWS, SCALE_COLUMNS, "a scale")
    c = shuffled.shape[-1]
    tiles = shuffled.reshape(-1, c // SCALE_COLUMNS, 4, 16, 2, 2)  # r/32, c/8, c%4, r%16, c/4%2, r/16%2
    return tiles.permute(0, 5, 3, 1, 4, 2).contiguous().reshape(shuffled.shape)


def scale_code(amax: torch.Tensor) -> torch.Tensor:
    """The e8m0 code (int32) of a block whose largest magnitude is `amax` (f32): RCEIL, clamped to 1..253.

    RCEIL is the exponent of the correctly rounded amax/6, plus one where its mantissa is not 0: the smallest power of
    two that is not below amax/6. On bits: 6 = 1.5 * 4, so the exponent of amax, plus one where its fraction is above
    0.5, minus 2; no division is needed.
    """
    bits = amax.float().contiguous().view(torch.int32)
    return (((bits + 0x3FFFFF) >> 23) - 2).clamp(CODE_MIN, CODE_MAX)


def scale_code_even(amax: torch.Tensor) -> torch.Tensor:
    """The e8m0 code (int32) that AITER's `dynamic_mxfp4_quant` gives a block, the one before SGLang's MXFP4 linears.

    The exponent of `amax` (f32) rounded to a power of two, up from 1.75 times one, minus 2; at least 1 (AITER: 0, which
    differs where amax < 1.75 * 2^-125).
    """
    bits = amax.float().contiguous().view(torch.int32)
    return ((((bits + 0x200000) >> 23) & 0xFF) - 2).clamp(min=CODE_MIN)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nibbles (uint8) of e2m1, round to nearest even, saturating at 6, the sign of a zero kept; input any float."""
    magnitude = values.abs().double()
    grid = torch.tensor(E2M1, dtype=torch.float64)
    middles = (grid[1:] + grid[:-1]) / 2
    below = torch.bucketize(magnitude, middles, right=False)  # a middle itself stays below
    tie = (magnitude.unsqueeze(-1) == middles).any(-1)
    nibble = below + (tie & (below % 2 == 1)).to(below.dtype)  # a middle goes to the even code
    return (nibble.to(torch.uint8)) | (torch.signbit(values).to(torch.uint8) << 3)


def quantize_mxfp4(
    x: torch.Tensor, code: Callable[[torch.Tensor], torch.Tensor] = scale_code
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise f32 (or bf16) [.., K] by blocks of 32 columns: packed uint8 [.., K/2] and codes uint8 [.., K/32].

    `code` picks a block's code from its largest magnitude: `scale_code` (experts) or `scale_code_even` (linears).
    """
    if x.shape[-1] % MX_BLOCK:
        raise ValueError(f"{x.shape[-1]} columns do not divide into MX blocks of {MX_BLOCK}")
    blocks = x.float().reshape(*x.shape[:-1], -1, MX_BLOCK)
    codes = code(blocks.abs().amax(-1))
    scaled = blocks.double() * torch.exp2(127.0 - codes.double()).unsqueeze(-1)
    nibbles = encode_e2m1(scaled).reshape(x.shape)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), codes.to(torch.uint8)


def dequantize_mxfp4(packed: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Float64 values [.., K] of packed uint8 [.., K/2] and codes uint8 [.., K/32] (both unshuffled)."""
    signed = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64)
    byte = torch.arange(256)
    pairs = torch.stack([signed[byte & 0xF], signed[byte >> 4]], dim=-1)
    blocks = pairs[packed.int()].reshape(*codes.shape, MX_BLOCK)
    return (blocks * torch.exp2(codes.double() - 127.0).unsqueeze(-1)).flatten(-2)


def dequantize_shuffled(packed: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Float64 [N, K] of one expert's shuffled weight uint8 [N, K/2] and shuffled codes uint8 [N, K/32].

    An expert's codes are its own slice of the whole shuffled scale tensor because N is a multiple of 32.
    """
    return dequantize_mxfp4(unshuffle_weight(packed), unshuffle_scale(codes))
