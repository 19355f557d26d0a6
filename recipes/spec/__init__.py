# SPDX-License-Identifier: Apache-2.0
"""Units, model cards, stages, layouts and clusters. Imports no other package of recipes."""
