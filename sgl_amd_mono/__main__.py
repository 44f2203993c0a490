# SPDX-License-Identifier: Apache-2.0
"""``python -m sgl_amd_mono``: the same command as ``sgl-amd-mono``."""

from sgl_amd_mono.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
