# SPDX-License-Identifier: Apache-2.0
"""K2 and its variants at the small geometry on the simulator: every stage against its definition, ranks and widths bit
for bit. `form` names a variant, see `k2_bench.VARIANTS`."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers import k2_bench as kb
from helpers.noise import TAIL_FLOORS

from sgl_amd_mono.common.sync import EPOCH_MODULUS
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Z_SUM_COLUMNS, Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layer_naive as naive

WEIGHT_SEED, INPUT_SEED = 11, 12
ROWS = 8
PADS = {5: (1,), 7: (0, 6)}  # widths with pad rows, and which
SMALL_ROW, SMALL_BY = 3, 2.0**-11  # of a size at which the norm's epsilon is half of what is under the root
ADVERSARIAL_SEEDS = 24
LOGIT_SCALE = 0.25  # a smaller logit has the errors of its 1024 terms, whose root mean square is 1.5
# Multiples of the noise floor, what the order of float32 sums alone moves: 1.5e-4 of the residual's elements, 2.5e-4 of
# a normed row, 4e-3 and 2e-2 of the logits, 2.5e-3 of an output row.
RESIDUAL_SHARE = 60 * TAIL_FLOORS["residual share"]  # 0.009: the definition adds partials that were rounded once
X_REL = 4 * TAIL_FLOORS["x rel"]  # 1e-3
GIVEN_X_SHARE = 5 * TAIL_FLOORS["given_x share"]  # 0.02
LOGITS_SHARE = 5 * TAIL_FLOORS["logits share"]  # 0.1
OUT_REL = 8 * TAIL_FLOORS["out rel"]  # 0.02
full = pytest.mark.full


def geometry(tp: int) -> Geometry:
    return Geometry.small(tp)


@cache
def weights(form: str, tp: int) -> list[kb.RankWeights]:
    return kb.random_weights(geometry(tp), WEIGHT_SEED, variant=kb.VARIANTS[form])


@cache
def inputs(tp: int, width: int) -> kb.Inputs:
    """The first `width` of eight seeded rows, one of them small, some of them pad rows."""
    step = kb.random_inputs(geometry(tp), ROWS, INPUT_SEED)
    for tensor in (step.residual, *step.cores):
        tensor[SMALL_ROW] *= SMALL_BY
    step = step.rows(range(width))
    for i, pad in enumerate(PADS.get(width, ())):
        step.row_index[pad] = -(i % 2)
        for core in step.cores:
            core[pad] = float("nan")
    return step


@cache
def launch(form: str, tp: int, width: int, memory: str = "consistent", seed: int = 0) -> kb.Result:
    bench = kb.Bench(geometry(tp), weights(form, tp), memory=memory, seed=seed)
    return bench.run(inputs(tp, width), last=1)


@cache
def expected(form: str, tp: int, width: int) -> naive.LayerTrace:
    return kb.definition(geometry(tp), weights(form, tp), inputs(tp, width))


def live(tp: int, width: int) -> torch.Tensor:
    return inputs(tp, width).row_index > 0


def case_marks(name: str, unmarked: bool) -> list[pytest.MarkDecorator]:
    """All stages of a case run in one worker and one shard, which simulates its launch once."""
    return [pytest.mark.xdist_group(f"k2-{name}"), *(() if unmarked else (full,))]


# What `make test` runs, besides the launch of eight rows that the others are compared with: (variant, width or seed).
TWO_RANKS = {("plain", 1), ("plain", 2), ("plain", 5), ("plain", 8), ("mxfp4", 1), ("fused", 1), ("fused", 7)}
ONE_RANK = {("plain", 1), ("plain", 7)}
ADVERSARIAL = {("plain", 0), ("plain", 6), ("mxfp4", 0), ("fused", 6)}
CASES = [
    pytest.param(form, tp, width, memory, seed, marks=case_marks(name, unmarked), id=name)
    for form, tp, width, memory, seed, unmarked in [
        *((f, 2, w, "consistent", 0, (f, w) in TWO_RANKS) for f in kb.VARIANTS for w in range(1, 9)),
        *((f, 1, w, "consistent", 0, (f, w) in ONE_RANK) for f in kb.VARIANTS for w in range(1, 9)),
        *(
            (f, 2, 1 + s % 8, "adversarial", s, (f, s) in ADVERSARIAL)
            for f in kb.VARIANTS
            for s in range(ADVERSARIAL_SEEDS)
        ),
    ]
    for name in [f"{form}-tp{tp}-s{width}-{memory}-{seed}"]
]
stages = pytest.mark.parametrize(("form", "tp", "width", "memory", "seed"), CASES)


def assert_ulps(
    got: torch.Tensor, want: torch.Tensor, most: int, share: float, what: str, scale: torch.Tensor | float = 0.0
) -> None:
    """Every element within `most` bf16 steps (see `ulps_at`), at most `share` of them different."""
    steps = kb.ulps_at(got, want, scale)
    worst = float(steps.max())
    assert worst <= most, f"{what}: {worst} bf16 steps at {(steps == worst).nonzero()[0].tolist()}, allowed {most}"
    different = float((got != want).double().mean())
    assert different <= share, f"{what}: {different:.4f} differ, allowed {share}"


@stages
def test_no_wait_was_lost(form: str, tp: int, width: int, memory: str, seed: int) -> None:
    assert not any(f.failed for f in launch(form, tp, width, memory, seed).faults)


@stages
def test_residual(form: str, tp: int, width: int, memory: str, seed: int) -> None:
    result, want = launch(form, tp, width, memory, seed), expected(form, tp, width)
    assert_ulps(result.residual[0], want.residual, 1, RESIDUAL_SHARE, "residual")


@stages
def test_what_the_next_norm_starts_from(form: str, tp: int, width: int, memory: str, seed: int) -> None:
    """z = out + residual in f32, bit for bit; sums of its squares over 8 columns; on every rank, pad rows included."""
    result = launch(form, tp, width, memory, seed)
    for out, residual, z, squares in zip(result.out, result.residual, result.next_z, result.next_squares, strict=True):
        want = out.float() + residual.float()
        assert torch.equal(z, want)
        sums = want.double().square().unflatten(1, (-1, Z_SUM_COLUMNS)).sum(-1)
        assert float((squares.double() - sums).abs().max()) <= 4 * 2.0**-24 * float(sums.max())


@stages
def test_normed_rows(form: str, tp: int, width: int, memory: str, seed: int) -> None:
    result, want, rows = launch(form, tp, width, memory, seed), expected(form, tp, width), live(tp, width)
    assert kb.relative_l2(result.x()[rows], want.x[rows]) <= X_REL


@stages
def test_logits(form: str, tp: int, width: int, memory: str, seed: int) -> None:
    result, rows = launch(form, tp, width, memory, seed), live(tp, width)
    want = naive.logits(result.x(), weights(form, tp)[0].tensors["w_router"])
    assert_ulps(result.logits()[rows], want[rows], 1, GIVEN_X_SHARE, "logits from the kernel's own x")
    assert_ulps(result.logits()[rows], expected(form, tp, width).logits[rows], 1, LOGITS_SHARE, "logits", LOGIT_SCALE)


@stages
def test_route(form: str, tp: int, width: int, memory: str, seed: int) -> None:
    result = launch(form, tp, width, memory, seed)
    ids, route_weights = kb.route_given_logits(result, live(tp, width))
    for rank in range(tp):
        got_ids, got_weights = result.route(rank)
        assert torch.equal(got_ids, ids)
        assert float((got_weights - route_weights).abs().max()) <= 1e-6


@stages
def test_intermediates(form: str, tp: int, width: int, memory: str, seed: int) -> None:
    for rank in range(tp):
        got, want = kb.inter_given_x(launch(form, tp, width, memory, seed), inputs(tp, width), rank)
        assert kb.relative_l2(got, want) <= 1e-2
        assert float((got != want).double().mean()) <= 0.01


@stages
def test_output_from_the_kernels_own_stages(form: str, tp: int, width: int, memory: str, seed: int) -> None:
    result = launch(form, tp, width, memory, seed)
    want, size = kb.out_given_stages(result, inputs(tp, width))
    rows = live(tp, width)
    assert_ulps(result.out[0][rows], want[rows], 2, 0.01, "out", size[rows])


@stages
def test_end_to_end(form: str, tp: int, width: int, memory: str, seed: int) -> None:
    result, want, rows = launch(form, tp, width, memory, seed), expected(form, tp, width), live(tp, width)
    for t in rows.nonzero().flatten().tolist():
        assert kb.relative_l2(result.out[0][t], want.out[t]) <= OUT_REL


@stages
def test_pad_rows_are_zero(form: str, tp: int, width: int, memory: str, seed: int) -> None:
    result, pads = launch(form, tp, width, memory, seed), ~live(tp, width)
    for out, residual in zip(result.out, result.residual, strict=True):
        assert not out[pads].any()
        assert not residual[pads].any()
        assert not out.isnan().any()


@stages
def test_ranks_agree_bit_for_bit(form: str, tp: int, width: int, memory: str, seed: int) -> None:
    result = launch(form, tp, width, memory, seed)
    rows = live(tp, width)
    for rank in range(1, tp):
        assert torch.equal(result.out[rank], result.out[0])
        assert torch.equal(result.residual[rank], result.residual[0])
        assert torch.equal(result.logits(rank)[rows], result.logits(0)[rows])


@stages
def test_widths_agree_bit_for_bit(form: str, tp: int, width: int, memory: str, seed: int) -> None:
    """A live row has the bits that it has in the launch of eight rows, whatever else is in the step."""
    result, widest, rows = launch(form, tp, width, memory, seed), launch(form, tp, ROWS), live(tp, width)
    assert torch.equal(result.out[0][rows], widest.out[0][:width][rows])
    assert torch.equal(result.residual[0][rows], widest.residual[0][:width][rows])


forms = pytest.mark.parametrize("form", ["plain", *(pytest.param(f, marks=full) for f in kb.VARIANTS if f != "plain")])


@forms
@pytest.mark.parametrize(
    "order", [(7, 6, 5, 4, 3, 2, 1, 0), pytest.param((3, 3, 3, 0), marks=full), pytest.param((5,), marks=full)]
)
def test_a_row_does_not_depend_on_its_neighbours(form: str, order: tuple[int, ...]) -> None:
    """Rows in another order, repeated, alone: each keeps its bits."""
    bench = kb.Bench(geometry(2), weights(form, 2))
    result, widest = bench.run(inputs(2, ROWS).rows(order)), launch(form, 2, ROWS)
    index = torch.tensor(order)
    assert torch.equal(result.out[0], widest.out[0][index])
    assert torch.equal(result.residual[0], widest.residual[0][index])


@forms
def test_launches_follow_each_other_in_the_same_buffers(form: str) -> None:
    """Layers and steps, both parities, several widths in one peer buffer: no stale pair is taken for a new one."""
    bench = kb.Bench(geometry(2), weights(form, 2), memory="adversarial", seed=3)
    steps = [(1, 128, 2), (1, 129, 2), (2, 128, 1), (2, 129, 1), (3, 128, 2)]
    steps += [(EPOCH_MODULUS - 1, 254, 2), (EPOCH_MODULUS, 128, 2), (EPOCH_MODULUS + 1, 128, 1)]  # the tag wraps
    for epoch, slot, width in steps:
        step = inputs(2, ROWS).rows([(epoch + slot + t) % ROWS for t in range(width)])
        result = bench.run(step, epoch=epoch, slot=slot)
        for t in range(width):
            assert torch.equal(result.out[1][t], launch(form, 2, ROWS).out[1][(epoch + slot + t) % ROWS])


@forms
def test_warm_up_launch_touches_nothing(form: str) -> None:
    bench = kb.Bench(geometry(2), weights(form, 2))
    result = bench.run(inputs(2, 2), mode=0)
    assert all(out.isnan().all() for out in result.out + result.residual)
    assert not any(p.any() for p in bench.peers)
    assert not any(s.any() for s in bench.scratch[2])


@forms
@pytest.mark.parametrize("width", [1, 3])
def test_a_step_of_pad_rows_alone(form: str, width: int) -> None:
    """No expert is read, every wait is met, the rows are zero."""
    step = kb.random_inputs(geometry(2), width, INPUT_SEED, pads=range(width))
    result = kb.Bench(geometry(2), weights(form, 2)).run(step, last=1)
    assert not any(f.failed for f in result.faults)
    assert not any(t.any() for t in result.out + result.residual)
    assert not any(name in ("w13", "w2") and sum(n.values()) for (_, name), n in result.report.bytes_read.items())


def test_ties_and_nans_in_the_logits() -> None:
    """Equal router rows tie (the lower expert wins); an expert whose logit is NaN is taken last."""
    g = geometry(1)
    own = [kb.RankWeights(dict(weights("plain", 1)[0].tensors))]
    router = own[0].tensors["w_router"].clone()
    router[[9, 21]] = router[3].clone()
    router[[30, 31]] = -router[3].clone()
    router[5] = float("nan")
    own[0].tensors["w_router"] = router
    step = inputs(1, ROWS).rows(range(4))
    result = kb.Bench(g, own).run(step)
    logits = result.logits()
    assert logits[:, 5].isnan().all()
    assert torch.equal(logits[:, 3], logits[:, 21])
    ids, route_weights = naive.route(logits, g.top_k, step.row_index > 0)
    got_ids, got_weights = result.route()
    assert torch.equal(got_ids, ids)
    assert float((got_weights - route_weights).abs().max()) <= 1e-6
    tied = [t for t in range(4) if {3, 9} <= set(ids[t].tolist()) or {30, 31} <= set(ids[t].tolist())]
    assert tied, "no row picked a tie: choose another seed"


@forms
def test_hops(form: str) -> None:
    """At most 3 hand-offs over peer memory and 2 inside the GPU in a row."""
    chain = kb.Bench(geometry(2), weights(form, 2)).run(inputs(2, 1)).report.hop_chain
    regions = [region.removesuffix(".odd").split(".") for region, _ in chain]
    assert [name for memory, name in regions if memory.startswith("peer")] == ["AR", "RLOG", "FINAL"], chain
    assert [name for memory, name in regions if memory.startswith("scratch")] == ["MSQ", "INTER"], chain


@pytest.mark.parametrize("width", [1, 2, pytest.param(3, marks=full)])
def test_uneven_shares_leave_the_bits(width: int) -> None:
    """Top 3 of 16 experts on 32 workgroups: the last ones have a routed-up task more and less of the rest.

    Width 8 shares evenly, and agrees with the definition; every other width has its bits.
    """
    g = geometry(2).with_(top_k=3, experts=16)
    own = kb.random_weights(g, WEIGHT_SEED)
    step = kb.random_inputs(g, ROWS, INPUT_SEED)
    widest, result = kb.Bench(g, own).run(step), kb.Bench(g, own).run(step.rows(range(width)))
    want, size = kb.out_given_stages(widest, step)
    assert_ulps(widest.out[0], want, 2, 0.01, "out", size)
    for rank in range(2):
        assert torch.equal(result.out[rank], widest.out[0][:width])
        assert torch.equal(result.residual[rank], widest.residual[0][:width])
        assert torch.equal(result.logits(rank), widest.logits(0)[:width])
