# SPDX-License-Identifier: Apache-2.0
"""Each check of the doctor: what it says here, and that it fails with a fix where the thing is missing."""

from __future__ import annotations

import stat
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_amd_mono.common import doctor


def named(name: str) -> doctor.Check:
    return next(check for check in doctor.checks() if check.name == name)


def test_every_check_says_what_it_found_and_needs() -> None:
    report = doctor.checks()
    assert len({check.name for check in report}) == len(report) == len(doctor.ALL)
    assert all(check.found and check.need and check.fix != "report this as a bug" for check in report)
    assert all(check.fix for check in report if check.ok is False)


def test_this_machine_can_simulate() -> None:
    for name in ("Python", "FlyDSL", "torch", "Triton", "SGLang", "SGLang's names", "C compiler"):
        assert named(name).ok is True, named(name)


def test_without_a_gpu_its_checks_do_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_gpu", lambda: None)
    assert named("GPU").ok is None and named("compute units").ok is None


@pytest.mark.parametrize(
    ("name", "gpu", "found", "fix"),
    [
        ("GPU", {"gcnArchName": "gfx942:sramecc+:xnack-"}, "gfx942", "MI355X"),
        ("compute units", {"multi_processor_count": 64}, "64", "do not partition the GPU"),
    ],
)
def test_a_gpu_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, name: str, gpu: dict[str, object], found: str, fix: str
) -> None:
    fits = {"gcnArchName": "gfx950:sramecc+:xnack-", "multi_processor_count": 256}
    monkeypatch.setattr(doctor, "_gpu", lambda: SimpleNamespace(**fits))
    assert named(name).ok is True
    monkeypatch.setattr(doctor, "_gpu", lambda: SimpleNamespace(**(fits | gpu)))
    check = named(name)
    assert check.ok is False and check.found == found and fix in check.fix


@pytest.mark.parametrize(
    ("name", "package", "version"),
    [
        ("SGLang", "sglang", "0.5.22"),
        ("SGLang", "sglang", None),
        ("Triton", "triton", "3.9.0"),
        ("torch", "torch", None),
    ],
)
def test_a_package_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, version: str | None
) -> None:
    real = metadata.version

    def fake(asked: str) -> str:
        if asked != package:
            return real(asked)
        if version is None:
            raise metadata.PackageNotFoundError(asked)
        return version

    monkeypatch.setattr(doctor.metadata, "version", fake)
    check = named(name)
    assert check.ok is False and check.found == (version or "none") and check.fix


def test_a_server_needs_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    monkeypatch.setattr(doctor, "_gpu", lambda: None)
    assert named("sgl-amd-mono").ok is None
    monkeypatch.setattr(doctor, "_gpu", lambda: SimpleNamespace(gcnArchName="gfx950", multi_processor_count=256))
    assert named("sgl-amd-mono").ok is False and "pip install ." in named("sgl-amd-mono").fix


@pytest.mark.parametrize("version", [None, "0.1.0", "9.0.0"])
def test_flydsl(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(doctor, "installed", lambda: version)
    assert named("FlyDSL").ok is False and "pip install 'flydsl>=" in named("FlyDSL").fix


def test_plugins_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SimpleNamespace(name="sgl_amd_mono", value="sgl_amd_mono:register")
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [entry])
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    assert named("plugin").ok is True
    monkeypatch.setenv("SGLANG_PLUGINS", "other, sgl_amd_mono")
    assert named("plugin").ok is True
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert named("plugin").ok is False and "SGLANG_PLUGINS" in named("plugin").fix
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [])
    monkeypatch.setattr(doctor, "_gpu", lambda: None)
    assert named("plugin").ok is None
    monkeypatch.setattr(doctor, "_gpu", lambda: SimpleNamespace(gcnArchName="gfx950", multi_processor_count=256))
    assert named("plugin").ok is False and "pip install ." in named("plugin").fix


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "_gpu", lambda: None)
    assert named("C compiler").ok is False and named("linker").ok is None


def test_a_linker_is_needed_with_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_gpu", lambda: SimpleNamespace(gcnArchName="gfx950", multi_processor_count=256))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    assert named("linker").ok is False and "ROCM_PATH" in named("linker").fix
    lld = tmp_path / "llvm" / "bin" / "ld.lld"
    lld.parent.mkdir(parents=True)
    lld.touch()
    assert named("linker").ok is True and named("linker").found == str(lld)


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_AMD_MONO_CACHE_DIR", str(tmp_path / "cache"))
    assert named("cache").ok is True
    file = tmp_path / "file"
    file.touch(mode=stat.S_IRUSR)
    monkeypatch.setenv("SGLANG_AMD_MONO_CACHE_DIR", str(file / "below"))
    assert named("cache").ok is False and "SGLANG_AMD_MONO_CACHE_DIR" in named("cache").fix


def test_a_lost_name_of_sglang_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_amd_mono.common import sglang_names

    lost = {"sglang.srt.environ": ("NoSuchThing",)}
    monkeypatch.setattr(sglang_names, "declared", lambda: lost)
    check = named("SGLang's names")
    assert check.ok is False and "NoSuchThing" in check.found


def test_a_check_that_breaks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_something() -> doctor.Check:
        raise OSError("broken")

    monkeypatch.setattr(doctor, "ALL", (check_something,))
    (check,) = doctor.checks()
    assert check.ok is False and check.name == "something" and "OSError: broken" in check.found


def test_render() -> None:
    report = [
        doctor.Check("a", True, "1", "1"),
        doctor.Check("bb", False, "0", "1", "do it"),
        doctor.Check("c", None, "-", "1"),
    ]
    assert doctor.render(report).splitlines() == [
        "ok    a   found: 1; needed: 1",
        "FAIL  bb  found: 0; needed: 1",
        "          fix: do it",
        "n/a   c   found: -; needed: 1",
    ]
