# SPDX-License-Identifier: Apache-2.0
"""Negative controls of K2 that need a build with a planted mistake (FlyDSL compiles them in the test)."""

from __future__ import annotations

import pytest
import torch
from helpers import k2_bench as kb

from sgl_amd_mono.common.build import compile_artifact
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layer

GEOMETRY = Geometry.small(2)
WIDTH = 2


def order_sensitive() -> tuple[list[kb.RankWeights], kb.Inputs]:
    """Rank 1's first two waves of the output projection cancel: in their order exactly, after the others not."""
    weights, step = kb.random_weights(GEOMETRY, 41), kb.random_inputs(GEOMETRY, WIDTH, 42)
    part = GEOMETRY.core_width // layer.WAVES
    w_o, core = weights[1].tensors["w_o"], step.cores[1]
    w_o[:, :part] *= 2**14
    w_o[:, part : 2 * part] = -w_o[:, :part]
    core[:, part : 2 * part] = core[:, :part]
    return weights, step


def test_a_swapped_sum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank sums its waves from the last to the first: the bits are not those of the stated order."""
    from sgl_amd_mono.common import gemv
    from sgl_amd_mono.sim import CodeObject

    forward = gemv.sum_in_order

    def backward(region, place, stride, order, *like):
        return forward(region, place, stride, tuple(reversed(order)), *like)

    monkeypatch.setattr(gemv, "sum_in_order", backward)
    swapped = CodeObject.parse(compile_artifact(layer.LayerKey(geometry=GEOMETRY, width=WIDTH, stop=False)).isa)
    monkeypatch.undo()
    weights, step = order_sensitive()
    good, again = (kb.Bench(GEOMETRY, weights).run(step) for _ in range(2))
    bad = kb.Bench(GEOMETRY, weights).run(step, codes=[kb.code(GEOMETRY, WIDTH), swapped])
    assert torch.equal(good.residual[0], again.residual[0])
    assert not torch.equal(good.residual[0], bad.residual[0])


def test_the_other_scale_rounding_in_the_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """MXFP4 projection: a build that quantises the core with the experts' rounding (RCEIL) leaves the gate."""
    from sgl_amd_mono.common import device
    from sgl_amd_mono.sim import CodeObject

    key = kb.VARIANTS["mxfp4"].key(GEOMETRY, WIDTH)
    weights = kb.random_weights(GEOMETRY, 41, variant=kb.VARIANTS["mxfp4"])
    step = kb.random_inputs(GEOMETRY, WIDTH, 42)
    monkeypatch.setattr(device, "mxfp4_code_even", device.mxfp4_code)
    program = CodeObject.parse(compile_artifact(key).isa)
    monkeypatch.undo()
    want = kb.definition(GEOMETRY, weights, step).residual
    assert float(kb.ulps_at(kb.Bench(GEOMETRY, weights).run(step).residual[0], want, 0.0).max()) <= 1
    assert float(kb.ulps_at(kb.Bench(GEOMETRY, weights).run(step, program=program).residual[0], want, 0.0).max()) > 1
