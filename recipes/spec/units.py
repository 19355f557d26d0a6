# SPDX-License-Identifier: Apache-2.0
"""Binary units, as the papers write tokens (64 * K is a 64K context), and bytes."""

K = 1024
M = 1024 * K
GiB = 1024 * M
