# SPDX-License-Identifier: Apache-2.0
"""The search for per-frequency RoPE divisors (LongRoPE2)."""
