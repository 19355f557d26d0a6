# SPDX-License-Identifier: Apache-2.0
"""Loss and MLP computed in tiles of the sequence."""
