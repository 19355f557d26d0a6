# SPDX-License-Identifier: Apache-2.0
"""A recipe made small enough for this machine, with its kinds of parallelism kept."""
