# SPDX-License-Identifier: Apache-2.0
"""Files: written whole or not at all, hashed, and places that can be written to."""
