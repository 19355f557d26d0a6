# SPDX-License-Identifier: Apache-2.0
"""Checks between ranks: rendezvous, placement, clocks, speed."""
