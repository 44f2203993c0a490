# SPDX-License-Identifier: Apache-2.0
"""The cost models on figures worked out by hand, and the command's refusals. No kernel is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_amd_mono import cli
from sgl_amd_mono.cost.measure import poll_sites, spread
from sgl_amd_mono.cost.model import REFERENCE_HOPS, Assumptions, fixed_us, guessed, overlap

MB = 1_000_000
ASSUME = Assumptions(launch_us=5.0, terabytes_per_s=1.0, device_hop_us=2.0, cross_hop_us=4.0)  # 1 MB is 1 us


@pytest.mark.parametrize(("launch", "megabytes", "us"), [("k1", 78.2, 27.7), ("k2", 80.6, 40.1)])
def test_fixed_model_gives_the_reference(launch: str, megabytes: float, us: float) -> None:
    assert round(fixed_us(megabytes * MB, *REFERENCE_HOPS[launch]), 1) == us


def test_fixed_model_counts_every_hop() -> None:
    assert fixed_us(0, 1, 0) - fixed_us(0, 0, 0) == pytest.approx(2.1)
    assert fixed_us(0, 0, 1) - fixed_us(0, 0, 0) == pytest.approx(4.0)


def test_overlap_hides_bytes_behind_a_hop() -> None:
    """3 us of bytes needed before the hop, 2 us that are only needed after it and requested in time or late."""
    early = overlap(["device"], [(0, 0, 3 * MB), (0, 1, 2 * MB)], ASSUME)
    late = overlap(["device"], [(0, 0, 3 * MB), (1, 1, 2 * MB)], ASSUME)
    assert early.stages == [5.0, 10.0] and early.end == pytest.approx(10.0)  # 5 + 3 + hop 2; the rest is hidden
    assert late.stages == [5.0, 10.0] and late.end == pytest.approx(12.0)


def test_a_guess_moves_what_it_gets_right_and_wastes_the_rest() -> None:
    """2 of 4 late MB move before the hop, 2 wrong ones are requested with them; the wrong ones are never waited for."""
    requests = [(0, 0, 3 * MB), (1, 1, 4 * MB)]
    assert guessed(1, requests, {1: 4 * MB}, 1.0) == [(0, 0, 3 * MB), (0, 1, 4 * MB)]
    half = guessed(1, requests, {1: 4 * MB}, 0.5)
    assert half == [(0, 0, 3 * MB), (0, 1, 4 * MB), (1, 1, 2 * MB)]  # the last stage uses the wrong ones: none waits
    assert sum(n for *_, n in half) == 9 * MB
    assert guessed(2, requests, {1: 4 * MB}, 0.5)[1:] == [(0, 1, 2 * MB), (0, 2, 2 * MB), (1, 1, 2 * MB)]
    ends = [overlap(["device"], guessed(1, requests, {1: 4 * MB}, hit), ASSUME).end for hit in (0.0, 0.5, 1.0)]
    assert ends == [pytest.approx(t) for t in (5 + 3 + 4 + 4, 5 + 3 + 4 + 2, 5 + 3 + 4)]


def test_overlap_pays_cross_hops_more() -> None:
    assert overlap(["device", "cross"], [], ASSUME).end == pytest.approx(5 + 2 + 4)


def test_every_assumption_is_printed_with_its_figure() -> None:
    text = "\n".join(Assumptions(7.25, 3.5, 1.75, 9.5).lines())
    assert all(figure in text for figure in ("7.25", "3.5", "1.75", "9.5"))


@pytest.mark.parametrize(
    ("figures", "words"),
    [({"launch_us": 0}, "launch_us = 0; needed: a positive number"), ({"other": 1}, "needed: at least one of")],
)
def test_a_wrong_probe_is_refused(
    figures: dict[str, float], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(figures))
    assert cli.main(["cost", "qwen38-a95b", "--probe", str(path)]) == 1
    assert words in capsys.readouterr().err


def test_a_probe_replaces_assumptions() -> None:
    assert Assumptions.of({"device_hop_us": 1.5, "host": "x"}) == Assumptions(device_hop_us=1.5)


def test_spread_and_poll_sites() -> None:
    assert spread([1, 2, 6]) == {"min": 1, "median": 2, "max": 6, "max_over_mean": 2.0}
    assert poll_sites("\ts_nop 0\n\ts_sleep 1\n\tv_mov_b32 v0, 0 ; s_sleep\n\ts_sleep 2\n") == 2


def test_an_unknown_model_or_launch_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cost", "llama"]) == 2
    assert "unknown model 'llama'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["cost", "--launch", "k3"])
    assert "found 'k3'; needed: k1, k2, k2k1, comma-separated" in capsys.readouterr().err
