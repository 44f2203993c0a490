# SPDX-License-Identifier: Apache-2.0
"""The matrix instructions give the same bits on every host: each vector variant of mfma.c against the library."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from pathlib import Path

import numpy as np
import pytest

from sgl_amd_mono.sim.library import SOURCE_DIR, find_compiler, load
from sgl_amd_mono.sim.mfma_table import DESCRIPTOR, MNEMONICS, MfmaInfo, lookup

X86 = platform.machine() in ("x86_64", "AMD64")
# Flags that leave out what newer processors have; every processor that runs the tests can execute them.
VARIANTS = {"plain": ["-march=x86-64"], "avx2": ["-mavx2", "-mfma"]} if X86 else {"plain": []}
REGISTER_BYTES = 64 * 4


def _supported(name: str) -> bool:
    """Whether this processor can execute the variant at all (AVX2 came in 2013)."""
    return name == "plain" or "avx2" in Path("/proc/cpuinfo").read_text()


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    folder = tmp_path_factory.mktemp("variants")
    built = {}
    for name, flags in VARIANTS.items():
        if not _supported(name):
            continue
        target = folder / f"{name}.so"
        sources = [str(SOURCE_DIR / file) for file in ("mfma.c", "convert.c")]
        command = [
            find_compiler(),
            "-O1",
            "-std=gnu11",
            "-fPIC",
            "-shared",
            "-ffp-contract=off",
            "-fno-strict-aliasing",
        ]
        subprocess.run([*command, *flags, *sources, "-lm", "-o", str(target)], check=True)
        built[name] = ctypes.CDLL(str(target))
    return built


def _registers(rng: np.random.Generator, count: int, fmt: str, rows: int) -> np.ndarray:
    """Random operand registers whose products stay within f32's range (a plain host rounds products beyond it)."""
    words = rng.integers(0, 2**32, (rows, 64), dtype=np.uint32)
    if fmt == "bf16":
        words = words & np.uint32(0x8FFF8FFF) | np.uint32(0x30003000)
    if fmt in ("f32", "f64"):
        words = words & np.uint32(0x80FF0000) | np.uint32(0x3F000000)  # few bits: products are exact
    return words[:count]


def _run(native: ctypes.CDLL, info: MfmaInfo, descriptor: bytes, operands: list[np.ndarray]) -> np.ndarray:
    a, b, c, scale_a, scale_b = operands
    op = ctypes.create_string_buffer(descriptor, DESCRIPTOR.size)
    d = np.zeros((info.d_regs, 64), dtype=np.uint32)
    pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (d, a, b, c, scale_a, scale_b)]
    assert native.sim_mfma_run(op, *pointers) == 0
    return d


def test_descriptor_has_the_size_of_the_struct() -> None:
    assert load().sim_mfma_size() == DESCRIPTOR.size


@pytest.mark.parametrize("name", MNEMONICS)
def test_variants_agree_bit_for_bit(name: str, variants: dict[str, ctypes.CDLL]) -> None:
    assert variants, "no variant was built"
    base = lookup(name)
    formats = [(0, 0), (4, 4), (1, 4), (2, 3)] if base.f8f6f4 else [(0, 0)]
    for cbsz, blgp in formats:
        info = base.with_modifiers(cbsz, blgp)
        for seed in range(4):
            rng = np.random.default_rng(seed)
            operands = [
                _registers(rng, info.a_regs, info.fmt_a, 16),
                _registers(rng, info.b_regs, info.fmt_b, 16),
                rng.integers(0x3F000000, 0x41000000, (32, 64), dtype=np.uint32),
                rng.integers(0, 2**32, 64, dtype=np.uint32) & np.uint32(0x83838383) | np.uint32(0x70707070),
                rng.integers(0, 2**32, 64, dtype=np.uint32) & np.uint32(0x83838383) | np.uint32(0x70707070),
            ]
            descriptor = base.descriptor(cbsz=cbsz, blgp=blgp, op_sel=(1, 0), op_sel_hi=(0, 1))
            want = _run(load(), info, descriptor, operands)
            for variant, native in variants.items():
                got = _run(native, info, descriptor, operands)
                assert (got == want).all(), f"{name} cbsz:{cbsz} blgp:{blgp}: {variant} differs"
