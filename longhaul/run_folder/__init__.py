# SPDX-License-Identifier: Apache-2.0
"""Run folders as commands see them: their locks, their progress, and checks for damage."""
