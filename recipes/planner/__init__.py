# SPDX-License-Identifier: Apache-2.0
"""What a stage takes on a cluster, before a GPU is touched: bytes, seconds, and the best layout.

Light: no torch, no NeMo. `memory` and `time` predict a `Job`, `plan` holds both, `search` finds the
layout, `remedies` says what to change where something does not fit.
"""
