# SPDX-License-Identifier: Apache-2.0
"""What the spec's build does between ranks, how it picks a geometry, and the pieces of a step that need no SGLang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import noise

from sgl_amd_mono.common.refusals import by_layer
from sgl_amd_mono.common.state import AttentionView, LayerState, ModelView, MoeView, RankGroup
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import gdn, layer, tail_front
from sgl_amd_mono.qwen38_a95b_mxfp4.step import (
    K2_SLOT,
    MAX_LAYERS,
    BoundLaunch,
    agree,
    describe_launches,
    places,
    pool_reasons,
    same_launches,
)

SMALL = Geometry.small(1)


class ThreadGroup:
    """A group whose ranks are threads of this process."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank, self.size, self._shared = rank, size, shared

    def all_gather(self, value: Any) -> list[Any]:
        shared = self._shared
        shared["values"][self.rank] = value
        shared["barrier"].wait(timeout=30)
        values = list(shared["values"])
        shared["barrier"].wait(timeout=30)
        return values

    def barrier(self) -> None:
        self.all_gather(None)


def on_ranks(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """`work` on every rank; each one's result, or the exception it raised."""
    shared = {"values": [None] * size, "barrier": threading.Barrier(size)}
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, size, shared))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results


def test_agree_gives_each_rank_its_own_result() -> None:
    assert on_ranks(3, lambda group: agree(group, "a phase", lambda: 10 * group.rank)) == [0, 10, 20]


def test_agree_fails_on_every_rank_when_one_fails() -> None:
    """The ranks that succeeded must not go on to a wait for the one that did not."""

    def phase(group: ThreadGroup) -> None:
        def action() -> None:
            if group.rank == 1:
                raise OSError("no space left")

        agree(group, "building the kernels", action)

    results = on_ranks(3, phase)
    assert [str(r) for r in results] == ["building the kernels failed: rank 1: OSError: no space left"] * 3
    assert isinstance(results[1].__cause__, OSError)


def model_view(layers: int) -> ModelView:
    blank = {"input_norm": None, "input_eps": 1e-6, "post_norm": None, "post_eps": 1e-6, "core_width": 0}
    made = [
        AttentionView(layer=i, module=None, has_output_gate=True, out=None, moe=MoeView(True), **blank)
        for i in range(layers)
    ]
    return ModelView(None, tuple(made))


def keys(width: int = 1, **changes: Any) -> list[Any]:
    return [gdn.GdnKey(SMALL, width, **changes), layer.LayerKey(SMALL, width)]


def test_same_launches() -> None:
    assert on_ranks(2, lambda g: same_launches(g, "spec", model_view(4), keys())) == [None, None]


@pytest.mark.parametrize(
    "other", [(model_view(3), keys()), (model_view(4), keys(2)), (model_view(4), keys(state_dtype="bfloat16"))]
)
def test_ranks_with_other_launches_are_refused(other: tuple[ModelView, list[Any]]) -> None:
    results = on_ranks(2, lambda g: same_launches(g, "spec", *(other if g.rank else (model_view(4), keys()))))
    for result in results:
        assert isinstance(result, RuntimeError)
        assert "launch lists: found rank 0: " in str(result) and "start every rank with the same arguments" in str(
            result
        )


def test_a_group_of_one_needs_no_process_group() -> None:
    assert RankGroup().all_gather("x") == ["x"]
    RankGroup().barrier()


def test_tag_slots_are_separate_and_fit_a_byte() -> None:
    """K1 uses slot = layer, K2 the ones above; the largest slot + 1 still fits the tag's low byte."""
    assert MAX_LAYERS <= K2_SLOT
    assert K2_SLOT + MAX_LAYERS - 1 + 1 <= 255
    assert Geometry.a95b().layers <= MAX_LAYERS


def test_bound_launch_fills_by_name_and_in_order() -> None:
    bound = BoundLaunch("kernel", 3, ("a", "b", "c"), {"b": 2})
    assert bound.with_args(a=1, c=3) == [1, 2, 3]
    assert bound.with_args(a=5) == [5, 2, None]  # a call leaves nothing behind for the next
    with pytest.raises(ValueError, match="its ABI has no argument d"):
        BoundLaunch("kernel", 3, ("a",), {"d": 1})
    with pytest.raises(KeyError):
        bound.with_args(d=1)


class Repeating:
    """A runtime that keeps what each launch was given."""

    def __init__(self) -> None:
        self.prepared, self.launched = 0, []

    def prepare(self, kernel: Any, args: list[Any]) -> Callable[[], None]:
        self.prepared += 1
        return lambda: self.launched.append(list(args))


def test_a_launch_is_prepared_once_and_takes_what_its_arguments_hold() -> None:
    bound, runtime = BoundLaunch("kernel", 3, ("a", "b", "c"), {"b": 2}), Repeating()
    (a,) = places((("x", "ptr"), ("a", "ptr")), "a")
    bound.arguments[0] = 1
    bound.launch(runtime)
    bound.arguments[0] = 5
    bound.launch(runtime)
    assert a == 1 and runtime.launched == [[1, 2, None], [5, 2, None]] and runtime.prepared == 1
    bound.set(b=7, c=8)  # other pools: prepared anew
    bound.launch(runtime)
    assert runtime.launched[-1] == [5, 7, 8] and runtime.prepared == 2


def pools(slots: int = 4, conv: torch.dtype = torch.bfloat16, ssm: torch.dtype = torch.float32) -> LayerState:
    g = SMALL
    return LayerState(
        torch.zeros(slots, g.conv_channels, g.conv_width - 1, dtype=conv),
        torch.zeros(slots, g.value_heads, g.head_dim, g.head_dim, dtype=ssm),
    )


def test_pools_that_fit() -> None:
    assert pool_reasons(pools(), SMALL, "float32", 4) == []
    strided = pools()
    strided = LayerState(strided.conv.transpose(1, 2).contiguous().transpose(1, 2), strided.ssm)
    assert pool_reasons(strided, SMALL, "float32", 4) == []


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (
            pools(conv=torch.float16),
            "conv state: found torch.float16; needed: torch.bfloat16; fix: unset SGLANG_MAMBA_CONV",
        ),
        (
            pools(ssm=torch.float16),
            "SSM state: found torch.float16; needed: torch.float32, as built; fix: --mamba-ssm-dtype",
        ),
        (pools(slots=3), "conv state: found shape [3, 2560, 3]; needed: shape [4, 2560, 3]"),
        (
            LayerState(pools().conv, pools().ssm.transpose(2, 3)),
            "SSM state: found strides [262144, 16384, 1, 128], address",
        ),
    ],
)
def test_pools_that_do_not_fit(found: LayerState, line: str) -> None:
    assert any(said.startswith(line) for said in pool_reasons(found, SMALL, "float32", 4))


def variants(width: int) -> dict[str, Any]:
    """A word of each variant -> a key of it."""
    return {
        "first_layer": gdn.GdnKey(SMALL, width, first_layer=True),
        "state_dtype_bfloat16": gdn.GdnKey(SMALL, width, state_dtype="bfloat16"),
        "one_hop": gdn.GdnKey(SMALL, width, one_hop=True),
        "qkvz_format_mxfp4": gdn.GdnKey(SMALL, width, qkvz_format=gdn.MXFP4),
        "draft_tokens_4": gdn.GdnKey(SMALL, 4, draft_tokens=4),
        "projection_mxfp4": layer.LayerKey(SMALL, width, projection="mxfp4"),
        "fused_shared": layer.LayerKey(SMALL, width, fused_shared=True),
        "fused_shared_": tail_front.TailFrontKey(
            layer.LayerKey(SMALL, width, fused_shared=True), gdn.GdnKey(SMALL, width)
        ),
    }


def test_a_trace_reads_by_the_kernels_names() -> None:
    """Model, launch, width, variant; and no two kernels of a server share a name."""
    named = [pair for width in (1, 8) for pair in (variants(width) | {"": layer.LayerKey(SMALL, width)}).items()]
    for word, key in named:
        assert key.name.startswith(f"qwen38_a95b_{key.launch}_s{key.width}_") and word in key.name, key.name
    assert {key.launch for _, key in named} == {"k1", "k2", "k2k1"}
    both = [key for width in (1, 8) for key in (*variants(width).values(), *keys(width))]
    assert len({key.name for key in both}) == len(set(both))


def test_one_line_lists_launches_widths_and_resources() -> None:
    resources = [SimpleNamespace(vgprs=200 + n, sgprs=90, lds_bytes=1000 * n) for n in range(4)]
    built = [*keys(1), gdn.GdnKey(SMALL, 2, first_layer=True, one_hop=True), layer.LayerKey(SMALL, 2)]
    kernels = {
        key: SimpleNamespace(artifact=SimpleNamespace(resources=found, grid=32, block=512))
        for key, found in zip(built, resources, strict=True)
    }
    assert describe_launches(kernels, None) == (
        "k1 of the first layer with float32 state, gated norm in k2, widths 2 "
        "(202 VGPRs, 90 SGPRs, 2000 B of LDS, 32 x 512 threads); "
        "k1 with float32 state, widths 1 (200 VGPRs, 90 SGPRs, 0 B of LDS, 32 x 512 threads); "
        "k2, widths 1, 2 (203 VGPRs, 90 SGPRs, 3000 B of LDS, 32 x 512 threads)"
    )
    told = describe_launches(kernels, 4, left_out=["one-hop k1", "other"])
    assert told.endswith("; no one-hop k1 and no other: they serve decode steps, and this server's steps verify drafts")


def test_lines_of_many_layers_are_one() -> None:
    lines = by_layer({0: ["a", "b"], 1: ["a"], 2: [], 3: ["a"], 4: ["a"]})
    assert lines == ["layers 0-1, 3-4 (4 of 5): a", "layer 0: b"]
    assert by_layer({0: [], 1: []}) == []


# ---- the geometry table (these import SGLang's contract)


@pytest.fixture(scope="module")
def spec() -> Any:
    from sgl_amd_mono.simulate import harness

    harness.prepare()
    from sgl_amd_mono.qwen38_a95b_mxfp4 import spec as module

    return module


TABLE = {"true": Geometry.a95b, "small": Geometry.small}


def config_of(spec: Any, geometry: Geometry, **changes: Any) -> SimpleNamespace:
    fields = spec.expected_config(geometry) | {
        "num_attention_heads": geometry.q_heads_total,
        "head_dim": geometry.attn_head_dim,
        "hidden_act": "silu",
        "output_gate_type": None,
    }
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(("make", "tp"), [(Geometry.a95b, 8), (Geometry.small, 1), (Geometry.small, 2)])
def test_the_config_picks_the_geometry(spec: Any, make: Callable[[int], Geometry], tp: int) -> None:
    geometry, reasons = spec.choose(TABLE, tp, config_of(spec, make(tp)))
    assert geometry == make(tp) and reasons == []


def test_a_wrapped_config_is_read_through(spec: Any) -> None:
    wrapped = SimpleNamespace(text_config=config_of(spec, SMALL))
    assert spec.choose(TABLE, 1, wrapped)[0] == SMALL


def test_the_nearest_geometry_words_the_refusal(spec: Any) -> None:
    geometry, reasons = spec.choose(TABLE, 1, config_of(spec, SMALL, num_experts=48))
    assert geometry is None
    assert [r.partition(";")[0] for r in reasons] == ["config.num_experts: found 48"]


def test_a_size_that_does_not_divide_is_refused_with_the_sum(spec: Any) -> None:
    geometry, (line,) = spec.choose({"small": Geometry.small}, 3, config_of(spec, SMALL))
    assert geometry is None and "tensor-parallel size 3: found " in line and "2 / 3" in line


def test_unknown_environment_variables_are_not_asked_for(spec: Any) -> None:
    from sgl_amd_mono.common import state

    assert state.env_value("SGLANG_ROCM_GDN_ONLINE_MXFP4") is state.UNKNOWN
    assert state.env_value("SGLANG_USE_AITER") in (True, False)


def test_numerics_are_in_the_contracts_names(spec: Any) -> None:
    for name, bound in (("k1.core.cosine", 0.9999), ("k1.res_out.max_abs", 0.0), ("k2.out.cosine", 0.99)):
        assert spec.NUMERICS.bound(name) == pytest.approx(bound, abs=1e-5)
    assert spec.SPEC.numerics is spec.NUMERICS and spec.SPEC.api_version == 1


def test_numerics_are_multiples_of_the_noise_that_is_measured(spec: Any) -> None:
    """The floors of the spec are those of `helpers.noise`, which a test measures again."""
    front = {f"k1.{name}": floor for name, floor in noise.LAYER_FLOORS.items()}
    of_tail = (("k2.out", "out angle"), ("k2.out.rel", "out rel"), ("k2.res_out.rel", "residual rel"))
    tail = {name: noise.TAIL_FLOORS[floor] for name, floor in of_tail}
    assert front | tail == spec.NOISE
    for name, floor in spec.NOISE.items():
        bound = spec.NUMERICS.bound(name if name.endswith(".rel") else f"{name}.cosine")
        allowed = bound if name.endswith(".rel") else 1 - bound
        assert allowed >= 10 * floor, f"{name}: the bound {bound} is within the noise"


@pytest.mark.parametrize(
    ("spec", "mamba", "found"),
    [
        ({}, {}, []),
        ({}, {"linear_attn_verify_backend": "triton"}, []),
        ({"speculative_eagle_topk": 4}, {}, ["the drafts are no chain (--speculative-eagle-topk 4)"]),
        ({"speculative_eagle_topk": None}, {}, ["the drafts are no chain (--speculative-eagle-topk None)"]),
        (
            {},
            {"linear_attn_verify_backend": "flashinfer"},
            ["the states are kept for --linear-attn-verify-backend flashinfer"],
        ),
        ({}, {"enable_linear_replayssm_spec": True}, ["ReplaySSM keeps no state a draft token"]),
        ({}, {"enable_linear_replayssm": True}, ["ReplaySSM keeps no state a draft token"]),
    ],
)
def test_why_k1_does_not_run_verify_steps(
    spec: dict[str, Any], mamba: dict[str, Any], found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On SGLang's own configuration classes."""
    from sgl_amd_mono.simulate import harness

    harness.prepare()
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups.fields.exec_ import ExecMamba
    from sglang.srt.arg_groups.fields.spec import Spec

    from sgl_amd_mono.common import state

    speculative, linear = Spec(**({"speculative_eagle_topk": 1} | spec)), ExecMamba(**mamba)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: speculative)
    monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(mamba=linear))
    assert state.verify_differences() == found


def test_draft_states_that_k1_cannot_write() -> None:
    """A verify step's pools: places and tokens to spare, strides that overlap, and what is refused."""
    g, tokens = SMALL, 4
    plain = pools()
    windows = torch.zeros(3, g.conv_channels, tokens + 2, dtype=torch.bfloat16)
    windows = windows.as_strided((3, tokens, g.conv_channels, 3), (windows.stride(0), 1, tokens + 2, 1))
    states = torch.zeros(3, tokens, g.value_heads, g.head_dim, g.head_dim)

    def said(conv: torch.Tensor | None, ssm: torch.Tensor | None) -> list[str]:
        return pool_reasons(LayerState(plain.conv, plain.ssm, conv, ssm), g, "float32", 4, tokens)

    assert said(windows, states) == []
    assert [line.split(":")[0] for line in said(None, None)] == ["draft conv states", "draft SSM states"]
    assert said(windows, states.bfloat16())[0].startswith("draft SSM states: found torch.bfloat16 ")
    assert "at least 4 tokens" in said(windows[:, :3], states)[0]
    assert said(windows, states.transpose(3, 4))[0].startswith("draft SSM states: found strides ")
