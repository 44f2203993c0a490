# SPDX-License-Identifier: Apache-2.0
"""The command line: what it refuses, and with which words. Nothing is compiled or simulated."""

from __future__ import annotations

import pytest

from sgl_amd_mono import cli


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "--rows", "abc"], "found 'abc'; needed: a positive number"),
        (["simulate", "--rows", "4:3"], "found '4:3'; needed: requests, or requests:padded rows"),
        (["simulate", "--rows", "9"], "found '9'; needed: requests"),
        (["simulate", "--steps", "0"], "found '0'; needed: a positive number"),
        (["simulate", "--ranks", "3"], "invalid choice"),
        (["compile", "--mxfp4", "o_proj"], "found 'o_proj'; needed: in_proj_qkvz or in_proj_ba"),
        (["compile", "--widths", "1,x"], "found 'x'; needed: a positive number"),
        ([], "required"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", ["simulate", "compile"])
def test_an_unknown_model_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "llama"]) == 2
    assert "unknown model 'llama'; known: qwen38_a95b_mxfp4" in capsys.readouterr().err


def test_sizes_that_do_not_divide_are_refused_with_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", "--geometry", "small", "--tp", "3", "--widths", "1"]) == 1
    assert "2 / 3" in capsys.readouterr().err


def test_explain_lists_what_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "causal_conv1d_update: Triton kernel" in text and "Not covered" in text


def test_rows_name_requests_and_padding() -> None:
    assert cli._rows("1,3:4,8") == ((1, 1), (3, 4), (8, 8))
