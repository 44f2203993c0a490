# SPDX-License-Identifier: Apache-2.0
"""K1 with in_proj_qkvz, in_proj_ba or both in MXFP4: the gates of the plain one, and what they must catch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from helpers import mx_reference as mx
from helpers.k1_gates import Before, checked, failures, outputs_by_row, same_beside_any_rows, same_bits, select_rows
from helpers.k1_inputs import K1Case, make_case, run

from sgl_amd_mono.common.build import compile_artifact
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import gdn
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import BF16, MXFP4, GdnKey
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.layout import shuffle_weight

full = pytest.mark.full
TP1, TP2 = Geometry.small(1), Geometry.small(2)
FORMATS = ((MXFP4, MXFP4), (MXFP4, BF16), (BF16, MXFP4))  # of in_proj_qkvz and in_proj_ba; Quark excludes by layer name
ADVERSARIAL_SEEDS = 24

# (geometry, width, formats) that `make test` runs; the first layer, the state dtype and the pads go with the width.
SUBSET = {(1, 1, FORMATS[0]), (1, 2, FORMATS[1]), (1, 8, FORMATS[1]), (1, 6, FORMATS[2]), (2, 5, FORMATS[0])}
PRODUCT = [
    pytest.param(
        tp, width, forms, marks=() if (tp, width, forms) in SUBSET else full, id=f"tp{tp}-{width}-{'-'.join(forms)}"
    )
    for tp in (1, 2)
    for width in range(1, 9)
    for forms in FORMATS
]


def key_of(geometry: Geometry, width: int, forms: tuple[str, str], **more: object) -> GdnKey:
    return GdnKey(geometry, width, stop=False, qkvz_format=forms[0], ba_format=forms[1], **more)


@pytest.mark.parametrize(("tp", "width", "forms"), PRODUCT)
def test_against_the_definition(tp: int, width: int, forms: tuple[str, str]) -> None:
    first, dtype = width % 3 == 2, "bfloat16" if width % 2 == 0 else "float32"
    key = key_of(Geometry.small(tp), width, forms, first_layer=first, state_dtype=dtype)
    checked(make_case(key, seed=220 + width, pads=(width - 1,) if width in (3, 6, 8) else ()))


@pytest.mark.parametrize(
    "widths", [pytest.param((1, 5), id="1-5"), pytest.param((1, 2, 3, 4, 5, 6, 7, 8), marks=full, id="all")]
)
@pytest.mark.parametrize("forms", [FORMATS[0], *(pytest.param(forms, marks=full) for forms in FORMATS[1:])])
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=full)])
def test_batch_invariance(tp: int, forms: tuple[str, str], widths: tuple[int, ...]) -> None:
    """A row of an 8-row step beside any other rows, at every width and place: the same bits."""
    case = make_case(key_of(Geometry.small(tp), 8, forms), seed=107)
    same_beside_any_rows(case, widths)


@pytest.mark.parametrize("forms", [FORMATS[1], pytest.param(FORMATS[0], marks=full)])
def test_other_rows_do_not_matter(forms: tuple[str, str]) -> None:
    """NaN and huge values in the other rows leave a row's bits alone: a row has scales of its own."""
    case = make_case(key_of(TP1, 3, forms), seed=108)
    clean = select_rows(case, [0, 1, 2])
    run(clean)
    dirty = select_rows(case, [0, 1, 2])
    dirty.hidden[0], dirty.hidden[2] = float("nan"), 1e30
    run(dirty)
    for a, b in zip(outputs_by_row(clean)[1], outputs_by_row(dirty)[1], strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s in (0, 9) else full) for s in range(ADVERSARIAL_SEEDS)])
def test_bits_do_not_depend_on_the_schedule(seed: int) -> None:
    """The adversarial memory model: the gates hold, and the bits are those of the consistent model."""
    geometry, width = TP2 if seed >= 16 else TP1, seed % 8 + 1
    case = make_case(key_of(geometry, width, FORMATS[seed % 3]), seed=140 + seed, pads=(0,) if seed % 4 == 3 else ())
    plain = dataclasses.replace(case, conv_state=case.conv_state.clone(), ssm_state=case.ssm_state.clone())
    checked(case, memory="adversarial", seed=seed)
    run(plain)
    for name in ("core", "residual_out", "conv_state", "ssm_state"):
        assert same_bits(getattr(case, name), getattr(plain, name)), f"{name} depends on the schedule"


def test_x_is_quantised_as_the_reference_does() -> None:
    """Products that each read one column of x back, against NumPy's quantiser, exactly: ties, both zeros, saturation,
    a hundred exponents. The weights are a single 1 a row."""
    case = make_case(key_of(TP1, 1, FORMATS[0], first_layer=True), seed=109)
    g, gen = TP1, torch.Generator().manual_seed(109)
    exponents = torch.randint(0, 100, (g.hidden // 32, 1), generator=gen).expand(-1, 32).flatten()
    case.weights.norm_w = (torch.exp2(exponents.float()) - 1.0).to(torch.bfloat16)
    case.hidden[0, :32] = 0.0
    picks = torch.arange(g.qkvz_rows) % g.hidden
    nibbles = torch.zeros(g.qkvz_rows, g.hidden, dtype=torch.uint8)
    nibbles[torch.arange(g.qkvz_rows), picks] = 2  # the e2m1 code of 1
    case.weights.w_qkvz = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    case.weights.w_qkvz_scale = torch.full((g.qkvz_rows, g.hidden // 32), 127, dtype=torch.uint8)

    x = case.naive().x.numpy()
    codes = mx.block_codes_even(x)
    scaled = np.abs(x) / np.exp2(codes - 127.0).repeat(32, -1)
    assert set(np.unique(mx.nibbles(x, codes))) == set(range(16)) and len(np.unique(codes)) > 20
    assert np.isin(scaled, (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)).sum() >= 5 and (scaled > 6).any()
    run(case)
    want = mx.values(mx.nibbles(x, codes), codes)[0, picks.numpy()]
    assert np.array_equal(case.products()[0][0].double().numpy(), want)


def broken(case: K1Case, change: str) -> K1Case:
    """A copy of the case with one mistake in the weights."""
    w = case.weights
    weights = {
        "scale shifted by a block": {"w_qkvz_scale": w.w_qkvz_scale.roll(1, 1)},
        "scale of the next row": {"w_ba_scale": w.w_ba_scale.roll(1, 0)},
        "a block's code one higher": {"w_qkvz_scale": _one_more(w.w_qkvz_scale)},
        "nibbles swapped": {"w_ba": (w.w_ba >> 4) | (w.w_ba << 4)},
        "the layout of the assembly GEMM": {"w_qkvz": shuffle_weight(w.w_qkvz)},
    }[change]
    return dataclasses.replace(case, weights=dataclasses.replace(w, **weights))


def _one_more(codes: torch.Tensor) -> torch.Tensor:
    """The code of columns 224 .. 255 of every row one higher."""
    codes = codes.clone()
    codes[:, 7] += 1
    return codes


@pytest.mark.parametrize(
    "change",
    [
        "scale shifted by a block",
        "scale of the next row",
        "a block's code one higher",
        "nibbles swapped",
        "the layout of the assembly GEMM",
    ],
)
def test_a_wrong_weight_is_seen(change: str) -> None:
    """Negative controls: the launch runs on changed weights, the definition on the right ones."""
    case = make_case(key_of(TP1, 1, FORMATS[0]), seed=110)
    before = Before.of(case)
    wrong = broken(case, change)
    run(wrong)
    projection = "in_proj_ba" if change in ("scale of the next row", "nibbles swapped") else "in_proj_qkvz"
    # the gates that start from the launch's own products still hold: only the products are wrong
    wrong.weights = case.weights
    lines = failures(wrong, before)
    assert any(line.startswith(projection) for line in lines) and not any("given the products" in x for x in lines)


@pytest.mark.parametrize("forms", FORMATS)
def test_another_rounding_of_the_scale_is_seen(forms: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: x quantised by the experts' rule (RCEIL) instead of the linears'."""
    from sgl_amd_mono.common import device
    from sgl_amd_mono.sim import CodeObject

    case = make_case(key_of(TP1, 1, forms), seed=111)
    before = Before.of(case)
    monkeypatch.setattr(device, "mxfp4_code_even", device.mxfp4_code)
    run(case, code=CodeObject.parse(compile_artifact(case.key).isa))
    lines = failures(case, before)
    assert any(line.startswith("in_proj_qkvz") for line in lines) == (forms[0] == MXFP4)
    assert any(line.startswith("in_proj_ba") for line in lines) == (forms[1] == MXFP4)


class TestRefusals:
    def test_arguments(self) -> None:
        key = key_of(TP1, 2, FORMATS[0])
        case = make_case(key, seed=112)
        good = {k: v for k, v in case.tensors().items() if k not in ("scratch", "peers", "epoch")}
        gdn.check_args(key, **good)
        bad = {
            "w_qkvz": good["w_qkvz"].to(torch.int32),
            "w_qkvz_scale": good["w_qkvz_scale"].t().contiguous().t(),
            "w_ba": good["w_ba"][:, :-16].contiguous(),
            "w_ba_scale": good["w_ba_scale"].float(),
        }
        for name, tensor in bad.items():
            with pytest.raises(ValueError, match=rf"found {name}.*needed.*fix"):
                gdn.check_args(key, **{**good, name: tensor})
        with pytest.raises(ValueError, match=r"found w_qkvz .*uint8.*needed.*bfloat16"):
            gdn.check_args(dataclasses.replace(key, qkvz_format=BF16), **good)

    @pytest.mark.parametrize("field", ["qkvz_format", "ba_format"])
    def test_keys(self, field: str) -> None:
        with pytest.raises(ValueError, match=rf"{field} 'fp8'; needed: one of 'bfloat16', 'mxfp4'"):
            GdnKey(TP1, 1, **{field: "fp8"})


def test_names_tell_the_formats() -> None:
    """A trace of a profiler reads by itself."""
    name = key_of(TP1, 1, FORMATS[1]).name
    assert "qkvz_format_mxfp4" in name and "ba_format_bfloat16" in name
