# SPDX-License-Identifier: Apache-2.0
"""A whole simulated run: checkpoint, off arm, on arm, verdict. Each arm's ranks run in processes of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sgl_amd_mono.simulate.arm import PROGRESS, Case, Job
from sgl_amd_mono.simulate.harness import MOE, STOCK, chosen_moe

MODELS = ("qwen38_a95b_mxfp4",)
"""Models that can be simulated, by their folder's name."""

NEEDED = ("sglang", "torch", "triton", "transformers", "safetensors")
"""Packages that a simulated run imports."""

PROMPT_LENGTHS = (5, 6, 7)
"""Prompt lengths of a batch's requests, in turn: the requests of a batch differ in their states."""

NOISE_ORDERS = 3
"""Orders of sums from which the logit noise is taken (the largest counts)."""

ARM_TIMEOUT_S = 3600.0
"""Wall-clock limit of one arm."""

CHECKPOINT = "checkpoint"
"""Name of the checkpoint's folder in a run's folder."""

LOG_TAIL_LINES = 40
"""Lines of a failed process's log that its error carries."""


class SimulationFailed(RuntimeError):
    """A process of the run ended with an error; the message carries the end of its log."""


@dataclass(frozen=True)
class Options:
    """What ``sgl-amd-mono simulate`` was asked for.

    ``rows``: (requests, rows a step is padded to) of each case. ``stock``: what SGLang's Triton kernels run as;
    ``moe``: what AITER's fused MoE does.
    """

    model: str = MODELS[0]
    rows: tuple[tuple[int, int], ...] = ((1, 1), (3, 4), (8, 8))
    steps: int = 3
    ranks: int = 1
    memory_model: str = "consistent"
    seed: int = 0
    stock: str = STOCK[0]
    moe: str = MOE[0]
    keep: Path | None = None


@dataclass
class Outcome:
    """What both arms gave: their torch results, and where the time went (seconds by phase)."""

    options: Options
    off: dict[str, Any]
    on: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)


def prompts(options: Options, vocabulary: int) -> list[Case]:
    """The cases' prompts: seeded token ids, of lengths in turn."""
    import torch

    generator = torch.Generator().manual_seed(options.seed)
    cases = []
    for requests, width in options.rows:
        lengths = [PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)] for i in range(requests)]
        ids = [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]
        cases.append(Case(ids, width))
    return cases


def check_machine() -> None:
    """Raise ``SimulationFailed`` where SGLang cannot run on the CPU here."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SimulationFailed(
            f"found no {', '.join(missing)} in {sys.prefix}; needed: SGLang 0.5.23 and what it imports; "
            f"fix: make demo, which makes an environment with the tested versions"
        )
    import torch

    if torch.version.hip is not None:
        raise SimulationFailed(
            f"found torch {torch.__version__}, a ROCm build, with which SGLang takes its GPU branches; "
            f"needed: a CPU or CUDA build; fix: make demo, in an environment of its own"
        )


def run(options: Options, progress: Callable[[str], None]) -> Outcome:
    """Run both arms; raises ``SimulationFailed`` when this machine lacks something or a process fails."""
    check_machine()
    try:
        options = replace(options, moe=chosen_moe(options.moe))
    except ValueError as error:
        raise SimulationFailed(str(error)) from error
    from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
    from sgl_amd_mono.simulate import checkpoint

    seconds: dict[str, float] = {}
    folder = options.keep or Path(tempfile.mkdtemp(prefix="sgl-amd-mono-simulate-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        shape = checkpoint.shape_of(Geometry.small(options.ranks))
        begin = time.monotonic()
        progress("writes a random-weight checkpoint, experts in MXFP4")
        checkpoint.write(folder / CHECKPOINT, shape, options.seed)
        seconds["checkpoint"] = time.monotonic() - begin
        cases = prompts(options, shape.vocab_size)
        begin = time.monotonic()
        if options.ranks == 1:
            # the second arm loads beside the first, and decodes beside its runs in other orders
            tokens = tokens_file(folder)
            tokens.unlink(missing_ok=True)
            arms = [_Arm(options, folder, cases, False, None, progress, arms=2)]
            arms.append(_Arm(options, folder, cases, True, tokens, progress, arms=2))
            _wait(arms)
            off, on = (arm.result() for arm in arms)
            seconds["both arms"] = time.monotonic() - begin
        else:
            off = run_arm(options, folder, cases, plugin=False, forced=None, progress=progress)
            seconds["plugin off"] = time.monotonic() - begin
            begin = time.monotonic()
            on = run_arm(options, folder, cases, plugin=True, forced=tokens_file(folder), progress=progress)
            seconds["plugin on"] = time.monotonic() - begin
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return Outcome(options, off, on, seconds)


def result_file(folder: Path, plugin: bool, rank: int) -> Path:
    """Where a rank of an arm writes its result."""
    return folder / f"{'on' if plugin else 'off'}.{rank}.pt"


def tokens_file(folder: Path) -> Path:
    """Where the arm without the plugin writes its tokens, before it runs in other orders."""
    return folder / "tokens.pt"


def run_arm(
    options: Options,
    folder: Path,
    cases: list[Case],
    *,
    plugin: bool,
    forced: Path | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """One arm, each rank in a process; returns what rank 0 wrote, with the launch records of all ranks and whether they
    saw the same logits (``ranks_agree``). Job files, results and logs go into ``folder``.

    ``forced``: the file with the tokens that are fed to this arm (an arm's result, or its tokens file).
    """
    arm = _Arm(options, folder, cases, plugin, forced, progress)
    _wait([arm])
    return arm.result()


class _Arm:
    """The processes of one arm, a rank each, from their start on."""

    def __init__(
        self,
        options: Options,
        folder: Path,
        cases: list[Case],
        plugin: bool,
        forced: Path | None,
        progress: Callable[[str], None],
        arms: int = 1,
    ) -> None:
        from sgl_amd_mono.simulate import plugin as entry

        self.name = "on" if plugin else "off"
        self.outs = [result_file(folder, plugin, rank) for rank in range(options.ranks)]
        self.processes: list[subprocess.Popen] = []
        self.logs: list[Path] = []
        self._readers: list[threading.Thread] = []
        widths = tuple(sorted({case.width for case in cases}))
        environment = entry.environment(
            folder / "entry_point", options.memory_model, options.seed, widths, stock=options.stock, moe=options.moe
        )
        port = _free_port() if options.ranks > 1 else None
        for rank in range(options.ranks):
            job = Job(
                checkpoint=str(folder / CHECKPOINT),
                out=str(self.outs[rank]),
                cases=cases,
                steps=options.steps,
                plugin=plugin,
                rank=rank,
                ranks=options.ranks,
                port=port,
                forced=str(forced) if forced else None,
                tokens=str(tokens_file(folder)) if not plugin and rank == 0 else None,
                threads=_threads(options.ranks * arms),
                noise_seeds=[] if plugin else [options.seed * NOISE_ORDERS + 1 + i for i in range(NOISE_ORDERS)],
            )
            path = folder / f"{self.name}.{rank}.json"
            job.write(path)
            self.logs.append(folder / f"{self.name}.{rank}.log")
            with self.logs[-1].open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "sgl_amd_mono.simulate.arm", str(path)],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            self.processes.append(process)
            reader = threading.Thread(target=_relay, args=(process.stdout, progress), daemon=True)
            reader.start()
            self._readers.append(reader)

    def result(self) -> dict[str, Any]:
        """What the ended processes wrote."""
        import torch

        for reader in self._readers:
            reader.join(timeout=10)
        results = [torch.load(out, weights_only=False) for out in self.outs]
        first = results[0]
        first["records"] = [record for result in results for record in result["records"]]
        first["ranks_agree"] = all(
            torch.equal(a, b)
            for other in results[1:]
            for case, other_case in zip(first["logits"], other["logits"], strict=True)
            for a, b in zip(case, other_case, strict=True)
        )
        return first


def _threads(processes: int) -> int:
    """torch threads of each process: OMP_NUM_THREADS where it is set, else this machine's cores shared by them."""
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // processes))


def _relay(stream: Any, progress: Callable[[str], None]) -> None:
    for line in stream:
        if line.startswith(PROGRESS):
            progress(line.removeprefix(PROGRESS).rstrip())


def _wait(arms: list[_Arm]) -> None:
    """Until all have ended; when one fails, the others are ended too and its log's end is raised."""
    limit = time.monotonic() + ARM_TIMEOUT_S
    processes = [process for arm in arms for process in arm.processes]
    try:
        while True:
            for arm in arms:
                for rank, process in enumerate(arm.processes):
                    if process.poll():
                        tail = "\n".join(arm.logs[rank].read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
                        raise SimulationFailed(
                            f"plugin {arm.name}, rank {rank} ended with code {process.returncode}:\n{tail}"
                        )
            running = [process for process in processes if process.poll() is None]
            if not running:
                return
            if time.monotonic() > limit:
                names = " and ".join(f"plugin {arm.name}" for arm in arms)
                raise SimulationFailed(f"{names} did not end within {ARM_TIMEOUT_S:g} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(timeout=1.0)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
