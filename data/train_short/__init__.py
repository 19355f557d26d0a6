# SPDX-License-Identifier: Apache-2.0
"""Samples that stand for a longer context than they have, and the tokens chosen for them."""
