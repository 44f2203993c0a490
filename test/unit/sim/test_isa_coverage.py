# SPDX-License-Identifier: Apache-2.0
"""Every mnemonic that the simulator accepts has an exact-value test, and no test claims a name that does not exist."""

from __future__ import annotations

import importlib

from sgl_amd_mono.sim import mnemonics

MODULES = ("valu", "salu", "compare", "packed", "lanes", "division", "convert", "mfma", "memory", "control")


def _covered() -> dict[str, str]:
    """Mnemonic -> module whose test claims it, by its tables (COVERED) or by @covers (which checks the execution)."""
    found: dict[str, str] = {}
    for name in MODULES:
        module = importlib.import_module(f"unit.sim.test_isa_{name}")
        claims = list(getattr(module, "COVERED", ()))
        for member in vars(module).values():
            claims += getattr(member, "covered_mnemonics", ())
        for mnemonic in claims:
            found.setdefault(mnemonic, name)
    return found


def test_every_supported_instruction_has_a_test() -> None:
    missing = sorted(set(mnemonics()) - set(_covered()))
    assert not missing, f"{len(missing)} instructions without an exact-value test: {missing}"


def test_no_test_claims_an_unknown_instruction() -> None:
    unknown = sorted(set(_covered()) - set(mnemonics()))
    assert not unknown, f"tests claim instructions that the simulator does not accept: {unknown}"
