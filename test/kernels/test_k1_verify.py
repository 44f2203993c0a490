# SPDX-License-Identifier: Apache-2.0
"""K1 in verify steps: the draft tokens of a request one after another, a state kept for each of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.k1_gates import Before, checked, failures, nothing_written, same_bits, untouched
from helpers.k1_inputs import JUNK, K1Case, make_case, run

from sgl_amd_mono.common.build import LDS_MAX, VGPR_MAX, build, compile_artifact
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import gdn
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey

full = pytest.mark.full
TP1, TP2, TRUE = Geometry.small(1), Geometry.small(2), Geometry.a95b()
TOKENS = 4
STALL_DEADLINE = 200_000
ADVERSARIAL_SEEDS = 24


def verify_key(width: int, tokens: int = TOKENS, geometry: Geometry = TP1, **more: object) -> GdnKey:
    """SGLang's verify kernel does not round beta."""
    return GdnKey(geometry, width, draft_tokens=tokens, round_beta=False, stop=False, **more)


# (TP, width, tokens, state dtype, first layer, pad requests, formats) and whether `make test` runs it
ROWS = [
    (1, 4, 4, "float32", False, (), "bfloat16", True),
    (1, 8, 4, "float32", False, (), "bfloat16", True),
    (1, 8, 4, "bfloat16", True, (1,), "bfloat16", True),
    (2, 4, 4, "float32", False, (), "bfloat16", False),
    (2, 8, 4, "bfloat16", False, (), "bfloat16", False),
    (2, 8, 4, "float32", True, (0,), "bfloat16", False),
    (1, 4, 4, "float32", False, (), "mxfp4", True),
    (1, 8, 4, "bfloat16", False, (), "mxfp4", False),
    (1, 6, 2, "float32", False, (1,), "bfloat16", False),
    (1, 8, 2, "float32", False, (), "bfloat16", False),
    (1, 6, 3, "bfloat16", False, (), "bfloat16", False),
    (1, 8, 8, "float32", False, (), "bfloat16", False),
    (1, 5, 5, "float32", False, (), "bfloat16", True),  # more tokens than one batch of loads awaits
    (1, 3, 1, "float32", False, (), "bfloat16", False),
]


@pytest.mark.parametrize(
    ("tp", "width", "tokens", "dtype", "first", "pads", "form"),
    [pytest.param(*row[:-1], marks=() if row[-1] else full) for row in ROWS],
)
def test_against_the_definition(
    tp: int, width: int, tokens: int, dtype: str, first: bool, pads: tuple[int, ...], form: str
) -> None:
    """Core, residual, and the state and window after every token; two hops; the pools are mapped read-only."""
    more = {"state_dtype": dtype, "first_layer": first, "qkvz_format": form, "ba_format": form}
    key = verify_key(width, tokens, Geometry.small(tp), **more)
    checked(make_case(key, seed=200 + width + tokens, pads=pads, spread_strides=width == 8))


def decode_case(case: K1Case, token: int, conv: torch.Tensor, ssm: torch.Tensor) -> K1Case:
    """One token of every request as a decode step on pools of its own."""
    rows = range(token, case.key.width, case.key.tokens)
    return K1Case(
        dataclasses.replace(case.key, width=case.key.requests, draft_tokens=0),
        case.weights,
        case.hidden[rows].clone(),
        None if case.residual is None else case.residual[rows].clone(),
        case.state_index,
        conv,
        ssm,
    )


def commit(case: K1Case, accepted: list[int]) -> None:
    """What SGLang's `update_mamba_state_after_mtp_verify` does: the state of each request's last accepted token."""
    for request, token in enumerate(accepted):
        slot, place = int(case.state_index[request]), int(case.draft_index[request])
        case.conv_state[slot] = case.draft_conv[place, token]
        case.ssm_state[slot] = case.draft_ssm[place, token]


@pytest.mark.parametrize("width", [4, pytest.param(8, marks=full)])
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=full)])
def test_tokens_are_decode_steps(tp: int, width: int) -> None:
    """Token t of a verify step, bit for bit what t + 1 decode steps leave: core, residual, window, f32 state."""
    case = make_case(verify_key(width, geometry=Geometry.small(tp)), seed=210)
    conv, ssm = case.conv_state.clone(), case.ssm_state.clone()
    before = Before.of(case)
    run(case)
    assert not untouched(case, before)
    for token in range(TOKENS):
        step = decode_case(case, token, conv, ssm)
        run(step)
        rows = list(range(token, width, TOKENS))
        slots = case.state_index.long()
        kept_conv, kept_ssm = case.states_after(rows)
        assert same_bits(case.core[rows], step.core) and same_bits(case.residual_out[rows], step.residual_out)
        assert same_bits(kept_conv, conv[slots]) and same_bits(kept_ssm, ssm[slots])


@pytest.mark.parametrize("accepted", [[0, 0], [1, 3], [3, 0], [2, 2]], ids=str)
def test_a_rejected_token_rolls_back(accepted: list[int]) -> None:
    """All drafts rejected, some, none: the next step goes on from the last accepted token, as if no other had been."""
    case = make_case(verify_key(8), seed=211)
    conv, ssm = case.conv_state.clone(), case.ssm_state.clone()
    run(case)
    commit(case, accepted)
    for token in range(max(accepted) + 1):
        step = decode_case(case, token, conv, ssm)
        step.state_index = torch.tensor(
            [int(slot) if token <= last else 0 for slot, last in zip(case.state_index, accepted, strict=True)],
            dtype=torch.int32,
        )
        run(step)
    assert same_bits(case.ssm_state, ssm) and same_bits(case.conv_state, conv)
    again = dataclasses.replace(case, hidden=case.hidden.flip(0).contiguous())
    checked(again)


def test_the_state_is_carried_in_f32() -> None:
    """With a bf16 pool the first token's state is one decode step's, the later ones' are not rounded in between."""
    case = make_case(verify_key(4, state_dtype="bfloat16"), seed=212)
    wide = dataclasses.replace(
        case,
        key=dataclasses.replace(case.key, state_dtype="float32"),
        ssm_state=case.ssm_state.float(),
        conv_state=case.conv_state.clone(),
        draft_ssm=torch.full(case.draft_ssm.shape, JUNK),
        draft_conv=case.draft_conv.clone(),
    )
    run(case)
    run(wide)
    place = int(case.draft_index[0])
    assert same_bits(case.core, wide.core)
    assert same_bits(case.draft_ssm[place], wide.draft_ssm[place].to(torch.bfloat16))


def test_a_request_does_not_depend_on_the_others() -> None:
    """One request alone, and beside one of NaN and huge values: the same bits."""
    two = make_case(verify_key(8), seed=213)
    two.hidden[:3], two.hidden[3] = float("nan"), 1e30
    one = dataclasses.replace(
        two,
        key=verify_key(4),
        hidden=two.hidden[4:].clone(),
        residual=two.residual[4:].clone(),
        state_index=two.state_index[1:].clone(),
        draft_index=two.draft_index[1:].clone(),
        draft_conv=two.draft_conv.clone(),
        draft_ssm=two.draft_ssm.clone(),
    )
    run(two)
    run(one)
    place = int(one.draft_index[0])
    assert same_bits(one.core, two.core[4:])
    assert same_bits(one.draft_ssm[place], two.draft_ssm[place])
    assert same_bits(one.draft_conv[place], two.draft_conv[place])


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s in (0, 5) else full) for s in range(ADVERSARIAL_SEEDS)])
def test_bits_do_not_depend_on_the_schedule(seed: int) -> None:
    """The adversarial memory model: the gates hold, and the bits are those of the consistent model."""
    tokens, geometry = (4, 2, 8)[seed % 3], TP2 if seed % 2 else TP1
    width = tokens if seed % 4 < 2 else 8
    dtype = "bfloat16" if seed % 5 == 4 else "float32"
    case = make_case(verify_key(width, tokens, geometry, state_dtype=dtype), seed=240 + seed)
    plain = dataclasses.replace(case, draft_conv=case.draft_conv.clone(), draft_ssm=case.draft_ssm.clone())
    checked(case, memory="adversarial", seed=seed)
    run(plain)
    for name in ("core", "residual_out", "draft_conv", "draft_ssm"):
        assert same_bits(getattr(case, name), getattr(plain, name)), f"{name} depends on the schedule"


@pytest.mark.parametrize(
    ("at", "regions"),
    [
        ({"workgroup": 3, "at": "start"}, ("PROJ", "BA")),
        ({"workgroup": 1, "at": ("store", "BA")}, ("BA",)),
        ({"workgroup": 20, "wave": 2, "at": ("store", "ONRM")}, ("ONRM",)),
    ],
    ids=["nothing-published", "b-rows", "chunk-sums"],
)
@pytest.mark.parametrize("width", [4, pytest.param(8, marks=full)])
def test_a_stall_ends_the_launch(at: dict, regions: tuple[str, ...], width: int) -> None:
    """The wait is the one recorded, the states are as they were, and no row behind the stalled unit has a core."""
    from sgl_amd_mono.sim import Stall

    case = make_case(verify_key(width), seed=214)
    before = Before.of(case)
    report = run(case, faults=[Stall(rank=0, **at)], deadline_ticks=STALL_DEADLINE)
    assert report.stalled and case.fault.error_word == 1
    (record,) = case.fault.records
    assert gdn.REGION_NAMES[record.region] in regions
    assert not untouched(case, before)
    assert bool((case.core == JUNK).any())
    assert STALL_DEADLINE <= report.clock_end - report.clock_start < 3 * STALL_DEADLINE


def test_warm_up_writes_nothing() -> None:
    case = make_case(verify_key(4), seed=215)
    before = Before.of(case)
    run(case, mode=0)
    assert not nothing_written(case, before) and bool((case.draft_ssm == JUNK).all())


def forgets_the_state(case: K1Case) -> dict[str, object]:
    """Each token from the request's own state."""
    first: list = [None, None]  # of the kernel that is traced

    def rule(c: object, state: list, *args: object) -> tuple:
        first[:] = first if first[0] is c else [c, state]
        return RULE(c, first[1], *args)

    return {"delta_rule": rule}


def forgets_the_window(case: K1Case) -> dict[str, object]:
    """Each token convolved with the request's own window."""
    first: list = [None, None]  # of the kernel that is traced

    def convolve(c: object, given: gdn.Inputs, *args: object) -> tuple:
        first[:] = first if first[0] is c else [c, given]
        return CONVOLVE(c, first[1], *args)

    return {"convolve": convolve}


def writes_one_place(case: K1Case) -> dict[str, object]:
    """Every token's state to the first token's place."""
    return {"store_draft": lambda c, u, token, *args: STORE(c, u, 0, *args)}


def swaps_two_tokens(case: K1Case) -> dict[str, object]:
    """The first two rows of a request in the other order."""
    return {"_tokens": lambda c, u: [TOKENS_OF(c, u)[n] for n in (1, 0, 2, 3)]}


RULE, CONVOLVE, STORE, TOKENS_OF = gdn.delta_rule, gdn.convolve, gdn.store_draft, gdn._tokens
MISTAKES = {
    forgets_the_state: ("core", "SSM state"),
    forgets_the_window: ("core", "conv state"),
    writes_one_place: ("SSM state", "conv state"),
    swaps_two_tokens: ("core", "SSM state", "conv state"),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_wrong_recurrence_is_seen(mistake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: code that keeps the tokens apart, mixes them up, or their places, fails the gates named."""
    from sgl_amd_mono.sim import CodeObject

    case = make_case(verify_key(4), seed=216)
    before = Before.of(case)
    for name, value in mistake(case).items():
        monkeypatch.setattr(gdn, name, value)
    run(case, code=CodeObject.parse(compile_artifact(case.key).isa))
    lines = failures(case, before)
    for gate in MISTAKES[mistake]:
        assert any(line.startswith(gate) for line in lines), f"{gate}: {lines}"


@pytest.mark.parametrize(
    ("geometry", "width", "form"),
    [
        pytest.param(TRUE, 4, "bfloat16", id="a95b-4"),
        pytest.param(TRUE, 8, "bfloat16", id="a95b-8"),
        pytest.param(TRUE, 8, "mxfp4", marks=full, id="a95b-8-mxfp4"),
        pytest.param(TP1, 8, "bfloat16", marks=full, id="small-8"),
    ],
)
def test_resources(geometry: Geometry, width: int, form: str) -> None:
    key = verify_key(width, geometry=geometry, qkvz_format=form, ba_format=form)
    found = build(key).resources
    assert found.vgprs <= VGPR_MAX and found.agprs == 0
    assert found.vgpr_spills == 0 and found.scratch_bytes == 0
    assert found.lds_bytes == sum(-(-n // 16) * 16 for n in gdn.lds_layout(key).values()) <= LDS_MAX
    assert "draft_tokens_4" in key.name


@pytest.mark.parametrize("width", [4, pytest.param(8, marks=full)])
def test_true_size(width: int) -> None:
    checked(make_case(verify_key(width, geometry=TRUE), seed=217, slots=width))


@pytest.mark.parametrize(("width", "tokens"), [(4, 3), (8, 5), (4, -1), (2, 4)])
def test_rows_that_are_no_whole_requests_are_refused(width: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"K1 width {width} of {tokens} draft tokens a request; needed: a multiple"):
        verify_key(width, tokens)
