# SPDX-License-Identifier: Apache-2.0
"""The entry point: what it registers, that it imports nothing heavy, and that it fails where the flag asks for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sgl_amd_mono

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "triton", "flydsl", "transformers", "sgl_amd_mono.qwen38_a95b_mxfp4.spec", "sgl_amd_mono.sim")

# A contract module of the same shape as SGLang's, so that the process under test loads nothing of SGLang.
CONTRACT = """
import sys, types
registry = {}
def register(*, backend, architecture, path):
    specs = registry.setdefault(backend, {})
    if specs.get(architecture, path) != path:
        raise ValueError(f"already has a spec for {architecture}: {specs[architecture]}")
    specs[architecture] = path
parts = "sglang.kernels.plugin_kernels.amd.spec".split(".")
for n in range(1, len(parts) + 1):
    module = sys.modules[".".join(parts[:n])] = types.ModuleType(".".join(parts[:n]))
    module.__path__ = []
module.BACKEND, module.register = "amd", register
"""


def python(code: str, *argv: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code, *argv],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("options", [(), ("-O",)])
def test_register_is_idempotent_and_light(options: tuple[str, ...]) -> None:
    done = python(
        CONTRACT + "import json, sgl_amd_mono\n"
        "sgl_amd_mono.register(); sgl_amd_mono.register()\n"
        f"print(json.dumps([registry, [m for m in {HEAVY!r} if m in sys.modules]]))",
        options=options,
    )
    assert done.returncode == 0, done.stderr
    registry, heavy = json.loads(done.stdout)
    assert registry == {"amd": sgl_amd_mono.SPECS}
    assert heavy == []


def test_heavy_imports_are_seen() -> None:
    """The control of the test above: loading a spec does load them."""
    done = python(f"import sys, torch\nprint([m for m in {HEAVY!r} if m in sys.modules])")
    assert "torch" in done.stdout


CONFLICT = (
    CONTRACT + "register(backend='amd', architecture='Qwen3_5MoeForCausalLM', path='other:SPEC')\n"
    "import sgl_amd_mono\n"
    "try:\n    sgl_amd_mono.register()\n"
    "except Exception as error:\n    print('logged', type(error).__name__)\n"
)


@pytest.mark.parametrize(
    "argv", [["--enable-amd-monokernel"], ["--monokernel-backend", "amd"], ["--monokernel-backend=amd"]]
)
def test_a_conflict_ends_the_process_that_asks_for_the_kernels(argv: list[str]) -> None:
    """SGLang catches an Exception of a plugin, logs it and serves without: SystemExit is none."""
    done = python(CONFLICT, "--model-path", "m", *argv)
    assert done.returncode == 1 and "logged" not in done.stdout
    for text in ("Qwen3_5MoeForCausalLM: other:SPEC", "SGLANG_PLUGINS=sgl_amd_mono", "sgl-amd-mono doctor"):
        assert text in done.stderr


@pytest.mark.parametrize("argv", [[], ["--monokernel-backend", "none"], ["--model-path", "--enable-amd-monokernelx"]])
def test_a_conflict_without_the_flag_is_left_to_sglang(argv: list[str]) -> None:
    done = python(CONFLICT, *argv)
    assert done.returncode == 0 and done.stdout == "logged ValueError\n"


def test_an_sglang_without_the_contract() -> None:
    hidden = "import sys\nsys.modules['sglang'] = None\nimport sgl_amd_mono\nsgl_amd_mono.register()"
    done = python(hidden, "--enable-amd-monokernel")
    assert done.returncode == 1 and "Needed: SGLang 0.5.23" in done.stderr and "ModuleNotFoundError" in done.stderr


def test_every_spec_path_names_a_monospec() -> None:
    """In a process of its own: importing a spec imports SGLang."""
    done = python(
        "import sys, sgl_amd_mono\n"
        "from sgl_amd_mono.simulate import harness\n"
        "harness.prepare()\n"
        "from sglang.kernels.plugin_kernels.amd.spec import find_spec\n"
        "sgl_amd_mono.register()\n"
        "for architecture in sgl_amd_mono.SPECS:\n"
        "    spec, why = find_spec(backend='amd', architectures=[architecture], isa='gfx950')\n"
        "    limits = spec.devices['gfx950']\n"
        "    features = sorted(feature.value for feature in spec.features)\n"
        "    print(spec.name, limits.widths, limits.tp_sizes, limits.resident_blocks, features, why)\n"
        "    print([m for m in sys.modules if (m + '.').startswith(('sgl_amd_mono.sim.', 'flydsl.'))])\n"
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # neither the simulator nor the compiler comes with the spec
    assert done.stdout.splitlines() == [
        "qwen38-a95b-mxfp4 (1, 2, 3, 4, 5, 6, 7, 8) (8,) 256 ['speculative decoding'] ",
        "[]",
    ]


def test_the_flydsl_range_is_the_one_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    first, past = sgl_amd_mono.FLYDSL_TESTED
    assert f"flydsl>={first},<{past}" in project["dependencies"]
    assert project["version"] == sgl_amd_mono.__version__
    assert project["entry-points"]["sglang.srt.plugins"] == {"sgl_amd_mono": "sgl_amd_mono:register"}
