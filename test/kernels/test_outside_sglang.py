# SPDX-License-Identifier: Apache-2.0
"""SGLang's stock GDN and attention kernels on the simulator against their definitions in float64."""

from __future__ import annotations

import pytest
import torch
from helpers import noise
from helpers.stock_gates import front_failures, norm_failures
from helpers.stock_kernels import run_stock

HEAD, L2_EPS = 128, 1e-6
SHAPE_IDS = [shape.name.replace(" ", "-") for shape in noise.SHAPES]
DTYPES = [torch.float32, torch.bfloat16]
# What the HIP branch launches with: kernel, grid at 8 rows of the A95B shape, threads a workgroup.
A95B_LAUNCHES = [
    ("fused_qkvzba_split_reshape_cat_contiguous_kernel", (8, 2, 1), 256),
    ("_causal_conv1d_update_kernel", (8, 10, 1), 256),
    ("fused_recurrent_gated_delta_rule_packed_decode_kernel", (4, 128, 1), 64),
    ("_layer_norm_fwd_1pass_kernel", (128, 1, 1), 64),
]


def _front(shape: noise.Shape, rows: int, dtype: torch.dtype, seed: int) -> None:
    given = noise.inputs(shape, rows, dtype, seed)
    failures, counts, error = front_failures(given, run_stock("gdn_front", given))
    print(*counts, f"f32 state: {error:.2e} of its head's largest", sep="\n")
    assert not failures, failures


@pytest.mark.xdist_group("stock")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", noise.SHAPES, ids=SHAPE_IDS)
def test_stock_gdn_kernels(shape: noise.Shape, dtype: torch.dtype) -> None:
    """Split, conv update, packed delta rule and gated norm at the models' shapes, 8 rows of which one is a pad."""
    _front(shape, 8, dtype, seed=31)


@pytest.mark.full
@pytest.mark.xdist_group("stock")
@pytest.mark.parametrize("rows", range(1, 8))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", noise.SHAPES, ids=SHAPE_IDS)
def test_stock_gdn_kernels_at_all_widths(shape: noise.Shape, dtype: torch.dtype, rows: int) -> None:
    _front(shape, rows, dtype, seed=100 + rows)


@pytest.mark.xdist_group("stock")
@pytest.mark.parametrize("first_layer", [False, True], ids=["residual", "first"])
@pytest.mark.parametrize("shape", noise.SHAPES[:2], ids=["8192", "5120"])
def test_stock_gemma_norm(shape: noise.Shape, first_layer: bool) -> None:
    given = noise.norm_inputs(shape, 8, seed=34, first_layer=first_layer)
    failures, counts = norm_failures(given, run_stock("gemma_norm", given))
    print(*counts)
    assert not failures, failures
    wrong, _ = norm_failures({**given, "eps": 1e-2}, run_stock("gemma_norm", given))
    assert wrong, "negative control: another epsilon is not seen"


@pytest.mark.xdist_group("stock")
def test_launch_parameters_are_those_of_the_hip_branch() -> None:
    given = noise.inputs(noise.A95B, 8, torch.float32, seed=31)
    launches = run_stock("gdn_front", given)["launches"]
    assert [tuple(launch[:3]) for launch in launches] == A95B_LAUNCHES


PLANT_TENSORS = {
    "beta not rounded": {"core", "state"},
    "l2norm epsilon moved out of the root": {"core", "state"},
    "conv products unrounded": {"conv"},
    "softplus threshold dropped": {"core", "state"},
    "gate before norm": {"gated"},
}


@pytest.mark.xdist_group("stock")
@pytest.mark.parametrize("plant", PLANT_TENSORS)
def test_a_mistake_planted_in_sglang_is_seen(plant: str) -> None:
    given = noise.inputs(noise.A95B, 3, torch.float32, seed=35)
    failures, _, _ = front_failures(given, run_stock("gdn_front", given, plant=plant))
    print(failures)
    assert failures
    seen_in = PLANT_TENSORS[plant]
    assert {failure.split(":")[0] for failure in failures} <= seen_in, "the mistake shows elsewhere"


@pytest.mark.xdist_group("stock")
@pytest.mark.parametrize("shape", noise.SHAPES, ids=SHAPE_IDS)
def test_the_probe_finds_that_sglang_rounds_beta(shape: noise.Shape) -> None:
    """The probe that runs when a server starts, on SGLang's kernel and on a copy that does not round."""
    sizes = {"key_heads": shape.key_heads, "value_heads": shape.value_heads, "head": shape.head}
    found = run_stock("beta_probe", sizes)
    assert found["rounds"] is True and found["verify_rounds"] is False, "SGLang 0.5.23 rounds in its decode alone"
    assert run_stock("beta_probe", sizes, plant="beta not rounded")["rounds"] is False
    assert run_stock("beta_probe", sizes, plant="verify beta rounded")["verify_rounds"] is True


MORE_NOISE = 1.5  # times what is stated, in another draw of the inputs
RARE = ("conv", "given_x share")  # what most draws do not show: four terms, and one of 256 logits


def test_the_noise_floor_is_what_is_stated() -> None:
    """FLOORS, of which the thresholds are multiples, measured again with other inputs."""
    for shape in noise.SHAPES:
        for name, found in noise.measure(shape, rows=3, seed=7).items():
            floor = noise.FLOORS[name]
            print(f"{shape.name} {name}: {found:.2e}, stated {floor:.1e}")
            assert found <= MORE_NOISE * floor, f"{name}: more noise than stated"
            assert found >= floor / 2 or name in RARE, f"{name}: less noise than stated"


@pytest.mark.full
def test_the_noise_of_what_is_stored_is_what_is_stated() -> None:
    """The floors that the thresholds of the tests and of the spec's NUMERICS are multiples of."""
    stated = {**noise.FRONT_FLOORS, **noise.LAYER_FLOORS, **noise.TAIL_FLOORS}
    for name, found in {**noise.measure_stored(), **noise.measure_tail()}.items():
        print(f"{name}: {found:.2e}, stated {stated[name]:.1e}")
        assert found <= MORE_NOISE * stated[name], name
        assert found >= stated[name] / 2 or name in RARE, name


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


@pytest.mark.full
@pytest.mark.xdist_group("stock")
def test_stock_gdn_prefill_in_chunks() -> None:
    """Two sequences of unequal length through the chunked kernels (MFMA, triangular solve, scans) against token by
    token.
    """
    key_heads, value_heads, bounds, slots = 2, 4, (0, 60, 100), (2, 0)
    generator = torch.Generator().manual_seed(32)
    tokens = bounds[-1]
    q, k = (torch.randn(1, tokens, key_heads, HEAD, generator=generator).bfloat16() for _ in range(2))
    v = torch.randn(1, tokens, value_heads, HEAD, generator=generator).bfloat16()
    given = {
        "q": q,
        "k": k,
        "v": v,
        "g": -0.3 * torch.rand(1, tokens, value_heads, generator=generator),
        "beta": torch.rand(1, tokens, value_heads, generator=generator).bfloat16(),
        "state": 0.1 * torch.randn(3, value_heads, HEAD, HEAD, generator=generator),
        "state_indices": torch.tensor(slots, dtype=torch.int32),
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
        "scale": HEAD**-0.5,
    }
    out = run_stock("gdn_prefill", given)
    group = value_heads // key_heads
    qn, kn = (_normalised(x[0].double()).repeat_interleave(group, dim=1) for x in (q, k))
    want = torch.zeros(tokens, value_heads, HEAD, dtype=torch.float64)
    for first, end, slot in zip(bounds, bounds[1:], slots):
        state = given["state"][slot].double()
        for t in range(first, end):
            state = state * torch.exp(given["g"][0, t].double())[:, None, None]
            residual = v[0, t].double() - torch.einsum("hvk,hk->hv", state, kn[t])
            state = state + (residual * given["beta"][0, t].double()[:, None])[..., None] * kn[t][:, None, :]
            want[t] = torch.einsum("hvk,hk->hv", state, qn[t] * given["scale"])
        # The chunk's operands are rounded to bf16: 2^-9 relative each.
        assert (out["state"][slot].double() - state).norm() / state.norm() < 1e-2
    assert (out["out"][0].double() - want).norm() / want.norm() < 1e-2
    assert torch.equal(out["state"][1], given["state"][1]), "a slot that no sequence names was written"


@pytest.mark.xdist_group("stock")
def test_stock_decode_attention() -> None:
    """Grouped-query decode attention over a scattered cache, one to four splits a row."""
    heads, key_heads, head, slots, lengths = 8, 2, 256, 200, (70, 33, 5)
    generator = torch.Generator().manual_seed(33)
    q = torch.randn(len(lengths), heads, head, generator=generator).bfloat16()
    k, v = (torch.randn(slots, key_heads, head, generator=generator).bfloat16() for _ in range(2))
    ends = torch.tensor(lengths).cumsum(0)
    given = {
        "q": q,
        "k": k,
        "v": v,
        "indptr": torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
        "indices": torch.randperm(slots, generator=generator)[: sum(lengths)],
        "splits": torch.tensor([4, 2, 1], dtype=torch.int32),
        "max_splits": 4,
        "scale": head**-0.5,
    }
    out = run_stock("decode_attention", given)["out"]
    want = torch.zeros_like(q, dtype=torch.float64)
    for row, end in enumerate(ends.tolist()):
        mine = given["indices"][end - lengths[row] : end]
        for h in range(heads):
            scores = k[mine, h // (heads // key_heads)].double() @ q[row, h].double() * given["scale"]
            want[row, h] = torch.softmax(scores, 0) @ v[mine, h // (heads // key_heads)].double()
    # One rounding of the probabilities and one of the result to bf16.
    assert (out.double() - want).norm() / want.norm() < 4e-3
