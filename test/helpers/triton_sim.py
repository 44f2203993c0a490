# SPDX-License-Identifier: Apache-2.0
"""Runs Triton kernels on the simulator: a Triton driver for a gfx950 that is not there, fed with CPU tensors.

``activate()`` makes it Triton's driver; a kernel launched in the usual way (``kernel[grid](...)``) is then compiled
by Triton for gfx950 and its machine code is executed by ``sgl_amd_mono.sim``. Nothing in Triton is patched. Activate
it before anything asks Triton for its target (SGLang's kernels do so when they are imported).
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from sgl_amd_mono.sim import CodeObject, Launch, Machine, Report

ARCH, WAVE = "gfx950", 64
LDS_BYTES, CUS, MAX_THREADS = 163840, 256, 1024
_ASSEMBLY_NAME_LIMIT = 150  # Triton cuts longer kernel names in its file names
_SCALARS = {"i1": "<?", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u1": "<?", "u8": "<B", "u16": "<H",
"u32": "<I", "u64": "<Q", "fp32": "<f", "fp64": "<d"}  # fmt: skip


@dataclasses.dataclass
class Ran:
    """One launch: the kernel's name and the simulator's report."""

    name: str
    report: Report


class _Launcher:
    """What Triton calls to launch a compiled kernel."""

    def __init__(self, driver: SimulatorDriver, src: Any, metadata: Any) -> None:
        from triton.runtime.cache import get_cache_manager

        self.driver, self.metadata = driver, metadata
        self.types = list(src.signature.values())
        path = get_cache_manager(metadata.hash).get_file(f"{src.name[:_ASSEMBLY_NAME_LIMIT]}.amdgcn")
        with open(path) as file:
            self.code = CodeObject.parse(file.read())

    def __call__(self, grid_x: int, grid_y: int, grid_z: int, stream: int, function: object, packed: tuple,
                 launch_metadata: object, enter: object, leave: object, *bound: object) -> None:  # fmt: skip
        if 0 in (grid_x, grid_y, grid_z):
            return
        warps, _, shared = packed
        machine = Machine(ranks=1, memory=self.driver.memory, seed=self.driver.seed)
        mapped: set[int] = set()
        block = bytearray(self.code.kernarg_size)
        values = [(kind, value) for kind, value in zip(self.types, bound, strict=True) if kind != "constexpr"]
        arguments = [argument for argument in self.code.args if not argument.kind.startswith("hidden")]
        extra = len(arguments) - len(values)
        assert extra == 2, (
            f"{self.code.name}: {extra} arguments behind the kernel's own, expected the two scratch pointers"
        )
        for argument, (kind, value) in zip(arguments, values, strict=False):
            data = self._pack(machine, mapped, kind, value)
            assert len(data) == argument.size, (
                f"{self.code.name}: argument {argument} is {len(data)} bytes of type {kind}"
            )
            block[argument.offset : argument.offset + argument.size] = data
        grid = (grid_x, grid_y, grid_z)
        launch = Launch(
            rank=0, code=self.code, grid=grid, block=warps * WAVE, kernargs=bytes(block),
            dynamic_lds=max(0, shared - self.code.lds_bytes), persistent=False,
        )  # fmt: skip
        self.driver.ran.append(Ran(self.code.name, machine.launch([launch])))

    @staticmethod
    def _pack(machine: Machine, mapped: set[int], kind: str, value: Any) -> bytes:
        if not kind.startswith("*"):
            return struct.pack(_SCALARS[kind], value)
        if value is None or isinstance(value, int):
            return struct.pack("<Q", value or 0)
        storage = value.untyped_storage()
        if storage.data_ptr() not in mapped:
            mapped.add(storage.data_ptr())
            machine.map(0, storage.data_ptr(), storage.nbytes(), f"tensor{len(mapped)}")
        return struct.pack("<Q", value.data_ptr())


class SimulatorDriver:
    """The interface that Triton 3.8 asks of a driver."""

    def __init__(self, memory: str = "consistent", seed: int = 0) -> None:
        self.memory, self.seed = memory, seed
        self.ran: list[Ran] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {
                "max_shared_mem": LDS_BYTES,
                "multiprocessor_count": CUS,
                "warpSize": WAVE,
            },
            load_binary=lambda name, binary, shared, device: (None, name, 0, 0, MAX_THREADS),
            unload_module=lambda module: None,
        )

    def launcher_cls(self, src: Any, metadata: Any) -> _Launcher:
        return _Launcher(self, src, metadata)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        assert device == 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", ARCH, WAVE)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., Sequence[float]]:
        """Autotuning: the time of a candidate is the number of wave-instructions that it executes."""

        def benchmark(
            call: Callable[[], None], *, quantiles: Sequence[float] = (0.5,), **unused: object
        ) -> list[float]:
            before = len(self.ran)
            call()
            return [float(sum(ran.report.wave_instructions for ran in self.ran[before:]))] * len(quantiles)

        return benchmark


def activate(memory: str = "consistent", seed: int = 0) -> SimulatorDriver:
    """Make the simulator Triton's driver until deactivate()."""
    from triton.runtime import driver

    simulator = SimulatorDriver(memory, seed)
    driver.set_active(simulator)
    return simulator


def deactivate() -> None:
    """Leave Triton as it was before activate(): it looks for a driver when it next needs one."""
    from triton.runtime import driver

    driver._active = None
