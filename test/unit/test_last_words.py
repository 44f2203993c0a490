# SPDX-License-Identifier: Apache-2.0
"""What a process says when it ends: also when it is killed, from outside its own process tree, and once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

#: how the process ends -> its last line, after two texts were said
ENDS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "its children are killed before it": (
        "import psutil\nfor child in psutil.Process().children(recursive=True):\n    child.kill()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    ),
    "an exception": "raise SystemExit(3)",
    "closed": "words.close()\nwords.close()",
    "nothing to say": "words.say(None)\nos.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_latest_text_is_written_at_the_end(end: str) -> None:
    script = (
        "import os, signal\nfrom sgl_amd_mono.common.last_words import LastWords\n"
        f"words = LastWords()\nwords.say('first')\nwords.say('rank 0: two\\n  lines')\n{ENDS[end]}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    silent = end in ("closed", "nothing to say")
    assert done.stderr == ("" if silent else "rank 0: two\n  lines\n")


def test_a_keeper_that_is_gone_holds_nothing_up() -> None:
    """Writing goes on without an error or a wait when nobody reads any more."""
    from sgl_amd_mono.common.last_words import LastWords

    words = LastWords()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.dup2(writing, words._pipe)
    os.set_blocking(words._pipe, False)
    for _ in range(100):
        words.say("x" * 4000)  # more than a pipe holds
    os.close(reading)
    words.say("nobody reads")
    words.close()
    os.close(writing)
