# SPDX-License-Identifier: Apache-2.0
"""The conversions that ``native/convert.c`` runs over a whole wave: mnemonic -> operands and place of the scale."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ConversionInfo:
    """One conversion instruction; its position in CONVERSIONS is the kind number that the C side uses."""

    name: str
    d_regs: int
    s0_regs: int
    s1_regs: int  # 0: no second source besides the scale
    scale_operand: int  # which source operand of the text is the f32 scale (1 or 2), 0: none
    target_entry: bool = False  # the third entry of op_sel is OPSEL bit 3 (the half of the destination)

    @property
    def sources(self) -> int:
        """Source operands in the assembly text."""
        return 1 + (self.s1_regs > 0) + (self.scale_operand > 0)

    def op_sel_bits(self, entries: tuple[int, ...]) -> int:
        """OPSEL bits 0..3 of the instruction word from the entries of the text's op_sel list."""
        padded = (*entries, 0, 0, 0, 0)[:4]
        if self.target_entry:
            return padded[0] | padded[1] << 1 | padded[2] << 3
        return sum(bit << i for i, bit in enumerate(padded))


def _conversions() -> tuple[ConversionInfo, ...]:
    info = ConversionInfo
    scale = "v_cvt_scalef32_"
    small8 = ("fp8", "bf8")
    wide = ("f16", "bf16")
    return (
        *(info(f"v_cvt_pk_{t}_f32", 1, 1, 1, 0, True) for t in ("fp8", "bf8", "bf16", "f16")),
        *(info(f"v_cvt_sr_{t}_f32", 1, 1, 1, 0) for t in small8),
        *(info(f"v_cvt_sr_{t}_f32", 1, 1, 1, 0, True) for t in wide),
        *(info(f"v_cvt_f32_{s}", 1, 1, 0, 0) for s in small8),
        *(info(f"v_cvt_pk_f32_{s}", 2, 1, 0, 0) for s in small8),
        *(info(f"{scale}pk_{t}_f32", 1, 1, 1, 2) for t in ("fp8", "bf8", "fp4")),
        *(info(f"{scale}pk_{t}_{s}", 1, 1, 0, 1, True) for s in wide for t in small8),
        *(info(f"{scale}pk_fp4_{s}", 1, 1, 0, 1) for s in wide),
        *(info(f"{scale}sr_{t}_{s}", 1, 1, 1, 2) for s in ("f32", *wide) for t in small8),
        info(f"{scale}sr_pk_fp4_f32", 1, 2, 1, 2),
        *(info(f"{scale}sr_pk_fp4_{s}", 1, 1, 1, 2) for s in wide),
        *(info(f"{scale}pk_f32_{s}", 2, 1, 0, 1) for s in ("fp8", "bf8", "fp4")),
        *(info(f"{scale}pk_{t}_{s}", 1, 1, 0, 1) for t in wide for s in ("fp8", "bf8", "fp4")),
        *(info(f"{scale}f32_{s}", 1, 1, 0, 1) for s in small8),
        *(info(f"{scale}f16_{s}", 1, 1, 0, 1, True) for s in small8),
        *(info(f"{scale}2xpk16_{t}_f32", 6, 16, 16, 2) for t in ("fp6", "bf6")),
        *(info(f"{scale}pk32_{t}_{s}", 6, 16, 0, 1) for t in ("fp6", "bf6") for s in wide),
        *(info(f"{scale}sr_pk32_{t}_f32", 6, 32, 1, 2) for t in ("fp6", "bf6")),
        *(info(f"{scale}sr_pk32_{t}_{s}", 6, 16, 1, 2) for s in wide for t in ("fp6", "bf6")),
        *(info(f"{scale}pk32_f32_{s}", 32, 6, 0, 1) for s in ("fp6", "bf6")),
        *(info(f"{scale}pk32_{t}_{s}", 16, 6, 0, 1) for t in wide for s in ("fp6", "bf6")),
    )


CONVERSIONS: tuple[ConversionInfo, ...] = _conversions()
KINDS: dict[str, int] = {info.name: kind for kind, info in enumerate(CONVERSIONS)}


def lookup(mnemonic: str) -> ConversionInfo | None:
    """The conversion of that name, None where this table has none."""
    kind = KINDS.get(mnemonic)
    return None if kind is None else CONVERSIONS[kind]
