# SPDX-License-Identifier: Apache-2.0
"""Check mode (`SGLANG_AMD_MONO_CHECK=1`): each launch beside SGLang's own layer on the same inputs, row by row.

This module knows no model. A model's `Comparison` keeps copies of a launch's inputs and outputs and says how they
compare with SGLang's layer; the `Checker` drives it: at once after each launch of an eager step, and after the replay
where a graph was captured, from copies that the graph itself made. The first bound that is left ends the server with a
`CheckFailed` that names layer, launch, row, metric, value and bound. Without the variable nothing here is called.

Metrics of a row against SGLang's: cosine, relative L2 error (of SGLang's norm), largest absolute difference. Bounds
are named `<launch>.<output>.<metric>`, as in the contract's NUMERICS.
"""

from __future__ import annotations

import atexit
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from sgl_amd_mono.common.last_words import LastWords
from sgl_amd_mono.common.refusals import flag

logger = logging.getLogger(__name__)

#: Set to 1: every launch is checked. Unset, empty or 0: nothing is.
VARIABLE = "SGLANG_AMD_MONO_CHECK"

#: bf16 units in the last place within which two router logits count as equal: each side may round either way.
TIE_ULPS = 2

#: Largest share of rows that may be set aside as ties. A single one always may.
TIED_SHARE = 0.01

METRICS = ("cosine", "rel", "max_abs")


def asked() -> bool:
    """Whether `SGLANG_AMD_MONO_CHECK` asks for check mode.

    Raises:
        ValueError: the variable holds neither 1 nor 0 nor nothing.
    """
    return flag(VARIABLE, "check every launch")


# ---- metrics


@dataclass(frozen=True)
class Difference:
    """An output against SGLang's, worst over its rows.

    `cosine`: lowest cosine of a row; `rel`: largest relative L2 error of a row; `max_abs`: largest difference.
    """

    cosine: float
    rel: float
    max_abs: float


@dataclass(frozen=True)
class RowDifferences:
    """An output against SGLang's, row by row: float64 [rows] each."""

    cosine: torch.Tensor
    rel: torch.Tensor
    max_abs: torch.Tensor

    def worst(self) -> Difference:
        """The worst of each metric; no row differs in nothing."""
        if not self.cosine.numel():
            return Difference(1.0, 0.0, 0.0)
        return Difference(float(self.cosine.min()), float(self.rel.max()), float(self.max_abs.max()))


def row_differences(found: torch.Tensor, wanted: torch.Tensor) -> RowDifferences:
    """Compare row by row; both [rows, ...]. A row with a value that is not finite is infinitely wrong."""
    found, wanted = found.double().flatten(1), wanted.double().flatten(1)
    if not found.shape[0]:
        empty = found.new_zeros(0)
        return RowDifferences(empty, empty, empty)
    finite = torch.isfinite(found).all(1) & torch.isfinite(wanted).all(1)
    found, wanted = (torch.where(finite.unsqueeze(1), t, torch.zeros_like(t)) for t in (found, wanted))
    norm_found, norm_wanted = found.norm(dim=1), wanted.norm(dim=1)
    both_zero = (norm_found == 0) & (norm_wanted == 0)
    cosine = (found * wanted).sum(1) / (norm_found * norm_wanted)
    cosine = torch.where(both_zero, torch.ones_like(cosine), cosine).nan_to_num(0.0).clamp(max=1.0)
    error = (found - wanted).norm(dim=1)
    relative = torch.where(error == 0, error, error / norm_wanted)
    largest = (found - wanted).abs().amax(1)
    infinite = torch.full_like(error, float("inf"))
    return RowDifferences(
        torch.where(finite, cosine, torch.full_like(cosine, -1.0)),
        torch.where(finite, relative, infinite),
        torch.where(finite, largest, infinite),
    )


def difference(found: torch.Tensor, wanted: torch.Tensor) -> Difference:
    """`row_differences`, worst over the rows. Rows of no values do not differ."""
    if not found.numel():
        return Difference(1.0, 0.0, 0.0)
    return row_differences(found, wanted).worst()


def within(metric: str, value: float, bound: float) -> bool:
    """Whether a value keeps its bound: a cosine from above, an error from below. NaN keeps none."""
    return value >= bound if metric == "cosine" else value <= bound


def failures(launch: str, outputs: Mapping[str, Difference], bounds: Mapping[str, float]) -> list[str]:
    """The bounds (`<launch>.<output>.<metric>`) that a launch breaks, as text; a missing output breaks all of its."""
    broken = []
    for name, bound in sorted(bounds.items()):
        of_launch, output, metric = name.split(".")
        if of_launch != launch:
            continue
        if output not in outputs:
            broken.append(f"{name}: nothing was compared")
            continue
        value = getattr(outputs[output], metric)
        if not within(metric, value, bound):
            broken.append(f"{name}: {value:.6g}, bound {bound:g}")
    return broken


def bf16_ulp(value: torch.Tensor) -> torch.Tensor:
    """The distance between neighbouring bf16 values at `value` (float32): 2^(exponent - 7)."""
    _, exponent = torch.frexp(value.abs())
    return torch.ldexp(torch.ones_like(value), exponent - 8)


def tied_choices(logits: torch.Tensor, top_k: int) -> list[list[int]]:
    """The sets of experts, best first, that a router may pick where logits (float32 [experts]) tie at the k-th place.

    Experts within `TIE_ULPS` of the k-th largest logit are tied with it; those above are in every set. Empty where the
    pick is the only one.
    """
    values, order = torch.sort(logits, descending=True, stable=True)
    bound = TIE_ULPS * bf16_ulp(values[top_k - 1])
    above = values - values[top_k - 1]
    sure, equal = order[above > bound].tolist(), order[above.abs() <= bound].tolist()
    free = top_k - len(sure)
    return [] if len(equal) == free else [sure + list(some) for some in itertools.combinations(equal, free)]


# ---- what a model brings


@dataclass
class Kept:
    """Copies of one launch's inputs and outputs, and where it ran.

    Attributes:
        launch: "k1" or "k2".
        layer: index of the layer.
        inputs, outputs: name -> tensor; a captured graph refreshes them at each replay.
        view, forward_batch: SGLang's layer and batch.
    """

    launch: str
    layer: int
    inputs: dict[str, torch.Tensor]
    view: Any = field(repr=False)
    forward_batch: Any = field(repr=False)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Compared:
    """A launch beside SGLang's layer.

    Attributes:
        rows: numbers of the compared rows, in the step's order; pad rows and rows set aside are not among them.
        outputs: output -> its differences on these rows.
        set_aside: rows left out, each for a tie that was proven.
        wrong: what no metric says, each as (row, text).
    """

    rows: list[int]
    outputs: dict[str, RowDifferences]
    set_aside: int = 0
    wrong: list[tuple[int, str]] = field(default_factory=list)


class Comparison(Protocol):
    """How a model's launches are kept and compared."""

    def before(self, event: Any) -> list[Kept]:
        """Copy what the launch will read and overwrite, each part that is compared on its own. Device work only: it may
        be captured."""

    def after(self, event: Any, kept: list[Kept]) -> None:
        """Copy what the launch wrote. Device work only."""

    def compare(self, kept: Kept) -> Compared:
        """Run SGLang's layer on the kept inputs, with every state row put back, and compare."""


# ---- the report


class CheckFailed(RuntimeError):
    """A launch left its bounds, or too many rows were set aside. Ends the server."""


@dataclass
class Worst:
    """The worst value of one bound so far and where it was seen."""

    value: float
    layer: int
    row: int
    step: int


class CheckReport:
    """Worst value of every bound, over a step and in all."""

    def __init__(self, bounds: Mapping[str, float]) -> None:
        self.bounds = dict(bounds)
        self.steps = self.launches = self.rows = self.set_aside = 0
        self.worst: dict[str, Worst] = {}
        self.counted: dict[str, int] = {}
        self._step_worst: dict[str, Worst] = {}
        self._step_launches = self._step_set_aside = self._step_rows = 0

    def add(self, launch: str, layer: int, compared: Compared) -> list[str]:
        """Count a launch; returns a line for each bound it breaks, worst row first."""
        self.launches += 1
        self._step_launches += 1
        self.rows += len(compared.rows) + compared.set_aside
        self._step_rows = max(self._step_rows, len(compared.rows) + compared.set_aside)
        self.set_aside += compared.set_aside
        self._step_set_aside += compared.set_aside
        where = f"layer {layer}, launch {launch}"
        broken = [f"{where}, row {row}: {text}" for row, text in compared.wrong]
        for name, bound in sorted(self.bounds.items()):
            of_launch, output, metric = name.split(".")
            if of_launch != launch:
                continue
            if output not in compared.outputs:
                broken.append(f"{where}: {name}: nothing was compared")
                continue
            values = getattr(compared.outputs[output], metric)
            if not values.numel():
                continue
            at = int(values.argmin() if metric == "cosine" else values.argmax())
            seen = Worst(float(values[at]), layer, compared.rows[at], self.steps + 1)
            self.counted[name] = self.counted.get(name, 0) + values.numel()
            for place in (self.worst, self._step_worst):
                if name not in place or _worse(metric, seen.value, place[name].value):
                    place[name] = seen
            if not within(metric, seen.value, bound):
                broken.append(f"{where}, row {seen.row}: {name} = {seen.value:.6g}, bound {bound:g}")
        return broken

    def end_step(self) -> str:
        """Close a step; its summary line."""
        self.steps += 1
        worst = "; ".join(
            f"{name} {w.value:.6g} (layer {w.layer} row {w.row})" for name, w in sorted(self._step_worst.items())
        )
        line = (
            f"check step {self.steps}: {self._step_rows} rows, {self._step_launches} launches within bounds, "
            f"{self._step_set_aside} rows set aside; worst: {worst or 'no row held a request'}"
        )
        self._step_worst = {}
        self._step_launches = self._step_set_aside = self._step_rows = 0
        return line

    def too_many_ties(self) -> str:
        """A line where more than `TIED_SHARE` of the rows, and more than one, were set aside; else empty."""
        if self.set_aside <= 1 or self.set_aside <= TIED_SHARE * self.rows:
            return ""
        share = self.set_aside / self.rows
        return (
            f"{self.set_aside} of {self.rows} rows ({share:.1%}) were set aside as ties, at most {TIED_SHARE:.0%} may"
        )

    def table(self) -> str:
        """Every bound with its worst value, and the counts."""
        lines = [
            f"check mode: {self.steps} steps, {self.launches} launches, {self.rows} rows, "
            f"{self.set_aside} rows set aside as ties",
            f"  {'bound':<22} {'limit':>12} {'worst':>14} {'rows':>8}  where",
        ]
        for name, bound in sorted(self.bounds.items()):
            limit = (">= " if name.endswith(".cosine") else "<= ") + f"{bound:g}"
            seen = self.worst.get(name)
            value, where = ("-", "not seen") if seen is None else (
                f"{seen.value:.8g}", f"step {seen.step} layer {seen.layer} row {seen.row}")  # fmt: skip
            lines.append(f"  {name:<22} {limit:>12} {value:>14} {self.counted.get(name, 0):>8}  {where}")
        return "\n".join(lines)


def _worse(metric: str, value: float, than: float) -> bool:
    return value < than if metric == "cosine" else value > than


# ---- driving it


def stream_is_capturing() -> bool:
    """Whether torch's current stream is being captured into a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Checker:
    """Checks every launch of a step object that offers `before_launch` and `observers`.

    Args:
        comparison: the model's.
        bounds: NUMERICS.
        rank: this rank; rank 0 writes the step lines, every rank its table and its breach.
        capturing: whether a graph is being captured; replaced in tests.
        last_words: holds the table for an end of the process in which `close` is not called.
    """

    def __init__(
        self,
        comparison: Comparison,
        bounds: Mapping[str, float],
        rank: int = 0,
        capturing: Callable[[], bool] = stream_is_capturing,
        last_words: LastWords | None = None,
    ) -> None:
        self.comparison, self.report, self.rank = comparison, CheckReport(bounds), rank
        self.capturing, self._last_words = capturing, last_words
        self.captured: dict[int, list[Kept]] = {}  # graph's batch size -> its launches, in order
        self._recording: list[Kept] | None = None
        self._kept: list[Kept] = []
        self._closed = False

    def attach(self, step: Any) -> None:
        """Check every step of `step` from now on; its table is written when the process or the step ends."""
        run = step.forward

        def forward(plan: Any, *args: Any, **kwargs: Any) -> Any:
            routed = step.steps
            self._recording = [] if self.capturing() else None
            result = run(plan, *args, **kwargs)
            if step.steps == routed:  # passed on to SGLang's forward
                return result
            if self._recording is not None:
                self.captured[plan.key.batch_size] = self._recording
                self._recording = None
            else:
                self._end_step()
            return result

        step.forward = forward  # an instance attribute: a step that is not checked keeps its plain method
        step.before_launch.append(self.before)
        step.observers.append(self.after)
        step.closing.append(self.close)
        atexit.register(self.close)

    def before(self, event: Any) -> None:
        """Before a launch."""
        self._kept = self.comparison.before(event)

    def after(self, event: Any) -> None:
        """After a launch: compare, or in a capture leave that to the replays."""
        kept, self._kept = self._kept, []
        self.comparison.after(event, kept)
        if self._recording is not None:
            self._recording += kept
        else:
            for one in kept:
                self._judge(one)

    def replayed(self, batch_size: int) -> None:
        """After a replay of the graph captured at `batch_size`: compare every launch from the graph's copies."""
        if batch_size not in self.captured:  # a graph of steps that SGLang's own forward runs
            return
        for kept in self.captured[batch_size]:
            self._judge(kept)
        self._end_step()

    def _judge(self, kept: Kept) -> None:
        broken = self.report.add(kept.launch, kept.layer, self.comparison.compare(kept))
        if broken:
            self._fail(broken, self.report.steps + 1)

    def _end_step(self) -> None:
        line = self.report.end_step()
        if self.rank == 0:
            logger.info(line)
        if self._last_words is not None:
            self._last_words.say(self._table())
        if ties := self.report.too_many_ties():
            self._fail([ties], self.report.steps)

    def _fail(self, broken: Sequence[str], step: int) -> None:
        text = f"check mode, rank {self.rank}, step {step}: " + "; ".join(broken)
        logger.error(text)
        self.close()
        raise CheckFailed(text)

    def close(self) -> None:
        """Write the table once."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            logger.info(self._table())
            if self._last_words is not None:
                self._last_words.close()

    def _table(self) -> str:
        return f"rank {self.rank}: {self.report.table()}"
