# SPDX-License-Identifier: Apache-2.0
"""Runtimes of the host cost's controls: what the plugin's launch would cost if it did more than it must."""

from __future__ import annotations

from typing import Any

import torch

from sgl_amd_mono.simulate import host_cost


def repacking(request: Any) -> Any:
    """Every argument is looked up by name, checked and packed at each launch."""
    runtime = host_cost.idle_runtime(request)

    def prepare(kernel: Any, args: list[Any]) -> Any:
        names = [name for name, _ in kernel.key.abi]

        def value_of(name: str) -> Any:
            return args[names.index(name)]

        def launch() -> None:
            runtime.launch(kernel, [value_of(name) for name in names])

        return launch

    runtime.prepare = prepare
    return runtime


def allocating(request: Any) -> Any:
    """A tensor is allocated at each launch."""
    runtime = host_cost.idle_runtime(request)
    prepare = runtime.prepare

    def with_tensor(kernel: Any, args: list[Any]) -> Any:
        launch = prepare(kernel, args)

        def allocate_and_launch() -> None:
            torch.empty(8)
            launch()

        return allocate_and_launch

    runtime.prepare = with_tensor
    return runtime
