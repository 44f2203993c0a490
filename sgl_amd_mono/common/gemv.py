# SPDX-License-Identifier: Apache-2.0
"""Skinny matrix products: 16 weight rows times a few activation rows, on MFMA, weights streamed once.

A **task** is one group of 16 weight rows. Its halves are separate, so that a stage can issue a task's weight loads
long before the activations exist:

* ``issue(...)`` emits the loads (non-temporal) and returns registers;
* ``consume(...)`` multiplies them with activation rows in LDS and returns the wave's accumulator;
* ``store_partials`` / ``sum_partials`` add the waves' accumulators through LDS in wave order 0, 1, ...

MFMA operands: A is the weights (lane l: row l % 16), B the activations (lane l: activation row min(l % 16, rows - 1);
the surplus columns repeat the last row and are never read). The accumulator of lane l holds weight rows
4 * (l / 16) + i (i = 0..3) of activation row l % 16. An activation row is one MFMA column, so nothing in its sums
depends on the other rows or on how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sgl_amd_mono.common import device as d
from sgl_amd_mono.common.geometry import divide, require

TASK_ROWS = 16
BF16_BYTES = 2
LOAD_BYTES = 16
LANE_GROUPS = 4  # 64 lanes / 16 rows
BF16_CHUNK = 128  # K elements of four MFMA 16x16x32: a lane's four 16-byte loads
BF16_CHUNK_BYTES = BF16_CHUNK * BF16_BYTES
BF16_LOADS = 4
MX_STEP = 128  # K elements of one MFMA 16x16x128
MX_STEP_BYTES = TASK_ROWS * MX_STEP // 2  # one step of a row group in the (16,16)-shuffled layout
ROW_PAD_BYTES = 16  # moves consecutive rows to different LDS banks
PARTIAL_BYTES = TASK_ROWS * 4  # f32 partial sums of one activation row


def operand_row(rows: int) -> Any:
    """Activation row of this lane's B operand: min(lane % 16, rows - 1)."""
    column = d.lane_id() & (TASK_ROWS - 1)
    if rows >= TASK_ROWS:
        return column
    return d.select(d.compare("ult", column, d.I32(rows)), column, d.I32(rows - 1))


def lane_group() -> Any:
    """K group of this lane, 0..3."""
    return d.shift_right_logical(d.lane_id(), d.I32(4))


# ---------------------------------------------------------------------------------------------------------------
# Activations in LDS
# ---------------------------------------------------------------------------------------------------------------


class Bf16Rows:
    """``rows`` activation rows of ``k`` bf16 in LDS, each padded by 16 bytes."""

    def __init__(self, region: d.LdsRegion, rows: int, k: int) -> None:
        self.rows, self.k = rows, k
        self.stride = self.stride_of(k)
        require(region.nbytes >= self.nbytes(rows, k),
                f"activation rows need {self.nbytes(rows, k)} B of LDS, the region has {region.nbytes}")
        self.region = region

    @staticmethod
    def stride_of(k: int) -> int:
        """Bytes from one row to the next."""
        return k * BF16_BYTES + ROW_PAD_BYTES

    @classmethod
    def nbytes(cls, rows: int, k: int) -> int:
        """LDS bytes of ``rows`` rows."""
        return rows * cls.stride_of(k)

    def offset(self, row: Any, column: Any) -> Any:
        """Byte offset of an element; ``row`` and ``column`` are ints or ``Int32``."""
        return row * self.stride + column * BF16_BYTES

    def fill(self, base: Any, threads: int, cache: Any = d.PLAIN, row_stride: int | None = None) -> None:
        """All ``threads`` copy the rows from global memory, 16 bytes an access; a barrier must follow."""
        per_row = divide("16-byte pieces of an activation row", self.k * BF16_BYTES, LOAD_BYTES)
        stride = (row_stride or self.k) * BF16_BYTES
        buffer = d.Buffer(base, (self.rows - 1) * stride + self.k * BF16_BYTES)
        total = self.rows * per_row
        pieces, places = [], []
        for first in range(0, total, threads):
            unit = d.thread_id() + first
            row, piece = d.unsigned_divide(unit, per_row)
            places.append((unit, row * self.stride + piece * LOAD_BYTES))
            # Past the last piece the descriptor gives zeros, which are not stored below.
            pieces.append(buffer.load(row * stride + piece * LOAD_BYTES, d.vec(d.I32, 4), cache))
        for number, ((unit, place), value) in enumerate(zip(places, pieces, strict=True)):
            if (number + 1) * threads <= total:
                self.region.store(value, place)
            else:
                with d.if_(d.compare("ult", unit, d.I32(total))):
                    self.region.store(value, place)


class Mxfp4Rows:
    """``rows`` activation rows of ``k`` MXFP4 values in LDS: packed words, then codes.

    The codes of a row are ordered [K group of the MFMA lane][step], so one 32-bit load serves four steps of a lane.
    """

    def __init__(self, region: d.LdsRegion, rows: int, k: int) -> None:
        self.rows, self.k = rows, k
        self.steps = divide("MFMA steps of an activation row", k, MX_STEP)
        self.word_stride = k // 2 + ROW_PAD_BYTES
        self.codes_per_group = self._codes_per_group(k)
        self.code_stride = LANE_GROUPS * self.codes_per_group
        require(region.nbytes >= self.nbytes(rows, k),
                f"MXFP4 rows need {self.nbytes(rows, k)} B of LDS, the region has {region.nbytes}")
        self.words = region.part(0, rows * self.word_stride)
        self.codes = region.part(rows * self.word_stride, rows * self.code_stride)

    @staticmethod
    def _codes_per_group(k: int) -> int:
        return -(-(k // MX_STEP) // 4) * 4

    @classmethod
    def nbytes(cls, rows: int, k: int) -> int:
        """LDS bytes of ``rows`` rows."""
        return rows * (k // 2 + ROW_PAD_BYTES + LANE_GROUPS * cls._codes_per_group(k))

    def store_block(self, row: Any, block: Any, words: Sequence[Any], code: Any) -> None:
        """Store block ``block`` (32 values: four words, a code) of ``row`` (both ``Int32`` or int)."""
        row, block = d.I32(row), d.I32(block)
        self.words.store(d.vector_from(list(words)), row * self.word_stride + block * LOAD_BYTES)
        step = d.shift_right_logical(block, d.I32(2))
        place = row * self.code_stride + (block & 3) * self.codes_per_group + step
        self.codes.store(d.trunc(code, d.I8), place)

    def quantize_block(self, source: Bf16Rows, row: Any, block: Any) -> None:
        """One lane quantises 32 bf16 of ``source`` (RCEIL, round to nearest even) into this row's block."""
        values = []
        start = source.offset(d.I32(row), d.I32(block) * d.MX_BLOCK)
        for piece in range(d.MX_BLOCK * BF16_BYTES // LOAD_BYTES):
            four = source.region.load(start + piece * LOAD_BYTES, d.vec(d.I32, 4))
            for word in range(4):
                values.extend(d.f32_from_bf16_pair(d.vector_element(four, word)))
        words, code = d.mxfp4_quantize32(values)
        self.store_block(row, block, words, code)

    def quantize(self, source: Bf16Rows, threads: int) -> None:
        """All ``threads`` quantise all rows, one block a lane at a time; barriers before and after are the caller's."""
        per_row = self.k // d.MX_BLOCK
        total = self.rows * per_row
        for first in range(0, total, threads):
            unit = d.thread_id() + first
            row, block = d.unsigned_divide(unit, per_row)
            if first + threads <= total:
                self.quantize_block(source, row, block)
            else:
                with d.if_(d.compare("ult", unit, d.I32(total))):
                    self.quantize_block(source, row, block)


# ---------------------------------------------------------------------------------------------------------------
# bf16 task
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bf16Task:
    """16 bf16 weight rows times ``k`` columns; chunk c of 128 columns belongs to wave c % waves.

    ``row_stride``: elements from one weight row to the next (default ``k``). When the chunks do not fill the waves,
    the surplus waves load the last chunk again and multiply it with zero.
    """

    k: int
    waves: int = 8
    row_stride: int | None = None

    def __post_init__(self) -> None:
        divide("128-wide K chunks of a bf16 task", self.k, BF16_CHUNK)

    @property
    def chunks(self) -> int:
        """128-wide chunks of the task."""
        return self.k // BF16_CHUNK

    @property
    def chunks_per_wave(self) -> int:
        """Chunks a wave holds (rounded up)."""
        return -(-self.chunks // self.waves)

    @property
    def registers(self) -> int:
        """VGPRs that ``issue`` fills."""
        return self.chunks_per_wave * BF16_LOADS * LOAD_BYTES // 4

    def _chunk(self, wave: Any, index: int) -> tuple[Any, bool]:
        """(chunk number, may be past the end) of the wave's ``index``-th chunk."""
        past = (index + 1) * self.waves > self.chunks
        chunk = wave + index * self.waves
        if past:
            chunk = d.select(d.compare("ult", chunk, d.I32(self.chunks)), chunk, d.I32(self.chunks - 1))
        return chunk, past

    def issue(self, base: Any, first_row: Any, wave: Any, cache: Any = d.NT, first_column: Any = 0) -> list[Any]:
        """Issue this wave's loads of rows ``first_row`` .. + 15 (uniform ``Int32``); 16 bytes a lane each.

        ``base``: ``Int64`` of the matrix (row 0, column 0); ``first_column``: where the task's ``k`` columns start.
        """
        stride = (self.row_stride or self.k) * BF16_BYTES
        lane = d.lane_id()
        lane_offset = (lane & (TASK_ROWS - 1)) * stride + lane_group() * LOAD_BYTES
        task = base + _product64(first_row, stride) + d.zext(d.I32(first_column) * BF16_BYTES, d.I64)
        loads = []
        for index in range(self.chunks_per_wave):
            chunk, past = self._chunk(wave, index)
            if past:
                start, constant = task + d.zext(chunk * BF16_CHUNK_BYTES, d.I64), 0
            else:
                start = task + d.zext(wave * BF16_CHUNK_BYTES, d.I64)
                constant = index * self.waves * BF16_CHUNK_BYTES
            for q in range(BF16_LOADS):
                place = constant + q * LANE_GROUPS * LOAD_BYTES
                loads.append(d.load(start, lane_offset, d.vec(d.I32, 4), cache, constant=place))
        return loads

    def consume(self, weights: Sequence[Any], x: Bf16Rows, wave: Any, acc: Any = None, x_column: int = 0) -> Any:
        """Accumulate the wave's chunks in ascending order; ``x_column``: where the task's columns start in ``x``."""
        acc = d.zero_acc() if acc is None else acc
        lane_offset = operand_row(x.rows) * x.stride + lane_group() * LOAD_BYTES + x_column * BF16_BYTES
        zero = d.vector_from([d.I32(0)] * 4)
        for index in range(self.chunks_per_wave):
            chunk, past = self._chunk(wave, index)
            if past:
                start, constant = lane_offset + chunk * BF16_CHUNK_BYTES, 0
                live = d.compare("ult", wave + index * self.waves, d.I32(self.chunks))
            else:
                start = lane_offset + wave * BF16_CHUNK_BYTES
                constant = index * self.waves * BF16_CHUNK_BYTES
            for q in range(BF16_LOADS):
                operand = x.region.load_at(start, constant + q * LANE_GROUPS * LOAD_BYTES, d.vec(d.I32, 4))
                if past:
                    operand = d.select(live, operand, zero)
                acc = d.mfma_bf16(weights[index * BF16_LOADS + q], operand, acc)
        return acc


# ---------------------------------------------------------------------------------------------------------------
# MXFP4 task
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mxfp4Weights:
    """Registers of one MXFP4 task's part: a 4-word operand a step, a scale word a pair of steps."""

    words: tuple[Any, ...]
    scales: tuple[Any, ...]


@dataclass(frozen=True)
class Mxfp4Task:
    """16 weight rows (one row group) of an MXFP4 matrix [N, ``k``] in the layout SGLang and AITER leave on gfx950.

    Weights, ``shuffle_weight(layout=(16, 16))``: step st of row group rg is 1024 contiguous bytes at
    ``rg * 8 k + st * 1024``, lane l's 16 bytes at 16 l (row l % 16, k = 128 st + 32 (l / 16) .. + 31).
    Scales, ``e8m0_shuffle``: dword ``((rg / 2) * (k / 256) + st / 2) * 64 + l``, byte ``2 (st % 2) + rg % 2``.
    """

    k: int

    def __post_init__(self) -> None:
        divide("256-wide pairs of MFMA steps of an MXFP4 task", self.k, 2 * MX_STEP)

    @property
    def steps(self) -> int:
        """128-wide steps of the task."""
        return self.k // MX_STEP

    def issue(self, weights: Any, scales: Any, row_group: Any, first_step: Any, steps: int, cache: Any = d.NT
              ) -> Mxfp4Weights:
        """Issue the loads of ``steps`` steps from ``first_step`` (uniform ``Int32`` or int, even; ``steps`` even).

        ``weights``, ``scales``: ``Int64`` addresses of the expert's (matrix's) first byte, equal in all lanes of the
        wave; ``row_group``: uniform ``Int32``.
        """
        require(steps % 2 == 0, f"an MXFP4 task part of {steps} steps; needed: an even count (a scale word serves 2)")
        lane = d.lane_id()
        row_group, first_step = d.I32(row_group), d.I32(first_step)
        start = weights + _product64(row_group, self.steps * MX_STEP_BYTES) + _product64(first_step, MX_STEP_BYTES)
        words = [
            d.load(start, lane * LOAD_BYTES, d.vec(d.I32, 4), cache, constant=i * MX_STEP_BYTES) for i in range(steps)
        ]
        half = d.shift_right_logical(row_group, d.I32(1))
        pair = half * (self.steps // 2) + d.shift_right_logical(first_step, d.I32(1))
        pair_bytes = d.WAVE_LANES * 4
        scale_start = scales + _product64(pair, pair_bytes)
        shift = (row_group & 1) << 3
        codes = [
            (d.load(scale_start, lane * 4, d.I32, cache, constant=i * pair_bytes), shift) for i in range(steps // 2)
        ]
        return Mxfp4Weights(tuple(words), tuple(codes))

    def consume(self, tile: Mxfp4Weights, x: Mxfp4Rows, first_step: Any, acc: Any = None, row: Any = None) -> Any:
        """Accumulate the tile's steps in ascending order; ``row`` overrides this lane's activation row (``Int32``)."""
        require(x.k == self.k, f"activation rows of {x.k} values for a task of K {self.k}")
        acc = d.zero_acc() if acc is None else acc
        row = operand_row(x.rows) if row is None else row
        first_step = d.I32(first_step)
        word_start = row * x.word_stride + lane_group() * LOAD_BYTES + first_step * (MX_STEP // 2)
        code_start = row * x.code_stride + lane_group() * x.codes_per_group + first_step
        for i, words in enumerate(tile.words):
            if i % 2 == 0:
                # first_step is even: two codes a 16-bit load.
                code = d.zext(x.codes.load_at(code_start, i, d.I16), d.I32)
                word, shift = tile.scales[i // 2]
                scale = d.shift_right_logical(word, shift)
            operand = x.words.load_at(word_start, i * (MX_STEP // 2), d.vec(d.I32, 4))
            acc = d.mfma_mxfp4(words, operand, acc, scale, 2 * (i % 2), code, i % 2)
        return acc


# ---------------------------------------------------------------------------------------------------------------
# Sum over waves
# ---------------------------------------------------------------------------------------------------------------


def partial_bytes(rows: int, waves: int = 8) -> int:
    """LDS bytes of the waves' partial sums of one task."""
    return waves * rows * PARTIAL_BYTES


def store_partials(acc: Any, region: d.LdsRegion, rows: int, slot: Any) -> None:
    """Write this wave's accumulator to partial ``slot`` (its wave number, or its place in the sum); barrier after."""
    column = d.lane_id() & (TASK_ROWS - 1)
    place = (d.I32(slot) * rows + column) * PARTIAL_BYTES + lane_group() * LOAD_BYTES
    with d.if_(d.compare("ult", column, d.I32(rows))):
        region.store(acc, place)


def sum_partials(region: d.LdsRegion, rows: int, weight_row: Any, row: Any, slots: Sequence[int] = range(8)) -> Any:
    """f32 sum over ``slots`` in the given order, first term taken as it is, of (weight row 0..15, activation row)."""
    place = row * PARTIAL_BYTES + weight_row * 4
    total = None
    for slot in slots:
        part = region.load_at(place, slot * rows * PARTIAL_BYTES, d.F32)
        total = part if total is None else total + part
    return total


def _product64(value: Any, factor: int) -> Any:
    """Uniform ``Int32`` (unsigned, or int) times a constant as ``Int64``; the product must stay below 2**32 bytes."""
    if isinstance(value, int):
        return d.I64(value * factor)
    return d.zext(value * factor, d.I64)
