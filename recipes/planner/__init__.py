# SPDX-License-Identifier: Apache-2.0
"""Estimates of memory and step time of a stage on a cluster, and a search for its best layout.

Imports neither torch nor NeMo. `memory` and `time` predict a `Workload`, `plan` combines both,
`search` finds the layout, `remedies` proposes changes if it does not fit.
"""
