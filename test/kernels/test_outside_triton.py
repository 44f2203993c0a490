# SPDX-License-Identifier: Apache-2.0
"""Kernels that are not ours, compiled for gfx950 by Triton and executed by the simulator, against PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sgl_amd_mono.sim.triton_driver import SimulatorDriver, activate, deactivate

MEMORY_MODELS = ("consistent", "adversarial")


@pytest.fixture(params=MEMORY_MODELS)
def driver(request: pytest.FixtureRequest) -> Iterator[SimulatorDriver]:
    yield activate(request.param, seed=3, keep_reports=True)
    deactivate()  # other tests of this process must not find a GPU


def test_vector_add(driver: SimulatorDriver) -> None:
    from helpers.triton_kernels import vector_add

    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(3000, generator=generator), torch.randn(3000, generator=generator)
    out = torch.full((3100,), 7.0)
    vector_add[(3,)](x, y, out, 3000, BLOCK=1024)
    assert torch.equal(out[:3000], x + y)
    assert torch.equal(out[3000:], torch.full((100,), 7.0)), "masked lanes were written"


def test_softmax(driver: SimulatorDriver) -> None:
    from helpers.triton_kernels import row_softmax

    x = torch.randn(5, 781, generator=torch.Generator().manual_seed(2)) * 4
    out = torch.zeros_like(x)
    row_softmax[(5,)](x, out, 781, x.stride(0), BLOCK=1024, num_warps=4)
    want = torch.softmax(x.double(), dim=1)
    # exp(x) is 2^(x log2 e): a rounding of the exponent, up to 40, costs 40 * 2^-24 ln 2 = 1.7e-6, the sum and the
    # division a little more.
    assert ((out.double() - want).abs() / want).max() < 4e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("warps", [1, 4])
def test_matmul(driver: SimulatorDriver, dtype: torch.dtype, warps: int) -> None:
    """Small integers: the sum is exact in any order, so a wrong element of a fragment cannot hide."""
    from helpers.triton_kernels import matmul

    generator = torch.Generator().manual_seed(3)
    m, n, k = 70, 50, 96
    a = torch.randint(-4, 5, (m, k), generator=generator).to(dtype)
    b = torch.randint(-4, 5, (k, n), generator=generator).to(dtype)
    c = torch.zeros(m, n)
    matmul[(3, 2)](a, b, c, m, n, k, BM=32, BN=32, BK=64, num_warps=warps)
    assert torch.equal(c, a.float() @ b.float())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("warps", [1, 4])
def test_matmul_in_fp8(driver: SimulatorDriver, dtype: torch.dtype, warps: int) -> None:
    """Small integers, which both formats hold exactly; the product runs in the fp8 MFMA of gfx950."""
    from helpers.triton_kernels import matmul

    generator = torch.Generator().manual_seed(9)
    m, n, k = 70, 50, 192
    a = torch.randint(-4, 5, (m, k), generator=generator).to(dtype)
    b = torch.randint(-4, 5, (k, n), generator=generator).to(dtype)
    c = torch.zeros(m, n)
    matmul[(3, 2)](a, b, c, m, n, k, BM=32, BN=32, BK=128, num_warps=warps)
    assert torch.equal(c, a.float() @ b.float())
    assert driver.launches[-1].report.launches[0].instructions["mfma"] > 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_products_keep_every_bit(driver: SimulatorDriver, dtype: torch.dtype) -> None:
    """Every finite code of the format times one: the values come out as PyTorch reads them."""
    from helpers.triton_kernels import matmul

    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    codes = torch.where(codes.float().isfinite(), codes.float(), torch.zeros(())).to(dtype)
    a = torch.zeros(32, 32 * 8, dtype=dtype)
    a.view(-1)[:256] = codes  # row 0; the other rows are zero
    b = torch.zeros(256, 32, dtype=dtype)
    c = torch.zeros(32, 32)
    for first in range(0, 256, 32):
        b.zero_()
        b[first : first + 32] = torch.eye(32).to(dtype)
        matmul[(1, 1)](a, b, c, 32, 32, 256, BM=32, BN=32, BK=128)
        assert torch.equal(c[0], codes[first : first + 32].float())
        assert (c[1:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_layer_norm(driver: SimulatorDriver, dtype: torch.dtype) -> None:
    from helpers.triton_kernels import layer_norm

    rows, columns, eps = 6, 1151, 1e-5
    generator = torch.Generator().manual_seed(10)
    x = (torch.randn(rows, columns, generator=generator) * 2 - 0.5).to(dtype)
    weight, bias = torch.rand(columns, generator=generator), torch.randn(columns, generator=generator)
    out, means, rstds = torch.zeros_like(x), torch.zeros(rows), torch.zeros(rows)
    layer_norm[(rows,)](x, out, weight, bias, means, rstds, columns, eps, BLOCK=256)
    exact = x.double()
    variance, mean = torch.var_mean(exact, dim=1, correction=0)
    want = torch.nn.functional.layer_norm(exact, (columns,), weight.double(), bias.double(), eps)
    # sums of 1151 squares in f32, a root and a division: some 2^-24 each
    assert ((means - mean).abs() < 2e-6).all()
    assert ((rstds * (variance + eps).sqrt() - 1).abs() < 2e-6).all()
    # an output is a sum of two terms of up to 4: the half unit of its type, and a few roundings of f32
    allowed = want.abs() * torch.finfo(dtype).eps / 2 * 1.001 + 8 * 2.0**-22
    assert ((out.double() - want).abs() <= allowed).all()


def test_matmul_rounds_as_f32_sums_do(driver: SimulatorDriver) -> None:
    from helpers.triton_kernels import matmul

    generator = torch.Generator().manual_seed(4)
    m, n, k = 64, 64, 512
    a, b = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((m, k), (k, n)))
    c = torch.zeros(m, n)
    matmul[(2, 2)](a, b, c, m, n, k, BM=32, BN=32, BK=64)
    want = a.double() @ b.double()
    assert ((c.double() - want).norm() / want.norm()) < 1e-6


FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _mx_operand(fmt: str, rows: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """(bytes, scales, exact values) of a random MX operand."""
    rng = np.random.default_rng(seed)
    scales = rng.integers(124, 131, (rows, k // 32), dtype=np.uint8)
    factors = np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=1)
    if fmt == "e2m1":
        codes = rng.integers(0, 16, (rows, k), dtype=np.uint8)
        values = FP4_VALUES[codes]
        data = codes[:, ::2] | codes[:, 1::2] << 4
    else:
        values = rng.integers(-16, 17, (rows, k)).astype(np.float64)
        data = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return torch.from_numpy(data.copy()), torch.from_numpy(scales), values * factors


@pytest.mark.parametrize("formats", [("e2m1", "e2m1"), ("e4m3", "e2m1"), ("e4m3", "e4m3")], ids="-".join)
def test_scaled_matmul(driver: SimulatorDriver, formats: tuple[str, str]) -> None:
    """Triton's own lowering of tl.dot_scaled places operands and scales; the sums are exact in f32."""
    from helpers.triton_kernels import scaled_matmul

    m, n, k = 64, 32, 256
    a, a_scale, a_values = _mx_operand(formats[0], m, k, 5)
    b, b_scale, b_values = _mx_operand(formats[1], n, k, 6)
    c = torch.zeros(m, n)
    packs = [2 if fmt == "e2m1" else 1 for fmt in formats]
    scaled_matmul[(2, 1)](
        a, a_scale, b, b_scale, c, m, n, k, A=formats[0], B=formats[1], A_PACK=packs[0], B_PACK=packs[1], BM=32,
        BN=32, BK=128,
    )  # fmt: skip
    want = torch.from_numpy(a_values @ b_values.T).float()
    assert torch.equal(c, want)


def test_reductions_and_scans(driver: SimulatorDriver) -> None:
    from helpers.triton_kernels import sum_and_scan

    x = torch.randint(-1000, 1000, (4, 700), generator=torch.Generator().manual_seed(7), dtype=torch.int32)
    sums, largest = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    scans = torch.zeros_like(x)
    sum_and_scan[(4,)](x, sums, scans, largest, 700, BLOCK=1024, num_warps=4)
    assert torch.equal(sums, x.sum(1, dtype=torch.int32))
    assert torch.equal(scans, x.cumsum(1, dtype=torch.int32))
    assert torch.equal(torch.gather(x, 1, largest[:, None].long())[:, 0], x.max(1).values)


def test_atomics_from_many_workgroups(driver: SimulatorDriver) -> None:
    from helpers.triton_kernels import histogram

    x = torch.randint(0, 50, (5000,), generator=torch.Generator().manual_seed(8), dtype=torch.int32)
    counts = torch.zeros(50, dtype=torch.int32)
    histogram[(20,)](x, counts, 5000, BLOCK=256)
    assert torch.equal(counts, torch.bincount(x, minlength=50).int())


def test_a_wrong_constant_in_the_machine_code_is_seen(driver: SimulatorDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with one addition of the emitted code turned into a subtraction the comparison fails."""
    from helpers.triton_kernels import vector_add

    from sgl_amd_mono.sim import CodeObject

    parse = CodeObject.parse
    monkeypatch.setattr(
        CodeObject,
        "parse",
        lambda text: parse(text.replace("v_add_f32", "v_sub_f32").replace("v_pk_add_f32", "v_pk_mul_f32")),
    )
    x, y = torch.full((256,), 3.0), torch.full((256,), 4.0)
    out = torch.zeros(256)
    vector_add[(1,)](x, y, out, 255, BLOCK=256)  # another specialisation, so that it is parsed anew
    assert not torch.equal(out[:255], (x + y)[:255])


def test_the_other_fp8_format_in_the_machine_code_is_seen(
    driver: SimulatorDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the MFMA reads its e4m3 operands as e5m2."""
    from helpers.triton_kernels import matmul

    from sgl_amd_mono.sim import CodeObject

    parse = CodeObject.parse
    monkeypatch.setattr(CodeObject, "parse", lambda text: parse(text.replace("_fp8_fp8", "_bf8_bf8")))
    generator = torch.Generator().manual_seed(11)
    a, b = (torch.randint(-4, 5, (32, 32), generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    c = torch.zeros(32, 32)
    matmul[(1, 1)](a, b, c, 32, 32, 32, BM=32, BN=32, BK=32)  # a specialisation of its own, so that it is parsed anew
    assert not torch.equal(c, a.float() @ b.float())


def test_a_wrong_root_in_the_layer_norm_is_seen(driver: SimulatorDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the root of the variance is left out."""
    from helpers.triton_kernels import layer_norm

    from sgl_amd_mono.sim import CodeObject

    parse = CodeObject.parse
    monkeypatch.setattr(CodeObject, "parse", lambda text: parse(text.replace("v_sqrt_f32_e32", "v_mov_b32_e32")))
    x = torch.randn(1, 640, generator=torch.Generator().manual_seed(12)) * 3
    ones, zeros = torch.ones(640), torch.zeros(640)
    out, means, rstds = torch.zeros_like(x), torch.zeros(1), torch.zeros(1)
    layer_norm[(1,)](x, out, ones, zeros, means, rstds, 640, 1e-5, BLOCK=512)
    assert (out - torch.nn.functional.layer_norm(x, (640,))).abs().max() > 0.1
