# SPDX-License-Identifier: Apache-2.0
"""K2 of a layer and K1 of the next on the simulator, as one launch and as two, all ranks together: for the `cost`
command and the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sgl_amd_mono.common.build import Artifact, build
from sgl_amd_mono.common.sync import FAULT_BLOCK_BYTES, FaultState, decode_fault_block
from sgl_amd_mono.qwen38_a95b_mxfp4 import trial_k1, trial_k2
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import gdn
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.layer import LayerKey
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.tail_front import (
    ABI,
    FRONT,
    TailFrontKey,
    scratch_bytes,
    scratch_regions,
)

FRONT_SLOT = trial_k2.SLOT - LayerKey.slot_base + 1  # K1 of the layer behind trial_k2's
FRONT_WRITES = tuple(name for name in gdn.OUTPUTS if name != "scratch")


def key_of(
    geometry: Geometry, width: int, *, stop: bool = False, tail: Mapping[str, Any] | None = None, **front: Any
) -> TailFrontKey:
    """The launch's key; `tail`: fields of K2's, `front`: of K1's."""
    return TailFrontKey(
        LayerKey(geometry, width, stop=stop, **(tail or {})), GdnKey(geometry, width, stop=stop, **front)
    )


@dataclass
class Outcome:
    """What the ranks wrote: K2's rows and K1's, one tensor a rank; K1's cases hold its states."""

    out: list[torch.Tensor]
    residual: list[torch.Tensor]
    cases: list[trial_k1.K1Case]
    report: Any
    faults: list[FaultState]
    scratch: list[torch.Tensor] | None = None  # of the one launch
    fused_shared: bool = False

    def routes(self) -> list[list[int]]:
        """Experts of each row, ascending, as the one launch picked them on rank 0."""
        g, width = self.cases[0].key.geometry, len(self.out[0])
        span = scratch_regions(g, width, self.fused_shared)["ROUTE"]
        ids = self.scratch[0][span.offset : span.offset + span.nbytes].view(torch.int32).view(2, width, -1)[0]
        return [sorted(row) for row in ids[:, : g.top_k].tolist()]

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Everything that a later launch reads, by name."""
        fronts = {name: [getattr(case, name) for case in self.cases] for name in FRONT_WRITES}
        fronts = {name: tensors for name, tensors in fronts.items() if tensors[0] is not None}
        return {"out": self.out, "residual_out": self.residual, **{FRONT + n: t for n, t in fronts.items()}}


def make_cases(key: TailFrontKey, seed: int, pads: Sequence[int] = ()) -> list[trial_k1.K1Case]:
    """K1's weights, states and outputs of every rank; equal seeds give equal cases."""
    ranks = range(key.geometry.tp)
    return [trial_k1.make_case(key.front, seed * len(ranks) + rank, pads=tuple(pads)) for rank in ranks]


def run_apart(bench: trial_k2.Bench, inputs: trial_k2.Inputs, cases: list[trial_k1.K1Case]) -> Outcome:
    """The two launches, K1 on each rank with the rows that K2 left there."""
    result = bench.run(inputs)
    for case, out, residual in zip(cases, result.out, result.residual, strict=True):
        case.hidden, case.residual = out, residual
        trial_k1.run(case)
    return Outcome(result.out, result.residual, cases, result.report, result.faults)


def run_together(
    bench: trial_k2.Bench,
    key: TailFrontKey,
    inputs: trial_k2.Inputs,
    cases: list[trial_k1.K1Case],
    *,
    epoch: int = 1,
    mode: int = 1,
    deadline: int = trial_k2.DEADLINE,
    program: Any = None,
) -> Outcome:
    """The one launch on every rank; `program` replaces the built code."""
    from sgl_amd_mono.sim import CodeObject, Launch

    g, width, built = key.geometry, key.width, artifact(key)
    code = program or CodeObject.parse(built.isa)
    launches, outs, residuals, scratches, mapped = [], [], [], [], []

    def hold(rank: int, name: str, tensor: torch.Tensor, kind: str, regions: Any = None) -> int:
        address, nbytes = trial_k1.span(tensor)
        bench.machine.map(rank, address, nbytes, name, kind=kind, **({"regions": regions} if regions else {}))
        mapped.append((rank, address, tensor))
        return address

    for rank, case in enumerate(cases):
        bench.epoch[rank].fill_(epoch)
        out = torch.full((width, g.hidden), float("nan"), dtype=torch.bfloat16)
        residual_out = torch.full_like(out, float("nan"))
        outs.append(out)
        residuals.append(residual_out)
        values = dict.fromkeys((name for name, _ in ABI), 0)  # what this form of the launch does not read
        values |= {name: t.data_ptr() for name, t in bench.weights[rank].tensors.items()}
        for name, tensor, kind in (
            ("core", inputs.cores[rank].clone(), "readonly"),
            ("residual", inputs.residual.clone(), "readonly"),
            ("row_index", inputs.row_index.clone(), "readonly"),
            ("out", out, "plain"),
            ("residual_out", residual_out, "plain"),
        ):
            values[name] = hold(rank, name, tensor, kind)
        for name, tensor in case.tensors().items():
            if FRONT + name in values and name != "scratch" and tensor is not None:
                kind = "plain" if name in gdn.OUTPUTS else "readonly"
                values[FRONT + name] = hold(rank, FRONT + name, tensor, kind)
        spans = [(n, r.offset, r.nbytes) for n, r in scratch_regions(g, width, key.tail.fused_shared).items()]
        scratch = torch.zeros(scratch_bytes(g, width, key.tail.fused_shared), dtype=torch.uint8)
        scratches.append(scratch)
        values["scratch"] = hold(rank, "scratch", scratch, "mailbox", spans)
        spans = [(n, *place) for n, place in gdn.scratch_regions(g, width).items() if place[1]]
        values[FRONT + "scratch"] = hold(rank, FRONT + "scratch", case.scratch, "mailbox", spans)
        conv, ssm = case.conv_state, case.ssm_state
        values |= {
            "peers": bench.table.data_ptr(), "epoch": bench.epoch[rank].data_ptr(), "deadline_ticks": deadline,
            "rank": rank, "mode": mode, "layer_slot": trial_k2.SLOT, FRONT + "layer_slot": FRONT_SLOT,
            FRONT + "conv_slot_stride": conv.stride(0), FRONT + "conv_channel_stride": conv.stride(1),
            FRONT + "conv_tap_stride": conv.stride(2), FRONT + "ssm_slot_stride": ssm.stride(0),
        }  # fmt: skip
        kernargs = built.pack([values[a.name] for a in built.arguments])
        launches.append(Launch(rank=rank, code=code, grid=built.grid, block=built.block, kernargs=kernargs))
    try:
        report = bench.machine.launch(launches)
    finally:
        for rank, address, _ in mapped:
            bench.machine.unmap(rank, address)
    faults = [decode_fault_block(p[:FAULT_BLOCK_BYTES].view(torch.int32).tolist()) for p in bench.peers]
    return Outcome(outs, residuals, cases, report, faults, scratches, key.tail.fused_shared)


def artifact(key: TailFrontKey) -> Artifact:
    """The key's kernel, from the cache where it is there."""
    return build(key)
