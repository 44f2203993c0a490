# SPDX-License-Identifier: Apache-2.0
"""Prompts, then the same continued, on one Engine with a prefix cache: `python prefix_run.py JOB.json`.

Runs in the environment of `simulate`. The job names checkpoint, plugin, prompts, tokens and the result file: for each
pass and request the tokens, their two best log-probabilities, and how many prompt tokens came from the cache.
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
    arguments = server_arguments(Path(job["checkpoint"]), job["plugin"], 1)
    arguments[arguments.index("--disable-radix-cache")] = "--mamba-radix-cache-strategy=no_buffer"
    arguments[arguments.index("--max-mamba-cache-size") + 1] = "40"
    engine = Engine(server_args=prepare_server_args(arguments))
    passes = []
    try:
        for _ in range(2):
            answers = engine.generate(
                input_ids=job["prompts"],
                sampling_params={"temperature": 0.0, "max_new_tokens": job["tokens"], "ignore_eos": True},
                return_logprob=True,
                top_logprobs_num=2,
            )
            passes.append(
                [
                    {
                        "tokens": [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]],
                        "best": [[value for value, _, _ in top] for top in answer["meta_info"]["output_top_logprobs"]],
                        "cached": answer["meta_info"]["cached_tokens"],
                    }
                    for answer in answers
                ]
            )
            # the second pass continues the first: its prompts are the first's with their answers
            job["prompts"] = [p + a["tokens"] for p, a in zip(job["prompts"], passes[-1], strict=True)]
    finally:
        engine.shutdown()
    Path(job["out"]).write_text(json.dumps(passes))
    return 0


if __name__ == "__main__":  # SGLang starts its processes by spawning: they import this file
    raise SystemExit(main())
