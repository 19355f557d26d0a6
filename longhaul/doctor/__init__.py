# SPDX-License-Identifier: Apache-2.0
"""Diagnoses of `longhaul doctor`: out of memory, slow steps, loss spikes."""
