# SPDX-License-Identifier: Apache-2.0
"""The MXFP4 layouts against AITER's own functions, byte for byte: every expert of a small tensor, w13 and w2, tiles and
scales; and a planted swap that each comparison must see.

`import aiter` would start AITER's compiler: its two source files are loaded by themselves.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import MX_BLOCK, Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layout
from sgl_amd_mono.simulate import aiter_standin

PACKAGE = "aiter_source_files"
GEOMETRY = Geometry.small(2)
#: weight -> (rows an expert, columns)
MATRICES = {
    "w13": (2 * GEOMETRY.moe_intermediate, GEOMETRY.hidden),
    "w2": (GEOMETRY.hidden, GEOMETRY.moe_intermediate),
}


@cache
def aiter(name: str) -> Any:
    """A source file of the installed AITER distribution, as a module that imports nothing else of it."""
    parent = types.ModuleType(PACKAGE)
    parent.__path__ = []
    # fp4_utils names its own types; the layouts use none of them
    parent.dtypes = types.ModuleType(f"{PACKAGE}.dtypes")
    sys.modules |= {PACKAGE: parent, f"{PACKAGE}.dtypes": parent.dtypes}
    folder = Path(str(importlib.metadata.distribution("amd-aiter").locate_file("aiter")))
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{Path(name).stem}", folder / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def experts(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed weights uint8 [E, N, K/2] and codes uint8 [E, N, K/32] as a checkpoint has them."""
    rows, columns = MATRICES[name]
    return (
        random_bytes(GEOMETRY.experts, rows, columns // 2),
        random_bytes(GEOMETRY.experts, rows, columns // MX_BLOCK),
    )


WEIGHT_FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layout": layout.shuffle_weight,
    "stand-in": aiter_standin.shuffle_weight,
}


@pytest.mark.parametrize("form", WEIGHT_FORMS)
@pytest.mark.parametrize("name", MATRICES)
def test_weight_tiles(name: str, form: str) -> None:
    packed, _ = experts(name)
    theirs = aiter("ops/shuffle.py").shuffle_weight(packed, (16, 16))
    assert theirs.is_shuffled
    ours = WEIGHT_FORMS[form](packed)
    for expert in range(GEOMETRY.experts):
        assert torch.equal(ours[expert], theirs[expert]), f"expert {expert}"
    assert torch.equal(layout.unshuffle_weight(theirs), packed)
    swapped = packed.clone()
    swapped[3, 5, [0, 16]] = packed[3, 5, [16, 0]]
    assert packed[3, 5, 0] != packed[3, 5, 16] and not torch.equal(WEIGHT_FORMS[form](swapped), theirs)


@pytest.mark.parametrize("name", MATRICES)
def test_scale_tiles(name: str) -> None:
    """SGLang shuffles the codes of all experts as one matrix of E * N rows."""
    _, codes = experts(name)
    flat = codes.reshape(-1, codes.shape[-1])
    theirs = aiter("utility/fp4_utils.py").e8m0_shuffle(flat)
    assert theirs.shape == flat.shape, "a matrix that needs no padding"
    assert torch.equal(layout.shuffle_scale(flat), theirs)
    assert torch.equal(aiter_standin.e8m0_shuffle(flat), theirs)
    assert torch.equal(layout.unshuffle_scale(theirs), flat)
    # an expert's codes are its own slice of the whole
    for expert in range(GEOMETRY.experts):
        own = theirs.view(codes.shape)[expert]
        assert torch.equal(layout.unshuffle_scale(own), codes[expert]), f"expert {expert}"
    assert not torch.equal(layout.shuffle_scale(flat.roll(1, 0)), theirs)


@pytest.mark.parametrize("name", MATRICES)
def test_values_of_shuffled_experts(name: str) -> None:
    """AITER's shuffle, read back by our layout, gives AITER's own fp4 values."""
    packed, codes = experts(name)
    codes = codes % 8 + 123
    weights = aiter("ops/shuffle.py").shuffle_weight(packed, (16, 16))
    scales = aiter("utility/fp4_utils.py").e8m0_shuffle(codes.reshape(-1, codes.shape[-1])).view(codes.shape)
    nibbles = aiter("utility/fp4_utils.py").mxfp4_to_f32(packed[:2].clone())
    for expert in range(2):
        scale = torch.exp2(codes[expert].double() - 127.0).repeat_interleave(MX_BLOCK, dim=-1)
        wanted = nibbles[expert].double() * scale
        assert torch.equal(layout.dequantize_shuffled(weights[expert], scales[expert]), wanted)
