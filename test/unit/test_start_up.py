# SPDX-License-Identifier: Apache-2.0
"""Start-up with ranks that compile at different speeds, on a fake clock: all agree before a wait with a deadline."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_amd_mono.common import state, stock_probe
from sgl_amd_mono.common.state import AttentionView, GdnView, ModelView, MoeView
from sgl_amd_mono.qwen38_a95b_mxfp4 import step
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layer

RANKS = 2
DEADLINE_S = 60.0
SKEW_S = 120.0  # one rank compiles so much longer than the other
GEOMETRY = Geometry.small(2)


class Clock:
    """A clock a rank, and the launches of all ranks: a launch that waits for a peer fires when the peer is too late."""

    def __init__(self) -> None:
        self.now = [0.0] * RANKS
        self.values: list[Any] = [None] * RANKS
        self.barrier = threading.Barrier(RANKS)
        self.waits: dict[int, list[float]] = {}
        self.lock = threading.Lock()

    def wait(self, rank: int, number: int) -> None:
        """Launch `number` of `rank` starts a bounded wait for the other rank's."""
        with self.lock:
            self.waits.setdefault(number, []).append(self.now[rank])

    @property
    def fired(self) -> list[int]:
        """Launches whose ranks came further apart than the deadline, or did not all come."""
        return [n for n, at in self.waits.items() if len(at) < RANKS or max(at) - min(at) > DEADLINE_S]


class Group:
    """A rank as a thread; an exchange ends for all when the last one comes."""

    def __init__(self, rank: int, clock: Clock) -> None:
        self.rank, self.size, self._clock = rank, RANKS, clock

    def all_gather(self, value: Any) -> list[Any]:
        clock = self._clock
        clock.values[self.rank] = value
        clock.barrier.wait(timeout=30)
        values, latest = list(clock.values), max(clock.now)
        clock.barrier.wait(timeout=30)
        clock.now[self.rank] = latest
        return values

    def barrier(self) -> None:
        self.all_gather(None)


class FakeRuntime:
    """Building takes rank 1 `SKEW_S` longer; a launch in mode 0 returns at once, any other waits for the peer."""

    def __init__(self, request: Any, clock: Clock) -> None:
        self.rank, self.clock, self.launched = request.group.rank, clock, 0

    def build(self, keys: Any) -> list[Any]:
        self.clock.now[self.rank] += 30.0 + SKEW_S * self.rank
        return [SimpleNamespace(key=key, names=[name for name, _ in key.abi]) for key in keys]

    def zeros(self, nbytes: int, name: str) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def peer_buffer(self, nbytes: int, group: Any) -> Any:
        return SimpleNamespace(table=torch.zeros(RANKS, dtype=torch.int64))

    def deadline_ticks(self, seconds: float) -> int:
        return round(seconds * 100_000_000)

    def synchronize(self) -> None:
        """Launches run at once."""

    def launch(self, kernel: Any, args: Any) -> None:
        named = dict(zip(kernel.names, args, strict=True))
        assert named["deadline_ticks"] == DEADLINE_S * 100_000_000, "the deadline is an argument of each launch"
        if named["mode"]:
            self.clock.wait(self.rank, self.launched)
            self.launched += 1


def view() -> ModelView:
    weights = dict.fromkeys(
        ("input_norm", "post_norm", "qkvz", "ba", "conv", "conv_bias", "a_log", "dt_bias", "gated_norm", "out",
         "gated_norm_bias", "gated_norm_groups"))  # fmt: skip
    weights |= dict.fromkeys(("qkvz", "ba", "out"), torch.zeros(1, dtype=torch.bfloat16))  # their type picks the kernel
    blank = {"module": None, "input_eps": 1e-6, "post_eps": 1e-6, "moe": MoeView(True)}
    gdn = {"conv_activation": "silu", "gated_norm_eps": 1e-6, "gated_norm_activation": "silu",
           "gated_norm_before_gate": True}  # fmt: skip
    layers = [GdnView(layer=i, **blank, **gdn, **weights) for i in range(2)]
    attention = AttentionView(
        layer=2, core_width=0, has_output_gate=True, out=weights["out"], input_norm=None, post_norm=None, **blank
    )
    return ModelView(None, (*layers, attention))


def rounds(device: torch.device) -> bool:
    """What the probe of SGLang's packed decode finds."""
    return True


def start(
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    probe: Callable[[torch.device], bool] = rounds,
    loaded: ModelView | None = None,
) -> list[Any]:
    """`build_step` on both ranks, then one launch of a step on each."""
    monkeypatch.setattr(state, "read_model", lambda model: loaded or view())
    monkeypatch.setattr(state, "pool_dtypes", lambda cfg, config: (torch.bfloat16, torch.float32))
    model = torch.nn.Linear(1, 1)
    results: list[Any] = [None] * RANKS

    def run(rank: int) -> None:
        try:
            built = step.build_step(
                model=model, hf_config=None, geometry=GEOMETRY, group=Group(rank, clock),
                runtime_factory=lambda request: FakeRuntime(request, clock), isa="gfx950", widths=(1, 2),
                deadline_s=DEADLINE_S, stop=True, name="fake", probe=probe,
            )  # fmt: skip
            bound = built._widths[1].k2[2]
            built.runtime.launch(bound.kernel, bound.with_args(core=0, residual=0, residual_out=0, row_index=0))
            results[rank] = built
        except Exception as error:
            clock.barrier.abort()
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results


def test_each_layer_gets_the_kernel_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 1 has an MXFP4 out_proj, layer 2 a shared expert that is fused: three K2s, each with what it reads."""
    packed, codes = (torch.zeros(1, dtype=torch.uint8) for _ in range(2))
    plain, second, attention = view().layers
    layers = (
        plain,
        dataclasses.replace(second, out=packed, out_scale=codes),
        dataclasses.replace(attention, moe=MoeView(True, fused_shared=True, w13=packed)),
    )
    built = start(monkeypatch, Clock(), loaded=ModelView(None, layers))[0]
    assert isinstance(built, step.Step), built
    for width in (1, 2):
        bound = built._widths[width].k2
        forms = [(at.kernel.key.projection, at.kernel.key.fused_shared) for at in bound.values()]
        assert forms == [("bfloat16", False), ("mxfp4", False), ("bfloat16", True)]
        given = [dict(zip(at.names, at.with_args())) for at in bound.values()]
        wanted = {"w_o": [plain.out, packed, attention.out], "w_o_scale": [0, codes, 0], "w13": [0, 0, packed]}
        for name, values in wanted.items():
            assert all(arguments[name] is value for arguments, value in zip(given, values, strict=True)), name
        assert (given[2]["w_sgu"], given[2]["w_sd"]) == (0, 0)
        sizes = [len(arguments["scratch"]) for arguments in given]
        assert sizes == [layer.scratch_bytes(GEOMETRY, width, fused) for _, fused in forms]
        assert given[0]["scratch"] is given[1]["scratch"] is not given[2]["scratch"]
    text = step.describe_launches({at.kernel.key: at.kernel for at in built._widths[1].k2.values()}, None)
    assert "k2, MXFP4 output projection, widths 1" in text and "k2, shared expert fused, widths 1" in text


def test_a_rank_that_compiles_longer_fires_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    results = start(monkeypatch, clock)
    assert all(isinstance(result, step.Step) for result in results), results
    assert len(clock.waits) == 1 and clock.fired == []


@pytest.mark.parametrize("found", [True, False])
def test_k1_rounds_beta_as_the_probe_finds(monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    for built in start(monkeypatch, Clock(), lambda device: found):
        keys = [bound.kernel.key for at in built._widths.values() for bound in at.k1.values()]
        assert keys and {key.round_beta for key in keys} == {found}


def test_a_probe_that_fails_on_one_rank_ends_the_start_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def probe(device: torch.device) -> bool:
        asked.append(device)
        if len(asked) == 1:
            raise stock_probe.ProbeError("no such kernel")
        return True

    results = start(monkeypatch, Clock(), probe)
    assert len(asked) == RANKS and not any(isinstance(result, step.Step) for result in results)
    # the first rank that raises ends the fake group's exchange, so the other may see that instead
    assert any("delta rule failed: rank" in str(r) and "ProbeError: no such kernel" in str(r) for r in results)


def test_ranks_that_find_different_roundings_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([True, False])
    results = start(monkeypatch, Clock(), lambda device: next(found))
    assert not any(isinstance(result, step.Step) for result in results)
    assert any("launch lists: found rank 0" in str(result) for result in results), results


Control = Callable[[pytest.MonkeyPatch], None]


def waits_in_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "WARM_UP", step.RUN)
    monkeypatch.setattr(Group, "all_gather", lambda self, value: [value] * RANKS)


def goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "all_gather", lambda self, value: [value] * RANKS)


@pytest.mark.parametrize("control", [waits_in_the_warm_up, goes_on_alone])
def test_a_start_up_without_the_agreement_fires(monkeypatch: pytest.MonkeyPatch, control: Control) -> None:
    """Controls: the clock sees a wait that begins before the slow rank has compiled."""
    control(monkeypatch)
    clock = Clock()
    start(monkeypatch, clock)
    assert clock.fired
