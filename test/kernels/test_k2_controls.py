# SPDX-License-Identifier: Apache-2.0
"""Negative controls of K2's gates: a planted mistake must turn a gate red, and the unchanged kernel keeps it green."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from helpers import k2_bench as kb

from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry

GEOMETRY = Geometry.small(2)
WIDTH = 2
DEADLINE = 100_000  # 1 ms of the virtual clock
STEPS = 4
SEEDS = range(20)
LAUNCHES = 12  # of each seed, at most: a wrong one ends it
SEEN_AT_LEAST = 19
full = pytest.mark.full


@cache
def weights(form: str = "plain") -> list[kb.RankWeights]:
    return kb.random_weights(GEOMETRY, 41, variant=kb.VARIANTS[form])


@cache
def steps() -> list[kb.Inputs]:
    """Different rows from launch to launch: a stale row is never the right one."""
    rows = kb.random_inputs(GEOMETRY, STEPS * WIDTH, 42)
    return [rows.rows(range(i * WIDTH, (i + 1) * WIDTH)) for i in range(STEPS)]


def inputs() -> kb.Inputs:
    return steps()[0]


@cache
def good(step: int = 0, form: str = "plain") -> kb.Result:
    return kb.Bench(GEOMETRY, weights(form)).run(steps()[step])


def run(program=None, *, seed: int = 0, launches: int = 1, form: str = "plain") -> bool:
    """Whether `launches` launches are right: no simulator fault, no lost wait, the bits of the good launch."""
    from sgl_amd_mono.sim import SimFault

    bench = kb.Bench(GEOMETRY, weights(form), memory="adversarial", seed=seed)
    try:
        for i in range(launches):
            step = i % STEPS
            result = bench.run(steps()[step], program=program, deadline=DEADLINE, epoch=1 + i)
            if any(f.failed for f in result.faults):
                return False
            if not all(torch.equal(o, good(step, form).out[0]) for o in result.out):
                return False
    except SimFault:
        return False
    return True


def lines(form: str = "plain") -> list[str]:
    return kb.artifact(GEOMETRY, WIDTH, False, kb.VARIANTS[form]).isa.splitlines()


def line_of(pattern: str, after: int = 0, form: str = "plain") -> int:
    """Number (from 1) of the first ISA line past `after` that matches."""
    for number, text in enumerate(lines(form)[after:], after + 1):
        if re.search(pattern, text):
            return number
    raise AssertionError(f"no line matches {pattern} after line {after}")


def z_store() -> int:
    """Line of the last agent-scope store of a word before the wait that follows the first: REDUCED."""
    pattern = r"global_store_dword (?!.*sc0).* sc1"
    first = line_of(pattern)
    wait = line_of(r"s_waitcnt vmcnt\(0\)", first)
    return max(n for n in range(first, wait) if re.search(pattern, lines()[n - 1]))


def without_store_wait():
    """The wait for the row's stores before their flag is dropped."""
    return kb.code(GEOMETRY, WIDTH).delete(line_of(r"s_waitcnt vmcnt\(0\)", z_store()))


def without_load_wait(form: str = "plain"):
    """The waits between the loads of w_o and their first MFMA are dropped."""
    first = line_of(r"v_mfma_(f32_16x16x32_bf16|scale_f32_16x16x128)", form=form)
    program = kb.code(GEOMETRY, WIDTH, False, kb.VARIANTS[form])
    start = line_of(r"global_load_dwordx4|buffer_load_dwordx4", form=form)
    for number in range(first, start, -1):
        if re.search(r"s_waitcnt vmcnt", lines(form)[number - 1]):
            program = program.delete(number)
    return program


def with_plain_row():
    """the row stored without a scope."""
    text = lines()[z_store() - 1].strip()
    return kb.code(GEOMETRY, WIDTH).replace(re.escape(text), text.replace(" sc1", ""))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=full)])
def test_the_unchanged_kernel_is_right(seed: int) -> None:
    assert run(seed=seed, launches=LAUNCHES)


@full
@pytest.mark.parametrize("mistake", [without_store_wait, without_load_wait, with_plain_row])
def test_a_dropped_wait_is_seen(mistake) -> None:
    program = mistake()
    seen = sum(not run(program, seed=seed, launches=LAUNCHES) for seed in SEEDS)
    assert seen >= SEEN_AT_LEAST, f"{mistake.__name__}: seen in {seen} of {len(SEEDS)} seeds"


@pytest.mark.parametrize("mistake", [without_store_wait, without_load_wait, with_plain_row])
def test_a_dropped_wait_is_seen_in_one_seed(mistake) -> None:
    assert not run(mistake(), seed=1, launches=LAUNCHES)


def test_a_dropped_wait_of_a_variant_is_seen() -> None:
    """The quantised core, or the MXFP4 w_o, is taken before it is there."""
    assert run(seed=1, form="mxfp4")
    assert not run(without_load_wait("mxfp4"), seed=1, form="mxfp4")


def residual_gate(result: kb.Result, want: torch.Tensor) -> bool:
    """The gate of test_k2.py on residual_out."""
    steps = kb.ulps_at(result.residual[0], want, 0.0)
    return float(steps.max()) <= 1 and float((steps > 0).double().mean()) <= 0.01


def test_a_shifted_projection_scale_is_seen() -> None:
    """w_o's codes of one row, as rank 1's kernel reads them, stand one block further."""
    want = kb.definition(GEOMETRY, weights("mxfp4"), inputs()).residual
    assert residual_gate(good(form="mxfp4"), want)
    wrong = [kb.RankWeights(dict(w.tensors)) for w in weights("mxfp4")]
    codes = wrong[1].tensors["w_o_scale"].clone()
    codes[7] = codes[7].roll(1)
    assert not torch.equal(codes, wrong[1].tensors["w_o_scale"])
    wrong[1].tensors["w_o_scale"] = codes
    assert not residual_gate(kb.Bench(GEOMETRY, wrong).run(inputs()), want)


def test_the_other_scale_rounding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core quantised as the experts' rows are (RCEIL) in the definition."""
    monkeypatch.setattr(kb.layout, "scale_code_even", kb.layout.scale_code)
    want = kb.definition(GEOMETRY, weights("mxfp4"), inputs()).residual
    assert not residual_gate(good(form="mxfp4"), want)


@pytest.mark.parametrize("mistake", ["no weight", "another expert", "a routed expert's weight"])
def test_a_wrong_shared_pick_is_seen(mistake: str) -> None:
    """The fused shared expert: its weight dropped, another expert in its place, the weight of another pick."""
    result, named = good(form="fused"), weights("fused")[0].naive()
    ids, route_weights = kb.route_given_logits(result, inputs().row_index > 0)
    packed, codes = result.inter(0)
    right = kb.naive.routed_down(packed, codes, ids, route_weights, named.experts, GEOMETRY.hidden)
    if mistake == "no weight":
        route_weights[:, -1] = 0.0
    elif mistake == "another expert":
        ids[:, -1] = GEOMETRY.experts - 1
    else:
        route_weights[:, -1] = route_weights[:, 0]
    wrong = kb.naive.routed_down(packed, codes, ids, route_weights, named.experts, GEOMETRY.hidden)
    assert float((kb.ulps(right, wrong) > 2).double().mean()) > 0.5
    assert worst_step(result) <= 2


def test_another_expert_in_the_shared_slot_is_seen() -> None:
    """The kernel reads expert E - 1 where the definition has the shared one."""
    wrong = [kb.RankWeights(dict(w.tensors)) for w in weights("fused")]
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        moved = wrong[1].tensors[name].clone()
        moved[GEOMETRY.experts] = moved[GEOMETRY.experts - 1]
        wrong[1].tensors[name] = moved
    result = kb.Bench(GEOMETRY, wrong).run(inputs())
    result.bench.weights = weights("fused")
    assert worst_step(result) > 2


def test_a_wrong_scale_byte_is_seen() -> None:
    """One code of a picked expert's w2, as the kernel reads it, differs from what the definition holds."""
    ids, _ = good().route()
    wrong = [kb.RankWeights(dict(w.tensors)) for w in weights()]
    codes = wrong[1].tensors["w2_scale"].clone()
    codes[int(ids[0, 0]), 5, 2] += 3
    wrong[1].tensors["w2_scale"] = codes
    result = kb.Bench(GEOMETRY, wrong).run(inputs())
    result.bench.weights = weights()
    assert worst_step(result) > 2
    assert worst_step(good()) <= 2


def worst_step(result: kb.Result) -> float:
    want, size = kb.out_given_stages(result, inputs())
    return float(kb.ulps_at(result.out[0], want, size).max())


def test_swapped_experts_are_seen() -> None:
    """Route weights of two picks exchanged in the definition: the gate on `out` fails."""
    result = good()
    ids, route_weights = result.route()
    exchanged = route_weights.clone()
    exchanged[:, [0, 1]] = route_weights[:, [1, 0]]
    named = weights()[0].naive()
    packed, codes = result.inter(0)
    right = kb.naive.routed_down(packed, codes, ids, route_weights, named.experts, GEOMETRY.hidden)
    wrong = kb.naive.routed_down(packed, codes, ids, exchanged, named.experts, GEOMETRY.hidden)
    assert float((kb.ulps(right, wrong) > 2).double().mean()) > 0.5


def test_a_wrong_tag_is_seen() -> None:
    """One rank launches another layer's slot: its tags match nobody's, every rank leaves with a record."""
    bench = kb.Bench(GEOMETRY, weights())
    result = bench.run(inputs(), slots=[kb.SLOT, kb.SLOT + 1], deadline=DEADLINE)
    assert all(f.failed for f in result.faults)
    assert {r.launch for f in result.faults for r in f.records} <= {kb.SLOT, kb.SLOT + 1}
