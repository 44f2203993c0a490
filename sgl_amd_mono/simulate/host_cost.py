# SPDX-License-Identifier: Apache-2.0
"""Host cost of a decode step: calls and tensor allocations a layer, beside SGLang's own layer in the same process.

`sgl-amd-mono cost --host`. Both forwards run a decode step of SGLang's own model of the `small` geometry on one rank.
The plugin's runtime is the GPU's, down to the executor's launch, which does nothing here. `sys.setprofile` counts every
call of a Python or C function down to, and with, the first aten operation, Triton launch or kernel launch; what happens
inside of those is not counted. Tensors are counted in a step of their own, by a dispatch mode.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from sgl_amd_mono.common import build as building
from sgl_amd_mono.common.runtime import HipRuntime, Kernel, RuntimeRequest
from sgl_amd_mono.common.sync import FaultState

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16]]
LIMIT_S = 600.0
MOST = 0.5
"""Share of SGLang's calls and tensors that a layer of the plugin may have."""

_HERE = os.path.dirname(__file__)

#: Files whose functions are the device work itself: torch's operations, Triton, and what stands for its kernels.
_LEAVES = (
    os.path.join(os.sep, "torch", "_ops.py"),
    os.path.join(os.sep, "triton", ""),
    *(os.path.join(_HERE, name) for name in ("gdn_standin.py", "aiter_standin.py", "sums.py")),
)


@dataclass
class Count:
    """Of one layer.

    Attributes:
        kind: "gdn" or "attention".
        python, c: calls of Python and of C functions.
        tensors: tensors whose memory was allocated.
    """

    kind: str
    python: int = 0
    c: int = 0
    tensors: int = 0

    @property
    def calls(self) -> int:
        """Of Python and of C functions."""
        return self.python + self.c


class Counter:
    """Counts calls, or tensors, into the layer that runs.

    Args:
        kinds: kind of each layer.
        scopes: module -> layer: its calls are counted from the module's call to its return. Without them the layer
            that runs is what `layer` says, from the first one at the call of `start`.
    """

    def __init__(
        self, kinds: Sequence[str], scopes: dict[int, int] | None = None, start: CodeType | None = None
    ) -> None:
        self.counts = [Count(kind) for kind in kinds]
        self.layer: int | None = None
        self._scopes, self._start = scopes or {}, start
        self._depth = 0
        self._leaf: int | None = None  # depth of the device work that runs
        self._kernel = False  # whether that is a kernel, which is no operation of torch
        self._scope: int | None = None  # depth of the module that is counted

    @property
    def into(self) -> Count | None:
        """The layer that runs."""
        return None if self.layer is None or self.layer >= len(self.counts) else self.counts[self.layer]

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Count calls inside."""
        before = sys.getprofile()
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(before)

    @contextmanager
    def tensors(self) -> Iterator[None]:
        """Count tensors inside; the layer still comes from the calls."""
        with _Allocations(self), self.calls():
            yield

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("return", "c_return", "c_exception"):
            if self._leaf == self._depth:
                self._leaf, self._kernel = None, False
            if self._scope == self._depth:
                self._scope = self.layer = None
            self._depth -= 1
            return
        self._depth += 1
        if self._leaf is not None:
            return
        if event == "c_call":
            self._leaf = self._depth if _is_torch(argument) else None
            if self.into is not None:
                self.into.c += 1
            return
        name = frame.f_code.co_filename
        if name in (__file__, _DISPATCH_MODE):
            return
        if frame.f_code is self._start:
            self.layer = 0
        module = frame.f_locals.get("self") if frame.f_code is _MODULE_CALL else None
        if self._scope is None and id(module) in self._scopes:
            self._scope, self.layer = self._depth, self._scopes[id(module)]
        if any(leaf in name for leaf in _LEAVES):
            self._leaf, self._kernel = self._depth, not name.endswith("_ops.py")
        if self.into is not None:
            self.into.python += 1


class _Allocations(TorchDispatchMode):
    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        if self._counter.into is not None and not self._counter._kernel:
            made = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
            self._counter.into.tensors += sum(t.untyped_storage().data_ptr() not in given for t in made)
        return result


_DISPATCH_MODE = sys.modules[TorchDispatchMode.__module__].__file__
_MODULE_CALL = torch.nn.Module._wrapped_call_impl.__code__


def _is_torch(function: Any) -> bool:
    """Whether a C function is torch's: an operation, or a method of a tensor."""
    owner = getattr(function, "__self__", None)
    return isinstance(owner, torch.Tensor) or str(getattr(function, "__module__", None) or "").startswith("torch")


# ---- the plugin's side: the GPU's runtime, whose executor launches nothing


class _Peers:
    def __init__(self, nbytes: int) -> None:
        self.table = torch.zeros(1, dtype=torch.int64)

    def fault_state(self) -> FaultState:
        return FaultState(0, ())

    def mark_failed(self) -> None:
        """There is no other rank."""

    def close(self) -> None:
        """Nothing is held."""


class IdleRuntime(HipRuntime):
    """`HipRuntime` down to the executor; `launched(kernel name)` is called where that would launch."""

    def __init__(self, request: RuntimeRequest) -> None:
        super().__init__(request, torch=_TorchWithStream())
        self.launched: Callable[[str], None] = lambda name: None

    def build(self, keys: Sequence[Any]) -> list[Kernel]:
        """Kernels without code."""
        from sgl_amd_mono.common._flydsl import HipLauncher

        kernels = []
        for key in keys:
            offsets = [8 * place for place in range(len(key.abi))]
            arguments = tuple(
                building.Argument(name, kind, at, building.ARGUMENT_BYTES[kind])
                for (name, kind), at in zip(key.abi, offsets, strict=True)
            )
            resources = building.Resources(0, 0, 0, 0, 0, 0, 0, 0)
            artifact = building.Artifact(key.name, "", arguments, 8 * len(offsets), key.grid, key.block, resources, 0.0)

            def run(packed: Any, name: str = key.name) -> None:
                self.launched(name)

            kernels.append(Kernel(key, artifact, HipLauncher("", key.name, key.abi, run=run)))
        return kernels

    def peer_buffer(self, nbytes: int, group: Any) -> Any:
        """Memory of one rank."""
        return _Peers(nbytes)

    def synchronize(self) -> None:
        """Nothing runs."""


class _TorchWithStream:
    """`torch` whose current GPU stream is a constant."""

    def __init__(self) -> None:
        self.cuda, self._stream = self, SimpleNamespace(cuda_stream=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def current_stream(self, device: Any) -> Any:
        """A stream with handle 0."""
        return self._stream


# ---- both sides


@dataclass
class Compared:
    """A layer of the plugin beside SGLang's."""

    plugin: Count
    sglang: Count

    @property
    def share(self) -> float:
        """The plugin's calls as a share of SGLang's."""
        return self.plugin.calls / self.sglang.calls


def measure(loaded: Any, step: Any, hook: Callable[[Callable[[str], None]], None]) -> list[Compared]:
    """A decode step of each side, for every layer.

    Args:
        loaded: `runner.SglangModel` with the plugin on an `IdleRuntime`.
        step: what the plugin's build returned.
        hook: takes what is to be called at each launch.
    """
    model, installed = loaded.model, loaded.model.forward
    views = step.view.layers
    kinds = [view.kind for view in views]

    def decode() -> None:
        loaded.decode(torch.zeros(len(PROMPTS), dtype=torch.int64))

    def counted(counter: Counter) -> Counter:
        def launched(name: str) -> None:
            if counter.into is not None:
                counter.into.c += 1
            if counter.layer is not None and "_k2_" in name:
                counter.layer += 1

        hook(launched)
        loaded.prefill(PROMPTS)
        decode()  # what is looked up once has been
        with counter.calls():
            decode()
        calls = [Count(c.kind, c.python, c.c) for c in counter.counts]
        with counter.tensors():
            decode()
        for count, tensors in zip(calls, counter.counts, strict=True):
            count.tensors = tensors.tensors
        counter.counts = calls
        return counter

    plugin = counted(Counter(kinds, start=type(step)._layers.__code__)).counts
    try:
        model.forward = step.original
        sglang = counted(Counter(kinds, {id(view.module): place for place, view in enumerate(views)})).counts
    finally:
        model.forward = installed
    return [Compared(*pair) for pair in zip(plugin, sglang, strict=True)]


def too_much(layers: Sequence[Compared]) -> list[str]:
    """A line for each layer of the plugin that has more than `MOST` of SGLang's calls or any tensor of its own."""
    wrong = []
    for place, layer in enumerate(layers):
        if place and layer.share > MOST:
            wrong.append(
                f"layer {place} ({layer.plugin.kind}): {layer.plugin.calls} calls, {layer.share:.0%} of SGLang's "
                f"{layer.sglang.calls}, at most {MOST:.0%}"
            )
        if place and layer.plugin.kind == "gdn" and layer.plugin.tensors:
            wrong.append(f"layer {place} (gdn): {layer.plugin.tensors} tensors are allocated, none may be")
    return wrong


def render(layers: Sequence[Compared]) -> str:
    """A table, one line a layer."""
    lines = [
        "Host cost of a decode step, a layer (Python + C calls down to the first aten, Triton or kernel launch; "
        "tensors allocated):",
        f"  {'layer':<12} {'plugin calls':>18} {'tensors':>8} {'SGLang calls':>18} {'tensors':>8} {'share':>7}",
    ]
    for place, layer in enumerate(layers):
        cells = [
            cell
            for side in (layer.plugin, layer.sglang)
            for cell in (f"{side.python} + {side.c} = {side.calls}", side.tensors)
        ]
        lines.append(
            f"  {f'{place} {layer.plugin.kind}':<12} {cells[0]:>18} {cells[1]:>8} {cells[2]:>18} {cells[3]:>8} "
            f"{layer.share:>7.0%}"
        )
    lines.append("  layer 0 holds the step's own work too; attention up to o_proj is SGLang's on both sides")
    return "\n".join(lines)


def as_dict(layers: Sequence[Compared]) -> list[dict[str, Any]]:
    """What `--json` prints."""
    return [{"plugin": asdict(layer.plugin), "sglang": asdict(layer.sglang), "share": layer.share} for layer in layers]


_RUNTIMES: list[IdleRuntime] = []


def idle_runtime(request: RuntimeRequest) -> IdleRuntime:
    """Runtime factory for `plugin.RUNTIME_VARIABLE`."""
    _RUNTIMES.append(IdleRuntime(request))
    return _RUNTIMES[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m sgl_amd_mono.simulate.host_cost FOLDER`, in the environment of `run`; the last line is JSON."""
    folder = Path((arguments or sys.argv[1:])[0])
    from sgl_amd_mono.simulate import checkpoint, plugin
    from sgl_amd_mono.simulate.runner import Rank, SglangModel

    loaded = SglangModel(checkpoint.write(folder / "model"), True, Rank())
    runtime = sys.modules["sgl_amd_mono.simulate.host_cost"]._RUNTIMES[-1]

    def hook(launched: Callable[[str], None]) -> None:
        runtime.launched = launched

    layers = measure(loaded, plugin.BUILT[-1], hook)
    print(json.dumps([[asdict(layer.plugin), asdict(layer.sglang)] for layer in layers]))
    return 0


def run(runtime: str = f"{__name__}:idle_runtime") -> list[Compared]:
    """`measure` in a process of its own.

    Args:
        runtime: `module:factory` of an `IdleRuntime`.

    Raises:
        RuntimeError: it failed; the message ends with what it wrote.
    """
    from sgl_amd_mono.simulate import harness, plugin

    with tempfile.TemporaryDirectory(prefix="sgl_amd_mono_host_cost_") as folder:
        environment = plugin.environment(Path(folder) / "entry_point", "consistent", 0, (2,))
        environment |= {
            plugin.RUNTIME_VARIABLE: runtime,
            harness.STOCK_VARIABLE: "torch",
        }
        done = subprocess.run(
            [sys.executable, "-m", __name__, folder], env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    if done.returncode:
        raise RuntimeError(f"the host cost could not be measured:\n{done.stderr[-4000:]}")
    return [Compared(Count(**ours), Count(**theirs)) for ours, theirs in json.loads(done.stdout.splitlines()[-1])]


if __name__ == "__main__":
    raise SystemExit(main())
