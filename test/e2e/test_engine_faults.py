# SPDX-License-Identifier: Apache-2.0
"""Faults in SGLang's Engine with two ranks in two processes: each stops every rank and the server, and is named.

The simulator's launches return from a lost wait (`stop=False`), and the step raises before its logits are handed on; a
server's launches end the process by themselves.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from helpers.engine_stream import TOKENS, serve
from helpers.fault_runtime import AT_STEP, LAST_LAYER, STALLED_LAYER

from sgl_amd_mono.simulate import checkpoint

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("big")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write(tmp_path_factory.mktemp("faults") / "model")


def test_without_a_fault_every_token_arrives(tmp_path: Path, model: Path) -> None:
    """The control: the same run to its end."""
    status, seen, log = serve(tmp_path, model, "none")
    assert status == 0, log[-4000:]
    assert len(seen) == TOKENS + 1 and seen[-1] == "done"
    assert "StepFault" not in log


#: fault -> what the log must say of it
NAMED = {
    "stall": rf"StepFault: k2 of layer {STALLED_LAYER}: wait on '\w+' index \d+ ran out of time on rank [01]",
    "last-wait": rf"StepFault: k2 of layer {LAST_LAYER}: wait on 'FINAL' index \d+ ran out of time on rank 1",
    "raise": r"RuntimeError: planted in the layer loop of rank 1",
}


@pytest.mark.parametrize("fault", NAMED)
def test_every_rank_stops_and_no_token_of_the_step_arrives(tmp_path: Path, model: Path, fault: str) -> None:
    status, seen, log = serve(tmp_path, model, fault)
    assert status != 0 and "done" not in seen
    assert len(seen) <= AT_STEP, "the prefill and the steps before the lost one give a token each"
    assert re.search(NAMED[fault], log), log[-6000:]
    if fault != "raise":  # both ranks left the step: each says what it lost
        assert len(set(re.findall(r"TP(\d)\].*Scheduler hit an exception", log))) == 2, log[-6000:]
    assert not alive(str(tmp_path)), "a process of the server lives on"


def alive(word: str) -> list[int]:
    """Processes whose environment names the run's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if word.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
