# SPDX-License-Identifier: Apache-2.0
"""What `sgl-amd-mono doctor` reports: each thing the package needs, what was found, and the fix where it does not fit.

Importing this module loads nothing but the standard library; the checks import torch, and SGLang never.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from sgl_amd_mono import FLAGS, FLYDSL_TESTED, SPECS, __version__
from sgl_amd_mono.common.build import cache_root
from sgl_amd_mono.common.flydsl_version import installed, release

PYTHON_NEEDED = (3, 11)
SGLANG_TESTED = "0.5.23"
#: Triton 3.9 removed the block pointers that SGLang's GDN prefill kernels use.
TRITON_TESTED = (3, 8)
ISA_NEEDED, CUS_NEEDED = "gfx950", 256
ENTRY_POINT_GROUP, ENTRY_POINT = "sglang.srt.plugins", "sgl_amd_mono"


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was looked at.
        ok: True or False; None where it does not apply to this machine.
        found, need: as text.
        fix: what to do, empty where `ok` is not False.
    """

    name: str
    ok: bool | None
    found: str
    need: str
    fix: str = ""


def checks() -> list[Check]:
    """Every check, in the order of a first set-up. A check that itself fails is reported as not ok, never raised."""
    return [_run(check) for check in ALL]


def render(report: list[Check]) -> str:
    """The report as text: one line a check, the fix below a failed one."""
    mark = {True: "ok  ", False: "FAIL", None: "n/a "}
    width = max(len(c.name) for c in report)
    lines = []
    for c in report:
        lines.append(f"{mark[c.ok]}  {c.name:<{width}}  found: {c.found}; needed: {c.need}")
        if c.ok is False:
            lines.append(f"      {'':<{width}}  fix: {c.fix}")
    return "\n".join(lines)


def _run(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        return Check(name, False, f"{type(error).__name__}: {error}", "a check that runs", "report this as a bug")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_python() -> Check:
    need = ".".join(map(str, PYTHON_NEEDED))
    found = ".".join(map(str, sys.version_info[:3]))
    return Check("Python", sys.version_info[:2] >= PYTHON_NEEDED, found, f">= {need}", f"use Python {need} or newer")


def check_package() -> Check:
    version = _version("sgl-amd-mono")
    found = version or f"the source tree at {Path(__file__).resolve().parents[2]}, not installed"
    if version is None and _gpu() is None:
        return Check("sgl-amd-mono", None, f"{found}; `simulate` needs no installation", __version__)
    return Check("sgl-amd-mono", version is not None, found, __version__, "pip install . (in the source tree)")


def check_flydsl() -> Check:
    first, past = FLYDSL_TESTED
    version = installed()
    ok = version is not None and release(first) <= release(version) < release(past)
    fix = f"pip install 'flydsl>={first},<{past}'"
    return Check("FlyDSL", ok, version or "none", f">= {first}, < {past}", fix)


def check_torch() -> Check:
    version = _version("torch")
    fix = "use SGLang's ROCm image; without a GPU: make venv"
    return Check("torch", version is not None, version or "none", "the one of SGLang's image", fix)


def check_triton() -> Check:
    version = _version("triton") or _version("pytorch-triton-rocm")
    limit = ".".join(map(str, TRITON_TESTED))
    ok = version is not None and release(version)[:2] <= TRITON_TESTED
    fix = f"pip install 'triton=={limit}.*'"
    return Check("Triton", ok, version or "none", f"<= {limit}: SGLang's prefill kernels use block pointers", fix)


def check_sglang() -> Check:
    version = _version("sglang")
    fix = f"install SGLang {SGLANG_TESTED}, the first release with {FLAGS[0]}"
    return Check("SGLang", version is not None and release(version) == release(SGLANG_TESTED), version or "none",
                 SGLANG_TESTED, fix)  # fmt: skip


def check_contract() -> Check:
    """Every SGLang name that the package reads is looked up in the installed source."""
    from sgl_amd_mono.common.sglang_names import declared, missing, sglang_root

    total = sum(map(len, declared().values()))
    need = f"all {total} names that the package reads"
    if sglang_root() is None:
        return Check("SGLang's names", None, "no SGLang", need)
    lost = missing()
    found = f"{total}" if not lost else f"{len(lost)} missing: " + "; ".join(lost[:5])
    return Check("SGLang's names", not lost, found, need, f"install SGLang {SGLANG_TESTED}")


def check_plugin() -> Check:
    entries = [e for e in metadata.entry_points(group=ENTRY_POINT_GROUP) if e.name == ENTRY_POINT]
    only = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    need = f"entry point {ENTRY_POINT} in {ENTRY_POINT_GROUP}, for {', '.join(SPECS)}"
    if not entries and _gpu() is None:
        return Check("plugin", None, "no entry point; `simulate` brings its own", need)
    if not entries:
        return Check("plugin", False, "no entry point", need, "pip install . (in the source tree)")
    if only and ENTRY_POINT not in only:
        found = f"kept out by SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']}"
        return Check("plugin", False, found, need, f"unset SGLANG_PLUGINS, or add {ENTRY_POINT} to it")
    return Check("plugin", True, entries[0].value, need)


def _gpu() -> object | None:
    """Properties of the AMD GPU that torch sees; None without one, and without torch, which has a check of its own."""
    if find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available() or not torch.version.hip:
        return None
    return torch.cuda.get_device_properties(0)


def check_gpu() -> Check:
    props = _gpu()
    if props is None:
        return Check("GPU", None, "no AMD GPU: kernels run on the simulator", ISA_NEEDED)
    isa = props.gcnArchName.split(":")[0]
    return Check("GPU", isa == ISA_NEEDED, isa, ISA_NEEDED, "run on an MI355X")


def check_compute_units() -> Check:
    props = _gpu()
    need = f">= {CUS_NEEDED}: every workgroup of a launch is resident"
    if props is None:
        return Check("compute units", None, "no AMD GPU", need)
    count = props.multi_processor_count
    fix = "do not partition the GPU (SPX mode) and set no CU mask (HSA_CU_MASK, ROC_GLOBAL_CU_MASK)"
    return Check("compute units", count >= CUS_NEEDED, str(count), need, fix)


def check_linker() -> Check:
    """Only code objects for a GPU are linked; the simulator reads the ISA text."""
    need = "ld.lld, to link the kernels for a GPU"
    folder = os.environ.get("ROCM_PATH", "/opt/rocm")
    candidates = [Path(folder) / "llvm" / "bin" / "ld.lld", Path(shutil.which("ld.lld") or "/nonexistent")]
    found = next((str(path) for path in candidates if path.is_file()), None)
    if found is None and _gpu() is None:
        return Check("linker", None, "none; the simulator needs none", need)
    return Check("linker", found is not None, found or "none", need, "set ROCM_PATH to the ROCm installation")


def check_c_compiler() -> Check:
    """The simulator's engine is compiled once, at first use."""
    need = "a C compiler (CC, cc, gcc or clang), for the simulator"
    names = [os.environ["CC"].split()[0]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None and _gpu() is not None:
        return Check("C compiler", None, "none; only the simulator needs one", need)
    return Check("C compiler", found is not None, found or "none", need, "apt-get install gcc, or set CC")


def cache_dir() -> Path:
    """Folder below which kernels and the simulator's library are cached (`build.cache_root`)."""
    return cache_root()


def check_cache() -> Check:
    folder = cache_dir()
    need = "a writable folder for built kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fix = "set SGLANG_AMD_MONO_CACHE_DIR to a writable folder"
        return Check("cache", False, f"{folder}: {error.strerror or error}", need, fix)
    return Check("cache", True, str(folder), need)


ALL: tuple[Callable[[], Check], ...] = (
    check_python,
    check_package,
    check_flydsl,
    check_torch,
    check_triton,
    check_sglang,
    check_contract,
    check_plugin,
    check_gpu,
    check_compute_units,
    check_linker,
    check_c_compiler,
    check_cache,
)
