# SPDX-License-Identifier: Apache-2.0
"""Instructions of an ELF code object, by `llvm-objdump`: the assembly text that `asm.py` reads.

gfx950 came with LLVM 20; an older tool would print instructions that it does not know as data, so it is refused.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from .elf import ElfCodeObject, ElfKernel
from .errors import SimError

OBJDUMP_VARIABLE = "SGLANG_AMD_MONO_LLVM_OBJDUMP"
OLDEST_LLVM = 20
TOOL = "llvm-objdump"
ROCM_FOLDER = "llvm/bin"
TIMEOUT_S = 120
INSTALL = (
    f"install one (Debian and Ubuntu: `apt-get install llvm-22`, any of llvm-20 and later does), "
    f"or set {OBJDUMP_VARIABLE} to its path"
)

# "	s_nop 0    // 000000002E00: BF800000"
_LINE = re.compile(
    r"^\s+(?P<text>\S.*?)\s*//\s*(?P<address>[0-9A-Fa-f]+):(?P<words>(?:\s+[0-9A-Fa-f]{8})+)(?:\s+<.*>)?$"
)
_BRANCH = re.compile(r"^(s_branch|s_cbranch_\w+)\b|^(s_call_b64)\s")
_COUNTED_FROM_PC = ("s_getpc_b64", "s_setpc_b64", "s_swappc_b64")


def _version(tool: str) -> int | None:
    """Major version of an llvm-objdump; None where it cannot be run or does not say."""
    try:
        done = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"LLVM version (\d+)", done.stdout)
    return int(match.group(1)) if match else None


def _candidates(search: str) -> list[str]:
    """Names of tools in the folders of `search`: those with a version in their name, newest first, then the plain."""
    files = [path.name for folder in search.split(os.pathsep) for path in Path(folder).glob(f"{TOOL}-*")]
    versions = {int(match.group(1)) for match in map(re.compile(rf"{TOOL}-(\d+)").fullmatch, files) if match}
    return [*(f"{TOOL}-{version}" for version in sorted(versions, reverse=True)), TOOL]


def find_objdump() -> str:
    """Path of an llvm-objdump that knows gfx950.

    $SGLANG_AMD_MONO_LLVM_OBJDUMP, else the newest on PATH, or of $ROCM_PATH/llvm/bin, that is of LLVM 20 or newer.
    Raises SimError that says what was found and how to install one.
    """
    named = os.environ.get(OBJDUMP_VARIABLE)
    search = os.pathsep.join(
        [os.environ.get("PATH", ""), str(Path(os.environ.get("ROCM_PATH") or "/opt/rocm") / ROCM_FOLDER)]
    )
    seen = []
    for name in [named] if named else _candidates(search):
        tool = shutil.which(name, path=search)
        version = _version(tool) if tool else None
        if tool and version is not None and version >= OLDEST_LLVM:
            return tool
        if tool:
            seen.append(f"{tool} is of LLVM {version}" if version else f"{tool} does not name an LLVM version")
        elif named:
            seen.append(f"{OBJDUMP_VARIABLE}={named} is not a program")
    raise SimError(
        f"loading an ELF code object needs llvm-objdump of LLVM {OLDEST_LLVM} or newer; "
        f"found {'; '.join(seen) or 'none on PATH'}: {INSTALL}"
    )


def _disassembly(data: bytes) -> list[tuple[int, str, int]]:
    """(address, text, first word) of every instruction of the code sections, in address order."""
    tool = find_objdump()
    with tempfile.NamedTemporaryFile(suffix=".co") as file:
        file.write(data)
        file.flush()
        command = [tool, "-d", "--mcpu=gfx950", "--no-show-raw-insn", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SimError(f"{tool} failed on the code object: {done.stderr.strip()[-1000:]}")
    result = []
    for line in done.stdout.splitlines():
        match = _LINE.match(line)
        if match:
            words = match.group("words").split()
            result.append((int(match.group("address"), 16), " ".join(match.group("text").split()), int(words[0], 16)))
        elif line.startswith(("\t", " ")) and line.strip() and not line.strip().startswith("..."):
            raise SimError(f"{tool} printed a line that is not understood: {line.strip()!r}")
    return result


def _target(address: int, word: int) -> int:
    """Where a branch goes: its signed 16-bit word count is from the next instruction."""
    count = word & 0xFFFF
    return address + 4 + 4 * (count - 0x10000 if count & 0x8000 else count)


def _body(kernel: ElfKernel, following: int | None, lines: list[tuple[int, str, int]]) -> list[str]:
    """Instructions of one kernel with labels at the targets of its branches."""
    own = [line for line in lines if line[0] >= kernel.entry and (following is None or line[0] < following)]
    if not own or own[0][0] != kernel.entry:
        raise SimError(f"kernel {kernel.name}: no instruction at its entry {kernel.entry:#x}")
    ends = [k for k, (_, text, _) in enumerate(own) if text.split()[0] == "s_endpgm"]
    if not ends:
        raise SimError(f"kernel {kernel.name}: no s_endpgm")
    own = own[: ends[-1] + 1]  # behind the last end is padding
    addresses = {address for address, _, _ in own}
    targets: dict[int, str] = {}
    for address, text, word in own:
        if text.startswith("."):
            raise SimError(
                f"kernel {kernel.name}: the disassembler does not know the instruction at {address:#x}: {text}"
            )
        if text.startswith(_COUNTED_FROM_PC):
            raise SimError(
                f"kernel {kernel.name}: {text!r} at {address:#x}: addresses counted from the program counter are not "
                "implemented for ELF code objects"
            )
        if _BRANCH.match(text):
            target = _target(address, word)
            if target not in addresses:
                raise SimError(
                    f"kernel {kernel.name}: {text!r} at {address:#x} goes to {target:#x}, outside the kernel"
                )
            targets[target] = f".L_{target:x}"
    result = []
    for address, text, word in own:
        if address in targets:
            result.append(f"{targets[address]}:")
        if _BRANCH.match(text):
            head = text.rsplit(None, 1)[0]
            text = f"{head} {targets[_target(address, word)]}"
        result.append(f"\t{text} // {address:012X}")
    return result


def _metadata(kernels: list[ElfKernel]) -> list[str]:
    """The `.amdgpu_metadata` block: what `asm.py` reads, numbers from the descriptor where the hardware takes them."""
    result = ["\t.amdgpu_metadata", "---", "amdhsa.kernels:"]
    for kernel in kernels:
        info, own = kernel.metadata, kernel.directives
        result.append(f"  - .name: {kernel.name}")

        def larger(key: str, directive: str, info: dict = info, own: dict[str, int] = own) -> int:
            # Hand-written code objects leave one of the two 0.
            return max(int(info.get(key, 0)), own[directive])

        numbers = {
            ".kernarg_segment_size": larger(".kernarg_segment_size", "kernarg_size"),
            ".group_segment_fixed_size": larger(".group_segment_fixed_size", "group_segment_fixed_size"),
            ".private_segment_fixed_size": larger(".private_segment_fixed_size", "private_segment_fixed_size"),
            ".vgpr_count": own["next_free_vgpr"],
            ".agpr_count": max(0, own["next_free_vgpr"] - own["accum_offset"]),
            ".sgpr_count": own["next_free_sgpr"],
            ".vgpr_spill_count": int(info.get(".vgpr_spill_count", 0)),
            ".sgpr_spill_count": int(info.get(".sgpr_spill_count", 0)),
            ".max_flat_workgroup_size": int(info.get(".max_flat_workgroup_size", 0)),
        }
        result += [f"    {key}: {value}" for key, value in numbers.items()]
        result.append("    .args:")
        for arg in info.get(".args", []):
            result += [
                f"      - .offset: {int(arg['.offset'])}",
                f"        .size: {int(arg['.size'])}",
                f"        .value_kind: {arg.get('.value_kind', '')}",
                f"        .name: {arg.get('.name', '')}",
            ]
    return [*result, "\t.end_amdgpu_metadata"]


def assembly_text(data: bytes) -> str:
    """Assembly text, as LLVM would have printed it, of the kernels of an ELF code object for gfx950.

    Branch targets become labels; behind each instruction stands its address. Raises SimError for a file that is no
    gfx950 code object, without a disassembler (see `find_objdump`), and for a kernel that takes addresses from the
    program counter.
    """
    elf = ElfCodeObject(data)
    lines = _disassembly(data)
    entries = sorted(kernel.entry for kernel in elf.kernels)
    result = ["\t.text"]
    for kernel in elf.kernels:
        following = next((entry for entry in entries if entry > kernel.entry), None)
        result += [f"\t.type {kernel.name},@function", f"{kernel.name}:", *_body(kernel, following, lines)]
        result.append(f"\t.amdhsa_kernel {kernel.name}")
        result += [f"\t\t.amdhsa_{name} {value}" for name, value in kernel.directives.items()]
        result.append("\t.end_amdhsa_kernel")
    return "\n".join([*result, *_metadata(elf.kernels)]) + "\n"
