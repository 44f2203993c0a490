# SPDX-License-Identifier: Apache-2.0
"""K2 of a layer and K1 of the next as one persistent launch, where both layers are GDN: the stages of `layer.py` and
`gdn.py`, one after the other, with one device hop in place of the kernel boundary.

=============  ===========================================================  =============================  ========
hand-off       value                                                        written by                     scope
=============  ===========================================================  =============================  ========
NEXT_Z, NEXT   z = out + residual (f32) and its sums of squares over 8       every workgroup, its 32        device
               columns; the pair that announces a wave's share of them       columns
=============  ===========================================================  =============================  ========

in_proj's weights are requested when the rank's partial output has been pushed, before FINAL is awaited, by the waves
that await nothing; by those that poll FINAL and NEXT once NEXT has come. Every sum and rounding is that of the
separate launches: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from sgl_amd_mono.common.build import ARGUMENT_BYTES, Abi, BuildKey
from sgl_amd_mono.common.geometry import require
from sgl_amd_mono.common.sync import PAIR_BYTES
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import gdn, layer
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.layer import LANES, WAVES, WORKGROUP_COLUMNS, LayerKey, Span

FRONT = "front_"  # prefix of K1's arguments
INSIDE = ("next_z", "next_squares")  # K2's outputs that stay in the launch: in its scratch
NOT_TAIL = (*INSIDE, "last")  # a step's last launch has no K1 behind it
SHARED = ("peers", "epoch", "deadline_ticks", "rank", "mode")
NOT_FRONT = ("hidden", "residual", "z", "squares", *SHARED)


def _abi() -> Abi:
    both = [a for a in layer.ABI if a[0] not in NOT_TAIL]
    both += [(FRONT + name, kind) for name, kind in gdn.ABI if name not in NOT_FRONT]
    return tuple(sorted(both, key=lambda a: -ARGUMENT_BYTES[a[1]]))  # no gaps


ABI: Abi = _abi()
NEXT = len(layer.REGION_NAMES)  # region number, behind K2's
REGION_NAMES = (*layer.REGION_NAMES, "NEXT", *gdn.REGIONS)  # K1's number theirs from 0, under K1's slot
NEXT_ORDER = layer.WAIT_ORDER[layer.FINAL] + 1
FRONT_ORDER = NEXT_ORDER + 1  # of all of K1's waits: eighths of the deadline, less than 8


def argument_offset(name: str) -> int:
    """Byte offset of an argument in the argument block."""
    top = 0
    for other, kind in ABI:
        if other == name:
            return top
        top += ARGUMENT_BYTES[kind]
    raise KeyError(name)


def final_waves(width: int) -> int:
    """Waves 0 .. that await FINAL and store z."""
    return -(-WORKGROUP_COLUMNS // 2 * width // LANES)


def scratch_regions(geometry: Geometry, width: int, fused_shared: bool = False) -> dict[str, Span]:
    """Named ranges of the scratch: K2's, then NEXT [waves][blocks] (pairs), NEXT_Z f32 [S][H] and NEXT_SQUARES f32
    [S][H/8]. K1's mailboxes have a scratch of their own (`gdn.scratch_bytes`)."""
    regions = layer.scratch_regions(geometry, width, fused_shared)
    more = {
        "NEXT": final_waves(width) * geometry.blocks * PAIR_BYTES,
        "NEXT_Z": 4 * width * geometry.hidden,
        "NEXT_SQUARES": 4 * width * geometry.z_sums,
    }
    return regions | layer._spans(layer.scratch_bytes(geometry, width, fused_shared), more)


def scratch_bytes(geometry: Geometry, width: int, fused_shared: bool = False) -> int:
    """Bytes of the scratch of one width; zeroed once, never shared with another width or launch."""
    return layer._end(scratch_regions(geometry, width, fused_shared))


@dataclass(frozen=True)
class TailFrontKey(BuildKey):
    """Build key of K2 and the next K1 in one launch; `tail` and `front` are the keys of the separate launches."""

    tail: LayerKey
    front: GdnKey

    model: ClassVar[str] = "qwen38_a95b"
    launch: ClassVar[str] = "k2k1"
    abi: ClassVar[Abi] = ABI
    slot_base: ClassVar[int] = layer.SLOT_BASE
    slot_launch: ClassVar[str] = LayerKey.launch
    region_names: ClassVar[tuple[str, ...]] = REGION_NAMES
    readonly: ClassVar[frozenset[str]] = frozenset(
        name
        for name, kind in ABI
        if kind == "ptr"
        and (name.removeprefix(FRONT) in gdn.READONLY if name.startswith(FRONT) else name in LayerKey.readonly)
    )

    def __post_init__(self) -> None:
        tail, front = self.tail, self.front
        require(tail.geometry == front.geometry, f"geometries {tail.geometry.name} and {front.geometry.name}")
        require(tail.width == front.width, f"widths {tail.width} and {front.width}, one launch has one")
        require(tail.stop == front.stop, f"stop {tail.stop} and {front.stop}, one launch has one")
        require(not front.draft_tokens, f"draft_tokens = {front.draft_tokens}, decode steps only")
        require(front.given_z, "a first layer's K1 (or one with a norm of its own) follows no K2")

    @property
    def geometry(self) -> Geometry:
        return self.tail.geometry

    @property
    def width(self) -> int:
        """Rows of the step."""
        return self.tail.width

    @property
    def name(self) -> str:
        parts = (self.tail, self.front)  # each one's variant, from between its width and its digest
        variants = [key.name.removeprefix(f"{key.model}_{key.launch}_s{key.width}").rpartition("_")[0] for key in parts]
        return f"{self.model}_{self.launch}_s{self.width}{''.join(variants)}_{self.digest()[:8]}"

    @property
    def grid(self) -> int:
        return self.tail.grid

    @property
    def block(self) -> int:
        return self.tail.block

    @property
    def hints(self) -> dict[str, Any]:
        return self.tail.hints

    def scratch_regions(self) -> dict[str, tuple[int, int]]:
        spans = scratch_regions(self.geometry, self.width, self.tail.fused_shared)
        return {n: (r.offset, r.nbytes) for n, r in spans.items()}

    def regions_of(self, argument: str) -> dict[str, tuple[int, int]]:
        own = super().regions_of(argument)
        return self.front.scratch_regions() if argument == FRONT + "scratch" else own

    def peer_regions(self) -> dict[str, tuple[int, int]]:
        return self.tail.peer_regions()

    def body(self) -> Callable[..., None]:
        def kernel(**arguments: Any) -> None:
            _trace(self, arguments)

        return kernel


def _trace(key: TailFrontKey, arguments: dict[str, Any]) -> None:
    """K2's stages, the hand-over, K1's stages."""
    from sgl_amd_mono.common import device as d
    from sgl_amd_mono.common.sync import Region

    g, s = key.geometry, key.width
    regions = scratch_regions(g, s, key.tail.fused_shared)
    at = {name: arguments["scratch"] + d.I64(span.offset) for name, span in regions.items()}
    arguments = arguments | {"next_z": at["NEXT_Z"], "next_squares": at["NEXT_SQUARES"]}
    k = layer._Launch(key.tail._plan(), key.tail.stop, arguments, lds_bytes=gdn.lds_bytes(key.front))
    k.next_flag = Region(NEXT, at["NEXT"], order=NEXT_ORDER)
    layer.layer_tail(k)

    c = _front(key, k, arguments)
    weights = gdn.Weights(c)
    early = _issue_where(c, weights, d.compare("uge", k.wave, d.I32(final_waves(s))), None)
    layer.final_sum(k)
    await_next(k, final_waves(s))
    rows = gdn.load_rows(c)
    d.compiler_fence()
    weights.loaded = _issue_where(c, weights, d.compare("ult", k.wave, d.I32(final_waves(s))), early)
    d.compiler_fence()
    gdn.finish_front(c, rows, weights)


def _front(key: TailFrontKey, k: layer._Launch, arguments: dict[str, Any]) -> gdn._Front:
    """K1 within the launch: its arguments, loaded here; LDS from the start of K2's, behind the word that marks a dead
    workgroup."""
    d = k.d
    likes = {"ptr": d.I64, "i64": d.I64, "i32": d.I32}
    args = {name: arguments[name] for name in SHARED}
    for name, kind in gdn.ABI:
        if name not in NOT_FRONT:
            args[name] = d.kernel_argument(argument_offset(FRONT + name), likes[kind])
    args |= {"z": arguments["next_z"], "squares": arguments["next_squares"], "hidden": d.I64(0), "residual": d.I64(0)}
    k.lds.release(0)  # DEAD comes first in both layouts
    within = gdn.Within(k.lds, k.sync.under(args["layer_slot"]), FRONT_ORDER)
    return gdn._Front(key.front, args, within)


def _issue_where(c: gdn._Front, weights: gdn.Weights, here: Any, otherwise: list[Any] | None) -> list[Any]:
    """The first loads of in_proj, issued by the waves of which `here` holds; the others' values are `otherwise`.

    A value is a load's, or the list of words of a load of codes, which its products look at.
    """
    d = c.d
    loads = weights.loads[: weights.beside(c.rows)]
    codes = [load.multiply is None for load in loads]
    likes: list[Any] = []
    for load, many in zip(loads, codes, strict=True):
        likes += [d.I32] * load.registers if many else [d.vec(d.I32, load.registers)]
    lists: list[list[Any]] = []

    def issue() -> list[Any]:
        values: list[Any] = []
        for load, many in zip(loads, codes, strict=True):
            value = load.issue()
            values += value if many else [value]
            lists.extend([value] if many else [])
        d.compiler_fence()
        return values

    def leave() -> list[Any]:
        return passed or [d.fly.poison(like) for like in likes]

    passed: list[Any] = []
    for value, many in zip(otherwise or [], codes, strict=False):
        passed += value if many else [value]
        if many:
            value.clear()  # the load fills it again
    found = iter(d.if_else(here, issue, leave, likes))
    for words in lists:
        words.clear()
    values: list[Any] = []
    for load, many in zip(loads, codes, strict=True):
        if many:
            words = lists.pop(0)
            words.extend(next(found) for _ in range(load.registers))
            values.append(words)
        else:
            values.append(next(found))
    return values


def await_next(k: layer._Launch, waves: int) -> None:
    """Wave 0 waits for every workgroup's z (NEXT); behind the barrier every wave may read it."""
    d, g = k.d, k.g
    with k.at(k.equal(k.wave, 0)):
        flags = waves * g.blocks
        index = [k.lane + LANES * i for i in range(-(-flags // LANES))]
        k.sync.poll([(k.next_flag, d.select(k.below(i, flags), i, d.I32(flags - 1))) for i in index])
    k.sync.barrier()
    d.compiler_fence()


assert FRONT_ORDER < WAVES  # a wait's share of the deadline on top stays below the deadline
