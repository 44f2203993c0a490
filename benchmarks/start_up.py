# SPDX-License-Identifier: Apache-2.0
"""Time of a server's start: every kernel of a default server (widths 1 to 8) from a cold and from a warm cache.

`python benchmarks/start_up.py [--processes N] [--geometry small] [--check]`. Wall clock, and the processor seconds
(user and system) of this process and its children, which say more on a machine that does other work too. `--check`
fails above the targets: 90 s cold, 3 s warm, on two cores. Without a linker nothing is linked or loaded.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sgl_amd_mono.common import build as building
from sgl_amd_mono.common.doctor import check_linker
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.layer import LayerKey

COLD_S, WARM_S = 90.0, 3.0
WIDTHS = range(1, 9)


def default_keys(geometry: Geometry) -> list[Any]:
    """What a server builds without explicit graph sizes: K1 of the first layer and of the others, and K2."""
    return [
        key
        for width in WIDTHS
        for key in (
            GdnKey(geometry, width, first_layer=True, stop=True),
            GdnKey(geometry, width, stop=True),
            LayerKey(geometry, width, stop=True),
        )
    ]


@dataclass
class Taken:
    """Seconds of wall clock and of the processor, children included."""

    wall: float
    processor: float


def taken(action: Callable[[], Any]) -> Taken:
    """Run an action and measure it."""

    def processor() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(use.ru_utime + use.ru_stime for use in used)

    wall, before = time.perf_counter(), processor()
    action()
    return Taken(time.perf_counter() - wall, processor() - before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, help="compiling processes (default: one a core, at most 16)")
    parser.add_argument("--geometry", choices=("a95b", "small"), default="a95b")
    parser.add_argument("--check", action="store_true", help="fail above the targets")
    options = parser.parse_args()
    geometry = Geometry.a95b() if options.geometry == "a95b" else Geometry.small(1)
    keys, binary = default_keys(geometry), check_linker().ok is True
    linked = "linked" if binary else "not linked (no ld.lld)"
    with tempfile.TemporaryDirectory(prefix="sgl_amd_mono_start_up_") as folder:

        def build() -> None:
            artifacts = building.build_all(keys, binary=binary, cache_dir=Path(folder), processes=options.processes)
            if binary:  # as a server loads them
                from sgl_amd_mono.common._flydsl import HipLauncher

                for key, artifact in zip(keys, artifacts, strict=True):
                    HipLauncher(artifact.binary, artifact.name, key.abi)

        times = {"cold": taken(build), "warm": taken(build)}
    limits = {"cold": COLD_S, "warm": WARM_S}
    print(f"{len(keys)} kernels of {geometry.name}, {linked}, {options.processes or 'default'} processes")
    for name, time_ in times.items():
        print(
            f"{name}: {time_.wall:.1f} s of wall clock, {time_.processor:.1f} s of the processor "
            f"(target: {limits[name]:g} s on two cores)"
        )
    return int(options.check and any(times[name].wall > limit for name, limit in limits.items()))


if __name__ == "__main__":
    raise SystemExit(main())
