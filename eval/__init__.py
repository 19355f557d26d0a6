# SPDX-License-Identifier: Apache-2.0
"""Whether the longer context works: loss by position, retrieval, and the report of a run."""
