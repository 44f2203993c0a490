# SPDX-License-Identifier: Apache-2.0
"""Qwen3.8-2.4T-A95B (MXFP4 MoE) on MI355X."""
