# SPDX-License-Identifier: Apache-2.0
"""What is compared: each launch with SGLang's own layer on the same inputs, and the logits of the two arms.

``LaunchRecorder`` sits on the step's observers. Before K1 it runs SGLang's input norm and GDN layer up to out_proj on
the launch's inputs, keeps what they return and write, and puts the states back; after K2 it runs SGLang's projection,
post norm and MoE block. Pad rows are left out of the comparison. A row whose router logits tie at the k-th place
(``common.check.tied_choices``) may take any of the tied experts: it is compared with the nearest choice, and counted.
The stock side is check mode's, ``qwen38_a95b_mxfp4.check``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch

from sgl_amd_mono.common.check import Difference, Kept, difference, failures, row_differences
from sgl_amd_mono.qwen38_a95b_mxfp4.check import StockTail, keep_after, keep_before, stock_front

SIMULATED_BOUNDS = {
    "k1.core.rel": 5e-3,
    "k1.conv.rel": 2e-3,
    "k1.state.rel": 2e-3,
    "k2.res_out.rel": 2e-3,
}
"""Bounds beside the spec's NUMERICS, which leave room for AITER's kernels on a GPU. Here SGLang's side rounds where the
launches round, so what is left is a bf16 unit here and there (half a unit is 2e-3 of a value). Noise floors, the worst
row under other orders of the float32 sums (test/helpers/noise.py): core 1.4e-3, conv 1.9e-4, state 1.1e-4, res_out
1e-4; the bounds are 3.5, 10, 18 and 20 times that."""

TYPICAL_OUT = {"torch": 5e-3, "amd": 1e-2}
"""Largest relative error of K2's output in the run's median row, by what AITER's fused MoE runs as. Single rows have
NUMERICS alone: where a bf16 unit flips an MXFP4 code, each flip moves the row by about a hundredth. 5e-3 is twice the
noise floor of a worst row, 2.5e-3 (a median row has none). AMD's code object
rounds each pick's output to bf16 and adds in bf16, K2 in float32: that alone is 3e-3 to 5e-3 of a row of four picks."""

TYPICAL_STATE = 1e-5
"""Largest relative error of K1's float32 state in the median row of each layer. A bf16 unit of a projection, which the
sums' order may flip, moves a single row's by up to 1e-3; without one the state agrees to the accuracy of float32 (noise
floor 3e-8, so this is 300 times it), and a rounding that one side does and the other does not (of beta: 1e-3) shows in
every row."""

NOISE_MULTIPLE = 4.0
"""Logits of the two arms may differ by so many times the noise of re-ordered float32 sums."""


@dataclass
class LaunchRecord:
    """One rank's launch: where it ran, how it compares, and what the simulator says of it.

    ``digest`` is one of K2's outputs, pad rows included, which must be bit for bit the same on all ranks. ``ties``
    counts rows of K2 that are within bounds only by another choice of tied experts, ``row_errors`` are the relative L2
    errors of K2's output, or of the state that K1 leaves, a row each.
    """

    case: int
    step: int
    kind: str
    layer: int
    width: int
    rows: int
    rank: int = 0
    digest: str = ""
    outputs: dict[str, Difference] = field(default_factory=dict)
    ties: int = 0
    row_errors: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    simulated: dict[str, Any] = field(default_factory=dict)


class LaunchRecorder:
    """Compares every launch of a step with SGLang's layer. Whoever drives the model sets ``case`` and ``step``."""

    def __init__(self, step: Any, numerics: dict[str, float], rank: int = 0) -> None:
        self.bounds = {**SIMULATED_BOUNDS, **numerics}
        for name, bound in SIMULATED_BOUNDS.items():  # the stricter of both
            self.bounds[name] = min(bound, numerics.get(name, bound))
        self.records: list[LaunchRecord] = []
        self.rank = rank
        self.case = self.step = 0
        self._kept: list[Kept] = []
        self._runtime = step.runtime
        step.before_launch.append(self._before)
        step.observers.append(self._after)

    def _before(self, event: Any) -> None:
        _reports(self._runtime).clear()
        self._kept = keep_before(event)

    def _after(self, event: Any) -> None:
        kept, self._kept = self._kept, []
        keep_after(event, kept)
        figures = simulated(_reports(self._runtime))
        for half in kept:
            record = self._record(half, event.width)
            record.simulated, figures = figures, {}  # a launch of two halves is counted once
            self.records.append(record)

    def _record(self, kept: Kept, width: int) -> LaunchRecord:
        real = kept.inputs["index"] > 0
        record = LaunchRecord(self.case, self.step, kept.launch, kept.layer, width, int(real.sum()), self.rank)
        found = {name: value[real] for name, value in kept.outputs.items()}
        if kept.launch == "k1":
            stock = stock_front(kept)
            record.outputs = {name: difference(value, stock[name][real]) for name, value in found.items()}
            record.failures = failures("k1", record.outputs, self.bounds)
            record.row_errors = row_differences(found["state"], stock["state"][real]).rel.tolist()
            pads = kept.outputs["core"][~real]
            if pads.numel() and bool((pads != 0).any()):
                record.failures.append("k1.core of a pad row is not zero")
        else:
            record.digest = digest(kept.outputs["out"], kept.outputs["res_out"])
            tail = StockTail(kept)
            nearest, other = tail.nearest(kept.outputs["out"])
            usual = [
                difference(*pair) for pair in zip(found["out"].unsqueeze(1), tail.out()[real].unsqueeze(1), strict=True)
            ]
            out_bounds = {name: bound for name, bound in self.bounds.items() if name.startswith("k2.out.")}
            outside = [bool(failures("k2", {"out": row}, out_bounds)) for row in usual]
            record.ties = sum(on and row for on, row in zip(other[real].tolist(), outside, strict=True))
            record.row_errors = row_differences(found["out"], nearest[real]).rel.tolist()
            record.outputs = {
                "out": difference(found["out"], nearest[real]),
                "res_out": difference(found["res_out"], tail.residual[real]),
            }
            record.failures = failures("k2", record.outputs, self.bounds)
        return record


def digest(*tensors: torch.Tensor) -> str:
    """A hash of the tensors' bytes."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]


def _reports(runtime: Any) -> list[Any]:
    """The simulator's reports since they were last cleared; only the rank that simulates has them."""
    return getattr(runtime, "reports", [])


def simulated(reports: list[Any]) -> dict[str, Any]:
    """The figures of one launch (bytes and instructions of rank 0, hand-offs over all ranks) as plain values."""
    if not reports:
        return {}
    report = reports[-1].report
    own = report.launches[0]

    def by_allocation(counted: dict[tuple[int, str], dict[str, int]]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for (rank, name), by_policy in counted.items():
            if rank == own.rank:
                sizes[name] = sizes.get(name, 0) + sum(by_policy.values())
        return sizes

    return {
        "wave_instructions": own.wave_instructions,
        "bytes_read": by_allocation(report.bytes_read),
        "bytes_written": by_allocation(report.bytes_written),
        "device_hops": report.longest_device_hops,
        "cross_hops": report.longest_cross_hops,
        "chain": [list(hop) for hop in report.hop_chain],
        "polls": {name: count for (rank, name), count in report.polls.items() if rank == own.rank},
    }


@dataclass(frozen=True)
class LogitVerdict:
    """The logits of two arms at one step against the noise of re-ordered sums.

    ``largest`` and ``noise`` are the largest differences; ``rms`` and ``noise_rms`` the root mean squares. ``decided``
    counts the rows whose two best tokens are further apart than the allowance, ``flipped`` those of them whose greedy
    token differs.
    """

    largest: float
    noise: float
    rms: float
    noise_rms: float
    rows: int
    decided: int
    flipped: int

    @property
    def ok(self) -> bool:
        within = self.largest <= NOISE_MULTIPLE * self.noise and self.rms <= NOISE_MULTIPLE * self.noise_rms
        return within and self.flipped == 0


def judge_logits(off: list[torch.Tensor], on: list[torch.Tensor], reordered: list[list[torch.Tensor]]) -> LogitVerdict:
    """Compare the arms over all steps. ``off`` and ``on``: logits ``[rows, vocab]`` a step; ``reordered``: the off arm
    again, once for each order of sums, fed the same tokens."""
    if not reordered:
        raise ValueError("the noise needs at least one run with re-ordered sums")

    def spread(one: list[torch.Tensor], other: list[torch.Tensor]) -> tuple[float, float]:
        gaps = torch.cat([(a - b).abs().flatten() for a, b in zip(one, other, strict=True)])
        return float(gaps.max()), float(gaps.double().square().mean().sqrt())

    def finite(value: float) -> float:
        return value if value == value else float("inf")

    largest, rms = map(finite, spread(on, off))
    noises = [spread(run, off) for run in reordered]
    noise, noise_rms = max(n for n, _ in noises), max(r for _, r in noises)
    rows = decided = flipped = 0
    for a, b in zip(off, on, strict=True):
        top = a.topk(2, dim=-1).values
        clear = top[:, 0] - top[:, 1] > NOISE_MULTIPLE * noise
        differs = a.argmax(-1) != b.argmax(-1)
        rows, decided, flipped = rows + len(a), decided + int(clear.sum()), flipped + int((clear & differs).sum())
    return LogitVerdict(largest, noise, rms, noise_rms, rows, decided, flipped)
