# SPDX-License-Identifier: Apache-2.0
"""Runs to read and repeat, each by the commands of a page of the documentation."""
