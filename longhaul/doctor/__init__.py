# SPDX-License-Identifier: Apache-2.0
"""What `longhaul doctor` finds out: out of memory, slow steps, loss spikes."""
