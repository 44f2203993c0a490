# SPDX-License-Identifier: Apache-2.0
"""Many launches: bf16 states against f32 states and float64 over 300 steps; a soak of mixed widths on one buffer."""

from __future__ import annotations

import pytest
import torch
from helpers.k1_gates import same_bits
from helpers.k1_inputs import make_case, run
from helpers.k2_bench import Bench, random_inputs, random_weights
from helpers.long_run import Drift, drift

from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey

TP2 = Geometry.small(2)
full = pytest.mark.full


# ---- bf16 states


@pytest.mark.parametrize("width", [pytest.param(w, marks=() if w in (1, 3) else full) for w in range(1, 9)])
def test_bf16_state_is_f32_state_rounded_once(width: int) -> None:
    """K1 with bf16 states computes, bit for bit, what K1 with f32 states computes on the widened rows."""
    narrow = make_case(GdnKey(TP2, width, state_dtype="bfloat16", stop=False), seed=40 + width)
    wide = make_case(GdnKey(TP2, width, state_dtype="float32", stop=False), seed=40 + width)
    wide.ssm_state.copy_(narrow.ssm_state)
    before = narrow.ssm_state.clone()
    run(narrow)
    run(wide)
    for name in ("core", "residual_out", "conv_state"):
        assert same_bits(getattr(narrow, name), getattr(wide, name)), name
    slots = narrow.state_index.long()
    assert same_bits(narrow.ssm_state[slots], wide.ssm_state[slots].to(torch.bfloat16))
    assert not same_bits(narrow.ssm_state[slots], before[slots]), "the states were not written"
    assert not torch.equal(wide.ssm_state[slots], narrow.ssm_state[slots].float()), "nothing was rounded"


# ---- 300 steps against float64

STEPS = 300
THIRD = STEPS // 3
#: state dtype -> largest relative L2 error of a row over the whole run: four times what the states' own rounding
#: (bf16: half a unit, 2e-3) or one product on the other side of a bf16 step (f32: 1e-3 of a state) was seen to give
STATE_BOUND = {"float32": 5e-3, "bfloat16": 1.2e-2}
CORE_BOUND = {"float32": 1e-2, "bfloat16": 2.5e-2}
GROWTH = 1.5
"""The last third's mean error may be so many times the worse of the first two; an error that grows evenly gives 5/3."""
FLOOR = 1e-4
"""Below it a mean is a handful of products that fell to the other side of a bf16 step."""


def grows(errors: list[float]) -> bool:
    """Whether the error of the last third is more than `GROWTH` times that of the steps before it."""
    first, second, third = (sum(errors[i * THIRD : (i + 1) * THIRD]) / THIRD for i in range(3))
    return third > GROWTH * max(first, second, FLOOR)


def broken(found: Drift, dtype: str) -> list[str]:
    """Bounds that the run left."""
    wrong = [name for name, errors in (("state", found.state), ("core", found.core)) if grows(errors)]
    if not max(found.state) <= STATE_BOUND[dtype]:
        wrong.append(f"state error {max(found.state):.3g}")
    if not max(found.core) <= CORE_BOUND[dtype]:
        wrong.append(f"core error {max(found.core):.3g}")
    return wrong


@pytest.mark.parametrize("width", [1, pytest.param(4, marks=full)])
@pytest.mark.parametrize("dtype", STATE_BOUND)
def test_the_error_does_not_grow_with_the_steps(dtype: str, width: int) -> None:
    found = drift(GdnKey(TP2, width, state_dtype=dtype, stop=False), STEPS)
    assert len(found.state) == STEPS
    assert broken(found, dtype) == []


@pytest.mark.parametrize("dtype", STATE_BOUND)
def test_a_drift_is_seen(dtype: str) -> None:
    """Controls: an error that grows with the steps, and states that lose a little at each step."""
    size = STATE_BOUND[dtype] / STEPS
    growing = [size * step for step in range(STEPS)]
    assert grows(growing) and "state" in broken(Drift(growing, growing), dtype)
    leaking = drift(GdnKey(TP2, 1, state_dtype=dtype, stop=False), 30, leak=0.02)
    assert max(leaking.state) > STATE_BOUND[dtype]


# ---- soak

WIDTHS = (8, 1, 3, 8, 2, 5)
INPUTS = 2  # different ones a width
SEEDS = 4
LAUNCHES = 250  # on each of SEEDS peer buffers: 1,000 in all
SHORT = 12  # in `make test`
DELAY_TICKS = 300


@pytest.fixture(scope="module")
def fresh() -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    """(width, number of its inputs) -> what a machine of its own writes, in consistent memory."""
    weights = random_weights(TP2, 60)
    results = {}
    for width in sorted(set(WIDTHS)):
        for number in range(INPUTS):
            result = Bench(TP2, weights).run(random_inputs(TP2, width, 100 * width + number))
            results[width, number] = (result.out[0], result.residual[0])
    return results


@pytest.mark.parametrize(
    ("seed", "launches"), [(SEEDS, SHORT), *(pytest.param(seed, LAUNCHES, marks=full) for seed in range(SEEDS))]
)
def test_soak_of_mixed_widths(fresh: dict, seed: int, launches: int) -> None:
    """Adversarial memory, starved waves, and in turn one rank or the other whose stores arrive late: every output is
    bit for bit a fresh run's, on every rank, whatever the widths before it left in the peer buffer."""
    from sgl_amd_mono.sim import DelayStores

    bench = Bench(TP2, random_weights(TP2, 60), memory="adversarial", seed=seed)
    for number in range(launches):
        width, which = WIDTHS[number % len(WIDTHS)], (number // len(WIDTHS)) % INPUTS
        if number % 3:
            bench.machine.inject(DelayStores(rank=number % 3 - 1, ticks=DELAY_TICKS))
        result = bench.run(random_inputs(TP2, width, 100 * width + which), epoch=1 + number)
        bench.machine.clear_faults()
        assert not any(fault.failed for fault in result.faults), f"launch {number}"
        for rank in range(TP2.tp):
            for found, wanted in zip((result.out[rank], result.residual[rank]), fresh[width, which], strict=True):
                assert torch.equal(found, wanted), f"launch {number}, width {width}, rank {rank}"


def test_inputs_of_the_soak_differ(fresh: dict) -> None:
    """Control: a launch that left the outputs of an earlier one would be seen."""
    assert not torch.equal(fresh[8, 0][0], fresh[8, 1][0])
    assert not torch.equal(fresh[1, 0][0], fresh[2, 0][0][:1])
