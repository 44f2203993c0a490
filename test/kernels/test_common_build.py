# SPDX-License-Identifier: Apache-2.0
"""Compiling for gfx950 without a GPU or a linker: cache, parallel builds, ABI, refused resources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.common_kernels import BulkKey, GreedyKey, OpsKey, RingKey

from sgl_amd_mono.common import build as building
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
