# SPDX-License-Identifier: Apache-2.0
"""AITER's Triton kernels of the dense MXFP4 path on the simulator, bit for bit against float64 definitions: the
quantiser, and the GEMM with the split counts and the reduce order at the 27B model's widths.

The configurations are stated here: those of this wheel differ from the ones that SGLang's images have.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch
from helpers import mx_reference, mxfp4_dense
from helpers.aiter_triton import Kernels

from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layout
from sgl_amd_mono.sim.triton_driver import activated

pytestmark = pytest.mark.xdist_group("aiter-triton")
COLUMNS = 64
QUANT_SHAPES = [pytest.param(1, 5120), pytest.param(8, 1024), pytest.param(40, 2048, marks=pytest.mark.full)]


_imported = cache(Kernels)


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    with activated():
        yield _imported()


# ---- the quantiser ----


def unpacked(packed: torch.Tensor) -> np.ndarray:
    pairs = packed.numpy().astype(np.int64)
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)


def assert_quantised(kernels: Kernels, x: torch.Tensor) -> None:
    packed, codes = kernels.quantise(x)
    values = x.float().numpy()
    wanted = mxfp4_dense.even_codes(values)
    assert (codes.numpy() == wanted).all()
    assert (unpacked(packed) == mxfp4_dense.e2m1(values, wanted, ties="up")).all()


@pytest.mark.parametrize(("rows", "columns"), QUANT_SHAPES)
def test_quantiser_on_random_rows(kernels: Kernels, rows: int, columns: int) -> None:
    rng = torch.Generator().manual_seed(rows)
    spread = torch.exp(3 * torch.randn(rows, columns // 32, 1, generator=rng))
    x = (torch.randn(rows, columns // 32, 32, generator=rng) * spread).reshape(rows, columns).bfloat16()
    assert_quantised(kernels, x)


EXPONENTS = range(8, 250, 11)  # biased; beyond, scaled values leave the float32 range or flush


def test_quantiser_on_every_largest_magnitude(kernels: Kernels) -> None:
    """Every mantissa of bf16 at many exponents as the largest magnitude, among eighths of its power of two (ties)."""
    mantissas = 1 + torch.arange(128) / 128
    powers = torch.exp2(torch.tensor(EXPONENTS, dtype=torch.float64) - 127)
    largest = (mantissas[None, :] * powers[:, None]).reshape(-1, 1)
    eighths = (torch.arange(31) % 16 / 8) * torch.where(torch.arange(31) % 2 == 0, 1.0, -1.0)
    rest = eighths[None, :] * powers.repeat_interleave(128)[:, None]
    x = torch.cat([largest, rest.clamp(-largest, largest)], 1).bfloat16()
    assert_quantised(kernels, x.reshape(-1, 1024))


def test_zeros_keep_their_sign_and_get_code_0(kernels: Kernels) -> None:
    x = torch.zeros(8, 1024, dtype=torch.bfloat16)
    x[:, 1::2] = -0.0
    packed, codes = kernels.quantise(x)
    assert (codes == 0).all() and (packed == 0x80).all()


def test_the_rules_differ() -> None:
    """Controls of the two gates above: the other rule for ties, RCEIL for EVEN, and codes of the next block."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(8, 1024, generator=rng).bfloat16().float().numpy()
    codes = mxfp4_dense.even_codes(x)
    up, even = (mxfp4_dense.e2m1(x, codes, ties) for ties in mxfp4_dense.TIES)
    assert 0.003 < (up != even).mean() < 0.05
    rceil = mx_reference.block_codes(x)
    assert 0.05 < (rceil != codes).mean() < 0.3 and (mxfp4_dense.e2m1(x, rceil, "up") != up).any()
    assert (mxfp4_dense.e2m1(x, np.roll(codes, 1, 1), "up") != up).any()


def test_ours_is_the_newer_rule() -> None:
    """What K1 and K2 quantise with (`layout.quantize_mxfp4` by EVEN) has the even rule for ties, and code 1 for 0."""
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(16, 1024, generator=rng).bfloat16()
    packed, codes = layout.quantize_mxfp4(x, layout.scale_code_even)
    wanted = mxfp4_dense.even_codes(x.float().numpy())
    assert (codes.numpy() == wanted).all()
    assert (unpacked(packed) == mxfp4_dense.e2m1(x.float().numpy(), wanted, "even")).all()
    assert int(layout.scale_code_even(torch.zeros(1))) == 1


# ---- the GEMM ----

# columns of K -> splits at 1 to 8 rows: in_proj and gate_up, o_proj at TP 1, out_proj at TP 2, down at TP 1 and TP 2
SPLITS = {5120: 2, 6144: 4, 3072: 3, 17408: 2, 8704: 1}
CASES = [
    pytest.param(8, 5120), pytest.param(8, 6144), pytest.param(5, 3072), pytest.param(16, 5120),
    pytest.param(1, 17408, marks=pytest.mark.full), pytest.param(8, 17408, marks=pytest.mark.full),
    pytest.param(8, 8704, marks=pytest.mark.full), pytest.param(9, 6144, marks=pytest.mark.full),
    pytest.param(16, 3072, marks=pytest.mark.full), pytest.param(16, 17408, marks=pytest.mark.full),
    pytest.param(16, 8704, marks=pytest.mark.full),
]  # fmt: skip


def operands(rows: int, k: int, seed: int) -> tuple[torch.Tensor, ...]:
    """x, its codes, w, its codes, of a spread at which float32 holds every partial sum exactly.

    Behind the last codes lie more: the kernel reads scales past K where K is no multiple of its block.
    """
    rng = torch.Generator().manual_seed(seed)

    def random(low: int, high: int, *shape: int) -> torch.Tensor:
        room = torch.full((shape[0] + 1, shape[1]), 127, dtype=torch.uint8)
        room[:-1] = torch.randint(low, high, shape, generator=rng, dtype=torch.uint8)
        return room[:-1]

    return random(0, 256, rows, k // 2), random(125, 129, rows, k // 32), \
        random(0, 256, COLUMNS, k // 2), random(122, 126, COLUMNS, k // 32)  # fmt: skip


def values(x: torch.Tensor, x_codes: torch.Tensor, w: torch.Tensor, w_codes: torch.Tensor) -> tuple[np.ndarray, ...]:
    return layout.dequantize_mxfp4(x, x_codes).numpy(), layout.dequantize_mxfp4(w, w_codes).numpy()


def bf16(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).bfloat16()


@pytest.mark.parametrize("k", SPLITS)
def test_split_counts(kernels: Kernels, k: int) -> None:
    """Ours, AITER's own function, and the table."""
    few, more = mxfp4_dense.bucket(8), mxfp4_dense.bucket(16)
    columns, splits = mxfp4_dense.split_k(k, few.block_k, few.splits)
    width, block, _ = kernels._gemm.get_splitk(k // 2, few.block_k, few.splits)
    assert (columns, few.block_k, splits) == (width, block, SPLITS[k])
    assert mxfp4_dense.split_k(k, more.block_k, more.splits)[1] == 1


@pytest.mark.parametrize(("rows", "k"), CASES)
def test_gemm(kernels: Kernels, rows: int, k: int) -> None:
    """Random rows: the float32 sums of the splits and the bf16 result, every bit."""
    bucket = mxfp4_dense.bucket(rows)
    given = operands(rows, k, seed=k + rows)
    columns, splits = mxfp4_dense.split_k(k, bucket.block_k, bucket.splits)
    wanted = mxfp4_dense.partials(*values(*given), columns)
    assert len(wanted) == splits
    if splits > 1:
        got = kernels.partials(*given, bucket.configuration())
        assert torch.equal(got, torch.from_numpy(wanted))
    assert torch.equal(kernels.gemm(*given, bucket.configuration()), bf16(mxfp4_dense.reduce_tree(wanted)))


def crafted(k: int, columns: int) -> tuple[torch.Tensor, ...]:
    """Every element's splits sum to 1, 2^25, -2^25 and 1 in turn, by one nibble each: the order of addition shows."""
    packed, codes = torch.zeros(8, k // 2, dtype=torch.uint8), torch.full((8, k // 32), 127, dtype=torch.uint8)
    ones, one_codes = torch.full((COLUMNS, k // 2), 0x02, dtype=torch.uint8), torch.full((COLUMNS, k // 32), 127)
    for split, (nibble, code) in enumerate(((2, 127), (2, 152), (10, 152), (2, 127))):
        if split * columns < k:
            packed[:, split * columns // 2] = nibble
            codes[:, split * columns // 32] = code
    return packed, codes, ones, one_codes.to(torch.uint8)


def test_the_order_of_the_reduction(kernels: Kernels) -> None:
    """Four splits of 1, 2^25, -2^25, 1: in pairs 0, one after the other 1. With another number of splits something else
    again (three: the pair of 2^25 cancels before no 1 is left)."""
    bucket = mxfp4_dense.bucket(8)
    columns, splits = mxfp4_dense.split_k(6144, bucket.block_k, bucket.splits)
    given = crafted(6144, columns)
    parts = mxfp4_dense.partials(*values(*given), columns)
    assert splits == 4 and parts[:, 0, 0].tolist() == [1.0, 2.0**25, -(2.0**25), 1.0]
    pairs, in_order = mxfp4_dense.reduce_tree(parts), mxfp4_dense.reduce_in_order(parts)
    assert (pairs == 0).all() and (in_order == 1).all()
    assert torch.equal(kernels.gemm(*given, bucket.configuration()), bf16(pairs))
    halves = kernels.gemm(*given, bucket.configuration() | {"NUM_KSPLIT": 2})
    whole = mxfp4_dense.partials(*values(*given), 2 * columns)
    assert torch.equal(halves, bf16(mxfp4_dense.reduce_tree(whole)))


def test_a_shifted_scale_block_is_seen(kernels: Kernels) -> None:
    bucket = mxfp4_dense.bucket(16)
    x, x_codes, w, w_codes = operands(16, 5120, seed=5136)
    wanted = bf16(mxfp4_dense.reduce_tree(mxfp4_dense.partials(*values(x, x_codes, w, w_codes), 5120)))
    shifted = kernels.gemm(x, x_codes.roll(1, 1), w, w_codes, bucket.configuration())
    assert not torch.equal(shifted, wanted)
