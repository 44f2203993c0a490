# SPDX-License-Identifier: Apache-2.0
"""Small Triton kernels in the manner of Triton's tutorials: programs that our own code did not write, for the
simulator's tests.
"""

import triton
import triton.language as tl


@triton.jit
def vector_add(x, y, out, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    tl.store(out + index, tl.load(x + index, mask=mask) + tl.load(y + index, mask=mask), mask=mask)


@triton.jit
def row_softmax(x, out, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + index, mask=index < columns, other=-float("inf")).to(tl.float32)
    values = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * stride + index, values / tl.sum(values, axis=0), mask=index < columns)


@triton.jit
def matmul(a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c = a @ b with row-major a (m x k), b (k x n), c (m x n); sums in f32."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, k, BK):
        inner = first + tl.arange(0, BK)
        left = tl.load(
            a + rows[:, None] * k + inner[None, :], mask=(rows[:, None] < m) & (inner[None, :] < k), other=0.0
        )
        right = tl.load(
            b + inner[:, None] * n + columns[None, :], mask=(inner[:, None] < k) & (columns[None, :] < n), other=0.0
        )
        total = tl.dot(left, right, total)
    tl.store(
        c + rows[:, None] * n + columns[None, :],
        total.to(c.dtype.element_ty),
        mask=(rows[:, None] < m) & (columns[None, :] < n),
    )


@triton.jit
def scaled_matmul(a, a_scale, b, b_scale, c, m, n, k, A: tl.constexpr, B: tl.constexpr, A_PACK: tl.constexpr,
B_PACK: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """c (f32) = a @ b^T of MX operands: a (m x k / A_PACK bytes), b (n x k / B_PACK bytes), one e8m0 scale a row and
    32 elements.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, k, BK):
        a_bytes = first // A_PACK + tl.arange(0, BK // A_PACK)
        b_bytes = first // B_PACK + tl.arange(0, BK // B_PACK)
        groups = first // 32 + tl.arange(0, BK // 32)
        left = tl.load(a + rows[:, None] * (k // A_PACK) + a_bytes[None, :])
        right = tl.load(b + columns[None, :] * (k // B_PACK) + b_bytes[:, None])
        left_scale = tl.load(a_scale + rows[:, None] * (k // 32) + groups[None, :])
        right_scale = tl.load(b_scale + columns[:, None] * (k // 32) + groups[None, :])
        total = tl.dot_scaled(left, left_scale, A, right, right_scale, B, total)
    tl.store(c + rows[:, None] * n + columns[None, :], total)


@triton.jit
def layer_norm(x, out, weight, bias, means, rstds, columns, eps, BLOCK: tl.constexpr):
    """One row a program, in pieces of BLOCK columns: mean, then variance about it, then the scaled row; f32 inside."""
    row = tl.program_id(0)
    x += row * columns
    out += row * columns
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, columns, BLOCK):
        index = first + tl.arange(0, BLOCK)
        total += tl.load(x + index, mask=index < columns, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / columns
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, columns, BLOCK):
        index = first + tl.arange(0, BLOCK)
        value = tl.load(x + index, mask=index < columns, other=0.0).to(tl.float32)
        value = tl.where(index < columns, value - mean, 0.0)
        squares += value * value
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / columns + eps)
    tl.store(means + row, mean)
    tl.store(rstds + row, rstd)
    for first in range(0, columns, BLOCK):
        index = first + tl.arange(0, BLOCK)
        mask = index < columns
        value = tl.load(x + index, mask=mask, other=0.0).to(tl.float32)
        scaled = (value - mean) * rstd * tl.load(weight + index, mask=mask) + tl.load(bias + index, mask=mask)
        tl.store(out + index, scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sum_and_scan(x, sums, scans, largest, columns, BLOCK: tl.constexpr):
    """Row sums, running sums and the position of the maximum of integers: reductions over lanes and waves."""
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + index, mask=index < columns, other=0)
    tl.store(sums + row, tl.sum(values, axis=0))
    tl.store(scans + row * columns + index, tl.cumsum(values, axis=0), mask=index < columns)
    tl.store(largest + row, tl.argmax(values, axis=0))


@triton.jit
def histogram(x, counts, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    tl.atomic_add(counts + tl.load(x + index, mask=mask, other=0), 1, mask=mask)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 64}, num_warps=1), triton.Config({"BLOCK": 256}, num_warps=4)], key=["n"]
)
@triton.jit
def tuned_double(x, out, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(x + index, mask=index < n) * 2, mask=index < n)


@triton.jit
def add_pair(pair, out, n, BLOCK: tl.constexpr):
    """pair: a tuple of two pointers and a float: out = x + y * factor."""
    index = tl.arange(0, BLOCK)
    x = tl.load(pair[0] + index, mask=index < n)
    y = tl.load(pair[1] + index, mask=index < n)
    tl.store(out + index, x + y * pair[2], mask=index < n)
