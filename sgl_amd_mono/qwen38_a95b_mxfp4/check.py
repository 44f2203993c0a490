# SPDX-License-Identifier: Apache-2.0
"""How K1 and K2 are compared with SGLang's own layer: the model's part of check mode and of `simulate`.

* K1 against SGLang's input norm and GDN layer up to out_proj, on the same rows and state rows. SGLang has no seam
  before out_proj, so it is replaced by the identity for the duration of the call; the prefix cache's copies are off.
* K2 against SGLang's out_proj / o_proj, all-reduce, post norm, MoE block and all-reduce.

State rows are put back, and `forward_batch.residual_stream` is as before. A row outside K2's bounds whose router logits
tie at the k-th place (`common.check.tied_choices`) is set aside if it agrees with another choice: all are right.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sgl_amd_mono.common import state
from sgl_amd_mono.common.check import Checker, Compared, Kept, row_differences, tied_choices, within
from sgl_amd_mono.common.last_words import LastWords
from sgl_amd_mono.common.substitute import replaced
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn_naive import core_of_parts

#: Choices of tied experts that are tried for one launch.
MOST_CHOICES = 20

#: Launch -> argument with the rows' state indices.
INDEX = {"k1": "state_index", "k2": "row_index"}


def kept_before(event: Any) -> Kept:
    """Copies of what a launch reads, and of the state rows that it will overwrite."""
    args, width = event.args, event.width
    index = args[INDEX[event.kind]]
    drafts = _drafts(args, width)
    requests = width if drafts is None else width // drafts[0].shape[1]
    inputs = {"index": index[:requests].clone(), "residual": _rows(args["residual"], width)}
    if event.kind == "k1":
        inputs["hidden"] = _rows(args["hidden"], width)
        inputs |= _state_rows(args["conv_state"], args["ssm_state"], inputs["index"])
        inputs |= {"conv_pool": args["conv_state"], "ssm_pool": args["ssm_state"], "drafts": drafts}
    else:
        inputs["core"] = _core(event)
    return Kept(event.kind, event.layer, inputs, event.view, event.forward_batch)


def kept_after(event: Any, kept: Kept) -> None:
    """Copies of what the launch wrote."""
    args, width = event.args, event.width
    kept.outputs = {"res_out": _rows(args["residual_out"], width)}
    if event.kind == "k1":
        kept.outputs["core"] = _core(event)
        kept.outputs |= _states_after(
            args["conv_state"], args["ssm_state"], kept.inputs["index"], kept.inputs["drafts"]
        )
    else:
        kept.outputs["out"] = _rows(args["out"], width)


def keep_before(event: Any) -> list[Kept]:
    """`kept_before` of each half of a launch: K2 and the next K1 in one are two, any other is one."""
    if event.kind != "k2k1":
        return [kept_before(event)]
    tail, front = event.halves()
    args = front.args | {"hidden": None, "residual": None}  # not written yet
    return [kept_before(tail), kept_before(dataclasses.replace(front, args=args))]


def keep_after(event: Any, kept: list[Kept]) -> None:
    """`kept_after` of each half; what K1 read is what K2 wrote."""
    halves = event.halves() if event.kind == "k2k1" else (event,)
    for half, own in zip(halves, kept, strict=True):
        kept_after(half, own)
    if len(kept) > 1:
        tail, front = kept
        front.inputs |= {"hidden": tail.outputs["out"], "residual": tail.outputs["res_out"]}


def _core(event: Any) -> torch.Tensor:
    """The gated core of a step: a copy, or what K2 forms of the parts that a one-hop K1 leaves."""
    args, width, view = event.args, event.width, event.view
    parted = args["gates"] if event.kind == "k2" else isinstance(args["core_z"], torch.Tensor)
    if not parted:
        return _rows(args["core"], width)
    o, z, squares = (args[name][:width] for name in ("core", "core_z", "core_squares"))
    return core_of_parts(o, z, squares, view.gated_norm, view.gated_norm_eps)


def _rows(value: Any, width: int) -> Any:
    """A copy of a step's rows; None for the residual that a first layer has not."""
    return value[:width].clone() if isinstance(value, torch.Tensor) else None


def _slots(index: torch.Tensor) -> torch.Tensor:
    """Pool rows of the state indices; pad rows (negative ones too) stand at the reserved slot 0."""
    return index.clamp(min=0).long()


def _drafts(args: Mapping[str, Any], width: int) -> tuple[DraftRows, DraftRows] | None:
    """A verify step's draft states of its requests, live, [requests, tokens, ...]: (conv, SSM); None in other steps."""
    if not isinstance(args.get("draft_index"), torch.Tensor):
        return None
    conv, ssm = args["draft_conv"], args["draft_ssm"]
    places = args["draft_index"][: width // conv.shape[1]].long()
    return DraftRows(conv, places), DraftRows(ssm, places)


class DraftRows:
    """The requests' rows of a tensor [places, tokens, ...]: read as a copy, written in place."""

    def __init__(self, tensor: torch.Tensor, places: torch.Tensor) -> None:
        self._tensor, self._places = tensor, places
        self.shape = (len(places), *tensor.shape[1:])

    def read(self) -> torch.Tensor:
        return self._tensor[self._places]

    def write(self, value: torch.Tensor) -> None:
        self._tensor[self._places] = value


def _states_after(
    conv: torch.Tensor, ssm: torch.Tensor, index: torch.Tensor, drafts: tuple[DraftRows, DraftRows] | None
) -> dict[str, torch.Tensor]:
    """Copies of conv and SSM state behind each row of the step."""
    if drafts is None:
        return _state_rows(conv, ssm, index)
    return {name: rows.read().flatten(0, 1) for name, rows in zip(("conv", "state"), drafts, strict=True)}


def _state_rows(conv: torch.Tensor, ssm: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
    slots = _slots(index)
    return {"conv": conv[slots], "state": ssm[slots]}


@contextlib.contextmanager
def untouched(forward_batch: Any) -> Iterator[None]:
    """SGLang's layers may run inside without leaving a trace in the batch: no residual stream, no state tracking."""
    stream, mask = forward_batch.residual_stream, forward_batch.mamba_track_mask
    forward_batch.mamba_track_mask = None
    try:
        yield
    finally:
        forward_batch.residual_stream, forward_batch.mamba_track_mask = stream, mask


@torch.no_grad()
def stock_front(kept: Kept) -> dict[str, torch.Tensor]:
    """SGLang's input norm and GDN layer up to out_proj on K1's kept inputs.

    Returns:
        `core`, `res_out`, and `conv` and `state` behind each row, all rows of the step. The pools, and in a verify step
        the draft states, are as before the call.
    """
    inputs, layer = kept.inputs, kept.view.module
    conv, ssm, slots = inputs["conv_pool"], inputs["ssm_pool"], _slots(inputs["index"])
    now, drafts = (conv[slots], ssm[slots]), inputs["drafts"] or ()
    drafted = [rows.read() for rows in drafts]
    conv[slots], ssm[slots] = inputs["conv"], inputs["state"]
    try:
        hidden = inputs["hidden"].clone()
        if inputs["residual"] is None:
            normed, residual = layer.input_layernorm(hidden), hidden
        else:
            normed, residual = layer.input_layernorm(hidden, inputs["residual"].clone())
        with untouched(kept.forward_batch):
            core = state.gdn_core(kept.view, normed, kept.forward_batch)
        after = _states_after(conv, ssm, inputs["index"], inputs["drafts"])
        return {"core": core.clone(), "res_out": residual.clone()} | after
    finally:
        conv[slots], ssm[slots] = now
        for rows, value in zip(drafts, drafted, strict=True):
            rows.write(value)


class StockTail:
    """SGLang's output projection, post norm and MoE block on K2's kept inputs; all rows of the step.

    Attributes:
        residual: what the norm leaves, bf16 [rows, H].
        choices: how many sets of experts the row with the most ties may pick from; 0 where no row has a tie.
        tied: bool [rows], the rows that have a choice.
    """

    @torch.no_grad()
    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        real = kept.inputs["index"] > 0
        layer = kept.view.module
        projection = layer.linear_attn.out_proj if kept.view.kind == "gdn" else layer.o_proj
        # pad rows' core may hold anything, and SGLang's kernels would carry a NaN into shared sums
        core = torch.where(real.unsqueeze(1), kept.inputs["core"], torch.zeros_like(kept.inputs["core"]))
        partial, _ = projection(core)
        attention = state.all_reduce(partial)
        self._x, self.residual = layer.post_attention_layernorm(attention, kept.inputs["residual"].clone())
        self.residual = self.residual.clone()
        block = kept.view.moe.block
        logits = block.gate(self._x)[0].float()
        self._picks = [tied_choices(row, kept.view.moe.top_k) if on else [] for row, on in zip(logits, real.tolist())]
        self.choices = min(MOST_CHOICES, max(map(len, self._picks)))
        self.tied = torch.tensor([bool(picks) for picks in self._picks], device=real.device)

    @torch.no_grad()
    def out(self, choice: int | None = None) -> torch.Tensor:
        """The MoE block's all-reduced output; rows with a tie take the experts of `choice` (0 .. choices - 1)."""
        block, batch = self._kept.view.moe.block, self._kept.forward_batch
        with untouched(batch), contextlib.ExitStack() as stack:
            if choice is not None:
                picks = [row[choice] if choice < len(row) else None for row in self._picks]
                stack.enter_context(replaced(block, "topk", _chosen_topk(block.topk, picks)))
            return state.all_reduce(block(self._x.clone(), batch)).clone()

    def nearest(self, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all choices, each row's output that is nearest to `found`; and bool [rows]: it is not the usual one.

        Runs one collective a choice: every rank must call it for the same launches.
        """
        best = self.out()
        distance = (found - best).double().norm(dim=1)
        other = torch.zeros_like(self.tied)
        for choice in range(self.choices):
            out = self.out(choice)
            apart = (found - out).double().norm(dim=1)
            nearer = apart < distance
            best = torch.where(nearer.unsqueeze(1), out, best)
            distance = torch.minimum(distance, apart)
            other |= nearer
        return best, other & self.tied


def _chosen_topk(topk: Any, picks: list[list[int] | None]) -> Any:
    """SGLang's top-k, but for the rows with a pick of their own (weights as SGLang renormalises them)."""

    def select(hidden_states: torch.Tensor, router_logits: torch.Tensor) -> Any:
        picked = topk(hidden_states, router_logits)
        ids, weights = picked.topk_ids.clone(), picked.topk_weights.clone()
        for row, experts in enumerate(picks):
            if experts is not None:
                chosen = torch.tensor(experts, device=ids.device)
                ids[row] = chosen.to(ids.dtype)
                weights[row] = torch.softmax(router_logits[row].float()[chosen], dim=-1)
        return picked._replace(topk_ids=ids, topk_weights=weights)

    return select


class LayerComparison:
    """`common.check.Comparison` of this model's K1 and K2, by the bounds of its NUMERICS."""

    def __init__(self, bounds: Mapping[str, float]) -> None:
        self._bounds = bounds

    def before(self, event: Any) -> list[Kept]:
        """See `keep_before`."""
        return keep_before(event)

    def after(self, event: Any, kept: list[Kept]) -> None:
        """See `keep_after`."""
        keep_after(event, kept)

    def compare(self, kept: Kept) -> Compared:
        """Run SGLang's layer and compare the rows that hold a request."""
        return self._front(kept) if kept.launch == "k1" else self._tail(kept)

    @staticmethod
    def _front(kept: Kept) -> Compared:
        stock = stock_front(kept)
        rows = len(stock["core"])
        real = (kept.inputs["index"] > 0).repeat_interleave(rows // len(kept.inputs["index"]))
        outputs = {name: row_differences(kept.outputs[name][real], stock[name][real]) for name in stock}
        pads = (kept.outputs["core"] != 0).flatten(1).any(1) & ~real
        wrong = [(row, "the core of a pad row is not zero") for row in pads.nonzero().flatten().tolist()]
        return Compared(real.nonzero().flatten().tolist(), outputs, wrong=wrong)

    def _tail(self, kept: Kept) -> Compared:
        real = kept.inputs["index"] > 0
        stock = StockTail(kept)
        out, found = stock.out(), kept.outputs["out"]
        # every rank must take the same way through the collectives below
        aside = torch.zeros_like(real)
        candidates = self._broken(found, out) & stock.tied & real
        if any(state.tensor_parallel_group().all_gather(bool(candidates.any()))):
            nearest, _ = stock.nearest(found)
            aside = candidates & ~self._broken(found, nearest)
        kept_rows = real & ~aside
        outputs = {
            "out": row_differences(found[kept_rows], out[kept_rows]),
            "res_out": row_differences(kept.outputs["res_out"][kept_rows], stock.residual[kept_rows]),
        }
        return Compared(kept_rows.nonzero().flatten().tolist(), outputs, set_aside=int(aside.sum()))

    def _broken(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """bool [rows]: the rows of K2's output that leave a bound."""
        rows, broken = row_differences(found, wanted), torch.zeros(len(found), dtype=torch.bool, device=found.device)
        for name, bound in self._bounds.items():
            launch, output, metric = name.split(".")
            if (launch, output) == ("k2", "out"):
                keeps = [within(metric, value, bound) for value in getattr(rows, metric).tolist()]
                broken |= ~torch.tensor(keeps, dtype=torch.bool, device=found.device)
        return broken


def attach(step: Any, bounds: Mapping[str, float]) -> Checker:
    """Check every launch of `step`, eager ones at once and captured ones after each replay."""
    group = state.tensor_parallel_group()
    checker = Checker(LayerComparison(bounds), bounds, rank=group.rank, last_words=LastWords())
    checker.attach(step)
    state.after_replay(step.view.model, checker.replayed)
    return checker
