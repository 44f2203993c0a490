# SPDX-License-Identifier: Apache-2.0
"""The command ``sgl-amd-mono cost``: counts of every launch, measured on the simulator, and times that are modelled."""
