# SPDX-License-Identifier: Apache-2.0
"""gfx950 assembly text as LLVM prints it: instructions, labels, kernel descriptors and metadata."""

from __future__ import annotations

import dataclasses
import re

from .errors import SimError


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction. index: its place in the program; line: 1-based line of the text; text: without comment."""

    index: int
    line: int
    text: str
    mnemonic: str


@dataclasses.dataclass(frozen=True)
class KernelArg:
    """One entry of `.args`: offset and size in bytes; kind is the `.value_kind`; name is empty where the compiler gives
    none."""

    name: str
    offset: int
    size: int
    kind: str


@dataclasses.dataclass
class KernelText:
    """What the text says of one kernel."""

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]  # label -> instruction index
    directives: dict[str, str]  # .amdhsa_* without the prefix
    metadata: dict[str, str]
    args: list[KernelArg]
    lds_symbols: dict[str, tuple[int, int]]  # name -> (size, alignment)
    symbols: dict[str, str]  # .set


_LABEL = re.compile(r"^([A-Za-z_.$][\w.$@]*):")
_MNEMONIC = re.compile(r"^[a-z][a-z0-9_]*$")


def _strip_comment(line: str) -> str:
    for mark in (";", "//"):
        at = line.find(mark)
        if at >= 0:
            line = line[:at]
    return line.strip()


def _parse_metadata(text: str) -> tuple[list[dict[str, str]], list[list[dict[str, str]]]]:
    """The kernels of `.amdgpu_metadata`: their plain keys and their `.args`. A reader of just this YAML, not of
    YAML."""
    kernels: list[dict[str, str]] = []
    args: list[list[dict[str, str]]] = []
    inside = in_args = False
    kernel_indent = -1
    args_indent = -1
    for raw in text.splitlines():
        line = raw.rstrip()
        if not line.strip() or line.strip() in ("---", "..."):
            continue
        if not line.startswith((" ", "-")):
            inside = line.startswith("amdhsa.kernels:")
            in_args = False
            continue
        if not inside:
            continue
        body = line.lstrip()
        indent = len(line) - len(body)
        fresh = body.startswith("- ")
        if fresh:
            body = body[2:].lstrip()
        if fresh and (kernel_indent < 0 or indent <= kernel_indent):
            kernel_indent = indent
            kernels.append({})
            args.append([])
            in_args = False
        elif fresh and in_args and (args_indent < 0 or indent == args_indent):
            args_indent = indent
            args[-1].append({})
        elif not fresh and indent <= kernel_indent + 2:
            in_args = False
        if ":" not in body:
            continue
        key, _, value = body.partition(":")
        key, value = key.strip(), value.strip().strip("'\"")
        if not in_args and key == ".args":
            in_args = True
            args_indent = -1
            continue
        if in_args and args[-1] and indent + (2 if fresh else 0) > kernel_indent + 2:
            args[-1][-1][key] = value
        elif not in_args:
            kernels[-1][key] = value
    return kernels, args


def parse_text(text: str) -> list[KernelText]:
    """All kernels of an assembly text, in its order. Raises SimError where there is none."""
    instructions: dict[str, list[Instruction]] = {}
    labels: dict[str, dict[str, int]] = {}
    directives: dict[str, dict[str, str]] = {}
    functions: set[str] = set()
    symbols: dict[str, str] = {}
    lds: dict[str, tuple[int, int]] = {}
    metadata: list[str] = []
    current: str | None = None
    descriptor: str | None = None
    in_metadata = False
    in_code = True
    for number, raw in enumerate(text.splitlines(), 1):
        if in_metadata:
            if raw.strip() == ".end_amdgpu_metadata":
                in_metadata = False
            else:
                metadata.append(raw)
            continue
        line = _strip_comment(raw)
        if not line:
            continue
        if line.startswith(".amdgpu_metadata"):
            in_metadata = True
            continue
        match = _LABEL.match(line)
        if match:
            name = match.group(1)
            rest = line[match.end() :].strip()
            if name in functions:
                current = name
                instructions[current] = []
                labels[current] = {}
            elif current is not None and in_code:
                labels[current][name] = len(instructions[current])
            if not rest:
                continue
            line = rest
        if line.startswith("."):
            word, _, rest = line.partition(" ") if " " in line else line.partition("\t")
            word, rest = word.strip(), rest.strip()
            if word == ".type" and rest.endswith("@function"):
                functions.add(rest.split(",")[0].strip())
            elif word == ".amdhsa_kernel":
                descriptor = rest
                directives[rest] = {}
            elif word == ".end_amdhsa_kernel":
                descriptor = None
            elif word.startswith(".amdhsa_") and descriptor is not None:
                directives[descriptor][word[len(".amdhsa_") :]] = rest
            elif word in (".section", ".rodata", ".data", ".bss"):
                in_code = rest.startswith(".text")
            elif word == ".text":
                in_code = True
            elif word == ".set":
                name, _, value = rest.partition(",")
                symbols[name.strip()] = value.strip()
            elif word in (".amdgpu_lds", ".lds"):
                parts = [p.strip() for p in rest.split(",")]
                lds[parts[0]] = (int(parts[1], 0), int(parts[2], 0) if len(parts) > 2 else 16)
            continue
        if not in_code or current is None:
            continue
        mnemonic = line.split(None, 1)[0]
        if not _MNEMONIC.match(mnemonic):
            raise SimError(f"line {number}: not an instruction: {raw.strip()}")
        instructions[current].append(Instruction(len(instructions[current]), number, " ".join(line.split()), mnemonic))
    infos, args = _parse_metadata("\n".join(metadata))
    result = []
    for info, arg in zip(infos, args):
        name = info.get(".name", "")
        if name not in instructions:
            raise SimError(f"the metadata names kernel {name!r}, but the text has no function of that name")
        result.append(
            KernelText(
                name,
                instructions[name],
                labels[name],
                directives.get(name, {}),
                info,
                [
                    KernelArg(a.get(".name", ""), int(a[".offset"]), int(a[".size"]), a.get(".value_kind", ""))
                    for a in arg
                ],
                lds,
                symbols,
            )
        )
    if not result:
        raise SimError("no kernel found: the text has no .amdgpu_metadata with amdhsa.kernels")
    return result
