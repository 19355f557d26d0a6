# SPDX-License-Identifier: Apache-2.0
"""The container image: its build files, and the versions that it must have."""
