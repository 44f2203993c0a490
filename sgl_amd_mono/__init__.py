# SPDX-License-Identifier: Apache-2.0
"""Persistent decode kernels for AMD MI355X (gfx950), as an out-of-tree plugin of SGLang.

`SPECS` names one spec per Hugging Face architecture; `register` is the entry point of the group `sglang.srt.plugins`.
Importing this package loads neither torch nor FlyDSL nor any SGLang module.
"""

from __future__ import annotations

import sys

__version__ = "0.1.0"

#: Hugging Face architecture -> "module:attribute" of its MonoSpec. SGLang takes one spec per architecture.
SPECS: dict[str, str] = {
    "Qwen3_5MoeForCausalLM": "sgl_amd_mono.qwen38_a95b_mxfp4.spec:SPEC",
}

#: Versions of FlyDSL whose kernels were compiled and simulated: [first, past the last). pyproject.toml names the same.
FLYDSL_TESTED: tuple[str, str] = ("0.4.2", "0.6")

#: The spellings by which a command line asks for the kernels; the second one is SGLang's deprecated form.
FLAGS: tuple[str, str] = ("--enable-amd-monokernel", "--monokernel-backend")


def flag_asked(argv: list[str] | None = None) -> bool:
    """Whether the command line asks for AMD monokernels, in either spelling.

    Args:
        argv: arguments without the program's name; default: this process's.
    """
    words = sys.argv[1:] if argv is None else argv
    for i, word in enumerate(words):
        if word == FLAGS[0] or word == FLAGS[1] + "=amd":
            return True
        if word == FLAGS[1] and words[i + 1 : i + 2] == ["amd"]:
            return True
    return False


def register() -> None:
    """Name the specs of `SPECS` to SGLang. Idempotent; no spec module is imported here.

    Raises:
        SystemExit: the flag asks for the kernels and they cannot be registered. SGLang logs an ordinary exception of a
            plugin and goes on, which would serve without the kernels that were asked for.
        ImportError, ValueError: the same causes where no flag was seen on the command line.
    """
    try:
        from sglang.kernels.plugin_kernels.amd.spec import BACKEND
        from sglang.kernels.plugin_kernels.amd.spec import register as register_spec

        for architecture, path in SPECS.items():
            register_spec(backend=BACKEND, architecture=architecture, path=path)
    except Exception as error:
        if not flag_asked():
            raise
        raise SystemExit(
            f"sgl-amd-mono {__version__}: cannot register its specs with SGLang: {type(error).__name__}: {error}. "
            "Needed: SGLang 0.5.23 (monokernel API version 1) and no other plugin that serves "
            f"{', '.join(SPECS)}. Fix: `sgl-amd-mono doctor` names what differs; SGLANG_PLUGINS=sgl_amd_mono keeps "
            f"other plugins out; without {FLAGS[0]} SGLang serves with its own kernels."
        ) from error
