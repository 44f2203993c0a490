# SPDX-License-Identifier: Apache-2.0
"""The main job on a machine without a GPU: SGLang's own model decodes with and without the plugin, on the simulator.

Modules, in the order in which a run uses them:

* ``checkpoint``: a small random-weight checkpoint of the model's own architecture, experts in Quark's MXFP4 form.
* ``harness``: what the real SGLang needs to run on a CPU; every replaced function is listed there.
* ``gdn_standin``, ``aiter_standin``: PyTorch in the place of SGLang's Triton kernels, and of AITER's MoE on gfx950.
* ``plugin``: the entry point that SGLang loads here in the place of the installed plugin.
* ``runner``: SGLang's ModelRunner in this process, one arm at a time.
* ``compare``: the two arms, the noise of re-ordered sums, and the verdict.
* ``report``: what is printed, and the JSON form.

Nothing here is imported on a machine that serves.
"""
