# SPDX-License-Identifier: Apache-2.0
"""What the command line says where `pip install .` was all: no torch, no SGLang. Never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HIDDEN = ("torch", "sglang", "triton", "numpy")
CODE = f"""
import sys
sys.modules.update(dict.fromkeys({HIDDEN}))
from sgl_amd_mono.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process that cannot import HIDDEN."""
    command = [sys.executable, "-c", CODE, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [("simulate",), ("simulate", "--rows", "1,3:4"), ("simulate", "--explain")])
def test_simulate_names_what_is_missing_and_the_fix(arguments: tuple[str, ...]):
    result = run(*arguments)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "found no torch" in result.stderr and "fix: make demo" in result.stderr


def test_compile_names_what_is_missing_and_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_AMD_MONO_CACHE_DIR", str(tmp_path))
    result = run("compile", "--geometry", "small", "--widths", "1", "--jobs", "1")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "found no " in result.stderr and "fix: use SGLang's ROCm image, or make venv" in result.stderr


def test_doctor_reports_without_torch():
    result = run("doctor")
    assert "report this as a bug" not in result.stdout and "Traceback" not in result.stderr
    assert "GPU" in result.stdout and "n/a" in result.stdout
