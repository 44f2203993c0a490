# SPDX-License-Identifier: Apache-2.0
"""Checks on emitted ISA text: scopes of accesses, waits before flags, poll loops, faults of `stop` builds.

Each check returns the offending lines, so that a test can show both an empty list on the real text and a finding on a
mutilated one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LABEL = re.compile(r"^(\.?[A-Za-z_][\w.$]*):")
_INSTRUCTION = re.compile(r"^((?:s|v|ds|global|buffer|flat|scratch)_[a-z0-9_]+)\b")
_POLICY = re.compile(r"\b(sc0|sc1|nt)\b")


@dataclass(frozen=True)
class Line:
    """One instruction: its text, its number among the instructions, and the label of its block."""

    number: int
    text: str
    label: str

    @property
    def mnemonic(self) -> str:
        """First word."""
        return self.text.split()[0]

    @property
    def policy(self) -> str:
        """Cache policy bits in the order sc0 sc1 nt."""
        bits = set(_POLICY.findall(self.text))
        return " ".join(b for b in ("sc0", "sc1", "nt") if b in bits)


def lines_of(isa: str) -> list[Line]:
    """All instructions in order; inline assembly included."""
    found, label = [], ""
    for raw in isa.splitlines():
        text = raw.split(";")[0].strip()
        mark = _LABEL.match(text)
        if mark:
            label = mark.group(1)
        elif _INSTRUCTION.match(text):
            found.append(Line(len(found), text, label))
    return found


def accesses(isa: str, pattern: str) -> list[Line]:
    """Instructions whose text matches ``pattern`` from its start."""
    return [line for line in lines_of(isa) if re.match(pattern, line.text)]


def is_scoped_store(line: Line) -> bool:
    """A store that another workgroup or GPU may look at while the kernel runs."""
    return "_store_" in line.mnemonic and "sc1" in line.policy


def flags_without_drain(isa: str, data: str = r"(buffer|global)_store_dwordx4") -> list[Line]:
    """Flag stores (8 bytes, scoped) that follow scoped ``data`` stores without ``vmcnt(0)`` and then ``s_barrier``
    in between, in text order."""
    waiting: list[str] = []
    bad = []
    for line in lines_of(isa):
        if re.match(data, line.text) and is_scoped_store(line):
            waiting = ["vmcnt", "barrier"]
        elif line.mnemonic == "s_waitcnt" and "vmcnt(0)" in line.text and waiting[:1] == ["vmcnt"]:
            waiting = waiting[1:]
        elif line.mnemonic == "s_barrier" and waiting[:1] == ["barrier"]:
            waiting = []
        elif line.mnemonic == "global_store_dwordx2" and is_scoped_store(line) and waiting:
            bad.append(line)
    return bad


def loops(isa: str) -> list[list[Line]]:
    """Bodies of the loops: from the target of a backward branch to the branch; ranges that overlap are one loop."""
    first_of: dict[str, int] = {}
    ranges = []
    lines = lines_of(isa)
    for line in lines:
        first_of.setdefault(line.label, line.number)
    for line in lines:
        target = re.match(r"s_c?branch\S*\s+(\S+)", line.text)
        if target and first_of.get(target.group(1), len(lines)) <= line.number:
            ranges.append((first_of[target.group(1)], line.number + 1))
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return [lines[start:end] for start, end in merged]


def poll_loops(isa: str) -> list[list[Line]]:
    """Loops that re-load an 8-byte scoped pair."""

    def is_pair_load(line: Line) -> bool:
        return line.mnemonic == "global_load_dwordx2" and "sc1" in line.policy

    return [body for body in loops(isa) if any(is_pair_load(line) for line in body)]


def unbounded_polls(isa: str) -> list[list[Line]]:
    """Poll loops that look neither at the clock nor at the error word, or do not sleep."""
    bad = []
    for body in poll_loops(isa):
        texts = [line.text for line in body]
        sleeps = any(t.startswith("s_sleep") for t in texts)
        clock = any(t.startswith("s_memrealtime") for t in texts)
        error = any(re.match(r"global_load_dword v\d+,.* sc0 sc1", t) for t in texts)
        if not (sleeps and clock and error):
            bad.append(body)
    return bad


def tails_of_leaving(isa: str) -> list[list[Line]]:
    """The instructions before each ``s_endpgm`` but the last and the warm-up's, back to the block's start."""
    lines = lines_of(isa)
    ends = [line for line in lines if line.mnemonic == "s_endpgm"]
    return [[x for x in lines[: end.number] if x.label == end.label][-12:] for end in ends[1:-1]]


def leaves_without_fault(isa: str) -> list[list[Line]]:
    """Leaving paths (see ``tails_of_leaving``) that do not store to address 0 and wait for it."""
    bad = []
    for tail in tails_of_leaving(isa):
        texts = [line.text for line in tail]
        zero = [i for i, t in enumerate(texts) if re.match(r"v_mov_b64_e32 v\[\d+:\d+\], 0$", t)]
        faults = any(
            re.match(r"global_store_dword v", t) and "vmcnt(0)" in " ".join(texts[i + 1 :])
            for start in zero
            for i, t in enumerate(texts)
            if i > start
        )
        if not faults:
            bad.append(tail)
    return bad
