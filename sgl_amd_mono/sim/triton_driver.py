# SPDX-License-Identifier: Apache-2.0
"""A Triton driver for a gfx950 that is not there: Triton's kernels run on the simulator, from CPU tensors.

``activate()`` makes it Triton's driver; a kernel launched in the usual way (``kernel[grid](...)``) is then compiled by
Triton for gfx950, and its machine code is executed. Nothing in Triton is patched: the driver answers what Triton 3.8
asks of one (target, loading, launcher, device properties); streams are one number and every launch has ended when it
returns. Activate it before anything asks Triton for its target, which many kernel libraries do when they are imported.

Triton itself is imported only by what needs it, so that this module can be looked at without it.
"""

from __future__ import annotations

import contextlib
import inspect
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .code import LANES, LDS_PER_CU, CodeObject
from .errors import SimError
from .machine import Launch, Machine
from .report import Report

ARCH = "gfx950"
COMPUTE_UNITS = 256
MAX_THREADS = 1024
AUTOTUNE = ("stated", "count")
_HIDDEN_POINTERS = 2  # global scratch and profile scratch follow a kernel's own arguments
_ASSEMBLY_NAME_LIMIT = 150  # Triton cuts longer kernel names in its file names
_SCALARS = {"i1": "<?", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u1": "<?", "u8": "<B", "u16": "<H",
"u32": "<I", "u64": "<Q", "fp16": "<e", "fp32": "<f", "fp64": "<d"}  # fmt: skip


@dataclass
class TritonLaunch:
    """One launch: kernel name, grid (x, y, z), threads a workgroup, wave-instructions executed.

    report: the simulator's counters; None unless the driver keeps reports.
    """

    name: str
    grid: tuple[int, int, int]
    threads: int
    wave_instructions: int
    report: Report | None = None


class SimulatorDriver:
    """The interface that Triton 3.8 asks of a driver.

    memory, seed: of the simulated machine ("consistent" or "adversarial"). autotune: "stated" refuses to measure an
    autotuned kernel's configurations (state one with `use_configuration`); "count" runs each of them and takes the
    one with the fewest wave-instructions, so kernels that change their inputs must restore them. keep_reports: keep the
    simulator's Report of every launch. instruction_limit, wall_clock_s: of one launch. `launches` lists what ran.
    """

    def __init__(
        self,
        memory: str = "consistent",
        seed: int = 0,
        *,
        autotune: str = "stated",
        keep_reports: bool = False,
        instruction_limit: int | None = None,
        wall_clock_s: float | None = None,
    ) -> None:
        if autotune not in AUTOTUNE:
            raise SimError(f"autotune is one of {AUTOTUNE}, found {autotune!r}")
        self.memory, self.seed, self.autotune, self.keep_reports = memory, seed, autotune, keep_reports
        self.limits = {"instruction_limit": instruction_limit, "wall_clock_s": wall_clock_s}
        self.launches: list[TritonLaunch] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {
                "max_shared_mem": LDS_PER_CU,
                "multiprocessor_count": COMPUTE_UNITS,
                "warpSize": LANES,
                "arch": ARCH,
            },
            load_binary=lambda name, binary, shared, device: (None, name, 0, 0, MAX_THREADS),
            unload_module=lambda module: None,
        )

    def launcher_cls(self, src: Any, metadata: Any) -> _Launcher:
        """Called by Triton with a compiled kernel; what it returns is called for every launch."""
        return _Launcher(src, metadata)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        if device != 0:
            raise SimError(f"the simulator's Triton driver has device 0 only, found {device}")

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", ARCH, LANES)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        raise SimError("triton.testing measures times, and the simulator has none: count instructions instead")

    def get_benchmarker(self) -> Callable[..., Sequence[float]]:
        """What Triton's autotuner measures with: see `autotune`."""

        def benchmark(call: Callable[[], None], *, quantiles: Sequence[float] = (0.5,), **unused: object) -> list:
            if self.autotune == "stated":
                tuner = inspect.getclosurevars(call).nonlocals.get("self")
                name = getattr(getattr(tuner, "base_fn", None), "__name__", "a kernel")
                count = len(getattr(tuner, "configs", ()))
                raise SimError(
                    f"{name} is autotuned over {count} configurations and none is stated: call use_configuration() "
                    'with one of them, or activate(autotune="count")'
                )
            before = len(self.launches)
            call()
            return [float(sum(ran.wave_instructions for ran in self.launches[before:]))] * len(quantiles)

        return benchmark


class _Launcher:
    """What Triton calls to launch a compiled kernel: packs the arguments and runs the machine code.

    Triton keeps it with the compiled kernel, longer than a driver is active: it asks for the driver at each launch.
    """

    def __init__(self, src: Any, metadata: Any) -> None:
        from triton.runtime.cache import get_cache_manager

        name = f"{src.name[:_ASSEMBLY_NAME_LIMIT]}.amdgcn"
        path = get_cache_manager(metadata.hash).get_file(name)
        if path is None:
            raise SimError(f"{src.name}: Triton's cache has no assembly {name} of it (TRITON_CACHE_DIR emptied?)")
        with open(path) as file:
            text = file.read()
        try:
            self.code = CodeObject.parse(text)
        except SimError as error:
            raise SimError(f"Triton kernel {src.name} ({path}): {error}") from error
        self.kinds = list(_leaves(src.signature.values()))
        self.arguments = [a for a in self.code.args if not a.kind.startswith("hidden")]
        own = sum(kind != "constexpr" for kind in self.kinds)
        if len(self.arguments) != own + _HIDDEN_POINTERS:
            raise SimError(
                f"{self.code.name}: {len(self.arguments)} arguments, expected {own} and {_HIDDEN_POINTERS} scratch "
                "pointers: the driver is written for Triton 3.8"
            )

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: int,
        function: object,
        packed: tuple,
        metadata: object,
        enter: Callable[[object], None] | None,
        leave: Callable[[object], None] | None,
        *bound: object,
    ) -> None:
        grid = (grid_x, grid_y, grid_z)
        if 0 in grid:
            return
        if enter is not None:
            enter(metadata)
        driver, code = _active(), self.code
        warps, _, shared = packed[:3]
        values = [(k, v) for k, v in zip(self.kinds, _leaves(bound), strict=True) if k != "constexpr"]
        block = bytearray(code.kernarg_size)
        tensors = []
        for argument, (kind, value) in zip(self.arguments, values, strict=False):
            data = self._pack(kind, value, tensors)
            if len(data) != argument.size:
                raise SimError(f"{code.name}: {argument} got {len(data)} bytes of type {kind}")
            block[argument.offset : argument.offset + argument.size] = data
        machine = Machine(ranks=1, memory=driver.memory, seed=driver.seed, **driver.limits)
        for number, (address, nbytes) in enumerate(_ranges(tensors)):
            machine.map(0, address, nbytes, f"tensors{number}")
        launch = Launch(
            rank=0,
            code=code,
            grid=grid,
            block=warps * LANES,
            kernargs=bytes(block),
            dynamic_lds=max(0, shared - code.lds_bytes),
            persistent=False,
        )
        report = machine.launch([launch])
        driver.launches.append(
            TritonLaunch(
                code.name, grid, warps * LANES, report.wave_instructions, report if driver.keep_reports else None
            )
        )
        if leave is not None:
            leave(metadata)

    def _pack(self, kind: str, value: Any, tensors: list[Any]) -> bytes:
        """The bytes of one argument; a tensor is a pointer to its first element, and is noted for mapping."""
        if kind.startswith("*"):
            if value is None or isinstance(value, int):
                return struct.pack("<Q", value or 0)
            device = getattr(value, "device", None)
            if getattr(device, "type", "cpu") != "cpu":
                raise SimError(f"{self.code.name}: a tensor on {device}; the simulator takes CPU tensors")
            tensors.append(value)
            return struct.pack("<Q", value.data_ptr())
        if kind not in _SCALARS:
            raise SimError(f"{self.code.name}: arguments of type {kind} are not implemented")
        return struct.pack(_SCALARS[kind], value)


def _active() -> SimulatorDriver:
    from triton.runtime import driver

    if not isinstance(driver.active, SimulatorDriver):
        raise SimError("a kernel that was loaded for the simulator is launched under another Triton driver")
    return driver.active


def _leaves(values: Any) -> Iterator[Any]:
    """The members of nested tuples, in order: a tuple argument is passed member by member."""
    for value in values:
        if isinstance(value, tuple):
            yield from _leaves(value)
        else:
            yield value


def _ranges(tensors: Sequence[Any]) -> list[tuple[int, int]]:
    """(address, bytes) of the tensors' whole storages; storages that share memory become one range."""
    found: list[tuple[int, int]] = []
    for begin, size in sorted({(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors}):
        if size == 0:
            continue
        if found and begin < sum(found[-1]):
            first, before = found[-1]
            found[-1] = (first, max(before, begin + size - first))
        else:
            found.append((begin, size))
    return found


def activate(memory: str = "consistent", seed: int = 0, **options: Any) -> SimulatorDriver:
    """Make the simulator Triton's driver until `deactivate`; the arguments are SimulatorDriver's."""
    from triton.runtime import driver

    simulator = SimulatorDriver(memory, seed, **options)
    driver.set_active(simulator)
    return simulator


def deactivate() -> None:
    """Leave Triton as it was before `activate`: it looks for a driver when it next needs one."""
    from triton.runtime import driver

    driver.set_active(None)  # type: ignore[arg-type]


@contextlib.contextmanager
def activated(memory: str = "consistent", seed: int = 0, **options: Any) -> Iterator[SimulatorDriver]:
    """`activate` for the length of a with block."""
    simulator = activate(memory, seed, **options)
    try:
        yield simulator
    finally:
        deactivate()


def use_configuration(kernel: Any, **stated: Any) -> None:
    """Give an autotuned Triton kernel one configuration for this process, so that nothing is measured.

    kernel: the decorated kernel. stated: what the configuration must have, of its meta-parameters, num_warps and
    num_stages. Raises SimError unless exactly one of the kernel's own configurations has it.
    """
    tuner = kernel
    while not hasattr(tuner, "configs"):
        if not hasattr(tuner, "fn"):
            raise SimError(f"{getattr(kernel, '__name__', kernel)} is not autotuned")
        tuner = tuner.fn
    fitting = [c for c in tuner.configs if stated.items() <= c.all_kwargs().items()]
    if len(fitting) != 1:
        raise SimError(
            f"{tuner.base_fn.__name__}: {len(fitting)} configurations have {stated}, state one of "
            f"{[c.all_kwargs() for c in tuner.configs]}"
        )
    tuner.configs = fitting
