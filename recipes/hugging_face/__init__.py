# SPDX-License-Identifier: Apache-2.0
"""Import models from Hugging Face, and export them to it."""
