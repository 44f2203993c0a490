# SPDX-License-Identifier: Apache-2.0
"""K1, the GDN front of one layer: norm, in_proj, conv update, gated delta rule, gated norm; two device hops.

Launch: `geometry.blocks` workgroups of 512 threads (8 waves), one a CU, all resident. Stages in launch order:

=================  ===================  ==========================  ==================================================
stage              workgroups / waves   waits for                   publishes
=================  ===================  ==========================  ==================================================
load_rows          all                  -                           -
Weights.issue      all                  -                           - (the workgroup's weights, into registers)
norm_scales        wave t: row t        one barrier                 -
normalise          all                  -                           residual_out (each column by one workgroup)
in_proj            all                  one barrier                 PROJ (bf16 pairs), LEFT and BA (f32 K slices)
  load_unit        waves with a unit    -                           - (state, conv windows, constants)
start_unit         waves with a unit    "proj": q k v b a           ONRM: sum of squares of 8 outputs
finish_unit        waves with a unit    "onrm": the head's sums, z  core row, state rows, v conv windows
                                        "window": owners only       q and k conv windows
=================  ===================  ==========================  ==================================================

A *unit* is (row of the step, value head, 8 value rows of the state); one wave computes one unit alone, so nothing but
the two mailbox hops lies between the projections and the core. The K2 before leaves z = hidden + residual in f32 and
sums of its squares (`z`, `squares`), so every workgroup norms every row itself at three instructions a column pair, and
no hop carries the norm; a first layer (and an `own_norm` build) forms z and its squares from hidden (and residual).
Every unit recomputes the q and k convolution of its key head (no hop). q and k conv windows are read by all units of a
key head and written by one, its *owner* (first value head, first unit), after every one of those units has published
its ONRM pair, which it can only do once it has used the window.

One hop (`one_hop`): the gated norm is left to the K2 behind. leave_unit stands for start_unit and finish_unit: it
awaits z with the projections and writes o, z and the unit's sum of o^2; an owner awaits the first PROJ pair of every
reader's workgroup, which has read its windows before it publishes (windows_read).

in_proj: a workgroup computes `whole_tasks` 16-row groups over all of K, plus one K slice of a left-over group, plus
(the first `ba_groups * ba_slices` workgroups) one K slice of an in_proj_ba group. Wave w owns columns
w * hidden/8 .. of every row, in the norm as in the products, so x goes through LDS inside one wave only.

Order of every float32 sum (none depends on the width or on another row):

* norm, in the order of SGLang's kernel at hidden 8192: squares of 8 columns, as pairs P0 .. P3, fma(P0, P0, P1 P1) +
  fma(P2, P2, P3 P3), then even + odd; these sums, numbered along the row, at distance 8, 4, 2, 1, 16, 32, 512, 256,
  128, 64. Smaller rows have fewer of the distances (a few columns a lane: another order where z is formed here)
* in_proj: MFMA steps ascending inside a wave's columns, waves 0..7 in order; slices of LEFT at distance 2, 1, 4 and of
  BA at distance 1, 2, 4, 8 (in slices)
* conv: four bf16 products left to right; q and k norms, state rows times k and q: a lane's four columns as
  (0 + 2) + (1 + 3) with fused products, then lanes at distance 1, 2, 4, 8, 16 (the norms) and 1, 2, 8, 4, 16 (the rows)
* gated norm: squares of 8 rows at distance 1, 2, 4, the head's 16 sums at distance 1, 2, 4, 8

A projection's weight may be MXFP4 (`qkvz_format`, `ba_format`): e2m1 with an e8m0 code for 32 columns, in Quark's plain
layout. The bf16 x is then quantised to MXFP4 as well, behind the norm, as SGLang's W4A4 linear does it (code of
`mxfp4_code_even`, e2m1 to nearest even), and its scaled MFMA steps are 128 columns.

Rounded to bf16: residual_out, x, PROJ (after the last sum), b and a, each conv product, conv outputs, beta
(`round_beta`), o before the gated norm, core, and the state where its pool is bf16. All else is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from sgl_amd_mono.common.build import Abi, BuildKey
from sgl_amd_mono.common.sync import PAIR_BYTES
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import (
    GDN_UNIT_ROWS,
    MAX_ROWS,
    MFMA_ROWS,
    MX_BLOCK,
    Z_SUM_COLUMNS,
    Geometry,
)

if TYPE_CHECKING:
    from torch import Tensor

# What the kernel writes; a verify step the draft states instead of the states.
OUTPUTS = (
    "conv_state",
    "ssm_state",
    "draft_conv",
    "draft_ssm",
    "residual_out",
    "core",
    "core_z",
    "core_squares",
    "scratch",
)
ABI: Abi = (
    ("hidden", "ptr"),
    ("residual", "ptr"),
    ("z", "ptr"),
    ("squares", "ptr"),
    ("norm_w", "ptr"),
    ("w_qkvz", "ptr"),
    ("w_ba", "ptr"),
    ("w_qkvz_scale", "ptr"),  # not read where the weight is bf16
    ("w_ba_scale", "ptr"),
    ("conv_w", "ptr"),
    ("a_log", "ptr"),
    ("dt_bias", "ptr"),
    ("gnorm_w", "ptr"),
    ("conv_state", "ptr"),
    ("ssm_state", "ptr"),
    ("state_index", "ptr"),
    ("draft_conv", "ptr"),  # this and what names it is read in verify steps only
    ("draft_ssm", "ptr"),
    ("draft_index", "ptr"),
    ("residual_out", "ptr"),
    ("core", "ptr"),
    ("core_z", "ptr"),
    ("core_squares", "ptr"),
    ("scratch", "ptr"),
    ("peers", "ptr"),
    ("epoch", "ptr"),
    ("conv_slot_stride", "i64"),
    ("ssm_slot_stride", "i64"),
    ("draft_conv_slot_stride", "i64"),
    ("draft_ssm_slot_stride", "i64"),
    ("deadline_ticks", "i64"),
    ("conv_channel_stride", "i32"),
    ("conv_tap_stride", "i32"),
    ("draft_conv_token_stride", "i32"),
    ("draft_conv_channel_stride", "i32"),
    ("draft_conv_tap_stride", "i32"),
    ("draft_ssm_token_stride", "i32"),
    ("rank", "i32"),
    ("layer_slot", "i32"),
    ("mode", "i32"),
)

READONLY = frozenset(name for name, kind in ABI if kind == "ptr" and name not in OUTPUTS)
REGIONS = ("PROJ", "LEFT", "BA", "ONRM")  # mailbox regions of the scratch
WAIT_ORDER = {"PROJ": 0, "LEFT": 1, "BA": 0, "ONRM": 1, "WINDOW": 2}  # place of a region's wait in the chain
# What a fault record's region number stands for: a mailbox region, or the ONRM pairs that the owner of a key head's
# conv window awaits before it writes the window.
REGION_NAMES = (*REGIONS, "WINDOW")
WAITS = ("proj", "onrm", "window")

BF16, MXFP4 = "bfloat16", "mxfp4"  # formats of a projection's weight; in MXFP4 x is quantised too
FORMATS = (BF16, MXFP4)

BF16_BYTES = 2
F32_BYTES = 4
WAVE = 64
HALF = 32  # lanes that hold one state row, four columns each
LANE_COLUMNS = 4
CONV_TAPS = 4
CONV_STATE_TAPS = 3
TAPS = (LANE_COLUMNS + 1) * CONV_STATE_TAPS  # conv window taps of a lane
L2_EPS = 1e-6  # of the q and k norms, added to the sum of squares
X_PAD_BYTES = 16  # between rows of x in LDS, so that the 16 columns of an MFMA operand hit different banks
LOAD_REGISTERS = 200  # vector registers that rows and weights in flight may take; the rest of 256 is for addresses
LOAD_REGISTERS_OWN = 176  # the same where z is formed here, with sums beside it
POLL_TOKENS = 4  # tokens of a request whose pairs are awaited in one batch of loads (four pairs each, at most 16)
STEP_REGISTERS = 4  # vector registers of one weight tile
X_GROUP = 4  # tiles whose x is read from LDS together, one group ahead of the products
BEYOND_ROWS = 0x7FFF0000  # a lane's byte offset past every weight: its load gives zeros, without a request
SCRATCH_ALIGN = 256
# Words of a parked result a lane: state (f32 is the wider), windows, o, weight of the gated norm.
HELD_WORDS = LANE_COLUMNS * LANE_COLUMNS + TAPS + 2
WAVE_ORDER = tuple(range(8))  # in which the waves' products are added


def gdn_formats(mxfp4: tuple[str, ...]) -> dict[str, str]:
    """The key's format fields, with the named projections ("in_proj_qkvz", "in_proj_ba") in MXFP4."""
    fields = {"qkvz_format": "in_proj_qkvz", "ba_format": "in_proj_ba"}
    return {field_: MXFP4 if name in mxfp4 else BF16 for field_, name in fields.items()}


@dataclass(frozen=True)
class GdnKey(BuildKey):
    """Build key of one K1: everything that the emitted code depends on besides the sources.

    draft_tokens: 0 in decode steps, where each row is a request. In a verify step the tokens of a request, whose rows
    follow one another: a recurrence of so many tokens from the request's state, which stays as it is; the state and the
    conv window after each token go to its place among the draft states, so that SGLang can keep any of them.

    own_norm: z and its squares are formed here from hidden and residual; else they are read as the K2 before left them.
    A model's first layer has no K2 before it and forms them from hidden.
    one_hop: the gated norm is left to the K2 behind: `core` is o, `core_z` z, `core_squares` the units' sums of o^2.
    """

    geometry: Geometry
    width: int
    first_layer: bool = False
    state_dtype: str = "float32"
    round_beta: bool = True
    own_norm: bool = False
    one_hop: bool = False
    stop: bool = True
    qkvz_format: str = BF16
    ba_format: str = BF16
    draft_tokens: int = 0

    model: ClassVar[str] = "qwen38_a95b"
    launch: ClassVar[str] = "k1"
    abi: ClassVar[Abi] = ABI
    region_names: ClassVar[tuple[str, ...]] = REGION_NAMES
    readonly: ClassVar[frozenset[str]] = READONLY

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MAX_ROWS:
            raise ValueError(f"K1 width {self.width}; needed: 1 .. {MAX_ROWS} rows")
        if self.state_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"SSM state dtype {self.state_dtype!r}; needed: 'float32' or 'bfloat16'")
        if self.draft_tokens < 0 or self.width % self.tokens:
            raise ValueError(f"K1 width {self.width} of {self.draft_tokens} draft tokens a request; needed: a multiple")
        if self.draft_tokens and self.one_hop:
            raise ValueError("K1 of verify steps with one_hop; needed: the gated norm inside K1")
        for name in ("qkvz_format", "ba_format"):
            if getattr(self, name) not in FORMATS:
                raise ValueError(f"{name} {getattr(self, name)!r}; needed: one of {', '.join(map(repr, FORMATS))}")
        if self.geometry.head_dim != HALF * LANE_COLUMNS:
            raise ValueError(f"head_dim {self.geometry.head_dim}; needed: {HALF * LANE_COLUMNS}")

    @property
    def grid(self) -> int:
        """Workgroups, one a CU."""
        return self.geometry.blocks

    @property
    def block(self) -> int:
        """Threads of a workgroup."""
        return self.geometry.threads

    def body(self) -> Callable[..., None]:
        """The kernel as a function of its ABI names, for the build."""
        return kernel_body(self)

    def scratch_regions(self) -> dict[str, tuple[int, int]]:
        """Mailbox regions of the scratch: name -> (byte offset, bytes)."""
        return scratch_regions(self.geometry, self.width)

    @property
    def given_z(self) -> bool:
        """Whether z and its sums of squares come from the K2 before."""
        return not (self.first_layer or self.own_norm)

    @property
    def unit_rounds(self) -> int:
        """Units that a wave computes at most (1 at the true size)."""
        return unit_rounds(self.geometry, self.requests)

    @property
    def tokens(self) -> int:
        """Rows of one request."""
        return self.draft_tokens or 1

    @property
    def requests(self) -> int:
        """Requests of the step."""
        return self.width // self.tokens


# ---------------------------------------------------------------------------------------------------------------
# Scratch
# ---------------------------------------------------------------------------------------------------------------


def _scratch_pairs(geometry: Geometry, width: int) -> dict[str, int]:
    """Pairs of each mailbox region, in the order in which they lie in the scratch."""
    g = geometry
    whole_rows = g.whole_tasks * g.blocks * MFMA_ROWS
    return {
        "PROJ": width * whole_rows // 2,  # [row][channel / 2]: two bf16
        "LEFT": width * g.leftover_groups * MFMA_ROWS * g.leftover_slices,  # [row][left-over row][slice]: f32
        "BA": width * g.ba_rows * g.ba_slices,  # [row][b heads, a heads][slice]: f32
        "ONRM": width * g.gdn_units,  # [row][value head][unit]: f32
    }


def scratch_regions(geometry: Geometry, width: int) -> dict[str, tuple[int, int]]:
    """Mailbox regions of the scratch of one width: name -> (byte offset, bytes)."""
    regions, top = {}, 0
    for name, pairs in _scratch_pairs(geometry, width).items():
        nbytes = pairs * PAIR_BYTES
        regions[name] = (top, nbytes)
        top += -(-nbytes // SCRATCH_ALIGN) * SCRATCH_ALIGN
    return regions


def held_offset(geometry: Geometry, width: int) -> int:
    """Bytes of the mailbox regions; behind them lie results that a wave parks (HELD, no mailbox)."""
    offset, nbytes = scratch_regions(geometry, width)["ONRM"]
    return offset + -(-nbytes // SCRATCH_ALIGN) * SCRATCH_ALIGN


def unit_rounds(geometry: Geometry, width: int) -> int:
    """Units that a wave computes at most (1 at the true size)."""
    return -(-geometry.gdn_units * width // (geometry.blocks * geometry.waves))


def scratch_bytes(geometry: Geometry, width: int) -> int:
    """Bytes of the scratch of one width (zeroed once, never shared with another width or kernel)."""
    parked = geometry.gdn_units * width if unit_rounds(geometry, width) > 1 else 0
    return held_offset(geometry, width) + parked * HELD_WORDS * WAVE * 4


def lds_layout(key: GdnKey) -> dict[str, int]:
    """Bytes of each LDS region of one workgroup."""
    g, s = key.geometry, key.width
    layout = {
        "DEAD": 16,
        "NORM": s * F32_BYTES if key.given_z else s * 2 * g.waves * F32_BYTES,
        "ACC": in_proj_tasks(g) * g.waves * s * MFMA_ROWS * F32_BYTES,
        "X": s * (g.hidden * BF16_BYTES + X_PAD_BYTES),
    }
    if key.qkvz_format != key.ba_format:
        layout["X_BA"] = s * x_ba_pitch(key)
    return layout


def lds_bytes(key: GdnKey) -> int:
    """Bytes of LDS of one workgroup."""
    return sum(-(-n // 16) * 16 for n in lds_layout(key).values())


def ba_columns(geometry: Geometry) -> int:
    """Columns of a wave in one K slice of an in_proj_ba group."""
    return geometry.wave_columns // geometry.ba_slices


def x_ba_area(key: GdnKey) -> int:
    """Bytes of one wave's columns of the ba slice in X_BA: x in in_proj_ba's format, where in_proj_qkvz has another."""
    columns = ba_columns(key.geometry)
    if key.ba_format == BF16:
        return columns * BF16_BYTES
    return columns // 2 + -(-columns // MX_BLOCK // X_PAD_BYTES) * X_PAD_BYTES  # e2m1, then the codes


def x_ba_pitch(key: GdnKey) -> int:
    """Bytes from a row of the step to the next in X_BA."""
    return key.geometry.waves * x_ba_area(key) + X_PAD_BYTES


def in_proj_tasks(geometry: Geometry) -> int:
    """Accumulators of a workgroup: whole tasks, the left-over slice, the ba slice."""
    return geometry.whole_tasks + (1 if geometry.leftover_groups else 0) + 1


# ---------------------------------------------------------------------------------------------------------------
# Launch arguments
# ---------------------------------------------------------------------------------------------------------------


def _demand(ok: bool, found: str, needed: str, fix: str) -> None:
    if not ok:
        raise ValueError(f"K1: found {found}; needed: {needed}; fix: {fix}")


def check_state(geometry: Geometry, conv_state: Tensor, ssm_state: Tensor) -> None:
    """Raise ValueError unless the pools' layer views have a layout that K1 reads.

    conv_state bf16 [slots, conv_channels, 3], any strides; ssm_state f32 or bf16 [slots, value_heads, 128, 128], each
    slot dense, slot stride free.
    """
    g = geometry
    want_conv = (g.conv_channels, CONV_STATE_TAPS)
    want_ssm = (g.value_heads, g.head_dim, g.head_dim)
    pools = "use the linear-attention state pool that SGLang makes for this model"
    found = f"conv state {tuple(conv_state.shape)} {conv_state.dtype}"
    _demand(tuple(conv_state.shape[1:]) == want_conv, found, f"[slots, {want_conv[0]}, {want_conv[1]}]", pools)
    _demand(str(conv_state.dtype) == "torch.bfloat16", found, "bfloat16", "SGLANG_MAMBA_CONV_DTYPE=bfloat16")
    reach = 2 * sum((n - 1) * abs(s) for n, s in zip(conv_state.shape[1:], conv_state.stride()[1:], strict=True))
    _demand(reach < 2**31, f"conv state strides {conv_state.stride()}", "a slot within 2 GiB", pools)
    found = f"SSM state {tuple(ssm_state.shape)} {ssm_state.dtype} strides {ssm_state.stride()}"
    _demand(tuple(ssm_state.shape[1:]) == want_ssm, found, f"[slots, {', '.join(map(str, want_ssm))}]", pools)
    _demand(
        str(ssm_state.dtype) in ("torch.float32", "torch.bfloat16"),
        found,
        "float32 or bfloat16",
        "--mamba-ssm-dtype float32",
    )
    dense = (g.head_dim * g.head_dim, g.head_dim, 1)
    _demand(tuple(ssm_state.stride()[1:]) == dense, found, f"strides [any, {', '.join(map(str, dense))}]", pools)
    _demand(ssm_state.stride(0) % LANE_COLUMNS == 0, found, "a slot stride that is a multiple of 4 elements", pools)


def launch_args(
    geometry: Geometry,
    *,
    hidden: Tensor,
    residual: Tensor | None,
    z: Tensor | None,
    squares: Tensor | None,
    norm_w: Tensor,
    w_qkvz: Tensor,
    w_ba: Tensor,
    w_qkvz_scale: Tensor | None = None,
    w_ba_scale: Tensor | None = None,
    conv_w: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    gnorm_w: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    state_index: Tensor,
    draft_conv: Tensor | None = None,
    draft_ssm: Tensor | None = None,
    draft_index: Tensor | None = None,
    residual_out: Tensor,
    core: Tensor,
    core_z: Tensor | None = None,
    core_squares: Tensor | None = None,
    scratch: Tensor,
    peers: Tensor,
    epoch: Tensor,
    rank: int,
    layer_slot: int,
    deadline_ticks: int,
    mode: int = 1,
) -> list[Any]:
    """Arguments in ABI order; tensors stand for their data pointers (read when the launch is made).

    draft_conv bf16 [places, tokens, conv_channels, 3], any strides; draft_ssm [places, tokens, value_heads, 128, 128],
    a token's state dense; draft_index int32 [>= requests], the place of each request (verify steps only).
    """
    del geometry  # the spec and the step have checked a server's weights and pools; `check_args` is for other callers
    values: dict[str, Any] = {
        "hidden": hidden,
        "residual": 0 if residual is None else residual,
        "z": 0 if z is None else z,
        "squares": 0 if squares is None else squares,
        "norm_w": norm_w,
        "w_qkvz": w_qkvz,
        "w_ba": w_ba,
        "w_qkvz_scale": 0 if w_qkvz_scale is None else w_qkvz_scale,
        "w_ba_scale": 0 if w_ba_scale is None else w_ba_scale,
        "conv_w": conv_w,
        "a_log": a_log,
        "dt_bias": dt_bias,
        "gnorm_w": gnorm_w,
        "conv_state": conv_state,
        "ssm_state": ssm_state,
        "state_index": state_index,
        "draft_conv": 0 if draft_conv is None else draft_conv,
        "draft_ssm": 0 if draft_ssm is None else draft_ssm,
        "draft_index": 0 if draft_index is None else draft_index,
        **draft_strides(draft_conv, draft_ssm),
        "residual_out": residual_out,
        "core": core,
        "core_z": 0 if core_z is None else core_z,
        "core_squares": 0 if core_squares is None else core_squares,
        "scratch": scratch,
        "peers": peers,
        "epoch": epoch,
        "conv_slot_stride": conv_state.stride(0),
        "ssm_slot_stride": ssm_state.stride(0),
        "conv_channel_stride": conv_state.stride(1),
        "conv_tap_stride": conv_state.stride(2),
        "rank": rank,
        "layer_slot": layer_slot,
        "deadline_ticks": deadline_ticks,
        "mode": mode,
    }
    return [values[name] for name, _ in ABI]


def draft_strides(draft_conv: Tensor | None, draft_ssm: Tensor | None) -> dict[str, int]:
    """Strides of the draft states by ABI name, in elements; zeros in decode steps, which have none."""
    conv = (0, 0, 0, 0) if draft_conv is None else draft_conv.stride()
    ssm = (0, 0) if draft_ssm is None else draft_ssm.stride()
    return {
        "draft_conv_slot_stride": conv[0],
        "draft_conv_token_stride": conv[1],
        "draft_conv_channel_stride": conv[2],
        "draft_conv_tap_stride": conv[3],
        "draft_ssm_slot_stride": ssm[0],
        "draft_ssm_token_stride": ssm[1],
    }


def _projection(name: str, rows: int, columns: int, form: str) -> dict[str, tuple[tuple[int, int], str]]:
    """Shape and dtype of a projection's tensors in a format."""
    if form == BF16:
        return {name: ((rows, columns), BF16)}
    return {name: ((rows, columns // 2), "uint8"), f"{name}_scale": ((rows, columns // MX_BLOCK), "uint8")}


def check_args(key: GdnKey, **tensors: Tensor | None) -> None:
    """Raise ValueError unless every tensor given has the shape, dtype and density that the ABI states."""
    g = key.geometry
    wanted = {
        "hidden": ((key.width, g.hidden), "bfloat16"),
        "residual": ((key.width, g.hidden), "bfloat16"),
        "z": ((key.width, g.hidden), "float32"),
        "squares": ((key.width, g.z_sums), "float32"),
        "norm_w": ((g.hidden,), "bfloat16"),
        **_projection("w_qkvz", g.qkvz_rows, g.hidden, key.qkvz_format),
        **_projection("w_ba", g.ba_rows, g.hidden, key.ba_format),
        "conv_w": ((g.conv_channels, CONV_TAPS), "bfloat16"),
        "a_log": ((g.value_heads,), "float32"),
        "dt_bias": ((g.value_heads,), "bfloat16"),
        "gnorm_w": ((g.head_dim,), "bfloat16"),
        "residual_out": ((key.width, g.hidden), "bfloat16"),
        "core": ((key.width, g.core_width), "bfloat16"),
        "core_z": ((key.width, g.core_width), "bfloat16"),
        "core_squares": ((key.width, g.gdn_units), "float32"),
    }
    for name, tensor in tensors.items():
        if name not in wanted or tensor is None:  # None: an argument that this key's launch has not
            continue
        shape, dtype = wanted[name]
        found = f"{name} {tuple(tensor.shape)} {tensor.dtype} contiguous={tensor.is_contiguous()}"
        ok = tuple(tensor.shape) == shape and str(tensor.dtype) == f"torch.{dtype}" and tensor.is_contiguous()
        _demand(ok, found, f"{name} {shape} {dtype}, dense", "load the model that this geometry describes")
        _demand(tensor.data_ptr() % 16 == 0, f"{name} at {tensor.data_ptr():#x}", "16-byte alignment", "align it")
    if "state_index" in tensors:
        index = tensors["state_index"]
        found = f"state_index {tuple(index.shape)} {index.dtype}"
        ok = str(index.dtype) == "torch.int32" and index.is_contiguous() and index.numel() >= key.requests
        _demand(
            ok, found, f"dense int32, at least {key.requests} entries", "pass mamba_cache_indices as SGLang makes it"
        )
    if "conv_state" in tensors and "ssm_state" in tensors:
        check_state(g, tensors["conv_state"], tensors["ssm_state"])
        found = str(tensors["ssm_state"].dtype).removeprefix("torch.")
        _demand(found == key.state_dtype, f"SSM state {found}", f"{key.state_dtype} of the build key", "rebuild K1")


# ---------------------------------------------------------------------------------------------------------------
# The kernel
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Within:
    """The launch of which K1's stages are the second part: its LDS with room for `lds_bytes`, its hand-offs under K1's
    tag, and the place of K1's waits in its chain. z and squares were stored in the same launch, at agent scope."""

    lds: Any
    sync: Any
    order: int


class _Front:
    """State of one K1 while it is traced: arguments, where this thread is, LDS regions, mailboxes."""

    def __init__(self, key: GdnKey, args: dict[str, Any], within: Within | None = None) -> None:
        from sgl_amd_mono.common import device as d
        from sgl_amd_mono.common import gemv
        from sgl_amd_mono.common.sync import Region, Sync

        self.d, self.gemv = d, gemv
        self.key = key
        self.g = g = key.geometry
        self.rows = key.width
        self.a = args
        self.tid = d.thread_id()
        self.lane = d.lane_id()
        self.wave = d.wave_id()
        self.block = d.block_id()

        layout = lds_layout(key)
        lds = d.Lds(lds_bytes(key)) if within is None else within.lds
        self.lds = {name: lds.take(nbytes) for name, nbytes in layout.items()}
        self.given_cache = d.PLAIN if within is None else d.AGENT  # of z and squares
        self.order = WAIT_ORDER if within is None else dict.fromkeys(WAIT_ORDER, within.order)
        self.sync = (
            within.sync
            if within is not None
            else Sync(
                epoch=args["epoch"],
                slot=args["layer_slot"],
                peers=args["peers"],
                rank=args["rank"],
                ranks=g.tp,
                deadline_ticks=args["deadline_ticks"],
                mode=args["mode"],
                dead=self.lds["DEAD"],
                stop=key.stop,
            )
        )
        regions = scratch_regions(g, key.width)
        self.region = {
            name: Region(REGIONS.index(name), args["scratch"] + d.I64(regions[name][0]), order=self.order[name])
            for name in REGIONS
        }

        self.lane_columns = g.wave_columns // WAVE  # wave w owns columns w * wave_columns .. of every row
        self.x_pitch = g.hidden * BF16_BYTES + X_PAD_BYTES
        self.x_ba_pitch, self.x_ba_area = x_ba_pitch(key), x_ba_area(key)
        self.state_size = F32_BYTES if key.state_dtype == "float32" else BF16_BYTES
        self.held = args["scratch"] + d.I64(held_offset(g, key.width))

    # -- pairs of f32, which the vector unit adds, multiplies and fuses two at a time

    def pair(self, word: Any) -> Any:
        """The two bf16 of a word as f32 x 2."""
        return self.d.vector_from(self.d.f32_from_bf16_pair(word))

    def splat(self, value: Any) -> Any:
        return self.d.vector_from([value, value])

    def fma2(self, a: Any, b: Any, c: Any) -> Any:
        return self.d.intrinsic("llvm.fma.v2f32", self.d.vec(self.d.F32, 2), [a, b, c])

    def words(self, value: Any, count: int) -> list[Any]:
        """32-bit words of a loaded value."""
        return [value] if count == 1 else [self.d.vector_element(value, i) for i in range(count)]


QUAD_XOR_1, QUAD_XOR_2, QUAD_XOR_3 = 0b10_11_00_01, 0b01_00_11_10, 0b00_01_10_11  # DPP quad_perm: lane ^ 1, 2, 3
ROW_HALF_MIRROR = 0x141  # DPP: lane ^ 7
ROW_ROTATE = 0x120  # DPP row_ror, + n: lane - n inside a row of 16


def _quad_broadcast(lane: int) -> int:
    """DPP quad_perm that gives every lane of a quad the value of its lane `lane`."""
    return lane * 0b01_01_01_01


def kernel_body(key: GdnKey) -> Callable[..., None]:
    """The kernel of `key`, traced when it is called with the ABI's names."""

    def gdn_front(**args: Any) -> None:
        c = _Front(key, args)
        rows = load_rows(c)
        weights = Weights(c)
        weights.issue(weights.beside(c.rows))
        finish_front(c, rows, weights)

    return gdn_front


def finish_front(c: _Front, rows: Rows, weights: Weights) -> None:
    """The stages behind the first loads."""
    rstd = norm_scales(c, rows)
    normalise(c, rows, rstd, weights)
    weights.issue(weights.steps)
    unit = in_proj(c, weights)
    if c.key.draft_tokens:
        verify_units(c, unit)
    elif c.key.unit_rounds == 1:
        gdn_unit(c, unit)
    else:
        gdn_rounds(c, unit)


# ---- loads at the start -----------------------------------------------------------------------------------------


@dataclass
class Rows:
    """A lane's columns of every row of the step, as words."""

    z: list[list[Any]]  # [row][column]: f32; empty where z is formed here
    hidden: list[list[Any]]  # [row]: two bf16 a word
    residual: list[list[Any]]  # empty on a first layer
    norm_w: list[Any]  # two bf16 a word


def load_rows(c: _Front) -> Rows:
    """All waves: z (or hidden and residual) and the norm weight of the lane's columns; first of all loads, as they are
    used first. z = f32(hidden) + f32(residual)."""
    d, g, a = c.d, c.g, c.a

    def columns(name: str, row: int, size: int, cache: Any = d.PLAIN) -> list[Any]:
        """The lane's columns as words, `size` bytes a column."""
        buffer, out = d.Buffer(a[name]), []
        words = c.lane_columns * size // 4
        each = min(words, 4)
        like = d.I32 if each == 1 else d.vec(d.I32, each)
        for first in range(0, words, each):
            at = c.tid * (4 * words) + 4 * first
            out += c.words(buffer.load(at, like, cache, scalar=row * g.hidden * size), each)
        return out

    def every(name: str, size: int, wanted: bool, cache: Any = d.PLAIN) -> list[list[Any]]:
        return [columns(name, t, size, cache) for t in range(c.rows)] if wanted else []

    given = c.key.given_z
    return Rows(
        z=every("z", F32_BYTES, given, c.given_cache),
        hidden=every("hidden", BF16_BYTES, not given),
        residual=every("residual", BF16_BYTES, not given and not c.key.first_layer),
        norm_w=columns("norm_w", 0, BF16_BYTES),
    )


def z_of_row(c: _Front, rows: Rows, t: int, again: bool = False) -> list[Any]:
    """z of a row as pairs of f32. `again`: formed a second time from the same words; their origin is hidden, or the
    compiler would keep the first z, in twice the registers."""
    d = c.d
    if rows.z:
        values = [d.bitcast(word, d.F32) for word in rows.z[t]]
        return [d.vector_from(values[i : i + 2]) for i in range(0, len(values), 2)]

    def pairs(words: list[Any]) -> list[Any]:
        return [c.pair(d.opaque(word) if again else word) for word in words]

    hidden = pairs(rows.hidden[t])
    return [h + r for h, r in zip(hidden, pairs(rows.residual[t]), strict=True)] if rows.residual else hidden


@dataclass
class Unit:
    """One wave's (row, value head, 8 state rows) and everything of it that does not depend on this step's products.

    Lane l holds, with half = l / 32: columns 4 * (l % 32) .. of state rows 4 * half + i (i = 0..3); q (half 0) or k
    (half 1) channels 4 * (l % 32) .. ; v, z and output row 4 * half + l % 4.
    """

    some: Any  # wave has a unit (uniform), None: every wave has one
    live: Any  # the row is no pad row (uniform, 0 or 1)
    row: Any
    head: Any
    index: Any  # head * units_per_head + unit of the head
    key_head: Any
    state_base: Any  # address of the row's slots
    conv_base: Any
    state_offset: Any  # bytes of the lane's first row in its slot
    channel_bytes: Any  # bytes of the lane's first q or k channel in its slot
    v_channel_bytes: Any
    loaded: list[Any] = field(default_factory=list)  # in flight: words, or vectors of words, of the inputs below


@dataclass
class Inputs:
    """A unit's inputs as words: bf16 in the low half, f32, or two bf16."""

    state: list[list[Any]]  # [row 0..3][word of its four columns]
    window: list[list[Any]]  # [channel 0..3][tap]
    v_window: list[Any]  # [tap]
    conv_w: list[list[Any]]  # [channel 0..3][two words of two taps]
    v_conv_w: list[Any]
    a_log: Any
    dt_bias: Any
    gnorm_w: Any


def arrived(c: _Front, u: Unit) -> Inputs:
    """The unit's inputs, to be called where they are first used.

    Their origin is hidden: the compiler would otherwise convert them right behind the loads, and so make the norm wait
    for everything that is in flight.
    """
    d = c.d
    words = iter(
        d.opaque(word) for value in u.loaded for word in c.words(value, 1 if isinstance(value, d.I32) else value.numel)
    )

    def take(*counts: int) -> Any:
        if len(counts) == 1:
            return [next(words) for _ in range(counts[0])]
        return [take(*counts[1:]) for _ in range(counts[0])]

    state_words = LANE_COLUMNS if c.key.state_dtype == "float32" else LANE_COLUMNS // 2
    return Inputs(
        state=take(LANE_COLUMNS, state_words),
        window=take(LANE_COLUMNS, CONV_STATE_TAPS),
        v_window=take(CONV_STATE_TAPS),
        conv_w=take(LANE_COLUMNS, CONV_TAPS // 2),
        v_conv_w=take(CONV_TAPS // 2),
        a_log=next(words),
        dt_bias=next(words),
        gnorm_w=next(words),
    )


def find_unit(c: _Front, unit_round: Any) -> Unit:
    """The wave's unit of a round, if it has one: unit n = workgroup + blocks * (wave + 8 * round). Its `row` is the
    request's number, which in decode steps is its row."""
    d, g, a = c.d, c.g, c.a
    number = c.block + (c.wave + unit_round * g.waves) * g.blocks
    total = c.key.requests * g.gdn_units
    some = None
    if total < c.key.unit_rounds * g.blocks * g.waves:
        some = d.compare("ult", number, d.I32(total))
        number = d.select(some, number, d.I32(total - 1))
    row, index = d.unsigned_divide(number, g.gdn_units)
    head, _ = d.unsigned_divide(index, g.units_per_head)
    key_head, _ = d.unsigned_divide(head, g.heads_per_key)
    slot = d.uniform(d.load_uniform(a["state_index"], row * 4, d.I32))
    live = d.compare("sgt", slot, d.I32(0))
    slot64 = d.zext(slot, d.I64)

    half, lane32 = d.shift_right_logical(c.lane, d.I32(5)), c.lane & (HALF - 1)
    value_row = index * GDN_UNIT_ROWS
    channel_stride = a["conv_channel_stride"] * BF16_BYTES
    return Unit(
        some=some,
        live=_int(d, live if some is None else live & some),
        row=row,
        head=head,
        index=index,
        key_head=key_head,
        state_base=a["ssm_state"] + slot64 * a["ssm_slot_stride"] * d.I64(c.state_size),
        conv_base=a["conv_state"] + slot64 * a["conv_slot_stride"] * d.I64(BF16_BYTES),
        state_offset=((value_row + half * LANE_COLUMNS) * g.head_dim + lane32 * LANE_COLUMNS) * c.state_size,
        channel_bytes=_channel(c, key_head) * channel_stride,
        v_channel_bytes=(value_row + _own_row(c) + g.v_offset) * channel_stride,
    )


def _channel(c: _Front, key_head: Any) -> Any:
    """The lane's first q or k channel."""
    half, lane32 = c.d.shift_right_logical(c.lane, c.d.I32(5)), c.lane & (HALF - 1)
    return half * c.g.k_offset + key_head * c.g.head_dim + lane32 * LANE_COLUMNS


def _is_live(c: _Front, u: Unit) -> Any:
    return c.d.compare("ne", u.live, c.d.I32(0))


def first_unit(c: _Front) -> Unit:
    """`load_unit` of round 0; waves without a unit do nothing of it."""
    d, g = c.d, c.g
    units = c.key.requests * g.gdn_units
    if units >= g.blocks * g.waves:
        return load_unit(c, find_unit(c, 0))
    some = d.compare("ult", c.block + c.wave * g.blocks, d.I32(units))
    names = [f.name for f in fields(Unit) if f.name not in ("some", "loaded")]

    def find() -> list[Any]:
        u = load_unit(c, find_unit(c, 0))
        return [*[getattr(u, name) for name in names], *u.loaded]

    like = [d.I64 if name.endswith("base") else d.I32 for name in names] + _loaded_like(c)
    values = d.if_else(some, find, lambda: [d.fly.poison(kind) for kind in like], like)
    u = Unit(some, *values[: len(names)], loaded=values[len(names) :])
    u.live = d.select(some, u.live, d.I32(0))
    return u


def _loaded_like(c: _Front) -> list[Any]:
    """Types of a unit's loads, in their order."""
    d = c.d
    state = d.vec(d.I32, LANE_COLUMNS * c.state_size // 4)
    return [*[state] * LANE_COLUMNS, *[d.I32] * TAPS, *[d.vec(d.I32, 4)] * 2, d.vec(d.I32, 2), *[d.I32] * 3]


def _load_taps(c: _Front, u: Unit) -> list[Any]:
    """Conv windows of the lane's four q or k channels and its v channel, bits."""
    d, a = c.d, c.a
    channel_stride, tap_stride = a["conv_channel_stride"] * BF16_BYTES, a["conv_tap_stride"] * BF16_BYTES
    conv_buffer = d.Buffer(u.conv_base)
    first = [u.channel_bytes + channel_stride * i for i in range(LANE_COLUMNS)]
    return [
        d.zext(conv_buffer.load(start + tap_stride * j, d.I16), d.I32)
        for start in [*first, u.v_channel_bytes]
        for j in range(CONV_STATE_TAPS)
    ]


def windows_read(c: _Front, u: Unit) -> None:
    """One hop: every conv window that a wave uses has been read when its workgroup publishes, so that a workgroup's
    PROJ pair tells the windows' owner that it may write. The first unit's are in registers; those of further units (a
    grid smaller than the step's units) are parked in HELD."""
    d = c.d
    d.need(*u.loaded[LANE_COLUMNS : LANE_COLUMNS + TAPS])

    def park(unit_round: Any) -> None:
        u = find_unit(c, unit_round)
        with d.if_(_is_live(c, u)):
            for n, word in enumerate(_load_taps(c, u)):
                d.store(word, c.held, _held_place(c, u, n))

    if c.key.unit_rounds > 1:
        d.for_range(1, c.key.unit_rounds, 1, [], park)
        d.wait_stores()


def load_unit(c: _Front, u: Unit, parked: bool = False) -> Unit:
    """Waves with a unit of a live row: issue the loads of its state, conv windows (`parked`: in HELD), constants."""
    d, g, a = c.d, c.g, c.a
    row_bytes = g.head_dim * c.state_size
    like = _loaded_like(c)
    tap_bytes = CONV_TAPS * BF16_BYTES

    def loads() -> list[Any]:
        state_buffer, conv_w = d.Buffer(u.state_base), d.Buffer(a["conv_w"])
        state = [state_buffer.load(u.state_offset + i * row_bytes, like[0]) for i in range(LANE_COLUMNS)]
        if parked:
            taps = [d.load(c.held, _held_place(c, u, n), d.I32) for n in range(TAPS)]
        else:
            taps = _load_taps(c, u)
        channel = _channel(c, u.key_head)
        own_row = u.index * GDN_UNIT_ROWS + _own_row(c)
        return [
            *state,
            *taps,
            conv_w.load(channel * tap_bytes, d.vec(d.I32, 4)),
            conv_w.load((channel + 2) * tap_bytes, d.vec(d.I32, 4)),
            conv_w.load((own_row + g.v_offset) * tap_bytes, d.vec(d.I32, 2)),
            d.load(a["a_log"], u.head * F32_BYTES, d.I32),
            d.zext(d.load(a["dt_bias"], u.head * BF16_BYTES, d.I16), d.I32),
            d.zext(d.load(a["gnorm_w"], (own_row & (g.head_dim - 1)) * BF16_BYTES, d.I16), d.I32),
        ]

    u.loaded = d.if_else(_is_live(c, u), loads, lambda: [d.fly.poison(kind) for kind in like], like)
    return u


@dataclass
class Load:
    """One load of weights in flight."""

    registers: int
    issue: Callable[[], Any]
    task: int = -1  # accumulator of the product
    x: Callable[[], Sequence[Any]] | None = None  # loads x of the product from LDS, once; its words
    multiply: Callable[[Any, Any], Any] | None = None  # (loaded, accumulator) -> accumulator; None: scale codes


class Rows16:
    """16-row groups of a projection: the loads of this wave's columns, and the products with its columns of x.

    A group is computed over all of the wave's columns, or, cut in `slices`, over slice number `which` of them.
    Subclasses say how weights and x are stored; x is in LDS, a row of the step each `pitch` bytes, the wave's columns
    at `wave * area`. A `sliced` x holds the columns of the workgroup's one slice alone.
    """

    def __init__(self, c: _Front, x: Any, pitch: int, area: int, sliced: bool = False) -> None:
        self.c, self.x, self.sliced = c, x, sliced
        self.x_row = c.gemv.clamped_row(c.rows) * pitch + c.wave * area
        self._operands: dict[Any, Any] = {}

    def operand(self, place: Any, load: Callable[[], Any]) -> Any:
        """x of one tile, loaded at its first use."""
        if place not in self._operands:
            self._operands[place] = load()
        return self._operands[place]


class Bf16Rows16(Rows16):
    """bf16 weights [rows, hidden] times bf16 x: tiles of 32 columns."""

    def __init__(self, c: _Front, weight: str, rows: int, present: Any = None, **x: Any) -> None:
        super().__init__(c, **x)
        g, gemv = c.g, c.gemv
        self.row_bytes = g.hidden * BF16_BYTES
        self.wave_bytes = g.wave_columns * BF16_BYTES
        self.lane_bytes = gemv.bf16_lane_bytes(self.row_bytes) + c.wave * self.wave_bytes
        # column l % 16 of the product is a row of the step (columns past the last repeat it)
        self.x_bytes = self.x_row + gemv.operand_lane()[1] * gemv.LANE_BYTES
        self.buffer = gemv.guarded(c.a[weight], rows * self.row_bytes, present)

    def loads(self, task: int, group: Any, slices: int = 1, which: Any = 0) -> list[list[Load]]:
        """The group's loads, those of one step a list."""
        start = group * (MFMA_ROWS * self.row_bytes)
        skip = 0
        if slices > 1:
            skip = which * (self.wave_bytes // slices)
            start = start + skip
        return [[self._tile(task, start, n, skip)] for n in range(self.c.g.wave_steps // slices)]

    def _tile(self, task: int, start: Any, number: int, skip: Any) -> Load:
        d, gemv = self.c.d, self.c.gemv

        def x() -> Any:
            place = self.x_bytes if self.sliced else self.x_bytes + skip
            return self.x.load(place + number * gemv.BF16_TILE_BYTES, d.vec(d.I32, 4))

        place = (number, None if isinstance(skip, int) else task)
        return Load(
            STEP_REGISTERS,
            lambda: gemv.load_bf16_tile(self.buffer, self.lane_bytes, number, scalar=start),
            task,
            lambda: [self.operand(place, x)],
            lambda tile, acc: d.mfma_bf16(tile, self.operand(place, x), acc),
        )


class Mxfp4Rows16(Rows16):
    """MXFP4 weights, uint8 [rows, hidden / 2] and codes [rows, hidden / 32] as Quark stores them, times MXFP4 x: tiles
    of 128 columns. A slice narrower than a tile is a tile of which only some lanes load weights: the others hold zeros.

    x in LDS, see `store_x`: the e2m1 of the wave's columns in their order, then their codes, tile by tile for each part
    of a tile (a lane's own codes lie together), in a sliced x in the order of the columns.
    """

    def __init__(self, c: _Front, weight: str, scale: str, rows: int, present: Any = None, **x: Any) -> None:
        super().__init__(c, **x)
        g, gemv = c.g, c.gemv
        self.row_bytes, self.scale_bytes = g.hidden // 2, g.hidden // MX_BLOCK
        self.wave_bytes, self.wave_codes = g.wave_columns // 2, g.wave_columns // MX_BLOCK
        self.tiles = g.wave_columns // gemv.MX_TILE_K
        row, self.part = gemv.operand_lane()
        self.lane_bytes = gemv.bf16_lane_bytes(self.row_bytes) + c.wave * self.wave_bytes
        self.lane_codes = row * self.scale_bytes + c.wave * self.wave_codes
        self.buffer = gemv.guarded(c.a[weight], rows * self.row_bytes, present)
        self.codes = gemv.guarded(c.a[scale], rows * self.scale_bytes, present)

    def loads(self, task: int, group: Any, slices: int = 1, which: Any = 0) -> list[list[Load]]:
        """The group's loads, those of one step a list; the first of them brings the weights' codes."""
        d, gemv, g = self.c.d, self.c.gemv, self.c.g
        start, codes_start = group * (MFMA_ROWS * self.row_bytes), group * (MFMA_ROWS * self.scale_bytes)
        lane_bytes, first, tiles, parts = self.lane_bytes, 0, self.tiles, gemv.MX_ROW_CODES
        if slices > 1:
            columns = g.wave_columns // slices
            first = d.unsigned_divide(which * columns, gemv.MX_TILE_K)[0]
            tiles = max(1, columns // gemv.MX_TILE_K)
            parts = min(parts, columns // MX_BLOCK)
            start, codes_start = start + first * gemv.MX_ROW_BYTES, codes_start + first * gemv.MX_ROW_CODES
            if parts < gemv.MX_ROW_CODES:
                own = d.unsigned_divide(self.part, parts)[0]
                wanted = which & (gemv.MX_ROW_CODES // parts - 1)
                lane_bytes = d.select(d.compare("eq", own, wanted), lane_bytes, d.I32(BEYOND_ROWS))
        words: list[Any] = []

        def codes() -> list[Any]:
            words.extend(gemv.load_plain_mxfp4_codes(self.codes, self.lane_codes, tiles, scalar=codes_start))
            return words

        steps = [[self._tile(task, lane_bytes, start, n, first, parts, words)] for n in range(tiles)]
        steps[0].insert(0, Load(tiles, codes))
        return steps

    def _tile(
        self, task: int, lane_bytes: Any, start: Any, number: int, first: Any, parts: int, codes: list[Any]
    ) -> Load:
        """Tile `number` of a slice that starts with the wave's tile `first`; `codes`: the weights' code words."""
        d, gemv = self.c.d, self.c.gemv

        def x() -> tuple[Any, Any, int]:
            """(e2m1 words, word with the code, its byte)."""
            if self.sliced:  # all of it is one tile or a part of one
                block = self.part & (parts - 1)
                words = self.x.load(self.x_row + block * gemv.LANE_BYTES, d.vec(d.I32, 4))
                code = self.x.load(self.x_row + parts * gemv.LANE_BYTES + block, d.I8)
                return words, d.zext(code, d.I32), 0
            tile = first + number
            place = self.x_row + self.part * gemv.LANE_BYTES + tile * gemv.MX_ROW_BYTES
            words = self.x.load(place, d.vec(d.I32, 4))
            at = self.x_row + (self.wave_bytes + self.part * self.tiles)
            if isinstance(first, int) and self.tiles % 4 == 0:
                word = self.operand(("codes", number // 4), lambda: self.x.load(at + number // 4 * 4, d.I32))
                return words, word, number % 4
            return words, d.zext(self.x.load(at + tile, d.I8), d.I32), 0

        place = (number, None if isinstance(first, int) else task)

        def multiply(tile: Any, acc: Any) -> Any:
            words, code, byte = self.operand(place, x)
            return d.mfma_mxfp4(tile, words, acc, gemv.plain_mxfp4_code(codes[number]), 0, code, byte)

        load, operand = gemv.load_plain_mxfp4_tile, lambda: self.operand(place, x)[:2]
        return Load(
            STEP_REGISTERS, lambda: load(self.buffer, lane_bytes, number, scalar=start), task, operand, multiply
        )


class Weights:
    """The weight tiles of a workgroup (16 rows x 32 columns in bf16, x 128 in MXFP4, a wave and step), loaded in the
    order of their use.

    Order: the ba slice, the whole tasks (step by step, so that a step's x serves all of them), the left-over slice.
    All are in flight at the start as far as the registers last, more as each normed row leaves its registers.
    """

    def __init__(self, c: _Front) -> None:
        d, g = c.d, c.g
        self.c = c
        self.whole, self.left, self.ba = list(range(g.whole_tasks)), None, in_proj_tasks(g) - 1
        self.ba_group, self.ba_slice = d.unsigned_divide(c.block, g.ba_slices)
        self.has_ba = d.compare("ult", c.block, d.I32(g.ba_groups * g.ba_slices))

        qkvz, ba = self._rows(c, "w_qkvz", g.qkvz_rows), self._rows(c, "w_ba", g.ba_rows, self.has_ba)
        self.loads = [one for step in ba.loads(self.ba, self.ba_group, g.ba_slices, self.ba_slice) for one in step]
        tasks = [qkvz.loads(task, c.block + task * g.blocks) for task in self.whole]
        self.loads += [load for step in zip(*tasks, strict=True) for part in step for load in part]
        if g.leftover_groups:
            self.left = g.whole_tasks
            self.left_group, self.left_slice = d.unsigned_divide(c.block, g.leftover_slices)
            group = self.left_group + g.whole_tasks * g.blocks
            left = qkvz.loads(self.left, group, g.leftover_slices, self.left_slice)
            self.loads += [load for step in left for load in step]

        self.loaded: list[Any] = []
        self.steps = len(self.loads)

    @staticmethod
    def _rows(c: _Front, weight: str, rows: int, present: Any = None) -> Rows16:
        """The projection's rows in the key's format, on x of that format."""
        ba, key = weight == "w_ba", c.key
        form = key.ba_format if ba else key.qkvz_format
        if ba and key.ba_format != key.qkvz_format:
            where = {"x": c.lds["X_BA"], "pitch": c.x_ba_pitch, "area": c.x_ba_area, "sliced": True}
        else:
            where = {"x": c.lds["X"], "pitch": c.x_pitch, "area": c.g.wave_columns * BF16_BYTES}
        if form == MXFP4:
            return Mxfp4Rows16(c, weight, weight + "_scale", rows, present, **where)
        return Bf16Rows16(c, weight, rows, present, **where)

    def beside(self, rows: int) -> int:
        """How many of the first loads fit into the registers beside so many rows of the step."""
        key, words = self.c.key, self.c.lane_columns // (2 if self.c.key.first_layer else 1)
        registers, total = (LOAD_REGISTERS if key.given_z else LOAD_REGISTERS_OWN) - words * rows, 0
        for n, load in enumerate(self.loads):
            total += load.registers
            if total > registers:
                return n
        return len(self.loads)

    def issue(self, upto: int) -> None:
        """All waves: the loads up to number `upto`."""
        self.loaded += [load.issue() for load in self.loads[len(self.loaded) : upto]]
        self.c.d.compiler_fence()  # or the compiler sinks them to their use, and a trip to memory is exposed


# ---- norm ---------------------------------------------------------------------------------------------------------


def norm_scales(c: _Front, rows: Rows) -> list[Any]:
    """rstd of every row, f32, behind one barrier: z's squares are summed by wave t for row t from the K2 before's sums,
    or by all waves from z. The launch's look at the error word of earlier launches is in the barrier."""
    return _given_scales(c) if c.key.given_z else _own_scales(c, rows)


def _rstd(c: _Front, total: Any) -> Any:
    """1 / sqrt(mean + eps), the division rounded correctly."""
    d, g = c.d, c.g
    return d.F32(1.0) / d.sqrt(d.fma(total, d.F32(1.0 / g.hidden), d.F32(g.eps)))


def _given_scales(c: _Front) -> list[Any]:
    d, g = c.d, c.g
    each = g.z_sums // WAVE
    with d.if_(d.compare("ult", c.wave, d.I32(c.rows))):
        words: list[Any] = []
        piece = min(each, 4)
        like = d.I32 if piece == 1 else d.vec(d.I32, piece)
        for first in range(0, each, piece):
            at = c.wave * (g.z_sums * F32_BYTES) + c.lane * (each * F32_BYTES) + first * F32_BYTES
            words += c.words(d.Buffer(c.a["squares"]).load(at, like, c.given_cache), piece)
        sums = [d.bitcast(word, d.F32) for word in words]
        while len(sums) > 1:  # distance 8, 4, 2, 1
            half = len(sums) // 2
            sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
        total = sums[0] + d.dpp(sums[0], QUAD_XOR_1)
        total = total + d.dpp(total, QUAD_XOR_2)
        for halves in (d.wave_halves, d.row_pairs):
            low, high = halves(total)
            total = low + high
        rstd = _rstd(c, _row_sum(c, total))
        with d.if_(d.compare("eq", c.lane, d.I32(0))):
            c.lds["NORM"].store(rstd, c.wave * F32_BYTES)
    c.sync.leave_if_failed()
    return [c.lds["NORM"].load(t * F32_BYTES, d.F32) for t in range(c.rows)]


def _row_sum(c: _Front, value: Any) -> Any:
    """Sum at distance 8, then 4, in rows of 16 lanes."""
    value = value + c.d.dpp(value, ROW_ROTATE + 8)
    return value + c.d.dpp(value, ROW_ROTATE + 4)


def _own_scales(c: _Front, rows: Rows) -> list[Any]:
    """NORM[row][wave][half]: sums of a wave's lanes 0..31 and 32..63."""
    d, g = c.d, c.g
    pairs = Z_SUM_COLUMNS // 2
    for t in range(c.rows):
        z, parts = z_of_row(c, rows, t), []
        for first in range(0, len(z), pairs):
            fused = [
                c.fma2(a, a, b * b) for a, b in zip(z[first : first + pairs : 2], z[first + 1 : first + pairs : 2])
            ]
            total = sum(fused[1:], fused[0]) if fused else z[0] * z[0]
            part = d.vector_element(total, 0) + d.vector_element(total, 1)
            part = part + d.dpp(d.dpp(part, ROW_HALF_MIRROR), QUAD_XOR_3)  # distance 4
            part = part + d.dpp(part, QUAD_XOR_2)
            parts.append(part + d.dpp(part, QUAD_XOR_1))
        total = sum(parts[1:], parts[0])
        total = total + d.dpp(total, ROW_ROTATE + 8)
        low, high = d.row_pairs(total)
        with d.if_(d.compare("eq", c.lane & (HALF - 1), d.I32(0))):
            half = d.shift_right_logical(c.lane, d.I32(5))
            c.lds["NORM"].store(low + high, (c.wave * 2 + half + t * 2 * g.waves) * F32_BYTES)
    c.sync.leave_if_failed()
    scales = []
    for first in range(0, c.rows, WAVE // MFMA_ROWS):  # four rows' 16 sums at a time
        place = c.lane + first * 2 * g.waves
        place = d.select(d.compare("ult", place, d.I32(c.rows * 2 * g.waves)), place, d.I32(0))
        total = _row_sum(c, c.lds["NORM"].load(place * F32_BYTES, d.F32))
        total = total + d.dpp(total, QUAD_XOR_2)
        rstd = d.bitcast(_rstd(c, total + d.dpp(total, QUAD_XOR_1)), d.I32)
        count = min(c.rows - first, WAVE // MFMA_ROWS)
        scales += [d.bitcast(d.read_lane(rstd, t * 2 * g.waves), d.F32) for t in range(count)]
    return scales


def normalise(c: _Front, rows: Rows, rstd: list[Any], weights: Weights) -> None:
    """All waves: residual_out = bf16(z), each column by one workgroup; x = bf16((z * rstd) * (1 + w)) of the wave's own
    columns into LDS."""
    d, g = c.d, c.g
    share = -(-g.threads // g.blocks)  # threads whose columns one workgroup writes
    with d.if_(d.compare("eq", d.unsigned_divide(c.tid, share)[0], c.block)):
        out = d.Buffer(c.a["residual_out"])
        for t in range(c.rows):
            words = [_pack(c, value) for value in z_of_row(c, rows, t, again=True)]
            each = min(len(words), 4)
            for first in range(0, len(words), each):
                value = words[first] if each == 1 else d.vector_from(words[first : first + each])
                out.store(value, c.tid * (4 * len(words)) + 4 * first, scalar=t * g.hidden * BF16_BYTES)
    weight = [c.pair(word) + c.splat(d.F32(1.0)) for word in rows.norm_w]
    for t in range(c.rows):
        z = z_of_row(c, rows, t, again=True)
        x = [(value * c.splat(rstd[t])) * w for value, w in zip(z, weight, strict=True)]
        store_x(c, t, [_pack(c, value) for value in x], weights)
        weights.issue(weights.beside(c.rows - 1 - t))  # the row leaves its registers to more weights


def _store_words(c: _Front, row: int, words: list[Any]) -> None:
    """The lane's columns of `row` of x in LDS, as bf16."""
    _put(c.lds["X"], words, c.tid * (4 * len(words)) + row * c.x_pitch)


def _put(region: Any, words: list[Any], place: Any) -> None:
    """Words to LDS, at most four a store."""
    from sgl_amd_mono.common import device as d

    piece = min(len(words), 4)
    for first in range(0, len(words), piece):
        value = words[first] if piece == 1 else d.vector_from(words[first : first + piece])
        region.store(value, place + 4 * first)


def store_x(c: _Front, row: int, words: list[Any], weights: Weights) -> None:
    """The lane's columns of `row` of x to LDS as in_proj reads them: X in in_proj_qkvz's format, and the columns of the
    workgroup's ba slice in X_BA where in_proj_ba has another."""
    d, g, key = c.d, c.g, c.key
    if key.qkvz_format == BF16:
        _store_words(c, row, words)
    else:
        place = c.wave * (g.wave_columns * BF16_BYTES) + row * c.x_pitch
        tiles = g.wave_columns // c.gemv.MX_TILE_K
        store_mxfp4(c, c.lds["X"], words, place, c.lane, lambda n: g.wave_columns // 2 + (n & 3) * tiles + (n >> 2))
    if key.ba_format == key.qkvz_format:
        return
    lanes = ba_columns(g) // c.lane_columns  # that hold the slice
    slice_, lane = d.unsigned_divide(c.lane, lanes)
    place = c.wave * c.x_ba_area + row * c.x_ba_pitch
    with d.if_(weights.has_ba), d.if_(d.compare("eq", slice_, weights.ba_slice)):
        if key.ba_format == BF16:
            _put(c.lds["X_BA"], words, place + lane * (c.lane_columns * BF16_BYTES))
        else:
            store_mxfp4(c, c.lds["X_BA"], words, place, lane, lambda n: ba_columns(g) // 2 + n)


def store_mxfp4(
    c: _Front, region: Any, words: list[Any], place: Any, lane: Any, code_place: Callable[[Any], Any]
) -> None:
    """The lane's columns as MXFP4: e2m1 at `place` plus those of the lanes before it, each block's code at `place` +
    `code_place(block)`. A block is `MX_BLOCK / lane_columns` lanes, which must all be here."""
    d = c.d
    lanes = MX_BLOCK // c.lane_columns
    code = d.mxfp4_code_even(d.wave_max(d.bf16_amax(words), lanes))
    each = 4  # words of bf16 that fill a word of e2m1
    packed = [d.mxfp4_pack_bf16(words[n : n + each], code) for n in range(0, len(words), each)]
    like = {1: d.I8, 2: d.I16}.get(len(words))
    _put(region, packed if like is None else [d.trunc(packed[0], like)], place + lane * len(words))
    block, rest = d.unsigned_divide(lane, lanes)
    with d.if_(d.compare("eq", rest, d.I32(0))):
        region.store(d.trunc(code, d.I8), place + code_place(block))


def _pack(c: _Front, value: Any) -> Any:
    return c.d.pack_bf16(c.d.vector_element(value, 0), c.d.vector_element(value, 1))


# ---- in_proj -----------------------------------------------------------------------------------------------------


def in_proj(c: _Front, weights: Weights) -> Unit:
    """All waves: 16-row products over the wave's columns (MFMA 16x16x32 in bf16, scaled 16x16x128 in MXFP4: weight rows
    x rows of the step), then, behind one barrier, the sum over the 8 waves in order, and the results as mailbox pairs.

    x is read from LDS in groups, one group ahead of the products. Half-way, where weights have left their registers,
    the inputs of the wave's unit are requested; returns it.
    """
    d, gemv, g, w = c.d, c.gemv, c.g, weights
    products = [(load, value) for load, value in zip(w.loads, w.loaded, strict=True) if load.multiply is not None]
    groups = [products[i : i + X_GROUP] for i in range(0, len(products), X_GROUP)]

    def read(group: list[tuple[Load, Any]]) -> list[Any]:
        return [word for load, _ in group for word in load.x()]

    acc = [d.zero_acc() for _ in range(in_proj_tasks(g))]
    unit = None
    following = read(groups[0])
    for n, group in enumerate(groups):
        d.need(*following, *[value for _, value in group])
        following = read(groups[n + 1]) if n + 1 < len(groups) else []
        for load, value in group:
            acc[load.task] = load.multiply(value, acc[load.task])
        if n == len(groups) // 2:
            unit = first_unit(c)

    # ACC[task][wave][row of the step][weight row]
    wave_bytes = c.rows * gemv.COLUMN_BYTES
    task_bytes = g.waves * wave_bytes
    gemv.store_partials(c.lds["ACC"], acc, c.rows, c.wave * wave_bytes, task_bytes)
    if c.key.one_hop:
        windows_read(c, unit)
    c.sync.barrier()
    publish_products(c, w, wave_bytes, task_bytes)
    return unit


def publish_products(c: _Front, w: Weights, wave_bytes: int, task_bytes: int) -> None:
    """Chunks of 64 (row of the step, weight row) sums of one task, dealt to the waves: ba, the whole tasks, then the
    left-over slice. Whole tasks: bf16 pairs of adjacent channels in PROJ; slices: f32 in BA and LEFT."""
    d, g = c.d, c.g
    items = c.rows * MFMA_ROWS  # of one task
    chunks = -(-items // WAVE)
    total = chunks * in_proj_tasks(g)

    def publish(chunk: Any) -> None:
        order, part = d.unsigned_divide(chunk, chunks)
        task = d.select(d.compare("eq", order, d.I32(0)), d.I32(w.ba), order - 1)
        item = part * WAVE + c.lane
        with d.if_(d.compare("ult", item, d.I32(items))):
            value = c.gemv.sum_in_order(c.lds["ACC"], task * task_bytes + item * F32_BYTES, wave_bytes, WAVE_ORDER)
            row, weight_row = d.unsigned_divide(item, MFMA_ROWS)
            with d.if_(d.compare("eq", task, d.I32(w.ba)) & w.has_ba):
                channel = w.ba_group * MFMA_ROWS + weight_row
                c.sync.put(c.region["BA"], (row * g.ba_rows + channel) * g.ba_slices + w.ba_slice, value)
            with d.if_(d.compare("ult", task, d.I32(g.whole_tasks))):
                word = d.pack_bf16(value, d.dpp(value, QUAD_XOR_1))
                group = c.block + task * g.blocks
                place = row * (g.whole_tasks * g.blocks * MFMA_ROWS // 2) + group * (MFMA_ROWS // 2)
                with d.if_(d.compare("eq", weight_row & 1, d.I32(0))):
                    c.sync.put(c.region["PROJ"], place + d.shift_right_logical(weight_row, d.I32(1)), word)
            if w.left is not None:
                with d.if_(d.compare("eq", task, d.I32(w.left))):
                    place = (row * g.leftover_groups + w.left_group) * MFMA_ROWS + weight_row
                    c.sync.put(c.region["LEFT"], place * g.leftover_slices + w.left_slice, value)

    for first in range(0, total, g.waves):
        if total - first >= g.waves:
            publish(c.wave + first)
        else:
            with d.if_(d.compare("ult", c.wave, d.I32(total - first))):
                publish(c.wave + first)


# ---- gated delta net ---------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What a unit leaves behind until its head's sums have come, as words."""

    state: list[list[Any]]  # [row 0..3][word], as the pool stores them
    windows: list[list[Any]]  # [channel 0..3][tap] of q or k, bits
    v_window: list[Any]  # [tap], bits
    o: Any  # f32 bits of the lane's row
    gnorm_w: Any


def gdn_unit(c: _Front, u: Unit) -> None:
    """Waves with a unit (see Unit): conv, gates, delta rule, gated norm, state. A pad row gets a zero core row only."""
    if c.key.one_hop:
        _if_unit(c, u, lambda: leave_unit(c, u))
    else:
        _if_unit(c, u, lambda: finish_unit(c, u, start_unit(c, u)))


def _if_unit(c: _Front, u: Unit, live: Callable[[], None]) -> None:
    """`live()` in waves with a unit of a live row. A pad row's 8 core values are zeros; nothing else is written."""
    d = c.d

    def both() -> list[Any]:
        with d.if_(_is_live(c, u)):
            live()
        with d.if_(d.compare("eq", u.live, d.I32(0))):
            if c.key.one_hop:
                _store_parts(c, u, d.I16(0), d.I16(0), d.F32(0.0))
            else:
                for token in _tokens(c, u):
                    _store_core(c, token, "core", d.I16(0))
        return []

    if u.some is None:
        both()
    else:
        with d.if_(u.some):
            both()


def gdn_rounds(c: _Front, first: Unit) -> None:
    """Waves with several units (a grid smaller than the step's units): all of them are started, and their sums
    published, before the first head's sums are awaited, so that a row's hand-offs never follow another row's. Between
    the two the results lie in HELD, which only the lane itself writes and reads. One hop has no second
    wait."""
    d = c.d
    if c.key.one_hop:
        gdn_unit(c, first)
        d.for_range(1, c.key.unit_rounds, 1, [], lambda i: gdn_unit(c, load_unit(c, find_unit(c, i), parked=True)))
        return

    def start(u: Unit) -> None:
        _if_unit(c, u, lambda: hold(c, u, start_unit(c, u)))

    def finish(u: Unit) -> None:
        with d.if_(_is_live(c, u)):
            finish_unit(c, u, held(c, u))

    start(first)
    d.for_range(1, c.key.unit_rounds, 1, [], lambda i: start(load_unit(c, find_unit(c, i))))
    d.wait_stores()
    d.for_range(0, c.key.unit_rounds, 1, [], lambda i: finish(find_unit(c, i)))


def start_unit(c: _Front, u: Unit) -> Result:
    """Wait "proj", compute the unit up to its output rows, publish their sum of squares (ONRM)."""
    ((qk, v_new, ba, _),) = poll_projections(c, [u])
    result, squares = compute_unit(c, u, qk, v_new, ba)
    put_squares(c, u, squares)
    return result


def put_squares(c: _Front, u: Unit, squares: Any) -> None:
    """Publish the sum of the squares of the unit's 8 outputs of its row (ONRM)."""
    d = c.d
    with d.if_(d.compare("eq", c.lane, d.I32(0))):
        c.sync.put(c.region["ONRM"], u.row * c.g.gdn_units + u.index, squares)


def compute_unit(c: _Front, u: Unit, qk: list[Any], v_new: Any, ba: Any) -> tuple[Result, Any]:
    """The unit from its projections up to its output rows, and the sum of their squares."""
    d = c.d
    given = arrived(c, u)
    q, k, v, windows, v_window = convolve(c, given, qk, v_new)
    decay, beta = gates(c, given, ba)
    o, state = delta_rule(c, state_rows(c, given), q, k, v, decay, beta)
    result = Result(state_words(c, state), windows, v_window, d.bitcast(o, d.I32), given.gnorm_w)
    return result, sum_of_squares(c, o)


def sum_of_squares(c: _Front, o: Any) -> Any:
    """Sum of o^2 over the unit's 8 rows, the lane's own at distance 1 and 2, then the two halves."""
    low, high = c.d.wave_halves(c.d.wave_sum(o * o, LANE_COLUMNS))
    return low + high


def leave_unit(c: _Front, u: Unit) -> None:
    """One hop: wait "proj" with z, compute the unit, write o, z, the sum of o^2, the state and the v window; owners
    wait "window" and write q and k windows."""
    d = c.d
    ((qk, v_new, ba, z),) = poll_projections(c, [u])
    error = c.sync.error_word()  # issued here, looked at before the stores: it costs no trip
    result, squares = compute_unit(c, u, qk, v_new, ba)
    c.sync.leave_if_set(error)
    _store_parts(c, u, d.bf16_bits(d.bitcast(result.o, d.F32)), d.bf16_bits(z), squares)
    store_state(c, u, result.state, result.v_window)
    store_windows(c, u, result.windows)


def state_rows(c: _Front, given: Inputs) -> list[list[Any]]:
    """The lane's part of its four state rows, two pairs of f32 each."""
    d = c.d
    if c.key.state_dtype != "float32":
        return [[c.pair(word) for word in words] for words in given.state]
    floats = [[d.bitcast(word, d.F32) for word in words] for words in given.state]
    return [[d.vector_from(row[:2]), d.vector_from(row[2:])] for row in floats]


def state_words(c: _Front, rows: list[list[Any]]) -> list[list[Any]]:
    """The state rows as the pool stores them (to nearest even where it is bf16), as words."""
    d = c.d
    if c.key.state_dtype != "float32":
        return [[_pack(c, pair) for pair in row] for row in rows]
    return [[d.bitcast(d.vector_element(pair, n), d.I32) for pair in row for n in range(2)] for row in rows]


def finish_unit(c: _Front, u: Unit, result: Result) -> None:
    """Wait "onrm", write the core row, the state and the v window; owners wait "window" and write q and k windows."""
    d = c.d
    # Issued here, looked at before the stores: it costs no trip, and the waits look at the word themselves.
    error = c.sync.error_word()
    ((squares, z),) = await_squares(c, [u])
    core = gated_norm(c, d.bitcast(result.o, d.F32), result.gnorm_w, squares, z)
    c.sync.leave_if_set(error)
    _store_core(c, u, "core", d.bf16_bits(core))
    store_state(c, u, result.state, result.v_window)
    store_windows(c, u, result.windows)


# ---- verify steps --------------------------------------------------------------------------------------------------


def verify_units(c: _Front, first: Unit) -> None:
    """Waves with a unit, one request's: its tokens one after another, from the request's state, which is only read. As
    in `gdn_rounds`, all of a wave's units are started before the first head's sums are awaited."""
    d = c.d

    def finish(u: Unit, outputs: list[Any], gnorm_w: Any) -> None:
        tokens = _tokens(c, u)
        for begin in range(0, len(tokens), POLL_TOKENS):
            some = tokens[begin : begin + POLL_TOKENS]
            for token, o, (squares, z) in zip(some, outputs[begin:], await_squares(c, some)):
                core = gated_norm(c, d.bitcast(o, d.F32), gnorm_w, squares, z)
                _store_core(c, token, "core", d.bf16_bits(core))

    if c.key.unit_rounds == 1:
        _if_unit(c, first, lambda: finish(first, *verify_tokens(c, first)))
        return

    def start(u: Unit) -> None:
        def park() -> None:
            outputs, gnorm_w = verify_tokens(c, u)
            for n, word in enumerate([*outputs, gnorm_w]):
                d.store(word, c.held, _held_place(c, u, n))

        _if_unit(c, u, park)

    def parked(u: Unit) -> None:
        with d.if_(_is_live(c, u)):
            *outputs, gnorm_w = [d.load(c.held, _held_place(c, u, n), d.I32) for n in range(c.key.tokens + 1)]
            finish(u, outputs, gnorm_w)

    start(first)
    d.for_range(1, c.key.unit_rounds, 1, [], lambda i: start(load_unit(c, find_unit(c, i))))
    d.wait_stores()
    d.for_range(0, c.key.unit_rounds, 1, [], lambda i: parked(find_unit(c, i)))


def _tokens(c: _Front, u: Unit) -> list[Unit]:
    """The unit at each row of its request: `row` is then a row of the step."""
    tokens = c.key.tokens
    return [u] if tokens == 1 else [replace(u, row=u.row * tokens + token) for token in range(tokens)]


def verify_tokens(c: _Front, u: Unit) -> tuple[list[Any], Any]:
    """Wait "proj", then the tokens in their order: each publishes its sum of squares and leaves its state and windows
    among the draft states. The state is carried in f32, whatever the pool's type, as SGLang's kernel does.

    Returns the lane's output of every token (f32 bits) and its weight of the gated norm.
    """
    d = c.d
    tokens = _tokens(c, u)
    products = []
    for begin in range(0, len(tokens), POLL_TOKENS):
        products += poll_projections(c, tokens[begin : begin + POLL_TOKENS])
    given = arrived(c, u)
    state, outputs = state_rows(c, given), []
    for number, (token, (qk, v_new, ba, _)) in enumerate(zip(tokens, products, strict=True)):
        q, k, v, windows, v_window = convolve(c, given, qk, v_new)
        decay, beta = gates(c, given, ba)
        o, state = delta_rule(c, state, q, k, v, decay, beta)
        put_squares(c, token, sum_of_squares(c, o))
        store_draft(c, u, number, state_words(c, state), windows, v_window)
        given = replace(given, window=windows, v_window=v_window)
        outputs.append(d.bitcast(o, d.I32))
    return outputs, given.gnorm_w


def store_draft(
    c: _Front, u: Unit, token: int, rows: list[list[Any]], windows: list[list[Any]], v_window: list[Any]
) -> None:
    """State rows and v conv windows after a token of the request to its draft states; the key head's first unit also
    the q and k windows. Nobody reads them in this launch, and they count only once SGLang has accepted the token."""
    d, g, a = c.d, c.g, c.a
    place = d.zext(d.uniform(d.load_uniform(a["draft_index"], u.row * 4, d.I32)), d.I64)
    ssm = place * a["draft_ssm_slot_stride"] + d.zext(a["draft_ssm_token_stride"] * token, d.I64)
    state_buffer = d.Buffer(a["draft_ssm"] + ssm * d.I64(c.state_size))
    for i, words in enumerate(rows):
        state_buffer.store(d.vector_from(words), u.state_offset + i * (g.head_dim * c.state_size))
    conv = place * a["draft_conv_slot_stride"] + d.zext(a["draft_conv_token_stride"] * token, d.I64)
    conv_buffer = d.Buffer(a["draft_conv"] + conv * d.I64(BF16_BYTES))
    channel_stride, tap_stride = a["draft_conv_channel_stride"] * BF16_BYTES, a["draft_conv_tap_stride"] * BF16_BYTES

    def store(channel: Any, taps: list[Any]) -> None:
        for j, bits in enumerate(taps):
            conv_buffer.store(d.trunc(bits, d.I16), channel * channel_stride + tap_stride * j)

    with d.if_(d.compare("ult", c.lane & (HALF - 1), d.I32(LANE_COLUMNS))):
        store(_value_row(c, u) + _own_row(c) + g.v_offset, v_window)
    with d.if_(d.compare("eq", d.unsigned_divide(u.index, g.heads_per_key * g.units_per_head)[1], d.I32(0))):
        for i, taps in enumerate(windows):
            store(_channel(c, u.key_head) + i, taps)


def _held_place(c: _Front, u: Unit, word: int) -> Any:
    """Byte offset in HELD of a word of the unit's result: [unit][word][lane]."""
    unit = u.row * c.g.gdn_units + u.index
    return unit * (HELD_WORDS * WAVE * 4) + c.lane * 4 + word * (WAVE * 4)


def hold(c: _Front, u: Unit, result: Result) -> None:
    """Park a unit's result in HELD."""
    words = [w for row in (*result.state, *result.windows, result.v_window) for w in row] + [result.o, result.gnorm_w]
    for n, word in enumerate(words):
        c.d.store(word, c.held, _held_place(c, u, n))


def held(c: _Front, u: Unit) -> Result:
    """A unit's parked result."""
    numbers = iter(range(HELD_WORDS))

    def take(rows: int, words: int) -> list[list[Any]]:
        return [
            [c.d.load(c.held, _held_place(c, u, next(numbers)), c.d.I32) for _ in range(words)] for _ in range(rows)
        ]

    state = take(LANE_COLUMNS, LANE_COLUMNS * c.state_size // 4)
    windows = take(LANE_COLUMNS, CONV_STATE_TAPS)
    return Result(state, windows, *take(1, CONV_STATE_TAPS), *take(1, 2)[0])


def _int(d: Any, condition: Any) -> Any:
    return d.select(condition, d.I32(1), d.I32(0))


def _f32(d: Any, bits: Any) -> Any:
    """bf16 in the low half of a word as f32."""
    return d.bitcast(bits << 16, d.F32)


def _own_row(c: _Front) -> Any:
    """Row (0..7) of the unit that this lane holds of v, z and the output."""
    half = c.d.shift_right_logical(c.lane, c.d.I32(5))
    return half * LANE_COLUMNS + (c.lane & (LANE_COLUMNS - 1))


def _value_row(c: _Front, u: Unit) -> Any:
    """First of the unit's 8 rows among the value rows of all heads (uniform)."""
    return u.index * GDN_UNIT_ROWS


def _projection_pair(c: _Front, u: Unit, channel: Any) -> Any:
    """Index in PROJ of the pair that holds an (even) channel of the unit's row."""
    pairs = c.g.whole_tasks * c.g.blocks * MFMA_ROWS // 2
    return u.row * pairs + c.d.shift_right_logical(channel, c.d.I32(1))


def _own_half(c: _Front, word: Any) -> Any:
    """Bits of the lane's own row in a word that holds an even and an odd row."""
    d = c.d
    odd = d.compare("ne", c.lane & 1, d.I32(0))
    return d.select(odd, d.shift_right_logical(word, d.I32(16)), word & 0xFFFF)


def poll_projections(c: _Front, units: list[Unit]) -> list[tuple[list[Any], Any, Any, Any]]:
    """Wait "proj", one batch of loads for all `units` (rows of one request): for each the lane's four q or k channels
    (two words of bf16 pairs), its v channel (bits), its slice of b (lanes 0..15 of each half) or a (lanes 16..31), f32;
    with one hop z of its row too, else None."""
    d = c.d
    if c.key.one_hop:
        (u,) = units
        pair, z = _z_of_unit(c, u)
        low, high, v_word, ba, z_word = c.sync.poll([*_products(c, u), pair], [d.I32, d.I32, d.I32, d.F32, d.I32])
        return [([low, high], _own_half(c, v_word), ba, z(z_word))]
    values = c.sync.poll([pair for u in units for pair in _products(c, u)], [d.I32, d.I32, d.I32, d.F32] * len(units))
    taken = [values[n : n + 4] for n in range(0, len(values), 4)]
    return [([low, high], _own_half(c, v_word), ba, None) for low, high, v_word, ba in taken]


def _products(c: _Front, u: Unit) -> list[tuple[Any, Any]]:
    """The pairs of a row that its unit awaits."""
    d, g = c.d, c.g
    channel = _channel(c, u.key_head)
    v_channel = _value_row(c, u) + (_own_row(c) & ~1) + g.v_offset
    is_a = d.shift_right_logical(c.lane, d.I32(4)) & 1
    ba_row = u.row * g.ba_rows + is_a * g.value_heads + u.head
    proj = c.region["PROJ"]
    first = _projection_pair(c, u, channel)
    return [
        (proj, first),
        (proj, first + 1),
        (proj, _projection_pair(c, u, v_channel)),
        (c.region["BA"], ba_row * g.ba_slices + (c.lane & (g.ba_slices - 1))),
    ]


def _silu2(c: _Front, value: Any) -> Any:
    """silu of two values: x * rcp(1 + exp(-x))."""
    d = c.d
    scaled = value * c.splat(d.F32(-d.LOG2_E))
    power = d.vector_from([d.exp2(d.vector_element(scaled, i)) for i in range(2)]) + c.splat(d.F32(1.0))
    return value * d.vector_from([d.rcp(d.vector_element(power, i)) for i in range(2)])


def _rounded(c: _Front, value: Any) -> Any:
    """Both values rounded to bf16, as f32."""
    return c.pair(_pack(c, value))


def convolve(
    c: _Front, given: Inputs, qk: list[Any], v_new: Any
) -> tuple[list[Any], list[Any], Any, list[Any], list[Any]]:
    """Conv update of the lane's four q or k channels and its v channel; q and k norms.

    Returns q and k (two pairs of f32 each: the lane's four columns), v (f32), and the windows after the step (bits):
    [channel][tap] of q or k, [tap] of v.
    """
    d = c.d
    out, windows = [], []
    for j, word in enumerate(qk):
        first, second = given.window[2 * j], given.window[2 * j + 1]
        taps = [d.vector_from([_f32(d, a), _f32(d, b)]) for a, b in zip(first, second, strict=True)]
        taps.append(c.pair(word))
        w_first, w_second = given.conv_w[2 * j], given.conv_w[2 * j + 1]
        weights = []
        for pair_a, pair_b in zip(w_first, w_second, strict=True):
            a, b = d.f32_from_bf16_pair(pair_a), d.f32_from_bf16_pair(pair_b)
            weights += [d.vector_from([a[0], b[0]]), d.vector_from([a[1], b[1]])]
        total = _rounded(c, weights[0] * taps[0])
        for weight, tap in zip(weights[1:], taps[1:], strict=True):
            total = total + _rounded(c, weight * tap)
        out.append(_rounded(c, _silu2(c, total)))
        windows.append([*first[1:], word])
        windows.append([*second[1:], d.shift_right_logical(word, d.I32(16))])

    # q and k: the halves of the wave hold one each, so that one reduction serves both
    squares = c.fma2(out[1], out[1], out[0] * out[0])
    total = d.wave_sum(d.vector_element(squares, 0) + d.vector_element(squares, 1), HALF)
    is_q = d.compare("ult", c.lane, d.I32(HALF))
    scale = d.rsq(total + d.F32(L2_EPS)) * d.select(is_q, d.F32(c.g.head_dim**-0.5), d.F32(1.0))
    swapped = [d.wave_halves(d.vector_element(value * c.splat(scale), i)) for value in out for i in range(2)]
    q, k = ([d.vector_from([swapped[2 * j][i], swapped[2 * j + 1][i]]) for j in range(2)] for i in range(2))

    # v: one channel a lane, its four products as two pairs
    v_taps = [_f32(d, bits) for bits in [*given.v_window, v_new]]
    products = []
    for j, word in enumerate(given.v_conv_w):
        pair = _rounded(c, c.pair(word) * d.vector_from(v_taps[2 * j : 2 * j + 2]))
        products += [d.vector_element(pair, 0), d.vector_element(pair, 1)]
    total = ((products[0] + products[1]) + products[2]) + products[3]
    v = d.bf16_round(d.silu(total))
    return q, k, v, windows, [*given.v_window[1:], v_new]


def gates(c: _Front, given: Inputs, ba: Any) -> tuple[Any, Any]:
    """(decay, beta) of the unit's head, uniform: exp(-exp(A_log) * softplus(a + dt_bias)), sigmoid(b)."""
    d = c.d
    value = d.bf16_round(d.wave_sum(ba, c.g.ba_slices))
    beta = d.sigmoid(value)
    if c.key.round_beta:
        beta = d.bf16_round(beta)
    decay = d.exp(-(d.exp(d.bitcast(given.a_log, d.F32)) * d.softplus(value + _f32(d, given.dt_bias))))
    b_lane, a_lane = 0, MFMA_ROWS
    read = [d.read_lane(d.bitcast(v, d.I32), lane) for v, lane in ((decay, a_lane), (beta, b_lane))]
    return d.bitcast(read[0], d.F32), d.bitcast(read[1], d.F32)


def _dot_rows(c: _Front, rows: list[list[Any]], other: list[Any]) -> Any:
    """Sums over the 128 columns of the half's four state rows times `other` (32 lanes x 4): lane l gets row l % 4's.

    Two exchanges at distance 1 and 2 leave each lane one row, so that the rest is one chain for all four.
    """
    d = c.d
    parts = []
    for row in rows:
        total = c.fma2(row[1], other[1], row[0] * other[0])
        parts.append(d.vector_element(total, 0) + d.vector_element(total, 1))
    for distance, control in ((1, QUAD_XOR_1), (2, QUAD_XOR_2)):
        odd = d.compare("ne", c.lane & distance, d.I32(0))
        parts = [
            d.select(odd, b, a) + d.dpp(d.select(odd, a, b), control)
            for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
    (total,) = parts
    total = total + d.dpp(total, ROW_ROTATE + 8)
    total = total + d.dpp(total, ROW_ROTATE + 4)
    lower, upper = d.row_pairs(total)
    return lower + upper


def delta_rule(
    c: _Front, state: list[list[Any]], q: list[Any], k: list[Any], v: Any, decay: Any, beta: Any
) -> tuple[Any, list[list[Any]]]:
    """S *= decay; S += beta * (v - S k) k^T; o = bf16(S q). Returns o of the lane's own row, and the state rows."""
    d = c.d
    rows = [[value * c.splat(decay) for value in row] for row in state]
    new = (v - _dot_rows(c, rows, k)) * beta
    for i, row in enumerate(rows):
        own = c.splat(d.dpp(new, _quad_broadcast(i)))
        rows[i] = [c.fma2(own, key, value) for key, value in zip(k, row, strict=True)]
    return d.bf16_round(_dot_rows(c, rows, q)), rows


def await_squares(c: _Front, units: list[Unit]) -> list[tuple[Any, Any]]:
    """Wait "onrm", one batch of loads for all `units` (rows of one request): of each the head's sums of o^2 (ONRM),
    summed, and z of the lane's row (bf16 value as f32)."""
    d, g = c.d, c.g
    pairs, z_of = [], []
    for u in units:
        pair, z = _z_of_unit(c, u)
        sums = u.row * g.gdn_units + u.head * g.units_per_head + (c.lane & (g.units_per_head - 1))
        pairs += [(c.region["ONRM"], sums), pair]
        z_of.append(z)
    values = c.sync.poll(pairs, [d.F32, d.I32] * len(units))
    found = zip(values[::2], values[1::2], z_of, strict=True)
    return [(d.wave_sum(squares, g.units_per_head), z(word)) for squares, word, z in found]


def _z_of_unit(c: _Front, u: Unit) -> tuple[tuple[Any, Any], Callable[[Any], Any]]:
    """(region, index) of the lane's pair of z, and z (bf16 value as f32) from its word. z comes from PROJ, or, where
    its row is left over, as K slices from LEFT, which are summed and rounded here."""
    d, g = c.d, c.g
    own = _value_row(c, u) + _own_row(c) + g.z_offset
    region, index = c.region["PROJ"], _projection_pair(c, u, own & ~1)
    left_over = None
    if g.leftover_groups:
        first = g.whole_tasks * g.blocks * MFMA_ROWS
        left_over = d.compare("uge", _value_row(c, u) + g.z_offset, d.I32(first))
        left = c.region["LEFT"]
        slice_ = d.shift_right_logical(c.lane & (HALF - 1), d.I32(2)) & (g.leftover_slices - 1)
        place = (u.row * (g.leftover_groups * MFMA_ROWS) + (own - first)) * g.leftover_slices + slice_
        index = d.select(left_over, place, index)
        number = d.select(left_over, d.I32(left.number), d.I32(region.number))
        region = type(region)(number, d.select(left_over, left.base, region.base), order=left.order)

    def z(word: Any) -> Any:
        value = d.bitcast(_own_half(c, word) << 16, d.F32)
        if left_over is None:
            return value
        total = d.bitcast(word, d.F32)
        if g.leftover_slices > 2:
            total = total + d.dpp(total, ROW_ROTATE + 8)
        if g.leftover_slices > 1:
            total = total + d.dpp(total, ROW_ROTATE + 4)
        if g.leftover_slices > 4:
            lower, upper = d.row_pairs(total)
            total = lower + upper
        return d.select(left_over, d.bf16_round(total), value)

    return (region, index), z


def gated_norm(c: _Front, o: Any, weight: Any, squares: Any, z: Any) -> Any:
    """(o * rstd * w) * silu(z) of the lane's row, f32."""
    d, g = c.d, c.g
    rstd = d.rsq(d.fma(squares, d.F32(1.0 / g.head_dim), d.F32(g.eps)))
    return ((o * rstd) * _f32(d, weight)) * d.silu(z)


def _store_core(c: _Front, u: Unit, name: str, bits: Any) -> None:
    """The unit's 8 values of a bf16 row of the core's width, one a lane (four lanes of each half)."""
    d = c.d
    with d.if_(d.compare("ult", c.lane & (HALF - 1), d.I32(LANE_COLUMNS))):
        place = (u.row * c.g.core_width + _value_row(c, u) + _own_row(c)) * BF16_BYTES
        d.store(bits, c.a[name], place)


def _store_parts(c: _Front, u: Unit, o: Any, z: Any, squares: Any) -> None:
    """What the next K2 forms the core from."""
    d = c.d
    _store_core(c, u, "core", o)
    _store_core(c, u, "core_z", z)
    with d.if_(d.compare("eq", c.lane, d.I32(0))):
        d.store(squares, c.a["core_squares"], (u.row * c.g.gdn_units + u.index) * F32_BYTES)


def store_state(c: _Front, u: Unit, rows: list[list[Any]], v_window: list[Any]) -> None:
    """State rows in place (rounded to nearest even where the pool is bf16) and the unit's v conv windows."""
    d, g = c.d, c.g
    state_buffer = d.Buffer(u.state_base)
    for i, words in enumerate(rows):
        state_buffer.store(d.vector_from(words), u.state_offset + i * (g.head_dim * c.state_size))
    with d.if_(d.compare("ult", c.lane & (HALF - 1), d.I32(LANE_COLUMNS))):
        _store_taps(c, u, u.v_channel_bytes, v_window)


def _store_taps(c: _Front, u: Unit, first: Any, taps: list[Any]) -> None:
    stride = c.a["conv_tap_stride"] * BF16_BYTES
    conv_buffer = c.d.Buffer(u.conv_base)
    for j, bits in enumerate(taps):
        conv_buffer.store(c.d.trunc(bits, c.d.I16), first + stride * j)


def store_windows(c: _Front, u: Unit, windows: list[list[Any]]) -> None:
    """Owner of a key head (its first value head's first unit): wait "window" until every unit has read the key head's q
    and k windows, then write them. That it has is told by its ONRM pair, with one hop by the first PROJ pair of its
    workgroup, which reads its windows before it publishes."""
    d, g = c.d, c.g
    readers = g.heads_per_key * g.units_per_head
    with d.if_(d.compare("eq", d.unsigned_divide(u.index, readers)[1], d.I32(0))):
        place = c.region["PROJ" if c.key.one_hop else "ONRM"].base
        window = type(c.region["ONRM"])(REGION_NAMES.index("WINDOW"), place, order=c.order["WINDOW"])
        units = [
            u.row * g.gdn_units + u.index + ((c.lane + WAVE * n) & (readers - 1))
            for n in range(max(1, readers // WAVE))
        ]
        if c.key.one_hop:  # unit n is of workgroup n % blocks
            pairs = g.whole_tasks * g.blocks * MFMA_ROWS // 2
            units = [u.row * pairs + d.unsigned_divide(unit, g.blocks)[1] * (MFMA_ROWS // 2) for unit in units]
        c.sync.poll([(window, unit) for unit in units])
        stride = c.a["conv_channel_stride"] * BF16_BYTES
        for i, taps in enumerate(windows):
            _store_taps(c, u, u.channel_bytes + stride * i, taps)
