# SPDX-License-Identifier: Apache-2.0
"""K1's emitted instructions: registers, LDS, scopes of mailbox accesses, weights in flight before the first wait."""

from __future__ import annotations

import re

import pytest
from helpers.isa_text import flags_without_drain, leaves_without_fault, unbounded_polls

from sgl_amd_mono.common.build import LDS_MAX, VGPR_MAX, Artifact, build
from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950 import gdn
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey

full = pytest.mark.full
TRUE = Geometry.a95b()
GEOMETRIES = {"a95b": TRUE, "small-tp1": Geometry.small(1), "small-tp2": Geometry.small(2)}
PLAIN, MX = ("bfloat16", "bfloat16"), ("mxfp4", "mxfp4")
MIXED = (("mxfp4", "bfloat16"), ("bfloat16", "mxfp4"))
SUBSET = {
    ("a95b", 1, False, "float32", PLAIN),
    ("a95b", 8, False, "float32", PLAIN),
    ("a95b", 8, True, "float32", PLAIN),
    ("small-tp2", 4, False, "float32", PLAIN),
    ("a95b", 1, False, "float32", MX),
    ("a95b", 8, False, "float32", MIXED[0]),
    ("a95b", 8, False, "float32", MIXED[1]),
}
KEYS = [
    pytest.param(*row, marks=() if row in SUBSET else full, id="-".join(map(str, (*row[:-1], *row[-1]))))
    for row in (
        (name, width, first, dtype, formats)
        for name in GEOMETRIES
        for width in range(1, 9)
        for first in (False, True)
        for dtype in ("float32", "bfloat16")
        for formats in (PLAIN, *([MX, *MIXED] if dtype == "float32" or width == 8 else []))
    )
]


def instructions(artifact: Artifact) -> list[str]:
    """Instruction lines of the kernel in order, without comments."""
    body = artifact.isa.split(".amdgpu_metadata")[0]
    lines = (re.split(r";|//", line)[0].strip() for line in body.splitlines())
    return [line for line in lines if re.match(r"[vsdbg][a-z]*_|flat_|scratch_", line)]


def count(lines: list[str], pattern: str) -> int:
    return sum(bool(re.search(pattern, line)) for line in lines)


def scope(line: str) -> str:
    """Scope bits of a memory instruction."""
    return " ".join(re.findall(r"\bsc[01]\b", line))


@pytest.mark.parametrize(("name", "width", "first", "dtype", "formats"), KEYS)
def test_resources_and_scopes(name: str, width: int, first: bool, dtype: str, formats: tuple[str, str]) -> None:
    g = GEOMETRIES[name]
    qkvz, ba = formats
    key = GdnKey(g, width, first_layer=first, state_dtype=dtype, stop=False, qkvz_format=qkvz, ba_format=ba)
    artifact = build(key)
    found, lines = artifact.resources, instructions(artifact)
    assert found.vgprs <= VGPR_MAX and found.agprs == 0
    assert found.vgpr_spills == 0 and found.scratch_bytes == 0
    assert found.lds_bytes == sum(-(-n // 16) * 16 for n in gdn.lds_layout(key).values()) <= LDS_MAX
    assert count(lines, r"^(scratch_|flat_|buffer_inv|buffer_wbl2)") == 0
    assert count(lines, r"^s_barrier") == 2

    copies = 1 if key.unit_rounds == 1 else 2  # of a unit's first half: a loop body serves all rounds but the first
    owners = max(1, g.heads_per_key * g.units_per_head // 64)
    passes = publish_sites(key)
    puts = [line for line in lines if line.startswith("global_store_dwordx2") and scope(line) == "sc1"]
    assert copies < len(puts) <= passes + copies  # products (the compiler may merge sites), one ONRM pair a unit
    polls = [line for line in lines if line.startswith("global_load_dwordx2") and scope(line) == "sc1"]
    assert len(polls) == copies * 4 + 2 + owners  # "proj", "onrm", "window"
    # Nothing else is written or read at device scope; system scope is for the fault block alone.
    scoped = [line for line in lines if scope(line)]
    assert {scope(line) for line in scoped} == {"sc1", "sc0 sc1"}
    assert sum(scope(line) == "sc1" for line in scoped) == len(puts) + len(polls)
    system = {line.split()[0] for line in scoped if scope(line) == "sc0 sc1"}
    assert system <= {"global_load_dword", "global_store_dword", "global_store_dwordx2", "global_atomic_cmpswap"}

    assert not unbounded_polls(artifact.isa) and not flags_without_drain(artifact.isa)

    weights = [n for n, line in enumerate(lines) if re.search(r"\bnt\b", line)]
    tiles = g.whole_tasks * loads(g, qkvz, 1) + loads(g, ba, g.ba_slices)
    tiles += loads(g, qkvz, g.leftover_slices) if g.leftover_groups else 0
    assert len(weights) == tiles
    scaled = count(lines, r"^v_mfma_scale_f32_16x16x128_f8f6f4")
    assert bool(scaled) == ("mxfp4" in formats)
    first_barrier = next(n for n, line in enumerate(lines) if line.startswith("s_barrier"))
    early = sum(n < first_barrier for n in weights)
    assert early >= tiles * (0.4 if width > 2 else 0.7), f"{early} of {tiles} weight tiles before a wait"
    first_product = next(n for n, line in enumerate(lines) if line.startswith("v_mfma"))
    assert all(n < first_product for n in weights)


def loads(g: Geometry, form: str, slices: int) -> int:
    """Loads of a wave's columns of 16 rows, cut in slices: tiles, and in MXFP4 the codes, 16 bytes a lane at most."""
    if form == "bfloat16":
        return g.wave_steps // slices
    tiles = max(1, g.wave_columns // slices // 128)
    return tiles + max(1, tiles // 4)


def publish_sites(key: GdnKey) -> int:
    """Places in the code that put products: chunks of 64 of each task are dealt to 8 waves a pass, and a pass has a
    place for each kind (ba, whole, left over)."""
    g = key.geometry
    chunks = -(-key.width * 16 // 64) * gdn.in_proj_tasks(g)
    return -(-chunks // g.waves) * (3 if g.leftover_groups else 2)


def test_stop_builds_fault_wherever_they_leave() -> None:
    """The server's build ends by a store to address 0; the tests' build does not."""
    # A block that holds nothing but s_endpgm is the kernel's normal end, reached by branches.
    stops, returns = (
        [tail for tail in leaves_without_fault(build(GdnKey(Geometry.small(1), 1, stop=stop)).isa) if len(tail) > 1]
        for stop in (True, False)
    )
    assert not stops
    assert returns


@pytest.mark.parametrize("formats", [PLAIN, MX, *MIXED])
@pytest.mark.parametrize("width", range(1, 9))
def test_lds_of_the_true_size(width: int, formats: tuple[str, str]) -> None:
    """The layout fits at every width, without a build."""
    key = GdnKey(TRUE, width, qkvz_format=formats[0], ba_format=formats[1])
    assert sum(gdn.lds_layout(key).values()) <= LDS_MAX


def test_abi_has_no_gap_and_no_twin() -> None:
    names = [name for name, _ in gdn.ABI]
    assert len(set(names)) == len(names)
    assert {kind for _, kind in gdn.ABI} == {"ptr", "i64", "i32"}
