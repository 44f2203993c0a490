# SPDX-License-Identifier: Apache-2.0
"""SGLang's Engine as a client sees it: `python engine_stream.py JOB.json` prints `token N` for each token that arrives.

The job names checkpoint, ranks, prompt and tokens to generate; the environment is that of `simulate`, with the plugin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TEST_FOLDER = Path(__file__).resolve().parents[1]
PROMPT = [5, 6, 7, 8, 9]
TOKENS = 6


def serve(folder: Path, model: Path, fault: str, **variables: str) -> tuple[int, list[str], str]:
    """(exit status, tokens and `done` that the client saw, log) of an Engine of two ranks that streams one answer.

    `fault` is one of `fault_runtime`; `variables` are added to its environment.
    """
    from helpers.fault_runtime import FAULT_VARIABLE
    from sgl_amd_mono.simulate import plugin

    job = folder / "job.json"
    job.write_text(json.dumps({"checkpoint": str(model), "ranks": 2, "prompt": PROMPT, "tokens": TOKENS}))
    environment = plugin.environment(folder / "entry_point", "consistent", 0, (1,), spawned=True)
    environment |= {
        plugin.RUNTIME_VARIABLE: "helpers.fault_runtime:factory",
        FAULT_VARIABLE: fault,
        "PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], str(TEST_FOLDER)]),
    }
    done = subprocess.run(
        [sys.executable, __file__, str(job)], env=environment | variables, capture_output=True, text=True, timeout=1200
    )
    seen = [line for line in done.stdout.splitlines() if line.startswith("token ") or line == "done"]
    return done.returncode, seen, done.stdout + done.stderr


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    from sgl_amd_mono.simulate import harness

    harness.prepare()
    from sglang import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from sgl_amd_mono.simulate.runner import server_arguments

    load_plugins()
    arguments = server_arguments(Path(job["checkpoint"]), True, job["ranks"])
    engine = Engine(server_args=prepare_server_args(arguments))
    parameters = {"temperature": 0.0, "max_new_tokens": job["tokens"], "ignore_eos": True}
    answer = engine.generate(input_ids=job["prompt"], sampling_params=parameters, stream=True)
    seen = 0
    for part in answer:
        for token in part["output_ids"][seen:]:
            print(f"token {token}", flush=True)
        seen = len(part["output_ids"])
    engine.shutdown()
    print("done", flush=True)
    return 0


if __name__ == "__main__":  # SGLang starts its processes by spawning: they import this file
    raise SystemExit(main())
