# SPDX-License-Identifier: Apache-2.0
"""The options of test/conftest.py: which tests run, and that shards are a partition."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[2] / "conftest.py"
TESTS = """
import os, pytest
from pathlib import Path

@pytest.mark.parametrize("i", range(7))
def test_short(i): pass

@pytest.mark.full
@pytest.mark.parametrize("i", range(4))
def test_long(i): pass

@pytest.mark.xdist_group("together")
@pytest.mark.parametrize("i", range(5))
def test_group(i): pass

@pytest.mark.gfx950
def test_gpu(): raise AssertionError("ran without a GPU")

def test_cache(kernel_cache):
    (kernel_cache / "probe").write_text("")
    print(f"CACHE={kernel_cache}")
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on TESTS beside a copy of our conftest.py, without this session's plugins and variables."""
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  full: long\n  gfx950: GPU\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "SGLANG_AMD_MONO_"))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-s", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def passed(result: subprocess.CompletedProcess[str]) -> set[str]:
    """Return the ids of the tests that passed or were skipped, of a run that succeeded."""
    assert result.returncode == 0, result.stdout + result.stderr
    return {line.split()[0] for line in result.stdout.splitlines() if line.startswith("test_it.py::")}


def test_full_rows_need_the_option(tmp_path: Path):
    short, full = passed(run(tmp_path)), passed(run(tmp_path, "--full"))
    assert len(short) == 14 and len(full) == 18
    assert full - short == {f"test_it.py::test_long[{i}]" for i in range(4)}


def test_shards_are_a_partition(tmp_path: Path):
    count = 3
    shards = [passed(run(tmp_path, "--full", "--shard", f"{i}/{count}")) for i in range(1, count + 1)]
    assert sum(map(len, shards)) == 18 and set().union(*shards) == passed(run(tmp_path, "--full"))
    group = {f"test_it.py::test_group[{i}]" for i in range(5)}
    assert [len(shard & group) for shard in shards].count(5) == 1
    assert (
        max(len(shard - group) for shard in shards) - min(len(shard - group) for shard in shards) <= 2
    )  # a group is one turn


@pytest.mark.parametrize("text", ["0/3", "4/3", "1"])
def test_a_wrong_shard_is_refused(tmp_path: Path, text: str):
    result = run(tmp_path, "--shard", text)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "need I/N with 1 <= I <= N" in result.stderr


def test_gpu_tests_are_skipped_with_their_reason(tmp_path: Path):
    if any(Path("/sys/class/kfd/kfd/topology/nodes").glob("*")):
        result = run(tmp_path, "-k", "gpu")
        assert "ran without a GPU" in result.stdout or "needs a gfx950 GPU" in result.stdout
    else:
        assert "needs a gfx950 GPU" in run(tmp_path, "-k", "gpu", "-rs").stdout


def test_the_session_s_cache_goes_and_a_chosen_one_stays(tmp_path: Path):
    result = run(tmp_path, "-k", "cache")
    folder = Path(result.stdout.split("CACHE=")[1].split()[0])
    assert not folder.exists()
    os.environ["SGLANG_AMD_MONO_TEST_CACHE"] = str(tmp_path / "kept")
    try:
        environment_kept = tmp_path / "kept" / "mono" / "probe"
        shutil.copy(CONFTEST, tmp_path / "conftest.py")
        subprocess.run([sys.executable, "-m", "pytest", "-q", "-k", "cache"], cwd=tmp_path, timeout=120, check=True)
        assert environment_kept.exists()
    finally:
        del os.environ["SGLANG_AMD_MONO_TEST_CACHE"]
