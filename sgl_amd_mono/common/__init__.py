# SPDX-License-Identifier: Apache-2.0
"""What every model shares; nothing here knows a model."""
