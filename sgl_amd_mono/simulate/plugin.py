# SPDX-License-Identifier: Apache-2.0
"""The entry point that SGLang loads in a simulated run, in every process, in the place of the installed plugin.

SGLang takes one spec an architecture, so this one (the ``small`` geometry at TP 1 and 2, built by the same code, run by
the simulator) is registered alone: ``environment`` names it in SGLANG_PLUGINS, which keeps the installed one out.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sgl_amd_mono.simulate.harness import ATTENTION, MOE_VARIABLE, STOCK_VARIABLE

ENTRY_POINT = "sgl_amd_mono_simulate"
"""Name of the entry point, and what SGLANG_PLUGINS is set to."""

ARCHITECTURE = "Qwen3_5MoeForCausalLM"

MEMORY_MODEL_VARIABLE = "SGLANG_AMD_MONO_SIMULATE_MEMORY_MODEL"
SEED_VARIABLE = "SGLANG_AMD_MONO_SIMULATE_SEED"
WIDTHS_VARIABLE = "SGLANG_AMD_MONO_SIMULATE_WIDTHS"
"""How a run tells SGLang's processes which memory model and seed to simulate with, and which widths to build."""

RUNTIME_VARIABLE = "SGLANG_AMD_MONO_SIMULATE_RUNTIME"
"""``module:factory`` of another runtime than the simulator (tests run the launches by their definitions)."""


def environment(
    folder: Path,
    memory_model: str,
    seed: int,
    widths: tuple[int, ...],
    spawned: bool = False,
    stock: str | None = None,
    moe: str | None = None,
) -> dict[str, str]:
    """Environment of SGLang's processes. Writes the entry point's metadata into ``folder``, put on PYTHONPATH.

    ``spawned``: processes that SGLang itself starts import SGLang before any plugin of it is loaded, so Python prepares
    them as it starts (``sitecustomize``). ``stock``, ``moe``: what SGLang's Triton kernels and AITER's MoE run as
    (``harness.STOCK``, ``harness.MOE``); None: as this process' environment says.
    """
    metadata = folder / f"{ENTRY_POINT}-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {ENTRY_POINT}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{ENTRY_POINT} = {__name__}:register\n")
    if spawned:
        start = "from sgl_amd_mono.simulate.harness import prepare\n\nprepare()\n"
        (folder / "sitecustomize.py").write_text(start)
    package_root = Path(__file__).resolve().parents[2]
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(package_root), *inherited]),
        "SGLANG_PLUGINS": ENTRY_POINT,
        "CUDA_VISIBLE_DEVICES": "",  # a GPU of this machine is none of gfx950's, and is left alone
        MEMORY_MODEL_VARIABLE: memory_model,
        SEED_VARIABLE: str(seed),
        WIDTHS_VARIABLE: ",".join(map(str, widths)),
        **({STOCK_VARIABLE: stock} if stock else {}),
        **({MOE_VARIABLE: moe} if moe else {}),
    }


def register() -> None:
    """What SGLang calls: put the harness in place, and register the simulated spec."""
    from sgl_amd_mono.simulate import harness

    harness.install()
    from sglang.kernels.plugin_kernels.amd.spec import BACKEND
    from sglang.kernels.plugin_kernels.amd.spec import register as register_spec

    register_spec(backend=BACKEND, architecture=ARCHITECTURE, path=f"{__name__}:SPEC")


announce: Callable[[str], None] = lambda text: None  # noqa: E731
"""Where progress goes; set by a process that shows it."""

BUILT: list[Any] = []
"""What ``build`` returned in this process: the plugin's Step of the loaded model."""


def _runtime_factory() -> Any:
    other = os.environ.get(RUNTIME_VARIABLE)
    if other:
        module, _, attribute = other.partition(":")
        return getattr(importlib.import_module(module), attribute)
    from sgl_amd_mono.common.runtime import simulator_runtime

    memory, seed = os.environ.get(MEMORY_MODEL_VARIABLE, "consistent"), int(os.environ.get(SEED_VARIABLE, "0"))

    def factory(request: Any) -> Any:
        runtime = simulator_runtime(request, memory=memory, seed=seed)
        build = runtime.build

        def announced(keys: Any) -> Any:
            announce(f"builds {len(keys)} kernels for {request.isa}, or takes them from the cache")
            return build(keys)

        runtime.build = announced
        return runtime

    return factory


@functools.cache
def spec() -> Any:
    """The simulated spec; its ``build`` also keeps what it built in ``BUILT``."""
    import msgspec
    from sglang.kernels.plugin_kernels.amd.spec import Requirements

    from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
    from sgl_amd_mono.qwen38_a95b_mxfp4.spec import make_spec

    made = make_spec(
        name="qwen38-a95b-mxfp4-simulated",
        geometries={"small": Geometry.small},
        tp_sizes=(1, 2),
        widths=tuple(int(width) for width in os.environ[WIDTHS_VARIABLE].split(",")),
        runtime_factory=_runtime_factory(),
        stop=False,
        requires=Requirements(dtypes=frozenset({"bfloat16"}), attention_backends=frozenset(ATTENTION.values())),
        environment={},
    )

    def build(model: Any, hf_config: Any, context: Any) -> Any:
        BUILT.append(made.build(model, hf_config, context))
        return BUILT[-1]

    return msgspec.structs.replace(made, build=build)


def __getattr__(name: str) -> Any:
    """``SPEC`` is made when SGLang asks for it: making it imports the spec's module."""
    if name == "SPEC":
        return spec()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
