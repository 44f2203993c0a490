# SPDX-License-Identifier: Apache-2.0
"""Check mode on SGLang's own model: batches within bounds, replayed steps, and planted mistakes that stop it.

The launches run by their definitions, and as compiled on the simulator (in `make test` batches of 1 and 3 rows, eager
and by the replay harness; with `--full` 8 rows and the planted mistakes too). The captured graph needs a gfx950.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import check_run
from helpers.engine_stream import TOKENS, serve
from helpers.fault_runtime import AT_STEP, WRONG_LAYER

from sgl_amd_mono.simulate import checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHES = 7  # three GDN layers with K1 and K2, one attention layer with K2
BOUNDS = ["k1.conv.cosine", "k1.core.cosine", "k1.res_out.max_abs", "k1.state.cosine", "k2.out.cosine", "k2.out.rel",
          "k2.res_out.rel"]  # fmt: skip
CASES = [name for name in check_run.CASES if name not in ("formats", *check_run.MXFP4_MISTAKES)]
BATCHES = {"1 row": 1, "3 rows": 3, "3 of 4 rows": 3, "8 rows": 8}

pytestmark = pytest.mark.xdist_group("big")


#: The projections that are MXFP4 in one of the models: every mix over its three GDN layers.
MXFP4 = (
    r"\.0\.linear_attn\.in_proj|\.1\.linear_attn\.in_proj_(qkv|z)$|\.2\.linear_attn\.(in_proj_(b|a)|out_proj)$"
    r"|\.3\.self_attn\.o_proj$"
)


def run(folder: Path, runtime: str, cases: list[str], *mxfp4: str, **environment: str) -> dict[str, Any]:
    """The named cases of `check_run`, in a process of their own."""
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "test"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, check_run.__file__, str(folder), runtime, ",".join(cases), *mxfp4],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if done.returncode:
        raise AssertionError(f"exit {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("double"), "double", CASES, SGLANG_AMD_MONO_CHECK="1")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("simulated"), "simulator", ["installed", "1 row", "3 rows", "replay"])


REST = ["3 of 4 rows", "8 rows", "replay of 1", "replay of 8", *check_run.MISTAKES]


@pytest.fixture(scope="module")
def simulated_rest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("rest"), "simulator", REST)


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(
        tmp_path_factory.mktemp("mxfp4"), "simulator", ["formats", "1 row", "3 rows", *check_run.MXFP4_MISTAKES], MXFP4
    )


def within_bounds(found: dict[str, Any], rows: int) -> None:
    assert found["equal"], "checking changed the logits"
    assert found["states equal"], "the states are not those that the launches wrote"
    assert (found["steps"], found["launches"], found["rows"]) == (1, LAUNCHES, rows * LAUNCHES)
    assert found["seen"] == BOUNDS, "every bound of NUMERICS was compared"
    line, table = found["log"]
    assert line.startswith(f"check step 1: {rows} rows, {LAUNCHES} launches within bounds, ")
    assert table.startswith("rank 0: check mode: 1 steps") and len(table.splitlines()) == 2 + len(BOUNDS)


@pytest.mark.parametrize("case", BATCHES)
def test_batches_by_the_definitions(double: dict[str, Any], case: str) -> None:
    within_bounds(double[case], BATCHES[case])


@pytest.mark.parametrize("case", ["1 row", "3 rows"])
def test_batches_on_the_simulator(simulated: dict[str, Any], case: str) -> None:
    within_bounds(simulated[case], BATCHES[case])


@pytest.mark.full
@pytest.mark.parametrize("case", ["3 of 4 rows", "8 rows"])
def test_wider_batches_on_the_simulator(simulated_rest: dict[str, Any], case: str) -> None:
    within_bounds(simulated_rest[case], BATCHES[case])


@pytest.mark.full
def test_one_launch_is_checked_as_two(tmp_path: Path) -> None:
    """K2 and the next K1 in one launch: both halves are compared, with and without a mistake in the second."""
    cases = ["1 row", "3 rows", "weight", "residual of K2"]
    found = run(tmp_path, "simulator", cases, SGLANG_AMD_MONO_ONE_LAUNCH="1")
    for case in ("1 row", "3 rows"):
        within_bounds(found[case], BATCHES[case])
    for name in ("weight", "residual of K2"):
        stopped(found[name], name)


def test_mxfp4_projections_on_the_simulator(mxfp4: dict[str, Any]) -> None:
    """The launches beside SGLang's own Quark linear, which the checkpoint's exclude list gives to some projections."""
    bf16, packed = "bfloat16", "mxfp4"
    assert mxfp4["formats"] == {
        "0": [packed, packed, bf16], "1": [packed, bf16, bf16], "2": [bf16, packed, packed], "3": [packed]
    }  # fmt: skip
    for case in ("1 row", "3 rows"):
        within_bounds(mxfp4[case], BATCHES[case])
    for name in check_run.MXFP4_MISTAKES:
        stopped(mxfp4[name], name)


#: planted mistake -> the line that must stop the server: layer, launch, row, metric, bound
LINES = {
    "weight": r"layer 1, launch k1, row \d: k1\.core\.cosine = -?0\.\d+, bound 0\.9999",
    "scale": r"layer 2, launch k2, row \d: k2\.out\.rel = \d[\d.]*, bound 0\.15",
    "residual": r"layer 2, launch k1, row \d: k1\.res_out\.max_abs = 0\.\d+, bound 0",
    "code": r"layer 1, launch k1, row \d: k1\.core\.cosine = -?0\.\d+, bound 0\.9999",
    "code of K2": r"layer 3, launch k2, row \d: k2\.(out|res_out)\.\w+ = -?\d[\d.]*, bound 0\.\d+",
    "residual of K2": r"layer 1, launch k2, row \d: k2\.res_out\.rel = 0\.\d+, bound 0\.02",
    "state row": r"layer 0, launch k1, row 1: k1\.state\.cosine = 0\.\d+, bound 0\.9999",
}


def stopped(found: dict[str, Any], mistake: str) -> None:
    error = found["error"]
    assert error.startswith("CheckFailed: check mode, rank 0, step 1: ")
    assert re.search(LINES[mistake], error), error
    places = set(re.findall(r"layer \d+, launch k\d", error))
    assert places == {LINES[mistake].split(", row")[0]}, "only the launch with the mistake is named"
    assert error.removeprefix("CheckFailed: ") in found["log"] and "check mode: 0 steps" in found["log"][-1]
    assert found["marked"], "the other ranks were not told"
    assert found["steps"] == 0


@pytest.mark.parametrize("mistake", check_run.MISTAKES)
def test_a_planted_mistake_stops_the_step(double: dict[str, Any], mistake: str) -> None:
    stopped(double[mistake], mistake)


@pytest.mark.full
@pytest.mark.parametrize("mistake", check_run.MISTAKES)
def test_a_planted_mistake_stops_the_simulated_step(simulated_rest: dict[str, Any], mistake: str) -> None:
    stopped(simulated_rest[mistake], mistake)


def test_a_proven_tie_is_set_aside_and_counted(double: dict[str, Any]) -> None:
    """K2 and SGLang pick different experts: with equal logits the row is left out, until more than 1 % of the rows are;
    with logits apart it is a breach."""
    tied, apart = double["tie"]["tied"], double["tie"]["apart"]
    assert tied["first"] == "" and tied["set aside"] == 1 and tied["rows"] == LAUNCHES
    assert f"{LAUNCHES} launches within bounds, 1 rows set aside" in tied["line"]
    assert tied["second"] == (
        f"CheckFailed: check mode, rank 0, step 2: 2 of {2 * LAUNCHES} rows ({2 / (2 * LAUNCHES):.1%}) were set aside "
        "as ties, at most 1% may"
    )
    assert apart["set aside"] == 0
    where = rf"layer {check_run.TIED_LAYER}, launch k2, row 0: k2\.out\.rel = 0\.\d+, bound 0\.15"
    assert re.search(where, apart["first"]), apart["first"]


@pytest.mark.parametrize(
    ("runtime", "case", "rows"),
    [
        ("double", "replay of 1", 1),
        ("double", "replay", 3),
        ("double", "replay of 8", 8),
        ("simulated", "replay", 3),
        pytest.param("simulated_rest", "replay of 1", 1, marks=pytest.mark.full),
        pytest.param("simulated_rest", "replay of 8", 8, marks=pytest.mark.full),
    ],
)
def test_replayed_steps_are_checked(runtime: str, case: str, rows: int, request: pytest.FixtureRequest) -> None:
    """The capture is not judged; a replay is, with other token ids, state slots and epoch in the same memory.

    Nothing but the recorded launches and operations runs in it: its logits are those of an eager step all the same.
    """
    found = request.getfixturevalue(runtime)[case]
    assert found["judged in the capture"] == 0 and found["launches recorded"] == LAUNCHES
    assert (found["steps"], found["launches"]) == (1, LAUNCHES)
    captured, replayed = (set(slots) for slots in found["slots"])
    assert len(captured) == len(replayed) == rows and captured != replayed, "the replay has other state slots"
    assert found["equal to eager"] and not found["equal to the captured batch"]
    assert found["log"][0].startswith(f"check step 1: {rows} rows, {LAUNCHES} launches within bounds, ")
    assert re.search(r"step 2: layer 1, launch k1, row \d: k1\.state\.cosine = -1, bound 0\.9999", found["spoiled"])


def test_the_variable_decides_at_start(double: dict[str, Any], simulated: dict[str, Any]) -> None:
    """`SGLANG_AMD_MONO_CHECK=1` attaches check mode; unset, the step keeps its plain method and no hook."""
    on, off = double["installed"], simulated["installed"]
    assert on["hooks"] == [1, 1, 1] and on["wrapped"] and on["lines"] == 1
    assert off["hooks"] == [0, 0, 0] and not off["wrapped"] and off["lines"] == 0


# ---- two ranks in two processes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write(tmp_path_factory.mktemp("two_ranks") / "model")


@pytest.mark.full
def test_two_ranks_are_within_bounds(tmp_path: Path, model: Path) -> None:
    """SGLang's Engine: rank 0 writes a line for each decode step, both ranks their table, and the answer is whole."""
    status, seen, log = serve(tmp_path, model, "none", SGLANG_AMD_MONO_CHECK="1")
    assert status == 0 and len(seen) == TOKENS + 1, log[-4000:]
    steps = re.findall(rf"check step (\d+): 1 rows, {LAUNCHES} launches within bounds", log)
    assert steps == [str(step) for step in range(1, TOKENS)], "the first token is the prefill's"
    tables = re.findall(r"rank (\d): check mode: (\d+) steps, (\d+) launches, (\d+) rows", log)
    launches = str((TOKENS - 1) * LAUNCHES)
    assert sorted(tables) == [(rank, str(TOKENS - 1), launches, launches) for rank in "01"], log[-6000:]


@pytest.mark.full
def test_a_mistake_on_one_rank_stops_both(tmp_path: Path, model: Path) -> None:
    """What only rank 1 reads wrongly, only rank 1 sees: its line ends the server before a token of the step."""
    status, seen, log = serve(tmp_path, model, "weight", SGLANG_AMD_MONO_CHECK="1")
    assert status != 0 and "done" not in seen and len(seen) <= AT_STEP
    where = rf"layer {WRONG_LAYER}, launch k1, row 0: k1\.core\.cosine = -?0\.\d+, bound 0\.9999"
    assert re.search(rf"CheckFailed: check mode, rank 1, step {AT_STEP}: .*{where}", log), log[-6000:]
    assert "CheckFailed: check mode, rank 0" not in log


@pytest.mark.gfx950
def test_a_captured_graph_is_checked_at_each_replay() -> None:
    """Eight GPUs: a server with graphs and check mode answers, and its log has a line for each decode step."""
    checkpoint = os.environ["SGLANG_AMD_MONO_TEST_CHECKPOINT"]
    done = subprocess.run(
        [sys.executable, "-m", "sglang.bench_one_batch", "--model-path", checkpoint, "--tp-size", "8",
         "--batch-size", "3", "--input-len", "64", "--output-len", "16", "--enable-amd-monokernel"],
        env=os.environ | {"SGLANG_AMD_MONO_CHECK": "1", "SGLANG_USE_AITER": "1"},
        capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    steps = re.findall(r"check step \d+: 3 rows, (\d+) launches within bounds", done.stdout + done.stderr)
    assert len(steps) >= 15 and len(set(steps)) == 1
