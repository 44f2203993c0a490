# SPDX-License-Identifier: Apache-2.0
"""K2, the layer tail: output projection, all-reduce, norm, router, experts, all-reduce, as one persistent launch.

One workgroup of 512 threads on each CU, all resident, all ranks together; S = width rows. What a stage hands on:

=============  ======================================================  ===================================  =========
hand-off       value                                                   written by                           scope
=============  ======================================================  ===================================  =========
AR             bf16 pairs of the output projection's partials          every workgroup, to every rank       cross 1
REDUCED, MSQ   bf16 sums over the ranks; squares of z, also their flag the H/128 workgroups of the norm     device 1
RLOG           bf16 logits of two rows                                 a workgroup an expert, to all ranks  cross 2
SHARED, GATE   shared expert's activation, its sigmoid gate            `shared_blocks`; one workgroup       device
INTER          routed intermediates: MXFP4 words and codes             a workgroup a (slot, 32 columns)     device 2
FINAL          bf16 pairs of the rank's partial output                 every workgroup, to every rank       cross 3
=============  ======================================================  ===================================  =========

Weights in flight while a hand-off is awaited: for AR and MSQ the shared expert's and the router's rows; for RLOG the
shared down projection; for INTER all of the workgroup's w2. The first w13 task is requested as soon as the route is
known, with the first slots of w2; each later task, and the rest of w2 after the last one, as the registers of the task
before it are read.

No route travels: every workgroup picks every row's experts from the logits. Nothing in a row's arithmetic depends on
the width, on the other rows or on the slot that an expert gets: a row is one MFMA column, K is cut over the eight
waves in the same way at every width, and each sum has one order (waves 0..7, ranks 0.., picks by rank of the logit).

Two variants, each a field of the build key. `projection` "mxfp4": w_o in MXFP4 as Quark stores it, the core quantised
before it. `fused_shared`: the shared expert is expert E of w13 and w2, every live row's pick number top_k with the
gate's sigmoid as its weight; SHARED and its stages fall away.

A pad row (`row_index` <= 0) joins no expert; its `residual_out` and `out` rows are written as zeros. Its core row may
hold anything: a row is a column of its own in every product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar

from sgl_amd_mono.common.build import Abi, BuildKey
from sgl_amd_mono.common.geometry import divide, require
from sgl_amd_mono.common.sync import FAULT_BLOCK_BYTES, PAIR_BYTES
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import (
    MAX_ROWS,
    MFMA_K,
    MFMA_ROWS,
    MX_BLOCK,
    NORM_COLUMNS,
    Z_SUM_COLUMNS,
    Geometry,
)

# In groups of 64 bytes that are needed until the same stage: the compiler loads such a group, and keeps it, whole.
ABI: Abi = (
    ("epoch", "ptr"),  # int32 [1]
    ("peers", "ptr"),  # int64 [tp]: peer buffers of peer_bytes(geometry) as this rank sees them
    ("scratch", "ptr"),  # scratch_bytes(geometry, width), zeroed once
    ("deadline_ticks", "i64"),  # 100 MHz ticks of one wait
    ("rank", "i32"),
    ("layer_slot", "i32"),  # 128 + layer
    ("mode", "i32"),  # 0: return at once
    ("gates", "i32"),  # 1 behind a one-hop K1: the gated norm is done here
    ("last", "i32"),  # 1 in a step's last launch: the ranks exchange their failed bits
    ("core", "ptr"),  # bf16 [S, core]; with `gates` o, from which the core is formed
    ("core_z", "ptr"),  # bf16 [S, core], with `gates`
    ("core_squares", "ptr"),  # f32 [S, core/8], with `gates`: sums of o^2 over 8 columns
    ("gnorm_w", "ptr"),  # bf16 [128], with `gates`
    ("w_o", "ptr"),  # bf16 [H, core]; projection "mxfp4": uint8 [H, core/2], plain
    ("w_o_scale", "ptr"),  # projection "mxfp4": uint8 [H, core/32], plain; else 0
    ("norm_w", "ptr"),  # bf16 [H], applied as 1 + w
    ("w_router", "ptr"),  # bf16 [E, H]; a rank reads its E/tp rows
    ("w_sgu", "ptr"),  # bf16 [2 SI, H]: gate rows, then up rows; 0 where the shared expert is fused
    ("w_sg", "ptr"),  # bf16 [H]
    ("residual", "ptr"),  # bf16 [S, H]
    ("residual_out", "ptr"),  # bf16 [S, H], written
    ("row_index", "ptr"),  # int32 [>= S]; <= 0: pad row
    ("w_sd", "ptr"),  # bf16 [H, SI]; 0 where the shared expert is fused
    ("w13", "ptr"),  # uint8 [E, 2 RI, H/2], shuffled (16, 16); E + 1 experts where the shared one is fused, so below
    ("w13_scale", "ptr"),  # uint8 [E, 2 RI, H/32], shuffled
    ("w2", "ptr"),  # uint8 [E, H, RI/2], shuffled (16, 16)
    ("w2_scale", "ptr"),  # uint8 [E, H, RI/32], shuffled
    ("out", "ptr"),  # bf16 [S, H], written
    ("next_z", "ptr"),  # f32 [S, H], written: out + residual_out, what the next layer's norm starts from
    ("next_squares", "ptr"),  # f32 [S, H/8], written: sums of its squares over 8 columns
)

OUTPUTS = ("out", "residual_out", "next_z", "next_squares", "scratch")  # what the kernel writes

# Regions as fault records number them.
AR, MSQ, RLOG, SHARED, GATE, INTER, FINAL, MARKS = range(8)
REGION_NAMES = ("AR", "MSQ", "RLOG", "SHARED", "GATE", "INTER", "FINAL", "MARKS")
WAIT_ORDER = {AR: 0, MSQ: 1, RLOG: 2, SHARED: 3, GATE: 3, INTER: 4, FINAL: 5, MARKS: 6}  # along the longest chain
WAITS = ("AR", "MSQ", "RLOG", "SHARED", "GATE", "INTER", "FINAL")  # what a launch waits for, in order
FUSED_WAITS = tuple(name for name in WAITS if name != "SHARED")  # ... with the shared expert fused
CROSS_WAITS = ("AR", "RLOG", "FINAL")  # the waits on other ranks

SLOT_BASE = 128  # tag slot of layer 0
WAVES = 8
LANES = 64
THREADS = WAVES * LANES
WORKGROUP_COLUMNS = 32  # hidden columns of one workgroup: two MFMA tiles, one MX block
TILES = WORKGROUP_COLUMNS // MFMA_ROWS  # tiles of a workgroup's hidden columns
UNIT_COLUMNS = 8 * LANES  # columns of a row that one wave holds as 8 a lane
MX_STEP = 128  # columns of one scaled MFMA
SCALE_STEP = 256  # columns that one shuffled scale word covers
PROJECT_TILES_MAX = 4  # output projection tasks of a workgroup that its registers hold
ROUTE_WORDS = 16  # words of one row in the route tables
NOT_PICKED = 0xF  # nibble of a row that did not pick a slot's expert
INTER_WORDS = 4  # words of 8 e2m1 in one MX block
INTER_PAIRS = INTER_WORDS + 1  # ... and its code
LDS_PAD = 16  # bytes after an LDS row, so that rows start in different banks
LOWEST_LOGIT = -3.0e38  # what a NaN logit counts as
BF16, MXFP4 = "bfloat16", "mxfp4"  # formats of the output projection's weight
REGION_ALIGN = 256


@dataclass(frozen=True)
class Span:
    """A named range of a buffer, in bytes."""

    offset: int
    nbytes: int


def _spans(start: int, sizes: Mapping[str, int]) -> dict[str, Span]:
    """Ranges one after another from `start`, each aligned to REGION_ALIGN bytes."""
    spans, top = {}, start
    for name, nbytes in sizes.items():
        spans[name] = Span(top, nbytes)
        top += -(-nbytes // REGION_ALIGN) * REGION_ALIGN
    return spans


def _end(spans: Mapping[str, Span]) -> int:
    last = list(spans.values())[-1]
    return last.offset + -(-last.nbytes // REGION_ALIGN) * REGION_ALIGN


def _halves(geometry: Geometry) -> list[dict[str, Span]]:
    """Regions of the two halves (by epoch parity) of a peer buffer, in the layout of MAX_ROWS rows at every width."""
    rows = geometry.tp * MAX_ROWS * geometry.hidden // 2 * PAIR_BYTES
    sizes = {"AR": rows, "RLOG": MAX_ROWS // 2 * geometry.experts * PAIR_BYTES, "FINAL": rows}
    even = _spans(FAULT_BLOCK_BYTES, sizes)
    return [even, _spans(_end(even), sizes)]


def peer_bytes(geometry: Geometry) -> int:
    """Bytes of each rank's peer buffer, fault block included; the same for every width."""
    return _end(_halves(geometry)[1])


def peer_regions(geometry: Geometry) -> dict[str, Span]:
    """Named ranges of a peer buffer: AR, RLOG and FINAL, the second parity's with a suffix `.odd`."""
    even, odd = _halves(geometry)
    return even | {f"{name}.odd": span for name, span in odd.items()}


def scratch_regions(geometry: Geometry, width: int, fused_shared: bool = False) -> dict[str, Span]:
    """Named ranges of the scratch buffer.

    Mailboxes: MSQ [S][H/128], SHARED [ceil(S/2)][SI], GATE [S], INTER [S][top_k][RI/32][5], MARKS [blocks], all pairs.
    With the shared expert fused there is no SHARED, and INTER has a pick more.
    Plain: REDUCED bf16 [S][H], X bf16 [S][H], ROUTE int32 ids [S][16], then f32 weights [S][16] (top_k of each are
    used); X and ROUTE are there for check mode and tests.
    """
    s, h = width, geometry.hidden
    sizes = {
        "MSQ": s * geometry.norm_partials * PAIR_BYTES,
        "SHARED": -(-s // 2) * geometry.shared_intermediate * PAIR_BYTES,
        "GATE": s * PAIR_BYTES,
        "INTER": s
        * (geometry.top_k + fused_shared)
        * (geometry.moe_intermediate // MX_BLOCK)
        * INTER_PAIRS
        * PAIR_BYTES,
        "MARKS": geometry.blocks * PAIR_BYTES,
        "REDUCED": 2 * s * h,
        "X": 2 * s * h,
        "ROUTE": 2 * s * ROUTE_WORDS * 4,
    }
    if fused_shared:
        del sizes["SHARED"]
    return _spans(0, sizes)


def scratch_bytes(geometry: Geometry, width: int, fused_shared: bool = False) -> int:
    """Bytes of the scratch buffer of one width; zeroed once, never shared with another width or launch."""
    return _end(scratch_regions(geometry, width, fused_shared))


@dataclass(frozen=True)
class Plan:
    """Counts that the stages derive from a geometry and a width; refuses what does not divide."""

    geometry: Geometry
    width: int
    projection: str = BF16
    fused_shared: bool = False

    def __post_init__(self) -> None:
        g = self.geometry
        require(1 <= self.width <= MAX_ROWS, f"width = {self.width}, K2 serves 1 .. {MAX_ROWS} rows")
        require(
            g.hidden == WORKGROUP_COLUMNS * g.blocks,
            f"hidden = {g.hidden}, K2 needs {WORKGROUP_COLUMNS} columns x {g.blocks} workgroups = "
            f"{WORKGROUP_COLUMNS * g.blocks}",
        )
        require(self.projection in (BF16, MXFP4), f"projection = {self.projection!r}, K2 has bfloat16 and mxfp4")
        if self.projection == MXFP4:
            divide("core / (8 waves x 128 columns)", g.core_width, WAVES * MX_STEP)
        else:
            divide("core / (8 waves x 32 columns)", g.core_width, WAVES * MFMA_K)
        units = divide("hidden / 512", g.hidden, UNIT_COLUMNS)
        require(units % WAVES == 0 or WAVES % units == 0, f"hidden / 512 = {units}, must divide 8 waves or be divided")
        if self.fused_shared:
            require(
                g.shared_intermediate == g.moe_intermediate,
                f"shared_intermediate = {g.shared_intermediate}, fused into experts of {g.moe_intermediate}",
            )
        else:
            divide("shared_intermediate / workgroups", g.shared_intermediate, g.blocks)
            divide("shared columns of a workgroup / wave groups", self.shared_columns, self.wave_groups)
            require(
                self.shared_columns * self.row_pairs <= LANES,
                f"{self.shared_columns} shared columns x {self.row_pairs} row pairs, one wave puts at most {LANES}",
            )
            divide("shared_intermediate / (8 waves x 32)", g.shared_intermediate, WAVES * MFMA_K)
        divide("moe_intermediate / 256", g.moe_intermediate, SCALE_STEP)
        steps = divide("hidden / 128", g.hidden, MX_STEP)
        per_wave = divide("128-column steps / 8 waves", steps, WAVES)
        require(per_wave == 1 or per_wave % 4 == 0, f"{per_wave} 128-column steps a wave, must be 1 or a multiple of 4")
        require(g.experts <= THREADS, f"experts = {g.experts}, at most {THREADS} (one thread each)")
        require(g.experts % 2 == 0, f"experts = {g.experts}, must be even")
        require(self.picks < NOT_PICKED, f"top_k = {self.picks}, must be below {NOT_PICKED} (a nibble)")
        require(g.tp <= MAX_ROWS, f"tp = {g.tp}, at most {MAX_ROWS}")
        require(g.norm_partials <= g.blocks, f"{g.norm_partials} norm workgroups > {g.blocks}")

    # ---- balance: a step of the most slots gives the last workgroups one routed-up task more than the others
    @property
    def light_blocks(self) -> int:
        """Workgroups that never get that task more; the others are the last ones."""
        g = self.geometry
        return g.blocks - self.slots * self.mx_blocks % g.blocks

    @property
    def up_task_bytes(self) -> int:
        """Weight bytes of a routed-up task."""
        h = self.geometry.hidden
        return 2 * WORKGROUP_COLUMNS * (h // 2 + h // MX_BLOCK)

    @property
    def project_tile_bytes(self) -> int:
        """Weight bytes of an output projection task."""
        core = self.geometry.core_width
        return MFMA_ROWS * (core // 2 + core // MX_BLOCK if self.projection == MXFP4 else 2 * core)

    @cached_property
    def project_tasks(self) -> tuple[int, int, int]:
        """(a, r, h): of the output projection's tasks of 16 hidden columns workgroup b < light_blocks has a + 1 where
        b < r, else a; the others have h each.

        The choice that makes the most bytes of a workgroup, with its routed-up task, smallest; at most
        PROJECT_TILES_MAX tasks a workgroup, for the registers.
        """
        g, light = self.geometry, self.light_blocks
        choices = []
        for few in range(PROJECT_TILES_MAX + 1):
            rest = g.hidden // MFMA_ROWS - few * (g.blocks - light)
            most = -(-rest // light)
            if 0 <= most <= PROJECT_TILES_MAX:
                up = self.up_task_bytes if light < g.blocks else 0
                most_bytes = max(up + few * self.project_tile_bytes, most * self.project_tile_bytes)
                choices.append((most_bytes, few, *divmod(rest, light)))
        _, few, each, more = min(choices)
        return each, more, few

    @property
    def project_tiles(self) -> int:
        """Most output projection tasks of a workgroup."""
        each, more, few = self.project_tasks
        return max(each + (more > 0), few)

    @property
    def shared_blocks(self) -> int:
        """Workgroups 0 .. with columns of the shared expert: half of all, where the light ones past them suffice for
        the further rows (two each), so that whoever has a routed-up task more has no whole rows."""
        g, light = self.geometry, self.light_blocks
        half = g.blocks // 2
        fits = 2 * g.shared_intermediate // g.blocks * self.row_pairs <= LANES
        if self.fused_shared or not fits:
            return g.blocks
        return half if light < g.blocks and 2 * (light - half) > g.router_rows else g.blocks

    @property
    def splits_rows(self) -> bool:
        """No workgroup has both rows of the shared expert and further rows."""
        return self.shared_blocks < self.geometry.blocks

    @property
    def extra_blocks(self) -> range:
        """Workgroups with further rows (router rows of the rank, the shared gate's): light ones, where enough."""
        g, light = self.geometry, self.light_blocks
        if self.splits_rows:
            return range(self.shared_blocks, light)
        return range(light if light > g.router_rows else g.blocks)

    # ---- norm and shared expert
    @property
    def row_pairs(self) -> int:
        """Pairs of rows that share one 32-bit word."""
        return -(-self.width // 2)

    @cached_property
    def units(self) -> int:
        """512-column units of a hidden row."""
        return self.geometry.hidden // UNIT_COLUMNS

    @property
    def unit_waves(self) -> int:
        """Waves that together hold one hidden row."""
        return min(self.units, WAVES)

    @property
    def wave_units(self) -> int:
        """Units of a row that one wave holds."""
        return max(1, self.units // WAVES)

    @property
    def wave_groups(self) -> int:
        """Groups of waves, each holding the whole row, that share out the weight rows."""
        return WAVES // self.unit_waves

    @property
    def shared_columns(self) -> int:
        """Columns of the shared expert's intermediate that one of `shared_blocks` computes; 0 where it is fused."""
        return 0 if self.fused_shared else self.geometry.shared_intermediate // self.shared_blocks

    @property
    def shared_rows(self) -> int:
        """Weight rows (gate and up) for them."""
        return 2 * self.shared_columns

    @property
    def extra_rows(self) -> int:
        """Most further rows of a workgroup: the rank's router rows and the shared gate's."""
        return -(-(self.geometry.router_rows + 1) // len(self.extra_blocks))

    @property
    def first_extra(self) -> int:
        """Number of the first further row among a workgroup's rows."""
        return 0 if self.splits_rows else self.shared_rows

    @property
    def rows(self) -> int:
        """Most whole rows of a workgroup; row n is held by wave group n % wave_groups."""
        return max(self.shared_rows, self.first_extra + self.extra_rows)

    # ---- experts
    @property
    def picks(self) -> int:
        """Experts of a row: the routed ones, and the shared one where it is fused."""
        return self.geometry.top_k + self.fused_shared

    @property
    def slots(self) -> int:
        """Most different experts of a step."""
        return min(self.width * self.geometry.top_k, self.geometry.experts) + self.fused_shared

    @property
    def steps(self) -> int:
        """128-column steps of hidden that one wave computes."""
        return self.geometry.hidden // MX_STEP // WAVES

    @property
    def up_words(self) -> int:
        """Scale words of a wave's steps for two adjacent tiles of w13."""
        return max(1, self.steps // 2)

    @property
    def up_rounds(self) -> int:
        """Most routed-up tasks of a workgroup."""
        return -(-self.slots * self.mx_blocks // self.geometry.blocks)

    @property
    def mx_blocks(self) -> int:
        """MX blocks of a routed intermediate; also the tasks of a slot, 32 columns each."""
        return self.geometry.moe_intermediate // MX_BLOCK

    @property
    def down_steps(self) -> int:
        """128-column steps of a routed intermediate."""
        return self.geometry.moe_intermediate // MX_STEP

    @property
    def shared_steps(self) -> int:
        """32-column steps of the shared intermediate that one wave computes."""
        return self.geometry.shared_intermediate // MFMA_K // WAVES

    @property
    def pollers(self) -> int:
        """Waves kept free of expert weights to poll the intermediates: one a row while that leaves six."""
        return self.width if self.width <= 2 else 0

    @property
    def workers(self) -> int:
        """Waves that multiply w2."""
        return WAVES - self.pollers

    @property
    def worker_slots(self) -> int:
        """Most slots of w2 that a worker wave multiplies; all of them are in its registers at once."""
        return -(-self.slots // self.workers)

    @property
    def early_slots(self) -> int:
        """Those that are requested together with the first task of w13; the others take the last task's registers."""
        return min(self.worker_slots, 2 if self.up_rounds == 1 else 1)


def projection_formats(mxfp4: tuple[str, ...]) -> tuple[str, ...]:
    """The formats that K2 is built for, one or both, where the named projections are MXFP4: "out_proj" of GDN layers,
    "o_proj" of attention layers."""
    return tuple(dict.fromkeys(MXFP4 if name in mxfp4 else BF16 for name in ("out_proj", "o_proj")))


@dataclass(frozen=True)
class LayerKey(BuildKey):
    """Build key of K2. `stop`: a lost wait raises a GPU fault (the server) instead of returning (the tests).

    `projection` and `fused_shared` are the variants of the module's text.
    """

    geometry: Geometry
    width: int
    stop: bool = True
    projection: str = BF16
    fused_shared: bool = False

    model: ClassVar[str] = "qwen38_a95b"
    launch: ClassVar[str] = "k2"
    abi: ClassVar[Abi] = ABI
    slot_base: ClassVar[int] = SLOT_BASE
    region_names: ClassVar[tuple[str, ...]] = REGION_NAMES
    readonly: ClassVar[frozenset[str]] = frozenset(name for name, kind in ABI if kind == "ptr" and name not in OUTPUTS)

    def __post_init__(self) -> None:
        self._plan()

    def _plan(self) -> Plan:
        return Plan(self.geometry, self.width, self.projection, self.fused_shared)

    def scratch_regions(self) -> dict[str, tuple[int, int]]:
        spans = scratch_regions(self.geometry, self.width, self.fused_shared)
        return {n: (r.offset, r.nbytes) for n, r in spans.items()}

    def peer_regions(self) -> dict[str, tuple[int, int]]:
        return {n: (r.offset, r.nbytes) for n, r in peer_regions(self.geometry).items()}

    @property
    def grid(self) -> int:
        return self.geometry.blocks

    @property
    def block(self) -> int:
        return THREADS

    @property
    def hints(self) -> dict[str, Any]:
        return {"waves_per_eu": 2}  # one workgroup a CU: registers are there to hold weights in flight

    def body(self) -> Callable[..., None]:
        plan, stop = self._plan(), self.stop

        def kernel(**arguments: Any) -> None:
            _trace(plan, stop, arguments)

        return kernel


# ---------------------------------------------------------------------------------------------------------------------
# The kernel. Below, `t` is a row of the step, `lane_row` = lane % 16 the MFMA row (of weights) and column (of the
# step's rows) of a lane, `group` = lane / 16 its part of K.
# ---------------------------------------------------------------------------------------------------------------------


class _Launch:
    """What the stages share while one kernel is traced: arguments, indices, LDS, hand-offs."""

    def __init__(self, plan: Plan, stop: bool, arguments: Mapping[str, Any], lds_bytes: int = 0) -> None:
        """`lds_bytes`: at least so many are allocated, for stages that follow in the same launch."""
        from sgl_amd_mono.common import device as d
        from sgl_amd_mono.common import gemv
        from sgl_amd_mono.common.sync import Region, Sync

        self.d, self.gemv, self.plan, self.g, self.a = d, gemv, plan, plan.geometry, arguments
        self.s = plan.width
        g, s = self.g, self.s
        self.thread, self.lane, self.wave, self.block = d.thread_id(), d.lane_id(), d.wave_id(), d.block_id()
        self.lane_row, self.group = gemv.operand_lane()
        # Lanes of MFMA columns past the last row repeat the last row; what they compute is not stored.
        self.lane_t = gemv.clamped_row(s)
        self.in_rows = d.compare("ult", self.lane_row, d.I32(s))
        self._allocate(lds_bytes)
        self.sync = Sync(
            epoch=arguments["epoch"], slot=arguments["layer_slot"], peers=arguments["peers"], rank=arguments["rank"],
            ranks=g.tp, deadline_ticks=arguments["deadline_ticks"], mode=arguments["mode"], dead=self.dead, stop=stop,
        )  # fmt: skip
        self.scratch = scratch_regions(g, s, plan.fused_shared)

        def mailbox(number: int) -> Region:
            base = arguments["scratch"] + d.I64(self.scratch[REGION_NAMES[number]].offset)
            return Region(number, base, order=WAIT_ORDER[number])

        self.msq, self.gate = mailbox(MSQ), mailbox(GATE)
        if not plan.fused_shared:
            self.shared = mailbox(SHARED)
        self.inter, self.marks = mailbox(INTER), mailbox(MARKS)
        even, odd = _halves(g)
        # The step's parity is bit 8 of the tag: a tag is 256 * epoch + slot + 1, slot + 1 < 256.
        parity = d.zext((self.sync.tag >> 8) & 1, d.I64)
        self.peer_offset = {
            name: d.I64(even[name].offset) + parity * d.I64(odd[name].offset - even[name].offset) for name in even
        }
        self.ar, self.rlog, self.final = (
            Region(n, self.sync.own_base + self.peer_offset[REGION_NAMES[n]], system=True, order=WAIT_ORDER[n])
            for n in (AR, RLOG, FINAL)
        )
        self.next_flag: Region | None = None  # see `final_sum`

    def _allocate(self, lds_bytes: int) -> None:
        """LDS of the launch; the union of what the stages hold, nothing overlaid but `partial`."""
        d, p, g, s = self.d, self.plan, self.g, self.s
        up_row = g.hidden // 2 + LDS_PAD
        code_row = g.hidden // MX_BLOCK + LDS_PAD
        core_row = 2 * g.core_width + LDS_PAD
        sizes = {
            "dead": 16,
            "rstd": 4 * MAX_ROWS,
            "gates": 4 * MAX_ROWS,
            "masks": 8 * WAVES,
            "ids": 4 * ROUTE_WORDS * s,
            "weights": 4 * ROUTE_WORDS * s,
            "table": 8 * p.slots,  # slot -> (expert, nibble t: the pick of row t, or NOT_PICKED)
            # cross-wave sums of the output projection, then of the shared down
            "partial": WAVES * max(TILES, p.project_tiles) * s * MFMA_ROWS * 4,
            "dots": p.rows * s * p.unit_waves * 4,
            "x_words": s * max(up_row, core_row),  # the gated core, then x as MXFP4: words ...
            "x_codes": s * code_row,  # ... and codes [t][column / 32 % 4][column / 128]
            "up": WAVES * 2 * TILES * s * MFMA_ROWS * 4,  # cross-wave sums of w13: gate tiles, then up tiles
            "inter_words": s * p.picks * p.mx_blocks * 16,
            "inter_codes": s * p.picks * p.mx_blocks * 4,
            "activation": 0 if p.fused_shared else s * (2 * g.shared_intermediate + LDS_PAD),
            "picks": s * p.picks * WORKGROUP_COLUMNS * 4,  # weighted outputs of each (row, pick)
        }
        self.up_row, self.code_row, self.core_row = up_row, code_row, core_row
        self.activation_row = 2 * g.shared_intermediate + LDS_PAD
        self.lds = d.Lds(max(lds_bytes, sum(-(-n // 16) * 16 for n in sizes.values())))
        for name, nbytes in sizes.items():
            setattr(self, name, self.lds.take(nbytes))

    # ---- small things
    def at(self, condition: Any) -> Any:
        """`with k.at(condition):` a run-time branch."""
        return self.d.if_(condition)

    def below(self, value: Any, bound: Any) -> Any:
        """value < bound, both non-negative Int32."""
        return self.d.compare("ult", value, self.d.I32(bound))

    def equal(self, a: Any, b: Any) -> Any:
        """a == b for Int32."""
        return self.d.compare("eq", a, self.d.I32(b))

    def live(self, t: Any) -> Any:
        """Row `t` (uniform) is no pad row."""
        d = self.d
        return d.compare("sgt", d.load_uniform(self.a["row_index"], t * 4, d.I32), d.I32(0))

    def spread(self, count: int, body: Callable[[Any], None]) -> None:
        """`body(i)` for i = 0 .. count - 1 over the workgroup's threads."""
        thread = self.d.opaque(self.thread)  # or what two stages derive from it is kept in registers between them
        for first in range(0, count, THREADS):
            index = thread + first
            if count - first >= THREADS:
                body(index)
            else:
                with self.at(self.below(index, count)):
                    body(index)

    def push_pairs(
        self, region_name: str, region: Any, first: Any, tiles: int, value: Callable[[Any, Any], Any], count: Any = None
    ) -> None:
        """Push a bf16 pair `value(t, pair)` of each row and column pair of `tiles` tiles to every rank's region.

        `first` is the pair's number in a hidden row where the tiles start; tiles from `count` on (uniform; None: all
        are there) are left out. Item i = (destination rank, row, pair): the pairs of a row are adjacent stores.
        """
        d, s, g = self.d, self.s, self.g
        pairs = tiles * MFMA_ROWS // 2

        def push(i: Any) -> None:
            rest, pair = d.unsigned_divide(i, pairs)
            to, t = d.unsigned_divide(rest, s)
            base = d.load(self.a["peers"], to * 8, d.I64) + self.peer_offset[region_name]
            index = (self.a["rank"] * MAX_ROWS + t) * (g.hidden // 2) + first + pair
            if count is None:
                self.sync.put(region, index, value(t, pair), base=base)
            else:
                with self.at(self.below(pair >> 3, count)):
                    self.sync.put(region, index, value(t, pair), base=base)

        self.spread(pairs * s * g.tp, push)

    def sum_ranks(self, words: list[Any]) -> tuple[Any, Any]:
        """f32 sums of bf16 pairs in rank order, the first taken as it is."""
        d = self.d
        low, high = d.f32_from_bf16_pair(words[0])
        for word in words[1:]:
            a, b = d.f32_from_bf16_pair(word)
            low, high = low + a, high + b
        return low, high


def _trace(plan: Plan, stop: bool, arguments: Mapping[str, Any]) -> None:
    """The launch, stage by stage in the order in which a workgroup runs them."""
    k = _Launch(plan, stop, arguments)
    layer_tail(k)
    final_sum(k)
    k.sync.step_end(arguments["last"], k.marks, plan.geometry.blocks)


def layer_tail(k: _Launch) -> None:
    """All stages up to the push of the rank's partial output."""
    plan = k.plan
    tiles = project_mxfp4(k) if plan.projection == MXFP4 else project(k)
    rows = load_row_weights(k)
    k.d.compiler_fence()
    publish_projection(k, tiles)
    norm(k)
    await_norm(k)
    normed_rows(k, rows)
    down = None if plan.fused_shared else load_shared_down(k)
    k.d.compiler_fence()
    route(k)
    slots = unite(k)
    up = _issue(load_up(k, slots, k.g.blocks - 1 - k.block))
    routed = _issue(load_down(k, slots, range(plan.early_slots)))
    k.d.compiler_fence()  # the loads stay here, ahead of what they are for
    routed += routed_up(k, slots, up, load_down(k, slots, range(plan.early_slots, plan.worker_slots)))
    gather(k)
    routed_down(k, slots, routed)
    if down is None:
        k.d.barrier()  # before the picks of all waves are added
    else:
        shared_down(k, down)
    publish_output(k)


# ---- 1: output projection -------------------------------------------------------------------------------------------


def project(k: _Launch) -> list[Any]:
    """Output projection: 16-row tasks of w_o [H, C], adjacent ones a workgroup; waits for nothing.

    K is cut in eighths over the waves; f32 accumulators, not yet summed over the waves. A task that a workgroup does
    not have reads from a buffer of no bytes.
    """
    d, gemv, p, g = k.d, k.gemv, k.plan, k.g
    row_bytes, columns = 2 * g.core_width, g.core_width // WAVES
    lane_bytes = gemv.bf16_lane_bytes(row_bytes) + k.wave * (2 * columns)
    parts = load_core_parts(k)
    first, count = _project_share(k)
    weights = []
    for tile in range(p.project_tiles):
        present = None if count is None else k.below(d.I32(tile), count)
        w_o = gemv.guarded(k.a["w_o"], g.hidden * row_bytes, present)
        at = lane_bytes + (first + tile) * (MFMA_ROWS * row_bytes)
        weights.append([gemv.load_bf16_tile(w_o, at, step) for step in range(columns // MFMA_K)])
    core = load_core(k, parts)
    return [gemv.multiply_bf16(tile, core) for tile in weights]


def project_mxfp4(k: _Launch) -> list[Any]:
    """The same tasks of an MXFP4 w_o [H, C/2] with its codes [H, C/32], plain; waits for nothing.

    A lane's operand of a 128-column step is one MX block of its row of the core: it quantises its own (scale of
    `mxfp4_code_even`, as SGLang's linear). K is cut in eighths over the waves; scaled MFMA, f32 accumulators.
    """
    d, gemv, p, g = k.d, k.gemv, k.plan, k.g
    wave = d.opaque_uniform(k.wave)  # or its multiples are kept for the stages that have the same
    columns, row_bytes, row_codes = g.core_width // WAVES, g.core_width // 2, g.core_width // MX_BLOCK
    steps = columns // MX_STEP
    lane_bytes = gemv.bf16_lane_bytes(row_bytes) + wave * (columns // 2)
    lane_codes = k.lane_row * row_codes + wave * (columns // MX_BLOCK)
    parts = load_core_parts(k)
    first, count = _project_share(k)
    weights, codes = [], []
    for tile in range(p.project_tiles):
        present = None if count is None else k.below(d.I32(tile), count)
        w_o = gemv.guarded(k.a["w_o"], g.hidden * row_bytes, present)
        scales = gemv.guarded(k.a["w_o_scale"], g.hidden * row_codes, present)
        row = (first + tile) * MFMA_ROWS
        weights.append([gemv.load_plain_mxfp4_tile(w_o, lane_bytes + row * row_bytes, i) for i in range(steps)])
        codes.append(gemv.load_plain_mxfp4_codes(scales, lane_codes + row * row_codes, steps))
    words = [d.vector_element(piece, i) for piece in load_core(k, parts) for i in range(4)]
    x = [d.mxfp4_quantize_block(words[16 * i : 16 * i + 16]) for i in range(steps)]
    accs = []
    for tile, scales in zip(weights, codes, strict=True):
        acc = d.zero_acc()
        for weight, word, (values, code) in zip(tile, scales, x, strict=True):
            acc = d.mfma_mxfp4(weight, values, acc, gemv.plain_mxfp4_code(word), 0, code, 0)
        accs.append(acc)
    return accs


def load_core_parts(k: _Launch) -> list[list[Any]]:
    """With `gates`: issue the loads of what a one-hop K1 leaves of this wave's eighth of the columns: [row] of o and z
    of the lane's columns, in words, and one of their head's sums of o^2."""
    d, g = k.d, k.g
    columns = g.core_width // THREADS
    words = d.I32 if columns == 2 else d.vec(d.I32, columns // 2)
    like = [words, words, d.F32] * k.s

    def loads() -> list[Any]:
        own = k.thread * columns
        head = d.unsigned_divide(own, g.head_dim)[0]
        found = []
        for t in range(k.s):
            at = own * 2 + t * (2 * g.core_width)
            number = head * g.units_per_head + (k.lane & (g.units_per_head - 1)) + t * g.gdn_units
            found += [d.load(k.a[name], at, words) for name in ("core", "core_z")]
            found.append(d.load(k.a["core_squares"], number * 4, d.F32))
        return found

    found = d.if_else(_gates(k), loads, lambda: [d.fly.poison(kind) for kind in like], like)
    return [found[i : i + 3] for i in range(0, len(found), 3)]


def _gates(k: _Launch) -> Any:
    return k.d.compare("ne", k.a["gates"], k.d.I32(0))


def load_core(k: _Launch, parts: list[list[Any]]) -> list[Any]:
    """The wave's columns of the core as MFMA operands: 16 bytes a lane for each step of 32 columns, or four times 16,
    its own 32 columns, for each of 128 columns that are quantised.

    With `gates` the core is formed here, bit for bit as a K1 of two hops forms it: bf16((o * rstd * w) * silu(z)), the
    head's 16 sums added at distance 1, 2, 4, 8; it goes through LDS inside the wave. Else it is read.
    """
    d, gemv, g = k.d, k.gemv, k.g
    columns, tile = g.core_width // WAVES, d.vec(d.I32, 4)
    steps = range(columns // MFMA_K)
    wave_bytes = k.wave * (2 * columns)
    own_bytes = 2 * MX_BLOCK if k.plan.projection == MXFP4 else gemv.LANE_BYTES  # of a lane, adjacent in its row
    pieces = own_bytes // gemv.LANE_BYTES
    at = [i // pieces * (4 * own_bytes) + i % pieces * gemv.LANE_BYTES for i in steps]

    def plain() -> list[Any]:
        # Lanes of columns past the last row read past the end: no request, zeros.
        rows = gemv.guarded(k.a["core"], k.s * 2 * g.core_width)
        lane_bytes = k.lane_row * (2 * g.core_width) + k.group * own_bytes + wave_bytes
        return [rows.load(lane_bytes + i, tile, d.PLAIN) for i in at]

    def gated() -> list[Any]:
        each = g.core_width // THREADS
        first = k.thread * each
        words = d.I32 if each == 2 else d.vec(d.I32, each // 2)
        weight = _pairs(k, d.load(k.a["gnorm_w"], (first & (g.head_dim - 1)) * 2, words))
        for t, (o, z, squares) in enumerate(parts):
            total = d.wave_sum(squares, g.units_per_head)
            rstd = d.rsq(d.fma(total, d.F32(1.0 / g.head_dim), d.F32(g.eps)))
            words = [_gated_pair(k, *pairs, rstd) for pairs in zip(_pairs(k, o), _pairs(k, z), weight, strict=True)]
            k.x_words.store(words[0] if each == 2 else d.vector_from(words), first * 2 + t * k.core_row)
        lane_bytes = k.lane_t * k.core_row + k.group * own_bytes + wave_bytes
        return [k.x_words.load(lane_bytes + i, tile) for i in at]

    return d.if_else(_gates(k), gated, plain, [tile] * len(steps))


def _pairs(k: _Launch, words: Any) -> list[Any]:
    """f32 x 2 of each word of two bf16."""
    d = k.d
    each = [words] if isinstance(words, d.I32) else [d.vector_element(words, i) for i in range(words.numel)]
    return [d.vector_from(d.f32_from_bf16_pair(word)) for word in each]


def _gated_pair(k: _Launch, o: Any, z: Any, weight: Any, rstd: Any) -> Any:
    """A word of two bf16: (o * rstd * w) * silu(z)."""
    d = k.d
    splat = lambda value: d.vector_from([value, value])  # noqa: E731
    scaled = z * splat(d.F32(-d.LOG2_E))
    power = d.vector_from([d.exp2(d.vector_element(scaled, i)) for i in range(2)]) + splat(d.F32(1.0))
    silu = z * d.vector_from([d.rcp(d.vector_element(power, i)) for i in range(2)])
    core = ((o * splat(rstd)) * weight) * silu
    return d.pack_bf16(d.vector_element(core, 0), d.vector_element(core, 1))


def _project_share(k: _Launch) -> tuple[Any, Any]:
    """(first task, number of tasks) of this workgroup; the number is None where it is the same for all."""
    d, p = k.d, k.plan
    each, more, few = p.project_tasks
    if not more and (few == each or p.light_blocks == k.g.blocks):
        return k.block * each, None
    is_light = k.below(k.block, p.light_blocks)
    has_more = k.below(k.block, more)
    first = k.block * each + d.select(has_more, k.block, d.I32(more))
    count = d.select(has_more, d.I32(each + 1), d.I32(each))
    heavy_first = p.light_blocks * each + more + (k.block - p.light_blocks) * few
    return d.select(is_light, first, heavy_first), d.select(is_light, count, d.I32(few))


def publish_projection(k: _Launch, tiles: list[Any]) -> None:
    """Sum the waves' eighths in order 0..7, round to bf16, push to AR of every rank (workgroups with tasks)."""
    _store_tiles(k, k.partial, tiles)
    k.sync.leave_if_failed()  # holds the barrier that the sums below need
    first, count = _project_share(k)
    n = len(tiles)
    k.push_pairs(
        "AR", k.ar, first * (MFMA_ROWS // 2), n, lambda t, pair: k.d.pack_bf16(*_wave_pair(k, t, pair, n)), count
    )


def _store_tiles(k: _Launch, region: Any, tiles: list[Any]) -> None:
    """This wave's accumulators to LDS f32 [wave][tile][t][16 rows]."""
    gemv = k.gemv
    tile_bytes = k.s * gemv.COLUMN_BYTES
    gemv.store_partials(region, tiles, k.s, k.wave * (len(tiles) * tile_bytes), tile_bytes)


def _wave_pair(k: _Launch, t: Any, pair: Any, tiles: int = TILES) -> tuple[Any, Any]:
    """Columns 2*pair and 2*pair + 1 of row t, summed over the waves of `partial` ([wave][tile][t][16])."""
    d, gemv = k.d, k.gemv
    tile, row = pair >> 3, (pair & 7) * 2
    at = (tile * k.s + t) * gemv.COLUMN_BYTES + row * 4
    stride = tiles * k.s * gemv.COLUMN_BYTES
    total = gemv.sum_in_order(k.partial, at, stride, range(WAVES), d.vec(d.F32, 2))
    return d.vector_element(total, 0), d.vector_element(total, 1)


# ---- 2: all-reduce, residual, norm ----------------------------------------------------------------------------------


def norm(k: _Launch) -> None:
    """Workgroups 0 .. H/128 - 1, wave t = row t, a lane two of the 128 columns. Waits for AR; publishes REDUCED, MSQ.

    f32 sum over the ranks, bf16 (REDUCED); z = that + residual in f32; residual_out = bf16(z). REDUCED's flag is the
    sum of squares of its 128 columns of z (butterfly over the lanes), put after this wave's stores have completed.
    """
    d, g, s = k.d, k.g, k.s
    with k.at(k.below(k.block, g.norm_partials)), k.at(k.below(k.wave, s)):
        t, column = k.wave, k.block * NORM_COLUMNS + k.lane * 2
        residual = d.load(k.a["residual"], (t * g.hidden + column) * 2, d.I32)
        live = k.live(t)
        pair = k.block * (NORM_COLUMNS // 2) + k.lane
        words = k.sync.poll([(k.ar, (r * MAX_ROWS + t) * (g.hidden // 2) + pair) for r in range(g.tp)])
        reduced = d.pack_bf16(*k.sum_ranks(words))
        z = [a + b for a, b in zip(*map(d.f32_from_bf16_pair, (reduced, residual)), strict=True)]
        rounded = d.select(live, d.pack_bf16(*z), d.I32(0))
        d.store(rounded, k.a["residual_out"], (t * g.hidden + column) * 2, d.AGENT)  # the final sum reads it back
        total = d.wave_sum(z[0] * z[0] + z[1] * z[1])
        at = (t * g.hidden + column) * 2 + k.scratch["REDUCED"].offset
        d.store(reduced, k.a["scratch"], at, d.AGENT)
        d.wait_stores()
        with k.at(k.equal(k.lane, 0)):
            k.sync.put(k.msq, t * g.norm_partials + k.block, total)


I32_HIGH = -65536  # bits 31..16


@dataclass
class _RowWeights:
    """Weights of whole hidden rows in registers: [row of the wave][unit] of 8 bf16 a lane, and the norm's."""

    norm: list[Any]
    rows: list[list[Any]]


def load_row_weights(k: _Launch) -> _RowWeights:
    """Issue the loads of the workgroup's rows: the shared expert's gate rows, its up rows, then router rows.

    A wave holds `wave_units` units of 512 columns of each of its rows, 8 columns a lane. Rows that a workgroup does
    not have are read past the end of a buffer of no bytes: they request nothing and give zeros.
    """
    d, p = k.d, k.plan
    columns = [_unit_column(k, j) for j in range(p.wave_units)]
    norm_weights = [d.load(k.a["norm_w"], c * 2, d.vec(d.I32, 4)) for c in columns]
    return _RowWeights(norm_weights, [_load_row(k, m, columns) for m in range(-(-p.rows // p.wave_groups))])


def _load_row(k: _Launch, m: int, columns: list[Any]) -> list[Any]:
    """Units of row m of this wave."""
    d, p, g = k.d, k.plan, k.g
    first, row = m * p.wave_groups, _wave_row(k, m)
    choices = []  # (base, present) of what the row is
    if first < p.shared_rows:
        up = first >= p.shared_columns  # gate rows first: shared_columns is a multiple of wave_groups
        start = k.block * p.shared_columns + (g.shared_intermediate - p.shared_columns if up else 0)
        offset = d.zext((start + row) * (2 * g.hidden), d.I64)
        choices.append((k.a["w_sgu"] + offset, k.below(k.block, p.shared_blocks)))
    if first + p.wave_groups > p.first_extra:
        number = _extra_row(k, row - p.first_extra)
        present = d.compare("ule", number, d.I32(g.router_rows)) & k.below(row - p.first_extra, p.extra_rows)
        router = d.zext(k.a["rank"] * g.router_rows + d.select(present, number, d.I32(0)), d.I64) * d.I64(2 * g.hidden)
        choices.append((d.select(k.equal(number, g.router_rows), k.a["w_sg"], k.a["w_router"] + router), present))
    base, present = choices[0]
    for other, other_present in choices[1:]:
        base, present = d.select(present, base, other), present | other_present
    buffer = d.Buffer(base, d.select(present, d.I32(2 * g.hidden), d.I32(0)))
    return [buffer.load(c * 2, d.vec(d.I32, 4), d.NT) for c in columns]


def _wave_row(k: _Launch, m: int) -> Any:
    """Number among the workgroup's rows of this wave's row m."""
    p = k.plan
    return (k.wave >> (p.unit_waves.bit_length() - 1)) + m * p.wave_groups


def _unit_column(k: _Launch, j: int) -> Any:
    """First of the 8 columns that this lane holds of the wave's unit j."""
    p = k.plan
    return ((k.wave & (p.unit_waves - 1)) + WAVES * j) * UNIT_COLUMNS + k.lane * 8


def _extra_row(k: _Launch, i: Any) -> Any:
    """This workgroup's i-th further row: a router row of the rank, then the shared gate's, then none."""
    d, some = k.d, k.plan.extra_blocks
    has = k.below(k.block - some.start, len(some))
    return d.select(has, some.stop - 1 - k.block + i * len(some), d.I32(1 << 20))


def await_norm(k: _Launch) -> None:
    """Wave 7 waits for MSQ of all rows and sums the partials (butterfly over the lanes): rstd to LDS (all workgroups).

    rstd = v_rsq(sum / H + eps).
    """
    d, g, s = k.d, k.g, k.s
    with k.at(k.equal(k.wave, WAVES - 1)):
        has = k.below(k.lane, g.norm_partials)
        partial = d.select(has, k.lane, d.I32(g.norm_partials - 1))
        values = k.sync.poll([(k.msq, t * g.norm_partials + partial) for t in range(s)], [d.F32] * s)
        for t, value in enumerate(values):
            total = d.wave_sum(d.select(has, value, d.F32(0.0)))
            k.rstd.store(d.rsq(total * d.F32(1.0 / g.hidden) + d.F32(g.eps)), 4 * t)
    k.sync.barrier()
    d.compiler_fence()


# ---- 3: normed rows: router, shared expert up, MXFP4 ----------------------------------------------------------------


def normed_rows(k: _Launch, rows: _RowWeights) -> None:
    """Every workgroup forms x of every row in registers and uses it three times; waits for nothing more.

    z = REDUCED + residual in f32; x = bf16((z * rstd) * (1 + w)). (1) dot products with this workgroup's weight rows: a
    lane's 8 columns of each unit in order (fma), butterfly over the lanes, waves in order. (2) MXFP4 of x to LDS
    (RCEIL). (3) 32 columns of x to scratch. Publishes RLOG (bf16 logits of two rows a word, to every rank), GATE (f32
    sigmoid) and SHARED (h = bf16(bf16(silu(bf16 g)) * bf16 u), two rows a word).
    """
    d, p, g, s = k.d, k.plan, k.g, k.s
    reduced, residual = (
        d.Buffer(k.a["scratch"], scratch_bytes(g, s, p.fused_shared)),
        d.Buffer(k.a["residual"], 2 * s * g.hidden),
    )
    columns = [_unit_column(k, j) for j in range(p.wave_units)]
    raw = [
        [
            (
                reduced.load((t * g.hidden + c) * 2 + k.scratch["REDUCED"].offset, d.vec(d.I32, 4), d.AGENT),
                residual.load((t * g.hidden + c) * 2, d.vec(d.I32, 4)),
            )
            for c in columns
        ]
        for t in range(s)
    ]
    scale = [[v + d.F32(1.0) for v in _unpack8(k, w)] for w in rows.norm]
    weights = [[_unpack8(k, w) for w in row] for row in rows.rows]
    for t in range(s):
        rstd = k.rstd.load(4 * t, d.F32)
        x = []
        for j, column in enumerate(columns):
            words = _x_words(k, *raw[t][j], rstd, scale[j])
            x.append([v for word in words for v in d.f32_from_bf16_pair(word)])
            _keep_x(k, t, column, words, x[j])
        sums = []
        for weight in weights:
            acc = d.F32(0.0)
            for values, factors in zip(x, weight, strict=True):
                for v, f in zip(values, factors, strict=True):
                    acc = d.fma(v, f, acc)
            sums.append(d.wave_sum(acc))
        _store_dots(k, t, sums)
    d.barrier()
    _publish_router(k)
    if not p.fused_shared:
        _publish_shared(k)


def _unpack8(k: _Launch, words: Any) -> list[Any]:
    """Eight bf16 of four words as f32."""
    return [v for i in range(4) for v in k.d.f32_from_bf16_pair(k.d.vector_element(words, i))]


def _x_words(k: _Launch, reduced: Any, residual: Any, rstd: Any, scale: list[Any]) -> list[Any]:
    """Four words of bf16 pairs: x of the lane's 8 columns from z = reduced + residual."""
    d = k.d
    z = [a + b for a, b in zip(_unpack8(k, reduced), _unpack8(k, residual), strict=True)]
    y = [(v * rstd) * w for v, w in zip(z, scale, strict=True)]
    return [d.pack_bf16(y[2 * i], y[2 * i + 1]) for i in range(4)]


def _keep_x(k: _Launch, t: int, column: Any, words: list[Any], values: list[Any]) -> None:
    """MXFP4 of the lane's 8 columns to LDS (a block is four lanes); the workgroup's own 32 columns to scratch."""
    d, p, g = k.d, k.plan, k.g
    amax = d.F32(0.0)
    for v in values:
        amax = d.maximum(amax, d.intrinsic("llvm.fabs.f32", d.F32, [v]))
    for distance in (1, 2):
        amax = d.maximum(amax, d.wave_xor(amax, distance))
    code = d.mxfp4_code(amax)
    word = d.mxfp4_pack8(values, code)
    block = column >> 5  # MX block of the row
    with k.at(k.below(k.wave, p.unit_waves)):  # one group of waves keeps the row
        k.x_words.store(word, t * k.up_row + (column >> 1))
        with k.at(k.equal(k.lane & 3, 0)):
            at = (block & 3) * (g.hidden // MX_STEP) + (block >> 2) + t * k.code_row
            k.x_codes.store(d.trunc(code, d.I8), at)
        with k.at(k.equal(block, k.block)):
            at = (t * g.hidden + column) * 2 + k.scratch["X"].offset
            d.store(d.vector_from(words), k.a["scratch"], at)


def _store_dots(k: _Launch, t: int, sums: list[Any]) -> None:
    """This wave's dot products with row t to LDS f32 [row of the workgroup][t][unit wave]."""
    p = k.plan
    with k.at(k.equal(k.lane, 0)):
        for m, value in enumerate(sums):
            row = _wave_row(k, m)
            with k.at(k.below(row, p.rows)):
                at = ((row * k.s + t) * p.unit_waves + (k.wave & (p.unit_waves - 1))) * 4
                k.dots.store(value, at)


def _dot(k: _Launch, row: Any, t: Any) -> Any:
    """Dot product of weight row `row` with x of row t (clamped to the last): the waves' sums in order."""
    d, p = k.d, k.plan
    t = d.select(k.below(t, k.s), t, d.I32(k.s - 1))
    total = None
    for u in range(0, p.unit_waves, 2):
        pair = k.dots.load(((row * k.s + t) * p.unit_waves + u) * 4, d.vec(d.F32, 2))
        for i in range(2):
            value = d.vector_element(pair, i)
            total = value if total is None else total + value
    return total


def _two_rows(k: _Launch, row_pair: Any, value: Callable[[Any], Any]) -> Any:
    """bf16 of value(t) for t = 2*row_pair and the next; zero for a row past the last."""
    d = k.d
    t = row_pair << 1
    second = d.select(k.below(t + 1, k.s), value(t + 1), d.F32(0.0))
    return d.pack_bf16(value(t), second)


def _publish_router(k: _Launch) -> None:
    """Wave 0: this workgroup's logits to RLOG [row pair][expert] of every rank; the shared gate to GATE."""
    d, p, g = k.d, k.plan, k.g
    with k.at(k.equal(k.wave, 0)):
        for i in range(p.extra_rows):
            row = _extra_row(k, d.I32(i))
            dot_row = d.I32(p.first_extra + i)
            with k.at(k.below(row, g.router_rows) & k.below(k.lane, p.row_pairs * g.tp)):
                to, pair = d.unsigned_divide(k.lane, p.row_pairs)
                word = _two_rows(k, pair, lambda t, r=dot_row: _dot(k, r, t))
                base = d.load(k.a["peers"], to * 8, d.I64) + k.peer_offset["RLOG"]
                index = pair * g.experts + k.a["rank"] * g.router_rows + row
                k.sync.put(k.rlog, index, word, base=base)
            with k.at(k.equal(row, g.router_rows) & k.below(k.lane, k.s)):
                k.sync.put(k.gate, k.lane, d.sigmoid(_dot(k, dot_row, k.lane)))


def _publish_shared(k: _Launch) -> None:
    """Wave 1: the shared expert's activation of this workgroup's columns to SHARED [row pair][SI]."""
    d, p, g = k.d, k.plan, k.g
    here = k.equal(k.wave, 1) & k.below(k.block, p.shared_blocks)
    with k.at(here & k.below(k.lane, p.row_pairs * p.shared_columns)):
        pair, column = d.unsigned_divide(k.lane, p.shared_columns)

        def activation(t: Any) -> Any:
            gate, up = (d.bf16_round(_dot(k, column + i * p.shared_columns, t)) for i in range(2))
            return d.bf16_round(d.silu(gate)) * up

        index = pair * g.shared_intermediate + k.block * p.shared_columns + column
        k.sync.put(k.shared, index, _two_rows(k, pair, activation))


def load_shared_down(k: _Launch) -> list[list[Any]]:
    """Issue the loads of w_sd for the workgroup's 32 columns: [tile][step], K cut in eighths over the waves."""
    gemv, p, g = k.gemv, k.plan, k.g
    row_bytes = 2 * g.shared_intermediate
    rows = gemv.guarded(k.a["w_sd"], g.hidden * row_bytes)
    lane_bytes = gemv.bf16_lane_bytes(row_bytes) + k.wave * (p.shared_steps * gemv.BF16_TILE_BYTES)
    weights = []
    for tile in range(TILES):
        at = lane_bytes + (k.block * WORKGROUP_COLUMNS + tile * MFMA_ROWS) * row_bytes
        weights.append([gemv.load_bf16_tile(rows, at, i) for i in range(p.shared_steps)])
    return weights


# ---- 4: routing -----------------------------------------------------------------------------------------------------


def route(k: _Launch) -> None:
    """Wave p routes rows 2p and 2p + 1 side by side (every workgroup, every row). Waits for RLOG; ids, weights to LDS.

    Keys order the bf16 logits, the lower expert first on a tie; a NaN counts as -3e38. The top_k largest are taken one
    after the other; weight k = exp2((l_k - l_0) * log2 e) over the sum in the order of k, in f32.
    """
    d, p, g, s = k.d, k.plan, k.g, k.s
    with k.at(k.below(k.wave, p.row_pairs)):
        experts = [k.lane + LANES * i for i in range(-(-g.experts // LANES))]
        inside = [k.below(e, g.experts) for e in experts]
        clamped = [d.select(i, e, d.I32(g.experts - 1)) for e, i in zip(experts, inside, strict=True)]
        words = k.sync.poll([(k.rlog, k.wave * g.experts + e) for e in clamped])
        rows = range(min(s, 2))
        keys = [
            [
                d.select(ok, _key(k, (word & I32_HIGH) if r else (word << 16), e), d.I32(0))
                for word, e, ok in zip(words, experts, inside, strict=True)
            ]
            for r in rows
        ]
        picked = [d.I32(0) for _ in rows]
        for i in range(g.top_k):
            for r in rows:
                best = _wave_umax(k, keys[r])
                keys[r] = [d.select(d.compare("eq", key, best), d.I32(0), key) for key in keys[r]]
                picked[r] = d.select(k.equal(k.lane, i), best, picked[r])
        for r in rows:
            t = k.wave * 2 + r
            with k.at(k.below(t, s)):
                _keep_route(k, t, picked[r])
    k.sync.barrier()


def _keep_route(k: _Launch, t: Any, picked: Any) -> None:
    """Ids and weights of row t from its picked keys (pick i in lane i) to LDS; workgroup t's to scratch as well."""
    d, g, s = k.d, k.g, k.s
    live = k.live(t)
    ids = 0xFFFF - (picked & 0xFFFF)
    logit = _logit(k, picked)
    first = d.bitcast(d.read_lane(d.bitcast(logit, d.I32), 0), d.F32)
    weight = d.exp(logit - first)
    total = None
    for i in range(g.top_k):
        term = d.bitcast(d.read_lane(d.bitcast(weight, d.I32), i), d.F32)
        total = term if total is None else total + term
    weight = weight * d.rcp(total)
    ids = d.select(live, ids, d.I32(-1))
    weight = d.select(live, weight, d.F32(0.0))
    if k.plan.fused_shared:  # expert E; its weight is the gate, which `gather` waits for
        ids = d.select(live & k.equal(k.lane, g.top_k), d.I32(g.experts), ids)
    if s == 1:  # the picks are the slots
        with k.at(k.below(k.lane, k.plan.picks)):
            k.table.store(d.vector_from([ids, k.lane | d.I32(~NOT_PICKED)]), k.lane * 8)
    with k.at(k.below(k.lane, ROUTE_WORDS)):
        at = (t * ROUTE_WORDS + k.lane) * 4
        k.ids.store(ids, at)
        k.weights.store(weight, at)
        with k.at(d.compare("eq", k.block, t)):
            route_at = at + k.scratch["ROUTE"].offset
            d.store(ids, k.a["scratch"], route_at)
            d.store(weight, k.a["scratch"], route_at + s * ROUTE_WORDS * 4)


def _key(k: _Launch, bits: Any, expert: Any) -> Any:
    """Unsigned key: order-preserving 16 bits of the logit (f32 bits of a bf16), then 0xFFFF - expert."""
    d = k.d
    value = d.bitcast(bits, d.F32)
    is_nan = d.compare("ugt", bits & 0x7FFFFFFF, d.I32(0x7F800000))
    value = d.select(is_nan, d.F32(LOWEST_LOGIT), value) + d.F32(0.0)  # -0 counts as 0
    bits = d.bitcast(value, d.I32)
    flip = (bits >> 31) | d.I32(-(1 << 31))  # all bits of a negative value, the sign of another
    return ((bits ^ flip) & I32_HIGH) | (0xFFFF - expert)


def _logit(k: _Launch, key: Any) -> Any:
    """The logit (f32) of a key."""
    d = k.d
    flip = ~(key >> 31) | d.I32(-(1 << 31))
    return d.bitcast((key ^ flip) & I32_HIGH, d.F32)


_ROW_BCAST_15, _ROW_BCAST_31, _ROW_HALF_MIRROR, _ROW_MIRROR = 0x142, 0x143, 0x141, 0x140


def _wave_umax(k: _Launch, keys: list[Any]) -> Any:
    """Largest key of the wave, uniform."""
    d = k.d

    def umax(a: Any, b: Any) -> Any:
        return d.intrinsic("llvm.umax.i32", d.I32, [a, b])

    best = keys[0]
    for key in keys[1:]:
        best = umax(best, key)
    for distance in (1, 2):
        best = umax(best, d.wave_xor(best, distance))
    for control in (_ROW_HALF_MIRROR, _ROW_MIRROR):
        best = umax(best, d.dpp(best, control))
    best = umax(best, d.dpp(best, _ROW_BCAST_15, row_mask=0xA, bound_control=False))
    best = umax(best, d.dpp(best, _ROW_BCAST_31, row_mask=0xC, bound_control=False))
    return d.read_lane(best, LANES - 1)


def unite(k: _Launch) -> Any:
    """The union of the rows' experts in expert order: slot table to LDS; returns the number of slots (uniform).

    Thread e stands for expert e: it collects which pick of each row is e, and a scan of the flags gives its slot. At
    width 1 the picks are the slots as they stand.
    """
    d, g, s = k.d, k.g, k.s
    if s == 1:
        return d.uniform(d.select(d.compare("sge", k.ids.load(0, d.I32), d.I32(0)), d.I32(k.plan.picks), d.I32(0)))
    nibbles, shared = d.I32(-1), d.I32(-1)
    for t in range(s):
        for first in range(0, g.top_k, 4):
            four = k.ids.load((t * ROUTE_WORDS + first) * 4, d.vec(d.I32, 4))
            for i in range(first, min(first + 4, g.top_k)):
                same = d.compare("eq", d.vector_element(four, i - first), k.thread)
                nibbles = nibbles ^ d.select(same, d.I32(_nibble_flip(t, i)), d.I32(0))
            if k.plan.fused_shared and first == 0:
                live = d.compare("sge", d.vector_element(four, 0), d.I32(0))
                shared = shared ^ d.select(live, d.I32(_nibble_flip(t, g.top_k)), d.I32(0))
    member = d.compare("ne", nibbles, d.I32(-1))
    mask = d.ballot(member)
    with k.at(k.equal(k.lane, 0)):
        k.masks.store(mask, k.wave * 8)
    d.barrier()
    before, total = d.I32(0), d.I32(0)
    for w in range(-(-g.experts // LANES)):
        count = d.trunc(d.intrinsic("llvm.ctpop.i64", d.I64, [d.uniform64(k.masks.load(8 * w, d.I64))]), d.I32)
        before = before + d.select(d.compare("ugt", k.wave, d.I32(w)), count, d.I32(0))
        total = total + count
    low = d.trunc(mask, d.I32)
    high = d.trunc(d.shift_right_logical(mask, d.I64(32)), d.I32)
    rank = d.intrinsic("llvm.amdgcn.mbcnt.lo", d.I32, [low, before])
    slot = d.intrinsic("llvm.amdgcn.mbcnt.hi", d.I32, [high, rank])
    with k.at(member):
        k.table.store(d.vector_from([k.thread, nibbles]), slot * 8)
    if k.plan.fused_shared:  # the last slot, where any row is live
        any_live = d.compare("ne", shared, d.I32(-1))
        with k.at(any_live & k.equal(k.thread, 0)):
            k.table.store(d.vector_from([d.I32(g.experts), shared]), total * 8)
        total = total + d.select(any_live, d.I32(1), d.I32(0))
    d.barrier()
    return d.uniform(total)


def _nibble_flip(t: int, pick: int) -> int:
    """Signed 32-bit word that turns row t's nibble of NOT_PICKED into `pick`."""
    flip = ((NOT_PICKED ^ pick) << (4 * t)) & 0xFFFFFFFF
    return flip - (1 << 32) if flip >> 31 else flip


def _slot_entry(k: _Launch, slot: Any) -> tuple[Any, Any]:
    """(expert, nibbles) of a slot (uniform)."""
    d = k.d
    entry = k.table.load(slot * 8, d.vec(d.I32, 2))
    return d.uniform(d.vector_element(entry, 0)), d.uniform(d.vector_element(entry, 1))


def _pick_of(k: _Launch, nibbles: Any, t: Any) -> tuple[Any, Any]:
    """(pick of row t, whether it picked the slot)."""
    d = k.d
    pick = d.shift_right_logical(nibbles, t * 4) & NOT_PICKED
    return pick, d.compare("ne", pick, d.I32(NOT_PICKED))


# ---- 5: routed experts, up ------------------------------------------------------------------------------------------


def _issue(groups: list[list[Callable[[], Any]]]) -> list[Any]:
    """Issue the loads of all groups; their values."""
    return [load() for group in groups for load in group]


def load_up(k: _Launch, slots: Any, task: Any) -> list[list[Callable[[], Any]]]:
    """The loads of one task (slot, 32 intermediate columns) of this wave in groups: the four tiles of each step, then
    the scale words.

    Two gate and two up tiles of w13 [2 RI, H], K cut in eighths over the waves. A task past the last reads from buffers
    of no bytes.
    """
    d, gemv, p, g = k.d, k.gemv, k.plan, k.g
    valid = d.compare("ult", task, slots * p.mx_blocks)
    slot, block = d.unsigned_divide(d.select(valid, task, d.I32(0)), p.mx_blocks)
    expert, _ = _slot_entry(k, slot)
    expert = d.select(valid, expert, d.I32(0))
    rows, row_bytes, row_codes = 2 * g.moe_intermediate, g.hidden // 2, g.hidden // MX_BLOCK
    # A scalar offset counts against the range check of a buffer of no bytes: there it is 0.
    start = block * (WORKGROUP_COLUMNS * row_bytes) + k.wave * (p.steps * gemv.MX_TILE_BYTES)
    base = k.a["w13"] + d.zext(expert, d.I64) * d.I64(rows * row_bytes) + d.zext(start, d.I64)
    weights = gemv.guarded(base, rows * row_bytes - start, valid)
    at = [(h * g.moe_intermediate + t * MFMA_ROWS) * row_bytes for h in range(2) for t in range(TILES)]
    at = [d.select(valid, d.I32(a), d.I32(0)) for a in at]
    groups = [
        [lambda i=i, a=a: gemv.load_mxfp4_tile(weights, i * gemv.MX_TILE_BYTES, scalar=a) for a in at]
        for i in range(p.steps)
    ]
    start = block * (WORKGROUP_COLUMNS * row_codes) + (k.wave * p.steps >> 1) * gemv.MX_SCALE_BYTES
    base = k.a["w13_scale"] + d.zext(expert, d.I64) * d.I64(rows * row_codes) + d.zext(start, d.I64)
    scales = gemv.guarded(base, rows * row_codes - start, valid)
    at = [d.select(valid, d.I32(h * g.moe_intermediate * row_codes), d.I32(0)) for h in range(2)]
    groups.append(
        [
            lambda i=i, a=a: gemv.load_mxfp4_scales(scales, i * gemv.MX_SCALE_BYTES, scalar=a)
            for a in at
            for i in range(p.up_words)
        ]
    )
    return groups


def routed_up(k: _Launch, slots: Any, first: list[Any], then: list[list[Callable[[], Any]]]) -> list[Any]:
    """Tasks (slot, 32 intermediate columns), from the last workgroup on; waits for nothing more than the route.

    Scaled 16x16x128 MFMA on fp4, each wave its eighth of K; waves summed in order; silu(g) * u in f32, quantised to
    MXFP4 (RCEIL) and put to INTER for the rows that picked the slot. `first` holds the first task's values; the next
    task's loads, and after the last task those of `then` (whose values are returned), are issued while registers of the
    task before are consumed. A workgroup without a task multiplies zeros and puts nothing.
    """
    d, p, g = k.d, k.plan, k.g
    tasks = slots * p.mx_blocks

    def task(q: Any, held: list[Any], groups: list[list[Callable[[], Any]]]) -> list[Any]:
        accs, following = _multiply_up(k, held, groups)
        _store_tiles(k, k.up, accs)
        d.barrier()
        with k.at(d.compare("ult", q, tasks)):
            slot, block = d.unsigned_divide(q, p.mx_blocks)
            _, nibbles = _slot_entry(k, slot)
            _publish_up(k, block, nibbles)
        return following

    def round_before_the_last(q: Any, _: Any, *held: Any) -> list[Any]:
        following = task(q, list(held), load_up(k, slots, q + g.blocks))
        d.barrier()  # before the next task's tiles
        return [q + g.blocks, *following]

    last, held = g.blocks - 1 - k.block, first
    if p.up_rounds > 1:
        last, *held = d.for_range(last, tasks - g.blocks, g.blocks, [last, *first], round_before_the_last)
    return task(last, held, then)


def _multiply_up(k: _Launch, held: list[Any], groups: list[list[Callable[[], Any]]]) -> tuple[list[Any], list[Any]]:
    """Accumulators of the four tiles over this wave's steps, ascending; `held` are the values of `load_up`.

    A group of `groups` is issued behind each step, the rest at the end; returns their values too.
    """
    d, p, g = k.d, k.plan, k.g
    tiles = 2 * TILES
    weights, scales = held[: tiles * p.steps], held[tiles * p.steps :]
    following: list[Any] = []
    if p.steps == 1:  # two waves share a scale word: the odd one's codes are its upper half
        scales = [d.shift_right_logical(w, (k.wave & 1) * 16) for w in scales]
    code_at = k.lane_t * k.code_row + k.group * (g.hidden // MX_STEP) + k.wave * p.steps
    if p.steps == 1:
        codes = [d.zext(k.x_codes.load(code_at, d.I8), d.I32)]
    else:
        codes = [k.x_codes.load(code_at + 4 * i, d.I32) for i in range(p.steps // 4)]
    accs = [d.zero_acc() for _ in range(tiles)]
    for i in range(p.steps):
        at = k.lane_t * k.up_row + (k.wave * p.steps + i) * (MX_STEP // 2) + k.group * 16
        x = k.x_words.load(at, d.vec(d.I32, 4))
        for tile in range(tiles):
            half, part = divmod(tile, TILES)
            scale = scales[half * p.up_words + i // 2]
            weight = weights[i * tiles + tile]
            accs[tile] = d.mfma_mxfp4(weight, x, accs[tile], scale, 2 * (i % 2) + part, codes[i // 4], i % 4)
        following += _issue(groups[i : i + 1])
        d.compiler_fence()  # the next step's loads take the registers that this one freed
    following += _issue(groups[p.steps :])
    return accs, following


def _publish_up(k: _Launch, block: Any, nibbles: Any) -> None:
    """Thread (row, column): sum the waves, activate, quantise with the 31 neighbours, put five pairs a block."""
    d, gemv, p, s = k.d, k.gemv, k.plan, k.s
    with k.at(k.below(k.thread, WORKGROUP_COLUMNS * s)):
        column, t = k.thread & (WORKGROUP_COLUMNS - 1), k.thread >> 5
        stride = 2 * TILES * s * MFMA_ROWS * 4
        halves = []
        for half in range(2):
            at = ((half * TILES + (column >> 4)) * s + t) * (4 * MFMA_ROWS) + (column & 15) * 4
            halves.append(gemv.sum_in_order(k.up, at, stride, range(WAVES)))
        value = d.silu(halves[0]) * halves[1]
        amax = d.wave_max(d.intrinsic("llvm.fabs.f32", d.F32, [value]), MX_BLOCK)
        code = d.mxfp4_code(amax)
        zero = d.F32(0.0)
        word = d.mxfp4_pack8([value, zero, zero, zero, zero, zero, zero, zero], code) & 0xF
        word = word << ((column & 7) * 4)
        for distance in (4, 2, 1):
            word = word | d.wave_xor(word, distance)
        pick, picked = _pick_of(k, nibbles, t)
        is_code = k.equal(column, 1)  # lane 1 of the block carries the code, lanes 0, 8, 16, 24 the words
        part = d.select(is_code, d.I32(INTER_WORDS), column >> 3)
        with k.at(picked & (is_code | k.equal(column & 7, 0))):
            index = ((t * p.picks + pick) * p.mx_blocks + block) * INTER_PAIRS + part
            k.sync.put(k.inter, index, d.select(is_code, code, word))


# ---- 6: routed and shared experts, down -----------------------------------------------------------------------------


def load_down(k: _Launch, slots: Any, numbers: range) -> list[list[Callable[[], Any]]]:
    """The loads of this wave's slots of those numbers, a group a slot: w2 of 32 hidden columns, then its scale words.

    Worker wave w has the slots w, w + workers, ... A slot past the last reads from a buffer of no bytes.
    """
    d, gemv, p, g = k.d, k.gemv, k.plan, k.g
    row_bytes, row_codes = g.moe_intermediate // 2, g.moe_intermediate // MX_BLOCK

    experts, _ = _worker_entries(k, slots)

    def loads(n: int) -> list[Callable[[], Any]]:
        @cache
        def buffers() -> tuple[Any, Any]:
            valid = _has_slot(k, slots, n)
            expert = d.zext(d.select(valid, d.read_lane(experts, n), d.I32(0)), d.I64)
            row = k.block * WORKGROUP_COLUMNS
            return tuple(
                gemv.guarded(
                    k.a[name] + expert * d.I64(g.hidden * width) + d.zext(row * width, d.I64),
                    WORKGROUP_COLUMNS * width,
                    valid,
                )
                for name, width in (("w2", row_bytes), ("w2_scale", row_codes))
            )

        tiles = [t * MFMA_ROWS * row_bytes + i * gemv.MX_TILE_BYTES for t in range(TILES) for i in range(p.down_steps)]
        return [
            *(lambda at=at: gemv.load_mxfp4_tile(buffers()[0], at) for at in tiles),
            *(
                lambda i=i: gemv.load_mxfp4_scales(buffers()[1], i * gemv.MX_SCALE_BYTES)
                for i in range(p.down_steps // 2)
            ),
        ]

    return [loads(n) for n in numbers]


def _worker_slot(k: _Launch, number: Any) -> Any:
    """Slot of that number of this wave."""
    return k.wave + k.plan.workers * number


def _has_slot(k: _Launch, slots: Any, number: int) -> Any:
    """Whether this wave has a slot of that number (uniform)."""
    valid = k.d.compare("ult", _worker_slot(k, number), slots)
    return valid & k.below(k.wave, k.plan.workers) if k.plan.pollers else valid


def _worker_entries(k: _Launch, slots: Any) -> tuple[Any, Any]:
    """(expert, nibbles) of this wave's slot number n in lane n."""
    d = k.d
    slot = _worker_slot(k, k.lane)
    entry = k.table.load(d.select(d.compare("ult", slot, slots), slot, d.I32(0)) * 8, d.vec(d.I32, 2))
    return d.vector_element(entry, 0), d.vector_element(entry, 1)


def gather(k: _Launch) -> None:
    """The waits for SHARED, GATE and INTER, and copies to LDS (every workgroup).

    Reader n is wave 7 - n at widths 1 and 2, where that wave holds no weights, else wave n. It takes half n % 2 of the
    shared columns of row pair n / 2 (width 1: all), reader 0 the gates, reader t the intermediates of row t's picks.
    With the shared expert fused reader t waits for its gate as well, the weight of its pick.
    """
    d, p, g, s = k.d, k.plan, k.g, k.s
    reader = (WAVES - 1 - k.wave) if p.pollers else k.wave
    shares = min(s, 2)
    if not p.fused_shared:
        with k.at(k.below(reader, shares * p.row_pairs)):
            _gather_shared(k, reader, shares)
            with k.at(k.equal(reader, 0) & k.below(k.lane, s)):
                (gate,) = k.sync.poll([(k.gate, k.lane)], [d.F32])
                k.gates.store(gate, k.lane * 4)
    with k.at(k.below(reader, s)), k.at(k.live(reader)):
        t = reader
        count = p.picks * p.mx_blocks * INTER_PAIRS
        index = [k.lane + LANES * i for i in range(-(-count // LANES))]
        index = [d.select(k.below(i, count), i, d.I32(count - 1)) for i in index]
        pairs = [(k.inter, t * count + i) for i in index]
        if p.fused_shared:
            gate, *words = k.sync.poll([(k.gate, t), *pairs], [d.F32] + [d.I32] * len(pairs))  # a record names it first
            k.weights.store(gate, (t * ROUTE_WORDS + g.top_k) * 4)
        else:
            words = k.sync.poll(pairs)
        for i, word in zip(index, words, strict=True):
            block, part = d.unsigned_divide(i, INTER_PAIRS)
            block = block + t * (p.picks * p.mx_blocks)
            is_code = k.equal(part, INTER_WORDS)
            with k.at(is_code):
                k.inter_codes.store(word, block * 4)
            with k.at(d.compare("ne", part, d.I32(INTER_WORDS))):
                k.inter_words.store(word, block * 16 + part * 4)
    k.sync.barrier()


def _gather_shared(k: _Launch, reader: Any, shares: int) -> None:
    """One reader's part of the shared activation: polled once, both rows of the pair to LDS."""
    d, g, s = k.d, k.g, k.s
    columns = g.shared_intermediate // shares
    pair, share = d.unsigned_divide(reader, shares)
    at = [share * columns + k.lane + LANES * i for i in range(columns // LANES)]
    words = k.sync.poll([(k.shared, pair * g.shared_intermediate + c) for c in at])
    for r in range(shares):
        t = pair * 2 + r
        with k.at(k.below(t, s)):
            for c, word in zip(at, words, strict=True):
                value = d.shift_right_logical(word, d.I32(16)) if r else word
                k.activation.store(d.trunc(value, d.I16), t * k.activation_row + c * 2)


def routed_down(k: _Launch, slots: Any, values: list[Any]) -> None:
    """w2 of every slot times the rows' intermediates (all workgroups, 32 hidden columns; a slot is one wave's).

    `values` are those of `load_down` over all of the wave's slots. Each (row, pick) result is weighted in f32 and kept
    in LDS; nothing is summed here.
    """
    d, p = k.d, k.plan
    per_slot = len(values) // p.worker_slots
    slots = d.opaque_uniform(slots)  # nothing of `load_down` is kept for what follows
    _, entries = _worker_entries(k, slots)
    for n in range(p.worker_slots):
        held = values[n * per_slot : (n + 1) * per_slot]
        weights, scales = held[: TILES * p.down_steps], held[TILES * p.down_steps :]
        with k.at(_has_slot(k, slots, n)):
            nibbles = d.read_lane(entries, n)
            pick, picked = _pick_of(k, nibbles, k.lane_t)
            picked = picked & k.in_rows
            row_pick = k.lane_t * p.picks + d.select(picked, pick, d.I32(0))
            accs = [d.zero_acc() for _ in range(TILES)]
            for step in range(p.down_steps):
                block = row_pick * p.mx_blocks + step * 4 + k.group
                inter = k.inter_words.load(block * 16, d.vec(d.I32, 4))
                code = k.inter_codes.load(block * 4, d.I32)
                for tile in range(TILES):
                    accs[tile] = d.mfma_mxfp4(
                        weights[tile * p.down_steps + step], inter, accs[tile],
                        scales[step // 2], 2 * (step % 2) + tile, code, 0,
                    )  # fmt: skip
            weight = k.weights.load((k.lane_t * ROUTE_WORDS + d.select(picked, pick, d.I32(0))) * 4, d.F32)
            with k.at(picked):
                for tile, acc in enumerate(accs):
                    weighted = [d.vector_element(acc, e) * weight for e in range(4)]
                    at = row_pick * (WORKGROUP_COLUMNS * 4) + tile * MFMA_ROWS * 4 + k.group * 16
                    k.picks.store(d.vector_from(weighted), at)


def shared_down(k: _Launch, weights: list[list[Any]]) -> None:
    """w_sd times the shared activation, K cut in eighths over the waves; accumulators to LDS (all workgroups)."""
    d, gemv, p = k.d, k.gemv, k.plan
    at = gemv.bf16_lane_bytes(k.activation_row, k.lane_t) + k.wave * (p.shared_steps * gemv.BF16_TILE_BYTES)
    h = [k.activation.load(at + i * gemv.BF16_TILE_BYTES, d.vec(d.I32, 4)) for i in range(p.shared_steps)]
    _store_tiles(k, k.partial, [gemv.multiply_bf16(tile, h) for tile in weights])
    d.barrier()


def publish_output(k: _Launch) -> None:
    """Combine and push to FINAL of every rank (all workgroups).

    routed = bf16(f32 sum over the picks in order); shared = bf16(sum over the waves in order); the rank's partial is
    bf16(routed + gate * shared), the gate in f32. With the shared expert fused, its pick the last, it is `routed`.
    """
    d, gemv, p = k.d, k.gemv, k.plan

    def value(t: Any, pair: Any) -> Any:
        live = d.compare("sge", k.ids.load(t * (ROUTE_WORDS * 4), d.I32), d.I32(0))
        at = t * (p.picks * WORKGROUP_COLUMNS * 4) + pair * 8
        routed = gemv.sum_in_order(k.picks, at, WORKGROUP_COLUMNS * 4, range(p.picks), d.vec(d.F32, 2))
        if p.fused_shared:
            word = d.pack_bf16(d.vector_element(routed, 0), d.vector_element(routed, 1))
            return d.select(live, word, d.I32(0))
        gate = k.gates.load(t * 4, d.F32)
        parts = []
        for e, shared in enumerate(_wave_pair(k, t, pair)):
            total = d.select(live, d.bf16_round(d.vector_element(routed, e)), d.F32(0.0))
            parts.append(d.fma(gate, d.bf16_round(shared), total))
        return d.pack_bf16(*parts)

    k.push_pairs("FINAL", k.final, k.block * (WORKGROUP_COLUMNS // 2), TILES, value)


# ---- 7: all-reduce --------------------------------------------------------------------------------------------------


def final_sum(k: _Launch) -> None:
    """Thread (row, column pair) of the workgroup's 32 columns waits for FINAL; f32 sum in rank order, bf16 to out.

    Leaves z = out + residual_out (f32) and sums of its squares over 8 columns to the next launch, whose norm starts
    from them. A sum has the order of SGLang's norm: with the column pairs P0 .. P3, fma(P0, P0, P1 P1) +
    fma(P2, P2, P3 P3), then even + odd. The residual was stored before MSQ, which this workgroup has awaited. Where the
    next layer's K1 follows in this launch, each storing wave announces its z and squares by a pair in `next_flag`.
    """
    d, g, s = k.d, k.g, k.s
    pairs = WORKGROUP_COLUMNS // 2
    with k.at(k.below(k.thread, pairs * s)):
        pair, t = k.thread & (pairs - 1), k.thread >> (pairs.bit_length() - 1)
        index = k.block * pairs + pair
        at = (t * g.hidden) * 2 + index * 4
        residual = d.load(k.a["residual_out"], at, d.I32, d.AGENT)
        words = k.sync.poll([(k.final, (r * MAX_ROWS + t) * (g.hidden // 2) + index) for r in range(g.tp)])
        live = d.compare("sge", k.ids.load(t * (ROUTE_WORDS * 4), d.I32), d.I32(0))
        total = d.select(live, d.pack_bf16(*k.sum_ranks(words)), d.I32(0))
        d.store(total, k.a["out"], at)
        low, high = (a + b for a, b in zip(d.f32_from_bf16_pair(total), d.f32_from_bf16_pair(residual), strict=True))
        cache = d.PLAIN if k.next_flag is None else d.AGENT
        d.store(d.vector_from([low, high]), k.a["next_z"], at * 2, cache)
        even, odd = (_squares_of_four_pairs(k, value) for value in (low, high))
        with k.at(k.equal(pair & (Z_SUM_COLUMNS // 2 - 1), 0)):
            at = t * g.z_sums + d.unsigned_divide(index, Z_SUM_COLUMNS // 2)[0]
            d.store(even + odd, k.a["next_squares"], at * 4, cache)
        if k.next_flag is not None:
            d.wait_stores()
            with k.at(k.equal(k.lane, 0)):
                k.sync.put(k.next_flag, k.wave * g.blocks + k.block, d.I32(0))


def _squares_of_four_pairs(k: _Launch, value: Any) -> Any:
    """In every fourth lane: v0 v0 + (v1 v1) fused, plus the same of v2 and v3, of four lanes' values."""
    d = k.d
    fused = d.fma(value, value, d.wave_xor(value * value, 1))
    return fused + d.wave_xor(fused, 2)
