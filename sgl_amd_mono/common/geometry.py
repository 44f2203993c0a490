# SPDX-License-Identifier: Apache-2.0
"""What every model's geometry shares: a frozen dataclass that refuses sizes that do not divide, with the sum."""

from __future__ import annotations

from dataclasses import dataclass


class GeometryError(ValueError):
    """A size that the kernels cannot serve; the message holds the sum that does not come out."""


def require(ok: bool, message: str) -> None:
    """Raise GeometryError(message) unless `ok`."""
    if not ok:
        raise GeometryError(message)


def divide(what: str, a: int, b: int) -> int:
    """a / b, or GeometryError naming `what` and the sum where b does not divide a."""
    require(b > 0, f"{what}: {a} / {b}: the divisor must be positive")
    require(a % b == 0, f"{what}: {a} / {b} = {a // b} remainder {a % b}, must divide")
    return a // b


@dataclass(frozen=True)
class BaseGeometry:
    """Base of a model's sizes; `check` runs when an instance is made."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise GeometryError where a size does not fit the launches."""
        raise NotImplementedError
