# SPDX-License-Identifier: Apache-2.0
"""The C part of the simulator: compiled once with the system compiler, cached by content, loaded with ctypes."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .errors import SimError

SOURCE_DIR = Path(__file__).resolve().parent / "native"
CACHE_VARIABLE = "SGLANG_AMD_MONO_CACHE_DIR"
# Contraction would change roundings; the register file is accessed as integers and floats alike.
FLAGS = (
    "-O3", "-std=gnu11", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math",
    "-w",
)  # fmt: skip
NATIVE_FLAG = "-march=native"


def cache_dir() -> Path:
    """Folder of the compiled library: $SGLANG_AMD_MONO_CACHE_DIR or the user's cache folder, with `sim` below it."""
    root = os.environ.get(CACHE_VARIABLE)
    if root:
        return Path(root) / "sim"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sgl_amd_mono" / "sim"


def find_compiler() -> str:
    """The C compiler: $CC, else the first of cc, gcc, clang on PATH. Raises SimError where there is none."""
    named = os.environ.get("CC")
    for name in [named] if named else ["cc", "gcc", "clang"]:
        path = shutil.which(name.split()[0])
        if path:
            return path
    raise SimError(
        f"the simulator needs a C compiler and found none ({'CC=' + named if named else 'cc, gcc or clang on PATH'}): "
        "install one, for example `apt install gcc`, or set CC"
    )


def _sources() -> list[Path]:
    return sorted(SOURCE_DIR.glob("*.c"))


def _cpu() -> str:
    """What -march=native depends on, so that a cache shared by different machines stays right."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features", "model name"))]
    return "\n".join(sorted(set(lines)))


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in SOURCE_DIR.iterdir() if p.suffix in (".c", ".h", ".def")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join([*FLAGS, NATIVE_FLAG, compiler, platform.machine(), sys.platform, _cpu()]).encode())
    return digest.hexdigest()[:20]


def _run(command: list[str]) -> str | None:
    """Runs the compiler; its message where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"{' '.join(command)}\n{done.stderr.strip()[-4000:]}"


def _compile(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="sim-build-", dir=target.parent) as folder:
        flags = list(FLAGS)
        probe = Path(folder) / "probe.c"
        probe.write_text("int probe;\n")
        if _run([compiler, NATIVE_FLAG, "-c", str(probe), "-o", str(Path(folder) / "probe.o")]) is None:
            flags.append(NATIVE_FLAG)
        jobs = [(source, Path(folder) / (source.stem + ".o")) for source in _sources()]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            failures = [
                f
                for f in pool.map(lambda j: _run([compiler, *flags, "-c", str(j[0]), "-o", str(j[1])]), jobs)
                if f is not None
            ]
        if failures:
            raise SimError("the simulator's C sources do not compile:\n" + failures[0])
        library = Path(folder) / target.name
        failure = _run([compiler, "-shared", "-o", str(library), *(str(o) for _, o in jobs), "-lm"])
        if failure:
            raise SimError("the simulator's library does not link:\n" + failure)
        os.replace(library, target)


def build() -> Path:
    """Path of the compiled library; compiles it (about ten seconds) when its sources, flags or machine have changed.

    One process compiles, others wait. Raises SimError without a compiler, for sources that do not compile, and for a
    cache folder that cannot be written.
    """
    compiler = find_compiler()
    folder = cache_dir()
    target = folder / f"libsim-{_key(compiler)}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "build.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(compiler, target)
    except OSError as error:
        raise SimError(
            f"the cache folder {folder} cannot be written ({error}): set {CACHE_VARIABLE} to one that can"
        ) from error
    return target


_U32, _U64, _I64, _INT, _PTR = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
# name -> (result, arguments) of the exported functions
_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "sim_op_count": (_INT, ()),
    "sim_op_name": (ctypes.c_char_p, (_INT,)),
    "sim_op_signature": (ctypes.c_char_p, (_INT,)),
    "sim_op_class": (_INT, (_INT,)),
    "sim_ins_size": (_INT, ()),
    "sim_mfma_size": (_INT, ()),
    "sim_mfma_select": (_INT, (_PTR,)),
    "sim_cvt_kind": (_INT, (ctypes.c_char_p,)),
    "sim_program_new": (_PTR, (_PTR, _U32, _PTR, _U32, _PTR)),
    "sim_program_setup": (None, (_PTR, _U32, _U32, _U32, _INT, _INT, _INT, _INT, _INT, _INT)),
    "sim_program_free": (None, (_PTR,)),
    "sim_machine_new": (_PTR, (_U32, _U32, _U32, _U64)),
    "sim_machine_free": (None, (_PTR,)),
    "sim_clock": (_U64, (_PTR,)),
    "sim_set_limits": (None, (_PTR, _U64, ctypes.c_double)),
    "sim_map": (_INT, (_PTR, _U32, _U64, _U64, _PTR, _U32, _U32, _U32, _PTR)),
    "sim_unmap": (_INT, (_PTR, _U32, _U64)),
    "sim_alloc_counters": (_INT, (_PTR, _U32, _U32, _PTR, _PTR, _PTR, _PTR, _PTR, _U32)),
    "sim_add_stall": (_INT, (_PTR, _PTR)),
    "sim_add_store_fault": (_INT, (_PTR, _PTR)),
    "sim_set_starve": (None, (_PTR, ctypes.c_int32, _U32)),
    "sim_clear_faults": (None, (_PTR,)),
    "sim_fault_hits": (_U64, (_PTR, _INT, _INT)),
    "sim_launch_new": (_PTR, (_PTR, _PTR, _PTR, _PTR)),
    "sim_launch_free": (None, (_PTR,)),
    "sim_launch_counts": (None, (_PTR, _INT, _PTR)),
    "sim_launch_groups": (None, (_PTR, _PTR, _PTR)),
    "sim_launch_stats": (None, (_PTR, _PTR)),
    "sim_trace": (_I64, (_PTR, _U32, _PTR, _I64)),
    "sim_node": (_INT, (_PTR, ctypes.c_int32, _PTR)),
    "sim_run": (_INT, (_PTR, _PTR, _U32, _INT)),
    "sim_run_end": (None, (_PTR,)),
    "sim_fault": (None, (_PTR, _PTR)),
    "sim_waiting": (_INT, (_PTR, _PTR, _INT)),
}


@functools.cache
def load() -> ctypes.CDLL:
    """The library, compiled if need be, with argument types set. Raises SimError as `build` does."""
    library = ctypes.CDLL(str(build()))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = list(arguments)
    return library


@functools.cache
def operations() -> dict[str, tuple[int, str, int]]:
    """Operation name -> (number, signature, class) as the C tables have them."""
    lib = load()
    return {
        lib.sim_op_name(k).decode(): (k, lib.sim_op_signature(k).decode(), lib.sim_op_class(k))
        for k in range(lib.sim_op_count())
    }
