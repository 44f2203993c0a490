# SPDX-License-Identifier: Apache-2.0
"""Builds in parallel: processes of their own that compile one key after the other, and the parent that feeds them.

They are plain child processes (``python -m sgl_amd_mono.common.build_pool``), so that a server's scheduler can have
them too, which may be daemonic and whose main module must not be imported again; nothing is forked, because a forked
child would inherit FlyDSL's and torch's threads. A process that ends, reports an error or takes longer than the limit
ends the whole build at once with a ``BuildError`` that names the key. Their parent's end is theirs.
"""

from __future__ import annotations

import os
import pickle
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

LIMIT_S = 600.0  # of one key; the largest takes seconds
END_S = 10.0  # for a process to end after it was told or killed
_LENGTH = struct.Struct("<Q")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class _Process:
    """One child and the key that it compiles."""

    def __init__(self, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", __name__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self.key: Any = None
        self.until = 0.0

    def give(self, key: Any, binary: bool, folder: Path, limit_s: float) -> None:
        self.key, self.until = key, time.monotonic() + limit_s
        data = pickle.dumps((key, binary, folder))
        with suppress(BrokenPipeError):  # it has ended: its output ends too, and says so
            self.process.stdin.write(_LENGTH.pack(len(data)) + data)
            self.process.stdin.flush()

    def result(self) -> tuple[bool, str]:
        """(built, what went wrong) of the key; waits for the rest of an answer that has begun, or for the end."""
        answer = _read(self.process.stdout)
        return (False, self.ending()) if answer is None else pickle.loads(answer)

    def ending(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        code = self.process.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        return (
            f"the process that compiled it ended ({how}); needed: that it lives; fix: see its message above and the "
            "system's log (out of memory?), or build with fewer processes: sgl-amd-mono compile --jobs 1"
        )

    def end(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)


def build_parallel(
    keys: Sequence[Any], count: int, *, binary: bool, folder: Path, limit_s: float = LIMIT_S
) -> Iterator[Any]:
    """Build ``keys`` in ``count`` processes, in the order given; yields each key when it is built.

    Raises ``BuildError`` for the first key whose build failed, whose process ended, or that took ``limit_s`` seconds.
    """
    from sgl_amd_mono.common.build import BuildError

    waiting, processes = list(keys), []
    # what this process can import, the others can: keys are pickled by their class
    path = os.pathsep.join(dict.fromkeys(part or os.getcwd() for part in sys.path))
    environment = os.environ | {"PYTHONPATH": path}
    try:
        with selectors.DefaultSelector() as ready:
            for _ in range(count):
                processes.append(_Process(environment))
                ready.register(processes[-1].process.stdout, selectors.EVENT_READ, processes[-1])
                processes[-1].give(waiting.pop(0), binary, folder, limit_s)
            left = len(keys)
            while left:
                busy = [process for process in processes if process.key is not None]
                events = ready.select(max(0.0, min(process.until for process in busy) - time.monotonic()))
                if not events:
                    late = min(busy, key=lambda process: process.until)
                    raise BuildError(
                        f"{late.key.name} has been compiling for {limit_s:g} s; needed: that it ends; fix: look for "
                        "what slows this machine down, then start again: what is built stays in the cache"
                    )
                for event, _ in events:
                    process = event.data
                    built, problem = process.result()
                    if not built:
                        raise BuildError(f"{process.key.name}: {problem}")
                    yield process.key
                    left -= 1
                    process.key = None
                    if waiting:
                        process.give(waiting.pop(0), binary, folder, limit_s)
                    else:
                        ready.unregister(process.process.stdout)
    finally:
        for process in processes:
            process.end()


# ---- in the child


def _read(stream: IO[bytes]) -> bytes | None:
    """The next message; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    data = stream.read(size)
    return data if len(data) == size else None


def serve(given: IO[bytes], answers: IO[bytes], build: Callable[..., Any]) -> None:
    """Build what is given until there is no more."""
    for message in _messages(given):
        try:
            key, binary, folder = pickle.loads(message)
            build(key, binary=binary, cache_dir=folder)
            answer: tuple[bool, str] = (True, "")
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {error}")
        data = pickle.dumps(answer)
        answers.write(_LENGTH.pack(len(data)) + data)
        answers.flush()


def _messages(stream: IO[bytes]) -> Iterable[bytes]:
    while (message := _read(stream)) is not None:
        yield message


def main() -> int:
    """Serve over stdin and stdout; what the compiler prints goes to stderr."""
    from sgl_amd_mono.common.build import build

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with suppress(BrokenPipeError, KeyboardInterrupt):
        serve(sys.stdin.buffer, answers, build)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
