# SPDX-License-Identifier: Apache-2.0
"""The one reader of logs: which faults a log has, the earliest cause first; light."""
