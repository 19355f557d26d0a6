# SPDX-License-Identifier: Apache-2.0
"""Text to token ids: tokenizers, long texts in pieces, tokenizers compared."""
