# SPDX-License-Identifier: Apache-2.0
"""The stand-ins that `simulate` puts in the place of AITER and SGLang's Triton kernels, against their definitions."""

from __future__ import annotations

import pytest
import torch

from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layout
from sgl_amd_mono.simulate import aiter_moe, aiter_standin, checkpoint, gdn_standin, sums


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_weight_shuffle_follows_the_index_formula() -> None:
    """Byte (n, kb) goes to (n/16)*16*Kb + (kb/16)*256 + (n%16)*16 + kb%16."""
    rows, width = 48, 96
    weight = random_bytes(rows, width)
    shuffled = aiter_standin.shuffle_weight(weight).flatten()
    for n in range(rows):
        for kb in range(width):
            place = (n // 16) * 16 * width + (kb // 16) * 256 + (n % 16) * 16 + kb % 16
            assert shuffled[place] == weight[n, kb]
    experts = random_bytes(3, rows, width, seed=1)
    assert torch.equal(aiter_standin.shuffle_weight(experts)[2], aiter_standin.shuffle_weight(experts[2]))
    assert torch.equal(aiter_standin.unshuffle_weight(aiter_standin.shuffle_weight(experts)), experts)
    assert torch.equal(aiter_standin.shuffle_weight(experts), layout.shuffle_weight(experts))


def test_scale_shuffle_follows_the_index_formula() -> None:
    """Code (r, c) goes to ((r/32)*(C/8) + c/8)*256 + (c%4)*64 + (r%16)*4 + ((c/4)%2)*2 + (r/16)%2."""
    rows, columns = 96, 24
    scale = random_bytes(rows, columns)
    shuffled = aiter_standin.e8m0_shuffle(scale).flatten()
    for r in range(rows):
        for c in range(columns):
            tile = (r // 32) * (columns // 8) + c // 8
            place = tile * 256 + (c % 4) * 64 + (r % 16) * 4 + ((c // 4) % 2) * 2 + (r // 16) % 2
            assert shuffled[place] == scale[r, c]
    assert torch.equal(aiter_standin.e8m0_unshuffle(aiter_standin.e8m0_shuffle(scale)), scale)
    assert torch.equal(aiter_standin.e8m0_shuffle(scale), layout.shuffle_scale(scale))


def test_e2m1_codes_round_to_even_and_saturate() -> None:
    values = torch.tensor([0.0, -0.0, 0.25, 0.2500001, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.0001, 6.0, 1e9, -3.0])
    assert checkpoint.e2m1_codes(values).tolist() == [0, 8, 0, 1, 2, 2, 4, 4, 6, 6, 7, 7, 7, 13]


def test_checkpoint_quantiser_keeps_mxfp4_values() -> None:
    """Values that are MXFP4 already come back exactly, whatever their block's scale."""
    magnitudes = torch.tensor(checkpoint.E2M1_MAGNITUDES)
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 8, (16, 64), generator=generator)
    codes[:, ::32] = 7  # each block holds a 6, so that its scale is fixed
    signs = torch.randint(0, 2, codes.shape, generator=generator) * 2 - 1
    exponents = torch.randint(-8, 8, (16, 2), generator=generator).repeat_interleave(32, dim=1)
    weight = torch.ldexp(magnitudes[codes] * signs, exponents)
    packed, scale = checkpoint.quantise_mxfp4(weight)
    assert torch.equal(aiter_standin.dequantise(packed, scale).float(), weight)


def test_activation_quantisation_rounds_the_scale_up() -> None:
    """amax 6 * 2^k takes the scale 2^k; the next float32 above it takes 2^(k+1). Both sources agree on random rows."""
    row = torch.zeros(2, 32)
    row[0, 0] = 6.0
    row[1, 0] = torch.nextafter(torch.tensor(6.0), torch.tensor(7.0))
    row[:, 1] = 0.3
    kept = aiter_standin.quantise_activation(row)
    assert kept[0, :2].tolist() == [6.0, 0.5]
    assert kept[1, :2].tolist() == [6.0, 0.0 if 0.3 / 2 < 0.25 else 1.0]
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)) * 3
    packed, codes = layout.quantize_mxfp4(x)
    assert torch.equal(aiter_standin.quantise_activation(x).double(), layout.dequantize_mxfp4(packed, codes))


@pytest.mark.parametrize("moe, hidden", [("torch", 256), ("amd", 1024)])
def test_fused_moe_is_the_weighted_sum_of_its_experts(moe: str, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 on the plain weights, the stand-in and AMD's code object; a swapped scale byte must be seen."""
    monkeypatch.setattr(aiter_standin, "_amd_moe", lambda: moe == "amd")
    aiter_moe.ran.clear()
    generator = torch.Generator().manual_seed(2)
    experts, width, rows, top_k = 4, 256, 3, 2
    plain: dict[str, list[torch.Tensor]] = {"w1": [], "w2": []}
    packed: dict[str, list[torch.Tensor]] = {"w1": [], "w2": []}
    scales: dict[str, list[torch.Tensor]] = {"w1": [], "w2": []}
    for name, n, k in (("w1", 2 * width, hidden), ("w2", hidden, width)):
        for _ in range(experts):
            codes, scale = checkpoint.quantise_mxfp4(torch.randn(n, k, generator=generator) * k**-0.5)
            plain[name].append(aiter_standin.dequantise(codes, scale).double())
            packed[name].append(codes)
            scales[name].append(scale)
    w1, w2 = (aiter_standin.shuffle_weight(torch.stack(packed[name])) for name in ("w1", "w2"))
    w1.is_shuffled = w2.is_shuffled = True
    s1, s2 = (
        aiter_standin.e8m0_shuffle(torch.cat(scales[name])).view(experts, -1, k // 32)
        for name, k in (("w1", hidden), ("w2", width))
    )
    x = torch.randn(rows, hidden, generator=generator).bfloat16()
    ids = torch.tensor([[0, 1], [3, 2], [1, 3]], dtype=torch.int32)
    weights = torch.rand(rows, top_k, generator=generator)

    def run(scale: torch.Tensor) -> torch.Tensor:
        aiter_standin.forget_weights()
        return aiter_standin.fused_moe(
            x,
            w1,
            w2,
            weights,
            ids,
            w1_scale=s1,
            w2_scale=scale,
            quant_type=aiter_standin.QuantType.per_1x32,
            activation=aiter_standin.ActivationType.Silu,
        ).double()

    wanted = torch.zeros(rows, hidden, dtype=torch.float64)
    quantised = aiter_standin.quantise_activation(x.float()).double()
    for row in range(rows):
        for pick in range(top_k):
            expert = int(ids[row, pick])
            gate, up = (plain["w1"][expert] @ quantised[row]).float().split(width)
            inter = aiter_standin.quantise_activation(gate / (1 + torch.exp(-gate)) * up).double()
            wanted[row] += weights[row, pick].double() * (plain["w2"][expert] @ inter)
    error = (run(s2) - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert error.max() < 3e-2, error  # a code of the intermediate may flip; AMD's adds in bf16
    wrong = s2.clone()
    wrong[1] += 2  # four times the weights of an expert that two rows picked
    assert ((run(wrong) - wanted).norm(dim=1) / wanted.norm(dim=1)).max() > 0.2
    assert sum(aiter_moe.ran.values()) == (2 if moe == "amd" else 0)


def test_packed_decode_is_the_gated_delta_rule() -> None:
    """Against float64; a negative index writes nothing and gives zeros."""
    generator = torch.Generator().manual_seed(4)
    rows, heads, key_heads, dim, slots = 3, 4, 2, 16, 6
    mixed = torch.randn(rows, 2 * key_heads * dim + heads * dim, generator=generator).bfloat16()
    a, b = (torch.randn(rows, heads, generator=generator).bfloat16() for _ in range(2))
    a_log, dt_bias = torch.randn(heads, generator=generator), torch.randn(heads, generator=generator).bfloat16()
    state = torch.randn(slots, heads, dim, dim, generator=generator)
    before = state.clone()
    index = torch.tensor([4, -1, 2], dtype=torch.int32)
    out = torch.full((rows, 1, heads, dim), 7.0, dtype=torch.bfloat16)
    gdn_standin.packed_decode(mixed, a, b, a_log, dt_bias, dim**-0.5, state, out, index, True)
    assert bool((out[1] == 0).all())
    assert torch.equal(state[[0, 1, 3, 5]], before[[0, 1, 3, 5]])
    for row, slot in ((0, 4), (2, 2)):
        q, k, v = mixed[row].double().split([key_heads * dim, key_heads * dim, heads * dim])
        for head in range(heads):
            qh, kh = q.view(key_heads, dim)[head // 2], k.view(key_heads, dim)[head // 2]
            qh, kh = qh / (qh.square().sum() + 1e-6).sqrt() * dim**-0.5, kh / (kh.square().sum() + 1e-6).sqrt()
            softplus = torch.log1p(torch.exp(a[row, head].double() + dt_bias[head].double()))
            decay = torch.exp(-torch.exp(a_log[head].double()) * softplus)
            beta = torch.sigmoid(b[row, head].double()).bfloat16().double()
            h = before[slot, head].double() * decay
            h = h + torch.outer((v.view(heads, dim)[head] - h @ kh) * beta, kh)
            torch.testing.assert_close(state[slot, head].double(), h, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(out[row, 0, head].double(), h @ qh, rtol=1e-2, atol=1e-3)


def test_prefill_and_decode_agree() -> None:
    """Two tokens by the prefill's functions leave the states that two decode steps leave."""
    generator = torch.Generator().manual_seed(5)
    heads, key_heads, dim, taps = 4, 2, 16, 4
    channels = 2 * key_heads * dim + heads * dim
    tokens = torch.randn(2, channels, generator=generator).bfloat16()
    weight = torch.randn(channels, taps, generator=generator).bfloat16()
    a, b = (torch.randn(2, heads, generator=generator).bfloat16() for _ in range(2))
    a_log, dt_bias = torch.randn(heads, generator=generator), torch.randn(heads, generator=generator).bfloat16()
    index = torch.tensor([1], dtype=torch.int32)
    conv_one, conv_two = (torch.zeros(3, channels, taps - 1, dtype=torch.bfloat16) for _ in range(2))
    ssm_one, ssm_two = (torch.zeros(3, heads, dim, dim) for _ in range(2))
    start = torch.tensor([0, 2], dtype=torch.int32)
    mixed = gdn_standin.causal_conv1d_fn(
        tokens.T, weight, None, conv_one, start, [2], index, torch.tensor([False]), "silu"
    ).T
    g, beta = gdn_standin.fused_gdn_gating(a_log, a, b, dt_bias)
    q, k, v = mixed.split([key_heads * dim, key_heads * dim, heads * dim], dim=-1)
    gdn_standin.chunk_gated_delta_rule(
        q.view(1, 2, key_heads, dim),
        k.view(1, 2, key_heads, dim),
        v.view(1, 2, heads, dim),
        g,
        beta,
        initial_state=ssm_one,
        initial_state_indices=index,
        cu_seqlens=start,
        use_qk_l2norm_in_kernel=True,
    )
    for token in range(2):
        step = gdn_standin.causal_conv1d_update(
            tokens[token : token + 1], conv_two, weight, None, "silu", conv_state_indices=index
        )
        assert torch.equal(step[0], mixed[token])
        out = torch.empty(1, 1, heads, dim, dtype=torch.bfloat16)
        gdn_standin.packed_decode(
            step, a[token : token + 1], b[token : token + 1], a_log, dt_bias, dim**-0.5, ssm_two, out, index, True
        )
    assert torch.equal(conv_one, conv_two)
    torch.testing.assert_close(ssm_one, ssm_two, rtol=2e-2, atol=2e-2)  # the prefill keeps q and k in bf16


def test_reordered_sums_differ_by_float32_rounding_only() -> None:
    generator = torch.Generator().manual_seed(6)
    x, weight = torch.randn(4, 1024, generator=generator), torch.randn(64, 1024, generator=generator)
    plain = sums.matmul(x, weight)
    with sums.reordered(1):
        one, again = sums.matmul(x, weight), sums.matmul(x, weight)
    with sums.reordered(2):
        two = sums.matmul(x, weight)
    assert torch.equal(one, again)
    assert not torch.equal(one, plain)
    assert not torch.equal(one, two)
    torch.testing.assert_close(one, plain, rtol=1e-4, atol=1e-4)
    assert torch.equal(sums.matmul(x, weight), plain)
