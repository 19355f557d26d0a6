# SPDX-License-Identifier: Apache-2.0
"""A script for each claim of time or memory; peers run in the same process group as ours."""
