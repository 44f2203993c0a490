# SPDX-License-Identifier: Apache-2.0
"""K1's trial inputs under the names that the tests use."""

from __future__ import annotations

from sgl_amd_mono.qwen38_a95b_mxfp4.trial_k1 import (  # noqa: F401
    DEADLINE_TICKS,
    EPOCH,
    JUNK,
    LAYER,
    READONLY,
    STATE_SCALE,
    K1Case,
    bf16,
    built,
    make_case,
    make_weights,
    map_case,
    run,
    span,
)
