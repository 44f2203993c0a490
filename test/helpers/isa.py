# SPDX-License-Identifier: Apache-2.0
"""Runs a few lines of gfx950 assembly on the simulator and returns the registers: the harness of the instruction tests.

A test gives the initial registers (``v``: one value a lane, ``s``: one value a wave) and its lines; the kernel that
is made of them loads the inputs, sets SCC, VCC and EXEC, runs the lines, and stores the outputs. Lanes beyond 64 run
in further workgroups. The text is also put through LLVM's assembler, so that a mnemonic or a modifier that does not
exist cannot be tested. Tests may use v0 to v199, a0 to a31 and s0 to s79.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from sgl_amd_mono.sim import CodeObject, Launch, Machine

LANES = 64
ALL_LANES = 2**LANES - 1
FIRST_AGPR = 256  # the accumulation offset of the harness kernel: a0 is vector row 256

V_ADDRESS, V_VALUE = 200, 201  # the harness's own vector registers
S_BASE, S_TEMP, S_EXEC, S_SCC, S_VCC, S_GROUP = 82, 84, 86, 88, 90, 81
S_FREE = 92  # s92 on: copies of what the lines left in EXEC and VCC

# Source registers of the prologue (user SGPRs): s[0:1] kernel arguments, s2 workgroup number.
_HEADER = """\t.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
\t.amdhsa_code_object_version 6
\t.text
\t.globl\tisa_test
\t.p2align\t8
\t.type\tisa_test,@function
isa_test:
"""
_FOOTER = """\ts_endpgm
.Lend:
\t.size\tisa_test, .Lend-isa_test
\t.section\t.rodata,"a",@progbits
\t.p2align\t6, 0x0
\t.amdhsa_kernel isa_test
\t\t.amdhsa_group_segment_fixed_size {lds}
\t\t.amdhsa_private_segment_fixed_size 0
\t\t.amdhsa_kernarg_size 8
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t\t.amdhsa_system_vgpr_workitem_id 0
\t\t.amdhsa_next_free_vgpr 320
\t\t.amdhsa_next_free_sgpr 102
\t\t.amdhsa_accum_offset 256
\t\t.amdhsa_reserve_vcc 1
\t\t.amdhsa_float_round_mode_32 0
\t\t.amdhsa_float_round_mode_16_64 0
\t\t.amdhsa_float_denorm_mode_32 {denormals}
\t\t.amdhsa_float_denorm_mode_16_64 3
\t\t.amdhsa_dx10_clamp 1
\t\t.amdhsa_ieee_mode 1
\t.end_amdhsa_kernel
\t.text
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     64
    .args:
      - .offset:         0
        .size:           8
        .value_kind:     by_value
    .group_segment_fixed_size: {lds}
    .kernarg_segment_align: 8
    .kernarg_segment_size: 8
    .max_flat_workgroup_size: 64
    .name:           isa_test
    .private_segment_fixed_size: {scratch}
    .sgpr_count:     108
    .sgpr_spill_count: 0
    .symbol:         isa_test.kd
    .uses_dynamic_stack: false
    .vgpr_count:     320
    .vgpr_spill_count: 0
    .wavefront_size: 64
amdhsa.target:   amdgcn-amd-amdhsa--gfx950
amdhsa.version:
  - 1
  - 2
...
\t.end_amdgpu_metadata
"""

_executed: set[str] = set()  # mnemonics of the lines that ran since the last reset (see covers)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Registers after the lines: ``v[name]`` of shape (lanes,), ``s[name]`` and the special ones of shape (waves,)."""

    v: dict[str, np.ndarray]
    s: dict[str, np.ndarray]
    scc: np.ndarray
    exec: np.ndarray
    vcc: np.ndarray


def base_mnemonic(line: str) -> str:
    """The mnemonic of a line without its encoding suffix, as the simulator's table spells it."""
    name = line.split()[0]
    for suffix in ("_e32", "_e64", "_dpp", "_sdwa"):
        name = name.removesuffix(suffix)
    return name


@functools.cache
def assembles(text: str) -> bool:
    """Whether LLVM's assembler (the copy in Triton) takes the text for gfx950; without Triton the check is left out."""
    try:
        from triton._C.libtriton import amd, llvm
    except ImportError:
        return True
    llvm.init_targets()
    try:
        return len(amd.assemble_amdgcn(text, "gfx950", "")) > 0
    except RuntimeError:
        return False


def registers(prefix: str, first: int, count: int) -> str:
    """The text of `count` consecutive registers."""
    return f"{prefix}{first}" if count == 1 else f"{prefix}[{first}:{first + count - 1}]"


def kernel_text(body: Sequence[str], lds_bytes: int = 0, flush_denormals: bool = False, scratch_bytes: int = 0) -> str:
    """The text of a whole kernel around some lines."""
    lines = "".join(line + "\n" if line.endswith(":") else f"\t{line}\n" for line in body)
    values = {
        "lds": lds_bytes,
        "denormals": 0 if flush_denormals else 3,
        "scratch": scratch_bytes,
        "private": int(scratch_bytes > 0),
    }
    return _HEADER + lines + _FOOTER.format(**values)


def link(text: str, folder: Path) -> bytes:
    """The ELF code object of an assembly text, by LLVM's assembler and linker (the copies in Triton). folder: for
    its files."""
    from triton._C.libtriton import amd, llvm

    llvm.init_targets()
    source, target = folder / "kernel.o", folder / "kernel.co"
    source.write_bytes(amd.assemble_amdgcn(text, "gfx950", ""))
    amd.link_hsaco(str(source), str(target))
    return target.read_bytes()


def run(
    lines: str | Sequence[str],
    v: Mapping[int | str, object] | None = None,
    s: Mapping[int, object] | None = None,
    out_v: Iterable[int | str] = (),
    out_s: Iterable[int] = (),
    exec_mask: object = ALL_LANES,
    vcc: object = 0,
    scc: object = 0,
    lds_bytes: int = 0,
    scratch_bytes: int = 0,
    flush_denormals: bool = False,
    map_more: Callable[[Machine], None] | None = None,
) -> Outcome:
    """Run `lines` once a wave.

    Args:
        lines: the assembly lines under test.
        v: register (number, or name such as "a3") -> uint32 a lane, scalar or array of lanes (a multiple of 64).
        s: register -> uint32 a wave, scalar or array of waves.
        out_v, out_s: registers to return.
        exec_mask, vcc, scc: initial EXEC and VCC (64 bits) and SCC, scalar or array of waves.
        lds_bytes: size of the LDS.
        scratch_bytes: private memory of a lane.
        flush_denormals: the wave's mode flushes f32 denormals.
        map_more: called with the machine before the launch (further allocations).
    """
    lines = [line.strip() for line in (lines.splitlines() if isinstance(lines, str) else lines) if line.strip()]
    v = {_name(k): np.atleast_1d(np.asarray(x, dtype=np.uint32)) for k, x in (v or {}).items()}
    scalars = {k: np.atleast_1d(np.asarray(x, dtype=np.uint32)) for k, x in (s or {}).items()}
    masks = {
        k: np.atleast_1d(np.asarray(x, dtype=np.uint64)) for k, x in (("exec", exec_mask), ("vcc", vcc), ("scc", scc))
    }
    out_v, out_s = [_name(k) for k in out_v], list(out_s)
    waves = max(
        [-(-len(x) // LANES) for x in v.values()] + [len(x) for x in (*scalars.values(), *masks.values())] + [1],
    )
    lanes = waves * LANES

    # One block of memory: a row of `lanes` words for each vector register (inputs, then outputs), then a row a wave
    # of scalars.
    rows = list(v) + out_v
    row_bytes = lanes * 4
    scalar_inputs = [*scalars, "exec_lo", "exec_hi", "vcc_lo", "vcc_hi", "scc"]
    scalar_outputs = [*out_s, "exec_lo", "exec_hi", "vcc_lo", "vcc_hi", "scc"]
    scalar_row = 4 * (len(scalar_inputs) + len(scalar_outputs))
    scalar_base = row_bytes * len(rows)
    memory = np.zeros((scalar_base + scalar_row * waves) // 4, dtype=np.uint32)
    for i, x in enumerate(v.values()):
        memory[i * lanes : (i + 1) * lanes] = np.broadcast_to(x, lanes) if len(x) == 1 else x
    table = memory[scalar_base // 4 :].reshape(waves, scalar_row // 4)
    for i, x in enumerate(scalars.values()):
        table[:, i] = x
    n = len(scalars)
    for i, name in enumerate(("exec", "vcc")):
        table[:, n + 2 * i] = (masks[name] & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        table[:, n + 2 * i + 1] = (masks[name] >> np.uint64(32)).astype(np.uint32)
    table[:, n + 4] = masks["scc"].astype(np.uint32)

    body = [
        f"s_mov_b32 s{S_GROUP}, s2",
        f"s_load_dwordx2 s[{S_BASE}:{S_BASE + 1}], s[0:1], 0x0",
        f"v_lshl_or_b32 v{V_ADDRESS}, s{S_GROUP}, 6, v0",
        f"v_lshlrev_b32_e32 v{V_ADDRESS}, 2, v{V_ADDRESS}",
        "s_waitcnt lgkmcnt(0)",
    ]
    for i, name in enumerate(v):
        body += [
            f"s_add_u32 s{S_TEMP}, s{S_BASE}, {i * row_bytes}",
            f"s_addc_u32 s{S_TEMP + 1}, s{S_BASE + 1}, 0",
            f"global_load_dword v{V_VALUE}, v{V_ADDRESS}, s[{S_TEMP}:{S_TEMP + 1}]",
            "s_waitcnt vmcnt(0)",
            f"v_accvgpr_write_b32 {name}, v{V_VALUE}" if name[0] == "a" else f"v_mov_b32_e32 {name}, v{V_VALUE}",
        ]
    body += [
        f"s_mul_i32 s{S_TEMP}, s{S_GROUP}, {scalar_row}",
        f"s_add_u32 s{S_TEMP}, s{S_TEMP}, {scalar_base}",
        f"s_add_u32 s{S_TEMP}, s{S_TEMP}, s{S_BASE}",
        f"s_addc_u32 s{S_TEMP + 1}, s{S_BASE + 1}, 0",
    ]
    special = [f"s{S_EXEC}", f"s{S_EXEC + 1}", f"s{S_VCC}", f"s{S_VCC + 1}", f"s{S_SCC}"]
    for i, register in enumerate([f"s{k}" for k in scalars] + special):
        body.append(f"s_load_dword {register}, s[{S_TEMP}:{S_TEMP + 1}], {4 * i:#x}")
    body += [
        "s_waitcnt lgkmcnt(0)",
        f"s_mov_b64 vcc, s[{S_VCC}:{S_VCC + 1}]",
        f"s_cmp_lg_u32 s{S_SCC}, 0",
        f"s_mov_b64 exec, s[{S_EXEC}:{S_EXEC + 1}]",
        *lines,
        f"s_cselect_b32 s{S_SCC}, 1, 0",
        "s_waitcnt vmcnt(0) lgkmcnt(0)",
        f"s_mov_b64 s[{S_FREE}:{S_FREE + 1}], exec",
        f"s_mov_b64 s[{S_FREE + 2}:{S_FREE + 3}], vcc",
        "s_mov_b64 exec, -1",
    ]
    for i, name in enumerate(out_v):
        body += [
            f"s_add_u32 s{S_TEMP}, s{S_BASE}, {(len(v) + i) * row_bytes}",
            f"s_addc_u32 s{S_TEMP + 1}, s{S_BASE + 1}, 0",
            f"v_accvgpr_read_b32 v{V_VALUE}, {name}" if name[0] == "a" else f"v_mov_b32_e32 v{V_VALUE}, {name}",
            f"global_store_dword v{V_ADDRESS}, v{V_VALUE}, s[{S_TEMP}:{S_TEMP + 1}]",
        ]
    body += [
        f"s_mul_i32 s{S_TEMP}, s{S_GROUP}, {scalar_row}",
        f"s_add_u32 s{S_TEMP}, s{S_TEMP}, {scalar_base + 4 * len(scalar_inputs)}",
        f"s_add_u32 s{S_TEMP}, s{S_TEMP}, s{S_BASE}",
        f"s_addc_u32 s{S_TEMP + 1}, s{S_BASE + 1}, 0",
        "s_mov_b64 exec, 1",
        f"v_mov_b32_e32 v{V_ADDRESS}, 0",
    ]
    special = [f"s{S_FREE + i}" for i in range(4)] + [f"s{S_SCC}"]
    for i, register in enumerate([f"s{k}" for k in out_s] + special):
        body += [
            f"v_mov_b32_e32 v{V_VALUE}, {register}",
            f"global_store_dword v{V_ADDRESS}, v{V_VALUE}, s[{S_TEMP}:{S_TEMP + 1}] offset:{4 * i}",
        ]
    text = kernel_text(body, lds_bytes, flush_denormals, scratch_bytes)
    assert assembles(text), "LLVM refuses the lines:\n" + "\n".join(lines)
    _executed.update(base_mnemonic(line) for line in lines if not line.endswith(":"))

    machine = Machine(ranks=1)
    machine.map_tensor(0, memory, "registers")
    if map_more:
        map_more(machine)
    code = _parsed(text)
    kernargs = int(memory.ctypes.data).to_bytes(8, "little")
    machine.launch([Launch(rank=0, code=code, grid=waves, block=LANES, kernargs=kernargs, persistent=False)])

    outputs = table[:, len(scalar_inputs) :]
    n = len(out_s)

    def pair(column: int) -> np.ndarray:
        return outputs[:, column].astype(np.uint64) | outputs[:, column + 1].astype(np.uint64) << np.uint64(32)

    return Outcome(
        v={name: memory[(len(v) + i) * lanes : (len(v) + i + 1) * lanes].copy() for i, name in enumerate(out_v)},
        s={f"s{k}": outputs[:, i].copy() for i, k in enumerate(out_s)},
        exec=pair(n),
        vcc=pair(n + 2),
        scc=outputs[:, n + 4].copy(),
    )


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> CodeObject:
    return CodeObject.parse(text)


def _name(register: int | str) -> str:
    return f"v{register}" if isinstance(register, int) else register


# ---- which instructions have a test --------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., None])


def covers(*mnemonics: str) -> Callable[[F], F]:
    """Mark a test as the exact-value test of some mnemonics; the test fails if it does not execute each of them."""

    def wrap(test: F) -> F:
        @functools.wraps(test)
        def checked(*args: object, **kwargs: object) -> None:
            _executed.clear()
            test(*args, **kwargs)
            missing = [name for name in mnemonics if name not in _executed]
            assert not missing, f"{test.__name__} claims {missing} and does not execute them"

        checked.covered_mnemonics = mnemonics  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return wrap


def executed() -> frozenset[str]:
    """Mnemonics that ran since the current `covers` test began."""
    return frozenset(_executed)


# ---- operand sets --------------------------------------------------------------------------------------------------

INTEGERS = (
    0, 1, 2, 3, 7, 15, 16, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFF, 0x800000,
    0xFFFFFF,
    0x1000000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFF0000, 0x55555555, 0xAAAAAAAA,
    0xDEADBEEF,
)  # fmt: skip
FEW_INTEGERS = (0, 1, 5, 31, 32, 0x8000, 0xFFFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFF8000, 0x12345678)

FLOATS = (
    0x00000000, 0x80000000,  # zeros
    0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF,  # denormals
    0x00800000, 0x80800000,  # smallest normals
    0x3F800000, 0xBF800000, 0x3F800001, 0x3F7FFFFF,  # about 1
    0x3F000000, 0xBF000000, 0x3FC00000, 0x40200000, 0x40490FDB, 0xC0490FDB,  # 0.5, 1.5, 2.5, pi
    0x4B000000, 0x4B000001, 0x4EFFFFFF, 0x4F000000, 0xCF000000, 0x4F7FFFFF, 0x4F800000,  # 2^23, about 2^31 and 2^32
    0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000,  # largest, infinities
    0x7FC00000, 0xFFC12345, 0x7F800001,  # quiet and signalling NaNs
)  # fmt: skip
FEW_FLOATS = (
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000, 0xBF800001, 0x3FC00000, 0x40490FDB,
    0x7F7FFFFF,
    0x7F800000, 0xFF800000, 0x7FC00000, 0x33800000,
)  # fmt: skip

DOUBLES = (
    0x0, 0x8000000000000000, 0x1, 0x800FFFFFFFFFFFFF, 0x0010000000000000, 0x3FF0000000000000, 0xBFF0000000000000,
    0x3FF8000000000000,
    0x4004000000000000, 0x400921FB54442D18, 0x41DFFFFFFFC00000, 0x41E0000000000000, 0xC1E0000000000000,
    0x41F0000000000000,
    0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, 0x3FE0000000000000,
    0x4330000000000001,
    0x47EFFFFFE0000000, 0x36A0000000000000,
)  # fmt: skip

HALVES = (
    0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x3E00, 0x4100, 0x4248, 0x3800, 0x7BFF, 0xFBFF, 0x7C00,
    0xFC00, 0x7E00,
    0x7C01, 0x6400, 0x0BAD, 0xC0DE,
)  # fmt: skip

PARTIAL_EXEC = 0x8000_0001_F0F0_5A5A


def cross(*values: Sequence[int]) -> list[np.ndarray]:
    """Every combination of the values as columns of uint32 (or uint64), padded to whole waves by repeating the first
    ones.
    """
    dtype = np.uint64 if any(x >= 2**32 for column in values for x in column) else np.uint32
    grid = [g.ravel() for g in np.meshgrid(*[np.array(c, dtype=dtype) for c in values], indexing="ij")]
    count = -(-len(grid[0]) // LANES) * LANES
    return [np.resize(g, count) for g in grid]
