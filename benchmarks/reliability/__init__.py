# SPDX-License-Identifier: Apache-2.0
"""What it costs, and what it takes, that nothing damaged and nothing mistaken is used."""
