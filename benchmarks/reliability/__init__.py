# SPDX-License-Identifier: Apache-2.0
"""What the commands do where something is wrong."""
