# SPDX-License-Identifier: Apache-2.0
"""SGLang's own GDN decode kernels (Triton), compiled for gfx950 and run on the simulator: an oracle that shares no
code with ours.

Run as a program, in a process of its own, because SGLang's kernel modules freeze the platform when they are imported:

    python -m helpers.stock_gdn inputs.pt outputs.pt

inputs (torch.save of a dict): mixed_qkv (rows, channels) bf16 before the convolution; conv_state (slots, channels, 3)
bf16; conv_weight (channels, 4) bf16; a, b (rows, value heads) bf16; A_log, dt_bias (value heads) f32; z (rows, value
heads, head) bf16; norm_weight (head) bf16 or f32; ssm_state (slots, value heads, head, head) f32 or bf16;
state_indices (rows) int32; scale, eps floats. outputs: conv (rows, channels) bf16, conv_state, core (rows, value
heads, head) bf16, ssm_state, gated (like core), instructions: {kernel: wave-instructions}.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HIP_VERSION = "6.4"  # any: only that it is set makes SGLang take its HIP branches
PAD_SLOT = -1


def run_stock(inputs: dict[str, Any], timeout_s: float = 600) -> dict[str, Any]:
    """Run the kernels in a fresh process. Raises RuntimeError with the process's output where it fails."""
    import torch

    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "inputs.pt", Path(folder) / "outputs.pt"
        torch.save(inputs, source)
        environment = {
            **os.environ,
            "SGLANG_USE_AITER": "1",
            "PYTHONPATH": os.pathsep.join([str(root.parent), str(root)]),
        }
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", "helpers.stock_gdn", str(source), str(target)]
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the stock kernels failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return torch.load(target)


def _main(source: str, target: str) -> None:
    import torch

    torch.version.hip = HIP_VERSION
    from helpers.triton_sim import activate

    driver = activate()
    from sgl_amd_mono.simulate.harness import prepare

    prepare()  # import-only stubs of packages that need a GPU
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

    # The two places that ask a GPU for itself.
    layernorm_gated._get_sm_count = lambda device: 256
    layernorm_gated.device_context = lambda device: contextlib.nullcontext()

    given = torch.load(source)
    conv_state, ssm_state = given["conv_state"].clone(), given["ssm_state"].clone()
    indices = given["state_indices"]
    rows, heads = given["a"].shape
    head = given["z"].shape[-1]
    conv = causal_conv1d_update(
        given["mixed_qkv"].clone(), conv_state, given["conv_weight"], None, "silu", conv_state_indices=indices,
        pad_slot_id=PAD_SLOT,
    )  # fmt: skip
    core = torch.zeros(rows, 1, heads, head, dtype=torch.bfloat16)
    fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=conv, a=given["a"], b=given["b"], A_log=given["A_log"], dt_bias=given["dt_bias"],
        scale=given["scale"],
        initial_state=ssm_state, out=core, ssm_state_indices=indices, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    core = core[:, 0]
    gated = layernorm_gated.rms_norm_gated(
        x=core.reshape(-1, head), weight=given["norm_weight"], bias=None, z=given["z"].reshape(-1, head),
        eps=given["eps"],
        norm_before_gate=True, is_rms_norm=True,
    )  # fmt: skip
    instructions = {ran.name: ran.report.wave_instructions for ran in driver.ran}
    torch.save(
        {"conv": conv, "conv_state": conv_state, "core": core, "ssm_state": ssm_state,
        "gated": gated.reshape(core.shape),
         "instructions": instructions},
        target,
    )  # fmt: skip


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
