# SPDX-License-Identifier: Apache-2.0
"""Check mode on SGLang's own model of the `small` geometry: `python check_run.py FOLDER RUNTIME CASES [MXFP4]`.

RUNTIME `double` runs the launches by their definitions, `simulator` as compiled. CASES is a comma-separated list of
names in `CASES`. MXFP4 names projections that are MXFP4, see `checkpoint.write`. SGLang's runtime is one a process, so
this is a process of its own; the last line of its output is JSON, {case: result}.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

LENGTHS = (5, 6, 7)  # requests of a batch differ in their length
PROMPTS = [[10 * row + 5 + i for i in range(LENGTHS[row % len(LENGTHS)])] for row in range(8)]
OTHER_PROMPTS = [[7, 8, 9, 10, 11], [91, 92, 93, 94, 95, 96], [81, 82, 83, 84, 85, 86, 87],
                 *([20 * row + 3 + i for i in range(LENGTHS[row % len(LENGTHS)])] for row in range(3, 8))]  # fmt: skip
TOKENS = [1, 7, 3, 9, 2, 8, 4, 6]


class Lines(logging.Handler):
    """Keeps the package's log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Bench:
    """The loaded model, its step object, and a fresh check mode for each case."""

    def __init__(self, loaded: Any, step: Any) -> None:
        from sgl_amd_mono.qwen38_a95b_mxfp4.spec import NUMERICS

        self.loaded, self.step, self.runtime, self.bounds = loaded, step, step.runtime, dict(NUMERICS.bounds)
        self.log = Lines()
        for name in ("sgl_amd_mono.common.check",):
            logger = logging.getLogger(name)
            logger.setLevel(logging.INFO)
            logger.addHandler(self.log)

    def check(self) -> Any:
        """A new check mode on the step object; the one before it is taken off."""
        from sgl_amd_mono.common.check import Checker
        from sgl_amd_mono.qwen38_a95b_mxfp4.check import LayerComparison

        self.step.__dict__.pop("forward", None)
        self.step.before_launch.clear(), self.step.observers.clear(), self.step.closing.clear()
        self.log.lines.clear()
        checker = Checker(LayerComparison(self.bounds), self.bounds)
        checker.attach(self.step)
        return checker

    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the conv and SSM states of all slots."""
        cache = self.loaded.model_runner.req_to_token_pool.mamba_pool.mamba_cache
        return cache.conv[0].clone(), cache.temporal.clone()

    def decode(self, prompts: list[list[int]], width: int | None = None, steps: int = 1) -> torch.Tensor:
        self.loaded.prefill(prompts)
        tokens = torch.tensor(TOKENS[: len(prompts)])
        return torch.stack([self.loaded.decode(tokens + i, width) for i in range(steps)])


def batch(rows: int, width: int | None = None) -> Callable[[Bench], Any]:
    """Decode steps within bounds; what the report and the log say, and that checking changes nothing."""

    def run(bench: Bench) -> Any:
        bench.step.__dict__.pop("forward", None)
        bench.step.before_launch.clear(), bench.step.observers.clear()
        plain, states = bench.decode(PROMPTS[:rows], width), bench.states()
        checker = bench.check()
        checked = bench.decode(PROMPTS[:rows], width)
        checker.close()
        report = checker.report
        return {
            "equal": bool(torch.equal(plain, checked)),
            "states equal": all(map(torch.equal, states, bench.states())),
            "steps": report.steps,
            "launches": report.launches,
            "rows": report.rows,
            "set aside": report.set_aside,
            "seen": sorted(report.worst),
            "log": bench.log.lines.copy(),
        }

    return run


#: planted mistake -> (launch and layer, argument, change made to a copy that only the launch reads)
MISTAKES: dict[str, tuple[str, int, str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "weight": ("k1", 1, "w_qkvz", lambda t: t.roll(1, 0)),
    "scale": ("k2", 2, "w13_scale", lambda t: t + 2),
    "residual": ("k1", 2, "residual", lambda t: t * 1.01),  # and of z, which holds it where K1's norm starts from z
    "residual of K2": ("k2", 1, "residual", lambda t: t * 1.05),
    "state row": ("k1", 0, "ssm_state", lambda t: t),
}
MXFP4_MISTAKES = {
    "code": ("k1", 1, "w_qkvz_scale", lambda t: t.roll(1, 1)),
    "code of K2": ("k2", 3, "w_o_scale", lambda t: t.roll(1, 1)),
}


def mistake(name: str) -> Callable[[Bench], Any]:
    """The lines of a step in which one launch is given a wrong operand, or has one state row spoiled."""

    def run(bench: Bench) -> Any:
        kind, layer, argument, change = (MISTAKES | MXFP4_MISTAKES)[name]
        original = bench.runtime.launch

        def launch(kernel: Any, args: Any) -> None:
            names = [n for n, _ in kernel.key.abi]
            both = kernel.key.launch == "k2k1"  # K2 and the next K1, whose arguments have a prefix there
            prefix = "front_" if both and kind == "k1" else ""
            slot = {"k1": 0, "k2": 128}[kind] + layer
            if (both or kernel.key.launch == kind) and args[names.index(prefix + "layer_slot")] == slot:
                args = list(args)
                at = names.index(prefix + argument)
                if name != "state row":
                    args[at] = change(args[at])
                if name == "residual":
                    args[names.index("z")] = change(args[names.index("z")])
                original(kernel, args)
                if name == "state row":
                    row = int(args[names.index(prefix + "state_index")][1])
                    args[at][row, 3] *= -1.0
            else:
                original(kernel, args)

        checker = bench.check()
        bench.runtime.launch = launch
        block = bench.step.peers.memory if hasattr(bench.step.peers, "memory") else bench.step.peers.tensor
        before = block.clone()
        try:
            bench.decode(PROMPTS[:3])
            return {"error": "", "log": bench.log.lines.copy()}
        except RuntimeError as error:
            found = {"error": f"{type(error).__name__}: {error}", "log": bench.log.lines.copy()}
            return found | {"marked": bool((block != before).any()), "steps": checker.report.steps}
        finally:
            del bench.runtime.launch
            block.copy_(before)

    return run


TIED_LAYER = 2


def tie(bench: Bench) -> Any:
    """K2 of one layer picks expert b where SGLang picks a: with logits equal, and with logits that differ."""
    block = bench.loaded.model.model.layers[TIED_LAYER].mlp
    top_k, router = block.topk.topk_config.top_k, block.gate.weight.data
    given = router.clone()
    router.mul_(0.05)  # near logits: every pick has a weight that shows
    seen: list[torch.Tensor] = []
    hook = block.gate.register_forward_hook(lambda module, rows, result: seen.append(result[0].float()[0]))
    bench.check()
    bench.decode(PROMPTS[:1])
    hook.remove()
    order = torch.argsort(seen[-1], descending=True, stable=True).tolist()  # the check's own call, of the decode step
    a = order[top_k - 1]
    b = next(expert for expert in order[top_k:] if expert > a)  # on equal logits the lower id wins
    original, before = bench.runtime.launch, router.clone()

    def launch(kernel: Any, args: Any) -> None:
        names = [name for name, _ in kernel.key.abi]
        if kernel.key.launch == "k2" and args[names.index("layer_slot")] == 128 + TIED_LAYER:
            args, at = list(args), names.index("w_router")
            args[at] = before.clone()
            args[at][b], args[at][a] = before[a], -before[a]
        original(kernel, args)

    def step(checker: Any) -> str:
        bench.loaded.prefill(PROMPTS[:1])
        bench.runtime.launch = launch
        if tied:
            router[b] = router[a]
        try:
            bench.loaded.decode(torch.tensor(TOKENS[:1]))
            return ""
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            del bench.runtime.launch
            router.copy_(before)

    found: dict[str, Any] = {}
    block_of = bench.step.peers.memory if hasattr(bench.step.peers, "memory") else bench.step.peers.tensor
    unmarked = block_of.clone()
    for name, tied in (("tied", True), ("apart", False)):
        checker = bench.check()
        found[name] = {"first": step(checker), "set aside": checker.report.set_aside, "rows": checker.report.rows}
        found[name]["line"] = next((line for line in bench.log.lines if line.startswith("check step")), "")
        if tied:
            found[name]["second"] = step(checker)
        block_of.copy_(unmarked)
    router.copy_(given)
    return found


def replay(bench: Bench, rows: int = 3) -> Any:
    """A step captured under check mode and replayed with other requests in the same memory; a spoiled replay fails."""
    from helpers.replay import Recording

    model = bench.loaded.model
    checker = bench.check()
    installed = model.forward
    taken: dict[str, Any] = {}

    def capture(*args: Any, **kwargs: Any) -> Any:
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        if not batch.forward_mode.is_decode():
            return installed(*args, **kwargs)
        checker.capturing = lambda: True
        with Recording(bench.runtime) as recording:
            taken["result"] = installed(*args, **kwargs)
        checker.capturing = lambda: False
        taken.update(recording=recording, batch=batch, ids=args[0] if args else kwargs["input_ids"])
        return taken["result"]

    model.forward = capture
    bench.decode(PROMPTS[:rows])
    judged_in_capture = checker.report.launches
    recording, static, ids = taken["recording"], taken["batch"], taken["ids"]

    def again(*args: Any, **kwargs: Any) -> Any:
        """SGLang's next decode step by a replay: its inputs are copied into the captured batch's memory."""
        live = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        if not live.forward_mode.is_decode():
            return installed(*args, **kwargs)
        ids.copy_(args[0] if args else kwargs["input_ids"])
        for name in ("positions", "mrope_positions", "seq_lens", "req_pool_indices", "out_cache_loc"):
            if getattr(static, name) is not None:
                getattr(static, name).copy_(getattr(live, name))
        linear = bench.loaded.model_runner.attn_backend.linear_attn_backend
        recording.state_index.copy_(linear.forward_metadata.mamba_cache_indices)
        recording.replay()
        for spoil in spoiling:
            spoil()
        checker.replayed(rows)
        return taken["result"]

    kept = checker.captured[rows]
    slots = [kept[0].inputs["index"].tolist()]
    pool = bench.loaded.model_runner.req_to_token_pool
    clear = pool.clear

    def clear_and_shift() -> None:
        """The next requests get other state slots."""
        clear()
        pool.mamba_allocator.alloc(2)

    pool.clear = clear_and_shift
    spoiling: list[Callable[[], None]] = []
    model.forward = again
    replayed = bench.decode(OTHER_PROMPTS[:rows])
    report = checker.report
    slots.append(kept[0].inputs["index"].tolist())
    found = {
        "slots": slots,
        "judged in the capture": judged_in_capture,
        "launches": report.launches,
        "steps": report.steps,
        "launches recorded": recording.launches,
        "log": bench.log.lines.copy(),
    }
    spoiling.append(lambda: kept[2].outputs["state"].mul_(-1))
    try:
        bench.decode(OTHER_PROMPTS[:rows])
        found["spoiled"] = ""
    except RuntimeError as error:
        found["spoiled"] = f"{type(error).__name__}: {error}"
    model.forward = installed
    bench.check()
    eager = bench.decode(OTHER_PROMPTS[:rows])
    found["equal to eager"] = bool(torch.equal(replayed, eager))
    del pool.clear
    found["equal to the captured batch"] = bool(torch.equal(replayed, bench.decode(PROMPTS[:rows])))
    return found


def installed(bench: Bench) -> Any:
    """What the build attached, as `SGLANG_AMD_MONO_CHECK` of this process says."""
    step = bench.step
    bench.decode(PROMPTS[:1])
    return {
        "hooks": [len(step.before_launch), len(step.observers), len(step.closing)],
        "wrapped": "forward" in vars(step),
        "lines": sum(line.startswith("check step") for line in bench.log.lines),
    }


def formats(bench: Bench) -> Any:
    """Layer -> the formats of its K1 (GDN layers) and of its K2, as the step has bound them, of width 1."""
    bound = bench.step._widths[1]
    found = {layer: [at.kernel.key.projection] for layer, at in bound.k2.items()}
    for layer, at in bound.k1.items():
        found[layer] = [at.kernel.key.qkvz_format, at.kernel.key.ba_format, *found[layer]]
    return found


CASES: dict[str, Callable[[Bench], Any]] = {
    "installed": installed,  # first: each other case takes off what the build attached
    "1 row": batch(1),
    "3 rows": batch(3),
    "3 of 4 rows": batch(3, 4),
    "8 rows": batch(8),
    "tie": tie,
    "replay": replay,
    "replay of 1": partial(replay, rows=1),
    "replay of 8": partial(replay, rows=8),
    **{name: mistake(name) for name in MISTAKES},
    "formats": formats,
    **{name: mistake(name) for name in MXFP4_MISTAKES},
}


def main() -> int:
    folder, runtime, cases, *mxfp4 = sys.argv[1:]
    from helpers import spec_double

    if runtime == "simulator":
        from sgl_amd_mono.common.runtime import simulator_runtime

        spec_double.FACTORY = simulator_runtime
    spec_double.WIDTHS = (1, 3) if mxfp4 else spec_double.WIDTHS
    loaded = spec_double.load_sglang(Path(folder), *mxfp4)
    bench = Bench(loaded, spec_double.built_step(loaded.model))
    print(json.dumps({name: CASES[name](bench) for name in cases.split(",")}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
