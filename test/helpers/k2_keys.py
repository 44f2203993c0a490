# SPDX-License-Identifier: Apache-2.0
"""The K2 builds that its tests launch or read; `python -m helpers.k2_keys` (in `test/`) builds them all."""

from __future__ import annotations

from sgl_amd_mono.common.build import build_all
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import MAX_ROWS, Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.layer import LayerKey
from sgl_amd_mono.qwen38_a95b_mxfp4.trial_k2 import VARIANTS


def keys() -> list[LayerKey]:
    """Every build of test_k2*.py but those of test_outside_k2.py."""
    geometries = (Geometry.a95b(8), Geometry.small(1), Geometry.small(2))
    tested = [v.key(g, w) for v in VARIANTS.values() for g in geometries for w in range(1, MAX_ROWS + 1)]
    return tested + [v.key(g, 1, stop=True) for v in VARIANTS.values() for g in (geometries[0], geometries[2])]


if __name__ == "__main__":
    build_all(keys())
