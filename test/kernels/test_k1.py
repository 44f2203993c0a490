# SPDX-License-Identifier: Apache-2.0
"""K1 as gfx950 instructions on the simulator against its definition, at the small geometry."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.k1_gates import (
    Before,
    checked,
    failures,
    nothing_written,
    outputs_by_row,
    same_beside_any_rows,
    same_bits,
    select_rows,
)
from helpers.k1_inputs import EPOCH, LAYER, make_case, make_weights, run

from sgl_amd_mono.common.build import compile_artifact
from sgl_amd_mono.common.sync import tag_of
from sgl_amd_mono.qwen38_a95b_mxfp4 import trial_k1
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import gdn
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey

TP1, TP2 = Geometry.small(1), Geometry.small(2)
full = pytest.mark.full
PADS = {1: (0,), 2: (1,), 3: (1,), 4: (0, 2), 5: (4,), 6: (0, 5), 7: (3, 4), 8: (0, 2, 7)}

# (width, first layer, state dtype, with pad rows) that `make test` runs; `make test-full` runs the whole product.
SUBSET = {
    (1, False, "float32", False),
    (2, True, "bfloat16", True),
    (3, False, "bfloat16", False),
    (5, False, "float32", True),
    (8, False, "float32", False),
    (8, True, "float32", True),
}
PRODUCT = [
    pytest.param(*row, marks=() if row in SUBSET else full, id="-".join(map(str, row)))
    for row in (
        (width, first, dtype, pads)
        for width in range(1, 9)
        for first in (False, True)
        for dtype in ("float32", "bfloat16")
        for pads in (False, True)
    )
]


@pytest.mark.parametrize(("width", "first", "dtype", "pads"), PRODUCT)
def test_against_the_definition(width: int, first: bool, dtype: str, pads: bool) -> None:
    key = GdnKey(TP1, width, first_layer=first, state_dtype=dtype, stop=False)
    checked(make_case(key, seed=width, pads=PADS[width] if pads else ()))


@pytest.mark.parametrize("width", [pytest.param(w, marks=() if w in (1, 4) else full) for w in range(1, 9)])
def test_left_over_slices_of_tp2(width: int) -> None:
    """At TP 2 some z rows are left over: K slices, summed by the consumer."""
    checked(make_case(GdnKey(TP2, width, stop=False), seed=20 + width, pads=(1,) if width > 2 else ()))


@pytest.mark.parametrize("width", [pytest.param(w, marks=() if w in (1, 8) else full) for w in range(1, 9)])
def test_own_norm(width: int) -> None:
    """A build that adds the residual and sums the squares itself, and reads neither z nor its sums."""
    case = make_case(GdnKey(TP1, width, own_norm=True, stop=False), seed=40 + width, pads=PADS[width])
    assert case.z is None and case.squares is None
    checked(case)


@pytest.mark.parametrize("wrong", [0, 1], ids=["z", "squares"])
def test_the_norm_starts_from_what_is_given(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: z that is not the sum, or sums that are not of its squares, by 2 %: the core leaves its bounds."""
    left_by_k2 = trial_k1.left_by_k2
    case = make_case(GdnKey(TP1, 1, stop=False), seed=3)
    before = Before.of(case)

    def planted(*rows: torch.Tensor) -> list[torch.Tensor]:
        return [value * (1.02 if n == wrong else 1.0) for n, value in enumerate(left_by_k2(*rows))]

    monkeypatch.setattr(trial_k1, "left_by_k2", planted)
    run(case)
    assert any(text.startswith("core") for text in failures(case, before))


@pytest.mark.parametrize("round_beta", [True, False])
def test_round_beta_is_a_property_of_the_build(round_beta: bool) -> None:
    """Each build agrees with its own definition, and the other one's core is further away."""
    case = make_case(GdnKey(TP1, 1, round_beta=round_beta, stop=False), seed=3)
    before = Before.of(case)
    trace = before.trace
    other = dataclasses.replace(case, key=dataclasses.replace(case.key, round_beta=not round_beta)).naive()
    run(case)
    assert not failures(case, before)
    distance = [(case.ssm_state[1:].double() - t.ssm_rows[0]).flatten(1).norm(dim=1).min() for t in (trace, other)]
    assert distance[0] * 10 < distance[1]


def test_free_strides_and_a_far_slot() -> None:
    """Taps outermost in the conv pool, a gap between SSM slots."""
    checked(make_case(GdnKey(TP1, 2, stop=False), seed=5, spread_strides=True))


def test_pool_beyond_4_gib() -> None:
    """The SSM pool spans more than 4 GiB; only the pages that are named exist."""
    case = make_case(GdnKey(TP1, 2, stop=False), seed=6)
    slots = 5000  # of 1 MiB
    far = torch.empty(slots, *case.ssm_state.shape[1:])
    assert far.numel() * far.element_size() > 2**32
    conv = torch.zeros(slots, *case.conv_state.shape[1:], dtype=torch.bfloat16)
    index = torch.tensor([4711, 3], dtype=torch.int32)
    for row, slot in enumerate(index.tolist()):
        far[slot] = case.ssm_state[case.state_index[row]]
        conv[slot] = case.conv_state[case.state_index[row]]
        for neighbour in (slot - 1, slot + 1):
            far[neighbour] = 1.0
    case = dataclasses.replace(case, state_index=index, ssm_state=far, conv_state=conv)
    trace = case.naive()
    conv_before = conv.clone()
    run(case)
    for row, slot in enumerate(index.tolist()):
        assert (far[slot] - trace.ssm_rows[row]).norm() / trace.ssm_rows[row].norm() < 1e-3
        assert same_bits(conv[slot, :, :2], conv_before[slot, :, 1:])
        for neighbour in (slot - 1, slot + 1):
            assert bool((far[neighbour] == 1.0).all())
    assert same_bits(case.residual_out, trace.residual_out)


@pytest.mark.parametrize(
    "widths",
    [pytest.param((1, 5), id="1-5"), pytest.param((1, 2, 3, 4, 5, 6, 7, 8), marks=full, id="all")],
)
@pytest.mark.parametrize("geometry", [TP1, pytest.param(TP2, marks=full)], ids=["tp1", "tp2"])
def test_batch_invariance(geometry: Geometry, widths: tuple[int, ...]) -> None:
    """Row 7 of an 8-row step, alone and beside any other rows, at every width and place: the same bits."""
    case = make_case(GdnKey(geometry, 8, stop=False), seed=7)
    same_beside_any_rows(case, widths)


def test_other_rows_do_not_matter() -> None:
    """NaN and huge values in the other rows leave a row's bits alone."""
    case = make_case(GdnKey(TP1, 3, stop=False), seed=8)
    clean = select_rows(case, [0, 1, 2])
    run(clean)
    dirty = select_rows(case, [0, 1, 2])
    dirty.hidden[0], dirty.hidden[2] = float("nan"), 1e30
    run(dirty)
    for a, b in zip(outputs_by_row(clean)[1], outputs_by_row(dirty)[1], strict=True):
        assert same_bits(a, b)


def test_batch_invariance_sees_a_swapped_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the waves' sums added in another order at one width give other bits."""
    from sgl_amd_mono.sim import CodeObject

    case = make_case(GdnKey(TP1, 8, stop=False), seed=14)
    right, swapped = (select_rows(case, list(range(8))) for _ in range(2))
    run(right)
    monkeypatch.setattr(gdn, "WAVE_ORDER", tuple(reversed(range(8))))
    run(swapped, code=CodeObject.parse(compile_artifact(swapped.key).isa))
    assert not same_bits(swapped.core, right.core)
    assert same_bits(swapped.residual_out, right.residual_out)


def test_epochs_share_one_scratch() -> None:
    """Three steps on one scratch, new inputs each: no value of an earlier step is taken."""
    case = make_case(GdnKey(TP1, 2, stop=False), seed=10)
    for step in range(3):
        before = Before.of(case)
        run(case)
        assert not failures(case, before), f"step {step}"
        case.hidden, case.residual = case.hidden.flip(0).contiguous(), (case.residual * -0.5)
        case.core.fill_(0)
        case.epoch += 1


def test_a_current_tag_is_believed() -> None:
    """Negative control of the tags: pairs that carry this launch's tag from the start corrupt the result."""
    case = make_case(GdnKey(TP1, 1, stop=False), seed=11)
    before = Before.of(case)
    pairs = case.scratch.view(torch.int32).view(-1, 2)
    pairs[:, 0], pairs[:, 1] = 0x3F803F80, tag_of(EPOCH, LAYER)
    run(case)
    assert any("core" in line for line in failures(case, before))


@pytest.mark.parametrize("tag", [tag_of(EPOCH - 1, LAYER), tag_of(EPOCH, LAYER + 1), 0])
def test_other_tags_are_not_believed(tag: int) -> None:
    """Pairs of an earlier step or another layer, or never written, do not count."""
    case = make_case(GdnKey(TP1, 1, stop=False), seed=11)
    pairs = case.scratch.view(torch.int32).view(-1, 2)
    pairs[:, 0], pairs[:, 1] = 0x3F803F80, tag
    checked(case)


def test_warm_up_writes_nothing() -> None:
    """mode 0 returns at once."""
    case = make_case(GdnKey(TP1, 2, stop=False), seed=12)
    before = Before.of(case)
    run(case, mode=0)
    assert not nothing_written(case, before)
    assert not bool(case.scratch.any())


def test_pad_rows_only() -> None:
    """A step of pad rows writes zero core rows and no state; slot 0 (NaN) is not touched."""
    checked(make_case(GdnKey(TP1, 2, stop=False), seed=13, pads=(0, 1)))


class TestRefusals:
    def test_arguments(self) -> None:
        key = GdnKey(TP1, 2, stop=False)
        case = make_case(key, seed=14)
        others = ("scratch", "peers", "epoch")
        good = {k: v for k, v in case.tensors().items() if v is not None and k not in others}
        gdn.check_args(key, **good)
        bad = {
            "w_qkvz": good["w_qkvz"][:-16],
            "hidden": good["hidden"].float(),
            "conv_w": good["conv_w"].t().contiguous().t(),
            "state_index": good["state_index"].long(),
            "ssm_state": good["ssm_state"].transpose(2, 3),
            "conv_state": good["conv_state"][:, :-1],
        }
        for name, tensor in bad.items():
            with pytest.raises(ValueError, match=r"found .*needed.*fix"):
                gdn.check_args(key, **{**good, name: tensor})

    def test_state_dtype_of_another_build(self) -> None:
        case = make_case(GdnKey(TP1, 1, stop=False), seed=15)
        with pytest.raises(ValueError, match=r"float32.*bfloat16 of the build key"):
            gdn.check_args(GdnKey(TP1, 1, state_dtype="bfloat16"), conv_state=case.conv_state, ssm_state=case.ssm_state)

    @pytest.mark.parametrize("fields", [{"width": 0}, {"width": 9}, {"state_dtype": "float16"}])
    def test_keys(self, fields: dict) -> None:
        with pytest.raises(ValueError, match="needed"):
            GdnKey(**{"geometry": TP1, "width": 1, **fields})


def test_weights_are_not_the_same_for_two_seeds() -> None:
    """The cases differ, so that agreement over seeds means something."""
    assert not torch.equal(make_weights(TP1, 1).w_qkvz, make_weights(TP1, 2).w_qkvz)
