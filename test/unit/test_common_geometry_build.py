# SPDX-License-Identifier: Apache-2.0
"""Geometry base, build keys, ISA metadata and the cache's files: everything of build.py that compiles nothing."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from sgl_amd_mono.common import build as building
from sgl_amd_mono.common.build import Abi, Artifact, BuildError, BuildKey, Resources
from sgl_amd_mono.common.geometry import BaseGeometry, GeometryError, divide, require

RESOURCES = Resources(
    vgprs=256, agprs=0, sgprs=100, vgpr_spills=0, sgpr_spills=3, lds_bytes=160 * 1024, scratch_bytes=0, instructions=9
)


@dataclass(frozen=True)
class Sizes(BaseGeometry):
    hidden: int = 1024
    ranks: int = 2

    def check(self) -> None:
        divide("hidden per rank", self.hidden, self.ranks)
        require(self.hidden >= 128, f"hidden {self.hidden}, needed >= 128")


@dataclass(frozen=True)
class Key(BuildKey):
    geometry: Sizes = Sizes()
    width: int = 1
    dtype: str = "float32"
    stop: bool = False
    model: ClassVar[str] = "toy"
    launch: ClassVar[str] = "front"
    abi: ClassVar[Abi] = (("x", "ptr"), ("n", "i32"), ("ticks", "i64"))

    @property
    def grid(self) -> int:
        return 1

    @property
    def block(self) -> int:
        return 64

    def body(self) -> Callable[..., None]:
        raise AssertionError("this test compiles nothing")


def isa_of(args: str, vgprs: int = 10) -> str:
    return f"""
\ts_load_dword s0, s[0:1], 0x0
\ts_endpgm
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     0
    .args:
{args}
    .group_segment_fixed_size: 64
    .kernarg_segment_size: 24
    .private_segment_fixed_size: 0
    .sgpr_count:     12
    .sgpr_spill_count: 0
    .vgpr_count:     {vgprs}
    .vgpr_spill_count: 0
...
\t.end_amdgpu_metadata
"""


def args_of(*sizes: int, kind: str = "by_value") -> str:
    lines, offset = [], 0
    for size in sizes:
        offset = -(-offset // size) * size
        lines += [
            f"      - .offset:         {offset}",
            f"        .size:           {size}",
            f"        .value_kind:     {kind}",
        ]
        offset += size
    return "\n".join(lines)


def test_geometry_messages_carry_the_sum() -> None:
    assert divide("x", 12, 4) == 3
    with pytest.raises(GeometryError, match=r"hidden per rank: 1025 / 2 = 512 remainder 1"):
        Sizes(hidden=1025)
    with pytest.raises(GeometryError, match="hidden 64, needed >= 128"):
        Sizes(hidden=64)
    with pytest.raises(GeometryError, match="must be positive"):
        divide("x", 3, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sizes().hidden = 3  # type: ignore[misc]


def test_names_and_digests_tell_keys_apart() -> None:
    keys = [Key(), Key(width=2), Key(dtype="bfloat16"), Key(stop=True), Key(geometry=Sizes(hidden=2048))]
    assert len({k.name for k in keys}) == len(keys)
    assert len({k.digest() for k in keys}) == len(keys)
    assert Key().name.startswith("toy_front_s1_dtype_float32_")
    assert "stop" in Key(stop=True).name
    assert all(c.isalnum() or c == "_" for k in keys for c in k.name)
    assert Key().digest() == Key().digest()


def test_a_key_with_an_unstable_field_is_refused() -> None:
    @dataclass(frozen=True)
    class Bad(Key):
        extra: object = object()

    with pytest.raises(BuildError, match="holds <object"):
        Bad().digest()


def test_arguments_are_matched_against_the_metadata() -> None:
    arguments, size = building.checked_arguments("k", Key.abi, isa_of(args_of(8, 4, 8)))
    assert [(a.name, a.offset, a.size) for a in arguments] == [("x", 0, 8), ("n", 8, 4), ("ticks", 16, 8)]
    assert size == 24
    with pytest.raises(BuildError, match="ABI has 3 arguments, the emitted kernel 2"):
        building.checked_arguments("k", Key.abi, isa_of(args_of(8, 4)))
    with pytest.raises(BuildError, match="'n' is i32 in the ABI, 8 bytes"):
        building.checked_arguments("k", Key.abi, isa_of(args_of(8, 8, 8)))
    with pytest.raises(BuildError, match="hidden arguments"):
        building.checked_arguments("k", Key.abi, isa_of(args_of(8, 4, 8, kind="hidden_block_count_x")))
    with pytest.raises(BuildError, match=r"no \.amdgpu_metadata"):
        building.checked_arguments("k", Key.abi, "s_endpgm")


def artifact_of(resources: Resources = RESOURCES) -> Artifact:
    arguments, size = building.checked_arguments("k", Key.abi, isa_of(args_of(8, 4, 8)))
    return Artifact("k", isa_of(args_of(8, 4, 8)), arguments, size, 1, 64, resources, 0.5)


def test_arguments_are_packed_at_their_offsets() -> None:
    block = artifact_of().pack([0x1122334455667788, -2, 6_000_000_000])
    assert block.hex() == "8877665544332211" + "feffffff" + "00000000" + (6_000_000_000).to_bytes(8, "little").hex()
    with pytest.raises(BuildError, match="takes 3 arguments, got 2"):
        artifact_of().pack([1, 2])
    with pytest.raises(BuildError, match="'n' = 4294967296 does not fit 4 bytes"):
        artifact_of().pack([1, 1 << 32, 3])


def test_resources_are_read_and_limits_enforced() -> None:
    found = building.read_resources(isa_of(args_of(8), vgprs=77))
    assert (found.vgprs, found.sgprs, found.lds_bytes, found.instructions) == (77, 12, 64, 2)
    building.refuse_resources(artifact_of())  # at the limits, SGPR spills allowed
    for change, text in (
        ({"vgprs": 257}, "257 VGPRs, needed <= 256"),
        ({"vgpr_spills": 1}, "1 spilled VGPRs"),
        ({"scratch_bytes": 4}, "4 B of scratch"),
        ({"lds_bytes": 160 * 1024 + 4}, "163844 B of LDS, needed <= 163840"),
    ):
        with pytest.raises(BuildError, match=text):
            building.refuse_resources(artifact_of(dataclasses.replace(RESOURCES, **change)))
    table = building.resource_table([artifact_of()])
    assert "VGPR" in table and " 163840 " in table


def test_the_cache_key_covers_every_helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for model_file in ("gdn", "layer"):
        names = {p.name for p in building.source_files(f"sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.{model_file}")}
        assert {"device.py", "sync.py", "_flydsl.py", "build.py", "__init__.py", "geometry.py"} <= names
        assert f"{model_file}.py" in names
        assert not {"spec.py", "state.py", "peer.py"} & names  # what no kernel reaches does not rebuild it
    helper = tmp_path / "helper.py"
    helper.write_text("A = 1\n")
    monkeypatch.setattr(building, "source_files", lambda module: [helper])
    before = building.cache_key(Key())
    assert building.cache_key(Key()) == before
    helper.write_text("A = 2 \n")
    assert building.cache_key(Key()) != before
    here = building.cache_entry(Key(), folder=tmp_path)
    monkeypatch.setattr(building, "installed", lambda: "0.5.7")
    other = building.cache_entry(Key(), folder=tmp_path)
    assert here != other and other.name.endswith("-flydsl0.5.7.json")
    # Without FlyDSL, what was built ahead of time serves, but not a GPU build in place of a simulator's.
    monkeypatch.setattr(building, "installed", lambda: None)
    missing = building.cache_entry(Key(), folder=tmp_path)
    assert not missing.exists()
    building.cache_entry(Key(), folder=tmp_path)
    other.with_name(other.name.replace(".json", "-bin.json")).write_text("{}")
    assert building.cache_entry(Key(), folder=tmp_path) == missing
    other.write_text("{}")
    assert building.cache_entry(Key(), folder=tmp_path) == other


def test_imports_are_followed_wherever_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "made_up_kernels"
    (package / "deep").mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "deep/__init__.py": "from . import beside\n",
        "deep/beside.py": "",
        "unused.py": "",
        "start.py": "def body():\n    from .deep import helper as h\n    import json, made_up_kernels.other\n",
        "deep/helper.py": "if True:\n    from ..sibling import something\n",
        "sibling.py": "something = 1\n",
        "other.py": "from sgl_amd_mono.common import gemv\n",
    }.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    files = building.source_files("made_up_kernels.start")
    assert {str(p.relative_to(package)) for p in files if package in p.parents} == {
        "__init__.py",
        "start.py",
        "deep/__init__.py",
        "deep/beside.py",
        "deep/helper.py",
        "sibling.py",
        "other.py",
    }
    assert "gemv.py" in {p.name for p in files}


def test_entries_survive_a_round_trip_and_broken_ones_are_rebuilt(tmp_path: Path) -> None:
    entry = tmp_path / "k.json"
    assert building._load(entry) is None
    building._write(entry, artifact_of())
    assert building._load(entry) == artifact_of()
    assert [p.name for p in tmp_path.iterdir()] == ["k.json"]
    entry.write_text(json.dumps({"name": "k"}))
    assert building._load(entry) is None and not entry.exists()


def _slow_build(folder: str, started: str, log: str, seconds: float) -> None:
    """Build in a child with a compiler that takes its time and says when it ran."""

    def compile_slowly(key: BuildKey, *, binary: bool = False) -> Artifact:
        Path(started).touch()
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(seconds)
        return artifact_of()

    building.compile_artifact = compile_slowly
    building.build(Key(), cache_dir=Path(folder))


def _spawn(*args: object) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=_slow_build, args=args)
    process.start()
    return process


def test_one_process_compiles_and_the_others_wait(tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [_spawn(str(tmp_path / "cache"), str(tmp_path / "started"), str(log), 0.3) for _ in range(3)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(log.read_text().split()) == 1


def test_a_killed_builder_leaves_nothing_behind(tmp_path: Path) -> None:
    cache, started, log = tmp_path / "cache", tmp_path / "started", tmp_path / "log"
    victim = _spawn(str(cache), str(started), str(log), 3600.0)
    while not started.exists():
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(60)
    assert not list(cache.glob("*.json")) and not list(cache.glob(".building*"))
    heir = _spawn(str(cache), str(started), str(log), 0.0)
    heir.join(60)
    assert heir.exitcode == 0
    assert len(list(cache.glob("*.json"))) == 1
    assert len(log.read_text().split()) == 2


def test_a_held_lock_ends_with_its_name(tmp_path: Path) -> None:
    lock = tmp_path / "k.lock"
    needed = pytest.raises(BuildError, match=r"holds .*k\.lock; needed: that it ends; fix:")
    with building._locked(lock), needed, building._locked(lock, limit_s=0.1):
        raise AssertionError("two holders")
    with building._locked(lock):  # given back
        pass


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setattr(building, "compile_artifact", lambda key, binary: artifact_of())
    with pytest.raises(BuildError, match=r"cannot be written .* fix: set SGLANG_AMD_MONO_CACHE_DIR"):
        building.build(Key(), cache_dir=file)
    for folder in (file / "below", Path("/proc/nowhere/below")):
        with pytest.raises(BuildError, match=r"cannot be written .* fix: set SGLANG_AMD_MONO_CACHE_DIR"):
            building.build(Key(), cache_dir=folder)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_AMD_MONO_CACHE_DIR", "/named")
    assert building.default_cache_dir() == Path("/named/kernels")
    monkeypatch.delenv("SGLANG_AMD_MONO_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert building.default_cache_dir() == Path("/xdg/sgl_amd_mono/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert building.default_cache_dir() == Path("/home/someone/.cache/sgl_amd_mono/kernels")
