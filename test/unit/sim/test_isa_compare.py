# SPDX-License-Identifier: Apache-2.0
"""Vector compares: every operation, type and form; lanes that are off give 0; v_cmpx also writes EXEC."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.isa import ALL_LANES, DOUBLES, FLOATS, HALVES, INTEGERS, LANES, PARTIAL_EXEC, cross, registers, run
from helpers.isa_reference import F16, F32, F64, M16, M32, M64, Format, order, signed

INTEGER_TESTS: dict[str, Callable[[int, int], bool]] = {
    "f": lambda a, b: False,
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
    "t": lambda a, b: True,
}
# Each from the relation of two numbers (-1, 0, 1) or None where one is a NaN.
FLOAT_TESTS: dict[str, Callable[[int | None], bool]] = {
    "f": lambda r: False,
    "lt": lambda r: r == -1,
    "eq": lambda r: r == 0,
    "le": lambda r: r in (-1, 0),
    "gt": lambda r: r == 1,
    "lg": lambda r: r in (-1, 1),
    "ge": lambda r: r in (0, 1),
    "o": lambda r: r is not None,
    "u": lambda r: r is None,
    "nge": lambda r: r in (-1, None),
    "nlg": lambda r: r in (0, None),
    "ngt": lambda r: r in (-1, 0, None),
    "nle": lambda r: r in (1, None),
    "neq": lambda r: r != 0,
    "nlt": lambda r: r in (0, 1, None),
    "tru": lambda r: True,
}
LONGS = (0, 1, M32, 0x100000000, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, M64, 0x123456789ABCDEF0)
INTEGER_TYPES = {
    "u32": (INTEGERS, lambda x: x),
    "i32": (INTEGERS, signed),
    "u16": (tuple(x & M16 for x in INTEGERS), lambda x: x),
    "i16": (tuple(x & M16 for x in INTEGERS), lambda x: signed(x, 16)),
    "u64": (LONGS, lambda x: x),
    "i64": (LONGS, lambda x: signed(x, 64)),
}
FLOAT_TYPES: dict[str, tuple[tuple[int, ...], Format]] = {
    "f32": (FLOATS, F32),
    "f16": (HALVES, F16),
    "f64": (DOUBLES, F64),
}
FORMS = ("v_cmp", "v_cmpx")
CLASS_BITS = ("sNaN", "qNaN", "-inf", "-normal", "-denormal", "-0", "+0", "+denormal", "+normal", "+inf")

COVERED = tuple(
    f"{form}_{test}_{kind}"
    for form in FORMS
    for tests, kinds in ((INTEGER_TESTS, INTEGER_TYPES), (FLOAT_TESTS, FLOAT_TYPES))
    for test in tests
    for kind in kinds
) + tuple(f"{form}_class_{kind}" for form in FORMS for kind in FLOAT_TYPES)


def _relation(fmt: Format, a: int, b: int) -> int | None:
    if fmt.is_nan(a) or fmt.is_nan(b):
        return None
    x, y = order(fmt, a)[0], order(fmt, b)[0]  # the key's first part: -0 equals +0
    return (x > y) - (x < y)


def _masks(name: str, columns: list[np.ndarray], words: int, exec_mask: int) -> tuple[np.ndarray, np.ndarray]:
    """(mask, EXEC) after the compare, one value a wave; the 64-bit forms go to an SGPR pair, the others to VCC."""
    v: dict[int, object] = {}
    texts = []
    for i, column in enumerate(columns):
        width = words if i == 0 or "class" not in name else 1
        v[20 + 2 * i] = (column & column.dtype.type(M32)).astype(np.uint32)
        if width == 2:
            v[21 + 2 * i] = (column.astype(np.uint64) >> np.uint64(32)).astype(np.uint32)
        texts.append(registers("v", 20 + 2 * i, width))
    scalar_target = words == 2
    target = "s[30:31]" if scalar_target else "vcc"
    out = run(
        [f"{name} {target}, {', '.join(texts)}"], v=v, out_s=[30, 31] if scalar_target else [], exec_mask=exec_mask
    )
    if scalar_target:
        return out.s["s30"].astype(np.uint64) | out.s["s31"].astype(np.uint64) << np.uint64(32), out.exec
    return out.vcc, out.exec


def _check(name: str, columns: list[np.ndarray], words: int, want: list[bool]) -> None:
    for exec_mask in (ALL_LANES, PARTIAL_EXEC):
        masks, execs = _masks(name, columns, words, exec_mask)
        for wave, mask in enumerate(masks.tolist()):
            expected = sum(int(x) << n for n, x in enumerate(want[LANES * wave : LANES * wave + LANES])) & exec_mask
            assert mask == expected, f"{name}, wave {wave}: {mask:#x}, expected {expected:#x}"
            assert int(execs[wave]) == (expected if "cmpx" in name else exec_mask), f"{name}: EXEC"


@pytest.mark.parametrize("kind", INTEGER_TYPES)
@pytest.mark.parametrize("form", FORMS)
def test_integer_compares(form: str, kind: str) -> None:
    values, decode = INTEGER_TYPES[kind]
    columns = cross(values, values)
    pairs = [(decode(int(a)), decode(int(b))) for a, b in zip(*columns, strict=True)]
    inputs = [c | 0xBEEF0000 for c in columns] if kind.endswith("16") else columns
    for test, function in INTEGER_TESTS.items():
        _check(f"{form}_{test}_{kind}", inputs, 2 if kind.endswith("64") else 1, [function(a, b) for a, b in pairs])


@pytest.mark.parametrize("kind", FLOAT_TYPES)
@pytest.mark.parametrize("form", FORMS)
def test_float_compares(form: str, kind: str) -> None:
    values, fmt = FLOAT_TYPES[kind]
    columns = cross(values, values)
    relations = [_relation(fmt, int(a), int(b)) for a, b in zip(*columns, strict=True)]
    for test, function in FLOAT_TESTS.items():
        _check(f"{form}_{test}_{kind}", columns, 2 if kind == "f64" else 1, [function(r) for r in relations])


def _class(fmt: Format, a: int) -> str:
    if fmt.is_nan(a):
        return "qNaN" if a >> (fmt.mbits - 1) & 1 else "sNaN"
    sign = "-" if fmt.negative(a) else "+"
    if fmt.is_infinite(a):
        return sign + "inf"
    if fmt.magnitude(a) == 0:
        return sign + "0"
    return sign + ("denormal" if fmt.is_denormal(a) else "normal")


@pytest.mark.parametrize("kind", FLOAT_TYPES)
@pytest.mark.parametrize("form", FORMS)
def test_float_classes(form: str, kind: str) -> None:
    values, fmt = FLOAT_TYPES[kind]
    columns = cross(values, (*(1 << n for n in range(10)), 0, 0x3FF, 0x264))
    want = [bool(int(m) >> CLASS_BITS.index(_class(fmt, int(a))) & 1) for a, m in zip(*columns, strict=True)]
    _check(f"{form}_class_{kind}", columns, 2 if kind == "f64" else 1, want)
