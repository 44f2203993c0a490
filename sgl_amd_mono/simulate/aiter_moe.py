# SPDX-License-Identifier: Apache-2.0
"""AMD's fused MXFP4 MoE (AITER's `fmoe_g1u1`, gfx950 machine code) on the simulator.

The wheel `amd-aiter` carries the code objects (`aiter_meta/hsa/gfx950/fmoe/silu`); `aiter` itself is never imported.
The argument struct, grids, choice of kernel and token sorting are those of its launchers (csrc/py_itfs_cu/asm_fmoe.cu,
aiter/fused_moe.py), in code of our own. The kernel rounds every pick's weighted output to bf16 and adds it to bf16
memory in the order in which workgroups arrive.
"""

from __future__ import annotations

import csv
import functools
import importlib.metadata
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import layout
from sgl_amd_mono.sim import CodeObject, Launch, Machine, SimError
from sgl_amd_mono.sim.disassembler import find_objdump

DISTRIBUTION = "amd-aiter"
CODE_FOLDER = "aiter_meta/hsa/gfx950"
MOE_FOLDER = "fmoe/silu"
MOE_TABLE = "fmoe_bf16_pertokenMXfp4_g1u1_silu.csv"
FIX = "pip install --no-deps -r requirements/aiter.txt"

CUS = 256  # AITER chooses kernels and grids by the number of compute units
THREADS = 256
FIELD_BYTES = 16  # every field of AITER's argument structs is padded to this
SORT_BLOCK = 32  # rows of a block of sorted tokens
TOKEN_BITS = 24  # a sorted entry is pick << 24 | token
LEAST_HIDDEN = 1024  # the kernels read ahead: a smaller hidden size is not served by AITER either

# The struct `KernelArgs` of asm_fmoe.cu in its order, in the names of the code object's metadata; "P" an address, "I"
# uint32.
MOE_ARGUMENTS = (
    ("O", "P"), ("X", "P"), ("G", "P"), ("U", "P"), ("D", "P"), ("XQ", "P"), ("GQ", "P"), ("DQ", "P"), ("SMQ", "P"),
    ("STP", "P"), ("SW", "P"), ("SEP", "P"), ("dim", "I"), ("hdim", "I"), ("batch", "I"), ("eprt", "I"), ("Xs", "I"),
    ("GUs", "I"), ("Ds", "I"), ("Os", "I"), ("eGUs", "I"), ("eDs", "I"), ("eGUQs", "I"), ("eDQs", "I"),
    ("eSMQs", "I"), ("topk", "I"), ("total_tgs", "I"), ("ps_deno", "I"),
)  # fmt: skip

ran: Counter[str] = Counter()
"""Launches of this process, by code object."""


def unavailable() -> str | None:
    """Why the kernels cannot run here, with the fix, in one line; None where they can."""
    try:
        folder()
        find_objdump()
    except SimError as error:
        return str(error)
    return None


def folder() -> Path:
    """Where the installed wheel keeps its gfx950 code objects. Raises SimError, with the fix, without the wheel."""
    try:
        found = Path(str(importlib.metadata.distribution(DISTRIBUTION).locate_file(CODE_FOLDER)))
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is None or not (found / MOE_FOLDER / MOE_TABLE).is_file():
        raise SimError(f"no AITER code objects ({DISTRIBUTION}) are installed: {FIX}")
    return found


def rows(file: str) -> list[dict[str, str]]:
    """A configuration table of the wheel."""
    with open(folder() / file, newline="") as table:
        return list(csv.DictReader(table))


@functools.cache
def code_object(file: str) -> CodeObject:
    """A code object of the wheel. Raises SimError without a disassembler."""
    return CodeObject.load(folder() / file)


def pack(code: CodeObject, fields: Sequence[tuple[str, str]], values: dict[str, int | float]) -> bytes:
    """The argument block of a struct of AITER's; names, places and sizes are checked against the code object's own."""
    own = {arg.name: (arg.offset, arg.size) for arg in code.args if arg.name != "pad"}
    block = bytearray(FIELD_BYTES * len(fields))
    for k, (name, kind) in enumerate(fields):
        form = {"P": "<Q", "I": "<I", "f": "<f"}[kind]
        if own.pop(name, (FIELD_BYTES * k, struct.calcsize(form))) != (FIELD_BYTES * k, struct.calcsize(form)):
            raise SimError(f"{code.name}: its argument {name!r} is elsewhere than in AITER's struct")
        struct.pack_into(form, block, FIELD_BYTES * k, values.get(name, 0))
    if own:
        raise SimError(f"{code.name}: its arguments {sorted(own)} are not in AITER's struct")
    return bytes(block[: code.kernarg_size])


def run(code: CodeObject, grid: tuple[int, int, int], kernargs: bytes, tensors: dict[str, Tensor],
        memory: str = "consistent", seed: int = 0) -> None:  # fmt: skip
    """One launch on a machine of its own that maps the tensors."""
    machine = Machine(cus=CUS, memory=memory, seed=seed)
    for name, tensor in tensors.items():
        machine.map_tensor(0, tensor, name)
    machine.launch([Launch(rank=0, code=code, grid=grid, block=THREADS, kernargs=kernargs, persistent=False)])


@dataclass(frozen=True)
class Kernel:
    """One code object of the table: intermediate columns of a workgroup, workgroups a CU, whether the grid persists
    (the same sums, from workgroups that take blocks in turn), whether it skips absent rows."""

    file: str
    slice: int
    per_cu: int
    persistent: bool
    skips: bool


@functools.cache
def kernels() -> dict[str, Kernel]:
    """The fused MoE kernels with SiLU and bf16 rows, by file name."""
    table = [
        Kernel(r["knl_file"], int(r["subGU_n"]), int(r["tg_num_perCU"]), r["ps"] == "1", r["vskip"] == "1")
        for r in rows(f"{MOE_FOLDER}/{MOE_TABLE}")
    ]
    return {kernel.file: kernel for kernel in table}


def choose(inter: int, blocks: int) -> Kernel:
    """AITER's choice for that intermediate width and number of token blocks, of the kernels with a plain grid.

    Fewest rounds of the CUs, then fewest idle ones. Raises SimError where none divides the width.
    """
    fitting = [k for k in kernels().values() if k.skips and not k.persistent and inter % k.slice == 0]
    if not fitting:
        widths = sorted({k.slice for k in kernels().values()})
        raise SimError(
            f"no fused MoE kernel for an intermediate width of {inter}: it must be a multiple of one of {widths}"
        )

    def cost(kernel: Kernel) -> tuple[int, int]:
        groups = inter // kernel.slice * blocks
        rounds = -(-groups // CUS)
        return rounds, rounds * CUS - groups

    return min(fitting, key=cost)


def sort_tokens(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """AITER's moe_sorting of ids int64 [S, k] and weights [S, k]; an id outside 0..experts-1 joins none.

    Expert by expert, its (token, pick) pairs in token order, padded to blocks of 32 with pick k of token S. Returns
    entries int32 (pick << 24 | token), weights f32, the expert of each block int32, and [entries used, S] int32.
    """
    tokens, picks = ids.shape
    room = ids.numel() + experts * SORT_BLOCK - picks
    entries = torch.full((room,), picks << TOKEN_BITS | tokens, dtype=torch.int32)
    sorted_weights = torch.zeros(room)
    block_expert = torch.zeros(-(-room // SORT_BLOCK), dtype=torch.int32)
    at = 0
    for expert in range(experts):
        token, pick = torch.where(ids == expert)
        count = len(token)
        entries[at : at + count] = (pick << TOKEN_BITS | token).int()
        sorted_weights[at : at + count] = weights[token, pick].float()
        blocks = -(-count // SORT_BLOCK)
        block_expert[at // SORT_BLOCK : at // SORT_BLOCK + blocks] = expert
        at += blocks * SORT_BLOCK
    return entries, sorted_weights, block_expert, torch.tensor([at, tokens], dtype=torch.int32)


def sort_scales(codes: Tensor, entries: Tensor) -> Tensor:
    """AITER's moe_mxfp4_sort: the token's codes of every sorted entry, shuffled; pad entries get 0."""
    whole = torch.zeros(-(-len(entries) // SORT_BLOCK) * SORT_BLOCK, codes.shape[1], dtype=torch.uint8)
    token = (entries & ((1 << TOKEN_BITS) - 1)).long()
    live = token < len(codes)
    whole[: len(entries)][live] = codes[token[live]]
    return layout.shuffle_scale(whole)


def code_half_up(amax: Tensor) -> Tensor:
    """The e8m0 code (int32) of a block by the wheel of November 2025: the exponent of amax / 4, one more where its
    fraction is at least one half. It is one above RCEIL (`layout.scale_code`) where amax is 1.5 times a power of two.
    """
    bits = amax.float().contiguous().view(torch.int32)
    return (bits + 0x400000 >> 23) - 2


def launch(kernel: Kernel, x: Tensor, x_codes: Tensor, w1: Tensor, w1_codes: Tensor, w2: Tensor, w2_codes: Tensor,
           ids: Tensor, weights: Tensor, memory: str = "consistent", seed: int = 0) -> Tensor:  # fmt: skip
    """bf16 [S, H] by one kernel, of packed x uint8 [S, H/2] with codes uint8 [S, H/32], and experts that are shuffled
    as SGLang leaves them: w1 uint8 [E, 2I, H/2] (gate rows, then up rows), w2 uint8 [E, H, I/2], their codes."""
    experts, hidden, inter = w2.shape[0], w2.shape[1], 2 * w2.shape[2]
    code = code_object(f"{MOE_FOLDER}/{kernel.file}")
    entries, sorted_weights, block_expert, used = sort_tokens(ids, weights, experts)
    out = torch.zeros(len(x), hidden, dtype=torch.bfloat16)
    tensors = {
        "O": out, "X": x.contiguous(), "G": w1, "U": used, "D": w2, "XQ": sort_scales(x_codes, entries),
        "GQ": w1_codes, "DQ": w2_codes, "STP": entries, "SW": sorted_weights, "SEP": block_expert,
    }  # fmt: skip
    slices = inter // kernel.slice
    groups = CUS * kernel.per_cu if kernel.persistent else 0
    values: dict[str, int | float] = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    values |= {
        "dim": hidden, "hdim": inter, "batch": len(x), "eprt": experts, "Xs": hidden // 2, "GUs": hidden // 2,
        "Ds": inter // 2, "Os": 2 * hidden, "eGUs": hidden * inter, "eDs": inter // 2 * hidden,
        "eGUQs": 2 * inter * hidden // 32, "eDQs": hidden * inter // 32, "eSMQs": 4 * inter, "topk": ids.shape[1],
        "ps_deno": slices, "total_tgs": groups // slices * slices,
    }  # fmt: skip
    grid = (groups, 1, 1) if kernel.persistent else (slices, len(block_expert), 1)
    run(code, grid, pack(code, MOE_ARGUMENTS, values), tensors, memory, seed)
    ran[kernel.file] += 1
    return out


def fused_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weight: Tensor,
    topk_ids: Tensor,
    *,
    w1_scale: Tensor,
    w2_scale: Tensor,
    code: Callable[[Tensor], Tensor] = layout.scale_code,
    seed: int = 0,
) -> Tensor:
    """AITER's one-stage MXFP4 `fused_moe` with SiLU: bf16 [S, H] of bf16 `hidden_states` [S, H].

    w1 uint8 [E, 2I, H/2] and w2 uint8 [E, H, I/2], shuffled (16, 16), gate rows before up rows; scales e8m0, shuffled,
    of any shape; topk_weight, topk_ids [S, k]. I must be a multiple of 256, H at least 1024. The rows are quantised by
    `code`: RCEIL, as AITER does since 2026; `code_half_up` is the rule of the wheel of November 2025. `seed`: of the
    simulator's schedule, which orders the additions. Raises SimError where the kernels cannot run (`unavailable`) or
    the sizes do not fit.
    """
    hidden, inter = w2.shape[1], 2 * w2.shape[2]
    if hidden < LEAST_HIDDEN or hidden % 512:
        raise SimError(f"hidden size {hidden}: the fused MoE kernels need a multiple of 512, at least {LEAST_HIDDEN}")
    tensors = [t.view(torch.uint8).contiguous() for t in (w1, w1_scale, w2, w2_scale)]
    blocks = -(-(topk_ids.numel() + w2.shape[0] * SORT_BLOCK - topk_ids.shape[1]) // SORT_BLOCK)
    quantised = layout.quantize_mxfp4(hidden_states, code)
    return launch(choose(inter, blocks), *quantised, *tensors, topk_ids.long(), topk_weight, seed=seed)
