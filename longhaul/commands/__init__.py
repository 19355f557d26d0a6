# SPDX-License-Identifier: Apache-2.0
"""The commands of `longhaul`: one file each, loaded by `longhaul.cli` when it is typed."""
