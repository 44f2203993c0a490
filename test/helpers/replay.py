# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a captured graph on a machine without a GPU: records a step's device work, and runs it again.

Every tensor operation and every kernel launch is recorded with the very tensors it took and gave. `replay` repeats them
in order on the same memory: nothing of the host's code runs again, so only what lies in memory (token ids, state
indices, the epoch, states) can change the result. What the host read back during the recording is frozen, as in a
graph; `host_reads` counts it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Recording(TorchDispatchMode):
    """Records inside `with`; the launches of `runtime` too."""

    def __init__(self, runtime: Any) -> None:
        super().__init__()
        self._runtime, self._work = runtime, []
        self.launches = self.host_reads = 0
        self.state_index: Any = None  # what the recorded K1 launches read

    def __enter__(self) -> Recording:
        original = self._runtime.launch

        def launch(kernel: Any, args: Any) -> None:
            with torch.utils._python_dispatch._disable_current_modes():
                original(kernel, args)
            self._work.append(lambda: original(kernel, args))
            self.launches += 1
            named = dict(zip([name for name, _ in kernel.key.abi], args, strict=True))
            self.state_index = named.get("state_index", self.state_index)

        self._runtime.launch = launch
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        del self._runtime.__dict__["launch"]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function is torch.ops.aten._local_scalar_dense.default:
            self.host_reads += 1
        else:
            self._work.append(_again(function, args, kwargs, result))
        return result

    def replay(self) -> None:
        """Repeat the recorded work."""
        for work in self._work:
            work()


def _again(function: Any, args: Any, kwargs: Any, result: Any) -> Callable[[], None]:
    outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]

    def run() -> None:
        again = [t for t in tree_flatten(function(*args, **kwargs))[0] if isinstance(t, torch.Tensor)]
        for old, new in zip(outputs, again, strict=True):
            if old.data_ptr() != new.data_ptr():  # a view or an operation in place gives the same memory
                old.copy_(new)

    return run
