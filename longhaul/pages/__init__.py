# SPDX-License-Identifier: Apache-2.0
"""Text and tables that several commands print."""
