# SPDX-License-Identifier: Apache-2.0
"""The order in which the stand-ins add float32 products, and how to change it.

The logit noise of a model is what its logits move by when nothing changes but that order. Every stand-in adds over its
last dimension through this module, so that one seed re-orders all sums of a run alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

RUN = 16
"""Terms that stay neighbours in another order: whole cache lines are copied."""

_seed: int | None = None
_permutations: dict[int, torch.Tensor] = {}


@contextmanager
def reordered(seed: int | None) -> Iterator[None]:
    """Inside, every sum over n terms takes them in the seeded permutation of n; None keeps the plain order."""
    global _seed
    before, _seed = _seed, seed
    _permutations.clear()
    try:
        yield
    finally:
        _seed = before
        _permutations.clear()


def order() -> int | None:
    """The seed of the order that holds now; None: the plain one."""
    return _seed


def _ordered(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if _seed is None:
        return operands
    terms = operands[0].shape[-1]
    run = RUN if terms % RUN == 0 else 1
    permutation = _permutations.get(terms)
    if permutation is None:
        generator = torch.Generator().manual_seed(_seed * 1_000_003 + terms)
        permutation = torch.randperm(terms // run, generator=generator)
        _permutations[terms] = permutation
    return tuple(operand.unflatten(-1, (-1, run)).index_select(-2, permutation).flatten(-2) for operand in operands)


def add(values: torch.Tensor) -> torch.Tensor:
    """Float32 sum over the last dimension."""
    (values,) = _ordered(values)
    return values.float().sum(-1)


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Float32 ``x [.., K] @ weight [N, K]^T``, whatever the operands' types: products exact, sums in float32."""
    x, weight = _ordered(x, weight)
    return torch.nn.functional.linear(x.float(), weight.float())
