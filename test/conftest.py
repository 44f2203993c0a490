# SPDX-License-Identifier: Apache-2.0
"""What all tests share: markers, shards, and one kernel cache for every worker of a session."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

# One thread a worker, set before anything imports torch: the workers share few cores.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# SGLang's Triton kernels and AITER's MoE run as PyTorch where a test does not ask for themselves: nothing is compiled.
os.environ.setdefault("SGLANG_AMD_MONO_SIMULATE_STOCK", "torch")
os.environ.setdefault("SGLANG_AMD_MONO_SIMULATE_MOE", "torch")

TEST_CACHE_VARIABLE = "SGLANG_AMD_MONO_TEST_CACHE"
CACHE_VARIABLES = {
    "SGLANG_AMD_MONO_CACHE_DIR": "mono",
    "FLYDSL_RUNTIME_CACHE_DIR": "flydsl",
    "TRITON_CACHE_DIR": "triton",
}
KFD_TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
GFX950_TARGET_VERSION = "90500"  # gfx_target_version of the kernel driver: 9 * 10000 + 5 * 100 + 0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --full and --shard."""
    group = parser.getgroup("sgl-amd-mono")
    group.addoption("--full", action="store_true", help="run the tests marked `full` as well")
    group.addoption("--shard", metavar="I/N", help="run the I-th (from 1) of N equal parts of the selected tests")


def parse_shard(text: str) -> tuple[int, int]:
    """Return (i, n) of "i/n" with 1 <= i <= n.

    Raises:
        pytest.UsageError: the text is not of that form.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise pytest.UsageError(f"--shard {text!r}: need I/N with 1 <= I <= N, such as --shard 2/4")
    return int(match[1]), int(match[2])


def split_shard(items: list[pytest.Item], index: int, count: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return (items of shard `index` of `count`, all others).

    Tests of one xdist_group share what is costly, so a group is dealt as a whole. Neighbours are variants of one test
    and cost about the same: groups and single tests are dealt out in turn.
    """
    turns: dict[str, int] = {}
    mine, others = [], []
    for item in items:
        group = item.get_closest_marker("xdist_group")
        unit = f"group {group.args[0]}" if group else item.nodeid
        turn = turns.setdefault(unit, len(turns))
        (mine if turn % count == index - 1 else others).append(item)
    return mine, others


def has_gfx950() -> bool:
    """Whether the kernel driver lists a gfx950; imports nothing."""
    for properties in KFD_TOPOLOGY.glob("*/properties"):
        try:
            lines = properties.read_text().splitlines()
        except OSError:  # a node of another user's partition cannot be read
            continue
        if f"gfx_target_version {GFX950_TARGET_VERSION}" in lines:
            return True
    return False


def pytest_configure(config: pytest.Config) -> None:
    """Check --shard, and make the session's cache before the workers start, so that each kernel is built once."""
    if config.getoption("--shard"):
        parse_shard(config.getoption("--shard"))
    if hasattr(config, "workerinput"):  # a worker inherits the controller's environment
        return
    kept = os.environ.get(TEST_CACHE_VARIABLE)
    root = Path(kept).resolve() if kept else Path(tempfile.mkdtemp(prefix="sgl-amd-mono-test-"))
    for variable, folder in CACHE_VARIABLES.items():
        os.environ[variable] = str(root / folder)
        (root / folder).mkdir(parents=True, exist_ok=True)
    if not kept:
        config.add_cleanup(lambda: shutil.rmtree(root, ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop `full` tests unless asked for, keep one shard, and skip GPU tests where there is no gfx950."""
    selected, dropped = [], []
    for item in items:
        wanted = config.getoption("--full") or item.get_closest_marker("full") is None
        (selected if wanted else dropped).append(item)
    if config.getoption("--shard"):
        index, count = parse_shard(config.getoption("--shard"))
        selected, others = split_shard(selected, index, count)
        dropped += others
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    items[:] = selected
    if not has_gfx950():
        skip = pytest.mark.skip(reason="needs a gfx950 GPU, and the kernel driver lists none")
        for item in items:
            if item.get_closest_marker("gfx950") is not None:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def kernel_cache() -> Path:
    """The folder of built kernels that all workers of this session share."""
    return Path(os.environ["SGLANG_AMD_MONO_CACHE_DIR"])
