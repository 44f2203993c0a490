# SPDX-License-Identifier: Apache-2.0
"""Speed of the simulator on one core: wave-instructions a second, and GFLOP/s of the matrix instructions.

    python benchmarks/sim_speed.py [--seconds S] [--check] [--json]

Each row runs a loop of one kind of instruction for about S seconds of processor time (the simulator has one thread;
other load on the machine does not count) and prints the best of three runs. With --check the exit status says whether
the gates are met: 50 million wave-instructions a second for integer and float work with EXEC full, 30 with EXEC
partly off, 20 GFLOP/s for scaled fp4 MFMA.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from sgl_amd_mono.sim import CodeObject, Launch, Machine

REPEATS = 3
UNROLL = 64  # instructions of the kind in one pass of the loop
FLOP_16X16X128, FLOP_16X16X32 = 2 * 16 * 16 * 128, 2 * 16 * 16 * 32
FLOP_32X32X64 = 2 * 32 * 32 * 64
SCALES = "v30, v31 op_sel_hi:[0,0,0]"

INTEGER = (
    "v_add_u32_e32 v10, v11, v12", "v_xor_b32_e32 v11, v10, v13", "v_lshl_add_u32 v12, v10, 3, v11",
    "v_and_b32_e32 v13, v12, v14",
    "v_mul_lo_u32 v14, v13, v10", "v_lshrrev_b32_e32 v15, 5, v14", "v_add3_u32 v16, v15, v14, v13",
    "v_max_i32_e32 v17, v16, v10",
)  # fmt: skip
FLOAT = (
    "v_add_f32_e32 v10, v11, v12", "v_mul_f32_e32 v11, v10, v13", "v_fma_f32 v12, v10, v11, v13",
    "v_fmac_f32_e32 v13, v10, v14",
    "v_max_f32_e32 v14, v13, v10", "v_sub_f32_e32 v15, v14, v11", "v_pk_mul_f32 v[16:17], v[10:11], v[12:13]",
    "v_cvt_pk_bf16_f32 v18, v10, v11",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: what is executed, and the gate (None: information only)."""

    name: str
    lines: Sequence[str]
    unit: str  # "Minstr/s" or "GFLOP/s"
    gate: float | None
    flop: int = 0
    exec_mask: int = 2**64 - 1


ROWS = (
    Row("integer VALU, EXEC full", INTEGER, "Minstr/s", 50),
    Row("float VALU, EXEC full", FLOAT, "Minstr/s", 50),
    Row("integer VALU, EXEC partly off", INTEGER, "Minstr/s", 30, exec_mask=0x00FF_F0F0_3333_5555),
    Row("float VALU, EXEC partly off", FLOAT, "Minstr/s", 30, exec_mask=0x00FF_F0F0_3333_5555),
    Row(
        "scaled fp4 MFMA 16x16x128",
        (f"v_mfma_scale_f32_16x16x128_f8f6f4 v[40:43], v[20:23], v[24:27], v[40:43], {SCALES} cbsz:4 blgp:4",),
        "GFLOP/s", 20, FLOP_16X16X128,
    ),
    Row(
        "scaled fp4 MFMA 32x32x64",
        (f"v_mfma_scale_f32_32x32x64_f8f6f4 v[40:55], v[20:23], v[24:27], v[40:55], {SCALES} cbsz:4 blgp:4",),
        "GFLOP/s", 20, FLOP_32X32X64,
    ),
    Row("scaled fp8 MFMA 16x16x128",
        ("v_mfma_scale_f32_16x16x128_f8f6f4 v[40:43], v[60:67], v[68:75], v[40:43], v30, v31 op_sel_hi:[0,0,0]",),
        "GFLOP/s", None, FLOP_16X16X128),
    Row("bf16 MFMA 16x16x32",
        ("v_mfma_f32_16x16x32_bf16 v[40:43], v[60:63], v[64:67], v[40:43]",), "GFLOP/s", None, FLOP_16X16X32),
)  # fmt: skip

_TEXT = """\t.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
\t.text
\t.globl\tspeed
\t.p2align\t8
\t.type\tspeed,@function
speed:
\ts_load_dword s6, s[0:1], 0x0
\tv_add_u32_e32 v1, 1, v0
{setup}
\ts_waitcnt lgkmcnt(0)
\ts_mov_b32 exec_lo, {lo:#x}
\ts_mov_b32 exec_hi, {hi:#x}
.Lloop:
{body}
\ts_sub_u32 s6, s6, 1
\ts_cmp_lg_u32 s6, 0
\ts_cbranch_scc1 .Lloop
\ts_endpgm
.Lend:
\t.size\tspeed, .Lend-speed
\t.section\t.rodata,"a",@progbits
\t.p2align\t6, 0x0
\t.amdhsa_kernel speed
\t\t.amdhsa_kernarg_size 8
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t\t.amdhsa_next_free_vgpr 80
\t\t.amdhsa_next_free_sgpr 16
\t\t.amdhsa_accum_offset 80
\t\t.amdhsa_float_denorm_mode_32 3
\t\t.amdhsa_float_denorm_mode_16_64 3
\t.end_amdhsa_kernel
\t.text
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .offset:         0
        .size:           8
        .value_kind:     by_value
    .group_segment_fixed_size: 0
    .kernarg_segment_align: 8
    .kernarg_segment_size: 8
    .max_flat_workgroup_size: 512
    .name:           speed
    .private_segment_fixed_size: 0
    .sgpr_count:     22
    .sgpr_spill_count: 0
    .symbol:         speed.kd
    .vgpr_count:     80
    .vgpr_spill_count: 0
    .wavefront_size: 64
amdhsa.target:   amdgcn-amd-amdhsa--gfx950
amdhsa.version:
  - 1
  - 2
...
\t.end_amdgpu_metadata
"""


def kernel(row: Row) -> CodeObject:
    """A loop over the row's lines, repeated to UNROLL; float registers start at 1, so that nothing is denormal."""
    one = "0x3f800000" if row.unit == "GFLOP/s" or row.lines is FLOAT else "0x12345"
    setup = [f"\tv_mov_b32_e32 v{k}, {one}" for k in range(10, 76)]
    setup += ["\tv_mov_b32_e32 v30, 0x7f7f7f7f", "\tv_mov_b32_e32 v31, 0x7f7f7f7f"]
    body = [f"\t{line}" for line in row.lines] * (UNROLL // len(row.lines))
    text = _TEXT.format(
        setup="\n".join(setup), body="\n".join(body), lo=row.exec_mask & 0xFFFFFFFF, hi=row.exec_mask >> 32
    )
    return CodeObject.parse(text)


def measure(row: Row, seconds: float) -> tuple[float, int]:
    """(best value in the row's unit, wave-instructions of one run)."""
    code = kernel(row)
    workgroups, waves = 4, 8
    passes, best, executed = 50, 0.0, 0
    for attempt in range(REPEATS + 2):  # the first two find how many passes fill the time
        machine = Machine(ranks=1)
        kernargs = np.array([passes, 0], dtype=np.uint32).tobytes()
        start = time.process_time()
        report = machine.launch([Launch(rank=0, code=code, grid=workgroups, block=64 * waves, kernargs=kernargs)])
        elapsed = time.process_time() - start
        executed = report.wave_instructions
        if attempt < 2:
            passes = max(1, int(passes * seconds / elapsed))
            continue
        kind = passes * UNROLL * workgroups * waves  # instructions of the row's kind
        rate = kind * row.flop / elapsed * 1e-9 if row.flop else executed / elapsed * 1e-6
        best = max(best, rate)
    return best, executed


def cpu_model() -> str:
    """Name of the processor, as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one run of a row (default 1)")
    parser.add_argument("--check", action="store_true", help="exit 1 where a gate is missed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core
    results = []
    for row in ROWS:
        value, executed = measure(row, options.seconds)
        results.append(
            {"row": row.name, "value": value, "unit": row.unit, "gate": row.gate, "wave_instructions": executed}
        )
        if not options.json:
            gate = "" if row.gate is None else f"  (gate {row.gate:g}: {'met' if value >= row.gate else 'MISSED'})"
            print(f"{row.name:32} {value:8.1f} {row.unit}{gate}", flush=True)
    missed = [r["row"] for r in results if r["gate"] is not None and r["value"] < r["gate"]]
    if options.json:
        print(json.dumps({"cpu": cpu_model(), "cores_used": 1, "rows": results, "missed": missed}, indent=1))
    else:
        print(f"on one core of {cpu_model()}")
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
