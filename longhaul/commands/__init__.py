# SPDX-License-Identifier: Apache-2.0
"""The commands of `longhaul`: one file each, imported by `longhaul.cli` when the command runs."""
