# SPDX-License-Identifier: Apache-2.0
"""Faults that a test injects into a machine."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stall:
    """Waves that stop for good. Every selector that is None matches all; launch is the index in the list of launches.

    at: "start"; ("store", region) or ("load", region): before the first access to a region or allocation of that name;
    ("line", isa_line, k): before the k-th pass (1-based) of the instruction on that line; ("text", regex, k): of the
    first instruction whose text matches.
    """

    rank: int | None = None
    workgroup: int | None = None
    wave: int | None = None
    launch: int | None = None
    at: str | tuple = "start"


@dataclasses.dataclass(frozen=True)
class DropStores:
    """Stores of a rank into memory that another rank maps too never arrive. to_rank (which maps that memory, its own or
    a peer's) and region (a region's name, an allocation's, or "allocation/region") narrow it."""

    rank: int | None
    to_rank: int | None = None
    region: str | None = None


@dataclasses.dataclass(frozen=True)
class DelayStores:
    """The same stores arrive that many ticks (100 MHz) later, in order."""

    rank: int | None
    to_rank: int | None = None
    region: str | None = None
    ticks: int = 1000


@dataclasses.dataclass(frozen=True)
class Starve:
    """A rank begins late (None: every rank): its waves are held back for that many rounds of the scheduler, or until
    all others only poll. Adversarial memory only. The latest one holds."""

    rank: int | None
    rounds: int = 200
