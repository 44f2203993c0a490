# SPDX-License-Identifier: Apache-2.0
"""Verify steps on SGLang's own model of the `small` geometry: `python verify_run.py FOLDER RUNTIME FRONT`, JSON out.

A TARGET_VERIFY batch of 4 tokens a request is built by hand (no draft model runs): a chain of draft tokens behind each
request's prefix. The model is loaded with SGLang's speculative arguments, so its pools hold a state a draft token.
RUNTIME: `double` or `simulator`. FRONT: `k1`, or `stock` for a server whose verify steps K1 does not cover. PyTorch
stands in for the two Triton kernels that SGLang's verify GDN calls, unless SGLANG_AMD_MONO_SIMULATE_STOCK asks for them
(`triton`); SGLang's own code commits the accepted states.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

TOKENS = 4
PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16]]
DRAFTS = [[1, 2, 3, 4], [17, 18, 19, 20]]
ARGUMENTS = ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1",
             "--speculative-num-draft-tokens", str(TOKENS)]  # fmt: skip


def conv_update(original: Any) -> Any:
    """`causal_conv1d_update` of [rows, channels, tokens]: the window behind each token goes to the intermediate buffer,
    the last one also to the state, as the kernel does it: the commit writes over that."""
    from sgl_amd_mono.simulate import gdn_standin

    def update(x: Any, state: Any, weight: Any, bias: Any, activation: Any, **more: Any) -> Any:
        if x.dim() == 2:
            return original(x, state, weight, bias, activation, conv_state_indices=more["conv_state_indices"])
        windows, places = more["intermediate_conv_window"], more["intermediate_state_indices"].long()
        slots = more["conv_state_indices"].long()
        scratch, out = state[slots].clone(), torch.empty_like(x)
        rows = torch.arange(len(slots), dtype=torch.int32)
        for token in range(x.shape[2]):
            out[..., token] = gdn_standin.causal_conv1d_update(
                x[..., token].contiguous(), scratch, weight, bias, activation, conv_state_indices=rows
            )
            windows[places, token] = scratch
        live = slots >= 0
        state[slots[live]] = scratch[live]
        return out

    return update


def gated_delta_update(**a: Any) -> Any:
    """`fused_sigmoid_gating_delta_rule_update` in its verify form: the state behind each token to the intermediate
    buffer, the state carried in float32, beta not rounded."""
    from sgl_amd_mono.simulate import gdn_standin

    q, k, v = (a[name][0] for name in ("q", "k", "v"))
    slots, places = a["initial_state_indices"].long(), a["intermediate_state_indices"].long()
    bounds = a["cu_seqlens"].tolist()
    out = torch.zeros_like(a["v"])
    for sequence, (begin, end) in enumerate(itertools.pairwise(bounds)):
        state = a["initial_state_source"][slots[sequence]].float().unsqueeze(0)
        for step, token in enumerate(range(begin, end)):
            row = torch.cat([t[token].flatten() for t in (q, k, v)]).unsqueeze(0)
            o = v.new_zeros(1, 1, *v.shape[1:])
            gdn_standin.packed_decode(
                row, a["a"].view(-1, v.shape[1])[token : token + 1],
                a["b"].view(-1, v.shape[1])[token : token + 1].float(),
                A_log=a["A_log"], dt_bias=a["dt_bias"], scale=q.shape[-1] ** -0.5, initial_state=state, out=o,
                ssm_state_indices=torch.zeros(1, dtype=torch.int32), use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            out[0, token] = o[0, 0]
            a["intermediate_states_buffer"][places[sequence], step] = state[0]
    return out


#: Why K1 does not cover the verify steps of a server, where FRONT is `stock`.
DIFFERENCE = "the drafts are no chain (--speculative-eagle-topk 2)"


def load(folder: Path, runtime: str, front: str) -> tuple[Any, Any]:
    """(SglangModel, the plugin's Step), started with the speculative arguments."""
    from helpers import spec_double
    from sgl_amd_mono.simulate import harness, runner

    if runtime == "simulator":
        from sgl_amd_mono.common.runtime import simulator_runtime

        spec_double.FACTORY = simulator_runtime
    if front == "stock":
        from sgl_amd_mono.common import state

        state.verify_differences = lambda: [DIFFERENCE]
    plain = runner.server_arguments
    runner.server_arguments = lambda *args: [*plain(*args), *ARGUMENTS]
    harness.prepare()
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    # compiles a Triton kernel that moves tokens of a draft tree; a chain moves none
    MHATokenToKVPool._init_kv_copy_and_warmup = lambda self: None
    if harness.chosen_stock() == "triton":  # SGLang's own kernels, on the simulator
        loaded = spec_double.load_sglang(folder)
        return loaded, spec_double.built_step(loaded.model)
    from sglang.srt.layers.attention.linear.kernels import gdn_triton

    gdn_triton.fused_sigmoid_gating_delta_rule_update = gated_delta_update  # the build's probe asks it, too
    loaded = spec_double.load_sglang(folder)
    from sglang.srt.layers.attention.linear import gdn_backend

    gdn_backend.causal_conv1d_update = conv_update(gdn_backend.causal_conv1d_update)
    return loaded, spec_double.built_step(loaded.model)


class Verify:
    """Prefills requests, then runs one verify step through a given forward."""

    def __init__(self, loaded: Any, step: Any) -> None:
        self.loaded, self.step, self.installed = loaded, step, loaded.model.forward

    def batch(self, requests: int, pads: int) -> Any:
        """A prefilled batch as SGLang's TARGET_VERIFY step; pad requests stand at request row 0."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
        from sglang.srt.speculative.eagle_info import EagleVerifyInput

        taken: list[Any] = []

        def take(*args: Any, **kwargs: Any) -> Any:
            taken.append(kwargs["forward_batch"] if "forward_batch" in kwargs else args[2])
            return self.installed(*args, **kwargs)

        self.loaded.model.forward = take
        self.loaded.prefill(PROMPTS[:requests])
        self.loaded.model.forward = self.installed
        runner, prefill = self.loaded.model_runner, taken[-1]
        total = requests + pads
        lengths = torch.tensor([len(p) for p in PROMPTS[:requests]] + [1] * pads)
        rows = torch.cat([prefill.req_pool_indices, prefill.req_pool_indices.new_zeros(pads)])
        drafts = torch.tensor(DRAFTS[:requests] + [[0] * TOKENS] * pads)
        places = runner.token_to_kv_pool_allocator.alloc(requests * TOKENS)
        places = torch.cat([places, places.new_zeros(pads * TOKENS)])
        for row, length, at in zip(rows[:requests], lengths, places.view(total, TOKENS)):
            runner.req_to_token_pool.req_to_token[row, length : length + TOKENS] = at
        positions = (lengths.unsqueeze(1) + torch.arange(TOKENS)).flatten()
        info = EagleVerifyInput(
            draft_token=drafts.flatten(), custom_mask=None, positions=positions, retrieve_index=None,
            retrieve_next_token=None, retrieve_next_sibling=None, retrieve_cum_len=None, spec_steps=3, topk=1,
            draft_token_num=TOKENS, capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=int(lengths.sum()), seq_lens_cpu=lengths,
        )  # fmt: skip
        return dataclasses.replace(
            prefill, forward_mode=ForwardMode.TARGET_VERIFY, batch_size=total, input_ids=drafts.flatten(),
            req_pool_indices=rows, seq_lens=lengths + TOKENS, seq_lens_cpu=lengths + TOKENS, out_cache_loc=places,
            seq_lens_sum=int((lengths + TOKENS).sum()), positions=positions, mrope_positions=positions.expand(3, -1),
            extend_prefix_lens=lengths, extend_seq_lens=torch.full_like(lengths, TOKENS), spec_info=info,
            extend_num_tokens=total * TOKENS,
        )  # fmt: skip

    def __call__(self, forward: Any, requests: int, pads: int = 0) -> dict[str, Any]:
        """Logits of every draft token, the states behind each of them, and the states before and after SGLang commits
        the first token of each request (all drafts rejected), or a part of them."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        batch = self.batch(requests, pads)
        runner = self.loaded.model_runner
        cache = runner.req_to_token_pool.mamba_pool.mamba_cache
        cache.intermediate_ssm.zero_(), cache.intermediate_conv_window[0].zero_()
        before = cache.conv[0].clone(), cache.temporal.clone()
        with forward_context(ForwardContext(attn_backend=runner.attn_backend), forward_batch=batch), torch.no_grad():
            runner.attn_backend.init_forward_metadata(batch)
            out = forward(batch.input_ids, batch.positions, batch)
        slots = runner.attn_backend.linear_attn_backend.forward_metadata.mamba_cache_indices[:requests]
        left = cache.conv[0].clone(), cache.temporal.clone()
        committed = {}
        for name, steps in ACCEPTED.items():
            cache.conv[0].copy_(left[0]), cache.temporal.copy_(left[1])
            for states, drafts in ((cache.temporal, cache.intermediate_ssm),
                                   (cache.conv[0], cache.intermediate_conv_window[0])):  # fmt: skip
                steps_of = torch.tensor(steps[:requests])
                runner.attn_backend._scatter_speculative_state_with_mask(states, drafts, slots, steps_of)
            committed[name] = {"conv": cache.conv[0][:, slots.long()], "ssm": cache.temporal[:, slots.long()]}
        cache.conv[0].copy_(left[0]), cache.temporal.copy_(left[1])
        return {
            "kept": [torch.equal(a, b) for a, b in zip(before, left, strict=True)],
            "committed": committed,
            "logits": out.next_token_logits[: requests * TOKENS].clone(),
            "conv": cache.conv[0].clone(),
            "ssm": cache.temporal.clone(),
            "drafts": cache.intermediate_ssm.clone(),
            "windows": cache.intermediate_conv_window[0].clone(),
            "stream": batch.residual_stream,
        }


#: Of two requests, the last accepted token (0: the one that is no draft).
ACCEPTED = {"all rejected": [0, 0], "a part": [1, 3]}


def compared(on: dict[str, torch.Tensor], off: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Committed states with the plugin beside those without it: bits of the first layer and of all, least cosine."""
    found: dict[str, Any] = {}
    for key in on:
        a, b = (states[key].double().flatten(2) for states in (on, off))
        found[f"{key} equal"] = bool(torch.equal(a, b))
        found[f"{key} equal in the first layer"] = bool(torch.equal(a[0], b[0]))
        found[f"{key} cosine"] = float(torch.nn.functional.cosine_similarity(a, b, dim=-1).min())
    return found


def main() -> int:
    folder, runtime, front = Path(sys.argv[1]), *sys.argv[2:]
    from helpers.check_run import Lines

    log = Lines()
    for name in ("sgl_amd_mono.common.check", "sgl_amd_mono.qwen38_a95b_mxfp4.step"):
        logging.getLogger(name).addHandler(log)
        logging.getLogger(name).setLevel(logging.INFO)
    loaded, step = load(folder, runtime, front)
    built = next(line for line in log.lines if "k2, widths" in line)
    verify = Verify(loaded, step)
    found: dict[str, Any] = {"built": built, "launches": sorted(key.launch for key in step._keys)}
    for name, requests, pads in (("4 rows", 1, 0), ("8 rows", 2, 0), ("padded", 1, 1)):
        log.lines.clear()
        steps = step.steps
        on, off = verify(verify.installed, requests, pads), verify(step.original, requests, pads)
        first = {key: bool(torch.equal(on[key][0, :requests], off[key][0, :requests])) for key in ("drafts", "windows")}
        found[name] = {
            "steps": step.steps - steps,
            "states left alone": on["kept"],
            "committed": {name: compared(on["committed"][name], off["committed"][name]) for name in ACCEPTED},
            "draft states of the first layer": first,
            "draft states written": int((on["drafts"] != 0).flatten(3).any(-1).sum()),
            "logits": float((on["logits"] - off["logits"]).abs().max() / off["logits"].abs().max()),
            "cosine": float(torch.nn.functional.cosine_similarity(on["logits"], off["logits"], dim=-1).min()),
            "stream": [on["stream"] is None, off["stream"] is None],
            "log": log.lines.copy(),
        }
    checked = verify(verify.installed, 2)
    step.__dict__.pop("forward"), step.before_launch.clear(), step.observers.clear()
    plain = verify(verify.installed, 2)
    same = ("logits", "drafts", "windows", "conv", "ssm")
    found["checking changes"] = [key for key in same if not torch.equal(checked[key], plain[key])]
    # a control: other draft tokens give other logits and other draft states, the kept states stay
    before = verify(verify.installed, 2)
    DRAFTS[0][1] = 9
    after = verify(verify.installed, 2)
    found["control"] = {key: bool(torch.equal(before[key], after[key])) for key in ("drafts", "logits")}
    # only what depends on the other draft differs: nothing of a request whose drafts were all rejected
    for name in ACCEPTED:
        found["control"] |= {name: bool(torch.equal(before["committed"][name]["ssm"], after["committed"][name]["ssm"]))}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
