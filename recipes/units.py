# SPDX-License-Identifier: Apache-2.0
"""Binary token units, as the papers write them: 64 * K is a 64K context."""

K = 1024
M = 1024 * K
