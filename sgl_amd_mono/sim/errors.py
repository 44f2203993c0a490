# SPDX-License-Identifier: Apache-2.0
"""Errors of the simulator."""

from __future__ import annotations

import dataclasses


class SimError(RuntimeError):
    """The simulator cannot do what was asked: unknown instruction, bad mapping, launch that is not resident, no
    compiler."""


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A wave that had not ended when a launch failed: where it stands."""

    rank: int
    launch: str
    workgroup: int
    wave: int
    line: int
    text: str
    state: str  # "polling", "barrier" or "stalled"

    def __str__(self) -> str:
        return (
            f"rank {self.rank} {self.launch} workgroup {self.workgroup} wave {self.wave}: {self.state} at line "
            f"{self.line}: "
            f"{self.text}"
        )


class SimFault(SimError):
    """A launch failed while it ran.

    kind: "out-of-bounds", "readonly-store", "gpu-fault" (addresses 0 to 4095), "lds-out-of-bounds", "misaligned",
    "trap", "hazard", "deadlock", "limit", "memory" or "internal". The other fields are None where they do not apply;
    line is the 1-based line of the assembly text; waiting lists live waves for "deadlock" and "limit".
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        rank: int | None = None,
        launch: str | None = None,
        workgroup: int | None = None,
        wave: int | None = None,
        lane: int | None = None,
        address: int | None = None,
        line: int | None = None,
        text: str | None = None,
        waiting: tuple[Waiting, ...] = (),
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.rank, self.launch, self.workgroup, self.wave, self.lane = rank, launch, workgroup, wave, lane
        self.address, self.line, self.text, self.waiting = address, line, text, waiting
