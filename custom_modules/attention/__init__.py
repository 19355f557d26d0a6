# SPDX-License-Identifier: Apache-2.0
"""Attention kernels, and the projections and document bounds that they share."""
