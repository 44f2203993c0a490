# SPDX-License-Identifier: Apache-2.0
"""Entry points of `sglang.srt.plugins` for the server tests: the CPU harness without any spec of ours."""

from __future__ import annotations


def harness_only() -> None:
    """What SGLang needs on a machine without a GPU, and nothing else."""
    from sgl_amd_mono.simulate import harness

    harness.install()
