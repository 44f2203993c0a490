# SPDX-License-Identifier: Apache-2.0
"""Skinny matrix products: 16 weight rows times a few activation rows, on MFMA, weights streamed once.

A **tile** is what one MFMA takes of the weights: 16 rows x 32 columns in bf16, 16 rows x 128 columns in MXFP4; a lane
loads 16 bytes of it. Issuing loads and multiplying are separate, so that a stage can put its weights in flight long
before the activations exist. K is cut over the waves; their accumulators are added through LDS in wave order.

MFMA operands: A is the weights (lane l: weight row l % 16), B the activations (lane l: activation row l % 16); both
hold part l / 16 of the tile's columns. The accumulator of lane l holds weight rows 4 * (l / 16) + i (i = 0..3) of
activation row l % 16. An activation row is one MFMA column, so nothing in its sums depends on the other rows or on how
many there are: lanes of columns past the last row may hold anything, and store nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgl_amd_mono.common import device as d

TILE_ROWS = 16
BF16_TILE_K = 32  # columns of a bf16 tile
BF16_TILE_BYTES = 2 * BF16_TILE_K  # from a tile to the next along a row
MX_TILE_K = 128  # columns of an MXFP4 tile
MX_ROW_BYTES = MX_TILE_K // 2  # from a tile to the next along a row of a plain (not shuffled) MXFP4 matrix
MX_ROW_CODES = MX_TILE_K // d.MX_BLOCK  # codes of a row in one tile
LANE_BYTES = 16  # of a tile, a lane
MX_TILE_BYTES = 64 * LANE_BYTES  # an MXFP4 tile is contiguous in the shuffled layout
MX_SCALE_BYTES = 64 * 4  # scale words of two tiles of two row groups
F32_BYTES = 4
COLUMN_BYTES = TILE_ROWS * F32_BYTES  # an accumulator's column: the 16 sums of one activation row


def operand_lane() -> tuple[Any, Any]:
    """(row, part) of this lane in an MFMA operand: lane % 16, lane / 16."""
    lane = d.lane_id()
    return lane & (TILE_ROWS - 1), d.shift_right_logical(lane, d.I32(4))


def clamped_row(rows: int) -> Any:
    """This lane's activation row, the last one where its column lies past ``rows``."""
    row, _ = operand_lane()
    return d.select(d.compare("ult", row, d.I32(rows)), row, d.I32(rows - 1))


def bf16_lane_bytes(pitch: int, row: Any = None) -> Any:
    """Byte offset of this lane's 16 bytes in a bf16 tile whose rows lie ``pitch`` bytes apart, in memory or LDS.

    ``row`` replaces the lane's own row of the tile.
    """
    own, part = operand_lane()
    return (own if row is None else row) * pitch + part * LANE_BYTES


def guarded(base: Any, nbytes: Any, present: Any = None) -> d.Buffer:
    """Buffer over ``nbytes`` (int or ``Int32``); where ``present`` is false of no bytes: loads give 0, no request."""
    size = d.I32(nbytes) if isinstance(nbytes, int) else nbytes
    return d.Buffer(base, size if present is None else d.select(present, size, d.I32(0)))


def load_bf16_tile(rows: d.Buffer, lane_bytes: Any, tile: int, cache: Any = d.NT, scalar: Any = 0) -> Any:
    """Issue the load of a tile: number ``tile`` along the row from ``lane_bytes`` (see ``bf16_lane_bytes``)."""
    return rows.load(lane_bytes + tile * BF16_TILE_BYTES, d.vec(d.I32, 4), cache, scalar=scalar)


def load_mxfp4_tile(weights: d.Buffer, offset: int, scalar: Any = 0) -> Any:
    """Issue the load of the MXFP4 tile that starts ``offset + scalar`` bytes into ``weights``.

    Layout ``shuffle_weight(layout=(16, 16))`` of [N, K]: tile t of row group r at ``r * 8 K + 1024 t``, lane l's
    16 bytes (row l % 16, columns 128 t + 32 (l / 16) .. + 31, low nibble first) at 16 l.
    """
    return weights.load(d.lane_id() * LANE_BYTES + offset, d.vec(d.I32, 4), d.NT, scalar=scalar)


def load_mxfp4_scales(scales: d.Buffer, offset: int, scalar: Any = 0) -> Any:
    """Issue the load of the scale word that serves two tiles (t even, t + 1) of two row groups (r even, r + 1).

    Layout ``e8m0_shuffle`` of [N, K / 32]: word ``((r / 2) * (K / 256) + t / 2) * 64 + l``; byte
    ``2 * (t % 2) + r % 2`` of lane l's word is the code of its 32 weights.
    """
    return scales.load(d.lane_id() * 4 + offset, d.I32, d.NT, scalar=scalar)


def load_plain_mxfp4_tile(rows: d.Buffer, lane_bytes: Any, tile: int, cache: Any = d.NT, scalar: Any = 0) -> Any:
    """Issue the load of an MXFP4 tile of a plain matrix, uint8 [N, K/2] as Quark stores it: 64 bytes of each row.

    ``lane_bytes`` as ``bf16_lane_bytes(K / 2)`` gives it: a lane's 16 bytes lie as in a bf16 tile.
    """
    return rows.load(lane_bytes + tile * MX_ROW_BYTES, d.vec(d.I32, 4), cache, scalar=scalar)


def load_plain_mxfp4_codes(codes: d.Buffer, offset: Any, tiles: int, scalar: Any = 0) -> list[Any]:
    """Issue the loads of the codes of ``tiles`` tiles of this lane's row of a plain scale, uint8 [N, K/32].

    ``offset``: of the row's first code, a multiple of 4 (8 and 16 where ``tiles`` allow wider loads). Returns a word a
    tile; ``plain_mxfp4_code`` takes the lane's code of it.
    """
    words: list[Any] = []
    while len(words) < tiles:
        left = tiles - len(words)
        each = 4 if left % 4 == 0 else 2 if left % 2 == 0 else 1
        like = d.vec(d.I32, each) if each > 1 else d.I32
        value = codes.load(offset + len(words) * MX_ROW_CODES, like, d.NT, scalar=scalar)
        words += [d.vector_element(value, i) for i in range(each)] if each > 1 else [value]
    return words


def plain_mxfp4_code(word: Any) -> Any:
    """The lane's own code in byte 0: ``word`` holds those of the tile's four blocks of its row."""
    _, part = operand_lane()
    return d.shift_right_logical(word, part << 3)


def multiply_bf16(tiles: Sequence[Any], activations: Sequence[Any], acc: Any = None) -> Any:
    """Accumulate tile by tile in the given order."""
    acc = d.zero_acc() if acc is None else acc
    for tile, x in zip(tiles, activations, strict=True):
        acc = d.mfma_bf16(tile, x, acc)
    return acc


def store_partials(region: d.LdsRegion, accs: Sequence[Any], rows: int, base: Any, stride: int) -> None:
    """This wave's accumulators to LDS: number i at ``base + i * stride`` as f32 [activation row][16 weight rows]."""
    row, part = operand_lane()
    with d.if_(d.compare("ult", row, d.I32(rows))):
        place = base + row * COLUMN_BYTES + part * LANE_BYTES
        for i, acc in enumerate(accs):
            region.store(acc, place + i * stride)


def sum_in_order(region: d.LdsRegion, place: Any, stride: int, order: Sequence[int], like: Any = d.F32) -> Any:
    """f32 sum of the values (scalar or vector) at ``place + n * stride``, n in ``order``; the first is taken as is."""
    first, *rest = [region.load(place + n * stride, like) for n in order]
    for value in rest:
        first = first + value
    return first
