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
        (["cost", "--picture", "line.png"], "found 'line.png'; needed: a name that ends in .svg"),
        (["simulate", "--ranks", "3"], "invalid choice"),
        (["simulate", "--stock", "interpreter"], "invalid choice"),
        (
            ["compile", "--mxfp4", "qkv_proj"],
            "found 'qkv_proj'; needed: in_proj_qkvz or in_proj_ba or out_proj or o_proj",
        ),
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


@pytest.mark.parametrize("stock", cli.STOCK)
def test_explain_lists_what_is_replaced(stock: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every replacement of the form asked for and none of the other; which modules run as on ROCm; what is missing."""
    from sgl_amd_mono.simulate import harness, rocm_import

    assert cli.main(["simulate", "--explain", "--stock", stock, "--moe", "torch"]) == 0
    text = capsys.readouterr().out
    for replacement in harness.REPLACEMENTS:
        line = f"{replacement.module}.{replacement.attribute}: {replacement.why}"
        assert (line in text) == (replacement.stock in ("", stock)), line
    for module in rocm_import.MODULES:
        assert (f"  {module}\n" in text) == (stock == "triton")
    assert ("chunk_gated_delta_rule_fwd_kkt_solve_kernel: {'BK': 64, 'num_warps': 4}" in text) == (stock == "triton")
    assert "causal_conv1d_update: Triton kernel" in text or stock == "triton"
    assert all(what in text for what in harness.not_covered(stock))
    assert "AITER's fused MoE is a stand-in in PyTorch: asked for." in text


def test_explain_says_why_amd_s_moe_cannot_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sgl_amd_mono.simulate import aiter_moe, harness

    assert (harness.STOCK, harness.MOE) == (cli.STOCK, cli.MOE)
    monkeypatch.setattr(aiter_moe, "unavailable", lambda: "no llvm-objdump was found")
    assert cli.main(["simulate", "--explain"]) == 0
    assert "AITER's fused MoE is a stand-in in PyTorch: no llvm-objdump was found." in capsys.readouterr().out
    assert harness.chosen_moe("auto") == "torch"
    with pytest.raises(ValueError, match="no llvm-objdump was found"):
        harness.chosen_moe("amd")
    monkeypatch.setattr(aiter_moe, "unavailable", lambda: None)
    assert harness.chosen_moe("auto") == "amd"
    assert cli.main(["simulate", "--explain"]) == 0
    assert "AMD's own code object" in capsys.readouterr().out


def test_rows_name_requests_and_padding() -> None:
    assert cli._rows("1,3:4,8") == ((1, 1), (3, 4), (8, 8))
