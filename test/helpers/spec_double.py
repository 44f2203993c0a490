# SPDX-License-Identifier: Apache-2.0
"""A runtime whose launches are the float64 definitions (`gdn_naive`, `layer_naive`) of K1 and K2.

It drives the spec's forward without compiling or simulating a kernel: what it checks is everything around the launches.
One rank only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sgl_amd_mono.common.sync import ERROR_OFFSET, FAULT_BLOCK_BYTES, FaultState, decode_fault_block
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import gdn_naive, layer_naive
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey

TICKS_PER_SECOND = 100_000_000


class DoubleKernel:
    """A built kernel: its key, and the names of its arguments."""

    def __init__(self, key: Any) -> None:
        self.key, self.kind = key, "k1" if isinstance(key, GdnKey) else "k2"
        self.names = [name for name, _ in key.abi]

    def __str__(self) -> str:
        return self.key.name


class DoublePeers:
    """The peer buffer of one rank: a table with one address."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.table = torch.tensor([self.memory.data_ptr()], dtype=torch.int64)
        self.closed = False

    def fault_state(self) -> FaultState:
        return decode_fault_block(self.memory[:FAULT_BLOCK_BYTES].view(torch.int32).tolist())

    def mark_failed(self) -> None:
        self.memory[ERROR_OFFSET] = 1

    def close(self) -> None:
        self.closed = True


class DoubleRuntime:
    """`Runtime` by the naive definitions. `calls` records (k1 or k2, named arguments) of every launch."""

    def __init__(self, request: Any) -> None:
        if request.group.size != 1:
            raise ValueError(f"found {request.group.size} ranks; needed: one")
        self.request = request
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.allocated: dict[str, torch.Tensor] = {}
        self.closed = False

    def build(self, keys: Sequence[Any]) -> list[DoubleKernel]:
        return [DoubleKernel(key) for key in keys]

    def zeros(self, nbytes: int, name: str) -> torch.Tensor:
        if name in self.allocated:
            raise ValueError(f"{name} is allocated twice")
        self.allocated[name] = torch.zeros(nbytes, dtype=torch.uint8)
        return self.allocated[name]

    def peer_buffer(self, nbytes: int, group: Any) -> DoublePeers:
        self.peers = DoublePeers(nbytes)
        return self.peers

    def synchronize(self) -> None:
        """Launches run at once here."""

    def prepare(self, kernel: DoubleKernel, args: list[Any]) -> Any:
        return lambda: self.launch(kernel, list(args))

    def begin_step(self) -> None:
        """Launches share nothing here."""

    def deadline_ticks(self, seconds: float) -> int:
        return round(seconds * TICKS_PER_SECOND)

    def close(self) -> None:
        self.closed = True

    def launch(self, kernel: DoubleKernel, args: Sequence[Any]) -> None:
        if len(args) != len(kernel.names) or any(value is None for value in args):
            missing = [n for n, v in zip(kernel.names, args) if v is None]
            raise ValueError(f"{kernel}: {len(args)} arguments for {len(kernel.names)}, none given for {missing}")
        named = dict(zip(kernel.names, args))
        self.calls.append((kernel.kind, named))
        if named["mode"]:
            (self._front if kernel.kind == "k1" else self._tail)(kernel.key, named)

    @staticmethod
    def _front(key: Any, a: dict[str, Any]) -> None:
        if key.first_layer != (not isinstance(a["residual"], torch.Tensor)):
            raise ValueError("the first layer's K1, and only that, has no residual")
        weights = gdn_naive.GdnWeights(
            norm_w=a["norm_w"],
            w_qkvz=a["w_qkvz"],
            w_ba=a["w_ba"],
            w_qkvz_scale=a["w_qkvz_scale"] if key.qkvz_format == "mxfp4" else None,
            w_ba_scale=a["w_ba_scale"] if key.ba_format == "mxfp4" else None,
            conv_w=a["conv_w"].view(key.geometry.conv_channels, -1),
            a_log=a["a_log"],
            dt_bias=a["dt_bias"],
            gnorm_w=a["gnorm_w"],
        )
        residual = None if key.first_layer else a["residual"]
        rows = a["residual_out"].shape[0]
        hidden, states = a["hidden"][:rows], (a["conv_state"], a["ssm_state"])
        how = {"round_beta": key.round_beta, "draft_tokens": key.draft_tokens}
        trace = gdn_naive.gdn_front(key.geometry, weights, hidden, residual, a["state_index"], *states, **how)
        if key.draft_tokens:
            drafts = a["draft_index"], a["draft_conv"], a["draft_ssm"]
            gdn_naive.store_drafts(trace, *drafts, key.draft_tokens)
        else:
            gdn_naive.store_rows(trace, a["state_index"], *states)
        a["core"].copy_(trace.core)
        a["residual_out"].copy_(trace.residual_out)

    @staticmethod
    def _tail(key: Any, a: dict[str, Any]) -> None:
        rows = a["out"].shape[0]
        weights = layer_naive.LayerWeights(
            w_o=a["w_o"],
            w_o_scale=a["w_o_scale"] if key.projection == "mxfp4" else None,
            norm_w=a["norm_w"],
            w_router=a["w_router"],
            w_sgu=None if key.fused_shared else a["w_sgu"],
            w_sg=a["w_sg"].view(1, -1),
            w_sd=None if key.fused_shared else a["w_sd"],
            experts=layer_naive.LayerWeights.from_shuffled(a["w13"], a["w13_scale"], a["w2"], a["w2_scale"]),
        )
        trace = layer_naive.layer_post([a["core"]], a["residual"], [weights], a["row_index"][:rows], key.geometry)
        a["out"].copy_(trace.out)
        a["residual_out"].copy_(trace.residual)


RUNTIMES: list[DoubleRuntime] = []


WIDTHS: tuple[int, ...] = tuple(range(1, 9))  # that are built, set before SGLang loads the model
FACTORY: Any = None  # another runtime factory, set before SGLang loads the model


def _factory(request: Any) -> Any:
    if FACTORY is not None:
        return FACTORY(request)
    RUNTIMES.append(DoubleRuntime(request))
    return RUNTIMES[-1]


def _spec() -> Any:
    from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
    from sgl_amd_mono.qwen38_a95b_mxfp4.spec import make_spec

    return make_spec(
        name="qwen38-a95b-mxfp4-double",
        geometries={"small": Geometry.small},
        tp_sizes=(1, 2),
        widths=WIDTHS,
        runtime_factory=_factory,
        stop=False,
        environment={},
    )


def __getattr__(name: str) -> Any:
    if name == "SPEC":
        globals()["SPEC"] = _spec()
        return globals()["SPEC"]
    raise AttributeError(name)


def load_sglang(folder: Any, mxfp4: str | None = None) -> Any:
    """SGLang's ModelRunner of the `small` checkpoint (made in `folder`), with the double plugin. One a process.

    `mxfp4`: the projections that are MXFP4, see `checkpoint.write`.
    """
    from sgl_amd_mono.simulate import checkpoint, harness

    harness.prepare()
    torch.set_num_threads(1)
    checkpoint.write(folder, mxfp4=mxfp4)
    from sglang.kernels.plugin_kernels.amd.spec import BACKEND, register

    register(backend=BACKEND, architecture="Qwen3_5MoeForCausalLM", path=f"{__name__}:SPEC")
    from sgl_amd_mono.simulate.runner import Rank, SglangModel

    return SglangModel(folder, True, Rank())


def load_with_double(folder: Any, mxfp4: str | None = None) -> tuple[Any, Any, Any]:
    """(model, spec, config) of `load_sglang`."""
    loaded = load_sglang(folder, mxfp4)
    spec = __getattr__("SPEC") if "SPEC" not in globals() else globals()["SPEC"]
    return loaded.model, spec, loaded.model_runner.model_config.hf_config


def built_step(model: Any) -> Any:
    """The `Step` that SGLang has installed on the model."""
    found = [cell.cell_contents for cell in model.forward.__closure__]
    return next(thing for thing in found if type(thing).__name__ == "Step")
