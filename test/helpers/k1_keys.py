# SPDX-License-Identifier: Apache-2.0
"""Every K1 build that the tests need, into the cache: `cd test && python -m helpers.k1_keys`."""

from __future__ import annotations

from sgl_amd_mono.common.build import build_all
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey


def keys(geometries: tuple[Geometry, ...]) -> list[GdnKey]:
    """Widths 1 to 8, first layer and not, both state dtypes, for the tests' builds (stop=False); one that stops."""
    found = [
        GdnKey(geometry, width, first_layer=first, state_dtype=dtype, stop=False)
        for geometry in geometries
        for width in range(1, 9)
        for first in (False, True)
        for dtype in ("float32", "bfloat16")
    ]
    mixed = (("mxfp4", "mxfp4"), ("mxfp4", "bfloat16"), ("bfloat16", "mxfp4"))
    found += [
        GdnKey(
            geometry,
            width,
            first_layer=width % 3 == 2,
            state_dtype="bfloat16" if width % 2 == 0 else "float32",
            stop=False,
            qkvz_format=qkvz,
            ba_format=ba,
        )
        for geometry in geometries
        for width in range(1, 9)
        for qkvz, ba in mixed
    ]
    small = Geometry.small(1)
    found += [GdnKey(small, width, own_norm=True, stop=False) for width in range(1, 9)]
    return [*found, GdnKey(small, 1, stop=True), GdnKey(small, 1, round_beta=False, stop=False)]


if __name__ == "__main__":
    build_all(keys((Geometry.small(1), Geometry.small(2), Geometry.a95b())))
