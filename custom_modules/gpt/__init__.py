# SPDX-License-Identifier: Apache-2.0
"""The GPT model for long contexts: the only modules that subclass those of Megatron-Core."""
