# SPDX-License-Identifier: Apache-2.0
"""Functional simulator of gfx950 machine code: executes the instructions that FlyDSL and Triton emit, on a CPU."""

from __future__ import annotations

from .asm import Instruction, KernelArg
from .code import CodeObject
from .decode import mnemonics
from .errors import SimError, SimFault, Waiting
from .faults import DelayStores, DropStores, Stall, Starve
from .machine import Launch, Machine
from .report import LaunchReport, Report

__all__ = [
    "CodeObject", "DelayStores", "DropStores", "Instruction", "KernelArg", "Launch", "LaunchReport", "Machine",
    "Report", "SimError", "SimFault", "Stall", "Starve", "Waiting", "mnemonics",
]  # fmt: skip
