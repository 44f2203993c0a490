# SPDX-License-Identifier: Apache-2.0
"""The package's metadata, pins and files agree with each other and with the code."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sgl_amd_mono

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "sgl_amd_mono"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
SOURCES = sorted(PACKAGE.rglob("*.py"))
PIN_FILES = ("torch.txt", "cpu.txt", "sglang.txt", "aiter.txt", "test.txt", "dev.txt")
HEAVY = ("torch", "sglang", "flydsl", "triton", "numpy", "aiter", "transformers")
OUR_VARIABLE = re.compile(r"[\"'](SGL(?:ANG)?_AMD_MONO_[A-Z_]+)[\"']")
INTERNAL_VARIABLE = "SGLANG_AMD_MONO_SIMULATE_"  # `simulate` sets these for its own child processes


def run_python(code: str, *flags: str) -> str:
    """Return what a fresh interpreter prints."""
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout


def pins(name: str) -> dict[str, str]:
    """Return {distribution: version} of a requirements file whose lines are all exact."""
    found = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line and not line.startswith("#"):
            distribution, separator, version = line.partition("==")
            assert separator and re.fullmatch(r"[\w.+]+", version), f"requirements/{name}: {line!r} is not an exact pin"
            found[distribution.lower().replace("_", "-")] = version
    return found


def test_version_is_the_metadata_s():
    assert PROJECT["project"]["version"] == sgl_amd_mono.__version__


def test_flydsl_range_is_the_tested_one():
    low, high = sgl_amd_mono.FLYDSL_TESTED
    assert PROJECT["project"]["dependencies"] == [f"flydsl>={low},<{high}"]
    pinned = tuple(map(int, pins("cpu.txt")["flydsl"].split(".")))
    assert tuple(map(int, low.split("."))) <= pinned < tuple(map(int, high.split(".")))


@pytest.mark.parametrize("name", PIN_FILES)
def test_pins_are_exact_and_installed(name: str):
    from importlib.metadata import version

    for distribution, pinned in pins(name).items():
        assert version(distribution).split("+")[0] == pinned, f"{distribution}: requirements/{name} pins {pinned}"


def test_no_pin_twice():
    names = [name for file in PIN_FILES for name in pins(file)]
    assert sorted({n for n in names if names.count(n) > 1}) == []


def test_every_source_that_the_c_library_needs_is_package_data():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["sgl_amd_mono"]
    covered = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    others = {
        path
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and not any(p.startswith(".") for p in path.parts)
    }
    assert others <= covered, f"not installed by pip: {sorted(str(p.relative_to(ROOT)) for p in others - covered)}"


def test_every_folder_of_python_files_is_a_package():
    folders = {path.parent for path in SOURCES}
    missing = [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").is_file()]
    assert missing == [], "setuptools leaves folders without __init__.py out of the wheel"


def test_entry_points_resolve():
    scripts = PROJECT["project"]["scripts"]
    plugins = PROJECT["project"]["entry-points"]["sglang.srt.plugins"]
    assert set(scripts) == {"sgl-amd-mono"} and set(plugins) == {"sgl_amd_mono"}
    for target in (*scripts.values(), *plugins.values()):
        module, _, attribute = target.partition(":")
        assert "True" in run_python(f"import {module} as m; print(callable(m.{attribute}))")


def test_importing_the_package_loads_nothing_heavy():
    loaded = run_python("import sys, sgl_amd_mono, sgl_amd_mono.cli; print(*sys.modules)").split()
    assert [name for name in HEAVY if name in loaded] == []


def test_the_readme_documents_every_variable_that_is_read():
    read = {name for path in SOURCES for name in OUR_VARIABLE.findall(path.read_text())}
    read = {name for name in read if not name.startswith(INTERNAL_VARIABLE)}
    assert read, "no variable was found: the pattern is wrong"
    assert [name for name in sorted(read) if name not in README] == []
    # SGLang calls every SGL_ variable deprecated, with a warning at each start
    assert [name for name in read if name.startswith("SGL_")] == []


def test_the_readme_s_links_lead_somewhere():
    headings = {
        re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", README, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_every_model_has_its_row_and_its_owner():
    owners = (ROOT / ".github" / "CODEOWNERS").read_text()
    for architecture, path in sgl_amd_mono.SPECS.items():
        folder = path.split(":")[0].split(".")[1]
        assert f"`{architecture}`" in README and f"`sgl_amd_mono/{folder}`" in README
        assert f"/sgl_amd_mono/{folder}/" in owners


def test_every_source_names_its_license():
    folders, suffixes = ("sgl_amd_mono", "test", "benchmarks"), ("*.py", "*.c", "*.h")
    files = [path for folder in folders for suffix in suffixes for path in (ROOT / folder).rglob(suffix)]
    line = "SPDX-License-Identifier: Apache-2.0"
    assert [str(p.relative_to(ROOT)) for p in files if line not in p.read_text()[:200]] == []


FLAG = re.compile(r"(?<![\w`-])--[a-z][a-z0-9-]+")
OTHER_TOOLS_FLAGS = {
    "--no-deps", "--shm-size", "--check", "--version", "--mcpu", "--no-show-raw-insn",
}  # pip, docker, benchmarks, llvm-objdump  # fmt: skip
CLI_COMMANDS = ("doctor", "compile", "simulate", "cost")


def our_flags() -> set[str]:
    """Options of the command line, as its help prints them."""
    code = "import sys; from sgl_amd_mono.cli import main; main([sys.argv[1], '--help'])"
    texts = [
        subprocess.run([sys.executable, "-c", code, c], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
        for c in CLI_COMMANDS
    ]
    return {flag for text in texts for flag in FLAG.findall(text)}


def sglang_flags() -> set[str]:
    """Options of SGLang's server: the fields of its argument groups, and flags that it spells out."""
    import importlib.util

    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt"
    files = [*(root / "arg_groups").rglob("*.py"), root / "server_args.py"]
    text = "\n".join(path.read_text() for path in files)
    fields = re.findall(r"^    (\w+): A\[", text, re.M)
    return {"--" + name.replace("_", "-") for name in fields} | set(re.findall(r"\"(--[a-z0-9-]+)\"", text))


def test_every_flag_that_texts_name_exists():
    known = our_flags() | sglang_flags() | OTHER_TOOLS_FLAGS
    assert {"--tp-size", "--enable-amd-monokernel", "--watchdog-timeout", "--memory-model"} <= known
    texts = {"README.md": README} | {
        str(path.relative_to(ROOT)): path.read_text() for path in SOURCES if path.parent.name != "simulate"
    }
    unknown = {name: sorted(set(FLAG.findall(text)) - known) for name, text in texts.items()}
    assert {name: flags for name, flags in unknown.items() if flags} == {}


def test_the_tests_are_described():
    """Every file of kernels/ and e2e/ is in test/README.md by its name or a pattern, and every name there exists."""
    text = (ROOT / "test" / "README.md").read_text()
    named = {path for pattern in re.findall(r"`((?:unit|kernels|e2e)/[^`]+)`", text) for path in named_files(pattern)}
    files = [path for folder in ("kernels", "e2e") for path in (ROOT / "test" / folder).glob("test_*.py")]
    missing = [path.name for path in files if path not in named]
    assert missing == []


def named_files(pattern: str) -> list[Path]:
    """The files of a name or a glob below test/; there is at least one."""
    found = list((ROOT / "test").glob(pattern))
    assert found, f"test/README.md names {pattern}, which is not there"
    return found
