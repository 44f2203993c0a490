# SPDX-License-Identifier: Apache-2.0
"""Decoding of instruction text into the 64-byte records that the C engine executes (``native/sim.h``, struct Ins).

Signatures come from the C tables: destination letters, "=", source letters, in the order of the text. Letters:
i 32-bit integer, f float32, b 16-bit integer, h float16, q 64-bit integer, d float64, p packed float16, P packed 16-bit
integers, k pair of float32 (v_pk_*_f32), M mixed f16/f32 (v_fma_mix), m lane mask in a scalar pair, s scalar register,
k/K (scalar instructions) signed/unsigned 16-bit immediate.
"""

from __future__ import annotations

import dataclasses
import re
import struct

import numpy as np

from . import convert_table, mfma_table
from .asm import Instruction
from .errors import SimError
from .library import operations

RECORD = np.dtype(
    [
        ("fn", "<u8"), ("op", "<u2"), ("nsrc", "u1"), ("cls", "u1"), ("flags", "<u4"), ("dst", "<u2"), ("sdst", "<u2"),
        ("src", "<u2", 4), ("kind", "u1", 4), ("neg", "u1"), ("abs", "u1"), ("omod", "u1"), ("clamp", "u1"),
        ("op_sel", "u1"),
        ("op_sel_hi", "u1"), ("neg_lo", "u1"), ("neg_hi", "u1"), ("dpp_ctrl", "<u2"), ("dpp_masks", "u1"),
        ("mem_bytes", "u1"),
        ("sdwa_dst", "u1"), ("sdwa_unused", "u1"), ("sdwa_sel", "u1", 2), ("imm", "<i4"), ("aux", "<u4"),
        ("ext", "<u8"),
    ]
)  # fmt: skip
assert RECORD.itemsize == 64

SRC_VGPR, SRC_SGPR, SRC_CONST, SRC_NONE, SRC_WRAPPED = range(5)
F_DPP, F_SDWA, F_POST, F_EXEC_WRITE, F_DST_HI, F_KEEP_HI, F_SEXT0, F_SEXT1 = (1 << k for k in range(8))
F_SC0, F_SC1, F_NT, F_LDS, F_OFFEN, F_IDXEN, F_SADDR, F_VADDR = (1 << k for k in range(8, 16))
F_DPP_BOUND, F_INDEXED, F_SKIPPABLE = 1 << 17, 1 << 19, 1 << 20

S_VCC, S_M0, S_EXEC, S_CONST = 106, 124, 126, 128
SHARED_BASE, PRIVATE_BASE = 0x00010000 << 32, 0x00020000 << 32  # flat apertures, as in sim.h

_SCALARS = {
    "flat_scratch": 102, "flat_scratch_lo": 102, "flat_scratch_hi": 103, "xnack_mask": 104, "xnack_mask_lo": 104,
    "xnack_mask_hi": 105, "vcc": S_VCC, "vcc_lo": S_VCC, "vcc_hi": S_VCC + 1, "m0": S_M0, "exec": S_EXEC,
    "exec_lo": S_EXEC,
    "exec_hi": S_EXEC + 1,
}  # fmt: skip
_SPECIAL = {
    "src_shared_base": SHARED_BASE, "src_private_base": PRIVATE_BASE, "src_shared_limit": SHARED_BASE | 0xFFFFFFFF,
    "src_private_limit": PRIVATE_BASE | 0xFFFFFFFF, "shared_base": SHARED_BASE, "private_base": PRIVATE_BASE,
}  # fmt: skip
_REG = re.compile(r"^(v|a|s|ttmp)(\d+)$")
_RANGE = re.compile(r"^(v|a|s|ttmp)\[(\d+):(\d+)\]$")
_FLOAT = re.compile(r"^-?\d+\.\d*(e[-+]?\d+)?$")
_INT = re.compile(r"^-?(0x[0-9a-fA-F]+|\d+)$")
_MODIFIER = re.compile(
    r"\s(op_sel_hi|op_sel|neg_lo|neg_hi|quad_perm|row_shl|row_shr|row_ror|row_bcast|row_newbcast|row_share|wave_shl|wave_shr|wave_rol|"
    r"wave_ror|row_mask|bank_mask|bound_ctrl|fi|dst_sel|dst_unused|src0_sel|src1_sel|mul|div|cbsz|abid|blgp|neg|bitop3|offset0|offset1|"
    r"offset|byte_sel|format|dfmt|nfmt):(\[[^\]]*\]|swizzle\([^)]*\)|[^\s,]+)"
)
_FLAG = re.compile(r"\s(row_mirror|row_half_mirror|clamp|offen|idxen|lds|sc0|sc1|nt|glc|slc|gds|scc|tfe)(?=\s|$)")
_SEL = {"BYTE_0": 0, "BYTE_1": 1, "BYTE_2": 2, "BYTE_3": 3, "WORD_0": 4, "WORD_1": 5, "DWORD": 6}
_UNUSED = {"UNUSED_PAD": 0, "UNUSED_SEXT": 1, "UNUSED_PRESERVE": 2}
# VOP3 operations that gfx9 introduced with op_sel keep the unused half of the destination; the others clear it.
_KEEP_HIGH = {"v_mad_u16", "v_mad_i16", "v_fma_f16", "v_div_fixup_f16", "v_add_i16", "v_sub_i16"} | {
    f"v_{name}3_{kind}" for name in ("min", "max", "med") for kind in ("f16", "i16", "u16")
}
_WIDTH = {"q": 2, "d": 2, "k": 2, "m": 2}
_HWREG = {
    "HW_REG_MODE": 1, "HW_REG_STATUS": 2, "HW_REG_TRAPSTS": 3, "HW_REG_HW_ID": 4, "HW_REG_GPR_ALLOC": 5,
    "HW_REG_LDS_ALLOC": 6,
    "HW_REG_IB_STS": 7, "HW_REG_SH_MEM_BASES": 15, "HW_REG_XCC_ID": 20,
}  # fmt: skip

# size suffix -> (bytes, load mode or 1 for the high half of a store)
_LOADS = {
    "ubyte": (1, 0), "sbyte": (1, 1), "ushort": (2, 0), "sshort": (2, 1), "dword": (4, 0), "dwordx2": (8, 0),
    "dwordx3": (12, 0),
    "dwordx4": (16, 0), "ubyte_d16": (1, 2), "ubyte_d16_hi": (1, 3), "sbyte_d16": (1, 4), "sbyte_d16_hi": (1, 5),
    "short_d16": (2, 2), "short_d16_hi": (2, 3),
}  # fmt: skip
_STORES = {
    "byte": (1, 0), "short": (2, 0), "dword": (4, 0), "dwordx2": (8, 0), "dwordx3": (12, 0), "dwordx4": (16, 0),
    "byte_d16_hi": (1, 1), "short_d16_hi": (2, 1),
}  # fmt: skip
_ATOMIC = {
    "swap": 0, "cmpswap": 1, "add": 2, "sub": 3, "smin": 4, "umin": 5, "smax": 6, "umax": 7, "and": 8, "or": 9,
    "xor": 10,
    "inc": 11, "dec": 12, "add_f32": 13, "pk_add_f16": 14, "pk_add_bf16": 15, "add_f64": 16, "min_f64": 17,
    "max_f64": 18,
}  # fmt: skip
_DS_READ, _DS_READ2, _DS_WRITE, _DS_WRITE2, _DS_ATOMIC, _DS_READ_TR, _DS_BPERMUTE, _DS_PERMUTE, _DS_SWIZZLE, _DS_NOP = (
    range(10)
)
_DS_LOADS = {
    "b32": (4, 0), "b64": (8, 0), "b96": (12, 0), "b128": (16, 0), "u8": (1, 0), "i8": (1, 1), "u16": (2, 0),
    "i16": (2, 1),
    "u8_d16": (1, 2), "u8_d16_hi": (1, 3), "i8_d16": (1, 4), "i8_d16_hi": (1, 5), "u16_d16": (2, 2),
    "u16_d16_hi": (2, 3),
}  # fmt: skip
_DS_STORES = {
    "b8": (1, 0), "b16": (2, 0), "b32": (4, 0), "b64": (8, 0), "b96": (12, 0), "b128": (16, 0), "b8_d16_hi": (1, 3),
    "b16_d16_hi": (2, 3),
}  # fmt: skip
_DS_ATOMICS = {
    "add_u32": (2, 4), "sub_u32": (3, 4), "rsub_u32": (19, 4), "inc_u32": (11, 4), "dec_u32": (12, 4),
    "min_i32": (4, 4),
    "min_u32": (5, 4), "max_i32": (6, 4), "max_u32": (7, 4), "and_b32": (8, 4), "or_b32": (9, 4), "xor_b32": (10, 4),
    "mskor_b32": (20, 4), "wrxchg_b32": (0, 4), "cmpst_b32": (1, 4), "add_f32": (13, 4), "min_f32": (21, 4),
    "max_f32": (22, 4),
    "pk_add_f16": (14, 4), "pk_add_bf16": (15, 4), "add_u64": (2, 8), "sub_u64": (3, 8), "rsub_u64": (19, 8),
    "inc_u64": (11, 8),
    "dec_u64": (12, 8), "min_i64": (4, 8), "min_u64": (5, 8), "max_i64": (6, 8), "max_u64": (7, 8), "and_b64": (8, 8),
    "or_b64": (9, 8), "xor_b64": (10, 8), "mskor_b64": (20, 8), "wrxchg_b64": (0, 8), "cmpst_b64": (1, 8),
    "add_f64": (16, 8),
    "min_f64": (17, 8), "max_f64": (18, 8),
}  # fmt: skip
_DS_TR = {"b64_tr_b16": (8, 16), "b64_tr_b8": (8, 8), "b64_tr_b4": (8, 4), "b96_tr_b6": (12, 6)}
_SCALAR_LOAD = re.compile(r"^s_(buffer_)?load_dword(x\d+)?$")
_SUFFIX = re.compile(r"_(e32|e64|dpp|sdwa|e64_dpp)$")


@dataclasses.dataclass
class Operand:
    """kind: "v" (row; AGPRs behind the VGPRs), "s" (scalar index), "const", "off" or "label"."""

    kind: str
    value: int = 0
    count: int = 1
    text: str = ""
    literal: bool = False
    floating: float | None = None
    neg: bool = False
    abs: bool = False
    sext: bool = False


def _halves(value: int) -> tuple[int, int]:
    return value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF


class Constants:
    """The constant pool: 32-bit words; a 64-bit constant is two neighbours."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self._known: dict[tuple[int, ...], int] = {}

    def add(self, *words: int) -> int:
        if words not in self._known:
            self._known[words] = len(self.words)
            self.words.extend(words)
        return self._known[words]


@dataclasses.dataclass
class Decoded:
    """The records of a kernel and what they refer to."""

    records: np.ndarray
    constants: np.ndarray
    extension: np.ndarray
    arch_vgprs: int  # VGPR rows seen in the text; AGPR rows follow
    acc_vgprs: int
    reads: list[list[tuple[str, int, int]]]  # registers read: (file, first, count), of every instruction
    writes: list[list[tuple[str, int, int]]]


class Decoder:
    """Turns the instructions of one kernel into records. operations: name -> (number, signature, class) of the C
    library."""

    def __init__(
        self, operations: dict[str, tuple[int, str, int]], labels: dict[str, int], symbols: dict[str, int]
    ) -> None:
        self.operations = operations
        self.labels = labels
        self.symbols = symbols
        self.constants = Constants()
        self.extension = bytearray()
        self._extension_known: dict[bytes, int] = {}
        self.arch = 0
        self._indexed = False
        self._reads: list[tuple[str, int, int]] = []
        self._writes: list[tuple[str, int, int]] = []

    # ---- registers and constants ----

    def decode(self, instructions: list[Instruction]) -> Decoded:
        """Raises SimError naming line and text of the first instruction that it does not know."""
        arch, acc = _register_counts(instructions)
        self.arch = arch
        skips = any(instruction.mnemonic == "s_setvskip" for instruction in instructions)
        fields = []
        reads, writes = [], []
        for instruction in instructions:
            self._reads, self._writes = [], []
            fields.append(_blank())
            try:
                self._one(fields[-1], instruction)
            except SimError as error:
                raise SimError(f"line {instruction.line}: {instruction.text}: {error}") from None
            except (ValueError, IndexError, KeyError) as error:
                raise SimError(f"line {instruction.line}: {instruction.text}: cannot be decoded ({error!r})") from error
            if skips and not instruction.mnemonic.startswith(("s_", "buffer_inv", "buffer_wb")):
                fields[-1]["flags"] |= F_SKIPPABLE
            reads.append(self._reads)
            writes.append(self._writes)
        records = np.zeros(len(instructions), RECORD)
        for name in RECORD.names:
            if fields:
                records[name] = np.array([f[name] for f in fields], dtype=RECORD[name].base)
        return Decoded(
            records,
            np.array(self.constants.words or [0], dtype=np.uint32),
            np.frombuffer(bytes(self.extension) or b"\0" * 8, dtype=np.uint8).copy(),
            arch,
            acc,
            reads,
            writes,
        )

    def _operand(self, token: str) -> Operand:
        token = token.strip()
        neg = absolute = sext = False
        while True:
            if token.startswith("-") and not _INT.match(token) and not _FLOAT.match(token):
                neg, token = not neg, token[1:].strip()
            elif token.startswith("neg(") and token.endswith(")"):
                neg, token = not neg, token[4:-1].strip()
            elif token.startswith("|") and token.endswith("|"):
                absolute, token = True, token[1:-1].strip()
            elif token.startswith("abs(") and token.endswith(")"):
                absolute, token = True, token[4:-1].strip()
            elif token.startswith("sext(") and token.endswith(")"):
                sext, token = True, token[5:-1].strip()
            else:
                break
        operand = self._plain(token)
        operand.neg, operand.abs, operand.sext, operand.text = neg, absolute, sext, token
        return operand

    def _plain(self, token: str) -> Operand:
        match = _REG.match(token)
        if match:
            return self._register(match.group(1), int(match.group(2)), 1)
        match = _RANGE.match(token)
        if match:
            first, last = int(match.group(2)), int(match.group(3))
            return self._register(match.group(1), first, last - first + 1)
        if token in _SCALARS:
            return Operand("s", _SCALARS[token], 1 if token.endswith(("_lo", "_hi")) or token == "m0" else 2)
        if token in ("off", "null"):
            return Operand("off")
        if _INT.match(token):
            return Operand("const", int(token, 0), literal="0x" in token)
        if _FLOAT.match(token):
            return Operand("const", 0, floating=float(token))
        if token in _SPECIAL:
            return Operand("const", _SPECIAL[token])
        if token in self.labels:
            return Operand("label", self.labels[token])
        name = token.split("@")[0]
        if name in self.symbols:
            value = self.symbols[name]
            return Operand("const", 0 if token.endswith("@hi") else value, literal=True)
        raise SimError(f"unknown operand {token!r}")

    def _register(self, file: str, first: int, count: int) -> Operand:
        if file == "v":
            return Operand("v", first, count)
        if file == "a":
            return Operand("v", self.arch + first, count)
        return Operand("s", first + (108 if file == "ttmp" else 0), count)

    def _const(self, operand: Operand, letter: str) -> int:
        """Index of the operand's bits in the pool, encoded as its type asks."""
        wide = letter in "qdk"
        if operand.floating is not None:
            value = operand.floating
            if letter in "hpb" or letter == "P":
                bits = struct.unpack("<H", struct.pack("<e", value))[0]
            elif letter in "qd":
                bits = struct.unpack("<Q", struct.pack("<d", value))[0]
            else:
                bits = struct.unpack("<I", struct.pack("<f", value))[0]
        else:
            bits = operand.value
            if letter == "d" and operand.literal:
                bits = (bits & 0xFFFFFFFF) << 32
        sign = {"h": 15, "b": 15, "d": 63}.get(letter, 31)
        if operand.abs:
            bits &= ~(1 << sign)
        if operand.neg:
            bits ^= 1 << sign
        if letter == "k":
            return self.constants.add(bits & 0xFFFFFFFF, bits & 0xFFFFFFFF)
        if wide:
            return self.constants.add(*_halves(bits))
        return self.constants.add(bits & 0xFFFFFFFF)

    def _scalar_source(self, operand: Operand, letter: str) -> int:
        """Index into the scalar file; constants lie behind the registers."""
        if operand.kind == "s":
            self._reads.append(("s", operand.value, _WIDTH.get(letter, 1)))
            return operand.value
        if operand.kind == "const":
            return S_CONST + self._const(operand, letter)
        raise SimError(f"operand {operand.text!r} is not a scalar")

    def _vector_source(self, record: dict, k: int, operand: Operand, letter: str, count: int | None = None) -> None:
        n = count if count is not None else 2 if letter in "qdk" else 1
        if operand.kind == "v":
            record["kind"][k], record["src"][k] = SRC_VGPR, operand.value
            self._reads.append(("v", operand.value, n))
            if operand.neg or operand.abs:
                record["kind"][k] = SRC_WRAPPED
        elif operand.kind == "s":
            record["kind"][k], record["src"][k] = SRC_SGPR, operand.value
            self._reads.append(("s", operand.value, n))
            if operand.neg or operand.abs:
                record["kind"][k] = SRC_WRAPPED
                record["op_sel_hi"] |= 1 << k
        elif operand.kind == "const":
            record["kind"][k], record["src"][k] = SRC_CONST, self._const(operand, letter)
            return
        else:
            raise SimError(f"operand {operand.text!r} cannot be a source")
        record["neg"] |= operand.neg << k
        record["abs"] |= operand.abs << k

    def _vector_dst(self, record: dict, operand: Operand, count: int) -> None:
        if operand.kind != "v":
            raise SimError(f"destination {operand.text!r} is not a VGPR")
        record["dst"] = operand.value
        self._writes.append(("v", operand.value, count))

    def _scalar_dst(self, record: dict, field: str, operand: Operand, count: int) -> None:
        if operand.kind != "s":
            raise SimError(f"destination {operand.text!r} is not a scalar register")
        record[field] = operand.value
        self._writes.append(("s", operand.value, count))
        if operand.value + count > S_EXEC and operand.value <= S_EXEC + 1:
            record["flags"] |= F_EXEC_WRITE

    def _op(self, record: dict, name: str) -> str:
        try:
            number, signature, _ = self.operations[name]
        except KeyError:
            raise SimError("unknown instruction") from None
        record["op"] = number
        return signature

    # ---- one instruction ----

    def _one(self, record: dict, instruction: Instruction) -> None:
        mnemonic = instruction.mnemonic
        rest = " " + instruction.text[len(mnemonic) :].strip()
        base = _SUFFIX.sub("", mnemonic)
        form = mnemonic[len(base) + 1 :]
        if mnemonic.startswith("s_"):
            self._scalar(record, mnemonic, rest)
            return
        modifiers = dict(_MODIFIER.findall(rest))
        rest = _MODIFIER.sub("", rest)
        flags = set(_FLAG.findall(rest))
        rest = _FLAG.sub("", rest)
        operands = [self._operand(t) for t in _split(rest)]
        if base.startswith(("buffer_inv", "buffer_wb")):
            self._op(record, base)
            self._cache_flags(record, flags)
        elif base.startswith(("global_", "flat_", "scratch_")):
            self._flat_memory(record, base, operands, modifiers, flags)
        elif base.startswith("buffer_"):
            self._buffer(record, base, operands, modifiers, flags)
        elif base.startswith("ds_"):
            self._ds(record, base, operands, modifiers)
        elif base.startswith(("v_mfma", "v_smfmac")):
            self._mfma(record, base, operands, modifiers)
        elif base in _CONVERSIONS:
            self._conversion(record, base, operands, modifiers)
        else:
            self._vector(record, base, form, operands, modifiers, flags)
            if self._indexed and not record["flags"] & F_EXEC_WRITE:
                record["flags"] |= F_INDEXED

    # ---- scalar ----

    def _scalar(self, record: dict, name: str, rest: str) -> None:
        if name == "s_waitcnt":
            self._op(record, name)
            record["aux"] = _waitcnt(rest)
            return
        if name in ("s_getreg_b32", "s_setreg_b32", "s_setreg_imm32_b32"):
            self._hardware_register(record, name, rest)
            return
        match = _SCALAR_LOAD.match(name)
        if match:
            self._scalar_load(record, name, int((match.group(2) or "x1")[1:]), rest)
            return
        signature = self._op(record, name)
        tokens = _split(rest)
        if signature == "branch":
            label = self._operand(tokens[0])
            if label.kind != "label":
                raise SimError("branch target is not a label of this kernel")
            record["imm"] = label.value
            return
        if signature == "call":
            self._scalar_dst(record, "dst", self._operand(tokens[0]), 2)
            record["imm"] = self._operand(tokens[1]).value
            return
        if signature == "imm":
            record["imm"] = int(tokens[0], 0) if tokens and _INT.match(tokens[0]) else 0
            return
        if name.startswith("s_set_gpr_idx"):
            self._indexed = name != "s_set_gpr_idx_off"
            if name in ("s_set_gpr_idx_on", "s_set_gpr_idx_mode"):
                mode = re.search(r"gpr_idx\(([^)]*)\)", rest)
                names = mode.group(1).split(",") if mode else []
                bits = {"SRC0": 1, "SRC1": 2, "SRC2": 4, "DST": 8}
                record["aux"] = sum(bits[n.strip()] for n in names if n.strip())
                tokens = tokens[:1]
            if name in ("s_set_gpr_idx_on", "s_set_gpr_idx_idx"):
                record["src"][0] = self._scalar_source(self._operand(tokens[0]), "i")
                record["kind"][0] = SRC_SGPR
            return
        outs, _, ins = signature.partition("=")
        operands = [self._operand(t) for t in tokens]
        if len(operands) != len(outs) + len(ins):
            raise SimError(f"expected {len(outs) + len(ins)} operands, found {len(operands)}")
        for letter, operand in zip(outs, operands):
            self._scalar_dst(record, "dst", operand, _WIDTH.get(letter, 1))
        for k, (letter, operand) in enumerate(zip(ins, operands[len(outs) :])):
            if letter in "kK":
                value = operand.value & 0xFFFF
                record["imm"] = value - 0x10000 if letter == "k" and value & 0x8000 else value
            else:
                record["src"][k] = self._scalar_source(operand, letter)
                record["kind"][k] = SRC_SGPR
        record["nsrc"] = len(ins)
        if name in ("s_addk_i32", "s_mulk_i32", "s_cmovk_i32", "s_cmov_b32", "s_bitset0_b32", "s_bitset1_b32"):
            self._reads.append(("s", int(record["dst"]), 1))
        if "saveexec" in name or "wrexec" in name:
            record["flags"] &= ~F_EXEC_WRITE

    def _hardware_register(self, record: dict, name: str, rest: str) -> None:
        self._op(record, name)
        match = re.search(r"hwreg\(([^)]*)\)", rest)
        others = _split(re.sub(r"hwreg\([^)]*\)", "", rest))
        if match:
            parts = [p.strip() for p in match.group(1).split(",")]
            number = _HWREG[parts[0]] if parts[0] in _HWREG else int(parts[0], 0)
            offset, size = (int(parts[1], 0), int(parts[2], 0)) if len(parts) > 1 else (0, 32)
        else:
            raw = int(others.pop(0 if name.startswith("s_set") else 1), 0)
            number, offset, size = raw & 63, raw >> 6 & 31, (raw >> 11 & 31) + 1
        record["aux"] = number | offset << 8 | (size - 1) << 16
        others = [t for t in others if t]
        if name == "s_getreg_b32":
            self._scalar_dst(record, "dst", self._operand(others[0]), 1)
        else:
            record["src"][0] = self._scalar_source(self._operand(others[0]), "i")

    def _scalar_load(self, record: dict, name: str, dwords: int, rest: str) -> None:
        self._op(record, name)
        modifiers = dict(_MODIFIER.findall(rest))
        rest = _MODIFIER.sub("", rest)
        rest = _FLAG.sub("", rest)
        operands = [self._operand(t) for t in _split(rest)]
        self._scalar_dst(record, "dst", operands[0], dwords)
        record["src"][0] = operands[1].value
        record["kind"][0] = SRC_SGPR
        self._reads.append(("s", operands[1].value, 4 if "buffer" in name else 2))
        record["mem_bytes"] = 4 * dwords
        if operands[2].kind == "const":
            record["imm"] = operands[2].value
        else:
            record["src"][1] = self._scalar_source(operands[2], "i")
            record["kind"][1] = SRC_SGPR
            record["imm"] = int(modifiers.get("offset", "0"), 0)

    # ---- vector ALU ----

    def _vector(
        self, record: dict, base: str, form: str, operands: list[Operand], modifiers: dict[str, str], flags: set[str]
    ) -> None:
        if "clamp" in flags and base + "_clamp" in self.operations:
            base += "_clamp"
            flags = flags - {"clamp"}
        signature = self._op(record, base)
        if signature == "imm":
            return
        outs, _, ins = signature.partition("=")
        if signature == "?" or len(operands) != len(outs) + len(ins):
            raise SimError(f"expected {len(outs) + len(ins)} operands, found {len(operands)}")
        field = "dst"
        for letter, operand in zip(outs, operands):
            if letter == "m":
                self._scalar_dst(record, "sdst", operand, 2)
                if not base.startswith("v_cmpx"):
                    field = "dst"
            elif letter == "s":
                self._scalar_dst(record, field, operand, 1)
            else:
                self._vector_dst(record, operand, _WIDTH.get(letter, 1))
        sources = operands[len(outs) :]
        op_sel = _bits(modifiers.get("op_sel"))
        packed = bool(set(ins) & set("pPkM"))
        for k, (letter, operand) in enumerate(zip(ins, sources)):
            if letter == "m":
                record["src"][k] = self._scalar_source(operand, "m")
                record["kind"][k] = SRC_SGPR
            elif letter == "M":
                half = k < 3 and _bits(modifiers.get("op_sel_hi"), 0)[k]
                self._vector_source(record, k, operand, "h" if half else "f")
            else:
                self._vector_source(record, k, operand, letter)
        record["nsrc"] = len(ins)
        if base.startswith("v_cmpx"):
            record["aux"] = 1
            record["flags"] &= ~F_EXEC_WRITE
        if base.startswith("v_bitop3"):
            record["aux"] = int(modifiers.get("bitop3", "0"), 0)
        if base.startswith(("v_fmac", "v_dot2c", "v_dot4c", "v_dot8c", "v_swap", "v_permlane", "v_writelane")):
            self._reads.append(("v", int(record["dst"]), 1))
        if base.startswith(("v_swap", "v_permlane")):
            self._writes.append(("v", int(record["src"][0]), 1))
        if base.startswith("v_div_fmas"):
            self._reads.append(("s", S_VCC, 2))
        if form == "dpp":
            if set(outs + ins) & set("qd"):
                raise SimError("DPP on 64-bit operands is not implemented")
            self._dpp(record, modifiers, flags)
        if form == "sdwa":
            self._sdwa(record, ins, sources, modifiers)
        if packed:
            record["op_sel"] = _pack(op_sel)
            default = 0 if "M" in ins else 1
            record["op_sel_hi"] = _pack(_bits(modifiers.get("op_sel_hi"), default))
            record["neg_lo"] = _pack(_bits(modifiers.get("neg_lo")))
            record["neg_hi"] = _pack(_bits(modifiers.get("neg_hi")))
            if "M" in ins:  # |x| and -x of v_fma_mix are written as operand modifiers
                record["neg_hi"] |= record["abs"]
                record["neg_lo"] |= record["neg"]
            for k in range(len(ins)):
                if record["kind"][k] == SRC_WRAPPED:
                    record["kind"][k] = SRC_SGPR if sources[k].kind == "s" else SRC_VGPR
            record["clamp"] = "clamp" in flags
            if record["clamp"] and "M" not in ins:
                record["flags"] |= F_POST
            return
        if "op_sel" in modifiers and form != "sdwa":
            self._halves16(record, base, ins, sources, op_sel)
        if base in _KEEP_HIGH and not record["flags"] & F_DST_HI:
            record["flags"] |= F_KEEP_HI | F_POST
            self._reads.append(("v", int(record["dst"]), 1))
        omod = {("mul", "2"): 1, ("mul", "4"): 2, ("div", "2"): 3}
        for key in ("mul", "div"):
            if key in modifiers:
                record["omod"] = omod[key, modifiers[key]]
                record["flags"] |= F_POST
        if "clamp" in flags:
            if outs[0] not in "fhd":
                raise SimError("clamp is not implemented for this integer operation")
            record["clamp"] = 1
            record["flags"] |= F_POST

    def _halves16(self, record: dict, base: str, ins: str, sources: list[Operand], op_sel: list[int]) -> None:
        """op_sel of the 16-bit VOP3 forms: entries of the sources, the last one of the destination."""
        for k in range(len(ins)):
            if op_sel[k] and sources[k].kind != "const":
                record["op_sel"] |= 1 << k
                record["kind"][k] = SRC_WRAPPED
                if sources[k].kind == "s":
                    record["op_sel_hi"] |= 1 << k
        if op_sel[len(ins)]:
            record["flags"] |= F_DST_HI | F_POST
            self._reads.append(("v", int(record["dst"]), 1))

    def _dpp(self, record: dict, modifiers: dict[str, str], flags: set[str]) -> None:
        controls = {"row_shl": 0x100, "row_shr": 0x110, "row_ror": 0x120, "row_newbcast": 0x150, "row_share": 0x150}
        fixed = {"wave_shl": 0x130, "wave_rol": 0x134, "wave_shr": 0x138, "wave_ror": 0x13C}
        ctrl = None
        if "quad_perm" in modifiers:
            ctrl = sum(p << (2 * k) for k, p in enumerate(_bits(modifiers["quad_perm"])[:4]))
        for name, code in controls.items():
            if name in modifiers:
                ctrl = code + int(modifiers[name])
        for name, code in fixed.items():
            if name in modifiers:
                ctrl = code
        if "row_bcast" in modifiers:
            ctrl = {"15": 0x142, "31": 0x143}[modifiers["row_bcast"]]
        if "row_mirror" in flags:
            ctrl = 0x140
        if "row_half_mirror" in flags:
            ctrl = 0x141
        if ctrl is None:
            raise SimError("DPP without a lane control")
        if record["kind"][0] not in (SRC_VGPR, SRC_WRAPPED):
            raise SimError("the first source of a DPP instruction must be a VGPR")
        record["kind"][0] = SRC_WRAPPED
        record["dpp_ctrl"] = ctrl
        record["dpp_masks"] = int(modifiers.get("row_mask", "0xf"), 0) | int(modifiers.get("bank_mask", "0xf"), 0) << 4
        record["flags"] |= F_DPP | (F_DPP_BOUND if "bound_ctrl" in modifiers else 0)
        self._reads.append(("v", int(record["dst"]), 1))

    def _sdwa(self, record: dict, ins: str, sources: list[Operand], modifiers: dict[str, str]) -> None:
        record["flags"] |= F_SDWA
        record["sdwa_dst"] = _SEL[modifiers.get("dst_sel", "DWORD")]
        record["sdwa_unused"] = _UNUSED[modifiers.get("dst_unused", "UNUSED_PAD")]
        for k in range(min(2, len(ins))):
            if ins[k] == "m":
                continue
            record["sdwa_sel"][k] = _SEL[modifiers.get(f"src{k}_sel", "DWORD")]
            record["flags"] |= (F_SEXT0 << k) if sources[k].sext else 0
            if sources[k].kind != "const":
                record["kind"][k] = SRC_WRAPPED
                if sources[k].kind == "s":
                    record["op_sel_hi"] |= 1 << k
        if record["sdwa_unused"] == 2 and record["sdwa_dst"] != 6:
            self._reads.append(("v", int(record["dst"]), 1))

    # ---- matrix and conversion ----

    def _extension(self, blob: bytes) -> int:
        if blob not in self._extension_known:
            self._extension_known[blob] = len(self.extension)
            self.extension.extend(blob + b"\0" * (-len(blob) % 16))
        return 1 + self._extension_known[blob]

    def _mfma(self, record: dict, base: str, operands: list[Operand], modifiers: dict[str, str]) -> None:
        info = mfma_table.lookup(base)
        if info is None:
            raise SimError("unknown instruction")
        self._op(record, "mfma")
        cbsz, abid, blgp = (int(modifiers.get(key, "0"), 0) for key in ("cbsz", "abid", "blgp"))
        info = info.with_modifiers(cbsz, blgp)
        if "neg" in modifiers:
            blgp = _pack(_bits(modifiers["neg"]))
        self._vector_dst(record, operands[0], info.d_regs)
        for k, count in ((1, info.a_regs), (2, info.b_regs)):
            self._vector_source(record, k - 1, operands[k], "i", count)
            if operands[k].kind != "v":
                raise SimError(f"operand {operands[k].text!r} must be a VGPR or AGPR range")
        c_const = 0
        if operands[3].kind == "const":
            index = self._const(operands[3], "d" if info.acc == "f64" else "f" if info.acc == "f32" else "i")
            c_const = self.constants.words[index + (info.acc == "f64")]
            record["kind"][2] = SRC_NONE
        else:
            self._vector_source(record, 2, operands[3], "i", info.c_regs)
        if info.scaled:
            self._vector_source(record, 3, operands[4], "i")
            holder = _blank()
            self._vector_source(holder, 0, operands[5], "i")
            record["dpp_ctrl"] = holder["src"][0]
            record["sdwa_sel"][0] = holder["kind"][0]
        blob = info.descriptor(
            cbsz,
            abid,
            blgp,
            tuple(_bits(modifiers.get("op_sel"))[:2]),
            tuple(_bits(modifiers.get("op_sel_hi"))[:2]),
            c_const,
        )
        record["ext"] = self._extension(blob)

    def _conversion(self, record: dict, base: str, operands: list[Operand], modifiers: dict[str, str]) -> None:
        kind, info = _CONVERSIONS[base]
        self._op(record, "convert")
        self._vector_dst(record, operands[0], info.d_regs)
        sources = operands[1:]
        if len(sources) != info.sources:
            raise SimError(f"expected {info.sources} source operands, found {len(sources)}")
        for k, operand in enumerate(sources):
            count = 1 if k == info.scale_operand and k else info.s0_regs if k == 0 else info.s1_regs or 1
            self._vector_source(record, k, operand, "i" if operand.floating is None else "f", count)
        entries = list(_bits(modifiers.get("op_sel")))
        if "src0_sel" in modifiers:
            sel = _SEL[modifiers["src0_sel"]]
            entries = {0: [0, 0], 1: [1, 0], 2: [0, 1], 3: [1, 1], 4: [0, 0], 5: [1, 0], 6: [0, 0]}[sel] + [0, 0]
        if "byte_sel" in modifiers:
            entries[2:4] = [int(modifiers["byte_sel"]) & 1, int(modifiers["byte_sel"]) >> 1]
        bits = info.op_sel_bits(tuple(entries))
        record["ext"] = self._extension(struct.pack("<HBB", kind, bits, 0))
        self._reads.append(("v", operands[0].value, info.d_regs))

    # ---- memory ----

    def _cache_flags(self, record: dict, flags: set[str]) -> None:
        for name, bit in (("sc0", F_SC0), ("glc", F_SC0), ("sc1", F_SC1), ("scc", F_SC1), ("nt", F_NT), ("slc", F_NT)):
            if name in flags:
                record["flags"] |= bit
        unknown = flags & {"gds", "tfe"}
        if unknown:
            raise SimError(f"modifier {sorted(unknown)[0]} is not implemented")

    def _flat_memory(
        self, record: dict, base: str, operands: list[Operand], modifiers: dict[str, str], flags: set[str]
    ) -> None:
        segment, _, what = base.partition("_")
        self._cache_flags(record, flags)
        record["imm"] = int(modifiers.get("offset", "0"), 0)
        lds = what.startswith("load_lds_")
        if lds:
            what = "load_" + what[len("load_lds_") :]
            record["flags"] |= F_LDS
        kind, _, suffix = what.partition("_")
        if kind not in ("load", "store", "atomic"):
            raise SimError("unknown instruction")
        self._op(record, f"{segment}_{kind}")
        operands = list(operands)
        if kind == "atomic":
            wide = suffix.endswith("_x2")
            name = suffix.removesuffix("_x2")
            record["aux"] = _ATOMIC[name]
            size = 8 if wide or name.endswith("f64") else 4
            record["mem_bytes"] = size
            if record["flags"] & F_SC0:
                self._vector_dst(record, operands.pop(0), size // 4)
            address, data = operands[0], operands[1]
            rest = operands[2:]
            self._data(record, data, size // 4 * (2 if name == "cmpswap" else 1))
        elif kind == "load":
            record["mem_bytes"], record["aux"] = _lookup(_LOADS, suffix)
            if not lds:
                self._load_dst(record, operands.pop(0))
            else:
                _whole_words(record)
                self._reads.append(("s", S_M0, 1))
            address, rest = operands[0], operands[1:]
        else:
            record["mem_bytes"], record["aux"] = _lookup(_STORES, suffix)
            address, data, rest = operands[0], operands[1], operands[2:]
            self._data(record, data, (int(record["mem_bytes"]) + 3) // 4)
        if len(rest) != (segment != "flat"):
            raise SimError("wrong number of operands")
        saddr = rest[0] if rest else Operand("off")
        if segment != "scratch" and address.count != (1 if saddr.kind == "s" else 2):
            raise SimError("the address is two VGPRs without a scalar base, one VGPR with one")
        if saddr.kind == "s":
            record["flags"] |= F_SADDR
            record["src"][2] = saddr.value
            self._reads.append(("s", saddr.value, 1 if segment == "scratch" else 2))
        elif saddr.kind == "const":
            if segment != "scratch":
                raise SimError("a constant base is not implemented")
            record["imm"] += saddr.value
        if address.kind == "v":
            record["flags"] |= F_VADDR
            record["src"][0] = address.value
            self._reads.append(("v", address.value, 1 if saddr.kind == "s" or segment == "scratch" else 2))
        elif segment != "scratch":
            raise SimError("a vector address is needed")

    def _load_dst(self, record: dict, operand: Operand) -> None:
        self._vector_dst(record, operand, (int(record["mem_bytes"]) + 3) // 4)
        if record["aux"] >= 2:
            self._reads.append(("v", operand.value, 1))

    def _data(self, record: dict, operand: Operand, count: int) -> None:
        if operand.kind != "v":
            raise SimError(f"data operand {operand.text!r} is not a VGPR")
        record["src"][1] = operand.value
        self._reads.append(("v", operand.value, count))

    def _buffer(
        self, record: dict, base: str, operands: list[Operand], modifiers: dict[str, str], flags: set[str]
    ) -> None:
        _, kind, suffix = base.split("_", 2)
        if kind not in ("load", "store", "atomic"):
            raise SimError("unknown instruction")
        self._op(record, f"buffer_{kind}")
        self._cache_flags(record, flags)
        record["imm"] = int(modifiers.get("offset", "0"), 0)
        for name, bit in (("offen", F_OFFEN), ("idxen", F_IDXEN), ("lds", F_LDS)):
            if name in flags:
                record["flags"] |= bit
        operands = list(operands)
        if kind == "atomic":
            wide = suffix.endswith("_x2")
            name = suffix.removesuffix("_x2")
            record["aux"] = _ATOMIC[name]
            size = 8 if wide or name.endswith("f64") else 4
            record["mem_bytes"] = size
            data = operands.pop(0)
            self._data(record, data, size // 4 * (2 if name == "cmpswap" else 1))
            if record["flags"] & F_SC0:
                self._vector_dst(record, data, size // 4)
        elif kind == "load":
            record["mem_bytes"], record["aux"] = _lookup(_LOADS, suffix)
            if not record["flags"] & F_LDS:
                self._load_dst(record, operands.pop(0))
            else:
                _whole_words(record)
                self._reads.append(("s", S_M0, 1))
        else:
            record["mem_bytes"], record["aux"] = _lookup(_STORES, suffix)
            self._data(record, operands.pop(0), (int(record["mem_bytes"]) + 3) // 4)
        address, descriptor, offset = operands
        if address.kind == "v":
            record["src"][0] = address.value
            self._reads.append(("v", address.value, 2 if {"offen", "idxen"} <= flags else 1))
        elif flags & {"offen", "idxen"}:
            raise SimError("offen and idxen need a vector address")
        if descriptor.kind != "s" or descriptor.count != 4:
            raise SimError(f"descriptor {descriptor.text!r} is not four scalar registers")
        record["src"][2] = descriptor.value
        self._reads.append(("s", descriptor.value, 4))
        record["src"][3] = self._scalar_source(offset, "i")

    def _ds(self, record: dict, base: str, operands: list[Operand], modifiers: dict[str, str]) -> None:
        self._op(record, "ds")
        name = base[len("ds_") :]
        operands = list(operands)
        record["imm"] = _swizzle(modifiers.get("offset", "0"))

        def address(operand: Operand) -> None:
            record["src"][0] = operand.value
            self._reads.append(("v", operand.value, 1))

        def data(k: int, operand: Operand, count: int) -> None:
            record["src"][k], record["kind"][k] = operand.value, SRC_VGPR
            self._reads.append(("v", operand.value, count))

        if name == "nop":
            record["aux"] = _DS_NOP
            return
        if name in ("bpermute_b32", "permute_b32", "swizzle_b32"):
            record["aux"] = {"b": _DS_BPERMUTE, "p": _DS_PERMUTE, "s": _DS_SWIZZLE}[name[0]]
            record["mem_bytes"] = 4
            self._vector_dst(record, operands[0], 1)
            address(operands[1])
            if name[0] != "s":
                data(1, operands[2], 1)
            return
        if name.startswith(("read2", "write2")):
            kind, size = name.rsplit("_", 1)
            record["mem_bytes"] = 8 if size == "b64" else 4
            scale = int(record["mem_bytes"]) * (64 if "st64" in kind else 1)
            record["imm"] = int(modifiers.get("offset0", "0"), 0) * scale
            record["sdst"] = int(modifiers.get("offset1", "0"), 0) * scale
            rows = int(record["mem_bytes"]) // 4
            if kind.startswith("read2"):
                record["aux"] = _DS_READ2
                self._vector_dst(record, operands[0], 2 * rows)
                address(operands[1])
            else:
                record["aux"] = _DS_WRITE2
                address(operands[0])
                data(1, operands[1], rows)
                data(2, operands[2], rows)
            return
        if name.startswith("read_") and name[len("read_") :] in _DS_TR:
            record["mem_bytes"], bits = _DS_TR[name[len("read_") :]]
            record["aux"] = _DS_READ_TR | bits << 8
            self._vector_dst(record, operands[0], int(record["mem_bytes"]) // 4)
            address(operands[1])
            return
        if name.startswith("read_"):
            record["mem_bytes"], mode = _lookup(_DS_LOADS, name[len("read_") :])
            record["aux"] = _DS_READ | mode << 8
            self._vector_dst(record, operands[0], (int(record["mem_bytes"]) + 3) // 4)
            if mode >= 2:
                self._reads.append(("v", operands[0].value, 1))
            address(operands[1])
            return
        if name.startswith("write_"):
            record["mem_bytes"], mode = _lookup(_DS_STORES, name[len("write_") :])
            record["aux"] = _DS_WRITE | mode << 8
            address(operands[0])
            data(1, operands[1], (int(record["mem_bytes"]) + 3) // 4)
            return
        returns = "_rtn_" in name
        name = name.replace("_rtn_", "_") if returns else name
        if name.startswith("pk_add_rtn"):
            name, returns = name.replace("_rtn", ""), True
        operation, size = _lookup(_DS_ATOMICS, name)
        record["mem_bytes"] = size
        record["aux"] = _DS_ATOMIC | operation << 8
        if returns:
            record["flags"] |= F_SC0
            self._vector_dst(record, operands.pop(0), size // 4)
        address(operands[0])
        data(1, operands[1], size // 4)
        if len(operands) > 2:
            data(2, operands[2], size // 4)


def _blank() -> dict:
    """The fields of an empty record."""
    record: dict = dict.fromkeys(RECORD.names, 0)
    record["src"], record["kind"], record["sdwa_sel"] = [0] * 4, [SRC_NONE] * 4, [0, 0]
    return record


_CONVERSIONS = {info.name: (kind, info) for kind, info in enumerate(convert_table.CONVERSIONS)}


def mnemonics() -> tuple[str, ...]:
    """Every mnemonic that the engine executes, without the encoding suffixes (_e32, _e64, _dpp, _sdwa)."""
    names = {n for n, (_, signature, _) in operations().items() if signature not in ("?", "mem", "ds", "smem")}
    names = {n for n in names if not n.endswith("_clamp")}
    names |= set(mfma_table.MNEMONICS) | set(_CONVERSIONS)
    names |= {f"s_{kind}load_dword{n}" for kind in ("", "buffer_") for n in ("", "x2", "x4", "x8", "x16")}
    for segment in ("global", "flat", "scratch", "buffer"):
        names |= {f"{segment}_load_{suffix}" for suffix in _LOADS} | {f"{segment}_store_{suffix}" for suffix in _STORES}
        if segment != "scratch":
            for name in _ATOMIC:
                names.add(f"{segment}_atomic_{name}")
                if not name.endswith(("f32", "f16", "f64")):
                    names.add(f"{segment}_atomic_{name}_x2")
    names -= {n for n in names if n.endswith("pk_add_bf16_x2")}
    names |= {f"global_load_lds_{suffix}" for suffix in ("dword", "dwordx3", "dwordx4")}
    names |= {f"ds_read_{suffix}" for suffix in (*_DS_LOADS, *_DS_TR)} | {f"ds_write_{suffix}" for suffix in _DS_STORES}
    names |= {f"ds_{rw}2{st}_{bits}" for rw in ("read", "write") for st in ("", "st64") for bits in ("b32", "b64")}
    for name in _DS_ATOMICS:
        names.add(f"ds_{name}")
        head, _, tail = name.rpartition("_")
        names.add(f"ds_{head}_rtn_{tail}")
    names -= {"ds_wrxchg_b32", "ds_wrxchg_b64"}  # only with a result
    names |= {"ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32", "ds_nop"}
    return tuple(sorted(names))


def _whole_words(record: dict) -> None:
    """Loads to LDS of bytes and shorts are not implemented."""
    if record["mem_bytes"] < 4 or record["mem_bytes"] == 8:
        raise SimError("only dword, dwordx3 and dwordx4 loads to LDS are implemented")


def _lookup(table: dict[str, tuple[int, int]], name: str) -> tuple[int, int]:
    try:
        return table[name]
    except KeyError:
        raise SimError("unknown instruction") from None


def _split(text: str) -> list[str]:
    """Operands at top-level commas."""
    parts, depth, current = [], 0, ""
    for c in text.strip():
        depth += (c in "[(") - (c in "])")
        if c == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += c
    if current.strip():
        parts.append(current.strip())
    return parts


def _bits(text: str | None, default: int = 0) -> list[int]:
    """Entries of a modifier list such as [0,1], padded to four with the default."""
    if text is None:
        return [default] * 4
    values = [int(p, 0) for p in text.strip("[]").split(",")]
    return values + [default] * (4 - len(values))


def _pack(bits: list[int]) -> int:
    return sum((b & 1) << k for k, b in enumerate(bits[:4]))


def _waitcnt(text: str) -> int:
    """vmcnt | lgkmcnt << 8, 255 where a counter is not waited for."""
    text = text.strip()
    if _INT.match(text):
        raw = int(text, 0)
        vm, lgkm = (raw & 15) | (raw >> 14 & 3) << 4, raw >> 8 & 15
        return (255 if vm == 63 else vm) | (255 if lgkm == 15 else lgkm) << 8
    counts = {name: int(value) for name, value in re.findall(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)", text)}
    if not counts:
        raise SimError("wait counters not understood")
    return counts.get("vmcnt", 255) | counts.get("lgkmcnt", 255) << 8


def _swizzle(text: str) -> int:
    """The offset field: a number or swizzle(...)."""
    if not text.startswith("swizzle("):
        return int(text, 0)
    parts = [p.strip().strip('"') for p in text[len("swizzle(") : -1].split(",")]
    mode, values = parts[0], parts[1:]
    if mode == "QUAD_PERM":
        return 0x8000 | sum(int(v) << (2 * k) for k, v in enumerate(values))
    if mode == "BITMASK_PERM":
        and_mask = or_mask = xor_mask = 0
        for k, c in enumerate(reversed(values[0])):
            if c in "pi":
                and_mask |= 1 << k
            if c == "1":
                or_mask |= 1 << k
            if c == "i":
                xor_mask |= 1 << k
        return and_mask | or_mask << 5 | xor_mask << 10
    if mode == "SWAP":
        return 0x1F | int(values[0]) << 10
    if mode == "REVERSE":
        return 0x1F | (int(values[0]) - 1) << 10
    if mode == "BROADCAST":
        size, lane = int(values[0]), int(values[1])
        return (0x20 - size) | lane << 5
    if mode == "ROTATE":
        return 0xC000 | int(values[0]) << 10 | int(values[1]) << 5
    if mode == "FFT":
        return 0xE000 | int(values[0])
    raise SimError(f"swizzle mode {mode} is not known")


def _register_counts(instructions: list[Instruction]) -> tuple[int, int]:
    """Highest VGPR and AGPR of the text, plus one."""
    top = {"v": 0, "a": -1}
    for instruction in instructions:
        for file, first, last in re.findall(r"(?<![\w.])([va])\[?(\d+)(?::(\d+)\])?", instruction.text):
            top[file] = max(top[file], int(last or first))
    return top["v"] + 1, top["a"] + 1
