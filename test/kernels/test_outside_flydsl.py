# SPDX-License-Identifier: Apache-2.0
"""FlyDSL kernels for operations that ours do not use, executed on the simulator against NumPy and PyTorch.

Every probe has a check, which raises AssertionError, and planted mistakes in its machine code, each of which the check
must see.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import flydsl_probes as probes
from helpers.flydsl_probes import (
    ATOMIC_OPERATIONS,
    ATOMIC_THREADS,
    BINS,
    BLOCK_THREADS,
    DMA_M0,
    DMA_SIZES,
    HISTOGRAM_BINS,
    KEYS,
    TRANSPOSED_BITS,
    WARP_REDUCTIONS,
    WARP_WIDTHS,
    WAVE,
)

from sgl_amd_mono.common.runtime_sim import Cluster

MODELS = ("consistent", "adversarial")
LANE = np.arange(WAVE)
Mistake = tuple[str, str]
"""(regular expression on an instruction's text, its replacement)"""


def identify(value: object) -> str:
    """A parameter's name in a test's id."""
    if isinstance(value, functools.partial):
        return f"{identify(value.func)}_{value.args[0]}"
    return getattr(value, "__name__", None) or (value[0] if isinstance(value, tuple) else str(value))


def execute(
    name: str, src: np.ndarray, out: np.ndarray, memory: str = "consistent", mistake: Mistake | None = None
) -> np.ndarray:
    """Run a probe; ``out`` holds what lies there before, the result is a copy of what lies there after."""
    cluster = Cluster(1, memory=memory, seed=11)
    kernel = cluster.kernel(KEYS[name])
    if mistake is not None:
        if not kernel.loaded.find(mistake[0]):
            raise LookupError(f"{name}: no instruction matches {mistake[0]!r}")
        kernel.loaded = kernel.loaded.replace(*mistake)
    given, result = torch.from_numpy(src.copy()), torch.from_numpy(out.copy())
    cluster.launch([(0, kernel, [given, result])])
    return result.numpy()


def numbers(seed: int, count: int, low: int = -20, high: int = 21) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, count, dtype=np.int32)


def same(got: np.ndarray, want: np.ndarray, what: str) -> None:
    differ = np.flatnonzero(np.asarray(got != want).ravel())
    assert differ.size == 0, f"{what}: {differ.size} differ, first at {differ[:4]}: {got.ravel()[differ[:4]]}"


# ---- atomics ------------------------------------------------------------------------------------------------------

FOLDS: dict[str, Callable] = {
    "add": operator.add, "sub": operator.sub, "min": min, "max": max, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor,
}  # fmt: skip


def check_atomics(name: str, memory: str = "consistent", mistake: Mistake | None = None) -> None:
    key = KEYS[name]
    src = numbers(1, key.blocks * ATOMIC_THREADS)
    out = np.zeros((len(ATOMIC_OPERATIONS), BINS), np.int64)
    for row, (_, kind) in enumerate(ATOMIC_OPERATIONS):
        start = np.arange(BINS) * 2 + 5
        out[row].view(kind.lower())[:: 8 // probes.BYTES[kind]] = start
    want = out.copy()
    for row, (operation, kind) in enumerate(ATOMIC_OPERATIONS):
        words = want[row].view(kind.lower())[:: 8 // probes.BYTES[kind]]
        values = src.astype(kind.lower())
        for column in range(BINS):
            each = [x.item() for x in (words[column], *values[column::BINS])]
            words[column] = functools.reduce(FOLDS[operation], each)
    got = execute(name, src, out, memory, mistake)
    for row, (operation, kind) in enumerate(ATOMIC_OPERATIONS):
        same(got[row], want[row], f"{name}: {operation} of {kind}")


def check_atomic_returns(memory: str = "consistent", mistake: Mistake | None = None) -> None:
    """Tickets are a permutation; an exchange hands each value on once; a compare-and-swap loop counts exactly."""
    key = KEYS["atomic_returns"]
    threads = key.blocks * ATOMIC_THREADS
    out = np.zeros(64 + 3 * threads, np.int32)
    got = execute("atomic_returns", np.zeros(1, np.int32), out, memory, mistake)
    tickets, before, own = got[64:].reshape(threads, 3).T
    same(np.sort(tickets), np.arange(threads), "tickets")
    assert got[0] == threads, f"{got[0]} tickets were given"
    left = set(range(threads + 1)) - set(before.tolist())
    assert left == {int(got[16])} and len(set(before.tolist())) == threads, "an exchanged value was lost or doubled"
    same(np.sort(own), np.arange(threads), "tickets of the compare-and-swap loop")
    assert got[32] == threads, f"the loop counted {got[32]}"
    assert got[48] >= threads, "the loop ran fewer rounds than threads"


def check_packed(memory: str = "consistent", mistake: Mistake | None = None) -> None:
    values = torch.from_numpy(numbers(2, 2 * WAVE, -4, 5)).reshape(WAVE, 2)
    src = values.bfloat16().contiguous().view(torch.int32).numpy()
    got = torch.from_numpy(execute("atomics_packed", src, np.zeros(2 * BINS, np.int32), memory, mistake))
    want = values.reshape(WAVE // BINS, BINS, 2).sum(0)
    for row, dtype in enumerate((torch.bfloat16, torch.float16)):
        found = got[row * BINS : (row + 1) * BINS].contiguous().view(dtype).reshape(BINS, 2)
        same(found.int().numpy(), want.int().numpy(), f"packed add of {dtype}")


def check_buffer_atomics(memory: str = "consistent", mistake: Mistake | None = None) -> None:
    src = numbers(3, WAVE, 1, 40)
    out = np.zeros((5, 16), np.int64)
    out[3] = 15
    got = execute("atomics_buffer", src, out, memory, mistake)
    lanes = src[:48].reshape(3, 16)  # lanes 48 and up lie outside the buffer
    same(got[0].view(np.float32)[::2], lanes.sum(0).astype(np.float32), "fadd")
    same(got[1].view(np.float64), lanes.max(0).astype(np.float64), "fmax")
    same(got[2], lanes.max(0).astype(np.int64), "smax")
    same(got[3], np.minimum(lanes.min(0), 15).astype(np.int64), "umin")
    swapped = got[4].astype(np.int32)
    assert all(swapped[i] in lanes[:, i] for i in range(16)), "compare-and-swap took a value that no lane offered"


ATOMIC_MISTAKES: tuple[Mistake, ...] = (
    (r"global_atomic_umax\b", "global_atomic_smax"),
    (r"global_atomic_smin\b", "global_atomic_umin"),
    (r"global_atomic_add_f32\b", "global_atomic_add"),
    (r"global_atomic_max_f64\b", "global_atomic_min_f64"),
)
LDS_MISTAKES: tuple[Mistake, ...] = (
    (r"ds_max_u32\b", "ds_max_i32"),
    (r"ds_add_f64\b", "ds_add_u64"),
    (r"ds_min_u64\b", "ds_min_i64"),
)


@pytest.mark.parametrize("memory", MODELS)
def test_atomics(memory: str) -> None:
    """Integers wrap, signed and unsigned order differ, floats of 32 and 64 bits: words that all waves share."""
    check_atomics("atomics_global", memory)
    check_atomics("atomics_lds", memory)
    check_atomic_returns(memory)
    check_packed(memory)
    check_buffer_atomics(memory)


@pytest.mark.parametrize("name, mistake", [("atomics_global", m) for m in ATOMIC_MISTAKES]
                         + [("atomics_lds", m) for m in LDS_MISTAKES], ids=identify)  # fmt: skip
def test_a_wrong_atomic_is_seen(name: str, mistake: Mistake) -> None:
    with pytest.raises(AssertionError, match="differ"):
        check_atomics(name, mistake=mistake)


@pytest.mark.parametrize("check, mistake", [
    (check_atomic_returns, (r"global_atomic_swap (v\d+),", r"global_atomic_add \1,")),
    (check_packed, (r"global_atomic_pk_add_f16", "global_atomic_pk_add_bf16")),
    (check_buffer_atomics, (r"buffer_atomic_smax", "buffer_atomic_umin")),
], ids=["exchange", "packed", "buffer"])  # fmt: skip
def test_a_wrong_exchange_packed_or_buffer_atomic_is_seen(check: Callable, mistake: Mistake) -> None:
    with pytest.raises(AssertionError):
        check(mistake=mistake)


# ---- lanes --------------------------------------------------------------------------------------------------------


def dpp_source(control: str, lane: int) -> int | None:
    """The lane that a DPP control reads, None where there is none (CDNA ISA, section DPP)."""
    name, _, argument = control.partition(":")
    row, place = divmod(lane, 16)
    if name == "quad_perm":
        return lane - lane % 4 + int(argument.strip("[]").split(",")[lane % 4])
    if name in ("row_mirror", "row_half_mirror"):
        size = 16 if name == "row_mirror" else 8
        return lane - lane % size + size - 1 - lane % size
    count = int(argument)
    if name == "row_ror":
        return 16 * row + (place - count) % 16
    if name == "row_bcast":  # the last lane of the 16 (32) before, for every lane behind
        return lane // (count + 1) * (count + 1) - 1 if lane > count else None
    step = -count if name.endswith("shr") else count
    source = lane + step
    limits = range(16 * row, 16 * row + 16) if name.startswith("row") else range(WAVE)
    return source if source in limits else None


def check_dpp(memory: str = "consistent", mistake: Mistake | None = None) -> None:
    src = np.concatenate([numbers(4, WAVE, 1, 1 << 30), -numbers(5, WAVE, 1, 1 << 30)])
    cases = probes.dpp_cases()
    got = execute("dpp", src, np.zeros((len(cases), WAVE), np.int32), memory, mistake)
    for row, (control, rows, banks, bound) in enumerate(cases):
        for lane in range(WAVE):
            source = dpp_source(control, lane)
            written = rows >> lane // 16 & 1 and banks >> lane // 4 % 4 & 1
            if not written or (source is None and not bound):
                want = src[WAVE + lane]
            else:
                want = src[source] if source is not None else 0
            assert got[row, lane] == want, f"{control} masks {rows:#x} {banks:#x} bound {bound}: lane {lane} differs"


def check_swaps(memory: str = "consistent", mistake: Mistake | None = None) -> None:
    """Odd rows (of 16, of 32 lanes) of the first trade places with even rows of the second."""
    src = numbers(6, 2 * WAVE, 0, 1 << 30).reshape(2, WAVE)
    got = execute("permlane_swaps", src, np.zeros((4, WAVE), np.int32), memory, mistake)
    for number, lanes in enumerate((16, 32)):
        first, second = src.copy()
        for start in range(0, WAVE, 2 * lanes):
            odd, even = slice(start + lanes, start + 2 * lanes), slice(start, start + lanes)
            first[odd], second[even] = src[1, even], src[0, odd]
        same(got[2 * number], first, f"permlane{lanes}_swap, first")
        same(got[2 * number + 1], second, f"permlane{lanes}_swap, second")


UFUNCS = {"ADD": np.add, "MAX": np.maximum, "MIN": np.minimum, "MUL": np.multiply}


def check_warp(memory: str = "consistent", mistake: Mistake | None = None) -> None:
    src = numbers(7, WAVE, -3, 4)
    src[src == 0] = 5  # products keep their information
    rows = len(WARP_WIDTHS) * len(WARP_REDUCTIONS) * 3
    got = execute("coop_warp", src, np.zeros((rows, WAVE), np.int32), memory, mistake)
    row = 0
    for width in WARP_WIDTHS:
        for name, kind in WARP_REDUCTIONS:
            values = src.astype(np.float32 if kind == "Float32" else np.int32).reshape(-1, width)
            scan = UFUNCS[name].accumulate(values, axis=1, dtype=values.dtype)
            total = np.repeat(scan[:, -1:], width, axis=1)
            for what, want in (("reduce", total), ("inclusive scan", scan)):
                same(got[row].view(values.dtype), want.ravel(), f"{what} {name} {kind} over {width}")
                row += 1
            found = got[row].view(values.dtype).reshape(-1, width)
            same(found[:, 1:], scan[:, :-1], f"exclusive scan {name} {kind} over {width}")
            row += 1


def check_block(memory: str = "consistent", mistake: Mistake | None = None) -> None:
    src = numbers(8, BLOCK_THREADS, -1000, 1000)
    got = execute("coop_block", src, np.zeros(3 * BLOCK_THREADS + HISTOGRAM_BINS, np.int32), memory, mistake)
    total, before, ordered = got[: 3 * BLOCK_THREADS].reshape(3, -1)
    same(total, np.full_like(total, src.sum()), "sum")
    same(before, np.cumsum(src, dtype=np.int32) - src, "exclusive sum")
    same(ordered, np.sort(src), "radix sort")
    counts = torch.bincount(torch.from_numpy(src) & (HISTOGRAM_BINS - 1), minlength=HISTOGRAM_BINS)
    same(got[3 * BLOCK_THREADS :], counts.int().numpy(), "histogram")


@pytest.mark.parametrize("check", [check_dpp, check_swaps, check_warp, check_block])
@pytest.mark.parametrize("memory", MODELS)
def test_lane_moves(check: Callable, memory: str) -> None:
    """DPP with every control and mask, permlane swaps, and FlyDSL's cooperative library, which is built on them."""
    check(memory)


@pytest.mark.parametrize("check, mistake", [
    (check_dpp, ("row_shr:2", "row_shr:1")),
    (check_dpp, ("row_bcast:31 row_mask:0xc", "row_bcast:15 row_mask:0xc")),
    (check_dpp, (r"row_ror:3 row_mask:0xf bank_mask:0x6", "row_ror:3 row_mask:0xf bank_mask:0xf")),
    (check_dpp, ("row_shl:1 (.*) bound_ctrl:[01]", r"row_shl:1 \1")),
    (check_swaps, ("v_permlane16_swap_b32_e32", "v_permlane32_swap_b32_e32")),
    (check_warp, ("v_add_u32_dpp", "v_max_i32_dpp")),
    (check_warp, (r"row_bcast:15 row_mask:0xa", "row_bcast:15 row_mask:0xf")),
    (check_warp, ("ds_swizzle_b32 (.*) offset:.*", r"ds_swizzle_b32 \1 offset:swizzle(SWAP,8)")),
    (check_block, ("ds_add_u32", "ds_max_u32")),
], ids=identify)  # fmt: skip
def test_a_wrong_lane_move_is_seen(check: Callable, mistake: Mistake) -> None:
    with pytest.raises(AssertionError):
        check(mistake=mistake)


# ---- memory to LDS, and transposed out of it ----------------------------------------------------------------------


def check_lds_dma(memory: str = "consistent", mistake: Mistake | None = None) -> None:
    src = numbers(9, 1024, 0, 1 << 30)
    total = 2 * sum(DMA_SIZES) * WAVE // 4
    got = execute("lds_dma", src, np.zeros(total, np.int32), memory, mistake)
    base = 0
    for path in ("buffer", "global"):
        for size in DMA_SIZES:
            words = size // 4
            want = np.full((WAVE, words), 0x01010101, np.int32)
            for lane in range(WAVE):
                piece = src[(11 * lane) % WAVE * words :][:words]
                if path == "buffer":
                    want[lane] = 0 if lane in (5, 6, 7) else piece
                elif lane < 40:
                    want[lane] = piece
            same(got[base : base + WAVE * words], want.ravel(), f"{path} load of {size} bytes to LDS")
            base += WAVE * words


def check_transposed(bits: int, memory: str = "consistent", mistake: Mistake | None = None) -> None:
    """Among 16 lanes the bytes read, in order of the lanes, are a matrix of 16 columns; lane c gets column c."""
    size = 12 if bits == 6 else 8
    src = np.random.default_rng(10 + bits).integers(0, 256, WAVE * size, dtype=np.uint8)
    got = execute(f"transposed_{bits}", src, np.zeros_like(src), memory, mistake)
    for group in range(4):
        part = slice(group * 16 * size, (group + 1) * 16 * size)
        stream, result = (np.unpackbits(x[part], bitorder="little") for x in (src, got))
        matrix = stream.reshape(-1, 16, bits)
        same(result.reshape(16, -1, bits), matrix.transpose(1, 0, 2), f"tr_b{bits}, group {group}")


def check_matmul(memory: str = "consistent", mistake: Mistake | None = None) -> None:
    a = torch.from_numpy(numbers(30, 16 * 32)).reshape(16, 32)
    b = torch.from_numpy(numbers(31, 32 * 16)).reshape(32, 16)
    src = torch.cat([a.flatten(), b.flatten()]).bfloat16().view(torch.int32).numpy()
    got = execute("transposed_matmul", src, np.zeros((16, 16), np.float32), memory, mistake)
    same(got, (a @ b).float().numpy(), "matmul of a transposed read")


@pytest.mark.parametrize("memory", MODELS)
def test_loads_to_lds(memory: str) -> None:
    check_lds_dma(memory)


@pytest.mark.parametrize("memory", MODELS)
def test_transposed_reads(memory: str) -> None:
    for bits in TRANSPOSED_BITS:
        check_transposed(bits, memory)
    check_matmul(memory)


@pytest.mark.parametrize("check, mistake", [
    (check_lds_dma, (r"s_(mov\w*_[bi]32) m0, .*", f"s_movk_i32 m0, {DMA_M0 + 4:#x}")),
    (check_lds_dma, (r"global_load_lds_dwordx4", "global_load_lds_dwordx3")),
    (functools.partial(check_transposed, 8), ("ds_read_b64_tr_b8", "ds_read_b64_tr_b16")),
    (functools.partial(check_transposed, 4), ("ds_read_b64_tr_b4 (.*)", r"ds_read_b64 \1")),
    (functools.partial(check_transposed, 6), ("ds_read_b96_tr_b6 (.*)", r"ds_read_b96 \1")),
    (check_matmul, ("ds_read_b64_tr_b16 (.*)", r"ds_read_b64 \1")),
], ids=identify)  # fmt: skip
def test_a_wrong_load_to_lds_or_transposition_is_seen(check: Callable, mistake: Mistake) -> None:
    with pytest.raises(AssertionError):
        check(mistake=mistake)


def test_a_missing_wait_for_the_dma_is_seen_by_the_adversarial_model() -> None:
    """LDS filled by a load is not there before vmcnt says so: without the wait some word is the old one, or a fault."""
    seen = 0
    for seed in range(8):
        cluster = Cluster(1, memory="adversarial", seed=seed)
        kernel = cluster.kernel(KEYS["lds_dma"])
        kernel.loaded = kernel.loaded.delete(r"s_waitcnt vmcnt\(0\)$", nth=None)
        src, out = numbers(9, 1024, 0, 1 << 30), torch.zeros(2 * sum(DMA_SIZES) * WAVE // 4, dtype=torch.int32)
        cluster.launch([(0, kernel, [torch.from_numpy(src), out])])
        clean = execute("lds_dma", src, np.zeros(out.numel(), np.int32))
        seen += not np.array_equal(out.numpy(), clean)
    assert seen == 8


def test_an_unknown_instruction_is_an_error_that_names_its_line() -> None:
    """Nothing is skipped or guessed: the code does not load."""
    from sgl_amd_mono.sim import SimError

    kernel = Cluster(1).kernel(KEYS["permlane_swaps"])
    for wrong in ("v_permlane64_swap_b32", "v_permlane16_swap_b64"):
        with pytest.raises(SimError, match=rf"line \d+: {wrong} .*unknown instruction"):
            kernel.loaded.replace(r"v_permlane16_swap_b32_e32", wrong)
