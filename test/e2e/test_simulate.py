# SPDX-License-Identifier: Apache-2.0
"""`sgl-amd-mono simulate`: SGLang's own model, plugin off and on.

In `make test`: one padded batch, on the simulator at TP 1, and with the launches replaced by their definitions, right
and with planted mistakes; SGLang's Triton kernels run on the simulator too. The long rows (`full`): the demo as it
stands, both memory models and PyTorch in the kernels' place, and TP 2 in two processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.simulate_double import PLANTED, UNROUNDED_LAYER

from sgl_amd_mono import cli
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.simulate import checkpoint, plugin, report, session

TEST_FOLDER = Path(__file__).resolve().parents[1]
SUBSET = session.Options(rows=((2, 3),), steps=2, moe="torch")  # AMD's code object: in the demo

pytestmark = pytest.mark.xdist_group("big")


@pytest.fixture(scope="module")
def off_arm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], dict[str, Any]]:
    """(folder, cases, result) of the subset without the plugin."""
    folder = tmp_path_factory.mktemp("simulate")
    shape = checkpoint.shape_of(Geometry.small(1))
    checkpoint.write(folder / session.CHECKPOINT, shape, SUBSET.seed)
    cases = session.prompts(SUBSET, shape.vocab_size)
    return folder, cases, session.run_arm(SUBSET, folder, cases, plugin=False, forced=None, progress=print)


OnArm = Callable[..., session.Outcome]


@pytest.fixture
def on_arm(off_arm: tuple[Path, list[Any], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> OnArm:
    """Runs the plugin's arm on the given runtime (default: the simulator), fed with the off arm's tokens."""
    folder, cases, off = off_arm

    def run(runtime: str | None = None, **changes: Any) -> session.Outcome:
        if runtime:
            monkeypatch.setenv(plugin.RUNTIME_VARIABLE, f"helpers.{runtime}")
            monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TEST_FOLDER), os.environ.get("PYTHONPATH", "")]))
        options = replace(SUBSET, **changes)
        on = session.run_arm(
            options, folder, cases, plugin=True, forced=session.result_file(folder, False, 0), progress=print
        )
        return session.Outcome(options, off, on)

    return run


def test_the_simulated_launches_agree_with_sglang(on_arm: OnArm) -> None:
    outcome = on_arm()
    verdict = report.judge(outcome)
    assert verdict.problems == []
    assert verdict.logits.noise > 0
    for record in outcome.on["records"]:
        assert record.rows == 2 and record.width == 3
        assert record.simulated["wave_instructions"] > 0
        assert record.simulated["device_hops"] > 0
        read = record.simulated["bytes_read"]
        assert read["w_qkvz" if record.kind == "k1" else "w_o"] > 0
    text = report.render(outcome, verdict)
    assert "PASS" in text and "fused_recurrent_gated_delta_rule_packed_decode_kernel: 24 | 6" in text
    json.dumps(report.as_dict(outcome, verdict))


@pytest.mark.full
def test_the_one_hop_pair_has_the_bits_of_two_hops(on_arm: OnArm, monkeypatch: pytest.MonkeyPatch) -> None:
    """K2 forms the core of what K1 leaves: one hop in K1, every launch within its bounds, K2's bits as without it."""
    two = on_arm().on["records"]
    monkeypatch.setenv("SGLANG_AMD_MONO_ONE_HOP", "1")
    outcome = on_arm()
    assert report.judge(outcome).problems == []
    one = outcome.on["records"]
    assert [(r.kind, r.layer, r.digest) for r in one] == [(r.kind, r.layer, r.digest) for r in two]
    assert any(r.digest for r in one)
    hops = [{r.simulated["device_hops"] for r in records if r.kind == "k1"} for records in (one, two)]
    assert hops == [{1}, {2}]


@pytest.mark.full
def test_one_launch_of_k2_and_the_next_k1_has_the_bits_of_two(on_arm: OnArm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each half is compared with SGLang's layer as ever; K2's bits are those of the separate launches."""
    two = on_arm().on["records"]
    monkeypatch.setenv("SGLANG_AMD_MONO_ONE_LAUNCH", "1")
    outcome = on_arm()
    assert report.judge(outcome).problems == []
    one = outcome.on["records"]
    assert sorted((r.step, r.layer, r.kind, r.digest) for r in one) == sorted(
        (r.step, r.layer, r.kind, r.digest) for r in two
    )
    assert any(r.digest for r in one)
    counted = [[(r.kind, r.layer) for r in records if r.step == 1 and not r.simulated] for records in (one, two)]
    assert counted == [[("k1", 1), ("k1", 2)], []], "of three GDN layers two K1 follow a K2 in its launch"


def test_the_definitions_agree_with_sglang(on_arm: OnArm) -> None:
    """The float64 definitions of K1 and K2 in the launches' place: nothing but the launches may fail the test above."""
    assert report.judge(on_arm("spec_double:DoubleRuntime")).problems == []


def test_each_planted_mistake_is_seen_where_it_is(on_arm: OnArm) -> None:
    """A launch is compared on its own inputs, so a mistake shows at its own launch and at no other."""
    outcome = on_arm("simulate_double:PlantedRuntime")
    seen = {(record.kind, record.layer) for record in outcome.on["records"] if record.failures}
    assert seen == set(PLANTED)
    for record in outcome.on["records"]:
        if record.failures:
            what, bound = PLANTED[record.kind, record.layer]
            assert any(text.startswith(bound) for text in record.failures), (what, record.failures)
    verdict = report.judge(outcome)
    assert verdict.problems and not verdict.logits.ok


def test_a_rounding_that_sglang_does_not_share_is_seen(on_arm: OnArm) -> None:
    """K1 as compiled, but beta of one layer is left in float32: SGLang's packed decode kernel rounds it to bf16."""
    problems = report.judge(on_arm("simulate_double:unrounded_beta")).problems
    (seen,) = [problem for problem in problems if "k1" in problem]
    assert seen.startswith(f"layer {UNROUNDED_LAYER} k1.state: relative error ")


def test_a_pad_row_that_is_written_is_seen(on_arm: OnArm) -> None:
    outcome = on_arm("simulate_double:PadWriter")
    assert any("k1.core of a pad row is not zero" in problem for problem in report.judge(outcome).problems)


def test_a_failing_process_ends_the_run_with_its_log(on_arm: OnArm) -> None:
    with pytest.raises(session.SimulationFailed, match="no_such_runtime"):
        on_arm("no_such_runtime:Nothing")


@pytest.mark.full
@pytest.mark.parametrize(
    "memory_model, stock, moe",
    [("consistent", "triton", "amd"), ("adversarial", "triton", "torch"), ("consistent", "torch", "torch")],
)
def test_the_demo(memory_model: str, stock: str, moe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """SGLang's own kernels with AMD's fused MoE, and with stand-ins."""
    forms = ["--stock", stock, "--moe", moe]
    assert cli.main(["simulate", "--memory-model", memory_model, *forms, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] and result["rows"] == [[1, 1], [3, 4], [8, 8]]
    assert result["logits"]["flipped"] == 0 and result["logits"]["decided"] > 0


@pytest.mark.full
def test_two_ranks_in_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--ranks", "2", "--rows", "1,3:4", "--steps", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"]
    assert {launch["rank"] for launch in result["launches"]} == {0, 1}
    for launch in result["launches"]:
        if launch["rank"] == 0:  # the rank that simulates reports for all
            assert (launch["simulated"]["cross_hops"] > 0) == (launch["kind"] == "k2")
