# SPDX-License-Identifier: Apache-2.0
"""Documents to tokens: readers, tokenizer, and the token store with its manifest."""
