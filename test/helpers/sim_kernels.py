# SPDX-License-Identifier: Apache-2.0
"""Small gfx950 kernels in assembly for the tests of the simulated machine.

Every kernel gets s[0:1] = kernel arguments, s2 = workgroup, v0 = thread. The arguments are 64-bit words.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable

import numpy as np

from sgl_amd_mono.sim import CodeObject, Launch, Machine

_TEMPLATE = """\t.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
\t.text
\t.type\t{name},@function
{name}:
{body}
\t.amdhsa_kernel {name}
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t\t.amdhsa_float_denorm_mode_32 3
\t\t.amdhsa_float_denorm_mode_16_64 3
\t.end_amdhsa_kernel
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count: 0
    .args:
{args}
    .group_segment_fixed_size: {lds}
    .kernarg_segment_size: {kernarg}
    .name: {name}
    .private_segment_fixed_size: {scratch}
    .sgpr_count: 64
    .vgpr_count: {vgprs}
...
\t.end_amdgpu_metadata
"""


def kernel_text(
    lines: str, *, name: str = "kernel", args: int = 4, lds: int = 0, vgprs: int = 32, scratch: int = 0
) -> str:
    """The assembly text of a kernel with that many 64-bit arguments."""
    body = "\n".join(
        line if re.match(r"\s*[.\w]+:\s*$", line) else "\t" + line
        for line in (raw.strip() for raw in lines.splitlines())
        if line
    )
    entries = "\n".join(
        f"      - .offset: {8 * k}\n        .size: 8\n        .value_kind: by_value" for k in range(args)
    )
    return _TEMPLATE.format(name=name, body=body, args=entries, lds=lds, kernarg=8 * args, vgprs=vgprs, scratch=scratch)


def kernel(lines: str, **options: object) -> CodeObject:
    """`kernel_text`, parsed."""
    return CodeObject.parse(kernel_text(lines, **options))


def arguments(*values: int, count: int = 4) -> bytes:
    """64-bit kernel arguments, padded with zeros."""
    return struct.pack(f"<{count}Q", *values, *([0] * (count - len(values))))


def address(array: np.ndarray) -> int:
    """Where an array lies: its device address in these tests."""
    return array.ctypes.data


def run(
    code: CodeObject,
    arrays: Iterable[np.ndarray],
    *,
    machine: Machine | None = None,
    grid: int = 1,
    block: int = 64,
    **options: object,
) -> object:
    """Maps the arrays (named a0, a1, ...) unless a machine is given, launches with their addresses, returns the
    report."""
    arrays = list(arrays)
    if machine is None:
        machine = Machine(wall_clock_s=30)
        for k, array in enumerate(arrays):
            machine.map_tensor(0, array, f"a{k}")
    return machine.launch([Launch(0, code, grid, block, arguments(*(address(a) for a in arrays)), **options)])


# One 8-byte (value, tag) pair from each workgroup to the next: s[4:5] = pairs, s[6:7] = results. Thread 0 of workgroup
# g waits for pair g, adds 1 and stores pair g + 1; pair 0 is there at the start. {wait}, {store}, {load} fill in the
# policies under test.
CHAIN = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_cmp_eq_u32_e32 vcc, 0, v0
s_and_saveexec_b64 s[8:9], vcc
s_cbranch_execz .Ldone
s_lshl_b32 s3, s2, 3
v_mov_b32_e32 v1, s3
s_waitcnt lgkmcnt(0)
.Lpoll:
s_sleep 1
global_load_dwordx2 v[2:3], v1, s[4:5] {policy}
s_waitcnt vmcnt(0)
v_cmp_ne_u32_e32 vcc, 7, v3
s_cbranch_vccnz .Lpoll
v_add_u32_e32 v2, 1, v2
global_store_dwordx2 v1, v[2:3], s[4:5] offset:8 {policy}
s_waitcnt vmcnt(0)
v_lshrrev_b32_e32 v4, 1, v1
global_store_dword v4, v2, s[6:7]
.Ldone:
s_endpgm
"""

# Producer and consumer of a bulk row. Workgroup 0 (two waves) stores 128 words to the data, waits, meets at a barrier,
# and wave 0 stores the flag; workgroup 1 polls the flag, meets at a barrier, loads the data and stores it to the
# result. s[4:5] data, s[6:7] flag, s[8:9] result.
MESSAGE = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_load_dwordx2 s[8:9], s[0:1], 0x10
v_lshlrev_b32_e32 v1, 2, v0
v_add_u32_e32 v2, 100, v0
v_mov_b32_e32 v5, 0
v_readfirstlane_b32 s10, v0
s_waitcnt lgkmcnt(0)
s_cmp_lg_u32 s2, 0
s_cbranch_scc1 .Lconsumer
global_store_dword v1, v2, s[4:5] sc1
s_waitcnt vmcnt(0)
s_barrier
s_cmp_lg_u32 s10, 0
s_cbranch_scc1 .Ldone
v_mov_b32_e32 v3, 1
global_store_dword v5, v3, s[6:7] sc1
s_branch .Ldone
.Lconsumer:
s_cmp_lg_u32 s10, 0
s_cbranch_scc1 .Lmeet
.Lpoll:
s_sleep 1
global_load_dword v3, v5, s[6:7] sc1
s_waitcnt vmcnt(0)
v_cmp_ne_u32_e32 vcc, 1, v3
s_cbranch_vccnz .Lpoll
.Lmeet:
s_barrier
buffer_inv sc1
global_load_dword v4, v1, s[4:5]
s_waitcnt vmcnt(0)
global_store_dword v1, v4, s[8:9]
.Ldone:
s_endpgm
"""
