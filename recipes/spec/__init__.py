# SPDX-License-Identifier: Apache-2.0
"""The nouns of a recipe: units, model cards, stages, layouts, clusters. Imports no other room."""
