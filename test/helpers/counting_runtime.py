# SPDX-License-Identifier: Apache-2.0
"""The simulator's runtime, which also writes a line for each launch that ran into the folder of `COUNT_VARIABLE`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sgl_amd_mono.common.runtime import simulator_runtime

COUNT_VARIABLE = "SGLANG_AMD_MONO_TEST_COUNT"


def factory(request: Any) -> Any:
    """Runtime factory for `simulate.plugin.RUNTIME_VARIABLE`."""
    runtime = simulator_runtime(request)
    launch, names = runtime.launch, Path(os.environ[COUNT_VARIABLE]) / f"rank{request.group.rank}.txt"

    def counted(kernel: Any, args: Any) -> None:
        launch(kernel, args)
        if args[[name for name, _ in kernel.key.abi].index("mode")]:  # a warm-up launch does nothing
            with names.open("a") as lines:
                lines.write(f"{kernel.key.launch}\n")

    runtime.launch = counted
    return runtime
