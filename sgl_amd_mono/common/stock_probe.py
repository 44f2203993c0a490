# SPDX-License-Identifier: Apache-2.0
"""Which roundings the installed SGLang takes where its releases differ: found by a probe, once, when a server starts.

SGLang 0.5.23's packed decode kernel of the gated delta rule rounds beta = sigmoid(b) to bf16; its verify kernel does
not, and other releases may differ. A K1 that rounds where SGLang does not (or the other way round) moves the SSM state
by about 2e-3, so the answer is a field of K1's build key.

The probe calls the very function that SGLang's GDN layers call in this process, where the model is: on a GPU its Triton
kernel, on a machine without one whatever stands there for it. The input makes beta visible: an empty state, one key of
length 1 and a value of 1 leave beta itself in the state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sgl_amd_mono.common import state
from sgl_amd_mono.common.refusals import reason

Decode = Callable[..., object]

DECODE = "SGLang's packed decode of the gated delta rule"
VERIFY = "SGLang's verify kernel of the gated delta rule"

#: A beta is used for the probe only if bf16 moves it by at least this much: half of the largest that it can.
LEAST_GAP = 2.0**-10

#: How near the found beta has to be to a candidate, of the gap between the two.
NEAR = 1 / 8


class ProbeError(RuntimeError):
    """SGLang's kernel computes something that is neither of the known forms."""


def telling_inputs(count: int) -> torch.Tensor:
    """`count` different values of b (bf16) whose sigmoid bf16 moves by at least `LEAST_GAP` of it."""
    b = torch.arange(-3.0, 3.0, 2.0**-5, dtype=torch.float64).bfloat16()
    beta = torch.sigmoid(b.double())
    gap = (beta.bfloat16().double() - beta).abs() / beta
    found = b[gap >= LEAST_GAP]
    return found[torch.arange(count) % len(found)]


def rounds_beta(
    key_heads: int, value_heads: int, head_dim: int, device: torch.device, decode: Decode | None = None
) -> bool:
    """Whether SGLang's packed decode of the gated delta rule rounds beta to bf16.

    Args:
        key_heads, value_heads, head_dim: of the model on this rank, so that the kernel built here is the one that
            SGLang's own steps use.
        device: where the model is.
        decode: the packed decode; default: the one that SGLang's GDN layers call.

    Raises:
        ProbeError: the kernel does not run, or what it leaves is neither sigmoid(b) nor its bf16 rounding.
    """
    decode = state.packed_decode() if decode is None else decode
    b = telling_inputs(value_heads)
    key_width, value_width = key_heads * head_dim, value_heads * head_dim
    mixed = torch.zeros(1, 2 * key_width + value_width, dtype=torch.bfloat16)
    mixed[:, : 2 * key_width : head_dim] = 1  # every q and k is the first unit vector
    mixed[:, 2 * key_width :] = 1
    ssm = torch.zeros(2, value_heads, head_dim, head_dim)  # slot 0 is SGLang's reserved one
    zeros = torch.zeros(value_heads)
    try:
        ssm = ssm.to(device)
        decode(
            mixed_qkv=mixed.to(device),
            a=zeros[None].bfloat16().to(device),
            b=b[None].to(device),
            A_log=zeros.to(device),
            dt_bias=zeros.bfloat16().to(device),
            scale=1.0,
            initial_state=ssm,
            out=torch.empty(1, 1, value_heads, head_dim, dtype=torch.bfloat16, device=device),
            ssm_state_indices=torch.ones(1, dtype=torch.int32, device=device),
            use_qk_l2norm_in_kernel=True,
        )
        found = ssm[1, :, 0, 0].double().cpu()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise ProbeError(_reason(DECODE, f"does not run on {device} ({text})")) from error
    return _verdict(DECODE, found, b)


def verify_rounds_beta(
    key_heads: int, value_heads: int, head_dim: int, device: torch.device, update: Decode | None = None
) -> bool:
    """`rounds_beta` of the kernel that runs SGLang's verify steps, `fused_sigmoid_gating_delta_rule_update`.

    It is called in its verify form, with one token: the state behind the token goes to a buffer.
    """
    update = state.verify_update() if update is None else update
    b = telling_inputs(value_heads)
    unit = torch.zeros(1, 1, key_heads, head_dim, dtype=torch.bfloat16)
    unit[..., 0] = 1
    zeros, one = torch.zeros(value_heads), torch.ones(1, dtype=torch.int32)
    try:
        behind = torch.zeros(2, 1, value_heads, head_dim, head_dim, device=device)
        update(
            A_log=zeros.to(device),
            a=zeros[None].bfloat16().to(device),
            dt_bias=zeros.bfloat16().to(device),
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=unit.to(device),
            k=unit.to(device),
            v=torch.ones(1, 1, value_heads, head_dim, dtype=torch.bfloat16, device=device),
            b=b[None].to(device),
            initial_state_source=torch.zeros_like(behind[:, 0]),
            initial_state_indices=one.to(device),
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32, device=device),
            use_qk_l2norm_in_kernel=True,
            disable_state_update=True,
            intermediate_states_buffer=behind,
            intermediate_state_indices=one.to(device),
            cache_steps=1,
        )
        found = behind[1, 0, :, 0, 0].double().cpu()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise ProbeError(_reason(VERIFY, f"does not run on {device} ({text})")) from error
    return _verdict(VERIFY, found, b)


def _verdict(kernel: str, found: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the betas that a kernel left are the rounded ones."""
    exact = torch.sigmoid(b.double())
    near_exact, near_rounded = (_near(found, exact, candidate) for candidate in (exact, exact.bfloat16().double()))
    if near_exact == near_rounded:
        raise ProbeError(_reason(kernel, f"beta {found[0]:.9g} at b = {b[0]:.9g}, where sigmoid(b) is {exact[0]:.9g}"))
    return near_rounded


def _near(found: torch.Tensor, exact: torch.Tensor, candidate: torch.Tensor) -> bool:
    return bool(((found - candidate).abs() <= NEAR * LEAST_GAP * exact).all())


def _reason(kernel: str, found: str) -> str:
    return reason(
        kernel,
        found,
        "beta = sigmoid(b), in float32 or rounded to bf16",
        "sglang 0.5.23, or start without --enable-amd-monokernel",
    )
