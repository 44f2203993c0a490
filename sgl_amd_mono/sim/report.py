# SPDX-License-Identifier: Apache-2.0
"""What a launch did: counters of the simulator. None of it is a time."""

from __future__ import annotations

import dataclasses

CLASSES = ("valu", "salu", "vmem", "lds", "smem", "mfma", "convert", "branch", "wait", "barrier", "other")


@dataclasses.dataclass
class LaunchReport:
    """Counters of one launch. Instructions are wave-instructions; failed poll passes are counted apart, not as work.

    line_counts: executions of every instruction, in program order, polls included. streamed_per_workgroup: bytes that
    each workgroup's vector loads read. hops: longest chain of hand-offs between workgroups of one GPU, of hand-offs
    across GPUs, and of both together (in mailbox allocations).
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

    @property
    def wave_instructions(self) -> int:
        """Wave-instructions without failed poll passes."""
        return sum(self.instructions.values())


@dataclasses.dataclass
class Report:
    """Counters of the launches that ran together. Byte counters are per (rank, allocation name)."""

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
