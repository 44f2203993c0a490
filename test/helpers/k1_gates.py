# SPDX-License-Identifier: Apache-2.0
"""K1's gates: what a run must have written, against the definition or against another run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from helpers.k1_inputs import JUNK, K1Case, run
from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn_naive import GdnTrace

# Multiples of the noise floor (`helpers.noise`), which is given beside each.
CORE_REL_L2 = 1e-3  # of a launch, and of a row given its products: 25 times 4e-5, one or two elements of o or core
CORE_COSINE = 0.999999  # 1 - cosine: once the floor of 1e-6
# Of a row, given its products: 330 times 3e-8 (on the other side of a bf16 step one v gives 1e-6, one k, which all
# value heads of its key head take, 3e-6), 100 times 1e-5.
STATE_REL_L2 = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
# Of a row of a verify step: one k on the other side of a bf16 step gives 1e-5, and with more tokens there is one.
VERIFY_STATE_REL_L2 = 5e-5
PRODUCT_REL_L2 = 2e-3  # of a row: room for one x that falls to the other side of a bf16 step, which is the floor
DEVICE_HOPS = 2  # at every width, also where a wave has units of several rows
OUTPUTS = ("core", "residual", "conv", "ssm")
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits (NaNs compare equal to themselves)."""
    return tensor.contiguous().view(BITS[tensor.dtype])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit."""
    return torch.equal(bits(a), bits(b))


def relative_l2(value: Tensor, reference: Tensor) -> Tensor:
    """Per row."""
    value, reference = value.double().flatten(1), reference.double().flatten(1)
    return (value - reference).norm(dim=1) / reference.norm(dim=1)


@dataclass
class Before:
    """A case before its launch: copies of the pools, and the definition's result."""

    conv: Tensor
    ssm: Tensor
    trace: GdnTrace

    @classmethod
    def of(cls, case: K1Case) -> Before:
        return cls(case.conv_state.clone(), case.ssm_state.clone(), case.naive())

    def given_products(self, case: K1Case) -> GdnTrace:
        """The definition's result from the launch's own products and the pools as they were."""
        return dataclasses.replace(case, conv_state=self.conv, ssm_state=self.ssm).naive(case.products())


def core_errors(core: Tensor, want: Tensor) -> tuple[float, float]:
    """(largest relative L2, smallest cosine) over the rows."""
    core, want = core.double(), want.double()
    cosine = torch.nn.functional.cosine_similarity(core, want, dim=1)
    return float(relative_l2(core, want).max()), float(cosine.min())


def failures(case: K1Case, before: Before) -> list[str]:
    """Gates that the launch's outputs do not pass, in words; empty when all pass.

    End to end (one figure a launch), and row by row given the launch's own products: one product that falls to the
    other side of a bf16 step moves the core of a row by up to 2e-3.
    """
    out = []
    trace, core = before.trace, case.gated_core()
    live = torch.nonzero(trace.live).flatten().tolist()
    if not same_bits(case.residual_out, trace.residual_out):
        out.append(f"residual_out: {int((bits(case.residual_out) != bits(trace.residual_out)).sum())} elements differ")
    if live:
        own = before.given_products(case)
        for name, found, want in (
            ("core", core[live].reshape(1, -1), trace.core[live].reshape(1, -1)),
            ("core given the products, by row", core[live], own.core[live]),
        ):
            error, cosine = core_errors(found, want)
            if not error <= CORE_REL_L2:
                out.append(f"{name}: relative L2 {error:.3g} > {CORE_REL_L2}")
            if not cosine >= CORE_COSINE:
                out.append(f"{name}: cosine {cosine:.9f} < {CORE_COSINE}")
        products = zip(("in_proj_qkvz", "in_proj_ba"), case.products(), (trace.proj, trace.ba), strict=True)
        for name, got, want in products:
            error = relative_l2(got[live], want[live])
            if not bool((error <= PRODUCT_REL_L2).all()):
                out.append(f"{name}: relative L2 {error.max():.3g} > {PRODUCT_REL_L2}")
        conv, ssm = case.states_after(live)
        want = own.ssm_rows[live].to(torch.float32).to(case.ssm_state.dtype)
        error = relative_l2(ssm, want)
        bound = STATE_REL_L2[want.dtype]
        if case.key.draft_tokens:
            bound = max(bound, VERIFY_STATE_REL_L2)
        if not bool((error <= bound).all()):
            out.append(f"SSM state: relative L2 {error.max():.3g} > {bound}")
        if not same_bits(conv, own.conv_rows[live]):
            out.append("conv state: not the shifted window and the new products")
    for row in torch.nonzero(~trace.live).flatten().tolist():
        if not same_bits(core[row], torch.zeros_like(core[row])):
            out.append(f"core: pad row {row} is not zero")
    if case.key.draft_tokens:  # states are only read, and so are the guard places of the draft states
        out += untouched(case, before)
        named = {int(case.draft_index[t // case.key.tokens]) for t in live}
        for place in set(range(len(case.draft_ssm))) - named:
            if not all(bool((drafts[place] == JUNK).all()) for drafts in (case.draft_conv, case.draft_ssm)):
                out.append(f"draft states of place {place} changed")
    else:
        out += untouched(case, before, {int(case.state_index[t]) for t in live})
    return out


def untouched(case: K1Case, before: Before, named: set[int] = frozenset()) -> list[str]:
    """Slots outside `named` whose bits changed, in words."""
    out = []
    for slot in range(len(before.ssm)):
        if slot not in named:
            if not same_bits(case.ssm_state[slot], before.ssm[slot]):
                out.append(f"SSM state of slot {slot} changed")
            if not same_bits(case.conv_state[slot], before.conv[slot]):
                out.append(f"conv state of slot {slot} changed")
    return out


def nothing_written(case: K1Case, before: Before) -> list[str]:
    """What a launch wrote although it had to leave at once."""
    out = untouched(case, before)
    for name in ("core", "residual_out", "core_z", "core_squares"):
        tensor = getattr(case, name)
        if tensor is not None and not bool((tensor == JUNK).all()):
            out.append(f"{name} was written")
    return out


def report(case: K1Case, before: Before) -> str:
    """Figures of one comparison, for a log."""
    trace, own, core = before.trace, before.given_products(case), case.gated_core()
    live = torch.nonzero(trace.live).flatten().tolist()
    if not live:
        return "pad rows only"
    equal = (bits(core[live]) == bits(trace.core[live])).double().mean()
    ssm = relative_l2(case.states_after(live)[1], trace.ssm_rows[live])
    return (
        f"core rel L2 {core_errors(core[live].reshape(1, -1), trace.core[live].reshape(1, -1))[0]:.2e} "
        f"(worst row {core_errors(core[live], trace.core[live])[0]:.2e}, given the products "
        f"{core_errors(core[live], own.core[live])[0]:.2e}), {100 * equal:.3f} % equal; SSM rel L2 {ssm.max():.2e}"
    )


def checked(case: K1Case, **how: object) -> None:
    """Run once and hold the gates."""
    before = Before.of(case)
    result = run(case, **how)
    print(report(case, before))
    assert result.longest_device_hops <= (1 if case.key.one_hop else DEVICE_HOPS) and result.longest_cross_hops == 0
    assert not failures(case, before)
    assert not case.fault.failed


def outputs_by_row(case: K1Case) -> list[tuple[Tensor, ...]]:
    """What a launch left for each row, in the order of OUTPUTS: core, residual, conv slot, SSM slot."""
    slots = case.state_index.long().clamp(min=0)
    return [
        (case.core[t].clone(), case.residual_out[t].clone(), case.conv_state[s].clone(), case.ssm_state[s].clone())
        for t, s in enumerate(slots.tolist())
    ]


def select_rows(case: K1Case, rows: list[int]) -> K1Case:
    """A case of some rows of another one (fresh copies of the pools)."""
    return dataclasses.replace(
        case,
        key=dataclasses.replace(case.key, width=len(rows)),
        hidden=case.hidden[rows].clone(),
        residual=None if case.residual is None else case.residual[rows].clone(),
        state_index=case.state_index[rows].clone(),
        conv_state=case.conv_state.clone(),
        ssm_state=case.ssm_state.clone(),
    )


def same_beside_any_rows(case: K1Case, widths: tuple[int, ...]) -> None:
    """A row of the case's eight, alone and beside any other rows, at every width and place: the same bits."""
    whole = select_rows(case, list(range(8)))
    run(whole)
    want = outputs_by_row(whole)
    for width in widths:
        rows = [7, 2, 5, 0, 6, 1, 3, 4][:width] if width % 2 else [4, 0, 2, 7, 1, 3, 5, 6][-width:]
        part = select_rows(case, rows)
        run(part)
        for place, row in enumerate(rows):
            for name, a, b in zip(OUTPUTS, outputs_by_row(part)[place], want[row], strict=True):
                assert same_bits(a, b), f"width {width}, row {row} at place {place}: {name} differs"
