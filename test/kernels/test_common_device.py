# SPDX-License-Identifier: Apache-2.0
"""The device vocabulary and the skinny products, executed on the simulator against NumPy and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import mx_reference as mx
from helpers.common_kernels import AccessKey, GemvKey, OpsKey, operations

from sgl_amd_mono.common.runtime_sim import Cluster

MODELS = ("consistent", "adversarial")
LANES = np.arange(512)


def cluster(memory: str = "consistent", seed: int = 0) -> Cluster:
    return Cluster(1, memory=memory, seed=seed)


def f32(bits: Any) -> np.ndarray:
    return np.asarray(bits, np.uint32).view(np.float32)


def run_operations(a: np.ndarray, b: np.ndarray, memory: str = "consistent") -> dict[str, np.ndarray]:
    """uint32 results of ``operations()`` by name."""
    where = cluster(memory)
    out = torch.zeros(len(operations()), 512, dtype=torch.int32)
    where.launch([(0, where.kernel(OpsKey()), [torch.from_numpy(a), torch.from_numpy(b), out])])
    return {name: out[i].numpy().view(np.uint32) for i, name in enumerate(operations())}


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(7)
    a, b = (generator.standard_normal(512).astype(np.float32) * 4 for _ in range(2))
    return a, b


@pytest.fixture(scope="module")
def results(data: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    return run_operations(*data)


def butterfly(a: np.ndarray, lanes: int, combine: Any) -> np.ndarray:
    """Pairwise at distances 1, 2, 4, ... in f32."""
    value, distance = a.copy(), 1
    while distance < lanes:
        value = combine(value, value[LANES ^ distance])
        distance *= 2
    return value


@pytest.mark.parametrize("memory", MODELS)
def test_wave_reductions_keep_their_order(memory: str, data: Any) -> None:
    a, _ = data
    got = run_operations(*data, memory=memory)
    for lanes in (2, 4, 8, 16, 32, 64):
        expected = butterfly(a, lanes, np.add)
        assert np.array_equal(f32(got[f"sum{lanes}"]), expected)
        groups = f32(got[f"sum{lanes}"]).reshape(-1, lanes)
        assert (groups == groups[:, :1]).all()
    for lanes in (16, 64):
        assert np.array_equal(f32(got[f"max{lanes}"]), butterfly(a, lanes, np.maximum))
    # The order shows: summing from the largest distance down gives other bits somewhere.
    other = a.copy()
    for distance in (32, 16, 8, 4, 2, 1):
        other = other + other[LANES ^ distance]
    assert not np.array_equal(other, f32(got["sum64"]))


def test_lane_moves(results: dict[str, np.ndarray], data: Any) -> None:
    bits = data[0].view(np.uint32)
    for distance in (1, 2, 4, 8, 16, 32):
        assert np.array_equal(results[f"xor{distance}"], bits[LANES ^ distance]), distance
    assert np.array_equal(results["low_half"], bits[LANES & ~32])
    assert np.array_equal(results["high_half"], bits[LANES | 32])
    assert np.array_equal(results["even_row"], bits[LANES & ~16])
    assert np.array_equal(results["odd_row"], bits[LANES | 16])
    assert np.array_equal(results["read_lane"], bits[(LANES & ~63) + 5])
    assert np.array_equal(results["wave"], LANES >> 6)
    assert np.array_equal(results["lane"], LANES & 63)
    less = (data[0] < data[1]).reshape(8, 64)
    low = [sum(1 << i for i in range(32) if wave[i]) for wave in less]
    assert np.array_equal(results["ballot"], np.repeat(low, 64))


def test_control_flow_and_integers(results: dict[str, np.ndarray], data: Any) -> None:
    assert np.array_equal(results["divide"], LANES * 977 // 192)
    assert np.array_equal(results["remainder"], LANES * 977 % 192)
    value = LANES.astype(np.uint32)
    for i in range(7):
        value = np.where(i < (LANES & 7), value * 3 + i, value).astype(np.uint32)
    assert np.array_equal(results["loop"], value)
    a, b = data
    assert np.array_equal(f32(results["branch"]), np.where(a < b, a - b, b * b))


def bf16(x: np.ndarray) -> np.ndarray:
    """Bits of bf16, nearest even."""
    return torch.from_numpy(x.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)


def test_bf16(results: dict[str, np.ndarray], data: Any) -> None:
    a, b = data
    assert np.array_equal(results["pack"], bf16(a) | (bf16(b) << 16))
    assert np.array_equal(results["bf16_bits"], bf16(a))
    assert np.array_equal(results["bf16_round"], bf16(a) << 16)
    high, low = f32(a.view(np.uint32) & 0xFFFF0000), f32(b.view(np.uint32) << 16)
    assert np.array_equal(f32(results["unpack"]), high + low)
    ties = f32((LANES.astype(np.uint32) * 0x00018000) + 0x3F800000)  # halves of an ulp, both ways
    assert np.array_equal(run_operations(ties, ties)["bf16_bits"], bf16(ties))


def test_arithmetic_forms(results: dict[str, np.ndarray], data: Any) -> None:
    a = data[0].astype(np.float64)
    assert np.array_equal(f32(results["maximum"]), np.maximum(*data))
    exact = np.array([float(x) * float(y) + float(x) for x, y in zip(*data)]).astype(np.float32)
    assert np.abs(f32(results["fma"]).view(np.int32) - exact.view(np.int32)).max() <= 1
    for name, expected in (
        ("exp", np.exp(a)),
        ("sigmoid", 1 / (1 + np.exp(-a))),
        ("silu", a / (1 + np.exp(-a))),
        ("rsq", 1 / np.sqrt(np.abs(a))),
    ):
        assert np.allclose(f32(results[name]), expected, rtol=4e-6, atol=0), name
    # 1 + exp(x) is rounded at 1, so the error of a small softplus is absolute.
    assert np.allclose(f32(results["softplus"]), np.log1p(np.exp(a)), rtol=4e-6, atol=2.0**-22)
    wide = np.linspace(-100, 100, 512).astype(np.float32)
    got = run_operations(wide, wide)
    assert np.array_equal(f32(got["softplus"])[wide > 20], wide[wide > 20])
    assert (f32(got["sigmoid"])[wide < -90] == 0).all() and (f32(got["sigmoid"])[wide > 20] == 1).all()
    assert np.isfinite(f32(got["softplus"])).all()


def test_mx_codes_are_exact_everywhere() -> None:
    """All exponents, with the mantissas around 1.0, 1.5, 1.75 and 2.0 where a code could change."""
    mantissas = [0, 1, 2, 0x3FFFFE, 0x3FFFFF, 0x400000, 0x400001, 0x400002, 0x7FFFFE, 0x7FFFFF]
    mantissas = np.array([*mantissas, 0x5FFFFE, 0x5FFFFF, 0x600000, 0x600001], np.uint32)
    bits = (np.arange(255, dtype=np.uint32)[:, None] << 23 | mantissas).ravel()
    bits = np.concatenate([bits, np.full(-len(bits) % 512, 0x7F800000, np.uint32)])  # filled up with infinity
    for start in range(0, len(bits), 512):
        amax = f32(bits[start : start + 512])
        results = run_operations(amax, amax)
        for name, codes in (("code", mx.block_codes), ("code_even", mx.block_codes_even)):
            expected = codes(np.repeat(amax[:, None], 32, 1)).ravel()
            assert np.array_equal(results[name], expected), (name, amax[results[name] != expected])


def test_mx_of_packed_bf16() -> None:
    """Two words of two bf16 a thread: their largest magnitude, and their e2m1 under the code of a block of the four."""
    generator = np.random.default_rng(8)
    values = generator.standard_normal((512, 4)) * np.exp2(generator.integers(-60, 60, (512, 1)))
    halves = bf16(values.astype(np.float32).ravel()).reshape(512, 4)
    words = halves[:, 0::2] | (halves[:, 1::2] << 16)
    got = run_operations(f32(words[:, 0]).copy(), f32(words[:, 1]).copy())
    x = f32(halves << 16)
    assert np.array_equal(f32(got["bf16_amax"]), np.abs(x).max(1))
    block = np.concatenate([x, np.zeros((512, 28), np.float32)], 1)
    nibbles = mx.nibbles(block, mx.block_codes_even(block))[:, :4]
    assert np.array_equal(got["pack_fp4"], (nibbles << (4 * np.arange(4))).sum(1))


@pytest.mark.parametrize("memory", MODELS)
def test_accesses_of_every_width_and_policy(memory: str) -> None:
    where = cluster(memory)
    forms = AccessKey.forms()
    src = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (len(forms), 2048), np.uint8))
    out = torch.zeros_like(src)
    where.launch([(0, where.kernel(AccessKey()), [src, out])])
    for i, form in enumerate(forms):
        assert torch.equal(src[i], out[i]), form


# ---------------------------------------------------------------------------------------------------------------
# Skinny products
# ---------------------------------------------------------------------------------------------------------------


def run_gemv(key: GemvKey, memory: str = "consistent", seed: int = 0, spoil: Any = None) -> dict[str, np.ndarray]:
    """Outputs and float64 references of ``GemvKey``; ``spoil(scales)`` may change the kernel's scale bytes."""
    generator = np.random.default_rng(key.k + key.rows)
    n = 16 * key.blocks
    x = torch.from_numpy(generator.standard_normal((key.rows, key.k)).astype(np.float32)).bfloat16()
    w = torch.from_numpy(generator.standard_normal((n, key.k)).astype(np.float32)).bfloat16()
    plain = generator.standard_normal((n, key.k)).astype(np.float32) * 2.0 ** generator.integers(-6, 6, (n, 1))
    scales = mx.block_codes(plain)
    codes4 = mx.nibbles(plain, scales)
    scale_bytes = mx.shuffle_scale(scales.astype(np.uint8))
    if spoil:
        spoil(scale_bytes)
    packed, scale_bytes = torch.from_numpy(mx.shuffle_weight(mx.pack(codes4))), torch.from_numpy(scale_bytes)
    out, out_mx = torch.zeros(key.rows, n), torch.zeros(key.rows, n)
    words, codes = (torch.zeros(key.rows, key.k // n, dtype=torch.uint8) for n in (2, 32))
    where = cluster(memory, seed)
    where.launch([(0, where.kernel(key), [x, w, packed, scale_bytes, out, out_mx, words, codes])])
    x64 = x.double().numpy()
    x_codes = mx.block_codes(x.float().numpy())
    x_nibbles = mx.nibbles(x.float().numpy(), x_codes)
    return {
        "out": out.numpy(),
        "out_mx": out_mx.numpy(),
        "words": words.numpy(),
        "codes": codes.numpy(),
        "expected": x64 @ w.double().numpy().T,
        "expected_mx": mx.values(x_nibbles, x_codes) @ mx.values(codes4, scales).T,
        "expected_words": mx.pack(x_nibbles),
        "expected_codes": x_codes,
    }


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


# A sum of k f32 products in another order differs by about sqrt(k) * 2**-24 of the norm of its terms.
NOISE = 4 * 2.0**-24


@pytest.mark.parametrize("memory", MODELS)
@pytest.mark.parametrize("k", [256, 1024, 2048, 8192])
def test_products_match_float64(k: int, memory: str) -> None:
    key = GemvKey(k=k, rows=3)
    got = run_gemv(key, memory)
    assert relative(got["out"], got["expected"]) <= NOISE * k**0.5
    assert relative(got["out_mx"], got["expected_mx"]) <= NOISE * k**0.5
    assert np.array_equal(got["words"], got["expected_words"])
    assert np.array_equal(got["codes"], got["expected_codes"])


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
def test_a_row_does_not_depend_on_the_others(rows: int) -> None:
    both = [run_gemv(GemvKey(k=1024, rows=rows)), run_gemv(GemvKey(k=1024, rows=rows), seed=5)]
    for name in ("out", "out_mx"):
        assert np.array_equal(both[0][name], both[1][name])
        assert relative(both[0][name], both[0][f"expected{name[3:]}"]) <= NOISE * 32


def test_width_changes_no_bit_of_a_row() -> None:
    generator = np.random.default_rng(11)
    x = torch.from_numpy(generator.standard_normal((8, 1024)).astype(np.float32)).bfloat16()
    w = torch.from_numpy(generator.standard_normal((32, 1024)).astype(np.float32)).bfloat16()
    packed = torch.from_numpy(generator.integers(0, 256, (32, 512), np.uint8))
    scales = torch.from_numpy(generator.integers(120, 132, (32, 32)).astype(np.uint8))
    where = cluster()
    outputs = []
    for rows in (1, 3, 8):
        out, out_mx = torch.zeros(rows, 32), torch.zeros(rows, 32)
        words = torch.zeros(rows, 512, dtype=torch.uint8)
        codes = torch.zeros(rows, 32, dtype=torch.uint8)
        part = x[:rows].flip(0).contiguous() if rows == 3 else x[:rows]
        where.launch([(0, where.kernel(GemvKey(rows=rows)), [part, w, packed, scales, out, out_mx, words, codes])])
        outputs.append((out, out_mx))
    for one, three, eight in zip(*outputs, strict=True):
        assert torch.equal(one[0], eight[0]) and torch.equal(three.flip(0), eight[:3])


def test_a_wrong_scale_byte_fails_the_gate() -> None:
    key = GemvKey(k=1024, rows=2)

    def spoil(scales: np.ndarray) -> None:
        scales[37] += 1

    got = run_gemv(key, spoil=spoil)
    assert relative(got["out_mx"], got["expected_mx"]) > NOISE * 32
    assert relative(got["out"], got["expected"]) <= NOISE * 32
