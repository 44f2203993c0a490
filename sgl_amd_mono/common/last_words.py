# SPDX-License-Identifier: Apache-2.0
"""A text that is written to stderr when this process ends, however it ends.

SGLang ends its schedulers with SIGKILL, so no `atexit` of theirs runs. A small process outside the server's process
tree holds the latest text and writes it once the pipe from this process is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

START_LIMIT_S = 30.0

# Forks, so that it is no child of the server, which ends all of its children; then reads until the pipe is closed.
_KEEPER = """
import json, os, sys
if os.fork():
    os._exit(0)
last = "null"
for line in sys.stdin:
    last = line if line.endswith("\\n") else last
text = json.loads(last)
if text:
    sys.stderr.write(text + "\\n")
"""


class LastWords:
    """`say` replaces the text; `close` takes it back."""

    def __init__(self) -> None:
        reading, self._pipe = os.pipe()
        try:
            keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _KEEPER], stdin=reading, start_new_session=True
            )
            keeper.wait(START_LIMIT_S)
        finally:
            os.close(reading)
        os.set_blocking(self._pipe, False)  # a keeper that is gone or slow must not hold a step up

    def say(self, text: str | None) -> None:
        """Replace the text; None or an empty one: nothing will be written."""
        with contextlib.suppress(OSError):
            os.write(self._pipe, json.dumps(text).encode() + b"\n")

    def close(self) -> None:
        """Take the text back and end the keeper. Harmless when repeated."""
        if self._pipe >= 0:
            self.say(None)
            os.close(self._pipe)
            self._pipe = -1
