# SPDX-License-Identifier: Apache-2.0
"""Terminal output: messages, progress, and reports of errors."""
