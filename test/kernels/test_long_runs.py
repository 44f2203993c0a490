# SPDX-License-Identifier: Apache-2.0
"""Many launches: bf16 states against f32 states and float64 over 300 steps; a soak of mixed widths on one buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.k1_gates import same_bits
from helpers.k1_inputs import make_case, run
from helpers.k2_bench import Bench, Inputs, RankWeights, Result, random_inputs, random_weights
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
"""Of a row: below it a mean is a handful of products that fell to the other side of a bf16 step (1e-3 of a state each,
forgotten within some ten steps). The worst of several rows sees the falls of them all."""


def grows(errors: list[float], rows: int = 1) -> bool:
    """Whether the error (of the worst of `rows` rows) of the last third is more than `GROWTH` times that before it."""
    first, second, third = (sum(errors[i * THIRD : (i + 1) * THIRD]) / THIRD for i in range(3))
    return third > GROWTH * max(first, second, rows * FLOOR)


def broken(found: Drift, dtype: str, rows: int = 1) -> list[str]:
    """Bounds that the run left."""
    wrong = [name for name, errors in (("state", found.state), ("core", found.core)) if grows(errors, rows)]
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
    assert broken(found, dtype, width) == []


@pytest.mark.parametrize("dtype", STATE_BOUND)
def test_a_drift_is_seen(dtype: str) -> None:
    """Controls: an error that grows with the steps, and states that lose a little at each step."""
    size = STATE_BOUND[dtype] / STEPS
    growing = [size * step for step in range(STEPS)]
    assert grows(growing, 4) and "state" in broken(Drift(growing, growing), dtype, 4)
    leaking = drift(GdnKey(TP2, 1, state_dtype=dtype, stop=False), 30, leak=0.02)
    assert max(leaking.state) > STATE_BOUND[dtype]


# ---- soak

WIDTHS = (8, 1, 3, 8, 2, 5)
INPUTS = 2  # different ones a width
LAUNCHES = 1000  # of the soak, on one peer buffer
SHORT = 12  # in `make test`
DELAY_TICKS = 300
FIRST_EPOCH = (1 << 22) - 500
"""A tag holds the epoch modulo 2^22: the soak's own half comes after the wrap."""

Key = tuple[int, int]  # a width, and which of its inputs


@pytest.fixture(scope="module")
def weights() -> list[RankWeights]:
    return random_weights(TP2, 60)


@pytest.fixture(scope="module")
def inputs() -> dict[Key, Inputs]:
    return {(w, n): random_inputs(TP2, w, 100 * w + n) for w in sorted(set(WIDTHS)) for n in range(INPUTS)}


@pytest.fixture(scope="module")
def fresh(weights: list[RankWeights], inputs: dict[Key, Inputs]) -> dict[Key, tuple[torch.Tensor, torch.Tensor]]:
    """What a machine of its own writes for each of the inputs, in consistent memory: (out, residual)."""
    results = {}
    for key, given in inputs.items():
        result = Bench(TP2, weights).run(given)
        results[key] = (result.out[0], result.residual[0])
    return results


def disturbance(number: int) -> Any:
    """In turn: rank 0's stores arrive late, rank 1's do, a rank begins late (rank 0 and 1 in turn)."""
    from sgl_amd_mono.sim import DelayStores, Starve

    return Starve(rank=number // 3 % TP2.tp) if number % 3 == 2 else DelayStores(rank=number % 3, ticks=DELAY_TICKS)


def soak(bench: Bench, launches: int, inputs: dict[Key, Inputs], fresh: dict) -> None:
    """Launches of mixed widths on `bench`; AssertionError at the first output that is not a fresh run's."""
    for number in range(launches):
        key = WIDTHS[number % len(WIDTHS)], number // len(WIDTHS) % INPUTS
        bench.machine.inject(disturbance(number))
        result = bench.run(inputs[key], epoch=FIRST_EPOCH + number)
        bench.machine.clear_faults()
        where = f"launch {number}, width {key[0]}"
        faults = [str(fault) for fault in result.faults if fault.failed]
        assert not faults, f"{where}: {faults}"
        for rank in range(TP2.tp):
            for found, wanted in zip((result.out[rank], result.residual[rank]), fresh[key], strict=True):
                assert torch.equal(found, wanted), f"{where}, rank {rank}"


@pytest.mark.parametrize("launches", [SHORT, pytest.param(LAUNCHES, marks=full)])
def test_soak_of_mixed_widths(weights: list, inputs: dict, fresh: dict, launches: int) -> None:
    """One peer buffer, adversarial memory, starved waves and ranks, late stores: every output is, on every rank, bit
    for bit a fresh run's, whatever the launches before it left in the buffer."""
    soak(Bench(TP2, weights, memory="adversarial", seed=5), launches, inputs, fresh)


def test_inputs_of_the_soak_differ(fresh: dict) -> None:
    """Control: a launch that left the outputs of an earlier one would be seen."""
    assert not torch.equal(fresh[8, 0][0], fresh[8, 1][0])
    assert not torch.equal(fresh[1, 0][0], fresh[2, 0][0][:1])


class OneEpoch(Bench):
    """A machine whose launches forget to move on to the next epoch."""

    def run(self, given: Inputs, *, epoch: int = 1, **options: Any) -> Result:
        return super().run(given, epoch=FIRST_EPOCH, **options)


def test_a_soak_whose_tags_repeat_is_seen(weights: list, inputs: dict, fresh: dict) -> None:
    """Control: with one epoch for all, a launch takes what the one before it left in the peer buffer for its own."""
    with pytest.raises(AssertionError, match=r"launch [1-9]"):
        soak(OneEpoch(TP2, weights, memory="adversarial", seed=5), SHORT, inputs, fresh)
