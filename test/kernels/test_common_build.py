# SPDX-License-Identifier: Apache-2.0
"""Compiling for gfx950 without a GPU or a linker: cache, parallel builds, ABI, refused resources."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.common_kernels import BulkKey, FailingKey, GreedyKey, OpsKey, RingKey

from sgl_amd_mono.common import build as building
from sgl_amd_mono.common import build_pool
from sgl_amd_mono.common.build import BuildError, BuildKey, build, build_all, compile_artifact


def test_compiling_twice_gives_the_same_instructions() -> None:
    first, second = compile_artifact(RingKey()), compile_artifact(RingKey())
    assert first.isa == second.isa
    assert f"\n{RingKey().name}:" in first.isa
    assert [a.name for a in first.arguments] == [name for name, _ in RingKey.abi]
    assert first.kernarg_bytes == 72  # six pointers, an i64 and four i32
    assert first.resources.vgpr_spills == first.resources.scratch_bytes == 0
    assert first.binary is None


def test_the_machine_does_not_change_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    here = compile_artifact(RingKey()).isa
    monkeypatch.setenv("ARCH", "x86_64")
    monkeypatch.setenv("FLYDSL_GPU_ARCH", "gfx1201")
    assert compile_artifact(RingKey()).isa == here


def test_a_second_build_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(BulkKey(), cache_dir=tmp_path)

    def refuse(key: BuildKey, *, binary: bool = False) -> Any:
        raise AssertionError(f"compiled {key.name} again")

    monkeypatch.setattr(building, "compile_artifact", refuse)
    assert build(BulkKey(), cache_dir=tmp_path) == built
    with pytest.raises(AssertionError, match="compiled test_bulk"):
        build(BulkKey(blocks=4), cache_dir=tmp_path)
    with pytest.raises(AssertionError, match="compiled test_bulk"):
        build(BulkKey(), binary=True, cache_dir=tmp_path)  # a GPU build is another entry


def test_many_keys_build_in_parallel_processes(tmp_path: Path) -> None:
    keys = [RingKey(blocks=2), BulkKey(blocks=2), RingKey(blocks=2), OpsKey()]
    said: list[str] = []
    artifacts = build_all(keys, cache_dir=tmp_path, processes=2, progress=said.append)
    assert [a.name for a in artifacts] == [k.name for k in keys]
    assert len(list(tmp_path.glob("*.json"))) == 3
    assert len(said) == 3 and "built 3/3" in said[-1]
    assert build_all(keys, cache_dir=tmp_path) == artifacts


def test_a_failing_build_in_a_child_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="must not run"):
        build_all([GreedyKey(vectors=90), RingKey(blocks=2)], cache_dir=tmp_path, processes=2)


def test_a_warm_start_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither here nor in another process."""
    keys = [RingKey(blocks=2), OpsKey()]
    first = build_all(keys, cache_dir=tmp_path, processes=2)

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("a warm start compiled")

    monkeypatch.setattr(building, "compile_artifact", refuse)
    monkeypatch.setattr(build_pool, "build_parallel", refuse)
    assert build_all(keys, cache_dir=tmp_path, processes=2) == first
    with pytest.raises(AssertionError, match="a warm start compiled"):
        build_all([*keys, RingKey(blocks=3), RingKey(blocks=4)], cache_dir=tmp_path, processes=2)


def test_a_process_that_dies_while_it_compiles_is_reported(tmp_path: Path) -> None:
    """At once and with its key; the other process ends too, and leaves no half of an entry."""
    with pytest.raises(BuildError) as error:
        build_all([RingKey(blocks=2), FailingKey()], cache_dir=tmp_path, processes=2)
    text = str(error.value)
    assert text.startswith(f"{FailingKey().name}: the process that compiled it ended (signal 9); needed: that it lives")
    assert "sgl-amd-mono compile --jobs 1" in text
    assert not list(tmp_path.glob(".building-*"))
    assert build(RingKey(blocks=2), cache_dir=tmp_path).name == RingKey(blocks=2).name, "its lock was given back"


def test_a_key_that_takes_too_long_is_reported(tmp_path: Path) -> None:
    keys = [FailingKey(how="sleeps"), FailingKey(how="sleeps", lds_bytes=16)]
    with pytest.raises(BuildError, match=r"test_greedy\w+ has been compiling for 3 s; needed: that it ends; fix: "):
        list(build_pool.build_parallel(keys, 2, binary=False, folder=tmp_path, limit_s=3.0))
    with building._locked(building.cache_entry(keys[0], folder=tmp_path).with_suffix(".lock"), limit_s=20.0):
        pass  # its process is gone


def test_a_daemonic_process_builds_in_parallel_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's scheduler may be daemonic: multiprocessing would refuse it children."""
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    said: list[str] = []
    build_all([RingKey(blocks=2), OpsKey()], cache_dir=tmp_path, processes=2, progress=said.append)
    assert len(said) == 2 and "built 2/2" in said[-1]


RANK = """
import os, signal, sys
import torch.distributed as dist
from sgl_amd_mono.common.runtime import LaunchError, build_on_rank_0
from sgl_amd_mono.common.state import RankGroup
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
group = RankGroup(rank, 2, dist.group.WORLD)
group.all_gather(None)
try:
    build_on_rank_0(group, lambda: os.kill(os.getpid(), signal.SIGKILL))
except LaunchError as error:
    print(error)
"""


def test_a_rank_that_dies_while_it_compiles_does_not_hang_the_others(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, _ = ranks[1].communicate(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
    assert said.startswith("rank 1 waited for rank 0 to build the kernels, and the group broke (")
    assert "fix: see the log of the rank that ended" in said
    assert ranks[0].wait(timeout=60) == -9


def test_kernels_beyond_the_limits_are_refused(tmp_path: Path) -> None:
    assert build(GreedyKey(vectors=8), cache_dir=tmp_path).resources.vgprs <= 256
    with pytest.raises(BuildError, match=r"spilled VGPRs, needed 0.*scratch memory.*fix: fewer values in flight"):
        build(GreedyKey(vectors=90), cache_dir=tmp_path)
    with pytest.raises(BuildError, match="spilled"):  # also when it comes from the cache
        build(GreedyKey(vectors=90), cache_dir=tmp_path)
    limit = building.LDS_MAX
    assert build(GreedyKey(lds_bytes=limit), cache_dir=tmp_path).resources.lds_bytes == limit
    with pytest.raises(ValueError, match=rf"LDS of {limit + 16} bytes asked for; needed: 1 \.\. {limit}"):
        build(GreedyKey(lds_bytes=limit + 16), cache_dir=tmp_path)


def test_mistakes_of_a_kernel_author_are_named_while_tracing() -> None:
    from sgl_amd_mono.common import device as d

    @dataclass(frozen=True)
    class Mistake(GreedyKey):
        number: int = 0

        def body(self) -> Callable[..., None]:
            def kernel(x: Any, out: Any) -> None:
                if self.number == 0:
                    d.load(x, 0, d.vec(d.I32, 4), d.AGENT)
                elif self.number == 1:
                    d.Lds(64).take(65)
                elif self.number == 2:
                    d.wave_xor(d.F32(0.0), 3)
                elif self.number == 3:
                    d.wave_sum(d.F32(0.0), 48)
                else:
                    d.Lds(64)
                    d.Lds(64)

            return kernel

    for number, (error, text) in enumerate(
        (
            (ValueError, "AGENT load of 16 bytes is not one access; needed: <= 8, or Buffer.load"),
            (ValueError, "LDS: 0 \\+ 65 = 65 bytes needed, 64 allocated"),
            (ValueError, "wave_xor distance 3; needed: 1, 2, 4, 8, 16 or 32"),
            (ValueError, "groups of 48 lanes; needed: 2, 4, 8, 16, 32 or 64"),
            (RuntimeError, "one Lds a kernel"),
        )
    ):
        with pytest.raises(error, match=text):
            compile_artifact(Mistake(number=number))
    # A failed trace leaves nothing behind for the next one.
    assert compile_artifact(RingKey(blocks=2)).resources.vgprs
