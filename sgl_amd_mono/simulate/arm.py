# SPDX-License-Identifier: Apache-2.0
"""One rank of one arm, in a process of its own: ``python -m sgl_amd_mono.simulate.arm JOB.json``.

An arm loads the model with SGLang, with the plugin or without, and runs every case: a prefill, then decode steps. An
arm that is fed with the tokens of another one (teacher-forced) waits for their file. Each rank writes what it saw as a
torch file. Rank 0 shows its progress on stdout, as lines that begin with ``PROGRESS``; SGLang's log goes to stderr.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROGRESS = "@progress "
"""Marks a progress line on stdout (SGLang prints there too)."""

TOKENS_TIMEOUT_S = 3600.0
"""How long an arm waits for the other's tokens."""

TOKENS_POLL_S = 0.1


@dataclass
class Case:
    """One batch: its prompts (token ids), and the rows that each decode step is padded to."""

    prompts: list[list[int]]
    width: int


@dataclass
class Job:
    """What one process does.

    ``tokens``: where its tokens are written once the cases have run; ``forced``: such a file of another arm.
    ``noise_seeds``: orders of sums in which the cases are run again.
    """

    checkpoint: str
    out: str
    cases: list[Case]
    steps: int
    plugin: bool
    rank: int = 0
    ranks: int = 1
    port: int | None = None
    forced: str | None = None
    tokens: str | None = None
    noise_seeds: list[int] = field(default_factory=list)
    threads: int = 1

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        values = json.loads(path.read_text())
        values["cases"] = [Case(**case) for case in values["cases"]]
        return cls(**values)


def main(arguments: list[str] | None = None) -> int:
    """Run the job whose file is named by the only argument."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    run(Job.read(Path(path)))
    return 0


def run(job: Job) -> None:
    """Load the model, run every case, write ``job.out``."""
    import torch

    torch.set_num_threads(job.threads)
    from sgl_amd_mono.simulate import aiter_moe, plugin, sums
    from sgl_amd_mono.simulate.compare import LaunchRecorder
    from sgl_amd_mono.simulate.runner import Rank, SglangModel

    def say(text: str) -> None:
        if job.rank == 0:
            print(PROGRESS + text, flush=True)

    name = "plugin on" if job.plugin else "plugin off"
    plugin.announce = lambda text: say(f"{name}: {text}")
    say(f"{name}: SGLang loads the model")
    begin = time.monotonic()
    model = SglangModel(Path(job.checkpoint), job.plugin, Rank(job.rank, job.ranks, job.port))
    seconds = {"load": time.monotonic() - begin}
    stock = _stock_driver()
    if stock is not None:
        stock.launches.clear()  # what the plugin's probes ran
    aiter_moe.ran.clear()
    forced = _await(Path(job.forced))["tokens"] if job.forced else None
    recorder = step = None
    if job.plugin:
        step = plugin.BUILT[-1]
        recorder = LaunchRecorder(step, dict(plugin.spec().numerics.bounds), job.rank)

    def run_cases(order: int | None) -> tuple[list[list[Any]], list[list[Any]]]:
        logits, tokens = [], []
        with sums.reordered(order):
            for number, case in enumerate(job.cases):
                seen = [model.prefill(case.prompts)]
                fed = []
                for index in range(job.steps):
                    what = f"case {number + 1}/{len(job.cases)}, {len(case.prompts)} rows, step {index + 1}/{job.steps}"
                    say(f"{name}{'' if order is None else f', sums in order {order}'}: {what}")
                    given = forced if forced is not None else (first_tokens if order is not None else None)
                    fed.append(given[number][index] if given is not None else seen[-1].argmax(-1))
                    if recorder is not None:
                        recorder.case, recorder.step = number, index
                    seen.append(model.decode(fed[-1], case.width))
                logits.append(seen)
                tokens.append(fed)
        return logits, tokens

    first_tokens: list[list[Any]] | None = None
    begin = time.monotonic()
    logits, first_tokens = run_cases(None)
    seconds["cases"] = time.monotonic() - begin
    if job.tokens:
        unfinished = Path(job.tokens).with_suffix(".part")
        torch.save({"tokens": first_tokens}, unfinished)
        unfinished.rename(job.tokens)
    begin = time.monotonic()
    noise = [run_cases(seed)[0] for seed in job.noise_seeds]
    seconds["noise"] = time.monotonic() - begin
    result = {
        "logits": logits,
        "tokens": first_tokens,
        "noise": noise,
        "records": [] if recorder is None else recorder.records,
        "routed": (0, 0) if step is None else (step.steps, step.passed_on),
        "stock": stock_launches(stock),
        "moe": dict(aiter_moe.ran),
        "seconds": seconds,
    }
    torch.save(result, job.out)
    _leave(job, step)


def _await(path: Path) -> dict[str, Any]:
    """What another arm wrote there, once it has; TimeoutError after TOKENS_TIMEOUT_S."""
    import torch

    limit = time.monotonic() + TOKENS_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > limit:
            raise TimeoutError(f"{path} was not written within {TOKENS_TIMEOUT_S:g} s")
        time.sleep(TOKENS_POLL_S)
    return torch.load(path, weights_only=False)


def _stock_driver() -> Any:
    """What runs SGLang's Triton kernels in this process; None where PyTorch does."""
    from sgl_amd_mono.simulate import harness, rocm_import

    return rocm_import.driver() if harness.chosen_stock() == "triton" else None


def stock_launches(driver: Any) -> dict[str, tuple[int, int]]:
    """What ran of SGLang's Triton kernels on the simulator: name -> (launches, wave-instructions)."""
    counts: dict[str, tuple[int, int]] = {}
    for launch in [] if driver is None else driver.launches:
        number, executed = counts.get(launch.name, (0, 0))
        counts[launch.name] = (number + 1, executed + launch.wave_instructions)
    return counts


def _leave(job: Job, step: Any) -> None:
    """End together: a rank that went early would take its peers' process group down."""
    import torch.distributed

    if step is not None:
        step.close()
    if job.ranks > 1 and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
