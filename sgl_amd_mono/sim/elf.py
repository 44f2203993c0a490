# SPDX-License-Identifier: Apache-2.0
"""ELF code objects of AMDGPU: sections, kernel symbols, kernel descriptors and the metadata note.

Sources: the ELF64 specification and LLVM's AMDGPU usage guide (code object versions 3 to 6, kernel descriptor of
gfx9). Nothing here needs a disassembler; `disassembler.py` adds the instructions.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

from .errors import SimError

MACHINE_AMDGPU = 224
MACHINE_FLAG_MASK = 0xFF  # EF_AMDGPU_MACH
MACHINE_GFX950 = 0x4F
NOTE_METADATA = 32  # NT_AMDGPU_METADATA
DESCRIPTOR_BYTES = 64
DESCRIPTOR_SUFFIX = ".kd"
SECTION_SYMBOLS, SECTION_NOTE, SECTION_DYNAMIC_SYMBOLS, SECTION_NO_BITS = 2, 7, 11, 8
VGPR_GRANULE, SGPR_GRANULE, ACCUM_GRANULE = 8, 16, 4

# Directive -> (word of the descriptor, first bit, bits); the plain fields of COMPUTE_PGM_RSRC1 and 2 and of the
# kernel's code properties.
_RSRC1, _RSRC2, _PROPERTIES, _PRELOAD = "rsrc1", "rsrc2", "properties", "preload"
_FIELDS = {
    "float_round_mode_32": (_RSRC1, 12, 2), "float_round_mode_16_64": (_RSRC1, 14, 2),
    "float_denorm_mode_32": (_RSRC1, 16, 2), "float_denorm_mode_16_64": (_RSRC1, 18, 2),
    "dx10_clamp": (_RSRC1, 21, 1), "ieee_mode": (_RSRC1, 23, 1), "fp16_overflow": (_RSRC1, 26, 1),
    "enable_private_segment": (_RSRC2, 0, 1), "user_sgpr_count": (_RSRC2, 1, 5),
    "system_sgpr_workgroup_id_x": (_RSRC2, 7, 1), "system_sgpr_workgroup_id_y": (_RSRC2, 8, 1),
    "system_sgpr_workgroup_id_z": (_RSRC2, 9, 1), "system_sgpr_workgroup_info": (_RSRC2, 10, 1),
    "system_vgpr_workitem_id": (_RSRC2, 11, 2),
    "user_sgpr_private_segment_buffer": (_PROPERTIES, 0, 1), "user_sgpr_dispatch_ptr": (_PROPERTIES, 1, 1),
    "user_sgpr_queue_ptr": (_PROPERTIES, 2, 1), "user_sgpr_kernarg_segment_ptr": (_PROPERTIES, 3, 1),
    "user_sgpr_dispatch_id": (_PROPERTIES, 4, 1), "user_sgpr_flat_scratch_init": (_PROPERTIES, 5, 1),
    "user_sgpr_private_segment_size": (_PROPERTIES, 6, 1), "uses_dynamic_stack": (_PROPERTIES, 11, 1),
    "user_sgpr_kernarg_preload_length": (_PRELOAD, 0, 7), "user_sgpr_kernarg_preload_offset": (_PRELOAD, 7, 9),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Section:
    """One section: name, type (SHT_*), address, and its bytes (empty where it has none in the file)."""

    name: str
    kind: int
    address: int
    data: bytes
    link: int


@dataclasses.dataclass(frozen=True)
class ElfKernel:
    """One kernel: its name, the address of its first instruction, `.amdhsa_` directives (numbers) and metadata."""

    name: str
    entry: int
    directives: dict[str, int]
    metadata: dict[str, Any]


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise SimError(f"not a gfx950 code object: {message}")


def _text(table: bytes, offset: int) -> str:
    end = table.find(b"\0", offset)
    return table[offset : end if end >= 0 else len(table)].decode("utf-8", "replace")


class ElfCodeObject:
    """A gfx950 code object in memory. Raises SimError for other files, and for a truncated one."""

    def __init__(self, data: bytes) -> None:
        _need(data[:4] == b"\x7fELF", f"the file begins with {data[:4]!r}, an ELF file with b'\\x7fELF'")
        _need(data[4:6] == b"\x02\x01", "it is not a 64-bit little-endian ELF file")
        try:
            self._read(data)
        except (struct.error, IndexError) as error:
            raise SimError(f"not a gfx950 code object: the ELF file is truncated or damaged ({error})") from error

    def _read(self, data: bytes) -> None:
        machine = struct.unpack_from("<H", data, 18)[0]
        _need(machine == MACHINE_AMDGPU, f"it is for machine {machine}, AMDGPU is {MACHINE_AMDGPU}")
        at, flags = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<I", data, 48)[0]
        _need(
            flags & MACHINE_FLAG_MASK == MACHINE_GFX950,
            f"it is for AMDGPU processor {flags & MACHINE_FLAG_MASK:#x}, gfx950 is {MACHINE_GFX950:#x}",
        )
        size, count, names = struct.unpack_from("<HHH", data, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, at + k * size) for k in range(count)]
        bodies = []
        for _, kind, _, _, offset, length, *_ in headers:
            body = b"" if kind == SECTION_NO_BITS else data[offset : offset + length]
            _need(kind == SECTION_NO_BITS or len(body) == length, "the ELF file is truncated")
            bodies.append(body)
        _need(names < count, "it has no section names")
        self.sections = [
            Section(_text(bodies[names], header[0]), header[1], header[3], body, header[6])
            for header, body in zip(headers, bodies)
        ]
        self.symbols = self._symbols()
        self.kernels = self._kernels()

    def _symbols(self) -> dict[str, int]:
        """Name -> address of every named symbol."""
        found: dict[str, int] = {}
        for section in self.sections:
            if section.kind in (SECTION_SYMBOLS, SECTION_DYNAMIC_SYMBOLS):
                strings = self.sections[section.link].data
                for at in range(0, len(section.data) - 23, 24):
                    name, _, _, index, value, _ = struct.unpack_from("<IBBHQQ", section.data, at)
                    if name and index:
                        found.setdefault(_text(strings, name), value)
        return found

    def metadata(self) -> list[dict[str, Any]]:
        """The `amdhsa.kernels` of the metadata note. Raises SimError where there is none."""
        for section in self.sections:
            if section.kind != SECTION_NOTE:
                continue
            at = 0
            while at + 12 <= len(section.data):
                name_size, size, kind = struct.unpack_from("<III", section.data, at)
                body = at + 12 + -(-name_size // 4) * 4
                if kind == NOTE_METADATA and section.data[at + 12 : at + 18] == b"AMDGPU":
                    value, _ = _msgpack(section.data, body)
                    _need(isinstance(value, dict) and "amdhsa.kernels" in value, "its metadata names no kernels")
                    return list(value["amdhsa.kernels"])
                at = body + -(-size // 4) * 4
        raise SimError("not a gfx950 code object: it has no AMDGPU metadata note")

    def bytes_at(self, address: int, count: int) -> bytes:
        """Bytes of the image. Raises SimError where no section holds them all."""
        for section in self.sections:
            offset = address - section.address
            if section.address and offset >= 0 and offset + count <= len(section.data):
                return section.data[offset : offset + count]
        raise SimError(f"not a gfx950 code object: no section holds {count} bytes at {address:#x}")

    def _kernels(self) -> list[ElfKernel]:
        result = []
        for info in self.metadata():
            symbol = str(info.get(".symbol", ""))
            name = str(info.get(".name", symbol.removesuffix(DESCRIPTOR_SUFFIX)))
            _need(symbol in self.symbols, f"it has no kernel descriptor {symbol!r} for kernel {name!r}")
            address = self.symbols[symbol]
            directives, offset = parse_descriptor(self.bytes_at(address, DESCRIPTOR_BYTES))
            result.append(ElfKernel(name, address + offset, directives, info))
        return result


def parse_descriptor(data: bytes) -> tuple[dict[str, int], int]:
    """The 64 bytes of a kernel descriptor: `.amdhsa_` directives by name, and the entry's offset from the descriptor.

    Of the AGPRs it says where they begin (`accum_offset`); `next_free_vgpr` counts both kinds.
    """
    lds, scratch, kernarg = struct.unpack_from("<III", data, 0)
    (offset,) = struct.unpack_from("<q", data, 16)
    rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", data, 44)
    properties, preload = struct.unpack_from("<HH", data, 56)
    words = {_RSRC1: rsrc1, _RSRC2: rsrc2, _PROPERTIES: properties, _PRELOAD: preload}
    directives = {name: words[word] >> first & ((1 << bits) - 1) for name, (word, first, bits) in _FIELDS.items()}
    directives |= {
        "group_segment_fixed_size": lds,
        "private_segment_fixed_size": scratch,
        "kernarg_size": kernarg,
        "next_free_vgpr": ((rsrc1 & 63) + 1) * VGPR_GRANULE,
        "next_free_sgpr": ((rsrc1 >> 6 & 15) // 2 + 1) * SGPR_GRANULE,
        "accum_offset": ((rsrc3 & 63) + 1) * ACCUM_GRANULE,
        "tg_split": rsrc3 >> 16 & 1,
    }
    return directives, offset


def _msgpack(data: bytes, at: int) -> tuple[Any, int]:
    """One MessagePack value and where the next begins; the types that code object metadata uses."""
    tag = data[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 256, at
    if tag < 0x90:
        return _mapping(data, at, tag & 15)
    if tag < 0xA0:
        return _array(data, at, tag & 15)
    if tag < 0xC0:
        return _string(data, at, tag & 31)
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    formats = {
        0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i",
        0xD3: ">q",
    }  # fmt: skip
    if tag in formats:
        return struct.unpack_from(formats[tag], data, at)[0], at + struct.calcsize(formats[tag])
    sizes = {
        0xC4: (">B", _bytes), 0xC5: (">H", _bytes), 0xC6: (">I", _bytes), 0xD9: (">B", _string), 0xDA: (">H", _string),
        0xDB: (">I", _string), 0xDC: (">H", _array), 0xDD: (">I", _array), 0xDE: (">H", _mapping),
        0xDF: (">I", _mapping),
    }  # fmt: skip
    if tag in sizes:
        form, read = sizes[tag]
        return read(data, at + struct.calcsize(form), struct.unpack_from(form, data, at)[0])
    raise SimError(f"metadata note: MessagePack type {tag:#x} is not known")


def _mapping(data: bytes, at: int, count: int) -> tuple[dict[Any, Any], int]:
    result = {}
    for _ in range(count):
        key, at = _msgpack(data, at)
        result[key], at = _msgpack(data, at)
    return result, at


def _array(data: bytes, at: int, count: int) -> tuple[list[Any], int]:
    result = []
    for _ in range(count):
        value, at = _msgpack(data, at)
        result.append(value)
    return result, at


def _string(data: bytes, at: int, count: int) -> tuple[str, int]:
    return data[at : at + count].decode("utf-8", "replace"), at + count


def _bytes(data: bytes, at: int, count: int) -> tuple[bytes, int]:
    return data[at : at + count], at + count
