# SPDX-License-Identifier: Apache-2.0
"""Another value in an attribute's place for the duration of a call. Knows neither torch nor SGLang."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside; modules keep their registered children."""
    before = getattr(owner, name)
    registered = name in getattr(owner, "_modules", {})
    if registered:
        del owner._modules[name]
    owner.__dict__[name] = value
    try:
        yield
    finally:
        del owner.__dict__[name]
        if registered:
            owner._modules[name] = before
