# SPDX-License-Identifier: Apache-2.0
"""Check mode beside SGLang's own Triton kernels: `python stock_run.py FOLDER`, JSON out.

SGLang's kernels run as gfx950 code on the simulator, and so do K1 and K2. The last line holds which platform SGLang's
modules saw, how often each stock kernel ran in a prefill and beside a checked step, and a step with a planted mistake.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def platforms() -> dict[str, Any]:
    """What modules of SGLang decided when they were imported, and what it says and finds now."""
    import torch
    from sglang.kernels.ops.attention import decode_attention, triton_gdn_fused_proj
    from sglang.kernels.ops.attention.fla import layernorm_gated, utils
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.srt.batch_invariant_ops import batch_invariant_ops
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.models import qwen2_moe
    from sglang.srt.utils import is_hip

    return {
        "kernels": [
            decode_attention._is_hip,
            triton_gdn_fused_proj._is_hip,
            triton_gdn_fused_proj._use_aiter,
            elementwise._is_hip,
            utils.is_amd,
            utils.check_shared_mem(),
        ],
        "others": [qwen2_moe._is_hip, qwen2_moe._use_aiter, is_hip(), torch.version.hip is not None],
        "imported by a kernel": [batch_invariant_ops.__name__ in sys.modules, layernorm_gated._use_cpu],
        "device count": torch.cuda.device_count(),
        "aiter asked for": "SGLANG_USE_AITER" in os.environ,
        "bound on ROCm only": gdn_backend.fused_qkv_split_gdn_prefill.__module__,
    }


def main() -> int:
    (folder,) = sys.argv[1:]
    from helpers import check_run, spec_double
    from sgl_amd_mono.common.runtime import simulator_runtime
    from sgl_amd_mono.simulate import harness, rocm_import

    harness.prepare("triton")
    spec_double.FACTORY = simulator_runtime
    loaded = spec_double.load_sglang(Path(folder))
    bench = check_run.Bench(loaded, spec_double.built_step(loaded.model))
    launches = rocm_import.driver().launches

    def ran() -> dict[str, int]:
        counted = Counter(launch.name for launch in launches)
        launches.clear()
        return counted

    prompts = check_run.PROMPTS[:3]
    ran()
    loaded.prefill(prompts)
    prefill = ran()
    checked = check_run.batch(3, 4)(bench)
    both = ran()  # the same prefill twice, and a step without and with check mode
    result = {
        "platforms": platforms(),
        "prefill": prefill,
        "beside a step": {name: count - 2 * prefill[name] for name, count in both.items() if count > 2 * prefill[name]},
        "checked": checked,
        "weight": check_run.mistake("weight")(bench),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
