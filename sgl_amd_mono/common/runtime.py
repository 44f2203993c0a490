# SPDX-License-Identifier: Apache-2.0
"""The seam between a model's forward and what executes kernels: a GPU, or the simulator.

``hip_runtime`` runs built kernels on the current GPU through FlyDSL's own executor, on torch's current stream (so a
captured graph holds them). ``simulator_runtime`` runs the same instructions on the CPU; its module is imported only
when it is called. Importing this module imports neither torch, FlyDSL nor the simulator.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sgl_amd_mono.common import build as building
from sgl_amd_mono.common.build import Artifact, BuildKey
from sgl_amd_mono.common.peer import Group, HipApi, HipPeerBuffer, PeerBuffer
from sgl_amd_mono.common.sync import FaultState

CLOCK_HZ = 100_000_000  # s_memrealtime on gfx950, and the simulator's virtual clock
SCRATCH_ALIGN = 256


class LaunchError(RuntimeError):
    """A launch that must not or did not run; the message names the kernel, found, needed and the fix."""


@dataclass(frozen=True)
class RuntimeRequest:
    """What a runtime is made from: the rank's device and group, the target, the deadline of each wait in seconds."""

    device: Any
    isa: str
    group: Group
    deadline_s: float
    widths: tuple[int, ...]


class Kernel:
    """A kernel that a runtime can launch; ``str(kernel)`` is its name."""

    def __init__(self, key: BuildKey, artifact: Artifact, loaded: Any = None) -> None:
        self.key = key
        self.artifact = artifact
        self.loaded = loaded

    def __str__(self) -> str:
        return self.artifact.name


class Runtime(Protocol):
    """Executes kernels of one rank."""

    def build(self, keys: Sequence[BuildKey]) -> list[Kernel]:
        """Compile or load from the cache, and load; every rank calls it with the same keys."""

    def zeros(self, nbytes: int, name: str) -> Any:
        """Persistent zeroed uint8 tensor on the device, aligned to 256 bytes."""

    def peer_buffer(self, nbytes: int, group: Group) -> PeerBuffer:
        """Peer memory of this rank; every rank calls it."""

    def launch(self, kernel: Kernel, args: Sequence[Any]) -> None:
        """Launch with arguments in ABI order: an int, or a tensor that stands for its address at this moment."""

    def prepare(self, kernel: Kernel, args: list[Any]) -> Callable[[], None]:
        """A launch to be repeated: each call launches with what ``args`` holds then. An entry that is a tensor at the
        first call stays one, an int stays an int; the rest is checked now and never again."""

    def begin_step(self) -> None:
        """Called once before the prepared launches of a step: what they share is looked up here."""

    def deadline_ticks(self, seconds: float) -> int:
        """Seconds as ticks of the device clock."""

    def synchronize(self) -> None:
        """Return once all launches have ended."""

    def close(self) -> None:
        """Release what the runtime holds."""


def deadline_ticks(seconds: float) -> int:
    """Seconds as ticks of the 100 MHz clock; at least 1."""
    if not seconds > 0:
        raise LaunchError(f"a deadline of {seconds} s; needed: more than 0")
    return max(1, round(seconds * CLOCK_HZ))


def argument_values(kernel: Kernel, args: Sequence[Any]) -> list[int]:
    """Integers in ABI order: tensors (anything with ``data_ptr``) by their current address."""
    arguments = kernel.artifact.arguments
    if len(args) != len(arguments):
        raise LaunchError(f"{kernel} takes {len(arguments)} arguments, got {len(args)}")
    values = []
    for argument, value in zip(arguments, args, strict=True):
        if hasattr(value, "data_ptr"):
            if argument.type == "i32":
                raise LaunchError(f"{kernel}: argument '{argument.name}' is i32, got a tensor")
            values.append(int(value.data_ptr()))
        elif isinstance(value, int):
            values.append(value)
        else:
            raise LaunchError(
                f"{kernel}: argument '{argument.name}' is {type(value).__name__}; needed: a tensor or an int"
            )
    return values


def build_on_rank_0(group: Group, build: Callable[[], Any]) -> None:
    """Run ``build`` on rank 0 while the others wait for it; ``LaunchError`` on all of them where it failed or ended."""
    problem = None
    if group.rank == 0:
        try:
            build()
        except Exception as error:  # the other ranks wait in the exchange below
            problem = f"{type(error).__name__}: {error}"
    try:
        problem = group.all_gather(problem)[0]
    except RuntimeError as error:  # torch's: a process of the group is gone
        raise LaunchError(
            f"rank {group.rank} waited for rank 0 to build the kernels, and the group broke ({error}); needed: that "
            "every rank lives; fix: see the log of the rank that ended"
        ) from error
    if problem:
        raise LaunchError(f"building the kernels failed on rank 0: {problem}")


# ---------------------------------------------------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------------------------------------------------


def describe_fault(state: FaultState, keys: Sequence[BuildKey]) -> str:
    """Text of a fault with the launch and wait names of ``keys`` (their ``slot_base`` and ``region_names``)."""
    by_base = sorted({type(k) for k in keys}, key=lambda c: (c.slot_base, len(c.region_names)))

    def owner(slot: int) -> Any:
        found = None
        for candidate in by_base:
            if candidate.slot_base <= slot:
                found = candidate
        return found

    def launch_name(slot: int) -> str:
        key_class = owner(slot)
        if key_class is None:
            return f"launch slot {slot}"
        return f"{key_class.slot_launch or key_class.launch} of layer {slot - key_class.slot_base}"

    def region_name(slot: int, region: int) -> str:
        names = owner(slot).region_names if owner(slot) else ()
        return names[region] if region < len(names) else f"region {region}"

    return state.describe(launch_name, region_name)


# ---------------------------------------------------------------------------------------------------------------
# HIP
# ---------------------------------------------------------------------------------------------------------------


class HipRuntime:
    """Kernels on this rank's GPU.

    ``api`` and ``make_launcher`` are replaced in tests: the HIP library, and ``(module text, kernel name, abi) ->
    callable(values, stream)``, by default FlyDSL's executor.
    """

    def __init__(
        self,
        request: RuntimeRequest,
        *,
        api: HipApi | None = None,
        make_launcher: Callable[..., Any] | None = None,
        torch: Any = None,
    ) -> None:
        if request.isa != building.TARGET:
            raise LaunchError(f"the kernels are built for {building.TARGET}, this device is {request.isa}")
        if torch is None:
            import torch as torch_module

            torch = torch_module
        self._torch = torch
        self._request = request
        self._api = api
        self._make_launcher = make_launcher or _flydsl_launcher
        self._peers: list[PeerBuffer] = []
        self._stream = ctypes.c_void_p()

    def build(self, keys: Sequence[BuildKey]) -> list[Kernel]:
        """Rank 0 compiles what the cache lacks while the others wait; then every rank loads from the cache."""
        build_on_rank_0(self._request.group, lambda: building.build_all(keys, binary=True))
        kernels = []
        for key in keys:
            artifact = building.build(key, binary=True)
            kernels.append(Kernel(key, artifact, self._make_launcher(artifact.binary, artifact.name, key.abi)))
        return kernels

    def zeros(self, nbytes: int, name: str) -> Any:
        """See ``Runtime.zeros``; torch's GPU allocations are aligned to 512 bytes."""
        return self._torch.zeros(nbytes, dtype=self._torch.uint8, device=self._request.device)

    def peer_buffer(self, nbytes: int, group: Group) -> PeerBuffer:
        """Uncached IPC memory, opened on every rank."""
        if self._api is None:
            self._api = HipApi()

        def make_table(addresses: list[int]) -> Any:
            return self._torch.tensor(addresses, dtype=self._torch.int64, device=self._request.device)

        buffer = HipPeerBuffer(nbytes, group, self._api, make_table)
        self._peers.append(buffer)
        return buffer

    def launch(self, kernel: Kernel, args: Sequence[Any]) -> None:
        """Asynchronous, on torch's current stream."""
        stream = self._torch.cuda.current_stream(self._request.device).cuda_stream
        kernel.loaded(argument_values(kernel, args), stream)

    def prepare(self, kernel: Kernel, args: list[Any]) -> Callable[[], None]:
        """See ``Runtime.prepare``; launches on the stream that was current at ``begin_step``."""
        argument_values(kernel, args)
        return kernel.loaded.prepare(args, self._stream)

    def begin_step(self) -> None:
        """Prepared launches go to torch's current stream."""
        self._stream.value = self._torch.cuda.current_stream(self._request.device).cuda_stream

    def deadline_ticks(self, seconds: float) -> int:
        """Ticks of ``s_memrealtime``."""
        return deadline_ticks(seconds)

    def synchronize(self) -> None:
        """Wait for the device."""
        self._torch.cuda.synchronize(self._request.device)

    def close(self) -> None:
        """Close all peer buffers (every rank must call it)."""
        peers, self._peers = self._peers, []
        with contextlib.ExitStack() as stack:
            for peer in peers:
                stack.callback(peer.close)


def _flydsl_launcher(module_text: str, name: str, abi: Any) -> Any:
    from sgl_amd_mono.common import _flydsl

    return _flydsl.HipLauncher(module_text, name, abi)


def hip_runtime(request: RuntimeRequest) -> Runtime:
    """Runtime on this rank's GPU."""
    return HipRuntime(request)


def simulator_runtime(request: RuntimeRequest, **options: Any) -> Runtime:
    """Runtime on the simulator; see ``runtime_sim.SimulatorRuntime`` for ``options``."""
    from sgl_amd_mono.common.runtime_sim import SimulatorRuntime

    return SimulatorRuntime(request, **options)
