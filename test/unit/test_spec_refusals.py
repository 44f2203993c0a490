# SPDX-License-Identifier: Apache-2.0
"""Every refusal, as a person sees it, on SGLang's real argument, config and model classes; also under `python -O`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import spec_refusals

REPOSITORY = Path(__file__).resolve().parents[2]
NO_FLAG = "start without --enable-amd-monokernel"
CHECKPOINT = f"serve a Qwen3.8-2.4T-A95B checkpoint, or {NO_FLAG}"
BF16 = f"serve a checkpoint that leaves this weight in bfloat16 (exclude it from quantisation), or {NO_FLAG}"
PROJECTION = f"serve a checkpoint with this weight in bfloat16 or in Quark's MXFP4 (W4A4), or {NO_FLAG}"
EITHER = "torch.bfloat16, or torch.uint8 of QuarkW4A4MXFP4"
EXPERTS = "serve the MXFP4 (Quark) checkpoint with SGLANG_USE_AITER=1"


def run(phase: str, folder: Path, *options: str) -> dict[str, list[str]]:
    """The cases of a phase, in a process of its own."""
    script = Path(spec_refusals.__file__)
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "test"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *options, str(script), str(folder), phase],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=540,
    )
    if done.returncode:
        raise AssertionError(f"exit {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# One process a phase; `-O` removes assertions, and must remove no check.
@pytest.fixture(scope="module", params=["plain", "optimised"])
def arguments(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run("arguments", tmp_path_factory.mktemp("arguments"), *(["-O"] if request.param == "optimised" else []))


@pytest.fixture(scope="module", params=["plain", pytest.param("optimised", marks=pytest.mark.full)])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run("weights", tmp_path_factory.mktemp("weights"), *(["-O"] if request.param == "optimised" else []))


def config(field: str, found: str, needed: str) -> list[str]:
    return [f"config.{field}: found {found}; needed: {needed}; fix: {CHECKPOINT}"]


RECORDER = (
    "--expert-distribution-recorder-mode: found 'stat'; needed: none: K2 routes inside the kernel and records "
    "nothing; fix: start without --expert-distribution-recorder-mode"
)
ARGUMENT_LINES = {
    "accepted": [],
    "bf16 state": [],
    # lines that SGLang words
    "tp 4": ["tp_size 4 is not one of ['8']"],
    "tp 3": ["tp_size 3 is not one of ['8']"],
    "dtype": ["dtype 'float16' is not one of ['bfloat16']"],
    "no gpu": ["no GPU is visible"],
    "gfx942": ["monokernel backend 'amd' has no spec for ['Qwen3_5MoeForCausalLM'] on gfx942"],
    # ours
    "hidden": config("hidden_size", "4096", "8192"),
    "key heads": config("linear_num_key_heads", "32", "16"),
    "value heads": config("linear_num_value_heads", "64", "128"),
    "key dim": config("linear_key_head_dim", "64", "128"),
    "value dim": config("linear_value_head_dim", "256", "128"),
    "conv": config("linear_conv_kernel_dim", "3", "4"),
    "experts": config("num_experts", "256", "512"),
    "top-k": config("num_experts_per_tok", "8", "10"),
    "expert size": config("moe_intermediate_size", "1024", "2048"),
    "shared size": config("shared_expert_intermediate_size", "1024", "2048"),
    "activation": config("hidden_act", "'gelu'", "'silu'"),
    "norm_topk_prob": config("norm_topk_prob", "False", "True"),
    "output gate": config("attn_output_gate", "False", "True"),
    "gate type": config("output_gate_type", "'sigmoid'", "'swish' or none"),
    "eps": config("rms_norm_eps", "1e-05", "1e-06"),
    "attention heads": config("num_attention_heads x head_dim", "32 x 256 = 8192", "16384"),
    "layers": config("num_hidden_layers", "128", "at most 127, one tag slot a layer"),
    "aiter": [
        "SGLANG_USE_AITER: found False; needed: True: the experts stay in AITER's shuffled layout, which the kernels "
        "read; fix: set SGLANG_USE_AITER=1"
    ],
    "conv dtype": [
        "conv state dtype: found torch.float16; needed: torch.bfloat16; fix: unset SGLANG_MAMBA_CONV_DTYPE"
    ],
    "state dtype": [
        "SSM state dtype: found torch.float16; needed: torch.float32 or torch.bfloat16, the ones tested for drift; "
        "fix: --mamba-ssm-dtype float32"
    ],
    "state dtype config": [
        "SSM state dtype: found torch.float16; needed: torch.float32 or torch.bfloat16, the ones tested for drift; "
        "fix: --mamba-ssm-dtype float32"
    ],
    "replayssm": [
        "--enable-linear-replayssm: found on; needed: off: K1 updates the state in place; "
        "fix: start without --enable-linear-replayssm"
    ],
    "verify steps": [],
    # no K1 is built there: SGLang's own GDN keeps the states
    "replayssm with verify steps": [],
    "ragged verify": [
        "uneven tokens per request in verify (SGLANG_RAGGED_VERIFY_MODE) is in use and the spec does not accept it"
    ],
    "eagle3": ["EAGLE3 hidden states at covered layers is in use and the spec does not accept it"],
    "check mode": [
        "SGLANG_AMD_MONO_CHECK: found 'yes'; needed: 1 (check every launch), 0 or unset; "
        "fix: set SGLANG_AMD_MONO_CHECK=1"
    ],
    "two options": [
        "SGLANG_AMD_MONO_ONE_HOP: found 'on'; needed: 1 (K1 leaves the gated norm to K2), 0 or unset; "
        "fix: set SGLANG_AMD_MONO_ONE_HOP=1",
        "SGLANG_AMD_MONO_ONE_LAUNCH: found '2'; needed: 1 (K2 and the next layer's K1 are one launch), 0 or unset; "
        "fix: set SGLANG_AMD_MONO_ONE_LAUNCH=1",
    ],
    "on policy": [
        "--enable-deterministic-inference needs a BITWISE spec, and this one is not",  # SGLang turns it on with it
        "--rl-on-policy-target needs a BITWISE spec, and this one is not",
    ],
    "online mxfp4": [
        "SGLANG_ROCM_GDN_ONLINE_MXFP4: found True; needed: False: the kernels read the GDN projections as the "
        "checkpoint has them; fix: set SGLANG_ROCM_GDN_ONLINE_MXFP4=0"
    ],
    "online mxfp4 off": [],
    "deterministic": ["--enable-deterministic-inference needs a BITWISE spec, and this one is not"],
    "watchdog": ["--watchdog-timeout 8 s leaves the waits a deadline under 5 s"],
    "eplb": [
        "EPLB is in use and the spec does not accept it",
        "expert parallelism is in use and the spec does not accept it",
        RECORDER,
    ],
    "a2a backend": [
        "expert parallelism is in use and the spec does not accept it",
        "--moe-a2a-backend: found 'mori'; needed: 'none': K2 holds a share of every expert; "
        "fix: --moe-a2a-backend none",
    ],
    "unified memory": [
        "--enable-unified-memory: found on; needed: off: its state slots move while a step runs; "
        "fix: start without --enable-unified-memory"
    ],
    "recorder": [RECORDER],
    "enforced fusion": [],  # what it has loaded is looked at in the second phase
    "gdn backend": [
        "GDN decode backend: found 'cutedsl'; needed: 'triton', whose state layout K1 reads; "
        "fix: --linear-attn-decode-backend triton"
    ],
    "no flydsl": ["FlyDSL: found none; needed: flydsl >= 0.4.2, < 0.6; fix: pip install 'flydsl>=0.4.2,<0.6'"],
    "old flydsl": [
        "FlyDSL: found flydsl 0.4.0; needed: flydsl >= 0.4.2, < 0.6, the versions tested; "
        "fix: pip install 'flydsl>=0.4.2,<0.6'"
    ],
    "new flydsl": [
        "FlyDSL: found flydsl 0.6.0; needed: flydsl >= 0.4.2, < 0.6, the versions tested; "
        "fix: pip install 'flydsl>=0.4.2,<0.6'"
    ],
    # several at once: SGLang's first, then every one of ours
    "two at once": [
        "tp_size 4 is not one of ['8']",
        *config("hidden_size", "4096", "8192"),
        *config("num_experts", "256", "512"),
        "SGLANG_USE_AITER: found False; needed: True: the experts stay in AITER's shuffled layout, which the kernels "
        "read; fix: set SGLANG_USE_AITER=1",
    ],
} | {
    name: [f"{feature} is in use and the spec does not accept it"]
    for name, (_, feature) in spec_refusals.FEATURES.items()
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(ARGUMENT_LINES))
def test_arguments(arguments: dict[str, list[str]], case: str) -> None:
    assert arguments[case] == ARGUMENT_LINES[case]


def test_every_argument_case_is_asserted(arguments: dict[str, list[str]]) -> None:
    assert set(arguments) == set(ARGUMENT_LINES) | {"features"}


def test_every_feature_that_is_not_accepted_is_refused(arguments: dict[str, list[str]]) -> None:
    """SGLang's list of features, whole: partitioned GPUs are its check of the compute units."""
    suffix = " is in use and the spec does not accept it"
    refused = {
        line.removesuffix(suffix) for lines in ARGUMENT_LINES.values() for line in lines if line.endswith(suffix)
    }
    assert set(arguments["features"]) == refused | {"speculative decoding", "partitioned GPUs"}


def weight(where: str, name: str, found: str, needed: str, fix: str = BF16) -> list[str]:
    return [f"{where}: {name}: found {found}; needed: {needed}; fix: {fix}"]


LOADED_LINES = {
    "accepted": [],
    "undone": [],
    "input norm": weight("layer 0", "input_layernorm.weight", "torch.float32", "torch.bfloat16"),
    "qkvz dtype": weight("layer 0", "linear_attn.in_proj_qkvz.weight", "torch.float8_e4m3fn", EITHER, PROJECTION),
    "qkvz shape": weight(
        "layer 0", "linear_attn.in_proj_qkvz.weight", "shape [4592, 1024]", "shape [4608, 1024]", PROJECTION
    ),
    "qkvz stride": weight(
        "layer 0", "linear_attn.in_proj_qkvz.weight", "strides [1040, 1]",
        "rows stored one after another, strides [1024, 1]",
        "start without what re-arranges this weight after loading (LoRA, another weight layout option)",
    ),
    "qkvz offset": weight(
        "layer 0", "linear_attn.in_proj_qkvz.weight", "storage offset 1, 2 bytes past an aligned one",
        "an address that is a multiple of 16 bytes", "start without what packs this weight into a larger tensor",
    ),
    "ba": weight("layer 1", "linear_attn.in_proj_ba.weight", "torch.float16", EITHER, PROJECTION),
    # layer 2 has these two in MXFP4, which is served ("accepted") as Quark's W4A4 linear stores it, and not otherwise
    "ba uint8": weight(
        "layer 1", "linear_attn.in_proj_ba.weight", "torch.uint8 of another method than Quark", EITHER, PROJECTION
    ),
    "mxfp4 scheme": weight(
        "layer 2", "linear_attn.in_proj_ba.weight", "torch.uint8 of QuarkW8A8Fp8", EITHER, PROJECTION
    ),
    "mxfp4 shape": weight(
        "layer 2", "linear_attn.in_proj_qkvz.weight", "shape [4608, 496]", "shape [4608, 512]", PROJECTION
    ),
    "mxfp4 codes": weight(
        "layer 2", "linear_attn.in_proj_ba.weight_scale", "torch.float32", "torch.uint8", PROJECTION
    ),
    "mxfp4 no codes": weight(
        "layer 2", "linear_attn.in_proj_ba.weight_scale", "no such weight", "torch.uint8 [32, 32]", PROJECTION
    ),
    "mxfp4 transposed codes": weight(
        "layer 2", "linear_attn.in_proj_qkvz.weight_scale", "strides [1, 4608]",
        "rows stored one after another, strides [32, 1]",
        "start without what re-arranges this weight after loading (LoRA, another weight layout option)",
    ),
    "mxfp4 shuffled": weight(
        "layer 2", "linear_attn.in_proj_qkvz.weight", "MXFP4 in the layout of AITER's assembly GEMM",
        "MXFP4 in Quark's plain layout", "unset SGLANG_ROCM_USE_AITER_FP4_ASM_GEMM",
    ),
    "conv": weight("layer 0", "linear_attn.conv1d.weight", "torch.float32", "torch.bfloat16"),
    "conv bias": weight("layer 0", "linear_attn.conv1d.bias", "a bias", "no bias", CHECKPOINT),
    "conv activation": weight("layer 0", "linear_attn conv activation", "'gelu'", "'silu'", CHECKPOINT),
    "A_log": weight("layer 0", "linear_attn.A_log", "torch.bfloat16", "torch.float32", CHECKPOINT),
    "dt_bias": weight("layer 0", "linear_attn.dt_bias", "torch.float32", "torch.bfloat16", CHECKPOINT),
    "gated norm dtype": weight("layer 0", "linear_attn.norm.weight", "torch.float32", "torch.bfloat16"),
    "gated norm groups": weight("layer 0", "linear_attn.norm", "groups of 64", "one group of 128", CHECKPOINT),
    "gated norm order": weight(
        "layer 0", "linear_attn.norm", "the norm after the gate", "the norm before it", CHECKPOINT
    ),
    "gated norm activation": weight("layer 0", "linear_attn.norm activation", "'sigmoid'", "'swish'", CHECKPOINT),
    "gated norm bias": weight("layer 0", "linear_attn.norm.bias", "a bias", "no bias", CHECKPOINT),
    "gated norm eps": weight("layer 0", "linear_attn.norm epsilon", "1e-05", "1e-06", CHECKPOINT),
    "out_proj": weight(
        "layer 0", "linear_attn.out_proj.weight", "torch.uint8 of another method than Quark", EITHER, PROJECTION
    ),
    "mxfp4 out_proj shape": weight(
        "layer 2", "linear_attn.out_proj.weight", "shape [1008, 1024]", "shape [1024, 1024]", PROJECTION
    ),
    "mxfp4 out_proj stride": weight(
        "layer 2", "linear_attn.out_proj.weight", "strides [1040, 1]",
        "rows stored one after another, strides [1024, 1]",
        "start without what re-arranges this weight after loading (LoRA, another weight layout option)",
    ),
    "mxfp4 o_proj codes": weight(
        "layer 3", "self_attn.o_proj.weight_scale", "shape [1024, 56]", "shape [1024, 64]", PROJECTION
    ),
    "mxfp4 o_proj offset": weight(
        "layer 3", "self_attn.o_proj.weight_scale", "storage offset 1, 1 bytes past an aligned one",
        "an address that is a multiple of 16 bytes", "start without what packs this weight into a larger tensor",
    ),
    "mxfp4 o_proj shuffled": weight(
        "layer 3", "self_attn.o_proj.weight", "MXFP4 in the layout of AITER's assembly GEMM",
        "MXFP4 in Quark's plain layout", "unset SGLANG_ROCM_USE_AITER_FP4_ASM_GEMM",
    ),
    "post norm": weight("layer 1", "post_attention_layernorm.weight", "torch.float32", "torch.bfloat16"),
    "norm eps": weight("layer 1", "input_layernorm epsilon", "1e-05", "1e-06", CHECKPOINT),
    "o_proj": weight("layer 3", "self_attn.o_proj.weight", "torch.float32", EITHER, PROJECTION),
    "attention width": weight("layer 3", "self_attn.o_proj input width", "1024", "2048", CHECKPOINT),
    "attention post norm": weight("layer 3", "post_attention_layernorm.weight", "torch.float32", "torch.bfloat16"),
    "output gate": weight("layer 3", "self_attn output gate", "none", "an output gate", CHECKPOINT),
    "router": weight("layer 2", "mlp.gate.weight", "torch.float32", "torch.bfloat16"),
    "shared gate_up": weight(
        "layer 2", "mlp.shared_expert.gate_up_proj.weight", "torch.uint8", "torch.bfloat16"
    ),
    "shared down": weight(
        "layer 2", "mlp.shared_expert.down_proj.weight", "shape [1024, 480]", "shape [1024, 512]"
    ),
    "shared gate": weight("layer 2", "mlp.shared_expert_gate.weight", "torch.float32", "torch.bfloat16"),
    "shared down dtype": weight(
        "layer 2", "mlp.shared_expert.down_proj.weight", "torch.float16", "torch.bfloat16"
    ),
    "no router": weight("layer 2", "mlp.gate.weight", "no such weight", "torch.bfloat16 [32, 1024]"),
    "offloaded": weight("layer 2", "mlp.gate.weight", "on meta", "on cpu", "start without CPU offload"),
    "dense": weight("layer 2", "mlp", "a dense MLP", "a sparse MoE block", CHECKPOINT),
    "fused shared": [],
    "fused shared, as many experts": weight(
        "layer 1", "mlp shared expert", "fused into the routed ones, 32 experts",
        "33: the shared one last, 512 wide like the others", "--disable-shared-experts-fusion",
    ),
    "fused shared gate": weight("layer 1", "mlp.shared_expert_gate.weight", "torch.float32", "torch.bfloat16"),
    "fused shared on some ranks": weight("layer 1", "mlp.experts on this rank", "17", "all 33", "--ep-size 1"),
    "half the experts": weight("layer 2", "mlp.experts on this rank", "16", "all 32", "--ep-size 1"),
    "padded hidden": weight(
        "layer 2", "mlp.experts padding", "256 columns of hidden, 0 of the intermediate", "none", CHECKPOINT
    ),
    "padded": weight(
        "layer 2", "mlp.experts padding", "0 columns of hidden, 128 of the intermediate", "none", CHECKPOINT
    ),
    "interleaved": weight(
        "layer 2", "mlp.experts.w13 layout", "gate and up interleaved, although is_shuffled is set",
        "gate rows, then up rows", f"set SGLANG_USE_AITER_MOE_GU_ITLV=0, or {NO_FLAG}",
    ),
    "not gated": weight("layer 2", "mlp.experts activation", "'silu', not gated", "gated 'silu'", CHECKPOINT),
    "weights on the input": weight(
        "layer 2", "mlp", "apply_router_weight_on_input = True", "the plain form", CHECKPOINT
    ),
    "alpha": weight("layer 2", "mlp", "gemm1_alpha = 1.702", "the plain form", CHECKPOINT),
    "clamp of gemm 1": weight("layer 2", "mlp", "gemm1_clamp_limit = 7.0", "the plain form", CHECKPOINT),
    "grouped": weight("layer 2", "mlp", "grouped top-k = True", "the plain form", CHECKPOINT),
    "another all-reduce": [
        "model: found the FlashInfer MNNVL CuTe DSL all-reduce fusion is installed; needed: SGLang's own layer "
        f"boundaries; fix: {NO_FLAG}"
    ],
    "expert activation": weight("layer 2", "mlp.experts activation", "'gelu'", "gated 'silu'", CHECKPOINT),
    "clamp": weight("layer 2", "mlp", "swiglu_limit = 7.0", "the plain form", CHECKPOINT),
    "scaling": weight("layer 2", "mlp", "routed_scaling_factor = 2.5", "the plain form", CHECKPOINT),
    "correction bias": weight(
        "layer 2", "mlp", "router correction bias = present", "the plain form", CHECKPOINT
    ),
    "top-k": weight("layer 2", "mlp.topk", "8 experts a token", "4", CHECKPOINT),
    "renormalise": weight(
        "layer 2", "mlp.topk weights", "not renormalised", "renormalised over the top k", CHECKPOINT
    ),
    "scoring": weight("layer 2", "mlp.topk scoring", "'sigmoid'", "'softmax'", CHECKPOINT),
    # one fault in every layer is one line; two faults are two
    "every layer": weight("layers 0-3 (4 of 4)", "mlp.gate.weight", "torch.float32", "torch.bfloat16"),
    "two wrong": [
        *weight("layer 0", "linear_attn.in_proj_ba.weight", "torch.float16", EITHER, PROJECTION),
        *weight("layer 3", "self_attn.o_proj.weight", "torch.float32", EITHER, PROJECTION),
    ],
}  # fmt: skip

# the fix is long; these begin with
LOADED_BEGINNINGS = {
    "experts bf16": "layer 2: mlp.experts.w13_weight: found torch.bfloat16; needed: torch.uint8; fix: " + EXPERTS,
    "experts shape": "layer 2: mlp.experts.w13_weight: found shape [32, 992, 512]; needed: shape [32, 1024, 512]; ",
    "scale shape": "layer 2: mlp.experts.w2_weight_scale: found shape [32768, 16]; needed: shape [32, 1024, 16]; ",
    "experts stride": "layer 2: mlp.experts.w2_weight: found strides [278528, 272, 1]; needed: rows stored one after",
    "half shuffled": "layer 2: mlp.experts layout: found w2 not shuffled (is_shuffled is unset); needed: AITER's",
    "scale dtype": "layer 2: mlp.experts.w13_weight_scale: found torch.int8; needed: torch.uint8; fix: " + EXPERTS,
    "fused shared scale": "layer 1: mlp.experts.w2_weight_scale: found shape [33, 992, 16]; needed: shape [33,",
    "fused shared not shuffled": "layer 1: mlp.experts layout: found w2 not shuffled (is_shuffled is unset); needed",
    "not shuffled": "layer 2: mlp.experts layout: found w13 not shuffled (is_shuffled is unset); needed: AITER's",
}


@pytest.mark.parametrize("case", sorted(LOADED_LINES))
def test_loaded_weights(weights: dict[str, list[str]], case: str) -> None:
    assert weights[case] == LOADED_LINES[case]


@pytest.mark.parametrize("case", sorted(LOADED_BEGINNINGS))
def test_loaded_experts(weights: dict[str, list[str]], case: str) -> None:
    (line,) = weights[case]
    assert line.startswith(LOADED_BEGINNINGS[case])


def test_every_weight_case_is_asserted(weights: dict[str, list[str]]) -> None:
    assert set(weights) == set(LOADED_LINES) | set(LOADED_BEGINNINGS) | {"compute units"}


def test_fewer_compute_units_than_workgroups(weights: dict[str, list[str]]) -> None:
    """SGLang's line for the launch grid, beside ours: two wrong things are two lines."""
    from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry

    ours, units = weights["compute units"]
    assert ours.endswith(weight("layer 0", "mlp.gate.weight", "torch.float32", "torch.bfloat16")[0])
    assert units == "rank 0: partitioned GPUs: 16 compute units, the launch grid needs 32".removeprefix("rank ")
    assert Geometry.small(1).blocks == 32 and Geometry.a95b().blocks == 256
