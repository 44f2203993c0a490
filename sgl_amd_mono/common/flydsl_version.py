# SPDX-License-Identifier: Apache-2.0
"""Which FlyDSL is installed, and whether its kernels were tested; FlyDSL itself is not imported."""

from __future__ import annotations

import re
from importlib import metadata

from sgl_amd_mono import FLYDSL_TESTED


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version starts with: `0.5.0.dev3+rocm` -> (0, 5, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(n) for n in match.group().split(".")) if match else ()


def installed() -> str | None:
    """Version of the installed FlyDSL, or None."""
    try:
        return metadata.version("flydsl")
    except metadata.PackageNotFoundError:
        return None


def flydsl_reasons() -> list[str]:
    """Why the installed FlyDSL cannot build the kernels; empty where it can."""
    first, past = FLYDSL_TESTED
    needed = f"flydsl >= {first}, < {past}"
    fix = f"pip install 'flydsl>={first},<{past}'"
    version = installed()
    if version is None:
        return [f"FlyDSL: found none; needed: {needed}; fix: {fix}"]
    if not release(first) <= release(version) < release(past):
        return [f"FlyDSL: found flydsl {version}; needed: {needed}, the versions tested; fix: {fix}"]
    return []
