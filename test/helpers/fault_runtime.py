# SPDX-License-Identifier: Apache-2.0
"""The simulator's runtime with one fault of the two-process engine: `FAULT_VARIABLE` names it, `AT_STEP` the step.

* `stall`: a workgroup of rank 1 never goes on in K2 of layer `STALLED_LAYER`;
* `last-wait`: what rank 0 sends to rank 1 for the last wait of the step's last launch never arrives: rank 1 alone sees;
* `raise`: rank 1's Python raises in the layer loop, before K2 of layer `STALLED_LAYER`;
* `weight`: rank 1's K1 of layer `WRONG_LAYER` reads its projection with the rows rolled (for check mode);
* `none`: the control.
"""

from __future__ import annotations

import os
from typing import Any

from sgl_amd_mono.common.runtime import simulator_runtime

FAULT_VARIABLE = "SGLANG_AMD_MONO_TEST_FAULT"
AT_STEP = 3  # decode steps before it are right: their tokens reach the client
STALLED_LAYER, LAST_LAYER, WRONG_LAYER = 1, 3, 1
STALLED_WORKGROUP = 5
MEETING_S = 60.0  # of wall clock, within which a rank that lives comes to a launch


def factory(request: Any) -> Any:
    """Runtime factory for `simulate.plugin.RUNTIME_VARIABLE`."""
    from sgl_amd_mono.sim import DropStores, Stall

    runtime = simulator_runtime(request, timeout_s=MEETING_S)
    fault, launch, steps = os.environ[FAULT_VARIABLE], runtime.launch, [0]

    def broken(kernel: Any, args: Any) -> None:
        named = dict(zip([name for name, _ in kernel.key.abi], args, strict=True))
        place = (kernel.key.launch, named["layer_slot"] - kernel.key.slot_base) if named["mode"] else None
        steps[0] += place == ("k2", 0)
        if steps[0] == AT_STEP:
            if place == ("k2", STALLED_LAYER) and fault == "raise" and request.group.rank == 1:
                raise RuntimeError("planted in the layer loop of rank 1")
            if runtime.machine is not None and place == ("k2", STALLED_LAYER) and fault == "stall":
                runtime.machine.inject(Stall(rank=1, workgroup=STALLED_WORKGROUP))
            if runtime.machine is not None and place == ("k2", LAST_LAYER) and fault == "last-wait":
                for region in ("FINAL", "FINAL.odd"):  # of even and of odd epochs
                    runtime.machine.inject(DropStores(rank=0, region=f"peer1/{region}"))
            if place == ("k1", WRONG_LAYER) and fault == "weight" and request.group.rank == 1:
                args = [value.roll(1, 0) if value is named["w_qkvz"] else value for value in args]
        launch(kernel, args)

    runtime.launch = broken
    return runtime
