# SPDX-License-Identifier: Apache-2.0
"""What verification costs, and how wrong inputs are answered."""
