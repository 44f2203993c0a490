# SPDX-License-Identifier: Apache-2.0
"""SGLang's own Triton kernels, compiled for gfx950 and run on the simulator: oracles that share no code with ours.

Run as a program, in a process of its own, because SGLang's kernel modules freeze the platform when they are imported:

    python -m helpers.stock_kernels KERNEL inputs.pt outputs.pt

Inputs and outputs are dicts of tensors and numbers (torch.save). Kernels:

gdn_decode: one token of the gated delta rule: conv update, packed decode, gated norm. mixed_qkv (rows, channels) bf16
before the convolution; conv_state (slots, channels, 3) bf16; conv_weight (channels, 4) bf16; a, b (rows, value heads)
bf16; A_log, dt_bias (value heads) f32 or bf16; z (rows, value heads, head) bf16; norm_weight (head); ssm_state (slots,
value heads, head, head) f32 or bf16; state_indices (rows) int32; scale, eps. Gives conv (rows, channels) bf16,
conv_state, core (rows, value heads, head) bf16, ssm_state, gated (like core).

gdn_prefill: whole sequences in chunks. q, k (1, tokens, key heads, head), v (1, tokens, value heads, head), beta (1,
tokens, value heads) bf16; g (the same) f32, the logarithm of the decay; state as ssm_state; state_indices (sequences);
cu_seqlens (sequences + 1) int32; scale. Gives out (like v) and state.

decode_attention: grouped-query attention of one token a row over a paged cache. q (rows, heads, head) bf16; k, v
(slots, key heads, head) bf16; indptr (rows + 1) int32 and indices int64: the slots of every row; splits (rows) int32,
of at most max_splits; scale. Gives out (like q).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

HIP_VERSION = "6.4"  # any: only that it is set makes SGLang take its HIP branches
PAD_SLOT = -1
CUS = 256


def run_stock(kernel: str, inputs: dict[str, Any], timeout_s: float = 900) -> dict[str, Any]:
    """Run a kernel in a fresh process; the outputs, and `instructions`: [(Triton kernel, wave-instructions)].

    Raises RuntimeError with the process's output where it fails.
    """
    import torch

    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "inputs.pt", Path(folder) / "outputs.pt"
        torch.save(inputs, source)
        path = os.pathsep.join([str(root.parent), str(root)])
        environment = {**os.environ, "SGLANG_USE_AITER": "1", "PYTHONPATH": path}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", "helpers.stock_kernels", kernel, str(source), str(target)]
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the stock kernel {kernel} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return torch.load(target)


def gdn_decode(given: dict[str, Any]) -> dict[str, Any]:
    import torch
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

    # The two places that ask a GPU for itself.
    layernorm_gated._get_sm_count = lambda device: CUS
    layernorm_gated.device_context = lambda device: contextlib.nullcontext()

    conv_state, ssm_state = given["conv_state"].clone(), given["ssm_state"].clone()
    indices = given["state_indices"]
    rows, heads = given["a"].shape
    head = given["z"].shape[-1]
    conv = causal_conv1d_update(
        given["mixed_qkv"].clone(),
        conv_state,
        given["conv_weight"],
        None,
        "silu",
        conv_state_indices=indices,
        pad_slot_id=PAD_SLOT,
    )
    core = torch.zeros(rows, 1, heads, head, dtype=torch.bfloat16)
    fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=conv,
        a=given["a"],
        b=given["b"],
        A_log=given["A_log"],
        dt_bias=given["dt_bias"],
        scale=given["scale"],
        initial_state=ssm_state,
        out=core,
        ssm_state_indices=indices,
        use_qk_l2norm_in_kernel=True,
    )
    core = core[:, 0]
    gated = layernorm_gated.rms_norm_gated(
        x=core.reshape(-1, head),
        weight=given["norm_weight"],
        bias=None,
        z=given["z"].reshape(-1, head),
        eps=given["eps"],
        norm_before_gate=True,
        is_rms_norm=True,
    )
    return {
        "conv": conv,
        "conv_state": conv_state,
        "core": core,
        "ssm_state": ssm_state,
        "gated": gated.reshape(core.shape),
    }


def gdn_prefill(given: dict[str, Any]) -> dict[str, Any]:
    from sglang.kernels.ops.attention.fla import utils

    utils.custom_device_ctx = lambda index: contextlib.nullcontext()
    from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule

    state = given["state"].clone()
    out = chunk_gated_delta_rule(
        given["q"],
        given["k"],
        given["v"],
        given["g"],
        given["beta"],
        scale=given["scale"],
        initial_state=state,
        initial_state_indices=given["state_indices"],
        cu_seqlens=given["cu_seqlens"],
        use_qk_l2norm_in_kernel=True,
    )[0]
    return {"out": out, "state": state}


def decode_attention(given: dict[str, Any]) -> dict[str, Any]:
    import torch
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    q, splits = given["q"], given["max_splits"]
    out = torch.zeros_like(q)
    logits, lse = torch.zeros(*q.shape[:2], splits, q.shape[2]), torch.zeros(*q.shape[:2], splits)
    decode_attention_fwd(
        q,
        given["k"],
        given["v"],
        out,
        given["indptr"],
        given["indices"],
        logits,
        lse,
        given["splits"],
        splits,
        given["scale"],
        1.0,
        1.0,
        enable_lean=False,
    )
    return {"out": out}


def _pretend_gpu() -> None:
    """What the kernels' Python asks of a GPU: its architecture and its number of compute units."""
    import torch

    torch.version.hip = HIP_VERSION
    properties = types.SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-", multi_processor_count=CUS, warp_size=64)
    torch.cuda.get_device_properties = lambda *device: properties
    torch.cuda.get_device_capability = lambda *device: (9, 5)


def _main(kernel: str, source: str, target: str) -> None:
    import torch

    _pretend_gpu()
    from sgl_amd_mono.sim.triton_driver import activate

    driver = activate()
    from sgl_amd_mono.simulate.harness import prepare

    prepare()  # import-only stubs of packages that need a GPU
    run = {"gdn_decode": gdn_decode, "gdn_prefill": gdn_prefill, "decode_attention": decode_attention}[kernel]
    outputs = run(torch.load(source))
    instructions = [(launch.name, launch.wave_instructions) for launch in driver.launches]
    torch.save({**outputs, "instructions": instructions}, target)


if __name__ == "__main__":
    _main(*sys.argv[1:])
