# SPDX-License-Identifier: Apache-2.0
"""MXFP4 layouts against their index formulas, the quantiser against its definition in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layout


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def test_weight_bytes_stand_where_the_formula_says() -> None:
    w = random_bytes(48, 96)
    shuffled = layout.shuffle_weight(w).flatten()
    kb = w.shape[1]
    for n in range(w.shape[0]):
        for b in range(kb):
            at = (n // 16) * 16 * kb + (b // 16) * 256 + (n % 16) * 16 + b % 16
            assert shuffled[at] == w[n, b], (n, b)


def test_a_lane_finds_its_operand() -> None:
    """Lane l of step st of row group g: byte g*16*Kb + st*1024 + 16*l holds row l%16, columns 128*st + 32*(l/16) ..."""
    w = random_bytes(32, 128)
    shuffled, kb = layout.shuffle_weight(w).flatten(), 128
    for group, step, lane in [(0, 0, 0), (1, 1, 63), (0, 1, 17), (1, 0, 46)]:
        at = group * 16 * kb + step * 1024 + 16 * lane
        row, byte = group * 16 + lane % 16, step * 64 + (lane // 16) * 16
        assert torch.equal(shuffled[at : at + 16], w[row, byte : byte + 16])


def test_scale_codes_stand_where_the_formula_says() -> None:
    s = random_bytes(64, 24)
    shuffled, c = layout.shuffle_scale(s).flatten(), 24
    for r in range(64):
        for k in range(c):
            at = (
                ((r // 32) * (c // 8) + k // 8) * 256 + (k % 4) * 64 + (r % 16) * 4 + ((k // 4) % 2) * 2 + (r // 16) % 2
            )
            assert shuffled[at] == s[r, k], (r, k)


def test_a_scale_word_serves_two_steps_and_two_groups() -> None:
    s = random_bytes(64, 16)
    words, cols = layout.shuffle_scale(s).flatten(), 16
    for group, step, lane in [(0, 0, 0), (3, 3, 63), (2, 1, 20), (1, 2, 37)]:
        word = ((group // 2 * (cols // 8) + step // 2) * 4 + lane // 16) * 16 + lane % 16
        code = words[4 * word + 2 * (step % 2) + group % 2]
        assert code == s[group * 16 + lane % 16, 4 * step + lane // 16]


@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (32, 64), (64, 4096)])
def test_weight_shuffle_has_an_inverse(rows: int, columns: int) -> None:
    w = random_bytes(3, rows, columns)
    assert torch.equal(layout.unshuffle_weight(layout.shuffle_weight(w)), w)
    assert not torch.equal(layout.shuffle_weight(w), w)


@pytest.mark.parametrize(("rows", "columns"), [(32, 8), (64, 32), (512, 256)])
def test_scale_shuffle_has_an_inverse(rows: int, columns: int) -> None:
    s = random_bytes(2, rows, columns)
    assert torch.equal(layout.unshuffle_scale(layout.shuffle_scale(s)), s)
    assert not torch.equal(layout.shuffle_scale(s), s)


def test_an_experts_scales_are_its_own_slice() -> None:
    s = random_bytes(4, 64, 16)
    whole = layout.shuffle_scale(s)
    for e in range(4):
        assert torch.equal(whole[e], layout.shuffle_scale(s[e]))


@pytest.mark.parametrize("shape", [(24, 64), (16, 48)])
def test_a_weight_that_does_not_divide_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="does not divide into tiles of 16 rows x 32 bytes"):
        layout.shuffle_weight(random_bytes(*shape))


@pytest.mark.parametrize("shape", [(48, 8), (32, 12)])
def test_a_scale_that_does_not_divide_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="does not divide into tiles of 32 rows x 8 bytes"):
        layout.shuffle_scale(random_bytes(*shape))


def test_scale_code_is_the_rounded_up_power_of_two() -> None:
    """Against f32 division as AITER words it: exponent of amax/6, plus one where its mantissa is not 0."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 0x7F800000, (200_000,), generator=generator, dtype=torch.int32)
    edges = torch.arange(0, 255, dtype=torch.int32)[:, None] * (1 << 23) + torch.tensor(
        [0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF], dtype=torch.int32
    )
    amax = torch.cat([bits, edges.flatten()]).view(torch.float32)
    quotient = (amax.double() / 6).float().view(torch.int32)  # f64 / 6 rounded to f32 is the correctly rounded quotient
    expected = ((quotient >> 23) + ((quotient & 0x7FFFFF) != 0)).clamp(layout.CODE_MIN, layout.CODE_MAX)
    assert torch.equal(layout.scale_code(amax), expected.int())


def test_even_scale_code_is_the_nearest_power_of_two_from_1_75() -> None:
    """Scaled by the code, the largest magnitude lies in [3.5, 7)."""
    bits = torch.randint(3 << 23, 0x7F800000, (200_000,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    mantissas = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x7FFFFF], dtype=torch.int32)
    edges = torch.arange(3, 255, dtype=torch.int32)[:, None] * (1 << 23) + mantissas
    amax = torch.cat([bits, edges.flatten()]).view(torch.float32)
    scaled = amax.double() * torch.exp2(127.0 - layout.scale_code_even(amax).double())
    assert ((scaled >= 3.5) & (scaled < 7)).all()
    assert layout.scale_code_even(torch.tensor([0.0, 2.0**-126, 6.0, 6.99, 7.0])).tolist() == [1, 1, 127, 127, 128]
    assert not torch.equal(layout.scale_code_even(amax), layout.scale_code(amax)), "the two roundings differ"


def nearest_e2m1(value: Fraction) -> set[float]:
    """Magnitudes nearest to |value|, saturating at 6; of two, the even code."""
    codes = sorted(range(8), key=lambda c: (abs(Fraction(layout.E2M1[c]) - min(abs(value), Fraction(6))), c % 2))
    return {layout.E2M1[codes[0]]}


def test_e2m1_rounds_to_nearest_even_and_saturates() -> None:
    values = torch.tensor([i / 16 for i in range(-130, 131)], dtype=torch.float64)
    nibbles = layout.encode_e2m1(values)
    for v, nibble in zip(values.tolist(), nibbles.tolist(), strict=True):
        assert layout.E2M1[nibble & 7] in nearest_e2m1(Fraction(v)), v
        assert (nibble >> 3) == (v < 0), v
    assert layout.encode_e2m1(torch.tensor([-0.0, 0.0])).tolist() == [8, 0]
    assert layout.encode_e2m1(torch.tensor([1e30, -1e30])).tolist() == [7, 15]


def test_quantised_values_are_exact_where_they_can_be() -> None:
    grid = torch.tensor([*layout.E2M1, *(-v for v in layout.E2M1)]).repeat(2)
    x = torch.stack([grid * 2.0**p for p in (-20, -1, 0, 3, 17)]).float()
    packed, codes = layout.quantize_mxfp4(x)
    assert torch.equal(layout.dequantize_mxfp4(packed, codes), x.double())
    assert torch.equal(codes.flatten(), torch.tensor([107, 126, 127, 130, 144], dtype=torch.uint8))


def test_low_nibble_is_the_even_column() -> None:
    packed, _ = layout.quantize_mxfp4(torch.tensor([[6.0, 0.5] + [0.0] * 30]))
    assert packed[0, 0] == 0x17
    assert layout.dequantize_mxfp4(packed, torch.tensor([[127]], dtype=torch.uint8))[0, :2].tolist() == [6.0, 0.5]


def test_shuffled_dequantisation_undoes_the_layout() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    packed, codes = layout.quantize_mxfp4(x)
    expected = layout.dequantize_mxfp4(packed, codes)
    got = layout.dequantize_shuffled(layout.shuffle_weight(packed), layout.shuffle_scale(codes))
    assert torch.equal(got, expected)
    wrong = codes.clone()
    wrong[5, 3] += 1  # control: one wrong scale byte is seen
    assert not torch.equal(
        layout.dequantize_shuffled(layout.shuffle_weight(packed), layout.shuffle_scale(wrong)), expected
    )
