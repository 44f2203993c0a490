# SPDX-License-Identifier: Apache-2.0
"""Code objects: one kernel of an assembly text, decoded and ready to launch."""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from pathlib import Path

import numpy as np

from . import library
from .asm import Instruction, KernelArg, KernelText, parse_text
from .decode import Decoded, Decoder
from .disassembler import assembly_text
from .errors import SimError

# gfx950: unified registers of one SIMD lane, allocation granule, wave slots, SIMDs a CU, LDS of a CU in bytes.
SIMD_VGPRS = 512
VGPR_GRANULE = 8
WAVES_PER_SIMD = 8
SIMDS_PER_CU = 4
LDS_PER_CU = 160 * 1024
WORKGROUPS_PER_CU = 32
LANES = 64


class CodeObject:
    """One kernel. Build it with `CodeObject.parse` from assembly text, with `CodeObject.load` from an ELF file.

    name; args (KernelArg in order); kernarg_size, lds_bytes, scratch_bytes (a lane) in bytes; vgprs (AGPRs included),
    agprs, sgprs; max_threads (0: not stated); instructions.
    """

    def __init__(self, text: str, kernel: KernelText) -> None:
        self._text = text
        self._kernel = kernel
        self.name = kernel.name
        self.args: list[KernelArg] = kernel.args
        self.instructions: list[Instruction] = kernel.instructions
        meta, directives = kernel.metadata, kernel.directives

        def number(key: str, directive: str, default: int = 0) -> int:
            for value in (meta.get(key), directives.get(directive)):
                if value is not None and re.fullmatch(r"\d+", value):
                    return int(value)
            return default

        self.kernarg_size = number(".kernarg_segment_size", "kernarg_size")
        self.lds_bytes = number(".group_segment_fixed_size", "group_segment_fixed_size")
        self.scratch_bytes = number(".private_segment_fixed_size", "private_segment_fixed_size")
        self.vgprs = number(".vgpr_count", "next_free_vgpr")
        self.agprs = number(".agpr_count", "")
        self.sgprs = number(".sgpr_count", "next_free_sgpr")
        self.spills = number(".vgpr_spill_count", "") + number(".sgpr_spill_count", "")
        self.max_threads = number(".max_flat_workgroup_size", "")
        labels = dict(kernel.labels)
        lds_symbols, at = {}, 0
        for name, (size, align) in kernel.lds_symbols.items():
            at = -(-at // align) * align
            lds_symbols[name] = at
            at += size
        self.decoded: Decoded = Decoder(library.operations(), labels, lds_symbols).decode(kernel.instructions)
        self._program = None

    @classmethod
    def parse(cls, isa_text: str, kernel: str | None = None) -> CodeObject:
        """The kernel of that name (default: the only one) of a text as LLVM prints it.

        Raises SimError for an unknown instruction (naming line and text), a missing kernel, or several without a
        choice.
        """
        kernels = parse_text(isa_text)
        names = [k.name for k in kernels]
        if kernel is None:
            if len(kernels) > 1:
                raise SimError(f"the text has {len(kernels)} kernels, name one of {names}")
            return cls(isa_text, kernels[0])
        for k in kernels:
            if k.name == kernel:
                return cls(isa_text, k)
        raise SimError(f"the text has no kernel {kernel!r}; it has {names}")

    @classmethod
    def load(cls, file: str | os.PathLike[str] | bytes, kernel: str | None = None) -> CodeObject:
        """The kernel of that name (default: the only one) of an ELF code object: a path, or the bytes.

        Needs llvm-objdump of LLVM 20 or newer (SGLANG_AMD_MONO_LLVM_OBJDUMP, else the newest on PATH). Line numbers
        of reports count in the disassembly, which names each instruction's address. Raises SimError as `parse` does,
        for a file that is no gfx950 code object, and without a disassembler.
        """
        data = file if isinstance(file, bytes) else Path(file).read_bytes()
        return cls.parse(assembly_text(data), kernel)

    # ---- mutation, for negative controls ----

    def find(self, pattern: str) -> list[Instruction]:
        """Instructions whose text matches the regular expression."""
        return [i for i in self.instructions if re.search(pattern, i.text)]

    def _choose(self, which: str | int, nth: int | None) -> list[Instruction]:
        found = [i for i in self.instructions if i.line == which] if isinstance(which, int) else self.find(which)
        if not found or (nth is not None and nth >= len(found)):
            raise SimError(f"{self.name}: {len(found)} instructions match {which!r}, wanted number {nth}")
        return found if nth is None else [found[nth]]

    def _edited(self, edits: dict[int, str]) -> CodeObject:
        lines = self._text.splitlines()
        for line, text in edits.items():
            lines[line - 1] = text
        return CodeObject.parse("\n".join(lines) + "\n", self.name)

    def delete(self, which: str | int, nth: int | None = 0) -> CodeObject:
        """A copy without the nth (None: every) instruction that matches a regular expression or stands on a line."""
        return self._edited({i.line: "" for i in self._choose(which, nth)})

    def replace(self, pattern: str, replacement: str, nth: int | None = 0) -> CodeObject:
        """A copy with the pattern replaced (re.sub) in the nth (None: every) instruction that matches."""
        return self._edited({i.line: "\t" + re.sub(pattern, replacement, i.text) for i in self._choose(pattern, nth)})

    # ---- resources ----

    def groups_per_cu(self, threads: int, dynamic_lds: int = 0) -> int:
        """Workgroups of that size that fit on one CU at once, from registers, LDS and wave slots; 0: none fits."""
        waves = -(-threads // LANES)
        granules = -(-max(self.vgprs, 1) // VGPR_GRANULE) * VGPR_GRANULE
        per_simd = min(WAVES_PER_SIMD, SIMD_VGPRS // granules)
        if per_simd == 0:
            return 0
        # A workgroup's waves are dealt to the SIMDs in turn, starting anywhere.
        by_waves = SIMDS_PER_CU * per_simd // waves
        lds = self.lds_bytes + dynamic_lds
        by_lds = LDS_PER_CU // lds if lds else WORKGROUPS_PER_CU
        return min(by_waves, by_lds, WORKGROUPS_PER_CU)

    def user_sgprs(self) -> dict[str, int]:
        """First register of every scalar input (-1: absent) and their total, from the kernel descriptor."""
        d = self._kernel.directives

        def flag(name: str) -> int:
            return int(d.get(f"user_sgpr_{name}", "0"), 0)

        at, result = 0, {}
        for name, size in (
            ("private_segment_buffer", 4),
            ("dispatch_ptr", 2),
            ("queue_ptr", 2),
            ("kernarg_segment_ptr", 2),
            ("dispatch_id", 2),
            ("flat_scratch_init", 2),
            ("private_segment_size", 1),
        ):
            result[name] = at if flag(name) else -1
            at += size if flag(name) else 0
        length = flag("kernarg_preload_length")
        result["preload"] = at if length else -1
        result["preload_length"] = length
        result["preload_offset"] = flag("kernarg_preload_offset")
        at += length
        result["count"] = max(at, flag("count"))
        return result

    def directive(self, name: str, default: int) -> int:
        """An .amdhsa_ directive as a number."""
        value = self._kernel.directives.get(name, "")
        return int(value, 0) if re.fullmatch(r"\d+", value) else default

    def program(self) -> int:
        """Handle of the C program; built at the first launch, freed with this object."""
        if self._program is None:
            lib = library.load()
            decoded = self.decoded
            ext = decoded.extension
            start = -ext.ctypes.data % 16
            if start:
                aligned = np.empty(ext.size + 16, np.uint8)
                at = -aligned.ctypes.data % 16
                aligned[at : at + ext.size] = ext
                self._ext = aligned[at : at + ext.size]
            else:
                self._ext = ext
            op, size = library.operations()["mfma"][0], lib.sim_mfma_size()
            for record in decoded.records[decoded.records["op"] == op]:
                at = int(record["ext"]) - 1
                if lib.sim_mfma_select(self._ext.ctypes.data + at) != 0:
                    raise SimError(
                        f"{self.name}: a matrix instruction has no such shape or format ({size}-byte descriptor)"
                    )
            records = decoded.records
            handle = lib.sim_program_new(
                records.ctypes.data,
                len(records),
                decoded.constants.ctypes.data,
                len(decoded.constants),
                self._ext.ctypes.data,
            )
            if not handle:
                raise MemoryError("no memory for the program")
            flush32 = self.directive("float_denorm_mode_32", 3) == 0
            flush64 = self.directive("float_denorm_mode_16_64", 3) == 0
            rows = decoded.arch_vgprs + decoded.acc_vgprs
            lib.sim_program_setup(
                handle,
                rows,
                self.lds_bytes,
                self.scratch_bytes,
                flush32,
                flush64,
                self.directive("ieee_mode", 1),
                self.directive("dx10_clamp", 1),
                self.directive("float_round_mode_32", 0),
                self.directive("float_round_mode_16_64", 0),
            )
            self._program = handle
            weakref.finalize(self, lib.sim_program_free, ctypes.c_void_p(handle))
        return self._program
