# SPDX-License-Identifier: Apache-2.0
"""The terminal: messages, progress, and how errors are answered."""
