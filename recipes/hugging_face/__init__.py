# SPDX-License-Identifier: Apache-2.0
"""Models in from Hugging Face, and out to it."""
