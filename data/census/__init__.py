# SPDX-License-Identifier: Apache-2.0
"""What documents a store has: lengths, what a sequence length keeps whole, copies, compression."""
