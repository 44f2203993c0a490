# SPDX-License-Identifier: Apache-2.0
"""Trial inputs of K1 and its run on the simulator, for the `cost` command and the tests.

One rank, any geometry, pools with free strides and guard slots that no row names.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sgl_amd_mono.common.build import Artifact, build, compile_artifact
from sgl_amd_mono.common.sync import FAULT_BLOCK_BYTES, FaultState, decode_fault_block
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Z_SUM_COLUMNS, Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import gdn
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn_naive import GdnTrace, GdnWeights, core_of_parts, gdn_front
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.layout import E2M1, MX_BLOCK

LAYER = 5
EPOCH = 7
DEADLINE_TICKS = 5_000_000  # 50 ms of the virtual clock
CODE_OF_ONE = 127  # the e8m0 code of a scale of 1
STATE_SCALE = 0.25  # of the SSM state, so that o is mostly read from it, as after many steps
JUNK = -3.0  # outputs start with it, so that a value that was not written shows


def bf16(generator: torch.Generator, *shape: int, scale: float, mean: float = 0.0) -> Tensor:
    """Normal bf16 values."""
    return (torch.randn(*shape, generator=generator) * scale + mean).to(torch.bfloat16)


def make_weights(geometry: Geometry, seed: int, qkvz_format: str = gdn.BF16, ba_format: str = gdn.BF16) -> GdnWeights:
    """Weights whose products have unit size, as a trained layer's; the projections in the formats asked for."""
    g, gen = geometry, torch.Generator().manual_seed(seed)
    scale = g.hidden**-0.5
    w_qkvz, w_qkvz_scale = projection(gen, g.qkvz_rows, g.hidden, scale, qkvz_format)
    w_ba, w_ba_scale = projection(gen, g.ba_rows, g.hidden, scale, ba_format)
    return GdnWeights(
        norm_w=bf16(gen, g.hidden, scale=0.1),
        w_qkvz=w_qkvz,
        w_ba=w_ba,
        conv_w=bf16(gen, g.conv_channels, 4, scale=0.4),
        a_log=torch.randn(g.value_heads, generator=gen) * 0.5,
        dt_bias=bf16(gen, g.value_heads, scale=0.5),
        gnorm_w=bf16(gen, g.head_dim, scale=0.1, mean=1.0),
        w_qkvz_scale=w_qkvz_scale,
        w_ba_scale=w_ba_scale,
    )


def projection(
    generator: torch.Generator, rows: int, columns: int, scale: float, form: str
) -> tuple[Tensor, Tensor | None]:
    """A projection of about the scale asked for: (bf16 weight, None), or (packed e2m1, e8m0 codes), where all e2m1 are
    as frequent and blocks are halved or doubled at random."""
    if form == gdn.BF16:
        return bf16(generator, rows, columns, scale=scale), None
    spread = math.sqrt(sum(value**2 for value in E2M1) / len(E2M1))
    code = CODE_OF_ONE + round(math.log2(scale / spread))
    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    return packed, torch.randint(code - 1, code + 2, (rows, columns // MX_BLOCK), generator=generator).to(torch.uint8)


def left_by_k2(hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """z = hidden + residual, f32 [S, H], and sums of its squares over 8 columns, f32 [S, H / 8], in K2's order."""
    z = hidden.float() + residual.float()
    first, second = z.unflatten(1, (-1, Z_SUM_COLUMNS // 4, 2, 2)).unbind(-2)  # [S, sum, P0 or P2, even or odd], P1, P3
    fused = (first.double().square() + second.square().double()).float().sum(-2)
    return z, fused.sum(-1)


@dataclass
class K1Case:
    """One launch's tensors. Slot 0 holds NaN; the pools have guard slots that no row names, the draft states (of verify
    steps) guard places."""

    key: gdn.GdnKey
    weights: GdnWeights
    hidden: Tensor
    residual: Tensor | None
    state_index: Tensor
    conv_state: Tensor
    ssm_state: Tensor
    draft_conv: Tensor | None = None
    draft_ssm: Tensor | None = None
    draft_index: Tensor | None = None
    residual_out: Tensor = field(init=False)
    core: Tensor = field(init=False)
    core_z: Tensor | None = field(init=False)
    core_squares: Tensor | None = field(init=False)
    z: Tensor | None = field(init=False)
    squares: Tensor | None = field(init=False)
    scratch: Tensor = field(init=False)
    peers: Tensor = field(init=False)
    fault_blocks: list[Tensor] = field(init=False)
    epoch: Tensor = field(init=False)

    def __post_init__(self) -> None:
        g, width = self.key.geometry, self.key.width
        self.residual_out = torch.full((width, g.hidden), JUNK, dtype=torch.bfloat16)
        self.core = torch.full((width, g.core_width), JUNK, dtype=torch.bfloat16)
        one_hop = self.key.one_hop
        self.core_z = torch.full_like(self.core, JUNK) if one_hop else None
        self.core_squares = torch.full((width, g.gdn_units), JUNK) if one_hop else None
        self.z = torch.empty(width, g.hidden) if self.key.given_z else None
        self.squares = torch.empty(width, g.z_sums) if self.key.given_z else None
        self.scratch = torch.zeros(gdn.scratch_bytes(g, width), dtype=torch.uint8)
        self.fault_blocks = [torch.zeros(FAULT_BLOCK_BYTES // 4, dtype=torch.int32) for _ in range(g.tp)]
        self.peers = torch.tensor([b.data_ptr() for b in self.fault_blocks], dtype=torch.int64)
        self.epoch = torch.tensor([EPOCH], dtype=torch.int32)

    def gated_core(self) -> Tensor:
        """The core that the launch wrote, or that the K2 behind forms of what it left."""
        if not self.key.one_hop:
            return self.core
        return core_of_parts(self.core, self.core_z, self.core_squares, self.weights.gnorm_w, self.key.geometry.eps)

    @property
    def fault(self) -> FaultState:
        """Decoded fault block of the rank that runs."""
        return decode_fault_block(self.fault_blocks[0].tolist())

    def naive(self, products: tuple[Tensor, Tensor] | None = None) -> GdnTrace:
        """The definition's result, from the pools as they are now."""
        return gdn_front(
            self.key.geometry,
            self.weights,
            self.hidden,
            self.residual,
            self.state_index,
            self.conv_state,
            self.ssm_state,
            round_beta=self.key.round_beta,
            products=products,
            draft_tokens=self.key.draft_tokens,
        )

    def states_after(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """(conv, SSM) as the launch left them after each of the rows: the rows' slots, or their draft states."""
        tokens = self.key.tokens
        requests = [row // tokens for row in rows]
        if not self.key.draft_tokens:
            slots = self.state_index[requests].long()
            return self.conv_state[slots], self.ssm_state[slots]
        at = self.draft_index[requests].long(), [row % tokens for row in rows]
        return self.draft_conv[at], self.draft_ssm[at]

    def products(self) -> tuple[Tensor, Tensor]:
        """(in_proj_qkvz, in_proj_ba) as the launch handed them over: PROJ, and the slices of LEFT and BA summed."""
        g, width = self.key.geometry, self.key.width
        regions = gdn.scratch_regions(g, width)

        def values(name: str) -> Tensor:
            offset, nbytes = regions[name]
            return self.scratch[offset : offset + nbytes].view(torch.int32).view(-1, 2)[:, 0].contiguous()

        parts = [values("PROJ").view(torch.bfloat16).view(width, -1)]
        if g.leftover_groups:
            parts.append(values("LEFT").view(torch.float32).view(width, -1, g.leftover_slices).sum(-1).bfloat16())
        ba = values("BA").view(torch.float32).view(width, g.ba_rows, -1).sum(-1).bfloat16()
        return torch.cat(parts, 1), ba

    def tensors(self) -> dict[str, Tensor | None]:
        """Tensor arguments by ABI name; z and its squares as the K2 before leaves them, of the rows as they are now."""
        w = self.weights
        if self.z is not None:
            for tensor, value in zip((self.z, self.squares), left_by_k2(self.hidden, self.residual), strict=True):
                tensor.copy_(value)
        return {
            "hidden": self.hidden,
            "residual": self.residual,
            "z": self.z,
            "squares": self.squares,
            "norm_w": w.norm_w,
            "w_qkvz": w.w_qkvz,
            "w_ba": w.w_ba,
            "w_qkvz_scale": w.w_qkvz_scale,
            "w_ba_scale": w.w_ba_scale,
            "conv_w": w.conv_w,
            "a_log": w.a_log,
            "dt_bias": w.dt_bias,
            "gnorm_w": w.gnorm_w,
            "conv_state": self.conv_state,
            "ssm_state": self.ssm_state,
            "state_index": self.state_index,
            "draft_conv": self.draft_conv,
            "draft_ssm": self.draft_ssm,
            "draft_index": self.draft_index,
            "residual_out": self.residual_out,
            "core": self.core,
            "core_z": self.core_z,
            "core_squares": self.core_squares,
            "scratch": self.scratch,
            "peers": self.peers,
            "epoch": self.epoch,
        }

    def arguments(
        self, *, layer: int = LAYER, mode: int = 1, deadline_ticks: int = DEADLINE_TICKS, rank: int = 0
    ) -> list[int]:
        """Values in ABI order; tensors by address. `rank`: which of the fault blocks is the launch's own."""
        args = gdn.launch_args(
            self.key.geometry, **self.tensors(), rank=rank, layer_slot=layer, deadline_ticks=deadline_ticks, mode=mode
        )
        return [a.data_ptr() if isinstance(a, Tensor) else a for a in args]


def make_case(
    key: gdn.GdnKey,
    seed: int = 0,
    *,
    pads: tuple[int, ...] = (),
    weights: GdnWeights | None = None,
    slots: int | None = None,
    spread_strides: bool = False,
) -> K1Case:
    """Inputs of one launch. `pads`: requests with no state (0 and -1 in turn). `spread_strides`: conv pool with taps
    outermost and an SSM pool with a gap between slots; draft windows that overlap, as SGLang keeps them on a GPU."""
    g, width, gen = key.geometry, key.width, torch.Generator().manual_seed(1000 + seed)
    slots = slots or width + 4
    order = (torch.randperm(slots - 1, generator=gen)[: key.requests] + 1).to(torch.int32)
    for n, row in enumerate(pads):
        order[row] = -(n % 2)
    dtype = getattr(torch, key.state_dtype)
    if spread_strides:
        conv = torch.empty(slots, 3, g.conv_channels, dtype=torch.bfloat16).transpose(1, 2)
        gap = torch.empty(slots, g.value_heads * g.head_dim * g.head_dim + 64, dtype=dtype)
        ssm = gap[:, :-64].unflatten(1, (g.value_heads, g.head_dim, g.head_dim))
    else:
        conv = torch.empty(slots, g.conv_channels, 3, dtype=torch.bfloat16)
        ssm = torch.empty(slots, g.value_heads, g.head_dim, g.head_dim, dtype=dtype)
    conv.copy_(bf16(gen, *conv.shape, scale=1.0))
    ssm.copy_(torch.randn(ssm.shape, generator=gen) * STATE_SCALE)
    conv[0], ssm[0] = float("nan"), float("nan")
    drafts = draft_states(key, spread_strides) if key.draft_tokens else {}
    return K1Case(
        key,
        weights or make_weights(g, seed, key.qkvz_format, key.ba_format),
        bf16(gen, width, g.hidden, scale=0.5),
        None if key.first_layer else bf16(gen, width, g.hidden, scale=2.0),
        order,
        conv,
        ssm,
        **drafts,
    )


def draft_states(key: gdn.GdnKey, overlapping: bool) -> dict[str, Tensor]:
    """Draft states full of junk, with a place that no request names; the requests' places in falling order."""
    g, places, tokens = key.geometry, key.requests + 1, key.draft_tokens
    if overlapping:  # window t is columns t .. t + 2 of one buffer a channel
        columns = tokens + 2
        conv = torch.full((places, g.conv_channels, columns), JUNK, dtype=torch.bfloat16)
        conv = conv.as_strided((places, tokens, g.conv_channels, 3), (g.conv_channels * columns, 1, columns, 1))
    else:
        conv = torch.full((places, tokens, g.conv_channels, 3), JUNK, dtype=torch.bfloat16)
    shape = (places, tokens, g.value_heads, g.head_dim, g.head_dim)
    return {
        "draft_conv": conv,
        "draft_ssm": torch.full(shape, JUNK, dtype=getattr(torch, key.state_dtype)),
        "draft_index": torch.arange(key.requests, dtype=torch.int32).flip(0).contiguous(),
    }


def span(tensor: Tensor) -> tuple[int, int]:
    """(address, bytes) of the memory that a strided tensor reaches."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), reach * tensor.element_size()


READONLY = (
    *("hidden", "residual", "z", "squares", "norm_w", "w_qkvz", "w_ba", "w_qkvz_scale", "w_ba_scale"),
    *("conv_w", "a_log", "dt_bias", "gnorm_w"),
    *("state_index", "draft_index", "peers", "epoch"),
)


def map_case(machine, case: K1Case, rank: int = 0) -> None:
    """Register every tensor of a case with a simulated machine."""
    g, width = case.key.geometry, case.key.width
    regions = [(name, *place) for name, place in gdn.scratch_regions(g, width).items() if place[1]]
    for name, tensor in case.tensors().items():
        if tensor is None:
            continue
        address, nbytes = span(tensor)
        if name == "scratch":
            machine.map(rank, address, nbytes, name, kind="mailbox", regions=regions)
        else:
            kept = (*READONLY, "conv_state", "ssm_state") if case.key.draft_tokens else READONLY
            machine.map(rank, address, nbytes, name, kind="readonly" if name in kept else "plain")
    for n, block in enumerate(case.fault_blocks):
        machine.map(rank, *span(block), f"fault block of rank {n}", kind="peer")


def run(case: K1Case, *, memory: str = "consistent", seed: int = 0, code=None, faults=(), machine=None, **arguments):
    """Build the case's key, run it once on a simulated machine, return the report. `code` replaces the built code."""
    from sgl_amd_mono.sim import CodeObject, Launch, Machine

    artifact = built(case.key) if code is None else _uncached(case.key)
    if machine is None:
        machine = Machine(ranks=1, cus=max(256, case.key.grid), memory=memory, seed=seed)
        map_case(machine, case)
    for fault in faults:
        machine.inject(fault)
    code = code or CodeObject.parse(artifact.isa)
    block = artifact.pack(case.arguments(**arguments))
    return machine.launch([Launch(rank=0, code=code, grid=artifact.grid, block=artifact.block, kernargs=block)])


@functools.cache
def _uncached(key: gdn.GdnKey) -> Artifact:
    """The key's arguments and grid where other code runs in its place: nothing goes into the cache of kernels, as a
    control may have changed the sources that are compiled here."""
    return compile_artifact(key)


def built(key: gdn.GdnKey) -> Artifact:
    """The key's kernel, from the session's cache."""
    return build(key)
