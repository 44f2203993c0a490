# SPDX-License-Identifier: Apache-2.0
"""K2 and the next layer's K1 in one launch: bit for bit the separate launches, bounded waits, lost steps."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from helpers import isa_text
from helpers import k2_bench as kb

from sgl_amd_mono.common.geometry import GeometryError
from sgl_amd_mono.common.sync import tag_of
from sgl_amd_mono.qwen38_a95b_mxfp4 import trial_tail_front as trial
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.layer import LayerKey
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.tail_front import (
    ABI,
    FRONT,
    REGION_NAMES,
    TailFrontKey,
    argument_offset,
    scratch_bytes,
    scratch_regions,
)

SMALL, TRUE = Geometry.small(2), Geometry.a95b(8)
WEIGHT_SEED, INPUT_SEED, CASE_SEED = 51, 52, 53
PADS = {5: (1,), 7: (0, 6)}  # widths with pad rows, and which
EPOCH = 2  # even, so that the faults find the regions of the first half of a peer buffer
DEADLINE = 200_000  # 2 ms of the virtual clock
ADVERSARIAL_SEEDS = 24
CONTROL_SEEDS = range(20)
LAUNCHES = 8  # of each seed, at most: a wrong one ends it
SEEN_AT_LEAST = 19
full = pytest.mark.full


@cache
def weights() -> list[kb.RankWeights]:
    return kb.random_weights(SMALL, WEIGHT_SEED)


def key_of(width: int, **front: Any) -> TailFrontKey:
    return trial.key_of(SMALL, width, **front)


def inputs(width: int) -> kb.Inputs:
    """Seeded rows; K2's pad rows are K1's."""
    step = kb.random_inputs(SMALL, 8, INPUT_SEED).rows(range(width))
    for i, pad in enumerate(PADS.get(width, ())):
        step.row_index[pad] = -(i % 2)
        for core in step.cores:
            core[pad] = float("nan")
    return step


def cases(key: TailFrontKey) -> list[Any]:
    return trial.make_cases(key, CASE_SEED, PADS.get(key.width, ()))


@cache
def apart(key: TailFrontKey) -> trial.Outcome:
    return trial.run_apart(kb.Bench(SMALL, weights()), inputs(key.width), cases(key))


def together(key: TailFrontKey, memory: str = "consistent", seed: int = 0, **run: Any) -> trial.Outcome:
    return trial.run_together(
        kb.Bench(SMALL, weights(), memory=memory, seed=seed), key, inputs(key.width), cases(key), **run
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integers of the same bits: NaN guards compare equal."""
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def differing(one: trial.Outcome, two: trial.Outcome) -> list[str]:
    """Names of what differs on some rank."""
    pairs = ((name, one.tensors()[name], two.tensors()[name]) for name in two.tensors())
    return [name for name, a, b in pairs if not all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))]


def same(one: trial.Outcome, two: trial.Outcome) -> bool:
    return not any(f.failed for f in one.faults) and differing(one, two) == []


@pytest.mark.parametrize("width", [pytest.param(w, marks=() if w in (1, 2, 5, 8) else full) for w in range(1, 9)])
def test_the_bits_are_those_of_the_separate_launches(width: int) -> None:
    key = key_of(width)
    found = together(key)
    assert not any(f.failed for f in found.faults)
    assert differing(found, apart(key)) == []


@pytest.mark.parametrize(
    ("width", "front"),
    [
        pytest.param(3, {"state_dtype": "bfloat16"}, id="bf16 state"),
        pytest.param(2, {"round_beta": False}, id="beta in float32", marks=full),
        pytest.param(2, {"qkvz_format": "mxfp4", "ba_format": "mxfp4"}, id="MXFP4"),
        pytest.param(8, {"qkvz_format": "mxfp4"}, id="MXFP4 in_proj_qkvz", marks=full),
        pytest.param(3, {"one_hop": True}, id="one hop"),
    ],
)
def test_every_form_of_k1(width: int, front: dict[str, Any]) -> None:
    key = key_of(width, **front)
    assert same(together(key), apart(key))


@full
@pytest.mark.parametrize("form", ["mxfp4", "fused", "mxfp4-fused"])
def test_every_form_of_k2(form: str) -> None:
    """Other weights than elsewhere: K2's output projection in MXFP4, its shared expert fused."""
    variant = kb.VARIANTS[form]
    own = kb.random_weights(SMALL, WEIGHT_SEED, variant=variant)
    fields = {"projection": variant.projection, "fused_shared": variant.fused_shared}
    for width in (1, 3):
        key = trial.key_of(SMALL, width, tail=fields)
        separate = trial.run_apart(kb.Bench(SMALL, own), inputs(width), cases(key))
        assert same(trial.run_together(kb.Bench(SMALL, own), key, inputs(width), cases(key)), separate)


@full
@pytest.mark.xdist_group("big")
def test_true_size() -> None:
    """Width 1, eight ranks of 256 workgroups."""
    own = kb.random_weights(TRUE, WEIGHT_SEED, experts=())
    step = kb.random_inputs(TRUE, 1, INPUT_SEED)
    for e in kb.likely_experts(TRUE, own, step, 2):
        for rank, w in enumerate(own):
            kb.fill_expert(TRUE, w, e, 7_919 * e + rank)
    key = trial.key_of(TRUE, 1)
    separate = trial.run_apart(kb.Bench(TRUE, own), step, trial.make_cases(key, CASE_SEED))
    found = trial.run_together(kb.Bench(TRUE, own), key, step, trial.make_cases(key, CASE_SEED))
    assert same(found, separate)
    chain = [region.removesuffix(".odd").split(".")[1] for region, _ in found.report.hop_chain]
    assert chain == ["AR", "MSQ", "RLOG", "INTER", "FINAL", "NEXT", "PROJ", "ONRM"]


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s in (0, 6) else full) for s in range(ADVERSARIAL_SEEDS)])
def test_adversarial_memory(seed: int) -> None:
    key = key_of(1 + seed % 8)
    assert same(together(key, "adversarial", seed), apart(key))


def test_hops() -> None:
    """One device hop between K2's chain and K1's."""
    chain = [region.removesuffix(".odd").split(".")[1] for region, _ in together(key_of(1)).report.hop_chain]
    assert chain == ["AR", "MSQ", "RLOG", "INTER", "FINAL", "NEXT", "PROJ", "ONRM"]


def test_warm_up_touches_nothing() -> None:
    key = key_of(2)
    bench, untouched = kb.Bench(SMALL, weights()), cases(key)
    found = trial.run_together(bench, key, inputs(2), cases(key), mode=0)
    assert all(t.isnan().all() for t in found.out + found.residual)
    assert not any(s.any() for s in found.scratch) and not any(p.any() for p in bench.peers)
    for case, before in zip(found.cases, untouched, strict=True):
        assert torch.equal(bits(case.ssm_state), bits(before.ssm_state))
        assert torch.equal(bits(case.conv_state), bits(before.conv_state))
        assert not case.scratch.any()


# ---- a lost step ----------------------------------------------------------------------------------------------------


def unchanged(found: trial.Outcome, key: TailFrontKey, ranks: tuple[int, ...]) -> bool:
    """No state of those ranks was written."""
    pairs = [(found.cases[rank], cases(key)[rank]) for rank in ranks]
    return all(
        torch.equal(bits(getattr(case, name)), bits(getattr(before, name)))
        for case, before in pairs
        for name in ("ssm_state", "conv_state")
    )


@pytest.mark.parametrize("memory", ["consistent", pytest.param("adversarial", marks=full)])
@pytest.mark.parametrize(
    ("region", "ranks"), [("AR", (0, 1)), ("INTER", (0, 1)), ("FINAL", (0, 1)), ("NEXT", (1,)), ("PROJ", ())]
)
def test_a_lost_hand_off_ends_the_launch(region: str, ranks: tuple[int, ...], memory: str) -> None:
    """A workgroup of rank 1 stalls before it publishes the region: every rank is failed, the record names that wait,
    and the ranks that need it write no state."""
    from sgl_amd_mono.sim import Stall

    key, writer = key_of(2), SMALL.blocks - 1
    bench = kb.Bench(SMALL, weights(), memory=memory, seed=5)
    bench.machine.inject(Stall(rank=1, workgroup=writer, at=("store", region)))
    found = trial.run_together(bench, key, inputs(2), cases(key), epoch=EPOCH, deadline=DEADLINE)
    assert all(f.failed for f in found.faults)
    records = {r.rank: r for f in found.faults for r in f.records}
    front = region == "PROJ"
    slot = trial.FRONT_SLOT if front else kb.SLOT
    names = GdnKey.region_names if front else REGION_NAMES
    allowed = {"PROJ", "ONRM", "WINDOW"} if front else {region}  # K1's waits share one place in the chain
    assert {names[r.region] for r in records.values()} <= allowed
    assert {(r.launch, r.expected_tag) for r in records.values()} == {(slot, tag_of(EPOCH, slot))}
    assert unchanged(found, key, ranks)


def test_a_lost_step_is_left_at_once() -> None:
    """The launch behind a lost one ends without a wait, and writes nothing."""
    from sgl_amd_mono.sim import Stall

    key = key_of(1)
    bench = kb.Bench(SMALL, weights())
    bench.machine.inject(Stall(rank=1, workgroup=3, at=("store", "FINAL")))
    trial.run_together(bench, key, inputs(1), cases(key), epoch=EPOCH, deadline=DEADLINE)
    bench.machine.clear_faults()
    start = bench.machine.clock
    found = trial.run_together(bench, key, inputs(1), cases(key), epoch=EPOCH, deadline=DEADLINE)
    assert bench.machine.clock - start < DEADLINE
    assert all(t.isnan().all() for t in found.out + found.residual)
    assert not any(s.any() for s in found.scratch)
    assert unchanged(found, key, (0, 1))


# ---- emitted code ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("geometry", "width"),
    [
        pytest.param(g, w, id=f"{g.name}-s{w}", marks=() if (g.name, w) == ("qwen38-a95b", 1) else full)
        for g in (TRUE, SMALL)
        for w in range(1, 9)
    ],
)
def test_resources(geometry: Geometry, width: int) -> None:
    for dtype in ("float32", "bfloat16"):
        found = trial.artifact(trial.key_of(geometry, width, state_dtype=dtype)).resources
        assert found.refusals() == []
        assert found.sgpr_spills <= 16
        assert found.agprs == 0


def test_arguments_lie_where_the_kernel_reads_them() -> None:
    """K1's arguments are read from the argument block at their own offsets, late."""
    emitted = {a.name: a.offset for a in trial.artifact(key_of(1)).arguments}
    assert list(emitted) == [name for name, _ in ABI]
    assert emitted == {name: argument_offset(name) for name in emitted}
    with pytest.raises(KeyError):
        argument_offset("hidden")


def test_every_wait_is_bounded() -> None:
    isa = trial.artifact(key_of(1)).isa
    assert isa_text.unbounded_polls(isa) == []
    blind = "\n".join(line for line in isa.splitlines() if "s_memrealtime" not in line)
    assert isa_text.unbounded_polls(blind)


def test_regions_do_not_overlap() -> None:
    for geometry in (TRUE, SMALL):
        for width in range(1, 9):
            top = 0
            for name, span in scratch_regions(geometry, width).items():
                assert span.offset >= top and span.offset % 256 == 0, name
                top = span.offset + span.nbytes
            assert top <= scratch_bytes(geometry, width)


def test_weights_are_in_flight_while_the_last_all_reduce_is_awaited() -> None:
    """Of in_proj's first loads those of the waves that await nothing; no register of them is read before."""
    from sgl_amd_mono.cost import measure

    cost = measure.k2k1(SMALL, 1, 3)
    names = [name for name, _ in cost.chain]
    final = names.index("FINAL")
    early = sum(n for name, issue, use, n in cost.weights if name == FRONT + "w_qkvz" and issue == final < use)
    assert early >= 0.8 * cost.unique[FRONT + "w_qkvz"]
    assert cost.weight_ratio <= 1.02 and cost.uses_seen == 1.0


@pytest.mark.parametrize(
    ("front", "words"),
    [({"first_layer": True}, "follows no K2"), ({"own_norm": True}, "follows no K2")],
)
def test_a_k1_that_follows_no_k2_is_refused(front: dict[str, Any], words: str) -> None:
    with pytest.raises(GeometryError, match=words):
        key_of(1, **front)


def test_unlike_halves_are_refused() -> None:
    with pytest.raises(GeometryError, match="widths 1 and 2"):
        TailFrontKey(LayerKey(SMALL, 1), GdnKey(SMALL, 2))
    with pytest.raises(GeometryError, match="stop True and False"):
        TailFrontKey(LayerKey(SMALL, 1), GdnKey(SMALL, 1, stop=False))


# ---- controls -------------------------------------------------------------------------------------------------------


def next_flag(lines: list[str]) -> int:
    """Number (from 1) of the wait for z's stores: the last `vmcnt(0)` written by hand before K1's loads of z."""
    loads = [n for n, text in enumerate(lines, 1) if re.search(r"buffer_load_dwordx[24] .* sc1", text)]
    waits = [
        n for n, text in enumerate(lines, 1) if re.search(r"^\s*s_waitcnt vmcnt\(0\)$", text) and "ASM" in lines[n - 2]
    ]
    return next(n for n in reversed(waits) if n < loads[-1] and stores_z(lines[:n]))


def stores_z(lines: list[str]) -> bool:
    """Whether the last scoped store is one of the squares (a single word, agent scope), not a fault record's."""
    stores = [text for text in lines if re.search(r"_store_", text) and "sc1" in text]
    return bool(stores) and re.search(r"global_store_dword (?!.*sc0).* sc1", stores[-1]) is not None


def without_store_wait() -> Any:
    """The wait for the stores of z and squares, before the pair that announces them, is dropped."""
    from sgl_amd_mono.sim import CodeObject

    isa = trial.artifact(key_of(2)).isa
    return CodeObject.parse(isa).delete(next_flag(isa.splitlines()))


def with_plain_z() -> Any:
    """z is stored without a scope."""
    from sgl_amd_mono.sim import CodeObject

    isa = trial.artifact(key_of(2)).isa
    lines = isa.splitlines()
    store = next(t.strip() for t in reversed(lines[: next_flag(lines)]) if re.search(r"global_store_dwordx2 .* sc1", t))
    return CodeObject.parse(isa).replace(re.escape(store), store.replace(" sc1", ""))


def wrong(program: Any, seed: int) -> bool:
    """Whether one of up to LAUNCHES launches faults, loses a wait or leaves other bits than the separate launches."""
    from sgl_amd_mono.sim import SimFault

    key = key_of(2)
    bench = kb.Bench(SMALL, weights(), memory="adversarial", seed=seed)
    try:
        for epoch in range(1, LAUNCHES + 1):
            found = trial.run_together(
                bench, key, inputs(2), cases(key), epoch=epoch, program=program, deadline=DEADLINE
            )
            if not same(found, apart(key)):
                return True
    except SimFault:
        return True
    return False


@pytest.mark.parametrize("mistake", [without_store_wait, with_plain_z])
def test_a_dropped_order_is_seen(mistake: Any) -> None:
    program = mistake()
    assert any(wrong(program, seed) for seed in range(2))


@full
@pytest.mark.parametrize("mistake", [without_store_wait, with_plain_z])
def test_a_dropped_order_is_seen_in_nearly_every_schedule(mistake: Any) -> None:
    program = mistake()
    assert not wrong(None, CONTROL_SEEDS[0])
    seen = sum(wrong(program, seed) for seed in CONTROL_SEEDS)
    assert seen >= SEEN_AT_LEAST, f"{mistake.__name__}: seen in {seen} of {len(CONTROL_SEEDS)} schedules"
