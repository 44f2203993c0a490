# SPDX-License-Identifier: Apache-2.0
"""SGLang's model with the spec's forward, K1 and K2 by their definitions: what the forward itself does, as JSON.

Runs as a process of its own (SGLang's runtime is one a process): `python spec_forward.py FOLDER`; the last line of
its output is {check: result}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from sgl_amd_mono.common.sync import ERROR_OFFSET

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13, 14, 15], [3, 4, 5, 6, 7]]
TOKENS = [[1, 2, 3], [7, 8, 9]]


class Run:
    """One prefill and the decode steps of `TOKENS`, through the plugin's forward or SGLang's own."""

    def __init__(self, loaded: Any, step: Any) -> None:
        self.loaded, self.step = loaded, step
        self.plugin = loaded.model.forward

    def __call__(self, *, plugin: bool, width: int | None = None, prompts: list[list[int]] = PROMPTS) -> Any:
        """float32 logits [steps, requests, vocab] of the decode steps."""
        self.loaded.model.forward = self.plugin if plugin else self.step.original
        try:
            self.loaded.prefill(prompts)
            rows = len(prompts)
            return torch.stack([self.loaded.decode(torch.tensor(t[:rows]), width) for t in TOKENS])
        finally:
            self.loaded.model.forward = self.plugin


def pool_of(loaded: Any) -> Any:
    return loaded.model_runner.req_to_token_pool.mamba_pool.mamba_cache


def checks(folder: Path) -> dict[str, Any]:
    from helpers import spec_double

    loaded = spec_double.load_sglang(folder)
    model, step = loaded.model, spec_double.built_step(loaded.model)
    runtime = spec_double.RUNTIMES[-1]
    run, found = Run(loaded, step), {}

    found["warm-up"] = [[kind, a["mode"], a["layer_slot"]] for kind, a in runtime.calls]
    found["deadline ticks"] = runtime.calls[0][1]["deadline_ticks"]

    # the step's launches, in order, and what they were given
    runtime.calls.clear()
    epoch = int(step._epoch)
    on = run(plugin=True)
    found["launches"] = [
        [kind, a["layer_slot"], a["mode"], a.get("last", -1), isinstance(a["residual"], torch.Tensor)]
        for kind, a in runtime.calls
    ]
    found["steps"], found["passed on"] = step.steps, step.passed_on
    found["epochs"] = int(step._epoch) - epoch
    found["aliased"] = aliased(runtime.calls)

    off = run(plugin=False)
    difference = (on - off).abs().amax(dim=-1)
    found["rows equal"] = int((difference == 0).sum())
    found["rows"] = difference.numel()
    found["first step"] = float(difference[0].max() / off[0].abs().max())
    found["cosine"] = float(torch.nn.functional.cosine_similarity(on, off, dim=-1).min())
    # control: the same comparison notices another prompt
    other = run(plugin=False, prompts=[[9, 9, 9, 9, 9], *PROMPTS[1:]])
    found["control cosine"] = float(torch.nn.functional.cosine_similarity(on, other, dim=-1).min())

    found["again"] = bool(torch.equal(run(plugin=True), on))
    # pad rows: the same rows, and slot 0 and free slots untouched although they are poisoned
    cache = pool_of(loaded)
    for width in (4, 8):
        cache.temporal[:, 0], cache.conv[0][:, 0] = float("nan"), float("nan")
        found[f"padded to {width}"] = bool(torch.equal(run(plugin=True, width=width), on))
        found[f"slot 0 after {width}"] = bool(cache.temporal[:, 0].isnan().all() and cache.conv[0][:, 0].isnan().all())
        cache.temporal[:, 0], cache.conv[0][:, 0] = 0, 0
    found["moved pool"] = moved_pool(loaded, run, on)
    found["swapped weight"] = swapped_weight(model, run, on)
    found["single row"] = bool(torch.equal(run(plugin=True, prompts=PROMPTS[:1])[:, 0], on[:, 0]))

    found.update(uncovered(loaded, step, run))
    found.update(observers(step, run))
    found["tracking"] = tracking(loaded, step, run)
    found["fault"] = fault(step, run)
    found["refused pools"] = refused_pools(loaded, step)
    step.close()
    found["closed"] = runtime.closed
    return found


def aliased(calls: list[tuple[str, dict[str, Any]]]) -> int:
    """Launches whose output shares memory with an input of theirs."""
    count = 0
    for kind, a in calls:
        inputs = ("hidden", "residual") if kind == "k1" else ("core", "residual")
        outputs = ("core", "residual_out") if kind == "k1" else ("out", "residual_out")
        given = {a[n].untyped_storage().data_ptr() for n in inputs if isinstance(a[n], torch.Tensor)}
        written = [a[n].untyped_storage().data_ptr() for n in outputs]
        count += bool(given & set(written)) or len(set(written)) != len(written)
    return count


def moved_pool(loaded: Any, run: Run, expected: torch.Tensor) -> bool:
    """A pool that SGLang allocates anew is found at the next step; launches get the new addresses."""
    pool = loaded.model_runner.req_to_token_pool.mamba_pool
    before = pool.mamba_cache
    conv, temporal = before.conv[0].clone(), before.temporal.clone()
    before.conv[0].zero_(), before.temporal.zero_()
    object.__setattr__(pool, "mamba_cache", type(before)(conv=[conv], temporal=temporal))
    try:
        same = bool(torch.equal(run(plugin=True), expected))
        return same and temporal.any().item() and not before.temporal.any() and not before.conv[0].any()
    finally:
        object.__setattr__(pool, "mamba_cache", before)


def swapped_weight(model: Any, run: Run, expected: torch.Tensor) -> bool:
    """SGLang may replace a parameter's data after build (it packs in_proj_ba so): the new pointer is the one read."""
    parameter = model.model.layers[0].linear_attn.in_proj_ba.weight
    before = parameter.data
    parameter.data = before.clone().mul_(1.5)
    changed = run(plugin=True)
    parameter.data = before
    return not torch.equal(changed, expected) and bool(torch.equal(run(plugin=True), expected))


def uncovered(loaded: Any, step: Any, run: Run) -> dict[str, Any]:
    """Calls that are not covered run SGLang's own forward: counted, and with its result."""
    model, found = loaded.model, {}
    arguments = {
        "input_embeds": lambda fb: {"input_embeds": model.model.embed_tokens(fb.input_ids)},
        "get_embedding": lambda fb: {"get_embedding": True},
    }
    for name, more in arguments.items():
        before = step.passed_on, step.steps
        seen = call_forward(loaded, run.plugin, more)
        found[f"passed on: {name}"] = [step.passed_on - before[0], step.steps - before[1], seen]
    model.capture_aux_hidden_states = True
    try:
        before = step.passed_on, step.steps
        run(plugin=True)
        found["passed on: aux hidden states"] = [step.passed_on - before[0], step.steps - before[1], True]
    finally:
        model.capture_aux_hidden_states = False
    return found


def call_forward(loaded: Any, forward: Any, more: Any) -> bool:
    """One decode step whose call carries an optional argument; whether logits came back."""
    model = loaded.model

    def with_more(*args: Any, **kwargs: Any) -> Any:
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        return forward(*args, **(kwargs | (more(batch) if batch.forward_mode.is_decode() else {})))

    model.forward = with_more
    try:
        loaded.prefill(PROMPTS)
        return bool(torch.isfinite(loaded.decode(torch.tensor(TOKENS[0]))).all())
    finally:
        model.forward = forward


def observers(step: Any, run: Run) -> dict[str, Any]:
    """Observers see each launch once, before and after, with the arguments by name."""
    seen: list[tuple[str, str, int, int]] = []
    step.before_launch.append(lambda e: seen.append(("before", e.kind, e.layer, e.width)))
    step.observers.append(lambda e: seen.append(("after", e.kind, e.layer, e.args["residual_out"].shape[0])))
    run(plugin=True)
    step.before_launch.clear()
    step.observers.clear()
    count = len(seen)
    run(plugin=True)
    return {"observed": seen[:4], "observed in all": count, "observed after": len(seen) - count}


def tracking(loaded: Any, step: Any, run: Run) -> dict[str, Any]:
    """With a prefix cache the states of marked rows are copied after the GDN layers, as SGLang's own decode copies."""
    calls: list[tuple[int, bool]] = []
    linear = loaded.model_runner.attn_backend.linear_attn_backend
    original = linear._track_mamba_state_decode

    def record(forward_batch: Any, conv: Any, ssm: Any, indices: Any, layer: int) -> None:
        state = linear.req_to_token_pool.mamba2_layer_cache(layer)
        calls.append(
            (layer, conv.data_ptr() == state.conv[0].data_ptr() and ssm.data_ptr() == state.temporal.data_ptr())
        )

    linear._track_mamba_state_decode = record
    marks: list[Any] = []

    def mark(event: Any) -> None:
        if marks:
            event.forward_batch.mamba_track_mask = marks[0]

    step.before_launch.append(mark)
    try:
        run(plugin=True)
        unmarked = len(calls)
        marks.append(torch.ones(3, dtype=torch.bool))
        run(plugin=True)
    finally:
        linear._track_mamba_state_decode = original
        step.before_launch.clear()
    return {"unmarked": unmarked, "calls": calls}


def fault(step: Any, run: Run) -> str:
    """An error word in the fault block: a build that returns from a lost wait raises before SGLang sees the logits."""
    block = step.peers.memory.view(torch.int32)
    before = block.clone()
    block[ERROR_OFFSET // 4] = 1
    try:
        run(plugin=True)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        block.copy_(before)
    return ""


def refused_pools(loaded: Any, step: Any) -> str:
    """A pool of another dtype than built for is refused at the first step, with the fix."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    pool = loaded.model_runner.req_to_token_pool.mamba_pool
    before = pool.mamba_cache
    conv = [before.conv[0].float()]
    object.__setattr__(pool, "mamba_cache", type(before)(conv=conv, temporal=before.temporal.to(torch.bfloat16)))
    try:
        with forward_context(ForwardContext(attn_backend=loaded.model_runner.attn_backend)):
            step._pools.begin(1)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        object.__setattr__(pool, "mamba_cache", before)
    return ""


if __name__ == "__main__":
    print(json.dumps(checks(Path(sys.argv[1]))))
