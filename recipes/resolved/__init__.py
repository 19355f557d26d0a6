# SPDX-License-Identifier: Apache-2.0
"""Resolved recipes: overrides, checks, YAML files, and reading facts back."""
