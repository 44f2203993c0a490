# SPDX-License-Identifier: Apache-2.0
"""AMD's MXFP4 code objects on the simulator (AITER's f4gemm and fused MoE), and K2's experts against the fused MoE.

Each is compared with its float64 definition, bit for bit where its order of sums is fixed. K2 gets one rank of A95B
(true sizes, fewer experts), its shared expert is silenced, and the fused MoE gets K2's own rows, picks and weights.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from helpers import aiter_code, k2_bench
from helpers.aiter_code import Moe, add_in_bf16, add_in_float32, code_half_up
from helpers.isa import kernel_text, link

from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layout
from sgl_amd_mono.sim import CodeObject, SimError
from sgl_amd_mono.sim.disassembler import OBJDUMP_VARIABLE, assembly_text
from sgl_amd_mono.sim.elf import ElfCodeObject
from sgl_amd_mono.simulate import aiter_moe

pytestmark = pytest.mark.xdist_group("moe")

FILES = sorted(aiter_code.kernels())

# ---- the disassembly ----

# Of a scaled MFMA's first word: which half of a third source that it does not have. LLVM prints neither.
MFMA_SCALE_UNUSED = 0x6000


GEMM_FILES = [f"f4gemm/{gemm.file}" for gemm in aiter_code.gemms().values()]


@pytest.mark.parametrize("file", [*GEMM_FILES, *(f"{aiter_code.MOE_FOLDER}/{f}" for f in FILES)])
def test_the_disassembly_assembles_to_the_same_code(file: str, tmp_path: Path) -> None:
    """What the simulator reads, put through LLVM's assembler again, is the code object's machine code: every
    instruction and every branch."""
    data = (aiter_code.folder() / file).read_bytes()
    text = assembly_text(data)
    kernel = ElfCodeObject(data).kernels[0]
    lines = text[text.index(f"{kernel.name}:\n") : text.index("\t.amdhsa_kernel")].splitlines()[1:]
    body = [line.split("//")[0].strip() for line in lines]
    again = ElfCodeObject(link(kernel_text(body), tmp_path))
    start = again.kernels[0].entry
    places = [(int(line.split("//")[1], 16), line.split()[0]) for line in lines if "//" in line]
    assert len(places) == len(CodeObject.load(data).instructions)
    original = ElfCodeObject(data)
    for (address, name), (following, _) in zip(places, [*places[1:], (places[-1][0] + 4, "")]):
        size = following - address
        words = original.bytes_at(address, size), again.bytes_at(start + address - kernel.entry, size)
        unused = MFMA_SCALE_UNUSED if name.startswith("v_mfma_scale") else 0
        before, after = (int.from_bytes(w, "little") | unused for w in words)
        assert before == after, f"{name} at {address:#x}"


# ---- f4gemm ----

K, MORE_ROWS = 1024, 8
SPLIT_K, SPLITS = 2048, (1, 2)  # log2 of the splits
BF16_STEP = 2.0**-8


def operands(rows: int, columns: int, k: int, seed: int) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)

    def random(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=rng, dtype=torch.uint8)

    return (
        random(0, 256, rows, k // 2), random(120, 128, rows, k // 32),
        random(0, 256, columns, k // 2), random(120, 128, columns, k // 32),
    )  # fmt: skip


def product(a: torch.Tensor, a_codes: torch.Tensor, b: torch.Tensor, b_codes: torch.Tensor) -> torch.Tensor:
    return layout.dequantize_mxfp4(a, a_codes) @ layout.dequantize_mxfp4(b, b_codes).T


def shape_of(gemm: aiter_code.Gemm) -> tuple[int, int]:
    """Two tiles of columns, and rows of a second tile; without the shuffle the kernel writes whole tiles."""
    return gemm.tile_m + (MORE_ROWS if gemm.shuffled else 0), 2 * gemm.tile_n


def test_the_table_names_every_gemm() -> None:
    assert len(aiter_code.gemms()) == len(list((aiter_code.folder() / "f4gemm").glob("*.co"))) == 35


@pytest.mark.parametrize("name", sorted(aiter_code.gemms()))
def test_gemm(name: str) -> None:
    """bf16 of the exact product, in every element."""
    gemm = aiter_code.gemms()[name]
    given = operands(*shape_of(gemm), K, seed=1)
    got = gemm(*given)
    assert torch.equal(got, product(*given).float().bfloat16())


@pytest.mark.parametrize("name", ["BpreShuffle_32x128", "BpreShuffle_128x512", "noBpreShuffle_256x256"])
def test_gemm_under_the_adversarial_memory_model(name: str) -> None:
    """Loads come late, into LDS and AGPRs too: the kernels' own waits, some for all but the newest loads, suffice."""
    gemm = aiter_code.gemms()[name]
    given = operands(*shape_of(gemm), K, seed=1)
    assert torch.equal(gemm(*given, memory="adversarial"), product(*given).float().bfloat16())


@pytest.mark.parametrize("name", sorted(n for n, g in aiter_code.gemms().items() if g.split_k))
@pytest.mark.parametrize("splits", SPLITS)
def test_gemm_with_a_split_k(name: str, splits: int) -> None:
    """Each split is rounded to bf16 and added to bf16 memory, in any order: as many roundings as splits, at most two
    a split, of the size of the largest partial sum."""
    gemm = aiter_code.gemms()[name]
    a, a_codes, b, b_codes = operands(MORE_ROWS, gemm.tile_n, SPLIT_K, seed=2)
    got = gemm(a, a_codes, b, b_codes, log2_splits=splits)
    parts = torch.stack([
        product(*(t.chunk(1 << splits, dim=1)[s] for t in (a, a_codes, b, b_codes))) for s in range(1 << splits)
    ])  # fmt: skip
    largest = torch.maximum(parts.abs().amax(0), parts.cumsum(0).abs().amax(0)) + parts.abs().sum(0)
    assert ((got.double() - parts.sum(0)).abs() <= (1 << splits) * BF16_STEP * largest).all()
    assert k2_bench.relative_l2(got, parts.sum(0)) <= 2.0 ** (splits / 2) * BF16_STEP / 2


def test_a_shifted_scale_block_of_the_gemm_is_seen() -> None:
    gemm = aiter_code.gemms()["BpreShuffle_32x128"]
    a, a_codes, b, b_codes = operands(*shape_of(gemm), K, seed=1)
    wanted = product(a, a_codes, b, b_codes).float().bfloat16()
    for codes in ((a_codes.roll(1, 1), b_codes), (a_codes, b_codes.roll(1, 1)), (a_codes.roll(1, 0), b_codes)):
        assert not torch.equal(gemm(a, codes[0], b, codes[1]), wanted)


# ---- bf16 GEMM ----

BF16_FLOOR = 5e-7
"""Relative L2 of float32 sums of 1,024 products in two orders, measured: 2.6e-7 in one chain."""


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("file", sorted(aiter_code.bf16_gemms()))
def test_bf16_gemm(file: str, splits: int) -> None:
    """AITER's bf16 GEMM with float32 output, rows of a second tile: within the floor of float32 sums."""
    gemm = aiter_code.bf16_gemms()[file]
    rng = torch.Generator().manual_seed(9)
    a = torch.randn(gemm.tile_m + 16, K, generator=rng).bfloat16()
    b = torch.randn(2 * gemm.tile_n, K, generator=rng).bfloat16()
    wanted = a.double() @ b.double().T
    assert k2_bench.relative_l2(gemm(a, b, splits), wanted) <= BF16_FLOOR
    swapped = torch.cat([a[:, 1:2], a[:, :1], a[:, 2:]], 1)
    assert k2_bench.relative_l2(gemm(swapped, b, splits), wanted) > 1e3 * BF16_FLOOR


# ---- the fused MoE ----

FILE = "fmoe_bf16_pertokenMXfp4_g1u1_vs_silu_2tg_32x256.co"  # what AITER picks of these at an intermediate width of 256
HIDDEN, INTER, EXPERTS = 1024, 512, 8


def random_moe(hidden: int, inter: int, experts: int, seed: int) -> Moe:
    rng = torch.Generator().manual_seed(seed)

    def random(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=rng, dtype=torch.uint8)

    return Moe(
        random(0, 256, experts, 2 * inter, hidden // 2), random(116, 122, experts, 2 * inter, hidden // 32),
        random(0, 256, experts, hidden, inter // 2), random(116, 122, experts, hidden, inter // 32),
    )  # fmt: skip


def random_step(rows: int, picks: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bf16 rows, ids and weights."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:picks] for _ in range(rows)])
    weights = torch.softmax(torch.randn(rows, picks, generator=rng), -1)
    return torch.randn(rows, HIDDEN, generator=rng).bfloat16(), ids, weights


def sliced(moe: Moe, width: int) -> list[Moe]:
    """The experts cut in slices of the intermediate columns, as the kernel's workgroups take them."""
    slices = moe.sizes[2] // width

    def rows(shuffled: torch.Tensor, s: int) -> torch.Tensor:
        return shuffled.unflatten(1, (2, slices, width))[:, :, s].flatten(1, 2)

    def columns(whole: torch.Tensor, s: int) -> torch.Tensor:
        return whole.chunk(slices, dim=2)[s]

    w13, w2 = layout.unshuffle_weight(moe.w13), layout.unshuffle_weight(moe.w2)
    w13_codes, w2_codes = layout.unshuffle_scale(moe.w13_codes), layout.unshuffle_scale(moe.w2_codes)
    return [
        Moe(
            layout.shuffle_weight(rows(w13, s)), layout.shuffle_scale(rows(w13_codes, s)),
            layout.shuffle_weight(columns(w2, s)), layout.shuffle_scale(columns(w2_codes, s)),
        )
        for s in range(slices)
    ]  # fmt: skip


@pytest.mark.parametrize("file", FILES)
def test_fused_moe(file: str) -> None:
    """One pick a row and one slice, or one pick and two slices: no order is left open, and every bit is the
    definition's. Rows share experts, and more of them than a block of 32 picks one."""
    width = aiter_code.kernels()[file].slice
    moe = random_moe(HIDDEN, INTER, EXPERTS, seed=3)
    x, ids, weights = random_step(40, 1, seed=4)
    ids[:34] = 5
    quantised = layout.quantize_mxfp4(x, code_half_up)
    got = moe.kernel(file, *quantised, ids, weights)
    parts = [m.contributions(*quantised, ids, weights, code_half_up) for m in sliced(moe, width)]
    wanted = add_in_bf16(torch.cat(parts, 1), range(len(parts)))
    assert len(parts) == INTER // width and torch.equal(got, wanted)


@pytest.mark.parametrize("memory", ["consistent", "adversarial"])
def test_fused_moe_adds_its_picks_in_bf16(memory: str) -> None:
    """Two picks a row: rounded to bf16 each, added in bf16; rounded once they would differ."""
    moe = random_moe(HIDDEN, 256, EXPERTS, seed=5)
    x, ids, weights = random_step(8, 2, seed=6)
    quantised = layout.quantize_mxfp4(x, code_half_up)
    got = moe.kernel(FILE, *quantised, ids, weights, memory=memory)
    parts = moe.contributions(*quantised, ids, weights, code_half_up)
    assert torch.equal(got, add_in_bf16(parts, (0, 1)))
    assert not torch.equal(got, add_in_float32(parts, (0, 1)))


def test_the_sorting_of_tokens() -> None:
    """By hand: expert 1 has rows 0 and 2, expert 3 rows 0 and 1 (its second pick), the rest none."""
    ids = torch.tensor([[3, 1], [0, 3], [1, 0]])
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.125, 0.875]])
    entries, sorted_weights, block_expert, used = aiter_code.sort_tokens(ids, weights, 4)
    pad = 2 << 24 | 3
    assert used.tolist() == [96, 3] and block_expert[:3].tolist() == [0, 1, 3]
    assert entries[:3].tolist() == [1, 1 << 24 | 2, pad]
    assert entries[32:35].tolist() == [1 << 24, 2, pad] and entries[64:67].tolist() == [0, 1 << 24 | 1, pad]
    assert sorted_weights[[0, 1, 32, 33, 64, 65]].tolist() == [0.5, 0.875, 0.25, 0.125, 0.75, 0.5]
    assert (entries[96:] == pad).all() and len(entries) == 6 + 4 * 32 - 2


def test_the_choice_of_a_kernel() -> None:
    """AITER's rule by hand: 33 blocks leave fewest CUs idle in slices of 256; at 256 columns there is no other."""
    assert aiter_moe.choose(256, 33).file == FILE and aiter_moe.choose(512, 33).file == FILE
    assert aiter_moe.choose(512, 200).slice == 512, "400 workgroups would need two rounds of 256 CUs"
    with pytest.raises(SimError, match="intermediate width of 384"):
        aiter_moe.choose(384, 33)


@pytest.mark.parametrize("inter", [256, 512])
def test_fused_moe_as_sglang_calls_it(inter: int) -> None:
    """bf16 rows, any number of them, scales of all experts as one matrix, int32 ids; the rule of the rows' scales."""
    moe = random_moe(HIDDEN, inter, EXPERTS, seed=7)
    x, ids, weights = random_step(9, 1, seed=8)
    scales = {"w1_scale": moe.w13_codes.flatten(0, 1), "w2_scale": moe.w2_codes.flatten(0, 1)}
    before = aiter_moe.ran[FILE]
    for code in (layout.scale_code, code_half_up):
        got = aiter_moe.fused_moe(x, moe.w13, moe.w2, weights, ids.int(), **scales, code=code)
        quantised = layout.quantize_mxfp4(x, code)
        parts = [m.contributions(*quantised, ids, weights, code_half_up) for m in sliced(moe, 256)]
        assert torch.equal(got, add_in_bf16(torch.cat(parts, 1), range(len(parts))))
    assert aiter_moe.ran[FILE] == before + 2
    with pytest.raises(SimError, match="hidden size 512"):
        aiter_moe.fused_moe(x[:, :512], moe.w13, moe.w2[:, :512], weights, ids, **scales)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert aiter_moe.unavailable() is None
    monkeypatch.setenv(OBJDUMP_VARIABLE, str(tmp_path / "absent"))
    assert "absent is not a program" in aiter_moe.unavailable()
    monkeypatch.setattr(aiter_moe, "DISTRIBUTION", "no-such-distribution")
    assert "requirements/aiter.txt" in aiter_moe.unavailable()
    with pytest.raises(SimError, match=r"requirements/aiter\.txt"):
        aiter_moe.folder()


# ---- K2's experts against it ----

RANK = Geometry(
    name="a95b-rank", tp=1, key_heads_total=2, value_heads_total=16, q_heads_total=8, kv_heads_total=1, experts=32,
    moe_intermediate_total=256, shared_intermediate_total=256,
)  # fmt: skip
"""One of A95B's eight ranks by itself, with 32 experts instead of 512."""
ROWS = (1, 3, 8)
ORDER_SEEDS = range(4)
SPREADS = 1.5
"""A distance is allowed this many times the spread of the fused MoE's own sums over the order of its additions."""
FLOOR = 5.8e-3
"""That spread at ten picks, in relative L2 of a row: bf16 additions to memory in the order of arrival."""
FLOAT32_FLOOR = 3.5e-5
"""The same for float32 sums in any order, rounded to bf16 once: one or two elements of a row fall to the other side of
a bf16 step. It is the noise floor of K2's routed sum."""


@cache
def rank_weights(picks: int) -> tuple[Geometry, list[k2_bench.RankWeights], Moe]:
    geometry = RANK.with_(top_k=picks)
    weights = k2_bench.random_weights(geometry, 51)
    t = weights[0].tensors
    t["w_sd"].zero_()
    return geometry, weights, Moe(t["w13"], t["w13_scale"], t["w2"], t["w2_scale"])


@cache
def k2(rows: int, picks: int = 10) -> k2_bench.Result:
    """K2's launch: with the shared expert's down projection zero and one rank, `out` is the routed sum."""
    geometry, weights, _ = rank_weights(picks)
    result = k2_bench.Bench(geometry, weights).run(k2_bench.random_inputs(geometry, rows, 52), last=1)
    assert not any(fault.failed for fault in result.faults)
    return result


def distances(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Largest relative L2 of a row, smallest cosine."""
    a, b = a.double(), b.double()
    error = (a - b).norm(dim=1) / b.norm(dim=1)
    return float(error.max()), float(torch.nn.functional.cosine_similarity(a, b, dim=1).min())


@cache
def fused(rows: int, picks: int = 10, code=layout.scale_code, shift: int = 0) -> torch.Tensor:
    """The fused MoE on K2's rows, picks and weights; x quantised by `code`, its codes rolled by `shift` blocks."""
    result, (_, _, moe) = k2(rows, picks), rank_weights(picks)
    ids, weights = result.route()
    packed, codes = layout.quantize_mxfp4(result.x(), code)
    return moe.kernel(FILE, packed, codes.roll(shift, 1), ids, weights)


@cache
def parts_of(rows: int, picks: int = 10) -> torch.Tensor:
    """The definition's contributions of every pick, from K2's rows, picks and weights."""
    result, (_, _, moe) = k2(rows, picks), rank_weights(picks)
    ids, weights = result.route()
    return moe.contributions(*layout.quantize_mxfp4(result.x()), ids, weights, layout.scale_code)


def spread(parts: torch.Tensor, add) -> float:
    """Largest relative L2 of a row between two orders of the same additions."""
    picks = parts.shape[1]
    orders = [torch.randperm(picks, generator=torch.Generator().manual_seed(s)).tolist() for s in ORDER_SEEDS]
    results = [add(parts, order) for order in [list(range(picks)), *orders]]
    return max(distances(a, b)[0] for a in results for b in results)


@cache
def allowed(rows: int) -> float:
    return SPREADS * spread(parts_of(rows), add_in_bf16)


@pytest.mark.parametrize("rows", ROWS)
def test_k2_against_the_fused_moe(rows: int) -> None:
    """The same rows, picks and weights: apart by no more than the fused MoE's own additions spread."""
    error, cosine = distances(k2(rows).out[0], fused(rows))
    floor = spread(parts_of(rows), add_in_bf16)
    print(f"{rows} rows: relative L2 {error:.2e}, cosine {cosine:.7f}; spread of the order {floor:.2e}")
    assert FLOOR / 1.5 <= floor <= 1.5 * FLOOR
    assert error <= SPREADS * floor
    assert cosine >= 1 - (SPREADS * floor) ** 2


@pytest.mark.parametrize("rows", ROWS)
def test_k2_rounds_the_sum_once(rows: int) -> None:
    """K2's routed sum is the float32 sum of its picks, rounded once: as near as float32 sums in any order are."""
    parts = parts_of(rows)
    error, _ = distances(k2(rows).out[0], add_in_float32(parts, range(RANK.top_k)))
    floor = spread(parts, add_in_float32)
    print(f"{rows} rows: relative L2 {error:.1e}, spread of float32 sums {floor:.1e}")
    assert floor <= 2 * FLOAT32_FLOOR and error <= 2 * FLOAT32_FLOOR


def test_the_two_roundings_are_all_that_differs() -> None:
    """With two picks no order is open: the definition with K2's one rounding gives K2, with a rounding a pick and bf16
    additions it gives the fused MoE, each bit for bit, from the same rows, codes, picks and weights."""
    parts = parts_of(3, picks=2)
    assert torch.equal(k2(3, picks=2).out[0], add_in_float32(parts, (0, 1)))
    assert torch.equal(fused(3, picks=2), add_in_bf16(parts, (0, 1)))


def test_the_installed_quantiser_rounds_a_tie_up() -> None:
    """x by the wheel's own rule: codes differ exactly where a block's largest magnitude is 1.5 times a power of two,
    in about one block of 128 in bf16 rows, and the distance is then far above the floor."""
    x = k2(8).x().float().reshape(8, -1, layout.MX_BLOCK).abs().amax(-1)
    mantissa = x / torch.exp2(torch.floor(torch.log2(x)))
    differ = code_half_up(x) != layout.scale_code(x)
    assert torch.equal(differ, mantissa == 1.5) and 0.002 < float(differ.double().mean()) < 0.03
    assert distances(k2(8).out[0], fused(8, code=code_half_up))[0] > 4 * allowed(8)


def test_even_instead_of_rceil_is_seen() -> None:
    """x quantised by EVEN, the rule of the dense path."""
    assert distances(k2(3).out[0], fused(3, code=layout.scale_code_even))[0] > 4 * allowed(3)


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shifted_scale_block_is_seen(shift: int) -> None:
    assert distances(k2(3).out[0], fused(3, shift=shift))[0] > 4 * allowed(3)


def test_even_in_k2_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """K2 built with EVEN in place of RCEIL for x and the intermediates."""
    from sgl_amd_mono.common import device
    from sgl_amd_mono.common.build import compile_artifact
    from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.layer import LayerKey

    geometry, weights, _ = rank_weights(10)
    monkeypatch.setattr(device, "mxfp4_code", device.mxfp4_code_even)
    planted = CodeObject.parse(compile_artifact(LayerKey(geometry=geometry, width=3, stop=False)).isa)
    monkeypatch.undo()
    inputs = k2_bench.random_inputs(geometry, 3, 52)
    result = k2_bench.Bench(geometry, weights).run(inputs, last=1, program=planted)
    assert torch.equal(result.x(), k2(3).x())
    assert distances(result.out[0], fused(3))[0] > 4 * allowed(3)
