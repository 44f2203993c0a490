# SPDX-License-Identifier: Apache-2.0
"""SGLang's Engine as a client sees it: `python engine_stream.py JOB.json` prints `token N` for each token that arrives.

The job names checkpoint, ranks, prompt and tokens to generate; the environment is that of `simulate`, with the plugin.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


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
