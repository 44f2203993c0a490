# SPDX-License-Identifier: Apache-2.0
"""SGLang's own Triton kernels, compiled for gfx950 and run on the simulator: oracles that share no code with ours.

They run in a process of their own, because SGLang's kernel modules freeze the platform when they are imported; a test
process starts one at its first `run_stock` and keeps it. Every kernel is called as SGLang's HIP branch calls it, with
its own wrapper and launch parameters. Inputs and outputs are dicts of tensors and numbers. Kernels:

gemma_norm: the layer's input norm. hidden (rows, width) bf16; residual the same, or absent (first layer); norm_weight
(width) bf16, applied as 1 + w; eps. Gives x and residual_out, bf16.

split: qkvz (rows, q | k | v | z), ba (rows, b | a) bf16; key_heads, value_heads, head. Gives mixed_qkv (rows,
channels), z (rows, value heads, head), b, a (rows, value heads). The HIP branch has its fused kernel for 1, 2, 4 and 8
value heads a key head; others (the 27B's 3) are split and joined by PyTorch, which is done here too.

gdn_decode: one token of the gated delta rule: conv update, packed decode, gated norm. mixed_qkv (rows, channels) bf16
before the convolution; conv_state (slots, channels, 3) bf16; conv_weight (channels, 4) bf16; a, b (rows, value heads)
bf16; A_log, dt_bias (value heads) f32 or bf16; z (rows, value heads, head) bf16; norm_weight (head); ssm_state (slots,
value heads, head, head) f32 or bf16; state_indices (rows) int32, -1 a pad row; scale, eps. Gives conv (rows, channels)
bf16, conv_state, core (rows, value heads, head) bf16, ssm_state, gated (like core).

gdn_front: split, then gdn_decode, then nothing: inputs of both (mixed_qkv, z, a and b come from the split), outputs of
both.

gdn_prefill: whole sequences in chunks. q, k (1, tokens, key heads, head), v (1, tokens, value heads, head), beta (1,
tokens, value heads) bf16; g (the same) f32, the logarithm of the decay; state as ssm_state; state_indices (sequences);
cu_seqlens (sequences + 1) int32; scale. Gives out (like v) and state.

decode_attention: grouped-query attention of one token a row over a paged cache. q (rows, heads, head) bf16; k, v
(slots, key heads, head) bf16; indptr (rows + 1) int32 and indices int64: the slots of every row; splits (rows) int32,
of at most max_splits; scale. Gives out (like q).

beta_probe: the plugin's probes of the packed decode and of the verify kernel (`common.stock_probe`). key_heads,
value_heads, head. Gives rounds and verify_rounds.

Planted mistakes (`PLANTS`): a copy of SGLang's module with one line changed runs in the place of the original.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import io
import multiprocessing.connection
import os
import subprocess
import sys
import tempfile
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HIP_VERSION = "6.4"  # any: only that it is set makes SGLang take its HIP branches
CUS = 256
FUSED_SPLIT_RATIOS = (1, 2, 4, 8)  # value heads a key head that the HIP branch's fused split serves
RECURRENT = "sglang.kernels.ops.attention.fla.fused_recurrent"
GATED_NORM = "sglang.kernels.ops.attention.fla.layernorm_gated"
VERIFY = "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent"
CONV = "sglang.kernels.ops.mamba.causal_conv1d_triton"


@dataclass(frozen=True)
class Plant:
    """A mistake: `old` becomes `new`, `count` times, in the source of a module of SGLang."""

    module: str
    old: str
    new: str
    count: int = 1


PACKED_BETA = "beta_val = tl.sigmoid(b_val).to(b.dtype.element_ty).to(tl.float32)"
PLANTS = {
    # The packed decode of 0.5.23 rounds beta: the copy does not (the KDA kernel below it is another one).
    "beta not rounded": Plant(RECURRENT, PACKED_BETA, "beta_val = tl.sigmoid(b_val)"),
    "verify beta rounded": Plant(
        VERIFY,
        "b_beta = 1.0 / (1.0 + tl.exp(-b_b))",
        "b_beta = (1.0 / (1.0 + tl.exp(-b_b))).to(tl.bfloat16).to(tl.float32)",
    ),
    "l2norm epsilon moved out of the root": Plant(
        RECURRENT,
        "b_k / tl.sqrt(tl.sum(b_k * b_k) + 1e-6)\n    b_q = b_q * scale\n\n    a_val",
        "b_k / (tl.sqrt(tl.sum(b_k * b_k)) + 1e-6)\n    b_q = b_q * scale\n\n    a_val",
    ),
    "conv products unrounded": Plant(
        CONV, "acc += matrix_x * matrix_w", "acc += matrix_x.to(tl.float32) * matrix_w.to(tl.float32)", 3
    ),
    "softplus threshold dropped": Plant(RECURRENT, "SOFTPLUS_THRESHOLD=20.0", "SOFTPLUS_THRESHOLD=1.0e30", 2),
    "gate before norm": Plant(GATED_NORM, "NORM_BEFORE_GATE=norm_before_gate", "NORM_BEFORE_GATE=not norm_before_gate"),
}


class StockError(RuntimeError):
    """A stock kernel raised, or its process ended; the message has the child's own text."""


class _Process:
    """The process that runs stock kernels, and the pipe to it."""

    def __init__(self) -> None:
        root = Path(__file__).resolve().parent.parent
        self.pipe, theirs = multiprocessing.connection.Pipe()
        path = os.pathsep.join([str(root.parent), str(root)])
        environment = {**os.environ, "SGLANG_USE_AITER": "1", "PYTHONPATH": path}
        environment.pop("TRITON_INTERPRET", None)
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the child)
        self.child = subprocess.Popen(
            [sys.executable, "-m", "helpers.stock_kernels", str(theirs.fileno())],
            cwd=root, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self.log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        theirs.close()
        atexit.register(self.end)

    def end(self) -> None:
        self.pipe.close()  # the child's read ends, and so does it
        try:
            self.child.wait(10)
        except subprocess.TimeoutExpired:
            self.child.kill()

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()[-4000:]

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        import torch

        packed = io.BytesIO()
        torch.save(message, packed)
        try:
            self.pipe.send_bytes(packed.getvalue())
            if not self.pipe.poll(timeout_s):
                self.child.kill()
                raise StockError(f"no answer in {timeout_s:g} s:\n{self.said()}")
            return torch.load(io.BytesIO(self.pipe.recv_bytes()))
        except (EOFError, OSError) as error:
            raise StockError(f"the process of the stock kernels ended ({error!r}):\n{self.said()}") from error


_process: _Process | None = None


def run_stock(
    kernel: str, inputs: dict[str, Any], timeout_s: float = 900, *, plant: str | None = None
) -> dict[str, Any]:
    """Run a kernel; the outputs, and `launches`: [(Triton kernel, grid, threads, wave-instructions)].

    plant: a name in PLANTS. Raises StockError with the child's text where it fails.
    """
    global _process
    if _process is None or _process.child.poll() is not None:
        _process = _Process()
    message = {"kernel": kernel, "inputs": inputs, "plant": plant}
    try:
        answer = _process.ask(message, timeout_s)
    except StockError:
        _process = None
        raise
    if "error" in answer:
        raise StockError(f"the stock kernel {kernel} failed:\n{answer['error']}")
    return answer


# ---- in the child ------------------------------------------------------------------------------------------------


def _module(name: str, plant: str | None) -> Any:
    """A module of SGLang, or its copy with the planted mistake; what asks a GPU for itself is answered."""
    module = _planted(plant) if plant and PLANTS[plant].module == name else importlib.import_module(name)
    if name == GATED_NORM:
        module._get_sm_count = lambda device: CUS
        module.device_context = lambda device: contextlib.nullcontext()
    return module


_copies: dict[str, Any] = {}
_folder = tempfile.TemporaryDirectory()


def _planted(plant: str) -> Any:
    if plant not in _copies:
        change = PLANTS[plant]
        source = Path(importlib.util.find_spec(change.module).origin).read_text()
        if source.count(change.old) != change.count:
            raise RuntimeError(f"{plant}: {change.module} has {change.old!r} {source.count(change.old)} times")
        name = f"planted_{len(_copies)}"
        path = Path(_folder.name) / f"{name}.py"
        path.write_text(source.replace(change.old, change.new))
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _copies[plant] = module
    return _copies[plant]


def gemma_norm(given: dict[str, Any], plant: str | None) -> dict[str, Any]:
    norm = _module("sglang.kernels.ops.layernorm.minimax_m3_rmsnorm", plant)
    hidden, residual = given["hidden"], given.get("residual")
    if residual is None:
        x, residual_out = norm.gemma_rmsnorm(hidden, given["norm_weight"], given["eps"]), hidden
    else:
        x, residual_out = norm.gemma_fused_add_rmsnorm(hidden, residual, given["norm_weight"], given["eps"])
    return {"x": x, "residual_out": residual_out}


def split(given: dict[str, Any], plant: str | None) -> dict[str, Any]:
    import torch

    key_heads, value_heads, head = given["key_heads"], given["value_heads"], given["head"]
    qkvz, ba = given["qkvz"], given["ba"]
    if value_heads // key_heads in FUSED_SPLIT_RATIOS:
        projection = _module("sglang.kernels.ops.attention.triton_gdn_fused_proj", plant)
        mixed, z, b, a = projection.fused_qkvzba_split_reshape_cat_contiguous(
            qkvz, ba, key_heads, value_heads, head, head
        )
    else:
        key, value = key_heads * head, value_heads * head
        q, k, v, z = qkvz.split([key, key, value, value], dim=-1)
        b, a = (part.contiguous() for part in ba.split([value_heads, value_heads], dim=-1))
        mixed, z = torch.cat((q, k, v), dim=-1), z.reshape(len(z), value_heads, head)
    return {"mixed_qkv": mixed, "z": z, "b": b, "a": a}


def gdn_front(given: dict[str, Any], plant: str | None) -> dict[str, Any]:
    parts = split(given, plant)
    return {**parts, **gdn_decode({**given, **parts}, plant)}


def gdn_decode(given: dict[str, Any], plant: str | None) -> dict[str, Any]:
    import torch

    conv_state, ssm_state = given["conv_state"], given["ssm_state"]  # the child's own copies, as they are sent here
    indices = given["state_indices"]
    rows, heads = given["a"].shape
    head = given["z"].shape[-1]
    conv = _module(CONV, plant).causal_conv1d_update(
        given["mixed_qkv"], conv_state, given["conv_weight"], None, "silu", conv_state_indices=indices
    )
    core = conv.new_empty(rows, 1, heads, head)
    _module(RECURRENT, plant).fused_recurrent_gated_delta_rule_packed_decode(
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
    norm = _module(GATED_NORM, plant).RMSNorm(head, eps=given["eps"], dtype=torch.bfloat16)
    norm.weight.data = given["norm_weight"]
    gated = norm(core.reshape(-1, head), given["z"].reshape(-1, head)).detach()
    return {
        "conv": conv,
        "conv_state": conv_state,
        "core": core,
        "ssm_state": ssm_state,
        "gated": gated.reshape(core.shape),
    }


def gdn_prefill(given: dict[str, Any], plant: str | None) -> dict[str, Any]:
    from sglang.kernels.ops.attention.fla import utils

    utils.custom_device_ctx = lambda index: contextlib.nullcontext()
    from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule

    from sgl_amd_mono.sim.triton_driver import use_configuration
    from sgl_amd_mono.simulate.harness import CONFIGURATIONS

    for module, kernel, stated in CONFIGURATIONS:
        use_configuration(getattr(importlib.import_module(module), kernel), **stated)
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


def decode_attention(given: dict[str, Any], plant: str | None) -> dict[str, Any]:
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


def beta_probe(given: dict[str, Any], plant: str | None) -> dict[str, Any]:
    import torch

    from sgl_amd_mono.common.stock_probe import rounds_beta, verify_rounds_beta

    sizes = given["key_heads"], given["value_heads"], given["head"], torch.device("cpu")
    decode = _module(RECURRENT, plant).fused_recurrent_gated_delta_rule_packed_decode
    update = _module(VERIFY, plant).fused_sigmoid_gating_delta_rule_update
    return {"rounds": rounds_beta(*sizes, decode), "verify_rounds": verify_rounds_beta(*sizes, update)}


def _pretend_gpu() -> None:
    """What the kernels' Python asks of a GPU: its architecture and its number of compute units."""
    import torch

    torch.version.hip = HIP_VERSION
    properties = types.SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-", multi_processor_count=CUS, warp_size=64)
    torch.cuda.get_device_properties = lambda *device: properties
    torch.cuda.get_device_capability = lambda *device: (9, 5)


KERNELS = {
    "gemma_norm": gemma_norm,
    "split": split,
    "gdn_decode": gdn_decode,
    "gdn_front": gdn_front,
    "gdn_prefill": gdn_prefill,
    "decode_attention": decode_attention,
    "beta_probe": beta_probe,
}


def _serve(descriptor: int) -> None:
    """Answer requests until the pipe closes."""
    import torch

    _pretend_gpu()
    from sgl_amd_mono.sim.triton_driver import activate

    driver = activate()
    from sgl_amd_mono.simulate.harness import prepare

    prepare()  # import-only stubs of packages that need a GPU
    pipe = multiprocessing.connection.Connection(descriptor)
    while True:
        try:
            request = torch.load(io.BytesIO(pipe.recv_bytes()))
        except EOFError:
            return
        driver.launches.clear()
        try:
            with torch.no_grad():
                answer = KERNELS[request["kernel"]](request["inputs"], request["plant"])
            launches = [(ran.name, ran.grid, ran.threads, ran.wave_instructions) for ran in driver.launches]
            answer = {**answer, "launches": launches}
        except Exception:
            answer = {"error": traceback.format_exc()}
        packed = io.BytesIO()
        torch.save(answer, packed)
        pipe.send_bytes(packed.getvalue())


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
