# SPDX-License-Identifier: Apache-2.0
"""One rank of SGLang in this process: its ModelRunner, driven through prefill and decode steps.

The batches are SGLang's own (``ScheduleBatch``, ``ForwardBatch``); a decode step may be padded to a wider graph size
the way SGLang's graph runner pads it: request row 0, which maps to the reserved state slot 0, and token location 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import MAX_ROWS
from sgl_amd_mono.simulate import harness

CONTEXT_LENGTH = 128
"""Longest sequence, prompt and answer, in tokens."""


def server_arguments(checkpoint: Path, plugin: bool, tp_size: int) -> list[str]:
    """The arguments a user would give to ``sglang serve`` for this model on a CPU; ``plugin`` adds the flag."""
    return [
        *("--model-path", str(checkpoint)),
        *("--device", "cpu"),
        *("--tp-size", str(tp_size)),
        *("--attention-backend", harness.ATTENTION[harness.chosen_stock()]),
        *("--sampling-backend", "pytorch"),
        *("--grammar-backend", "none"),
        *("--moe-runner-backend", "aiter"),
        "--skip-tokenizer-init",
        "--disable-cuda-graph",
        "--disable-radix-cache",
        "--disable-overlap-schedule",
        *("--max-running-requests", str(MAX_ROWS)),
        *("--max-mamba-cache-size", str(MAX_ROWS + 4)),
        *("--max-total-tokens", str(MAX_ROWS * CONTEXT_LENGTH)),
        *("--context-length", str(CONTEXT_LENGTH)),
        *("--log-level", "info"),
        *(["--enable-amd-monokernel"] if plugin else []),
    ]


@dataclass
class Rank:
    """This process's place among the tensor-parallel ranks, and the local port at which they find each other."""

    rank: int = 0
    size: int = 1
    port: int | None = None


class SglangModel:
    """A model that SGLang has loaded, with or without the plugin. One a process: SGLang's runtime is global."""

    def __init__(self, checkpoint: Path, plugin: bool, place: Rank) -> None:
        harness.prepare()
        from sglang.benchmark import one_batch
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import PortArgs, prepare_server_args

        load_plugins()
        harness.install()
        arguments = prepare_server_args(server_arguments(checkpoint, plugin, place.size))
        arguments.resolve_once()
        ports = PortArgs.init_new(arguments)
        if place.port is not None:
            ports.nccl_port = place.port
        one_batch.get_tokenizer = lambda *args, **kwargs: None  # token ids only
        world_rank = one_batch.spawn_world_rank(arguments, tp_rank=place.rank, pp_rank=0)
        one_batch.publish(
            arguments, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=world_rank, gpu_id=place.rank)
        )
        one_batch._init_process_global_configs()
        bench, _ = one_batch.load_model(arguments, ports, place.rank, place.rank)
        self._one_batch = one_batch
        self._batch: Any = None
        self.model_runner = bench.torch_runner
        self.model = self.model_runner.model
        self.forward_batch: Any = None
        """The step that runs or ran last (SGLang's ForwardBatch), for whoever replays a layer in it."""

    def prefill(self, prompts: list[list[int]]) -> torch.Tensor:
        """Start a batch; float32 logits ``[requests, vocab]`` of each prompt's last token."""
        self.model_runner.req_to_token_pool.clear()
        self.model_runner.token_to_kv_pool_allocator.clear()
        requests = self._one_batch.prepare_synthetic_inputs_for_latency_test(len(prompts), 0, prompts)
        _, logits, self._batch = self._one_batch.extend(requests, self.model_runner)
        return logits.float().clone()

    @torch.no_grad()
    def decode(self, tokens: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """One decode step fed ``tokens`` (int64 ``[requests]``), padded to ``width`` rows; logits of the real rows."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        batch = self._batch
        batch.input_ids = tokens.to(torch.int64)
        batch.prepare_for_decode()
        step = ForwardBatch.init_new(batch, self.model_runner, return_hidden_states_before_norm=False)
        requests = step.batch_size
        if width is not None and width > requests:
            pad(step, width)
        self.forward_batch = step
        logits = self.model_runner.forward(step).logits_output.next_token_logits
        return logits[:requests].float().clone()


def pad(step: Any, width: int) -> None:
    """Pad a decode step to ``width`` requests as SGLang's graph runner fills its buffers (row 0, length 1)."""
    missing = width - step.batch_size
    for name, fill in (
        ("input_ids", 0),
        ("req_pool_indices", 0),
        ("seq_lens", 1),
        ("seq_lens_cpu", 1),
        ("orig_seq_lens", 1),
        ("out_cache_loc", 0),
        ("positions", 0),
        ("mrope_positions", 0),
    ):
        value = getattr(step, name)
        if value is not None:
            tail = value.new_full((*value.shape[:-1], missing), fill)
            setattr(step, name, torch.cat([value, tail], dim=-1))
    if step.seq_lens_sum is not None:
        step.seq_lens_sum += missing
    if step.kv_loc_plan is not None:
        step.kv_loc_plan = None
    step.batch_size = width
