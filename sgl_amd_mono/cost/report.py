# SPDX-License-Identifier: Apache-2.0
"""Cost as a table, as JSON, and against the targets."""

from __future__ import annotations

import dataclasses
from typing import Any

from sgl_amd_mono.cost.measure import Cost, spread
from sgl_amd_mono.cost.model import (
    LAUNCH_US,
    REFERENCE_HOPS,
    REFERENCE_LAUNCHES,
    Assumptions,
    Timeline,
    fixed_us,
    guessed,
    overlap,
)

MB = 1e6
TARGET_GEOMETRY = "a95b"  # the geometry whose figures the targets are; others are listed without a verdict
VGPRS_MAX, SGPR_SPILLS_MAX, LDS_MAX = 256, 16, 160 * 1024
GUESS_HITS = (0.25, 0.5, 0.9, 1.0)  # shares of right guesses that are listed
CLASSES = ("mfma", "convert", "lds")  # listed a wave; the rest is "other"


@dataclasses.dataclass(frozen=True)
class Target:
    """One row of the target table: met is None where the geometry or width has no target."""

    name: str
    value: float
    bound: float | None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the value is within its bound."""
        if self.bound is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def fixed(cost: Cost) -> float:
    """Fixed modelled time, us."""
    return fixed_us(cost.memory_bytes, cost.hops("device"), cost.hops("cross"))


def reference_fixed(cost: Cost) -> float:
    """The same model with the reference's hops and this run's bytes (equal routes), us."""
    more = REFERENCE_LAUNCHES[cost.launch] - 1
    return fixed_us(cost.memory_bytes, *REFERENCE_HOPS[cost.launch]) + LAUNCH_US * more


def timeline(cost: Cost, assume: Assumptions) -> Timeline:
    """Overlap-modelled time line."""
    return overlap([kind for _, kind in cost.chain], cost.requests, assume)


@dataclasses.dataclass(frozen=True)
class Guess:
    """Modelled: the launch if a guess (the last step's route, say) requested its late weights one hop earlier."""

    hit: float
    early_share: float
    weight_ratio: float
    fixed_us: float
    overlap_us: float


def guesses(cost: Cost, assume: Assumptions) -> list[Guess]:
    """What guessing would change, at the shares GUESS_HITS of right guesses; none where no weight is late."""
    late, found = sum(cost.late_weights.values()), []
    asked = sum(sum(cost.read[name].values()) for name in cost.weight_names)
    for hit in GUESS_HITS if late else ():
        wrong = late * (1 - hit)
        requests = guessed(len(cost.chain), cost.requests, cost.late_weights, hit)
        found.append(
            Guess(
                hit,
                1 - wrong / asked,
                cost.weight_ratio * (1 + wrong / asked),
                fixed_us(cost.memory_bytes + wrong, cost.hops("device"), cost.hops("cross")),
                overlap([kind for _, kind in cost.chain], requests, assume).end,
            )
        )
    return found


def targets(cost: Cost) -> list[Target]:
    """The target table of a launch and width; bounds only at the true geometry on 8 ranks."""
    first = cost.launch == "k1"
    r = cost.resources

    def by_width(one: float, eight: float) -> float | None:
        return {1: one, 8: eight}.get(cost.width)

    rows: list[Target] = [
        Target("device hops", cost.hops("device"), 2),
        Target("cross-GPU hops", cost.hops("cross"), 0 if first else 3),
        Target("requested / unique weight bytes", cost.weight_ratio, 1.02 if first else 1.05),
        Target("most / mean bytes a workgroup", spread(cost.streamed)["max_over_mean"], 1.10 if first else 1.15),
        Target("the same, weights only", spread(cost.streamed_weights)["max_over_mean"], 1.10 if first else 1.15),
        Target(
            "wave-instructions, M",
            cost.wave_instructions / 1e6,
            by_width(0.9, 3.2) if first else by_width(3.0, 14.0),
        ),
        Target("scratch read, MB", cost.scratch_read() / MB, by_width(5, 38) if first else by_width(9, 50)),
        Target("peer-buffer reads, MB", cost.peer_read() / MB, None if first else by_width(4, 12)),
        Target("weights requested before the last hop before their use", cost.early_share, 0.90, True),
        Target("VGPR", r["vgprs"], VGPRS_MAX),
        Target("VGPR spills", r["vgpr_spills"], 0),
        Target("SGPR spills", r["sgpr_spills"], None if first else SGPR_SPILLS_MAX),
        Target("scratch memory, B a lane", r["scratch_bytes"], 0),
        Target("LDS, B", r["lds_bytes"], LDS_MAX),
        Target(
            "modelled (fixed) / the reference's",
            fixed(cost) / reference_fixed(cost),
            by_width(0.78, 0.80) if first else by_width(0.85, 0.92),
        ),
    ]
    stated = TARGET_GEOMETRY in cost.geometry and cost.ranks == 8
    if cost.launch == "k2k1":  # the other targets are figures of the separate launches
        limits = ("VGPR", "VGPR spills", "SGPR spills", "scratch memory, B a lane", "LDS, B")
        rows = [row if row.name in limits else dataclasses.replace(row, bound=None) for row in rows]
    return rows if stated else [dataclasses.replace(row, bound=None) for row in rows]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Modelled us of K2 and the next K1: as two launches (two ramps) and as one."""

    width: int
    fixed_two: float
    fixed_one: float
    overlap_two: float
    overlap_one: float


def pairs(costs: list[Cost], assume: Assumptions) -> list[Pair]:
    """One a width of which all three launches were measured."""
    by = {(cost.launch, cost.width): cost for cost in costs if not cost.one_hop}
    found = []
    for (launch, width), one in sorted(by.items(), key=lambda item: item[0][1]):
        two = [by.get((name, width)) for name in ("k2", "k1")]
        if launch == "k2k1" and all(two):
            ends = [sum(timeline(c, assume).end for c in group) for group in (two, [one])]
            found.append(Pair(width, sum(map(fixed, two)), fixed(one), *ends))
    return found


def as_dict(costs: list[Cost], assume: Assumptions) -> dict[str, Any]:
    """Everything that is printed, and the raw counts, for JSON."""
    found = []
    pairs_found = [dataclasses.asdict(pair) for pair in pairs(costs, assume)]
    for cost in costs:
        line = timeline(cost, assume)
        found.append(
            {
                **{k: v for k, v in dataclasses.asdict(cost).items() if k not in ("streamed", "streamed_weights")},
                "wave_instructions": cost.wave_instructions,
                "bytes_a_workgroup": spread(cost.streamed),
                "weight_bytes_a_workgroup": spread(cost.streamed_weights),
                "memory_bytes": cost.memory_bytes,
                "hops": [
                    {
                        "name": name,
                        "kind": kind,
                        "weights_requested": cost.requested_before(k),
                        "weight_bytes_in_flight": cost.in_flight(k),
                    }
                    for k, (name, kind) in enumerate(cost.chain, 1)
                ],
                "modelled_fixed_us": fixed(cost),
                "modelled_fixed_us_reference": reference_fixed(cost),
                "modelled_overlap_us": line.end,
                "modelled_overlap": dataclasses.asdict(line),
                "guesses": [dataclasses.asdict(guess) for guess in guesses(cost, assume)],
                "targets": [{**dataclasses.asdict(row), "met": row.met} for row in targets(cost)],
            }
        )
    return {
        "assumptions": dataclasses.asdict(assume),
        "assumed": assume.lines(),
        "launches": found,
        "pairs": pairs_found,
    }


def _buffers(cost: Cost) -> list[str]:
    lines = [f"  {'buffer':<16}{'unique MB':>11}{'requested MB':>14}{'written MB':>12}  by cache policy"]
    for name in sorted({*cost.read, *cost.written}, key=lambda n: -sum(cost.read.get(n, {}).values())):
        read, written = cost.read.get(name, {}), cost.written.get(name, {})
        policies = ", ".join(f"{p} {n / MB:.3f}" for p, n in read.items())
        stores = ", ".join(f"stored {p}" for p in written)
        lines.append(
            f"  {name:<16}{cost.unique.get(name, 0) / MB:>11.3f}{sum(read.values()) / MB:>14.3f}"
            f"{sum(written.values()) / MB:>12.3f}  {'; '.join(t for t in (policies, stores) if t)}"
        )
    regions = ", ".join(f"{name} {n / MB:.3f}" for name, n in sorted(cost.mailbox_read.items()))
    return [*lines, f"  mailbox regions read, MB: {regions}"]


def _share(cost: Cost) -> str:
    per_wave = {name: cost.instructions.get(name, 0) / cost.waves for name in CLASSES}
    other = cost.wave_instructions / cost.waves - sum(per_wave.values())
    return ", ".join(f"{name} {n:.1f}" for name, n in [*per_wave.items(), ("other", other)])


def _guesses(cost: Cost, assume: Assumptions) -> list[str]:
    late = ", ".join(f"{n / MB:.1f} MB behind hop {stage}" for stage, n in sorted(cost.late_weights.items()))
    lines = [
        f"    {guess.hit:4.0%} right: fixed {guess.fixed_us:.1f} us, overlap {guess.overlap_us:.1f} us, "
        f"requested in time {guess.early_share:.1%}, requested / unique {guess.weight_ratio:.2f}"
        for guess in guesses(cost, assume)
    ]
    head = (
        f"  MODELLED, not built: weights that wait for a hop's data ({late}) requested a hop earlier by a guess of it"
    )
    return [head, *lines] if lines else []


def _title(cost: Cost) -> str:
    return f"{cost.launch}, width {cost.width}" + (" (one-hop pair)" if cost.one_hop else "")


def render_one(cost: Cost, assume: Assumptions) -> str:
    """The text of one launch and width."""
    r, line = cost.resources, timeline(cost, assume)
    streams, weights = spread(cost.streamed), spread(cost.streamed_weights)
    out = [
        f"== {_title(cost)}: {cost.kernel}, {cost.geometry}, {cost.ranks} ranks, seed {cost.seed}",
        f"  code: VGPR {r['vgprs']}, SGPR {r['sgprs']}, spills {r['vgpr_spills']} VGPR {r['sgpr_spills']} SGPR, "
        f"LDS {r['lds_bytes']} B, scratch {r['scratch_bytes']} B, {r['instructions']} instructions, "
        f"{cost.poll_sites} poll sites, compiled in {cost.compile_seconds:.1f} s",
        f"  run: {cost.wave_instructions} wave-instructions on {cost.waves} waves (failed poll passes apart: "
        f"{cost.poll_instructions}), {cost.barriers} barriers; a wave: {_share(cost)}",
        f"  bytes a workgroup, min / median / max: {streams['min']:.0f} / {streams['median']:.0f} / "
        f"{streams['max']:.0f}; weights alone {weights['min']:.0f} / {weights['median']:.0f} / {weights['max']:.0f}",
        *_buffers(cost),
        f"  longest chain: {cost.hops('device')} device and {cost.hops('cross')} cross-GPU hops, "
        f"{len(cost.bulk)} extra trips (bulk reads behind a flag); "
        f"the use of {cost.uses_seen:.1%} of the weight bytes was seen",
    ]
    for k, (name, kind) in enumerate(cost.chain, 1):
        out.append(
            f"    {k}. {name:<8} {kind:<7} weights requested when it resolves {cost.requested_before(k):7.1%}; "
            f"in flight while it is awaited {cost.in_flight(k) / MB:.3f} MB"
            + (f"; then a bulk read of {', '.join(cost.bulk[k])}" if k in cost.bulk else "")
        )
    if cost.routes is not None:
        picks = {e for row in cost.routes for e in row}
        out.append(f"  routes: {len(picks)} experts, by row: {'; '.join(str(row) for row in cost.routes)}")
    out.append(
        f"  MODELLED time: fixed {fixed(cost):.1f} us ({cost.memory_bytes / MB:.1f} unique MB); the reference's hops "
        f"with the same bytes {reference_fixed(cost):.1f} us; overlap {line.end:.1f} us"
    )
    out += _guesses(cost, assume)
    for row in targets(cost):
        if row.met is None:
            verdict = "no target here"
        else:
            verdict = f"{'>=' if row.at_least else '<='} {row.bound:g}: {'met' if row.met else 'NOT MET'}"
        out.append(f"    {row.name:<56}{row.value:>12.4g}   {verdict}")
    return "\n".join(out)


def designs(costs: list[Cost], assume: Assumptions) -> list[str]:
    """Both designs of a GDN layer in both models, a line a width that has all four launches."""
    found = {(c.launch, c.width, c.one_hop): c for c in costs}
    lines = []
    for width in sorted({c.width for c in costs}):
        pairs = [[found.get((launch, width, design)) for launch in ("k1", "k2")] for design in (False, True)]
        if all(c is not None for pair in pairs for c in pair):
            two, one = (
                f"fixed {sum(map(fixed, pair)):.1f} us, overlap {sum(timeline(c, assume).end for c in pair):.1f} us, "
                f"{sum(c.wave_instructions for c in pair) / 1e6:.2f} M wave-instructions"
                for pair in pairs
            )
            lines.append(f"  width {width}: gated norm in K1 (two hops) {two}; in K2 (one hop) {one}")
    return ["GDN layer, K1 + K2, both designs (MODELLED):", *lines] if lines else []


def render(costs: list[Cost], assume: Assumptions) -> str:
    """The whole table."""
    missed = [f"{_title(c)}: {t.name}" for c in costs for t in targets(c) if t.met is False]
    judged = sum(t.met is not None for c in costs for t in targets(c))
    tail = [
        "",
        *(
            f"MODELLED, K2 and the next K1 at width {p.width}: as two launches fixed {p.fixed_two:.1f} us, overlap "
            f"{p.overlap_two:.1f} us; as one fixed {p.fixed_one:.1f} us, overlap {p.overlap_one:.1f} us"
            for p in pairs(costs, assume)
        ),
        "Counts are of rank 0, from a run on the simulator (consistent memory, a seeded schedule) with random inputs; "
        "scalar loads are not in the bytes.",
        "A hop is one store and the successful load of it by another workgroup; a flag with its bulk read is one "
        "hop and one extra trip, which no model here pays for.",
        "fixed model: 5 us + unique MB / 6.4 + 2.1 us a device hop + 4.0 us a cross-GPU hop",
        "overlap model, every assumption:",
        *(f"  - {line}" for line in assume.lines()),
        f"targets: {judged - len(missed)} met, {len(missed)} not met" + ("" if judged else " (stated for a95b, TP 8)"),
        *(f"  not met: {text}" for text in missed),
        *designs(costs, assume),
    ]
    return "\n\n".join(render_one(cost, assume) for cost in costs) + "\n" + "\n".join(tail)
