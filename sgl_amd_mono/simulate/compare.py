# SPDX-License-Identifier: Apache-2.0
"""What is compared: each launch with SGLang's own layer on the same inputs, and the logits of the two arms.

``LaunchRecorder`` sits on the step's observers. Before K1 it runs SGLang's input norm and GDN layer up to out_proj on
the launch's inputs, keeps what they return and write, and puts the states back; after K2 it runs SGLang's projection,
post norm and MoE block. Pad rows are left out of the comparison. A row whose k-th and (k+1)-th router logits lie
within ``TIE_ULPS`` of each other may take either expert: it is compared with both picks, and counted.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

TIE_ULPS = 2
"""bf16 units in the last place within which two router logits count as equal."""

SIMULATED_BOUNDS = {
    "k1.core.rel": 5e-3,
    "k1.conv.rel": 2e-3,
    "k1.state.rel": 2e-3,
    "k2.out.rel": 4e-2,
    "k2.res_out.rel": 2e-3,
}
"""Bounds beside the spec's NUMERICS, which leave room for AITER's kernels on a GPU. Here SGLang's side rounds where the
launches round, so what is left is a bf16 unit here and there (half a unit is 2e-3 of a value) and, in K2's output, an
MXFP4 code that such a unit flips (about 1e-2 of a row each)."""

NOISE_MULTIPLE = 4.0
"""Logits of the two arms may differ by so many times the noise of re-ordered float32 sums."""


@dataclass(frozen=True)
class Difference:
    """A launch's output against SGLang's, worst over the rows that hold a request.

    ``cosine``: lowest cosine of a row; ``rel``: largest relative L2 error of a row; ``max_abs``: largest difference.
    """

    cosine: float
    rel: float
    max_abs: float


def difference(found: torch.Tensor, wanted: torch.Tensor) -> Difference:
    """Compare row by row; both ``[rows, ...]``. A value that is not finite counts as infinitely wrong."""
    found, wanted = found.double().flatten(1), wanted.double().flatten(1)
    if not found.numel():
        return Difference(1.0, 0.0, 0.0)
    if not bool(torch.isfinite(found).all() and torch.isfinite(wanted).all()):
        return Difference(-1.0, float("inf"), float("inf"))
    norm_found, norm_wanted = found.norm(dim=1), wanted.norm(dim=1)
    both_zero = (norm_found == 0) & (norm_wanted == 0)
    cosine = (found * wanted).sum(1) / (norm_found * norm_wanted)
    cosine = torch.where(both_zero, torch.ones_like(cosine), cosine).nan_to_num(0.0).clamp(max=1.0)
    error = (found - wanted).norm(dim=1)
    relative = torch.where(error == 0, error, error / norm_wanted)
    return Difference(float(cosine.min()), float(relative.max()), float((found - wanted).abs().max()))


@dataclass
class LaunchRecord:
    """One rank's launch: where it ran, how it compares, and what the simulator says of it.

    ``digest`` is one of K2's outputs, pad rows included, which must be bit for bit the same on all ranks.
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
    failures: list[str] = field(default_factory=list)
    simulated: dict[str, Any] = field(default_factory=dict)


def failures(kind: str, outputs: dict[str, Difference], bounds: dict[str, float]) -> list[str]:
    """The bounds (``<launch>.<output>.<metric>``) that a launch breaks, as text; a missing output breaks all of its."""
    broken = []
    for name, bound in sorted(bounds.items()):
        launch, output, metric = name.split(".")
        if launch != kind:
            continue
        if output not in outputs:
            broken.append(f"{name}: nothing was compared")
            continue
        value = getattr(outputs[output], metric)
        within = value >= bound if metric == "cosine" else value <= bound
        if not within:
            broken.append(f"{name}: {value:.6g}, bound {bound:g}")
    return broken


class LaunchRecorder:
    """Compares every launch of a step with SGLang's layer. Whoever drives the model sets ``case`` and ``step``."""

    def __init__(self, step: Any, numerics: dict[str, float], rank: int = 0) -> None:
        self.bounds = {**SIMULATED_BOUNDS, **numerics}
        for name, bound in SIMULATED_BOUNDS.items():  # the stricter of both
            self.bounds[name] = min(bound, numerics.get(name, bound))
        self.records: list[LaunchRecord] = []
        self.rank = rank
        self.case = self.step = 0
        self._stock: dict[str, torch.Tensor] = {}
        self._runtime = step.runtime
        step.before_launch.append(self._before)
        step.observers.append(self._after)

    def _before(self, event: Any) -> None:
        _reports(self._runtime).clear()
        if event.kind == "k1":
            self._stock = stock_front(event)
        else:
            # the launch may overwrite nothing that K2's comparison reads but its own outputs
            self._stock = {}

    def _after(self, event: Any) -> None:
        index = event.args["state_index" if event.kind == "k1" else "row_index"][: event.width]
        real = index > 0
        record = LaunchRecord(self.case, self.step, event.kind, event.layer, event.width, int(real.sum()), self.rank)
        if event.kind == "k1":
            found = {
                "core": event.args["core"][real],
                "res_out": event.args["residual_out"][real],
                "conv": event.args["conv_state"][index[real].long()],
                "state": event.args["ssm_state"][index[real].long()],
            }
            record.outputs = {name: difference(value, self._stock[name]) for name, value in found.items()}
            record.failures = failures("k1", record.outputs, self.bounds)
            pads = event.args["core"][~real]
            if pads.numel() and bool((pads != 0).any()):
                record.failures.append("k1.core of a pad row is not zero")
        else:
            record.digest = digest(event.args["out"], event.args["residual_out"])
            found_out, found_residual = event.args["out"][real], event.args["residual_out"][real]
            stock = StockTail(event, real)
            out = stock.out()
            record.outputs = {
                "out": difference(found_out, out),
                "res_out": difference(found_residual, stock.residual),
            }
            record.failures = failures("k2", record.outputs, self.bounds)
            if record.failures and bool(stock.tied.any()):
                # both picks of a provable tie are right: take, row by row, the nearer
                other = stock.out(swap=stock.tied)
                nearer = (found_out - other).double().norm(dim=1) < (found_out - out).double().norm(dim=1)
                record.ties = int((nearer & stock.tied).sum())
                record.outputs["out"] = difference(found_out, torch.where(nearer.unsqueeze(1), other, out))
                record.failures = failures("k2", record.outputs, self.bounds)
        record.simulated = simulated(_reports(self._runtime))
        self.records.append(record)


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


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` inside; modules keep their registered children."""
    before = getattr(owner, name)
    registered = name in getattr(owner, "_modules", {})
    if registered:
        del owner._modules[name]
    owner.__dict__[name] = value
    try:
        yield
    finally:
        del owner.__dict__[name]
        if registered:
            owner._modules[name] = before


def stock_front(event: Any) -> dict[str, torch.Tensor]:
    """SGLang's input norm and GDN layer up to out_proj on K1's inputs, for the rows that hold a request.

    Returns ``core``, ``res_out`` and the rows of ``conv`` and ``state`` after the step; the pools are as before.
    """
    args, width = event.args, event.width
    index = args["state_index"][:width]
    real = index > 0
    slots = index.long().unique()
    kept = args["conv_state"][slots].clone(), args["ssm_state"][slots].clone()
    layer = event.view.module
    hidden = args["hidden"][:width].clone()
    if isinstance(args["residual"], torch.Tensor):
        normed, residual = layer.input_layernorm(hidden, args["residual"][:width].clone())
    else:
        normed, residual = layer.input_layernorm(hidden), hidden
    with _replaced(layer.linear_attn, "out_proj", lambda core: (core, None)):
        core = layer.linear_attn(normed, event.forward_batch)
    rows = index[real].long()
    out = {
        "core": core[real].clone(),
        "res_out": residual[real].clone(),
        "conv": args["conv_state"][rows].clone(),
        "state": args["ssm_state"][rows].clone(),
    }
    args["conv_state"][slots], args["ssm_state"][slots] = kept
    return out


class StockTail:
    """SGLang's output projection, post norm and MoE block on K2's inputs; ``real`` selects the rows with a request.

    ``residual`` is what the norm leaves; ``tied`` says which of those rows may pick either of two experts.
    """

    def __init__(self, event: Any, real: torch.Tensor) -> None:
        from sglang.srt.distributed import tensor_model_parallel_all_reduce

        self._all_reduce = tensor_model_parallel_all_reduce
        self._event, self._real = event, real
        layer = event.view.module
        projection = layer.linear_attn.out_proj if event.view.kind == "gdn" else layer.o_proj
        # pad rows' core may hold anything, and SGLang's kernels would carry a NaN into shared sums
        core = event.args["core"][: event.width].clone()
        core[~real] = 0
        partial, _ = projection(core)
        attention = self._all_reduce(partial)
        self._x, residual = layer.post_attention_layernorm(attention, event.args["residual"][: event.width].clone())
        self.residual = residual[real].clone()
        self._logits = event.view.moe.block.gate(self._x)[0].float()
        top = self._logits.topk(event.view.moe.top_k + 1, dim=-1).values[real]
        gap = top[:, -2] - top[:, -1]
        self.tied = gap <= TIE_ULPS * bf16_ulp(top[:, -2])

    def out(self, swap: torch.Tensor | None = None) -> torch.Tensor:
        """The MoE block's all-reduced output of the real rows; ``swap`` rows take their k+1-th expert for the k-th."""
        block = self._event.view.moe.block
        if swap is None:
            partial = block(self._x.clone(), self._event.forward_batch)
        else:
            rows = torch.zeros_like(self._real)
            rows[self._real] = swap
            with _replaced(block, "topk", self._swapped_topk(block.topk, rows)):
                partial = block(self._x.clone(), self._event.forward_batch)
        return self._all_reduce(partial)[self._real].clone()

    def _swapped_topk(self, topk: Any, rows: torch.Tensor) -> Any:
        def select(hidden_states: torch.Tensor, router_logits: torch.Tensor) -> Any:
            picked = topk(hidden_states, router_logits)
            logits = router_logits.float()
            best = logits.topk(picked.topk_ids.shape[1] + 1, dim=-1).indices
            ids = torch.where(rows.unsqueeze(1), torch.cat([best[:, :-2], best[:, -1:]], dim=1), picked.topk_ids.long())
            weights = torch.softmax(logits.gather(1, ids), dim=-1)
            return picked._replace(topk_ids=ids.to(picked.topk_ids.dtype), topk_weights=weights)

        return select


def bf16_ulp(value: torch.Tensor) -> torch.Tensor:
    """The distance between neighbouring bf16 values at ``value`` (float32): 2^(exponent - 7)."""
    _, exponent = torch.frexp(value.abs())
    return torch.ldexp(torch.ones_like(value), exponent - 8)


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
