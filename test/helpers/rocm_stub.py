# SPDX-License-Identifier: Apache-2.0
"""A ROCm folder without a GPU: a HIP library that records its calls, and a linker that copies its input."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

SONAME = "libamdhip64.so.7"
SOURCE = Path(__file__).with_name("hip_stub.c")
LINKER = """#!/bin/sh
while [ $# -gt 0 ]; do
  case "$1" in -o) out=$2; shift 2 ;; -*) shift ;; *) in=$1; shift ;; esac
done
cp "$in" "$out"
"""


@dataclass(frozen=True)
class RocmStub:
    """Paths of the stand-in and the log of HIP calls."""

    folder: Path

    @property
    def library(self) -> Path:
        """The HIP library."""
        return self.folder / SONAME

    @property
    def log(self) -> Path:
        """One line a HIP call."""
        return self.folder / "calls"

    def calls(self) -> list[str]:
        """The HIP calls so far."""
        return [line.strip() for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def environment(self, params: str = "", fail: str = "") -> dict[str, str]:
        """Environment in which a process finds the stand-in."""
        return {
            **os.environ,
            "HIP_STUB_LOG": str(self.log),
            "HIP_STUB_PARAMS": params,
            "HIP_STUB_FAIL": fail,
            "ROCM_PATH": str(self.folder),
            "LD_LIBRARY_PATH": str(self.folder),
        }


def make_rocm_stub(folder: Path) -> RocmStub:
    """Compile and lay out the stand-in in ``folder``."""
    version = folder / "version.map"
    version.write_text("hip_4.2 { global: *; };\n")  # FlyDSL's runtime library asks for these symbol versions
    subprocess.run(
        [
            "cc",
            "-shared",
            "-fPIC",
            "-O1",
            f"-Wl,-soname,{SONAME}",
            f"-Wl,--version-script={version}",
            str(SOURCE),
            "-o",
            str(folder / SONAME),
        ],
        check=True,
    )
    linker = folder / "llvm" / "bin" / "ld.lld"
    linker.parent.mkdir(parents=True)
    linker.write_text(LINKER)
    linker.chmod(0o755)
    return RocmStub(folder)
