# SPDX-License-Identifier: Apache-2.0
"""What a launch did: counters of the simulator. None of it is a time."""

from __future__ import annotations

import dataclasses

CLASSES = ("valu", "salu", "vmem", "lds", "smem", "mfma", "convert", "branch", "wait", "barrier", "other")


@dataclasses.dataclass(frozen=True)
class Traced:
    """Bytes that one workgroup read, wrote or used in one stage of a launch (`Machine(trace=True)`).

    A stage is the number of hand-offs that lie behind the wave. issue: stage of the request; use: stage of the first
    vector or matrix instruction that read their registers (kind "use"; readonly memory only), else issue.
    region: of the buffer, "" where it has none. policy: of the access, "" for a use.
    """

    workgroup: int
    buffer: str
    region: str
    kind: str
    policy: str
    issue: int
    use: int
    nbytes: int


@dataclasses.dataclass
class LaunchReport:
    """Counters of one launch. Instructions are wave-instructions; failed poll passes are counted apart, not as work.

    line_counts: executions of every instruction, in program order, polls included. streamed_per_workgroup: bytes that
    each workgroup's vector loads read. hops: longest chain of hand-offs between workgroups of one GPU, of hand-offs
    across GPUs, and of both together (in mailbox allocations). trace: None unless the machine traces.
    """

    name: str
    rank: int
    workgroups: int
    waves_per_workgroup: int
    instructions: dict[str, int]
    poll_instructions: int
    barriers: int
    line_counts: list[int]
    streamed_per_workgroup: list[int]
    instructions_per_workgroup: list[int]
    longest_device_hops: int
    longest_cross_hops: int
    longest_hops: int
    hop_chain: list[tuple[str, str]]
    trace: list[Traced] | None = None

    @property
    def wave_instructions(self) -> int:
        """Wave-instructions without failed poll passes."""
        return sum(self.instructions.values())


@dataclasses.dataclass
class Report:
    """Counters of the launches that ran together. Byte counters are per (rank, allocation name).

    shared: the allocations whose bytes other ranks map too (peer memory).
    """

    launches: list[LaunchReport]
    bytes_read: dict[tuple[int, str], dict[str, int]]
    bytes_written: dict[tuple[int, str], dict[str, int]]
    unique_bytes: dict[tuple[int, str], int]
    polls: dict[tuple[int, str], int]
    clock_start: int
    clock_end: int
    clock_jumps: int
    stalled: int
    executed: int
    shared: frozenset[tuple[int, str]] = frozenset()

    @property
    def wave_instructions(self) -> int:
        """Wave-instructions of all launches, without failed poll passes."""
        return sum(launch.wave_instructions for launch in self.launches)

    @property
    def longest_device_hops(self) -> int:
        """Longest chain of hand-offs inside a GPU over all launches."""
        return max((launch.longest_device_hops for launch in self.launches), default=0)

    @property
    def longest_cross_hops(self) -> int:
        """Longest chain of hand-offs across GPUs over all launches."""
        return max((launch.longest_cross_hops for launch in self.launches), default=0)

    @property
    def hop_chain(self) -> list[tuple[str, str]]:
        """(region, "device" or "cross") along the longest chain of both kinds together."""
        return max((launch.hop_chain for launch in self.launches), key=len, default=[])
