# SPDX-License-Identifier: Apache-2.0
"""Counts of one launch: a run on the simulator with random inputs, and what the compiler says of its code."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_amd_mono.common.build import Artifact
    from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
    from sgl_amd_mono.sim import Report

LAUNCHES = ("k1", "k2", "k2k1")  # the last: K2 of a layer and K1 of the next as one launch
DEADLINE_TICKS = 100_000_000  # 1 s of the simulator's clock: no wait of a sound launch comes near it
FRONT = "front_"  # prefix of K1's arguments where it follows K2 in one launch
RANK = 0  # whose counts are reported; all ranks run


@dataclasses.dataclass(frozen=True)
class Role:
    """Workgroups that stream the same weight buffers and publish the same regions."""

    workgroups: int
    streams: tuple[str, ...]
    publishes: tuple[str, ...]
    requested: dict[int, dict[str, int]]  # stage -> weight buffer -> bytes of all its workgroups
    published: dict[int, tuple[str, ...]]  # stage -> regions


@dataclasses.dataclass(frozen=True)
class Cost:
    """Counts of one launch on one rank. Bytes; instructions are wave-instructions without failed poll passes.

    chain: (region, "device" or "cross") along the longest chain; a hop is "cross" where other ranks map the
    buffer too. requests: (stage of the request, stage of the use, unique bytes) of all buffers but mailboxes, where
    bytes requested several times are shared out over their stages; a stage is the number of hops behind the wave.
    weights: requested bytes by buffer, stage and use, of the read-only arguments whose name begins with w.
    one_hop: of the pair in which K1 leaves the gated norm to K2.
    bulk: regions that carry no tags of their own and are read, in that stage, behind another region's flag: one more
    trip to memory after the hop. uses_seen: share of the requested weight bytes whose use was seen.
    """

    launch: str
    kernel: str
    geometry: str
    ranks: int
    width: int
    seed: int
    routes: list[list[int]] | None
    workgroups: int
    waves: int
    instructions: dict[str, int]
    poll_instructions: int
    barriers: int
    poll_sites: int
    resources: dict[str, int]
    compile_seconds: float
    read: dict[str, dict[str, int]]
    unique: dict[str, int]
    written: dict[str, dict[str, int]]
    mailbox_read: dict[str, int]
    mailboxes: list[str]
    peers: list[str]
    streamed: list[int]
    streamed_weights: list[int]
    chain: list[tuple[str, str]]
    bulk: dict[int, tuple[str, ...]]
    requests: list[tuple[int, int, int]]
    weights: list[tuple[str, int, int, int]]
    uses_seen: float
    roles: list[Role]
    one_hop: bool = False

    @property
    def wave_instructions(self) -> int:
        """Wave-instructions of the rank."""
        return sum(self.instructions.values())

    def hops(self, kind: str) -> int:
        """Hops of a kind on the longest chain."""
        return sum(k == kind for _, k in self.chain)

    @property
    def memory_bytes(self) -> int:
        """Unique bytes that the launch must move: read from every buffer but mailboxes, and written to them."""
        read = sum(n for name, n in self.unique.items() if name not in self.mailboxes)
        return read + sum(sum(by.values()) for name, by in self.written.items() if name not in self.mailboxes)

    @property
    def weight_names(self) -> list[str]:
        """Buffers that count as weights."""
        return sorted({name for name, *_ in self.weights})

    @property
    def weight_ratio(self) -> float:
        """Requested / unique weight bytes."""
        asked = sum(sum(self.read[name].values()) for name in self.weight_names)
        return asked / sum(self.unique[name] for name in self.weight_names)

    def requested_before(self, hop: int) -> float:
        """Share of the weight bytes requested by waves that had fewer than `hop` hops behind them."""
        return sum(n for _, issue, _, n in self.weights if issue < hop) / sum(n for *_, n in self.weights)

    def in_flight(self, hop: int) -> int:
        """Weight bytes requested before hop `hop` resolves and first used after it."""
        return sum(n for _, issue, use, n in self.weights if issue < hop <= use)

    @property
    def early_share(self) -> float:
        """Share of the weight bytes requested before the last hop before their use (or used before any hop)."""
        return sum(n for _, issue, use, n in self.weights if use == 0 or issue < use) / sum(n for *_, n in self.weights)

    @property
    def late_weights(self) -> dict[int, int]:
        """Weight bytes requested only after the last hop before their use, by stage: what depends on that hop."""
        late: Counter[int] = Counter()
        for _, issue, use, n in self.weights:
            if issue == use > 0:
                late[use] += n
        return dict(late)

    def scratch_read(self) -> int:
        """Device-scope bytes read from the rank's own scratch."""
        return sum(self.read.get("scratch", {}).values())

    def peer_read(self) -> int:
        """Bytes read from peer buffers."""
        return sum(sum(self.read.get(name, {}).values()) for name in self.peers)


def spread(values: list[int]) -> dict[str, float]:
    """Minimum, median, maximum, and maximum over mean."""
    mean = statistics.mean(values)
    return {
        "min": min(values),
        "median": statistics.median(values),
        "max": max(values),
        "max_over_mean": max(values) / mean if mean else 0.0,
    }


def poll_sites(isa: str) -> int:
    """Poll loops in the code: each sleeps in one place."""
    return len(re.findall(r"^\s+s_sleep\b", isa, re.MULTILINE))


def of_report(
    report: Report, artifact: Artifact, key: Any, *, seed: int, routes: list[list[int]] | None, names: dict[str, str]
) -> Cost:
    """The counts of a report. names: allocation -> buffer, where they differ."""
    launch = report.launches[RANK]
    named = lambda buffer: names.get(buffer, buffer)  # noqa: E731
    trace = launch.trace
    assert trace is not None, "the machine did not trace"
    mailboxes = sorted({named(c.buffer) for one in report.launches for c in one.trace or () if c.region} | {"fault"})
    shared = {name for rank, name in report.shared if rank == RANK}
    peers = sorted(named(c) for c in shared & {cell.buffer for cell in trace if cell.region})
    pointers = [name for name, kind in key.abi if kind == "ptr" and name in key.readonly]
    weights = {name for name in pointers if name.removeprefix(FRONT).startswith("w")}

    requested: Counter[tuple[str, int]] = Counter()
    used: Counter[tuple[str, int, int]] = Counter()
    mailbox_read: Counter[str] = Counter()
    by_group = [0] * launch.workgroups
    bulk: dict[int, set[str]] = {}
    for c in trace:
        buffer = named(c.buffer)
        if c.kind == "use":
            used[buffer, c.issue, c.use] += c.nbytes
        elif c.kind == "read":
            requested[buffer, c.issue] += c.nbytes
            if c.region:
                region = c.region.removesuffix(".odd")
                mailbox_read[region] += c.nbytes
                if region not in (*key.region_names, "fault") and c.policy != "plain":
                    bulk.setdefault(c.issue, set()).add(region)
            if buffer in weights:
                by_group[c.workgroup] += c.nbytes
    flows: Counter[tuple[str, int, int]] = Counter()
    for (buffer, issue), asked in requested.items():
        if buffer in mailboxes:
            continue
        uses = {use: n for (b, i, use), n in used.items() if (b, i) == (buffer, issue)}
        seen = min(sum(uses.values()), asked)
        for use, n in uses.items():
            flows[buffer, issue, use] += n * seen // sum(uses.values())
        if asked > seen:
            flows[buffer, issue, issue] += asked - seen
    requests: Counter[tuple[int, int]] = Counter()
    asked_of: Counter[str] = Counter()
    for (buffer, _), asked in requested.items():
        asked_of[buffer] += asked
    unique = {named(name): n for (rank, name), n in sorted(report.unique_bytes.items()) if rank == RANK}
    for (buffer, issue, use), n in flows.items():
        requests[issue, use] += n * min(unique[buffer], asked_of[buffer]) // asked_of[buffer]
    chain = []
    for region, _ in launch.hop_chain:
        buffer, _, name = region.partition(".")
        kind = "cross" if buffer in shared else "device"
        chain.append((name.removesuffix(".odd") or buffer, kind))

    def bytes_of(counts: dict[tuple[int, str], dict[str, int]]) -> dict[str, dict[str, int]]:
        return {named(name): by for (rank, name), by in sorted(counts.items()) if rank == RANK}

    return Cost(
        launch=key.launch,
        kernel=artifact.name,
        geometry=key.geometry.name,
        ranks=key.geometry.tp,
        width=key.width,
        seed=seed,
        routes=routes,
        workgroups=launch.workgroups,
        waves=launch.workgroups * launch.waves_per_workgroup,
        instructions=launch.instructions,
        poll_instructions=launch.poll_instructions,
        barriers=launch.barriers,
        poll_sites=poll_sites(artifact.isa),
        resources=dataclasses.asdict(artifact.resources),
        compile_seconds=artifact.compile_seconds,
        read=bytes_of(report.bytes_read),
        unique=unique,
        written=bytes_of(report.bytes_written),
        mailbox_read=dict(mailbox_read),
        mailboxes=mailboxes,
        peers=peers,
        streamed=launch.streamed_per_workgroup,
        streamed_weights=by_group,
        chain=chain,
        bulk={stage: tuple(sorted(regions)) for stage, regions in sorted(bulk.items())},
        requests=sorted((i, u, n) for (i, u), n in requests.items()),
        weights=sorted((b, i, u, n) for (b, i, u), n in flows.items() if b in weights),
        uses_seen=sum(n for (b, *_), n in used.items() if b in weights)
        / max(1, sum(n for (b, _), n in requested.items() if b in weights)),
        roles=_roles(trace, weights),
    )


def _roles(trace: list[Any], weights: set[str]) -> list[Role]:
    reads: dict[int, Counter[tuple[int, str]]] = {}
    writes: dict[int, set[tuple[int, str]]] = {}
    for c in trace:
        if c.kind == "read" and c.buffer in weights:
            reads.setdefault(c.workgroup, Counter())[c.issue, c.buffer] += c.nbytes
        if c.kind == "write" and c.region and c.policy != "plain":
            writes.setdefault(c.workgroup, set()).add((c.issue, c.region.removesuffix(".odd")))
    members: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
    for group in sorted({*reads, *writes}):
        streams = tuple(sorted({b for _, b in reads.get(group, ())}))
        publishes = tuple(sorted({r for _, r in writes.get(group, ())}))
        members.setdefault((streams, publishes), []).append(group)
    roles = []
    for (streams, publishes), groups in sorted(members.items(), key=lambda item: -len(item[1])):
        asked: dict[int, Counter[str]] = {}
        told: dict[int, set[str]] = {}
        for group in groups:
            for (stage, buffer), n in reads.get(group, Counter()).items():
                asked.setdefault(stage, Counter())[buffer] += n
            for stage, region in writes.get(group, ()):
                told.setdefault(stage, set()).add(region)
        roles.append(
            Role(
                len(groups),
                streams,
                publishes,
                {stage: dict(by) for stage, by in sorted(asked.items())},
                {stage: tuple(sorted(regions)) for stage, regions in sorted(told.items())},
            )
        )
    return roles


def k1(
    geometry: Geometry,
    width: int,
    seed: int,
    *,
    isa: str | None = None,
    mxfp4: tuple[str, ...] = (),
    one_hop: bool = False,
) -> Cost:
    """Counts of K1 (not a model's first layer). isa: another text in place of the built one, for controls. mxfp4: the
    projections whose weights are MXFP4. one_hop: the gated norm is left to K2."""
    from sgl_amd_mono.qwen38_a95b_mxfp4 import trial_k1
    from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey, gdn_formats
    from sgl_amd_mono.sim import CodeObject, Machine

    key = GdnKey(geometry, width, one_hop=one_hop, **gdn_formats(mxfp4))
    case = trial_k1.make_case(key, seed)
    cus = max(geometry.blocks, key.grid)
    machine = Machine(ranks=1, cus=cus, seed=seed, unique_bytes=True, trace=True)
    trial_k1.map_case(machine, case)
    code = CodeObject.parse(isa) if isa else None
    report = trial_k1.run(case, machine=machine, code=code, deadline_ticks=DEADLINE_TICKS)
    names = {f"fault block of rank {n}": "fault" for n in range(geometry.tp)}
    found = of_report(report, trial_k1.built(key), key, seed=seed, routes=None, names=names)
    return dataclasses.replace(found, one_hop=one_hop)


def k2(
    geometry: Geometry,
    width: int,
    seed: int,
    *,
    isa: str | None = None,
    weights: list[Any] | None = None,
    one_hop: bool = False,
) -> Cost:
    """Counts of K2 (not a step's last launch) on rank 0 of all ranks. weights: `k2_weights`, to share them, and of the
    variant that is meant. one_hop: K2 behind a one-hop K1, whose core it forms."""
    from sgl_amd_mono.qwen38_a95b_mxfp4 import trial_k2
    from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import MAX_ROWS
    from sgl_amd_mono.sim import CodeObject

    inputs = trial_k2.random_inputs(geometry, MAX_ROWS, seed + 1).rows(range(width))
    if one_hop:
        inputs.parts = [trial_k2.parts_of(core, geometry) for core in inputs.cores]
    bench = trial_k2.Bench(
        geometry, weights or k2_weights(geometry, seed), seed=seed, stop=True, unique_bytes=True, trace=True
    )
    result = bench.run(inputs, deadline=DEADLINE_TICKS, program=CodeObject.parse(isa) if isa else None)
    routes = [sorted(row) for row in result.route()[0].tolist()]
    artifact, key = trial_k2.artifact(geometry, width, True, bench.variant), bench.variant.key(geometry, width, True)
    names = {f"scratch{width}": "scratch"}
    found = of_report(result.report, artifact, key, seed=seed, routes=routes, names=names)
    return dataclasses.replace(found, one_hop=one_hop)


def k2k1(
    geometry: Geometry, width: int, seed: int, *, weights: list[Any] | None = None, mxfp4: tuple[str, ...] = ()
) -> Cost:
    """Counts of K2 and the next layer's K1 in one launch, on rank 0 of all ranks; inputs and routes are those of
    `k2`."""
    from sgl_amd_mono.qwen38_a95b_mxfp4 import trial_k2
    from sgl_amd_mono.qwen38_a95b_mxfp4 import trial_tail_front as trial
    from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import MAX_ROWS
    from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import gdn_formats

    weights = weights or k2_weights(geometry, seed, mxfp4)
    tail = dataclasses.asdict(weights[0].variant)
    key = trial.key_of(geometry, width, stop=True, tail=tail, **gdn_formats(mxfp4))
    inputs = trial_k2.random_inputs(geometry, MAX_ROWS, seed + 1).rows(range(width))
    bench = trial_k2.Bench(geometry, weights, seed=seed, unique_bytes=True, trace=True)
    outcome = trial.run_together(bench, key, inputs, trial.make_cases(key, seed), deadline=DEADLINE_TICKS)
    return of_report(outcome.report, trial.artifact(key), key, seed=seed, routes=outcome.routes(), names={})


def k2_weights(geometry: Geometry, seed: int, mxfp4: tuple[str, ...] = (), fused_shared: bool = False) -> list[Any]:
    """Random weights of every rank; experts stay zero, as no count depends on their values.

    mxfp4: with "out_proj" or "o_proj" the output projection is MXFP4. fused_shared: the shared expert is expert E.
    """
    from sgl_amd_mono.qwen38_a95b_mxfp4 import trial_k2
    from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.layer import BF16, MXFP4, projection_formats

    form = MXFP4 if MXFP4 in projection_formats(mxfp4) else BF16
    return trial_k2.random_weights(geometry, seed, experts=(), variant=trial_k2.Variant(form, fused_shared))


def measure(
    geometry: Geometry,
    launches: tuple[str, ...],
    widths: tuple[int, ...],
    seed: int,
    progress: Callable[[str], None],
    *,
    mxfp4: tuple[str, ...] = (),
    one_hop: bool = False,
    fused_shared: bool = False,
) -> list[Cost]:
    """Counts of every asked launch and width; equal seeds give equal counts. one_hop: of both designs of the pair."""
    weights = k2_weights(geometry, seed, mxfp4, fused_shared) if {"k2", "k2k1"} & {*launches} else None
    found = []
    for design in (False, True) if one_hop else (False,):
        for launch in launches if not design else [name for name in launches if name != "k2k1"]:
            for width in widths:
                pair = ", one-hop pair" if design else ""
                progress(f"{launch}, width {width}, {geometry.name} TP {geometry.tp}, seed {seed}{pair}")
                if launch == "k1":
                    found.append(k1(geometry, width, seed, mxfp4=mxfp4, one_hop=design))
                elif launch == "k2":
                    found.append(k2(geometry, width, seed, weights=weights, one_hop=design))
                else:
                    found.append(k2k1(geometry, width, seed, weights=weights, mxfp4=mxfp4))
    return found
