# SPDX-License-Identifier: Apache-2.0
"""The simulator's runtime, which also writes what ran into the folder of `COUNT_VARIABLE`.

`rank{N}.txt`: a line for each launch of K1 and K2; `stock{N}.txt`: the names of SGLang's Triton kernels that had run by
then on the simulator (none where PyTorch stands in their place).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sgl_amd_mono.common.runtime import simulator_runtime
from sgl_amd_mono.simulate import harness, rocm_import

COUNT_VARIABLE = "SGLANG_AMD_MONO_TEST_COUNT"


def factory(request: Any) -> Any:
    """Runtime factory for `simulate.plugin.RUNTIME_VARIABLE`."""
    runtime = simulator_runtime(request)
    folder = Path(os.environ[COUNT_VARIABLE])
    launch, names = runtime.launch, folder / f"rank{request.group.rank}.txt"
    stock = rocm_import.driver().launches if harness.chosen_stock() == "triton" else []

    def counted(kernel: Any, args: Any) -> None:
        launch(kernel, args)
        if args[[name for name, _ in kernel.key.abi].index("mode")]:  # a warm-up launch does nothing
            with names.open("a") as lines:
                lines.write(f"{kernel.key.launch}\n")
            (folder / f"stock{request.group.rank}.txt").write_text("\n".join(ran.name for ran in stock))

    runtime.launch = counted
    return runtime
