# SPDX-License-Identifier: Apache-2.0
"""SGLang's own Engine on the simulated model: `python engine_run.py JOB.json`, in the environment of `simulate`.

The job names checkpoint, ranks, plugin, prompts, tokens to generate and the result file. The result holds, for each
request, the greedy tokens and the two best log-probabilities of each.
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
    arguments = server_arguments(Path(job["checkpoint"]), job["plugin"], job["ranks"])
    engine = Engine(server_args=prepare_server_args(arguments))
    try:
        answers = engine.generate(
            input_ids=job["prompts"],
            sampling_params={"temperature": 0.0, "max_new_tokens": job["tokens"], "ignore_eos": True},
            return_logprob=True,
            top_logprobs_num=2,
        )
        result = [
            {
                "tokens": [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]],
                "best": [[value for value, _, _ in top] for top in answer["meta_info"]["output_top_logprobs"]],
            }
            for answer in answers
        ]
    finally:
        engine.shutdown()
    Path(job["out"]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":  # SGLang starts its processes by spawning: they import this file
    raise SystemExit(main())
