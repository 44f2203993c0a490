# SPDX-License-Identifier: Apache-2.0
"""Finds the SGLang names that a Python source reads, so that an undeclared one can turn a test red."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MODULE_PATH = re.compile(r"^sglang(\.\w+)+$")


def is_module(root: Path, dotted: str) -> bool:
    """Whether `sglang.a.b` is a module below the folder of the sglang package."""
    base = root.joinpath(*dotted.split(".")[1:])
    return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()


def imported_names(source: str, root: Path) -> list[tuple[int, str, str]]:
    """(line, module, name) of every SGLang name that the source imports, names by path in a string, or reads from an
    imported SGLang module. `name` is empty where only the module itself is named."""
    tree = ast.parse(source)
    found: list[tuple[int, str, str]] = []
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "sglang":
                    found.append((node.lineno, alias.name, ""))
                    if alias.asname:
                        aliases[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "sglang":
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                if is_module(root, module):
                    found.append((node.lineno, module, ""))
                    aliases[alias.asname or alias.name] = module
                else:
                    found.append((node.lineno, node.module, alias.name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE_PATH.match(node.value):
            module, _, name = node.value.rpartition(".")
            if is_module(root, node.value):
                found.append((node.lineno, node.value, ""))
            elif is_module(root, module):
                found.append((node.lineno, module, name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            module = aliases[node.value.id]
            if not is_module(root, f"{module}.{node.attr}"):
                found.append((node.lineno, module, node.attr))
    return found


def undeclared_imports(
    source: str, root: Path, declared: dict[str, tuple[str, ...]], groups: Iterable[str]
) -> list[str]:
    """SGLang names that no declaration covers. `groups`: entry-point groups, which look like module paths."""
    tops = {module: {n.partition("(")[0].split(".")[0] for n in names} for module, names in declared.items()}
    wrong = []
    for line, module, name in imported_names(source, root):
        if module in groups:
            continue
        if module not in tops or (name and name not in tops[module]):
            wrong.append(f"line {line}: {module}{': ' + name if name else ''}")
    return wrong


def attributes_read(source: str) -> list[tuple[int, str]]:
    """(line, attribute) of every attribute access, with `getattr(x, "name")` and `hasattr` counted as one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.append((node.lineno, node.attr))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            found.append((node.lineno, str(node.args[1].value)))
    return found


def own_names(sources: Iterable[str]) -> set[str]:
    """Names that the package itself defines: functions, classes, fields, and attributes set on `self`."""
    names: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for part in ast.walk(target):
                        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                            names.add(part.id)
                        elif isinstance(part, ast.Attribute) and getattr(part.value, "id", "") == "self":
                            names.add(part.attr)
            elif isinstance(node, ast.alias):
                names.add((node.asname or node.name).rpartition(".")[2])
    return names


def library_names(*objects: Any) -> set[str]:
    """Attributes of Python's own types and of the given objects (modules, classes)."""
    kinds = [getattr(builtins, n) for n in dir(builtins) if isinstance(getattr(builtins, n), type)]
    return {name for thing in (*kinds, *objects) for name in dir(thing)}


def package_root() -> Path:
    """The folder of the package under test."""
    spec = importlib.util.find_spec("sgl_amd_mono")
    return Path(next(iter(spec.submodule_search_locations)))
