# SPDX-License-Identifier: Apache-2.0
"""Trial inputs of K2 and its launch on the simulator, all ranks together: for the `cost` command and the tests.

Expert weights are mapped lazily, so that eight ranks of the true size fit in memory: an expert takes memory once it is
filled, and one that is not filled reads as zeros.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch

from sgl_amd_mono.common.build import Artifact, build
from sgl_amd_mono.common.sync import FAULT_BLOCK_BYTES, FaultState, decode_fault_block
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import GDN_UNIT_ROWS, MAX_ROWS, MX_BLOCK, Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layer_naive as naive
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layout
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn_naive import core_of_parts
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.layer import (
    BF16,
    INTER_PAIRS,
    INTER_WORDS,
    MXFP4,
    ROUTE_WORDS,
    LayerKey,
    peer_bytes,
    peer_regions,
    scratch_bytes,
    scratch_regions,
)

SLOT = 128 + 5  # K2 of layer 5
DEADLINE = 2_000_000  # 20 ms of the virtual clock


@dataclass(frozen=True)
class Variant:
    """The fields of K2's build key that a model's weights decide."""

    projection: str = BF16
    fused_shared: bool = False

    def key(self, geometry: Geometry, width: int, stop: bool = False) -> LayerKey:
        """The build key. `stop`: as a server builds it."""
        return LayerKey(geometry, width, stop, self.projection, self.fused_shared)


PLAIN = Variant()
VARIANTS = {
    "plain": PLAIN,
    "mxfp4": Variant(projection=MXFP4),
    "fused": Variant(fused_shared=True),
    "mxfp4-fused": Variant(MXFP4, True),
}


@cache
def artifact(geometry: Geometry, width: int, stop: bool = False, variant: Variant = PLAIN) -> Artifact:
    """The built kernel, from the cache where it is there. `stop`: as a server builds it."""
    return build(variant.key(geometry, width, stop))


@cache
def code(geometry: Geometry, width: int, stop: bool = False, variant: Variant = PLAIN):
    """The kernel's code object, decoded."""
    from sgl_amd_mono.sim import CodeObject

    return CodeObject.parse(artifact(geometry, width, stop, variant).isa)


def lazy_bytes(*shape: int) -> torch.Tensor:
    """Zeroed uint8 tensor whose pages exist only once they are touched."""
    count = 1
    for n in shape:
        count *= n
    return torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8).reshape(shape)


@dataclass
class RankWeights:
    """One rank's weight tensors by ABI name."""

    tensors: dict[str, torch.Tensor]

    keep_experts: bool = True  # hold the float64 experts (not at true size)

    @cached_property
    def _experts(self) -> Callable[[int], naive.Expert]:
        t = self.tensors
        experts = naive.LayerWeights.from_shuffled(t["w13"], t["w13_scale"], t["w2"], t["w2_scale"])
        return cache(experts) if self.keep_experts else experts

    @property
    def variant(self) -> Variant:
        """The kernel that takes these tensors."""
        return Variant(MXFP4 if "w_o_scale" in self.tensors else BF16, "w_sgu" not in self.tensors)

    def naive(self) -> naive.LayerWeights:
        t = self.tensors
        return naive.LayerWeights(
            t["w_o"], t["norm_w"], t["w_router"], t.get("w_sgu"), t["w_sg"], t.get("w_sd"), self._experts,
            t.get("w_o_scale"),
        )  # fmt: skip


def random_weights(
    geometry: Geometry, seed: int, experts: Sequence[int] | None = None, variant: Variant = PLAIN
) -> list[RankWeights]:
    """Weights of every rank, seeded; only the experts in `experts` are filled (all where it is None).

    The tensors that two variants share hold the same values; a fused shared expert counts as expert E.
    """
    g = geometry
    count = g.experts + variant.fused_shared
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=rng) * scale).to(torch.bfloat16)

    h = g.hidden
    common = {
        "norm_w": normal(h, scale=0.2),
        "w_router": normal(g.experts, h, scale=1.5 * h**-0.5),
        "w_sg": normal(h, scale=h**-0.5),
    }
    ranks = []
    for _ in range(g.tp):
        ri, si = g.moe_intermediate, g.shared_intermediate
        tensors = dict(common)
        tensors["w_o"] = normal(h, g.core_width, scale=(g.core_width * g.tp) ** -0.5)
        tensors["w_sgu"] = normal(2 * si, h, scale=1.5 * h**-0.5)
        tensors["w_sd"] = normal(h, si, scale=(si * g.tp) ** -0.5)
        if variant.projection == MXFP4:
            tensors["w_o"], tensors["w_o_scale"] = layout.quantize_mxfp4(tensors["w_o"], layout.scale_code_even)
        if variant.fused_shared:
            del tensors["w_sgu"], tensors["w_sd"]
        tensors["w13"] = lazy_bytes(count, 2 * ri, h // 2)
        tensors["w13_scale"] = lazy_bytes(count, 2 * ri, h // MX_BLOCK)
        tensors["w2"] = lazy_bytes(count, h, ri // 2)
        tensors["w2_scale"] = lazy_bytes(count, h, ri // MX_BLOCK)
        ranks.append(RankWeights(tensors))
    for rank, weights in enumerate(ranks):
        for e in experts if experts is not None else range(count):
            fill_expert(g, weights, e, seed * 1_000_003 + rank * g.experts + e)
    return ranks


def fill_expert(geometry: Geometry, weights: RankWeights, expert: int, seed: int) -> None:
    """Random nibbles and codes of one expert; a random byte is as good shuffled as not."""
    g = geometry
    rng = torch.Generator().manual_seed(seed)
    middle13 = 127 - round(torch.log2(torch.tensor(2.0 * g.hidden**0.5)).item())
    middle2 = 127 - round(torch.log2(torch.tensor(2.5 * (g.moe_intermediate * g.tp) ** 0.5)).item())
    for name, middle in (("w13", middle13), ("w2", middle2)):
        w, s = weights.tensors[name][expert], weights.tensors[f"{name}_scale"][expert]
        w.copy_(torch.randint(0, 256, w.shape, dtype=torch.uint8, generator=rng))
        s.copy_(torch.randint(middle - 2, middle + 2, s.shape, dtype=torch.uint8, generator=rng))


@dataclass
class CoreParts:
    """What a one-hop K1 leaves of one rank's core: o, z bf16 [S, core], sums of o^2 f32 [S, core / 8]; its weight."""

    o: torch.Tensor
    z: torch.Tensor
    squares: torch.Tensor
    gnorm_w: torch.Tensor

    def rows(self, index: torch.Tensor) -> CoreParts:
        return CoreParts(*(t[index].contiguous() for t in (self.o, self.z, self.squares)), self.gnorm_w)

    def core(self, eps: float) -> torch.Tensor:
        """The core that K2 forms, by the definition."""
        return core_of_parts(self.o, self.z, self.squares, self.gnorm_w, eps)


@dataclass
class Inputs:
    """Activations of a step: one core a rank, the residual, the row indices; `parts`: K2 forms the cores from them."""

    cores: list[torch.Tensor]
    residual: torch.Tensor
    row_index: torch.Tensor
    parts: list[CoreParts] | None = None

    def rows(self, take: Sequence[int]) -> Inputs:
        """The same rows in another order or number."""
        index = torch.tensor(list(take))
        return Inputs(
            [c[index].contiguous() for c in self.cores],
            self.residual[index].contiguous(),
            self.row_index[index].contiguous(),
            self.parts and [p.rows(index) for p in self.parts],
        )

    @property
    def width(self) -> int:
        return self.residual.shape[0]


def random_parts(geometry: Geometry, width: int, rng: torch.Generator) -> CoreParts:
    """Seeded parts of one rank's core, whose values have about unit size."""
    o, z = (torch.randn(width, geometry.core_width, generator=rng).to(torch.bfloat16) for _ in range(2))
    squares = o.float().square().unflatten(1, (-1, GDN_UNIT_ROWS)).sum(-1)
    return CoreParts(o, z, squares, (1 + 0.1 * torch.randn(geometry.head_dim, generator=rng)).to(torch.bfloat16))


def parts_of(core: torch.Tensor, geometry: Geometry) -> CoreParts:
    """Parts from which K2 forms exactly this bf16 core: o is the core, and rstd * w * silu(z) is 1 but for 1e-5."""
    g = geometry
    z = torch.linspace(1, 8, 4096).to(torch.bfloat16).unique()
    silu = z.double() * torch.sigmoid(z.double())
    weight = (1 / silu).to(torch.bfloat16)
    best = int((weight.double() * silu - 1).abs().argmin())
    squares = torch.full((len(core), g.gdn_units), g.head_dim * (1 - g.eps) / g.units_per_head)
    return CoreParts(core, torch.full_like(core, float(z[best])), squares, weight[best].repeat(g.head_dim))


def random_inputs(geometry: Geometry, width: int, seed: int, pads: Sequence[int] = (), gates: bool = False) -> Inputs:
    """Seeded activations; rows in `pads` are pad rows whose core is NaN. gates: with the parts of the cores."""
    g = geometry
    rng = torch.Generator().manual_seed(seed)
    parts = [random_parts(g, width, rng) for _ in range(g.tp)] if gates else None
    cores = ([p.core(g.eps) for p in parts] if parts else None) or [
        torch.randn(width, g.core_width, generator=rng).to(torch.bfloat16) for _ in range(g.tp)
    ]
    residual = (2 * torch.randn(width, g.hidden, generator=rng)).to(torch.bfloat16)
    row_index = torch.arange(1, width + 1, dtype=torch.int32)
    for i, pad in enumerate(pads):
        row_index[pad] = -(i % 2)  # 0 and -1 are both pad rows
        for core in cores:
            core[pad] = float("nan")
        for part in parts or ():
            part.o[pad] = float("nan")
    return Inputs(cores, residual, row_index, parts)


@dataclass
class Result:
    """What the ranks wrote, with readers for the values between the stages."""

    bench: Bench
    out: list[torch.Tensor]
    residual: list[torch.Tensor]
    next_z: list[torch.Tensor]
    next_squares: list[torch.Tensor]
    report: object
    parity: int
    width: int
    faults: list[FaultState] = field(default_factory=list)

    def _scratch(self, rank: int, name: str, dtype: torch.dtype) -> torch.Tensor:
        span = scratch_regions(self.bench.geometry, self.width, self.bench.variant.fused_shared)[name]
        return self.bench.scratch[self.width][rank][span.offset : span.offset + span.nbytes].view(dtype)

    def _pairs(self, rank: int, name: str) -> torch.Tensor:
        return self._scratch(rank, name, torch.int32).reshape(-1, 2)[:, 0]

    def x(self, rank: int = 0) -> torch.Tensor:
        return self._scratch(rank, "X", torch.bfloat16).reshape(self.width, -1).clone()

    def logits(self, rank: int = 0) -> torch.Tensor:
        """bf16 [S, E] out of the rank's own peer buffer."""
        g = self.bench.geometry
        span = peer_regions(g)["RLOG.odd" if self.parity else "RLOG"]
        words = self.bench.peers[rank][span.offset : span.offset + span.nbytes].view(torch.int32)
        words = words.reshape(MAX_ROWS // 2, g.experts, 2)[..., 0].contiguous()
        halves = words.view(torch.bfloat16).reshape(MAX_ROWS // 2, g.experts, 2)
        return halves.permute(0, 2, 1).reshape(MAX_ROWS, g.experts)[: self.width].clone()

    def route(self, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int64 and weights f64 [S, picks]; a fused shared expert's weight is the gate."""
        raw = self._scratch(rank, "ROUTE", torch.int32).reshape(2, self.width, ROUTE_WORDS)
        k, fused = self.bench.geometry.top_k, self.bench.variant.fused_shared
        ids, weights = raw[0, :, : k + fused].long(), raw[1].contiguous().view(torch.float32)[:, :k].double()
        if fused:
            gate = torch.where(ids[:, k] >= 0, self.gate(rank).double(), 0.0)
            weights = torch.cat([weights, gate[:, None]], 1)
        return ids, weights

    def inter(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed uint8 [S, picks, RI/2] and codes uint8 [S, picks, RI/32]."""
        picks = self.bench.geometry.top_k + self.bench.variant.fused_shared
        words = self._pairs(rank, "INTER").reshape(self.width, picks, -1, INTER_PAIRS)
        packed = words[..., :INTER_WORDS].contiguous().view(torch.uint8).reshape(self.width, picks, -1)
        return packed, words[..., INTER_WORDS].to(torch.uint8)

    def gate(self, rank: int = 0) -> torch.Tensor:
        """Gate of the shared expert f32 [S]."""
        return self._pairs(rank, "GATE").contiguous().view(torch.float32)

    def shared(self, rank: int) -> torch.Tensor:
        """Shared activation bf16 [S, SI]."""
        g = self.bench.geometry
        words = self._pairs(rank, "SHARED").reshape(-1, g.shared_intermediate).contiguous()
        halves = words.view(torch.bfloat16).reshape(-1, g.shared_intermediate, 2)
        return halves.permute(0, 2, 1).reshape(-1, g.shared_intermediate)[: self.width]


class Bench:
    """All ranks' memory and a simulated machine; `run` launches K2 on all ranks together."""

    def __init__(self, geometry: Geometry, weights: Sequence[RankWeights], *, memory: str = "consistent", seed: int = 0,
                 stop: bool = False, **machine) -> None:  # fmt: skip
        from sgl_amd_mono.sim import Machine

        g = geometry
        self.geometry, self.weights, self.stop, self.variant = g, weights, stop, weights[0].variant
        self.machine = Machine(ranks=g.tp, cus=g.blocks, memory=memory, seed=seed, **machine)
        self.scratch: dict[int, list[torch.Tensor]] = {}
        self.peers = [torch.zeros(peer_bytes(g), dtype=torch.uint8) for _ in range(g.tp)]
        self.epoch = [torch.zeros(1, dtype=torch.int32) for _ in range(g.tp)]
        self.table = torch.tensor([p.data_ptr() for p in self.peers], dtype=torch.int64)
        regions = [(name, span.offset, span.nbytes) for name, span in peer_regions(g).items()]
        regions = [("fault", 0, FAULT_BLOCK_BYTES), *regions]
        for rank in range(g.tp):
            for name, tensor in weights[rank].tensors.items():
                self.machine.map_tensor(rank, tensor, name, kind="readonly")
            for owner, peer in enumerate(self.peers):
                self.machine.map_tensor(rank, peer, f"peer{owner}", kind="mailbox", regions=regions)
            self.machine.map_tensor(rank, self.epoch[rank], "epoch", kind="readonly")
            self.machine.map_tensor(rank, self.table, "peers", kind="readonly")

    def _scratch_of(self, width: int) -> list[torch.Tensor]:
        if width not in self.scratch:
            g = self.geometry
            fused = self.variant.fused_shared
            regions = [(name, span.offset, span.nbytes) for name, span in scratch_regions(g, width, fused).items()]
            self.scratch[width] = [torch.zeros(scratch_bytes(g, width, fused), dtype=torch.uint8) for _ in range(g.tp)]
            for rank, tensor in enumerate(self.scratch[width]):
                self.machine.map_tensor(rank, tensor, f"scratch{width}", kind="mailbox", regions=regions)
        return self.scratch[width]

    def run(self, inputs: Inputs, *, epoch: int = 1, slot: int = SLOT, last: int = 0, mode: int = 1,
            deadline: int = DEADLINE, program=None, codes=None, slots=None) -> Result:  # fmt: skip
        """One launch on every rank; `program` (all ranks) or `codes` (one a rank) replace the built code, `slots`
        (one a rank) the tag slot."""
        from sgl_amd_mono.sim import Launch

        g, width = self.geometry, inputs.width
        built = artifact(g, width, self.stop, self.variant)
        codes = codes or [program or code(g, width, self.stop, self.variant)] * g.tp
        scratch = self._scratch_of(width)
        launches, outs, residuals, zs, squares = [], [], [], [], []
        tensors: list[tuple[int, torch.Tensor]] = []
        for rank in range(g.tp):
            self.epoch[rank].fill_(epoch)
            out = torch.full((width, g.hidden), float("nan"), dtype=torch.bfloat16)
            residual_out = torch.full_like(out, float("nan"))
            next_z = torch.full((width, g.hidden), float("nan"))
            next_squares = torch.full((width, g.z_sums), float("nan"))
            residual = inputs.residual.clone()
            row_index = inputs.row_index.clone()
            part = inputs.parts[rank] if inputs.parts else None
            core = part.o if part else inputs.cores[rank]
            of_parts = {"core_z": part.z, "core_squares": part.squares, "gnorm_w": part.gnorm_w} if part else {}
            for tensor, name, kind in (
                (core, "core", "readonly"),
                *((tensor, name, "readonly") for name, tensor in of_parts.items()),
                (residual, "residual", "readonly"),
                (row_index, "row_index", "readonly"),
                (out, "out", "plain"),
                (residual_out, "residual_out", "plain"),
                (next_z, "next_z", "plain"),
                (next_squares, "next_squares", "plain"),
            ):
                self.machine.map_tensor(rank, tensor, name, kind=kind)
                tensors.append((rank, tensor))
            values = {name: t.data_ptr() for name, t in self.weights[rank].tensors.items()}
            values |= {
                "core_z": 0, "core_squares": 0, "gnorm_w": 0, "gates": int(part is not None),
                **{name: tensor.data_ptr() for name, tensor in of_parts.items()},
                "core": core.data_ptr(), "residual": residual.data_ptr(), "out": out.data_ptr(),
                "residual_out": residual_out.data_ptr(), "row_index": row_index.data_ptr(),
                "next_z": next_z.data_ptr(), "next_squares": next_squares.data_ptr(),
                "scratch": scratch[rank].data_ptr(), "peers": self.table.data_ptr(),
                "epoch": self.epoch[rank].data_ptr(), "deadline_ticks": deadline, "rank": rank, "mode": mode,
                "layer_slot": slots[rank] if slots else slot, "last": last,
            }  # fmt: skip
            kernargs = built.pack([values.get(a.name, 0) for a in built.arguments])
            launches.append(Launch(rank=rank, code=codes[rank], grid=built.grid, block=built.block, kernargs=kernargs))
            outs.append(out)
            residuals.append(residual_out)
            zs.append(next_z)
            squares.append(next_squares)
        try:
            report = self.machine.launch(launches)
        finally:
            for rank, tensor in tensors:
                self.machine.unmap(rank, tensor.data_ptr())
        faults = [decode_fault_block(p[:FAULT_BLOCK_BYTES].view(torch.int32).tolist()) for p in self.peers]
        return Result(self, outs, residuals, zs, squares, report, epoch & 1, width, faults)

    def clear_faults(self) -> None:
        """Forget the faults of earlier launches (a test's own second run; a server ends)."""
        for peer in self.peers:
            peer[:FAULT_BLOCK_BYTES] = 0
        self.machine.clear_faults()
