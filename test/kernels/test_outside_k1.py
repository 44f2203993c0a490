# SPDX-License-Identifier: Apache-2.0
"""K1 against SGLang's stock GDN kernels (Triton), both as gfx950 instructions on the simulator, from the same
projections: residual, conv state and normed rows bit for bit, the core but for a few ties, the state to its noise.
"""

from __future__ import annotations

import pytest
import torch
from helpers.k1_stock import compare, edge_case, normed_rows
from helpers.stock_definition import ulps
from helpers.stock_kernels import PLANTS

from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey

pytestmark = pytest.mark.xdist_group("stock")

SMALL, A95B = Geometry.small(1), Geometry.a95b(8)
NORM_FLIPS = {8192: 0, 1024: 1}  # elements of a launch, by hidden: K1's sum has SGLang's order at the true size
PADS = (1, 4)  # rows that are pads, with state index 0 and -1, at widths that have them


def _pads(width: int, pads: bool) -> tuple[int, ...]:
    return tuple(row for row in PADS if row < width) if pads else ()


def _check(key: GdnKey, seed: int, pads: bool = False) -> None:
    compared = compare(edge_case(key, seed, _pads(key.width, pads)))
    print(f"{key.geometry.name}, width {key.width}: {compared}")
    assert not compared.failures, compared.failures


@pytest.mark.parametrize(
    ("width", "first_layer", "state_dtype", "pads"),
    [(1, False, "float32", False), (2, True, "bfloat16", True), (8, False, "float32", True)],
)
def test_k1_agrees_with_the_stock_kernels(width: int, first_layer: bool, state_dtype: str, pads: bool) -> None:
    _check(GdnKey(SMALL, width, first_layer=first_layer, state_dtype=state_dtype, stop=False), 40 + width, pads)


@pytest.mark.full
@pytest.mark.parametrize("pads", [False, True], ids=["live", "pads"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("first_layer", [False, True], ids=["residual", "first"])
@pytest.mark.parametrize("width", range(1, 9))
def test_k1_agrees_at_every_width(width: int, first_layer: bool, state_dtype: str, pads: bool) -> None:
    _check(GdnKey(SMALL, width, first_layer=first_layer, state_dtype=state_dtype, stop=False), 60 + width, pads)


def test_k1_agrees_at_true_size() -> None:
    _check(GdnKey(A95B, 1, stop=False), seed=80)


@pytest.mark.full
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("width", "first_layer"), [(1, True), (3, False), (8, False), (8, True)])
def test_k1_agrees_at_true_size_and_more_widths(width: int, first_layer: bool, state_dtype: str) -> None:
    key = GdnKey(A95B, width, first_layer=first_layer, state_dtype=state_dtype, stop=False)
    _check(key, seed=80 + width, pads=width == 8)


def _check_norm(key: GdnKey, seed: int) -> None:
    ours, theirs = normed_rows(key, seed)
    differ = int((ours != theirs).sum())
    print(f"{key.geometry.name}, width {key.width}: {differ} of {ours.numel()} elements of the normed rows differ")
    assert differ <= NORM_FLIPS[key.geometry.hidden] and int(ulps(ours, theirs).max()) <= 1
    assert (ours != theirs.roll(1, dims=1)).float().mean() > 0.9, "the selecting rows do not show the columns"


@pytest.mark.parametrize(("geometry", "width", "first_layer"), [(SMALL, 8, False), (A95B, 1, False)])
def test_normed_rows_are_the_stock_norms(geometry: Geometry, width: int, first_layer: bool) -> None:
    """Seen through projections that select single columns."""
    _check_norm(GdnKey(geometry, width, first_layer=first_layer, stop=False), seed=90 + width)


@pytest.mark.full
@pytest.mark.parametrize("seed", [90, 91, 92])
@pytest.mark.parametrize("norm", [{}, {"own_norm": True}, {"first_layer": True}], ids=["given", "own", "first"])
@pytest.mark.parametrize("width", [3, 8])
def test_normed_rows_at_true_size(width: int, norm: dict[str, bool], seed: int) -> None:
    """From z and its sums as K2 leaves them, from hidden and residual, and from hidden alone."""
    _check_norm(GdnKey(A95B, width, stop=False, **norm), seed)


# ---- negative controls -------------------------------------------------------------------------------------------


def test_beta_rounded_where_stock_does_not_is_seen() -> None:
    failures = compare(edge_case(GdnKey(SMALL, 2, stop=False), seed=50), plant="beta not rounded").failures
    assert any(text.startswith("core") for text in failures)
    assert any(text.startswith("state") for text in failures)


def test_beta_not_rounded_where_stock_does_is_seen() -> None:
    failures = compare(edge_case(GdnKey(SMALL, 1, round_beta=False, stop=False), seed=50)).failures
    assert any(text.startswith("core") for text in failures)
    assert any(text.startswith("state") for text in failures)


@pytest.mark.parametrize("plant", [name for name in PLANTS if "beta" not in name])
def test_a_mistake_planted_in_sglang_is_seen_against_k1(plant: str) -> None:
    compared = compare(edge_case(GdnKey(SMALL, 2, stop=False), seed=50), plant=plant)
    print(compared.failures)
    assert compared.failures


def test_an_unrounded_beta_agrees_with_a_stock_that_does_not_round() -> None:
    """The build's `round_beta` is all that the two kinds of stock differ in."""
    case = edge_case(GdnKey(SMALL, 1, round_beta=False, stop=False), seed=51)
    assert not compare(case, plant="beta not rounded").failures
    assert torch.isfinite(case.core).all()
