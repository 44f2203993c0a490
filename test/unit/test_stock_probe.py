# SPDX-License-Identifier: Apache-2.0
"""The probe of SGLang's packed decode: what it finds of kernels that round beta, do not, or do something else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sgl_amd_mono.common.stock_probe import LEAST_GAP, ProbeError, rounds_beta, telling_inputs, verify_rounds_beta
from sgl_amd_mono.simulate import gdn_standin

CPU = torch.device("cpu")


def leaving(beta_of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    """A packed decode that leaves `beta_of(b)` along the first key column."""

    def decode(*, b: torch.Tensor, initial_state: torch.Tensor, ssm_state_indices: torch.Tensor, **unused: object):
        initial_state[ssm_state_indices.long(), :, :, 0] = beta_of(b.float())[:, :, None]

    return decode


@pytest.mark.parametrize("heads", [1, 16, 48])
def test_it_tells_the_two_forms_apart(heads: int) -> None:
    assert rounds_beta(1, heads, 128, CPU, leaving(lambda b: torch.sigmoid(b).bfloat16().float())) is True
    assert rounds_beta(1, heads, 128, CPU, leaving(torch.sigmoid)) is False
    # the noise of float32 and of an approximated exponential is allowed for
    assert rounds_beta(1, heads, 128, CPU, leaving(lambda b: torch.sigmoid(b) * (1 + 2e-6))) is False


@pytest.mark.parametrize(
    "beta_of",
    [
        lambda b: torch.sigmoid(b) * 2,
        lambda b: torch.full_like(b, float("nan")),
        lambda b: (torch.sigmoid(b) + torch.sigmoid(b).bfloat16().float()) / 2,
        # a kernel that rounds in some heads only
        lambda b: torch.where(torch.arange(b.shape[1]) % 2 == 0, torch.sigmoid(b), torch.sigmoid(b).bfloat16().float()),
    ],
)
def test_another_form_is_refused_with_what_was_found(beta_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(ProbeError, match=r"found beta .* at b = .*; needed: beta = sigmoid\(b\).*; fix: sglang 0.5.23"):
        rounds_beta(2, 16, 128, CPU, leaving(beta_of))


def test_a_kernel_that_does_not_run_is_refused_with_its_error() -> None:
    def decode(**unused: object) -> None:
        raise ValueError("no such argument")

    with pytest.raises(ProbeError, match=r"does not run on cpu \(ValueError: no such argument\)"):
        rounds_beta(2, 16, 128, CPU, decode)


def test_what_stands_in_for_the_kernel_without_a_gpu_rounds() -> None:
    assert rounds_beta(2, 16, 128, CPU, gdn_standin.packed_decode) is True


def test_the_verify_kernel_is_asked_alike() -> None:
    def update(*, b: torch.Tensor, intermediate_states_buffer: torch.Tensor, **unused: object) -> None:
        intermediate_states_buffer[1, 0, :, :, 0] = torch.sigmoid(b.float())[0][:, None]

    assert verify_rounds_beta(2, 16, 128, CPU, update) is False
    with pytest.raises(ProbeError, match=r"verify kernel.*does not run on cpu"):
        verify_rounds_beta(2, 16, 128, CPU, lambda: None)


def test_every_input_tells() -> None:
    b = telling_inputs(64)
    beta = torch.sigmoid(b.double())
    assert ((beta.bfloat16().double() - beta).abs() >= LEAST_GAP * beta).all()
    assert len(b.unique()) > 16
