# SPDX-License-Identifier: Apache-2.0
"""The matrix instructions of gfx950: mnemonic -> shape, formats, register counts (layouts: ``native/mfma.h``)."""

from __future__ import annotations

import dataclasses
import re
import struct

LANES = 64

# Numbers of enum sim_mfma_format; the first five are also the values of cbsz and blgp in f8f6f4.
FORMATS = {"fp8": 0, "bf8": 1, "fp6": 2, "bf6": 3, "fp4": 4, "bf16": 5, "f16": 6, "f32": 7, "i8": 8, "f64": 9}
FORMAT_BITS = {"fp8": 8, "bf8": 8, "fp6": 6, "bf6": 6, "fp4": 4, "bf16": 16, "f16": 16, "f32": 32, "i8": 8, "f64": 64}
F8F6F4 = ("fp8", "bf8", "fp6", "bf6", "fp4")
ACCUMULATORS = {"f32": 0, "i32": 1, "f64": 2}

# struct sim_mfma: fn pointer, c_const, m, n, k, blocks, fmt_a, fmt_b, acc, cbsz, abid, blgp, f8f6f4, scaled, byte_a,
# byte_b
DESCRIPTOR = struct.Struct("<QI14Bxxxxxx")


@dataclasses.dataclass(frozen=True)
class MfmaInfo:
    """One matrix instruction: D (m x n) = A (m x k) B (k x n) + C, `blocks` times side by side."""

    name: str
    m: int
    n: int
    k: int
    blocks: int
    fmt_a: str
    fmt_b: str
    acc: str
    f8f6f4: bool = False
    scaled: bool = False

    @property
    def a_regs(self) -> int:
        """Registers of A a lane."""
        return self.m * self.k * self.blocks * FORMAT_BITS[self.fmt_a] // (LANES * 32)

    @property
    def b_regs(self) -> int:
        """Registers of B a lane."""
        return self.k * self.n * self.blocks * FORMAT_BITS[self.fmt_b] // (LANES * 32)

    @property
    def d_regs(self) -> int:
        """Registers of D (and of C) a lane."""
        return self.m * self.n * self.blocks // LANES * (2 if self.acc == "f64" else 1)

    c_regs = d_regs

    def with_modifiers(self, cbsz: int = 0, blgp: int = 0) -> MfmaInfo:
        """The instruction with the operand formats that cbsz and blgp choose (f8f6f4); others are unchanged."""
        if not self.f8f6f4:
            return self
        if cbsz >= len(F8F6F4) or blgp >= len(F8F6F4):
            raise ValueError(f"{self.name}: cbsz:{cbsz} blgp:{blgp}: formats are 0 to {len(F8F6F4) - 1}")
        return dataclasses.replace(self, fmt_a=F8F6F4[cbsz], fmt_b=F8F6F4[blgp])

    def descriptor(
        self,
        cbsz: int = 0,
        abid: int = 0,
        blgp: int = 0,
        op_sel: tuple[int, ...] = (0, 0),
        op_sel_hi: tuple[int, ...] = (0, 0),
        c_const: int = 0,
    ) -> bytes:
        """The bytes of ``struct sim_mfma`` (function pointer zero) for one use of the instruction."""
        info = self.with_modifiers(cbsz, blgp)
        scale_bytes = [op_sel[i] + 2 * op_sel_hi[i] if self.scaled else 0 for i in range(2)]
        return DESCRIPTOR.pack(
            0, c_const & 0xFFFFFFFF, info.m, info.n, info.k, info.blocks, FORMATS[info.fmt_a], FORMATS[info.fmt_b],
            ACCUMULATORS[info.acc], cbsz, abid, blgp, info.f8f6f4, info.scaled, *scale_bytes,
        )  # fmt: skip


def _plain(acc: str, fmt: str, shapes: str, suffix: str = "") -> list[MfmaInfo]:
    """Instructions of one operand format; `shapes` are MxNxK or MxNxK_<blocks>b."""
    out = []
    for shape in shapes.split():
        m, n, k, blocks = re.fullmatch(r"(\d+)x(\d+)x(\d+)(?:_(\d+)b)?", shape).groups()
        name = f"v_mfma_{acc}_{shape}_{fmt}{suffix}"
        out.append(MfmaInfo(name, int(m), int(n), int(k), int(blocks or 1), fmt, fmt, acc))
    return out


def _table() -> dict[str, MfmaInfo]:
    infos = [
        *_plain("f32", "bf16", "16x16x32 32x32x16 16x16x16 32x32x8 32x32x4_2b 16x16x4_4b 4x4x4_16b"),
        *_plain("f32", "f16", "16x16x32 32x32x16 16x16x16 32x32x8 32x32x4_2b 16x16x4_4b 4x4x4_16b"),
        *_plain("f32", "f32", "16x16x4 32x32x2 32x32x1_2b 16x16x1_4b 4x4x1_16b"),
        *_plain("i32", "i8", "16x16x64 32x32x32 16x16x32 32x32x16 32x32x4_2b 16x16x4_4b 4x4x4_16b"),
        *_plain("f64", "f64", "16x16x4"),
    ]
    for m, k in ((16, 32), (32, 16)):
        for a in ("fp8", "bf8"):
            for b in ("fp8", "bf8"):
                infos.append(MfmaInfo(f"v_mfma_f32_{m}x{m}x{k}_{a}_{b}", m, m, k, 1, a, b, "f32"))
    for m, k in ((16, 128), (32, 64)):
        infos.append(MfmaInfo(f"v_mfma_f32_{m}x{m}x{k}_f8f6f4", m, m, k, 1, "fp8", "fp8", "f32", True))
        infos.append(MfmaInfo(f"v_mfma_scale_f32_{m}x{m}x{k}_f8f6f4", m, m, k, 1, "fp8", "fp8", "f32", True, True))
    table = {info.name: info for info in infos}
    # Older spellings of the same opcodes, which LLVM's assembler also takes.
    for name, info in list(table.items()):
        blocks = re.fullmatch(r"(v_mfma_\w+?_\d+x\d+x\d+)_\d+b_(\w+)", name)
        old = f"{blocks[1]}{blocks[2]}" if blocks else re.sub(r"(x\d+)_(bf16|f16|f32|i8|f64)$", r"\1\2", name)
        if info.fmt_a == "bf16" and (info.k, info.m) not in ((32, 16), (16, 32)):
            old += "_1k"
        if old != name and (info.fmt_a, info.k, info.m) not in (("bf16", 32, 16), ("bf16", 16, 32)):
            table[old] = dataclasses.replace(info, name=old)
    return table


_INFOS = _table()
MNEMONICS: tuple[str, ...] = tuple(_INFOS)


def lookup(mnemonic: str) -> MfmaInfo | None:
    """The instruction of that name, None where it is not a matrix instruction of this table."""
    return _INFOS.get(mnemonic)
