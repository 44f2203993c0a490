# SPDX-License-Identifier: Apache-2.0
"""What a simulated run prints, and its JSON form. ``judge`` decides the exit code."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from sgl_amd_mono.common.check import TIED_SHARE
from sgl_amd_mono.simulate.compare import (
    NOISE_MULTIPLE,
    TYPICAL_OUT,
    TYPICAL_STATE,
    LaunchRecord,
    LogitVerdict,
    judge_logits,
)
from sgl_amd_mono.simulate.session import Outcome

MIB = 2**20


@dataclass
class Verdict:
    """What the run shows. ``problems`` is empty where everything is within its bounds."""

    logits: LogitVerdict
    problems: list[str] = field(default_factory=list)


def judge(outcome: Outcome) -> Verdict:
    """Every reason for which the run does not pass: launches outside NUMERICS, launches missing, logits, tokens."""
    options, off, on = outcome.options, outcome.off, outcome.on
    steps = list(range(1, options.steps + 1))

    def decode_only(cases: list[list[Any]]) -> list[Any]:
        return [case[step] for case in cases for step in steps]

    noise = [decode_only(run) for run in off["noise"]]
    verdict = Verdict(judge_logits(decode_only(off["logits"]), decode_only(on["logits"]), noise))
    problems, logits = verdict.problems, verdict.logits
    for number, (a, b) in enumerate(zip(off["logits"], on["logits"], strict=True)):
        if not bool((a[0] == b[0]).all()):
            problems.append(f"case {number + 1}: the prefill, which the plugin leaves to SGLang, differs")
    for record in on["records"]:
        problems += [f"{_where(record)}: {text}" for text in record.failures]
    problems += _missing_launches(outcome)
    problems += _ranks_that_differ(outcome)
    problems += _states_that_differ(on["records"])
    problems += _stock_that_did_not_run(outcome)
    errors = [error for record in on["records"] if record.kind == "k2" for error in record.row_errors]
    typical = statistics.median(errors) if errors else float("inf")
    bound = TYPICAL_OUT[options.moe]
    if not typical <= bound:
        problems.append(f"k2.out: relative error {typical:.2g} in the median row, bound {bound:g}")
    rows = sum(record.rows for record in on["records"] if record.kind == "k2")
    ties = sum(record.ties for record in on["records"])
    if ties > TIED_SHARE * rows and ties > 1:
        problems.append(
            f"{ties} of {rows} rows of K2 pass only by another choice of tied experts, at most {TIED_SHARE:.0%} may"
        )
    if not logits.ok:
        problems.append(
            f"logits: largest difference {logits.largest:.4g} (allowed {NOISE_MULTIPLE * logits.noise:.4g}), "
            f"rms {logits.rms:.4g} (allowed {NOISE_MULTIPLE * logits.noise_rms:.4g}), "
            f"{logits.flipped} decided tokens differ"
        )
    return verdict


def _missing_launches(outcome: Outcome) -> list[str]:
    """A launch that never ran compares with nothing: every step must have run K1 and K2 on each layer they serve."""
    from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry

    options = outcome.options
    geometry = Geometry.small(options.ranks)
    wanted = {
        (rank, case, step, kind, layer)
        for rank in range(options.ranks)
        for case in range(len(options.rows))
        for step in range(options.steps)
        for layer in range(geometry.layers)
        for kind in (("k2",) if geometry.is_attention(layer) else ("k1", "k2"))
    }
    ran = {(r.rank, r.case, r.step, r.kind, r.layer) for r in outcome.on["records"]}
    problems = []
    if ran != wanted:
        problems.append(f"{len(wanted - ran)} launches did not run, {len(ran - wanted)} ran that should not")
    routed, passed_on = outcome.on["routed"]
    if (routed, passed_on) != (len(options.rows) * options.steps, 0):
        problems.append(f"the plugin ran {routed} steps and passed {passed_on} on; needed: every decode step")
    return problems


def _states_that_differ(records: list[LaunchRecord]) -> list[str]:
    """The state of each layer's median row: a bf16 unit that the order of sums flips moves single rows only."""
    by_layer: dict[int, list[float]] = defaultdict(list)
    for record in records:
        if record.kind == "k1":
            by_layer[record.layer] += record.row_errors
    typical = {layer: statistics.median_low(errors) if errors else float("inf") for layer, errors in by_layer.items()}
    return [
        f"layer {layer} k1.state: relative error {error:.2g} in the median row, bound {TYPICAL_STATE:g}"
        for layer, error in sorted(typical.items())
        if not error <= TYPICAL_STATE
    ]


STOCK_OF_A_STEP = ("_causal_conv1d_update_kernel", "fused_recurrent_gated_delta_rule_packed_decode_kernel")
"""SGLang's kernels that run once a GDN layer and decode step, and in nothing else."""


def _stock_that_did_not_run(outcome: Outcome) -> list[str]:
    """SGLang's own kernels run every decode step of the arm without the plugin, and beside each K1 of the other."""
    from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry

    options = outcome.options
    geometry = Geometry.small(options.ranks)
    if options.stock != "triton":
        return _moe_that_did_not_run(outcome, geometry.layers)
    fronts = sum(not geometry.is_attention(layer) for layer in range(geometry.layers))
    once = fronts * len(options.rows) * options.steps
    problems = []
    for name, arm, wanted in (("off", outcome.off, once * (1 + len(outcome.off["noise"]))), ("on", outcome.on, once)):
        for kernel in STOCK_OF_A_STEP:
            ran = arm["stock"].get(kernel, (0, 0))[0]
            if ran != wanted:
                problems.append(f"plugin {name}: SGLang's {kernel} ran {ran} times, needed: {wanted}")
    return problems + _moe_that_did_not_run(outcome, geometry.layers)


def _moe_that_did_not_run(outcome: Outcome, layers: int) -> list[str]:
    """AMD's fused MoE runs once a layer and forward, and again beside K2 where experts tie."""
    options = outcome.options
    if options.moe != "amd":
        return []
    prefills, steps = layers * len(options.rows), layers * len(options.rows) * options.steps
    problems = []
    for name, arm, least in (
        ("off", outcome.off, (prefills + steps) * (1 + len(outcome.off["noise"]))),
        ("on", outcome.on, prefills + steps),
    ):
        ran = sum(arm["moe"].values())
        if ran < least:
            problems.append(f"plugin {name}: AMD's fused MoE ran {ran} times, needed: {least}")
    return problems


def _ranks_that_differ(outcome: Outcome) -> list[str]:
    """K2 leaves the same bits on every rank, and so do the logits."""
    digests: dict[str, set[str]] = defaultdict(set)
    for record in outcome.on["records"]:
        digests[f"case {record.case + 1} step {record.step + 1} layer {record.layer} {record.kind}"].add(record.digest)
    problems = [f"{where}: the ranks' outputs differ" for where, found in digests.items() if len(found) > 1]
    for name, arm in (("off", outcome.off), ("on", outcome.on)):
        if not arm["ranks_agree"]:
            problems.append(f"plugin {name}: the ranks' logits differ")
    return problems


def _where(record: LaunchRecord) -> str:
    rank = f"rank {record.rank} " if record.rank else ""
    return f"{rank}case {record.case + 1} step {record.step + 1} layer {record.layer} {record.kind}"


def explain(stock: str, moe: str) -> str:
    """What of SGLang runs unchanged here, what is replaced and why, and what a simulated run does not cover."""
    from sgl_amd_mono.simulate import harness, rocm_import

    kernels = []
    if stock == "triton":
        kernels = [
            "SGLang's Triton kernels are compiled for gfx950 and run on the simulator; imported as on ROCm:",
            *(f"  {module}" for module in rocm_import.MODULES),
            "Autotuned kernels run one stated configuration; a GPU takes what it measures:",
            *(f"  {kernel}: {stated}" for _, kernel, stated in harness.CONFIGURATIONS),
        ]
    return "\n".join(
        [
            "SGLang's loader, model classes, state pools, batches, attention and sampling run unchanged, on the CPU.",
            *kernels,
            _explain_moe(moe),
            "Replaced in SGLang, on both arms alike:",
            *(f"  {r.module}.{r.attribute}: {r.why}" for r in harness.replacements(stock)),
            "Not covered by a simulated run:",
            *(f"  {what}" for what in harness.not_covered(stock)),
        ]
    )


def _explain_moe(moe: str) -> str:
    from sgl_amd_mono.simulate import aiter_moe

    missing = aiter_moe.unavailable()
    if moe != "torch" and missing is None:
        return (
            "AITER's fused MoE is AMD's own code object, read from its wheel by llvm-objdump and run on the simulator; "
            "its launcher is ours, rows are quantised by RCEIL as AITER does since 2026."
        )
    return f"AITER's fused MoE is a stand-in in PyTorch: {'asked for' if moe == 'torch' else missing}."


def as_dict(outcome: Outcome, verdict: Verdict) -> dict[str, Any]:
    """Plain values for ``--json``."""
    options = outcome.options
    return {
        "model": options.model,
        "rows": [list(pair) for pair in options.rows],
        "steps": options.steps,
        "ranks": options.ranks,
        "memory_model": options.memory_model,
        "seed": options.seed,
        "stock": options.stock,
        "moe": options.moe,
        "moe_launches": {"off": outcome.off["moe"], "on": outcome.on["moe"]},
        "stock_launches": {"off": outcome.off["stock"], "on": outcome.on["stock"]},
        "ok": not verdict.problems,
        "problems": verdict.problems,
        "logits": {**asdict(verdict.logits), "allowed": NOISE_MULTIPLE * verdict.logits.noise},
        "tokens": {
            "off": [[t.tolist() for t in _greedy(case)] for case in outcome.off["logits"]],
            "on": [[t.tolist() for t in _greedy(case)] for case in outcome.on["logits"]],
        },
        "launches": [asdict(record) for record in outcome.on["records"]],
        "seconds": outcome.seconds,
    }


def _greedy(case: list[Any]) -> list[Any]:
    return [logits.argmax(-1) for logits in case]


def render(outcome: Outcome, verdict: Verdict) -> str:
    """The text that ``simulate`` prints."""
    return "\n".join(
        [
            *_steps_section(outcome),
            "",
            *_launch_section(outcome),
            "",
            *_traffic_section(outcome),
            "",
            *_token_section(outcome),
            "",
            *_logit_section(verdict.logits),
            "",
            *_stock_section(outcome),
            "",
            *_verdict_section(outcome, verdict),
        ]
    )


def _steps_section(outcome: Outcome) -> list[str]:
    options = outcome.options
    lines = ["Which steps ran which launches"]
    for case, (requests, width) in enumerate(options.rows):
        by_kind: dict[str, set[int]] = defaultdict(set)
        steps = set()
        for record in outcome.on["records"]:
            if record.case == case:
                by_kind[record.kind].add(record.layer)
                steps.add(record.step + 1)
        ran = "; ".join(f"{kind} on layers {sorted(layers)}" for kind, layers in sorted(by_kind.items()))
        padded = f", padded to {width} rows" if width != requests else ""
        lines.append(
            f"  case {case + 1}, {requests} requests{padded}: prefill by SGLang; decode steps {sorted(steps)}: {ran}"
        )
    return lines


def _launch_section(outcome: Outcome) -> list[str]:
    lines = [
        "Each launch against SGLang's own layer on the same inputs (worst row: cosine, relative L2, maximum)",
        f"  {'rank':>4} {'case':>4} {'step':>4} {'layer':>5} {'launch':>6}  outputs",
    ]
    for r in outcome.on["records"]:
        outputs = "  ".join(f"{name} {d.cosine:.7f} {d.rel:.1e} {d.max_abs:.1e}" for name, d in r.outputs.items())
        mark = "  <-- outside NUMERICS" if r.failures else (f"  ({r.ties} tie)" if r.ties else "")
        lines.append(f"  {r.rank:>4} {r.case + 1:>4} {r.step + 1:>4} {r.layer:>5} {r.kind:>6}  {outputs}{mark}")
    return lines


def _traffic_section(outcome: Outcome) -> list[str]:
    """One line a launch kind and width: instructions, longest chains of hand-offs, and what was read."""
    groups: dict[tuple[str, int], list[LaunchRecord]] = defaultdict(list)
    for record in outcome.on["records"]:
        if record.simulated:
            groups[record.kind, record.width].append(record)
    lines = ["What the launches read and how many hand-offs they made (largest of each kind and width, rank 0)"]
    if not groups:
        return [*lines, "  no simulator report"]
    for (kind, width), records in sorted(groups.items()):
        most = max(records, key=lambda r: r.simulated["wave_instructions"])
        hops = max(r.simulated["device_hops"] for r in records), max(r.simulated["cross_hops"] for r in records)
        read = most.simulated["bytes_read"]
        parts = ", ".join(
            f"{name} {size / MIB:.3f}" for name, size in sorted(read.items(), key=lambda x: -x[1]) if size
        )
        chain = " > ".join(f"{region}({scope})" for region, scope in most.simulated["chain"])
        lines.append(
            f"  {kind} width {width}: {most.simulated['wave_instructions']:,} wave-instructions; "
            f"device hops {hops[0]}, cross-GPU hops {hops[1]}{f' ({chain})' if chain else ''}"
        )
        lines.append(f"    MiB read: {sum(read.values()) / MIB:.2f} = {parts}")
    return lines


def _token_section(outcome: Outcome) -> list[str]:
    lines = ["Greedy tokens, a request a line (off | on; both arms are fed the off arm's)"]
    for number, (off, on) in enumerate(zip(outcome.off["logits"], outcome.on["logits"], strict=True)):
        for row in range(len(off[0])):
            a = [int(t[row]) for t in _greedy(off)]
            b = [int(t[row]) for t in _greedy(on)]
            lines.append(f"  case {number + 1} request {row + 1}: {a} | {b}{'' if a == b else '   differs'}")
    return lines


def _logit_section(logits: LogitVerdict) -> list[str]:
    return [
        "Logits of the two arms",
        f"  noise of re-ordered float32 sums: largest {logits.noise:.4f}, rms {logits.noise_rms:.5f}",
        f"  plugin on against off:            largest {logits.largest:.4f}, rms {logits.rms:.5f} "
        f"(allowed: {NOISE_MULTIPLE:g} times the noise)",
        f"  greedy tokens: {logits.rows} compared, {logits.decided} decided by more than {NOISE_MULTIPLE:g} times the "
        f"noise, {logits.flipped} of these differ",
    ]


def _stock_section(outcome: Outcome) -> list[str]:
    off, on = outcome.off["moe"], outcome.on["moe"]
    moe = ["AITER's fused MoE: a stand-in in PyTorch (simulate --explain says why)"]
    if outcome.options.moe == "amd":
        moe = ["AITER's fused MoE, AMD's code objects on the simulator (rank 0: launches without | with the plugin)"]
        moe += [f"  {name}: {off.get(name, 0)} | {on.get(name, 0)}" for name in sorted(off.keys() | on.keys())]
    if outcome.options.stock != "triton":
        return ["SGLang's Triton kernels: PyTorch in their place (--stock torch)", *moe]
    lines = ["SGLang's own Triton kernels, gfx950 code on the simulator (rank 0: launches without | with the plugin)"]
    off, on = outcome.off["stock"], outcome.on["stock"]
    for name in sorted(off.keys() | on.keys()):
        lines.append(f"  {name}: {off.get(name, (0, 0))[0]} | {on.get(name, (0, 0))[0]}")
    executed = sum(count for arm in (off, on) for _, count in arm.values())
    return [*lines, f"  {executed:,} wave-instructions", *moe]


def _verdict_section(outcome: Outcome, verdict: Verdict) -> list[str]:
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in outcome.seconds.items())
    if not verdict.problems:
        return [f"PASS ({times})"]
    return [f"FAIL ({times})", *(f"  - {problem}" for problem in verdict.problems)]
