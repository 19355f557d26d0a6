# SPDX-License-Identifier: Apache-2.0
"""Text forms of layouts and rotations, and files of rotations."""
