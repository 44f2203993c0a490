# SPDX-License-Identifier: Apache-2.0
"""Modelled times of a launch, from its counts. Nothing here was measured on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

LAUNCH_US = 5.0
TERABYTES_PER_S = 6.4
DEVICE_HOP_US = 2.1
CROSS_HOP_US = 4.0
# Hops (device, cross-GPU) of the public reference kernels, for the ratio to their modelled time.
REFERENCE_HOPS = {"k1": (5, 0), "k2": (5, 3), "k2k1": (10, 3)}
REFERENCE_LAUNCHES = {"k1": 1, "k2": 1, "k2k1": 2}  # launches of the reference that do the same


def fixed_us(unique_bytes: float, device_hops: int, cross_hops: int) -> float:
    """The fixed model, in us: 5 us + unique megabytes / 6.4 + 2.1 us a device hop + 4.0 us a cross-GPU hop.

    Nothing overlaps in it: every byte and every hop is paid in full.
    """
    bytes_us = unique_bytes / (TERABYTES_PER_S * 1e6)
    return LAUNCH_US + bytes_us + DEVICE_HOP_US * device_hops + CROSS_HOP_US * cross_hops


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What the overlap model takes for granted; replaced by a node's own figures where there are some."""

    launch_us: float = LAUNCH_US
    terabytes_per_s: float = TERABYTES_PER_S
    device_hop_us: float = DEVICE_HOP_US
    cross_hop_us: float = CROSS_HOP_US

    @classmethod
    def of(cls, figures: Mapping[str, object]) -> Assumptions:
        """From a node's figures by field name; others are ignored. Raises ValueError for one that is not positive."""
        known = {f.name: figures[f.name] for f in dataclasses.fields(cls) if f.name in figures}
        for name, value in known.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} = {value!r}; needed: a positive number")
        if not known:
            names = ", ".join(f.name for f in dataclasses.fields(cls))
            raise ValueError(f"found none of its fields; needed: at least one of {names}")
        return cls(**known)

    def lines(self) -> list[str]:
        """One sentence an assumption."""
        return [
            f"a launch takes {self.launch_us} us before its first request (ramp)",
            f"memory serves all requests of a rank in the order of their stage, at {self.terabytes_per_s} TB/s",
            f"a device hop takes {self.device_hop_us} us and a cross-GPU hop {self.cross_hop_us} us, from the last "
            "store to the successful load, however many bytes it carries",
            "a stage begins when the hand-off before it resolves, and requests all its bytes at once",
            "a hand-off is published once every byte used before it has arrived; computing takes no time",
            "bytes that are requested several times cross the memory bus once; caches serve the rest for nothing",
            "all workgroups and ranks go at the same pace; mailbox reads and outputs take no bandwidth",
            "a byte whose use was not seen (scalar code, copies) is used in the stage of its request",
        ]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Bytes requested in stage `issue` and used in stage `use`, and when memory serves them (us)."""

    issue: int
    use: int
    nbytes: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Modelled: when each stage begins (us; stage k begins when hop k resolves), what memory does, the end."""

    stages: list[float]
    segments: list[Segment]
    end: float


def guessed(
    hops: int, requests: Iterable[tuple[int, int, int]], late: Mapping[int, int], hit: float
) -> list[tuple[int, int, int]]:
    """`requests` if the weights in `late` (stage of request and use: bytes) had been requested one stage earlier by a
    guess of which they are, a share `hit` of it right: that share moves forward, as many wrong bytes as it lacks are
    requested with it and used by nobody (not before stage `hops`, the last), and the rest stays where it is.
    """
    changed: dict[tuple[int, int], int] = {}
    for issue, use, nbytes in requests:
        changed[issue, use] = changed.get((issue, use), 0) + nbytes
    for stage, nbytes in late.items():
        right = round(nbytes * hit)
        changed[stage, stage] = changed.get((stage, stage), 0) - right
        changed[stage - 1, stage] = changed.get((stage - 1, stage), 0) + right
        changed[stage - 1, hops] = changed.get((stage - 1, hops), 0) + nbytes - right
    return sorted((issue, use, nbytes) for (issue, use), nbytes in changed.items() if nbytes > 0)


def overlap(hops: Sequence[str], requests: Iterable[tuple[int, int, int]], assume: Assumptions) -> Timeline:
    """The overlap model. hops: "device" or "cross" along the longest chain; requests: (issue, use, bytes)."""
    waiting = sorted(requests)
    starts, segments, free = [assume.launch_us], [], assume.launch_us
    for stage in range(len(hops) + 1):
        begin = starts[stage]
        for issue, use, nbytes in [r for r in waiting if r[0] == stage or (stage == len(hops) and r[0] > stage)]:
            start = max(free, begin)
            free = start + nbytes / (assume.terabytes_per_s * 1e6)
            segments.append(Segment(issue, use, nbytes, start, free))
        ready = max([begin, *(s.end for s in segments if s.use <= stage)])
        if stage < len(hops):
            starts.append(ready + (assume.cross_hop_us if hops[stage] == "cross" else assume.device_hop_us))
    return Timeline(starts, segments, max([starts[-1], *(s.end for s in segments)]))
