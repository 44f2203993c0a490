# SPDX-License-Identifier: Apache-2.0
"""SGLang's server over HTTP on this machine: both spellings of the flag, a refused configuration, a broken install.

The launches run by their definitions: what is tested is which forward a server runs, and how it ends when it cannot.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sgl_amd_mono.simulate import checkpoint, plugin
from sgl_amd_mono.simulate.runner import server_arguments

TEST_FOLDER = Path(__file__).resolve().parents[1]
PROMPT = [5, 6, 7, 8, 9]
TOKENS = 4
START_S, ANSWER_S, END_S = 900, 600, 120

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("big")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write(tmp_path_factory.mktemp("server") / "model")


def environment(folder: Path) -> dict[str, str]:
    """SGLang on the CPU harness with the simulated spec; check mode logs a line for each step that the plugin ran."""
    values = plugin.environment(folder / "entry_point", "consistent", 0, (1, 2), spawned=True)
    return values | {
        plugin.RUNTIME_VARIABLE: "helpers.spec_double:DoubleRuntime",
        "SGLANG_AMD_MONO_CHECK": "1",
        "PYTHONPATH": os.pathsep.join([values["PYTHONPATH"], str(TEST_FOLDER)]),
    }


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def server(folder: Path, model: Path, values: dict[str, str], flags: list[str]) -> Iterator[tuple]:
    """(process, base URL, log file) of a server; it and all its processes end with the block."""
    port, log = free_port(), folder / "server.log"
    arguments = [*server_arguments(model, False, 1), *flags, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *arguments],
            env=values,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, f"http://127.0.0.1:{port}", log
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=END_S)


def ready(process: subprocess.Popen, url: str) -> bool:
    """Wait for the server to serve (True) or to end (False)."""
    limit = time.monotonic() + START_S
    while time.monotonic() < limit:
        if process.poll() is not None:
            return False
        try:
            with urllib.request.urlopen(f"{url}/get_model_info", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError(f"the server neither served nor ended within {START_S} s")


def answer(url: str) -> list[int]:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True},
    }
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        return json.load(response)["output_ids"]


FLAGS = {"flag": ["--enable-amd-monokernel"], "old spelling": ["--monokernel-backend", "amd"], "no flag": []}


@pytest.mark.parametrize("spelling", FLAGS)
def test_a_server_answers(tmp_path: Path, model: Path, spelling: str) -> None:
    """With either spelling every decode step is the plugin's, without the flag none is; the answer is whole."""
    with server(tmp_path, model, environment(tmp_path), FLAGS[spelling]) as (process, url, log):
        assert ready(process, url), log.read_text()[-6000:]
        assert len(answer(url)) == TOKENS
        text = log.read_text()
    steps = len(re.findall(r"check step \d+: \d+ rows, 7 launches within bounds", text))
    if spelling == "no flag":
        assert steps == 0 and "qwen38-a95b-mxfp4" not in text
    else:
        assert steps >= TOKENS - 1, text[-6000:]
        assert re.search(r"rank 0: qwen38-a95b-mxfp4-simulated: k1 .*widths 1, 2.*; k2, widths 1, 2", text)
        assert "monokernel qwen38-a95b-mxfp4-simulated on gfx950 runs decode steps of batch size [1, 2]" in text


#: what is wrong -> (flags, the text that a person sees)
REFUSED = {
    "replayssm": (
        ["--enable-linear-replayssm"],
        "--enable-linear-replayssm: found on; needed: off: K1 updates the state in place; "
        "fix: start without --enable-linear-replayssm",
    ),
    "dtype": (["--dtype", "float16"], "dtype 'float16' is not one of ['bfloat16']"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_configuration_ends_the_server(tmp_path: Path, model: Path, case: str) -> None:
    flags, text = REFUSED[case]
    with server(tmp_path, model, environment(tmp_path), [*FLAGS["flag"], *flags]) as (process, url, log):
        assert not ready(process, url)
        assert process.returncode != 0
        said = log.read_text()
    assert "--enable-amd-monokernel cannot run this setup:" in said and text in said, said[-4000:]


def broken_install(folder: Path, target: str) -> dict[str, str]:
    """An environment whose only AMD plugin names `target`, which cannot be loaded; an installed one is kept out."""
    values, points = environment(folder), folder / "broken"
    for name, path in (("harness_only", "helpers.server_plugins:harness_only"), ("half_a_plugin", target)):
        metadata = points / f"{name}_test-0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}_test\nVersion: 0\n")
        (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {path}\n")
    (points / "half_a_plugin.py").write_text("import a_module_that_was_never_installed\n")
    values["PYTHONPATH"] = os.pathsep.join([str(points), values["PYTHONPATH"]])
    return values | {"SGLANG_PLUGINS": "harness_only,half_a_plugin"}


@pytest.mark.parametrize("spelling", ["flag", "old spelling"])
def test_a_broken_install_ends_the_server(tmp_path: Path, model: Path, spelling: str) -> None:
    """SGLang only logs a plugin that fails to import; the flag then finds no backend and refuses to serve slowly."""
    values = broken_install(tmp_path, "half_a_plugin:register")
    with server(tmp_path, model, values, FLAGS[spelling]) as (process, url, log):
        assert not ready(process, url)
        assert process.returncode != 0
        said = log.read_text()
    assert "a_module_that_was_never_installed" in said, "the cause is in the log"
    assert "no monokernel backend 'amd' is registered" in said, said[-4000:]
