# SPDX-License-Identifier: Apache-2.0
"""K1 under the adversarial memory model, and what that model must catch."""

from __future__ import annotations

import dataclasses
import re

import pytest
from helpers.k1_gates import Before, failures, same_bits
from helpers.k1_inputs import K1Case, built, make_case, run

from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey

full = pytest.mark.full
TP1, TP2 = Geometry.small(1), Geometry.small(2)
SEEDS = 24  # three a width, of which `make test` runs three
CONTROL_SEEDS, CONTROL_SEEN = 20, 19
CONTROL_DEADLINE = 200_000  # 2 ms of the virtual clock, ten times what a launch takes under this model


def copy(case: K1Case) -> K1Case:
    """The same inputs, fresh outputs and pools."""
    return dataclasses.replace(case, conv_state=case.conv_state.clone(), ssm_state=case.ssm_state.clone())


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s in (0, 3, 9) else full) for s in range(SEEDS)])
def test_gates_hold_and_bits_do_not_depend_on_the_schedule(seed: int) -> None:
    width = seed % 8 + 1
    geometry = TP2 if seed >= 16 else TP1
    key = GdnKey(
        geometry,
        width,
        first_layer=seed % 5 == 4,
        state_dtype="bfloat16" if seed % 3 == 2 else "float32",
        stop=False,
    )
    case = make_case(key, seed=40 + seed, pads=(width - 1,) if seed % 4 == 1 else ())
    plain = copy(case)
    before = Before.of(case)
    run(case, memory="adversarial", seed=seed)
    assert not failures(case, before)
    assert not case.fault.failed
    run(plain)
    for name in ("core", "residual_out", "conv_state", "ssm_state"):
        assert same_bits(getattr(case, name), getattr(plain, name)), f"{name} depends on the schedule"


def seen(case: K1Case, code: object, seed: int) -> bool:
    """Whether a run of broken code is caught: a simulator fault, a wait out of time, or a gate."""
    from sgl_amd_mono.sim import SimFault

    case = copy(case)
    before = Before.of(case)
    try:
        run(case, memory="adversarial", seed=seed, code=code, deadline_ticks=CONTROL_DEADLINE)
    except SimFault:
        return True
    return case.fault.failed or bool(failures(case, before))


def without_wait(code: object, counter: str, place: str, nth: int, behind: bool) -> object:
    """`code` without the s_waitcnt on `counter` next to the nth instruction that matches `place`: the first one behind
    it, or the last one in front of it."""
    texts = [(i.line, i.text) for i in code.instructions]
    at = [n for n, (_, text) in enumerate(texts) if re.match(place, text)][nth]
    candidates = texts[at:] if behind else reversed(texts[:at])
    return code.delete(next(line for line, text in candidates if text.startswith("s_waitcnt") and counter in text))


def without_waits_of_poll(code: object, batch: int) -> object:
    """`code` without the waits of the first poll loop's batch: one pair a wait."""
    texts = [(i.line, i.text) for i in code.instructions]
    last = [n for n, (_, text) in enumerate(texts) if re.match(POLLED, text)][batch - 1]
    for line in [line for line, text in texts[last:] if text.startswith("s_waitcnt vmcnt")][:batch]:
        code = code.delete(line)
    return code


POLLED = r"global_load_dwordx2 (?!.*sc0).* sc1$"

# At TP 2 and one row half of the waves have no unit, and nothing in flight behind their last weights.
BROKEN = {
    "products stored without device scope": (
        TP1,
        lambda code: code.replace(r"^(global_store_dwordx2 (?!.*sc0).*) sc1$", r"\1", nth=None),
    ),
    "pairs polled without device scope": (
        TP1,
        lambda code: code.replace(r"^(global_load_dwordx2 (?!.*sc0).*) sc1$", r"\1", nth=None),
    ),
    "no wait for z": (
        TP1,
        lambda code: without_wait(code, "vmcnt", r"buffer_load_dwordx4 .* nt$", 0, behind=True),
    ),
    "no wait for the last weights": (TP2, lambda code: without_wait(code, "vmcnt", "v_mfma", -1, behind=False)),
    "no wait for x in LDS": (TP1, lambda code: without_wait(code, "lgkmcnt", "v_mfma", 0, behind=False)),
    "no wait for the polled pairs": (TP1, lambda code: without_waits_of_poll(code, 4)),
}


@pytest.mark.parametrize("seeds", [pytest.param(2, id="2"), pytest.param(CONTROL_SEEDS, marks=full, id="20")])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_code_is_caught(name: str, seeds: int) -> None:
    """Negative controls: in at least 19 of 20 schedules (in both of the first two)."""
    from sgl_amd_mono.sim import CodeObject

    geometry, breaking = BROKEN[name]
    case = make_case(GdnKey(geometry, 1, stop=False), seed=71)
    code = breaking(CodeObject.parse(built(case.key).isa))
    caught = sum(seen(case, code, seed) for seed in range(seeds))
    assert caught >= seeds - (CONTROL_SEEDS - CONTROL_SEEN if seeds == CONTROL_SEEDS else 0)


def test_whole_code_is_not_caught() -> None:
    """The control of the controls."""
    from sgl_amd_mono.sim import CodeObject

    case = make_case(GdnKey(TP1, 1, stop=False), seed=71)
    code = CodeObject.parse(built(case.key).isa)
    assert not any(seen(case, code, seed) for seed in range(2))
