# SPDX-License-Identifier: Apache-2.0
"""The object that `SPEC.build` returns: it runs a routed decode or verify step as K1 and K2 launches.

One step of `w` rows, in order:

1. embedding, by SGLang; the epoch is bumped once, on the device;
2. a GDN layer: K1 (residual add, input norm, projections, conv, recurrence, gated norm) -> core, then SGLang's
   prefix-cache tracking, then K2 (out_proj, all-reduce, norm, router, experts, all-reduce) -> hidden, residual;
3. an attention layer: SGLang's input norm and attention up to o_proj -> core, then K2;
4. final norm and logits, by SGLang, for every row, padded ones included.

A verify step (NEXTN / MTP, several tokens a request) runs the same launches. A rejected draft token must roll its state
back, so K1 leaves the states as they are and keeps one behind each token where SGLang's pool has a place for it; SGLang
commits one of them. Where its drafts are no chain, or it keeps the states in another way, no K1 is built, and its own
GDN runs up to out_proj. A server that speculates builds no launch for decode steps of one token.

All kernels, buffers and argument lists are made once, at build. A step allocates nothing, reads nothing back and counts
nothing on the host, so it can be captured in a graph. Pointers of weights and pools are read when a kernel is launched.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sgl_amd_mono.common import state, stock_probe
from sgl_amd_mono.common.peer import PeerBuffer
from sgl_amd_mono.common.refusals import reason
from sgl_amd_mono.common.runtime import Kernel, Runtime, RuntimeRequest, describe_fault
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import gdn, layer, tail_front
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.tail_front import FRONT

logger = logging.getLogger(__name__)

#: First tag slot of each launch; a layer's index is added.
K1_SLOT, K2_SLOT = gdn.GdnKey.slot_base, layer.LayerKey.slot_base

#: A tag's low byte is slot + 1: so many layers have a slot of their own in both launches.
MAX_LAYERS = min(K2_SLOT - K1_SLOT, 255 - K2_SLOT)

RUN, WARM_UP = 1, 0  # the kernels' `mode` argument

#: (conv, SSM) dtypes of the state pools that K1 is tested for.
K1_STATES = {(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)}

DECODE, VERIFY = "decode", "target_verify"  # the contract's names of a step's mode


class StepFault(RuntimeError):
    """A wait of this step passed its deadline on some rank, and the kernels were built to return (`stop=False`)."""


@dataclass(frozen=True)
class LaunchEvent:
    """What an observer of a launch sees.

    Attributes:
        kind: "k1", "k2", or "k2k1": K2 of the layer and K1 of the next, whose arguments begin with "front_".
        layer: index of the layer.
        width: rows of the step.
        args: ABI name -> tensor or int. Tensors are the live ones: copy what must outlast the launch.
        view: the layer of SGLang's model.
        forward_batch: the step's batch.
    """

    kind: str
    layer: int
    width: int
    args: dict[str, Any]
    view: state.GdnView | state.AttentionView = field(repr=False)
    forward_batch: Any = field(repr=False)
    next_view: Any = field(repr=False, default=None)

    def halves(self) -> tuple[LaunchEvent, LaunchEvent]:
        """A "k2k1" as the two launches that it stands for: what K1 reads of K2's are the same tensors."""
        front = {name.removeprefix(FRONT): value for name, value in self.args.items() if name.startswith(FRONT)}
        front |= {"hidden": self.args["out"], "residual": self.args["residual_out"]}
        tail = {name: value for name, value in self.args.items() if not name.startswith(FRONT)}
        return (
            LaunchEvent("k2", self.layer, self.width, tail, self.view, self.forward_batch),
            LaunchEvent("k1", self.next_view.layer, self.width, front, self.next_view, self.forward_batch),
        )


def places(abi: Sequence[tuple[str, str]], *names: str) -> tuple[int, ...]:
    """Places of these arguments in an ABI."""
    order = [name for name, _ in abi]
    return tuple(order.index(name) for name in names)


#: Where a step puts what changes from step to step: in K1, then in K2, then in both as one.
K1_HIDDEN, K1_RESIDUAL, K1_RESIDUAL_OUT, K1_STATE_INDEX = places(
    gdn.ABI, "hidden", "residual", "residual_out", "state_index"
)
K2_CORE, K2_RESIDUAL, K2_RESIDUAL_OUT, K2_ROW_INDEX, K2_GATES = places(
    layer.ABI, "core", "residual", "residual_out", "row_index", "gates"
)
BOTH_CORE, BOTH_RESIDUAL, BOTH_BETWEEN, BOTH_ROW_INDEX, BOTH_GATES, BOTH_RESIDUAL_OUT, BOTH_STATE_INDEX = places(
    tail_front.ABI,
    *("core", "residual", "residual_out", "row_index", "gates"),
    *(FRONT + name for name in ("residual_out", "state_index")),
)


class BoundLaunch:
    """A kernel at one layer and width.

    Attributes:
        arguments: the live list, in ABI order. What never changes is in place; a step writes the rest before `launch`.
    """

    __slots__ = ("_launch", "_places", "arguments", "kernel", "layer", "names")

    def __init__(self, kernel: Kernel, layer: int, names: Sequence[str], fixed: dict[str, Any]) -> None:
        unknown = sorted(set(fixed) - set(names))
        if unknown:
            raise ValueError(f"{kernel}: its ABI has no argument {', '.join(unknown)}")
        self.kernel, self.layer, self.names = kernel, layer, tuple(names)
        self._places = {name: i for i, name in enumerate(self.names)}
        self.arguments = [fixed.get(name) for name in self.names]
        self._launch: Callable[[], None] | None = None

    def fixed(self) -> dict[str, Any]:
        """The arguments that are set, by name."""
        return {name: value for name, value in zip(self.names, self.arguments, strict=True) if value is not None}

    def with_args(self, **moving: Any) -> list[Any]:
        """A copy of the argument list with some set by name."""
        args = self.arguments.copy()
        for name, value in moving.items():
            args[self._places[name]] = value
        return args

    def set(self, **moving: Any) -> None:
        """Set arguments by name, until they are set again."""
        self.arguments = self.with_args(**moving)
        self._launch = None

    def launch(self, runtime: Runtime) -> None:
        """Launch with the arguments as they are now; `runtime` prepares it the first time."""
        if self._launch is None:
            self._launch = runtime.prepare(self.kernel, self.arguments)
        self._launch()


@dataclass
class WidthLaunches:
    """Everything one width needs: the launches of each layer and the buffers between them.

    Attributes:
        k1: layer -> bound K1, GDN layers only.
        k2: layer -> bound K2.
        both: layer -> bound K2 and next K1 in one launch, where the build has it.
        hidden: bf16 [w, H], K2's output.
        residuals: two bf16 [w, H]: a launch reads one and writes the other.
        z: f32 [w, H], hidden + residual as K2 leaves it to the next K1; squares: sums of its squares, f32 [w, H / 8].
        core: bf16 [w, core width], K1's output; with one hop o, beside `core_z` bf16 [w, core width] and `core_squares`
            f32 [w, units], from which K2 forms the core.
        row_index: int32 [w], in a verify step the state index of each row's request.
    """

    k1: dict[int, BoundLaunch]
    k2: dict[int, BoundLaunch]
    hidden: torch.Tensor
    residuals: tuple[torch.Tensor, torch.Tensor]
    z: torch.Tensor
    squares: torch.Tensor
    core: torch.Tensor
    row_index: torch.Tensor
    core_z: torch.Tensor | None = None
    core_squares: torch.Tensor | None = None
    both: dict[int, BoundLaunch] = field(default_factory=dict)

    def every(self) -> tuple[BoundLaunch, ...]:
        """All launches."""
        return *self.k1.values(), *self.k2.values(), *self.both.values()


class Step:
    """SGLang's `BuiltMonokernels`. Made by `build_step`.

    Attributes:
        geometry, runtime, view: what it was built from.
        launches: kernel name -> built kernel, of every width.
        steps: steps run here so far; steps that SGLang's own forward ran instead are in `passed_on`.
        before_launch, observers: called with a LaunchEvent before and after each launch while not empty.
        closing: called when the step object is closed.
    """

    def __init__(
        self,
        *,
        view: state.ModelView,
        original: Callable[..., Any],
        geometry: Geometry,
        runtime: Runtime,
        widths: dict[int, WidthLaunches],
        epoch: torch.Tensor,
        pools: state.StatePools,
        peers: PeerBuffer,
        keys: Sequence[Any],
        stop: bool,
        modes: tuple[str, ...] = (DECODE, VERIFY),
        front_tokens: int | None = None,
    ) -> None:
        self.view, self.geometry, self.runtime = view, geometry, runtime
        self.before_launch: list[Callable[[LaunchEvent], None]] = []
        self.observers: list[Callable[[LaunchEvent], None]] = []
        self.closing: list[Callable[[], None]] = []
        self.steps = self.passed_on = 0
        self.launches = {str(bound.kernel): bound.kernel for at in widths.values() for bound in at.every()}
        self.original, self._widths, self._epoch, self._pools = original, widths, epoch, pools
        self.peers, self._keys, self._stop, self._modes = peers, tuple(keys), stop, modes
        self._bound_pools = 0  # `pools.found` when K1's arguments were set
        self._front_tokens = front_tokens  # rows of a request in the steps that K1 is built for; None: it is not

    @torch.no_grad()
    def forward(
        self,
        plan: Any,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
        get_embedding: bool = False,
        **more: Any,
    ) -> Any:
        """Run a routed step; takes and returns what the model's own forward does.

        A step that is not covered (given embeddings, pipeline input, embedding output, aux hidden states, another mode
        than decode or verify) runs SGLang's own forward. The choice depends on nothing that differs between ranks.

        Raises:
            StateLayoutError: at the first step, where a state pool does not fit.
            StepFault: a `stop=False` build lost a wait; a `stop=True` build ends the process with a GPU fault instead.
        """
        key = plan.key
        at = self._widths.get(key.rows) if key.forward_mode in self._modes else None
        extra = (input_embeds, pp_proxy_tensors, get_embedding, *more.values())
        if at is None or not state.covers_call(self.view.model, extra):
            self.passed_on += 1
            return self.original(
                input_ids,
                positions,
                forward_batch,
                input_embeds=input_embeds,
                pp_proxy_tensors=pp_proxy_tensors,
                get_embedding=get_embedding,
                **more,
            )
        self.steps += 1
        try:
            hidden, residual = self._layers(at, key, input_ids, positions, forward_batch)
        except BaseException:
            self.peers.mark_failed()  # the others wait in a launch that this rank never joins
            raise
        if not self._stop:
            self._raise_fault()
        return state.finish(self.view.model, input_ids, hidden, residual, forward_batch)

    def _layers(
        self, at: WidthLaunches, key: Any, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding and every layer: (hidden, residual) of the last one."""
        model, verify = self.view.model, key.forward_mode == VERIFY
        tokens = key.tokens_per_request if verify else 1
        front = self._front_tokens == tokens  # fewer drafts than usual: SGLang's own GDN
        requests = indices = self._pools.begin(key.batch_size, bind=front)
        if self._bound_pools != self._pools.found:
            self._bind_pools()
        if verify and indices is not None:
            per_request = at.row_index.view(key.batch_size, tokens)
            per_request.copy_(indices[: key.batch_size].unsqueeze(1).expand_as(per_request))
            indices = at.row_index
        positions = state.step_positions(model, positions, forward_batch)
        hidden = state.run_embedding(model, input_ids)
        residual: torch.Tensor | None = None
        self._epoch.add_(1)
        self.runtime.begin_step()
        # Each launch writes the residual buffer that the one before it did not: SGLang's norm, between a K2 and the
        # next one, returns the buffer that it was given or one of its own.
        out, other = at.residuals
        joined = {} if verify else at.both
        for view in self.view.layers:
            if view.layer - 1 in joined:
                core = at.core  # of the launch before
            elif view.kind == "gdn" and front:
                core, residual = self._gdn_front(at, view, hidden, residual, out, requests, forward_batch, verify)
                out, other = other, out
            else:
                normed, residual = state.input_norm(view, hidden, residual)
                if view.kind == "gdn":
                    core = state.gdn_core(view, normed, forward_batch)
                else:
                    core = state.attention_core(view, positions, normed, forward_batch)
            if view.layer in joined:
                hidden, residual = self._tail_and_front(at, view, residual, out, other, indices, forward_batch)
                continue
            hidden, residual = self._layer_tail(at, view, core, residual, out, indices, forward_batch)
            out, other = other, out
        return hidden, residual

    def _bind_pools(self) -> None:
        """K1 of every width reads the state pools where they are now."""
        for at in self._widths.values():
            for number, bound in at.k1.items():
                conv, ssm = self._pools[number].conv, self._pools[number].ssm
                pools = {
                    "conv_state": conv,
                    "ssm_state": ssm,
                    "conv_slot_stride": conv.stride(0),
                    "conv_channel_stride": conv.stride(1),
                    "conv_tap_stride": conv.stride(2),
                    "ssm_slot_stride": ssm.stride(0),
                    **self._drafts(self._pools[number]),
                }
                bound.set(**pools)
                if number - 1 in at.both:
                    at.both[number - 1].set(**{FRONT + name: value for name, value in pools.items()})
        self._bound_pools = self._pools.found

    def _gdn_front(
        self,
        at: WidthLaunches,
        view: state.GdnView,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        out: torch.Tensor,
        requests: torch.Tensor,
        forward_batch: Any,
        verify: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K1 of one layer: (core, residual in `out`). Then the prefix cache's copies of the new states; those of a
        verify step are made by SGLang's commit. `requests`: state index of each request."""
        bound = at.k1[view.layer]
        arguments = bound.arguments
        arguments[K1_HIDDEN] = hidden
        arguments[K1_RESIDUAL] = 0 if residual is None else residual
        arguments[K1_RESIDUAL_OUT] = out
        arguments[K1_STATE_INDEX] = requests
        self._launch("k1", bound, out, view, forward_batch)
        if forward_batch.mamba_track_mask is not None and not verify:
            self._pools.track(forward_batch, view.layer, requests)
        return at.core, out

    def _drafts(self, pool: state.LayerState) -> dict[str, Any]:
        """K1's arguments for the states behind the draft tokens; in decode steps those that `build_step` has set."""
        if DECODE in self._modes:
            return {}
        return {
            "draft_conv": pool.draft_conv,
            "draft_ssm": pool.draft_ssm,
            "draft_index": self._pools.draft_index,
            **gdn.draft_strides(pool.draft_conv, pool.draft_ssm),
        }

    def _tail_and_front(
        self,
        at: WidthLaunches,
        view: state.GdnView,
        residual: torch.Tensor,
        between: torch.Tensor,
        out: torch.Tensor,
        indices: torch.Tensor,
        forward_batch: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K2 of one layer and K1 of the next: (hidden, residual in `out`), K2's own residual in `between`. The core and
        `out` may be what K2 reads: K1 writes them when every workgroup has read them."""
        bound, following = at.both[view.layer], self.view.layers[view.layer + 1]
        arguments = bound.arguments
        arguments[BOTH_CORE] = at.core
        arguments[BOTH_RESIDUAL] = residual
        arguments[BOTH_BETWEEN] = between
        arguments[BOTH_ROW_INDEX] = arguments[BOTH_STATE_INDEX] = indices
        arguments[BOTH_GATES] = 0 if at.core_z is None else 1
        arguments[BOTH_RESIDUAL_OUT] = out
        self._launch("k2k1", bound, out, view, forward_batch, following)
        if forward_batch.mamba_track_mask is not None:
            self._pools.track(forward_batch, following.layer, indices)
        return at.hidden, out

    def _layer_tail(
        self,
        at: WidthLaunches,
        view: state.GdnView | state.AttentionView,
        core: torch.Tensor,
        residual: torch.Tensor,
        out: torch.Tensor,
        indices: torch.Tensor | None,
        forward_batch: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K2 of one layer: (hidden, residual in `out`)."""
        bound = at.k2[view.layer]
        arguments = bound.arguments
        arguments[K2_CORE] = core
        arguments[K2_RESIDUAL] = residual
        arguments[K2_RESIDUAL_OUT] = out
        arguments[K2_ROW_INDEX] = indices
        arguments[K2_GATES] = 1 if core is at.core and at.core_z is not None else 0  # the core of a one-hop K1
        self._launch("k2", bound, out, view, forward_batch)
        return at.hidden, out

    def _launch(
        self,
        kind: str,
        bound: BoundLaunch,
        out: torch.Tensor,
        view: Any,
        forward_batch: Any,
        next_view: Any = None,
    ) -> None:
        if not (self.before_launch or self.observers):
            bound.launch(self.runtime)
            return
        named = dict(zip(bound.names, bound.arguments))
        event = LaunchEvent(kind, bound.layer, out.shape[0], named, view, forward_batch, next_view)
        for observer in self.before_launch:
            observer(event)
        bound.launch(self.runtime)
        for observer in self.observers:
            observer(event)

    def _raise_fault(self) -> None:
        """Read the fault block back; only builds that return from a lost wait do this, a server never does."""
        self.runtime.synchronize()
        fault = self.peers.fault_state()
        if fault.failed:
            raise StepFault(describe_fault(fault, self._keys))

    def close(self) -> None:
        """Release the peer memory and what the runtime holds."""
        for closing in self.closing:
            closing()
        self.runtime.close()


def build_step(
    *,
    model: torch.nn.Module,
    hf_config: Any,
    geometry: Geometry,
    group: state.RankGroup,
    runtime_factory: Callable[[RuntimeRequest], Runtime],
    isa: str,
    widths: Sequence[int],
    deadline_s: float,
    stop: bool,
    name: str,
    verify_tokens: int | None = None,
    verify_differences: Sequence[str] = (),
    one_hop: bool = False,
    one_launch: bool = False,
    probe: Callable[[torch.device], bool] | None = None,
) -> Step:
    """Build, load and warm up every launch of every width on every rank; the ranks agree after each phase.

    With `verify_tokens` the server runs verify steps of so many tokens a request; K1 is built for them unless there are
    `verify_differences`, which say why it cannot run them. With `one_hop` K1 leaves the gated norm to K2 in decode
    steps, at one hand-off less; with `one_launch` K2 of a layer and K1 of the next are one launch in them, where both
    layers are GDN. `probe` says whether SGLang's kernel of these steps rounds beta, as K1 then does (default:
    `stock_probe.rounds_beta`, in a server that verifies `stock_probe.verify_rounds_beta`).

    No wait with a deadline runs before all ranks have compiled, loaded and launched everything once in mode 0.

    Raises:
        RuntimeError: a phase failed on some rank, or the ranks would run different launches; raised on every rank, with
            what each rank said.
    """
    view = state.read_model(model)
    device = next(model.parameters()).device
    g = geometry
    rounds = stock_probe.rounds_beta if verify_tokens is None else stock_probe.verify_rounds_beta
    probe = probe or (lambda device: rounds(g.key_heads, g.value_heads, g.head_dim, device))
    ssm_dtype = str(state.pool_dtypes(None, hf_config)[1]).removeprefix("torch.")
    runtime = runtime_factory(RuntimeRequest(device, isa, group, float(deadline_s), tuple(widths)))

    conv_dtype, state_dtype = state.pool_dtypes(None, hf_config)
    if verify_tokens is not None and (conv_dtype, state_dtype) not in K1_STATES:
        verify_differences = [*verify_differences, f"the states are {conv_dtype} (conv) and {state_dtype} (SSM)"]
    with_k1 = verify_tokens is None or not verify_differences
    options = {"one-hop k1": one_hop, "one launch of k2 and the next k1": one_launch}
    left_out = [option for option, asked in options.items() if asked and verify_tokens is not None]
    one_hop, one_launch = one_hop and not left_out, one_launch and not left_out
    asks = with_k1 and any(v.kind == "gdn" for v in view.layers)
    round_beta = agree(group, f"{name}: the probe of SGLang's delta rule", lambda: asks and probe(device))

    def k1_key(layer_: state.GdnView, width: int) -> gdn.GdnKey:
        return gdn.GdnKey(
            geometry,
            width,
            first_layer=layer_.layer == 0,
            state_dtype=ssm_dtype,
            round_beta=round_beta,
            one_hop=one_hop,
            stop=stop,
            qkvz_format=_format(layer_.qkvz),
            ba_format=_format(layer_.ba),
            draft_tokens=verify_tokens or 0,
        )

    neighbours = [
        (first, second)
        for first, second in zip(view.layers, view.layers[1:])
        if one_launch and first.kind == second.kind == "gdn"
    ]

    def both_key(first: state.GdnView, following: state.GdnView, width: int) -> tail_front.TailFrontKey:
        return tail_front.TailFrontKey(_k2_key(geometry, width, stop, first), k1_key(following, width))

    # one K1 for a first layer without residual, one for the others, of each mix of formats that a layer has
    keys: list[Any] = []
    for width in widths:
        keys += dict.fromkeys(k1_key(v, width) for v in view.layers if v.kind == "gdn" and with_k1)
        # one K2 for each form that some layer has: a checkpoint quantises, or leaves out, each projection by itself
        keys += dict.fromkeys(_k2_key(geometry, width, stop, v) for v in view.layers)
        keys += dict.fromkeys(both_key(*pair, width) for pair in neighbours)
    kernels = agree(group, f"{name}: building the kernels", lambda: dict(zip(keys, runtime.build(keys))))
    same_launches(group, name, view, keys)
    peers = agree(group, f"{name}: the peer buffer", lambda: runtime.peer_buffer(layer.peer_bytes(geometry), group))
    epoch = runtime.zeros(4, "epoch").view(torch.int32)
    shared = {
        "epoch": epoch,
        "peers": peers.table,
        "rank": group.rank,
        "deadline_ticks": runtime.deadline_ticks(float(deadline_s)),
        "mode": RUN,
    }

    def bind(width: int) -> WidthLaunches:
        def rows(columns: int, what: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            size = dtype.itemsize * width * columns
            return runtime.zeros(size, f"{what}.w{width}")[:size].view(dtype).view(width, columns)

        at = WidthLaunches(
            k1={},
            k2={},
            hidden=rows(geometry.hidden, "hidden"),
            residuals=(rows(geometry.hidden, "residual.a"), rows(geometry.hidden, "residual.b")),
            z=rows(geometry.hidden, "z", torch.float32),
            squares=rows(geometry.z_sums, "squares", torch.float32),
            core=rows(geometry.core_width, "core"),
            core_z=rows(geometry.core_width, "core_z") if one_hop and with_k1 else None,
            core_squares=rows(geometry.gdn_units, "core_squares", torch.float32) if one_hop and with_k1 else None,
            row_index=runtime.zeros(4 * width, f"row_index.w{width}")[: 4 * width].view(torch.int32),
        )
        k1_scratch = runtime.zeros(gdn.scratch_bytes(geometry, width), f"k1.scratch.w{width}")
        # layers of one layout share it: they differ in their tags
        k2_scratch = {
            fused: runtime.zeros(layer.scratch_bytes(geometry, width, fused), f"k2.scratch{'.fused' * fused}.w{width}")
            for fused in sorted({v.moe.fused_shared for v in view.layers})
        }
        parts = {
            "core_z": 0 if at.core_z is None else at.core_z,
            "core_squares": 0 if at.core_squares is None else at.core_squares,
        }
        for v in view.layers:
            if v.kind == "gdn" and with_k1:
                key = k1_key(v, width)
                fixed = shared | _k1_weights(v)
                fixed |= {"layer_slot": K1_SLOT + v.layer, "scratch": k1_scratch, "core": at.core}
                fixed |= {"z": at.z, "squares": at.squares} | parts
                fixed |= {"draft_conv": 0, "draft_ssm": 0, "draft_index": 0} | gdn.draft_strides(None, None)
                at.k1[v.layer] = BoundLaunch(kernels[key], v.layer, [n for n, _ in gdn.ABI], fixed)
            fixed = shared | _k2_weights(v)
            fixed |= {
                "layer_slot": K2_SLOT + v.layer,
                "scratch": k2_scratch[v.moe.fused_shared],
                "out": at.hidden,
                "next_z": at.z,
                "next_squares": at.squares,
                "gnorm_w": v.gated_norm if v.kind == "gdn" else 0,
                **parts,
                "last": int(v is view.layers[-1]),
            }
            kernel = kernels[_k2_key(geometry, width, stop, v)]
            at.k2[v.layer] = BoundLaunch(kernel, v.layer, [n for n, _ in layer.ABI], fixed)
        if neighbours:
            scratches: dict[bool, torch.Tensor] = {}  # one a layout
            names = [n for n, _ in tail_front.ABI]
            for pair in neighbours:
                key = both_key(*pair, width)
                fused = key.tail.fused_shared
                if fused not in scratches:
                    label = f"k2k1.scratch.w{width}" + (".fused" if fused else "")
                    scratches[fused] = runtime.zeros(tail_front.scratch_bytes(geometry, width, fused), label)
                fixed = at.k2[pair[0].layer].fixed() | {"scratch": scratches[fused]}
                fixed |= {FRONT + name: value for name, value in at.k1[pair[1].layer].fixed().items()}
                fixed = {name: value for name, value in fixed.items() if name in names}
                at.both[pair[0].layer] = BoundLaunch(kernels[key], pair[0].layer, names, fixed)
        return at

    bound = agree(group, f"{name}: buffers", lambda: {width: bind(width) for width in widths})
    agree(group, f"{name}: warm-up", lambda: _warm_up(runtime, bound, kernels))

    def pools_fit(_: int, found: state.LayerState, slots: int) -> list[str]:
        return pool_reasons(found, geometry, ssm_dtype, slots, verify_tokens)

    pools = state.StatePools(view.gdn_layers, pools_fit)
    launches = describe_launches(kernels, verify_tokens, verify_differences, left_out)
    logger.info("rank %d: %s: %s", group.rank, name, launches)
    return Step(
        view=view,
        original=model.forward,
        geometry=geometry,
        runtime=runtime,
        widths=bound,
        epoch=epoch,
        pools=pools,
        peers=peers,
        keys=keys,
        stop=stop,
        modes=(DECODE, VERIFY) if verify_tokens is None else (VERIFY,),
        front_tokens=(verify_tokens or 1) if with_k1 else None,
    )


def describe_launches(
    kernels: Mapping[Any, Kernel],
    verify_tokens: int | None,
    verify_differences: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> str:
    """One line: the launches that were built, with their widths and what they occupy (largest over the widths), and
    the options `left_out` that verify steps do not have."""
    groups: dict[str, list[Any]] = {}
    for key in kernels:
        first = " of the first layer" if getattr(key, "first_layer", False) else ""
        states = f" with {key.state_dtype} state" if hasattr(key, "state_dtype") else ""
        forms = {"in_proj_qkvz": "qkvz_format", "in_proj_ba": "ba_format", "output projection": "projection"}
        packed = [name for name, form in forms.items() if getattr(key, form, gdn.BF16) == gdn.MXFP4]
        states += f", MXFP4 {' and '.join(packed)}" if packed else ""
        states += ", gated norm in k2" if getattr(key, "one_hop", False) else ""
        states += ", shared expert fused" if getattr(key, "fused_shared", False) else ""
        tokens = getattr(key, "draft_tokens", 0)
        states += f", {tokens} draft tokens a request" if tokens else ""
        groups.setdefault(key.launch + first + states, []).append(key)
    parts = []
    for launch, keys in sorted(groups.items()):
        text = f"{launch}, widths {', '.join(str(key.width) for key in keys)}"
        artifacts = [artifact for key in keys if (artifact := getattr(kernels[key], "artifact", None))]
        if artifacts:
            most = {n: max(getattr(a.resources, n) for a in artifacts) for n in ("vgprs", "sgprs", "lds_bytes")}
            text += f" ({most['vgprs']} VGPRs, {most['sgprs']} SGPRs, {most['lds_bytes']} B of LDS"
            text += f", {artifacts[0].grid} x {artifacts[0].block} threads)"
        parts.append(text)
    if verify_tokens is not None and verify_differences:
        parts.append(
            f"no k1 for the steps that verify {verify_tokens} tokens a request: {'; '.join(verify_differences)}; "
            "SGLang's own GDN runs up to out_proj"
        )
    if left_out:
        parts.append(f"no {' and no '.join(left_out)}: they serve decode steps, and this server's steps verify drafts")
    return "; ".join(parts)


def _format(weight: torch.Tensor) -> str:
    """Format of a projection's weight, which `spec.layer_reasons` has checked."""
    return gdn.MXFP4 if weight.dtype is torch.uint8 else gdn.BF16


def _projections(view: state.GdnView | state.AttentionView) -> tuple[torch.Tensor, ...]:
    """The weights whose format picks a layer's kernels."""
    return (view.qkvz, view.ba, view.out) if view.kind == "gdn" else (view.out,)


def _k1_weights(view: state.GdnView) -> dict[str, Any]:
    def scale(weight: torch.Tensor, codes: torch.Tensor | None) -> torch.Tensor | int:
        return codes if _format(weight) == gdn.MXFP4 else 0

    return {
        "norm_w": view.input_norm,
        "w_qkvz": view.qkvz,
        "w_ba": view.ba,
        "w_qkvz_scale": scale(view.qkvz, view.qkvz_scale),
        "w_ba_scale": scale(view.ba, view.ba_scale),
        "conv_w": view.conv,
        "a_log": view.a_log,
        "dt_bias": view.dt_bias,
        "gnorm_w": view.gated_norm,
    }


def _k2_key(geometry: Geometry, width: int, stop: bool, view: state.GdnView | state.AttentionView) -> layer.LayerKey:
    """The K2 that takes this layer's weights."""
    return layer.LayerKey(geometry, width, stop, _format(view.out), view.moe.fused_shared)


def _k2_weights(view: state.GdnView | state.AttentionView) -> dict[str, Any]:
    """K2's weights by ABI name; 0 where this form of the layer has none."""
    moe = view.moe
    weights = {
        "w_o": view.out,
        "w_o_scale": view.out_scale if _format(view.out) == layer.MXFP4 else None,
        "norm_w": view.post_norm,
        "w_router": moe.router,
        "w_sg": moe.shared_gate,
        "w_sgu": moe.shared_gate_up,
        "w_sd": moe.shared_down,
        "w13": moe.w13,
        "w13_scale": moe.w13_scale,
        "w2": moe.w2,
        "w2_scale": moe.w2_scale,
    }
    return {name: 0 if weight is None else weight for name, weight in weights.items()}


def _warm_up(runtime: Runtime, widths: dict[int, WidthLaunches], kernels: dict[Any, Kernel]) -> None:
    """Launch each kernel once in mode 0, in the same order on every rank: it returns at once and touches nothing."""
    seen: set[int] = set()
    for at in widths.values():
        for bound in at.every():
            if id(bound.kernel) in seen:
                continue
            seen.add(id(bound.kernel))
            args = bound.with_args(mode=WARM_UP)
            runtime.launch(bound.kernel, [0 if value is None else value for value in args])
    runtime.synchronize()
    if len(seen) != len(set(map(id, kernels.values()))):
        raise RuntimeError(f"{len(kernels)} kernels were built, {len(seen)} are launched")


def same_launches(group: state.RankGroup, name: str, view: state.ModelView, keys: Sequence[Any]) -> None:
    """Raise RuntimeError on every rank unless all ranks will run the same launches of the same layers.

    A launch that one rank lacks would leave its peers waiting in theirs until the deadline.
    """
    forms = [(v.layer, v.kind, [str(getattr(w, "dtype", None)) for w in _projections(v)], v.moe.fused_shared)
             for v in view.layers]  # fmt: skip
    text = repr(forms) + " ".join(key.digest() for key in keys)
    digests = group.all_gather(hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) > 1:
        found = ", ".join(f"rank {rank}: {digest[:12]}" for rank, digest in enumerate(digests))
        fix = "install the same sgl-amd-mono and start every rank with the same arguments"
        raise RuntimeError(reason(f"{name}: launch lists", found, "one list on all ranks", fix))


def agree(group: state.RankGroup, what: str, action: Callable[[], Any]) -> Any:
    """Run `action` on every rank; raise on all of them if it failed on any.

    A rank that failed still takes part in the exchange, so its peers never wait for it in a later collective.
    """
    value, error, text = None, None, ""
    try:
        value = action()
    except Exception as caught:
        error, text = caught, f"{type(caught).__name__}: {caught}"
    failed = [f"rank {rank}: {said}" for rank, said in enumerate(group.all_gather(text)) if said]
    if failed:
        raise RuntimeError(f"{what} failed: " + "; ".join(failed)) from error
    return value


def pool_reasons(
    found: state.LayerState, g: Geometry, ssm_dtype: str, slots: int, draft_tokens: int | None = None
) -> list[str]:
    """Why K1 cannot read a layer's state pools, or keep a state for each of `draft_tokens`; empty where it can."""
    no_flag = "start without --enable-amd-monokernel"
    conv, ssm = found.conv, found.ssm
    wrong = []
    need_conv = (slots, g.conv_channels, g.conv_width - 1)
    need_ssm = (slots, g.value_heads, g.head_dim, g.head_dim)
    if conv.dtype is not torch.bfloat16:
        wrong.append(reason("conv state", conv.dtype, "torch.bfloat16", "unset SGLANG_MAMBA_CONV_DTYPE"))
    if tuple(conv.shape) != need_conv:
        wrong.append(reason("conv state", f"shape {list(conv.shape)}", f"shape {list(need_conv)}", no_flag))
    if ssm.dtype is not getattr(torch, ssm_dtype):
        wrong.append(reason("SSM state", ssm.dtype, f"torch.{ssm_dtype}, as built", f"--mamba-ssm-dtype {ssm_dtype}"))
    if tuple(ssm.shape) != need_ssm:
        wrong.append(reason("SSM state", f"shape {list(ssm.shape)}", f"shape {list(need_ssm)}", no_flag))
    elif not ssm[0].is_contiguous() or ssm.stride(0) % 4 or ssm.data_ptr() % 16:
        found_text = f"strides {list(ssm.stride())}, address {ssm.data_ptr():#x}"
        need = "dense slots that start at a multiple of 16 bytes"
        wrong.append(reason("SSM state", found_text, need, no_flag))
    return wrong + ([] if draft_tokens is None else _draft_reasons(found, g, ssm_dtype, draft_tokens))


def _draft_reasons(found: state.LayerState, g: Geometry, ssm_dtype: str, tokens: int) -> list[str]:
    no_flag, wrong = "start without --enable-amd-monokernel", []
    shapes = {
        "draft conv states": (found.draft_conv, (g.conv_channels, g.conv_width - 1), torch.bfloat16),
        "draft SSM states": (found.draft_ssm, (g.value_heads, g.head_dim, g.head_dim), getattr(torch, ssm_dtype)),
    }
    for name, (tensor, shape, dtype) in shapes.items():
        need = f"{dtype} [places, at least {tokens} tokens, {', '.join(map(str, shape))}]"
        if tensor is None:
            wrong.append(reason(name, "none", need, no_flag))
        elif tensor.dtype is not dtype or tuple(tensor.shape[2:]) != shape or tensor.shape[1] < tokens:
            wrong.append(reason(name, f"{tensor.dtype} {list(tensor.shape)}", need, no_flag))
    ssm = found.draft_ssm
    if not wrong and (not ssm[0, 0].is_contiguous() or ssm.stride(0) % 4 or ssm.stride(1) % 4 or ssm.data_ptr() % 16):
        found_text = f"strides {list(ssm.stride())}, address {ssm.data_ptr():#x}"
        wrong.append(reason("draft SSM states", found_text, "dense states at multiples of 16 bytes", no_flag))
    return wrong
