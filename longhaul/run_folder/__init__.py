# SPDX-License-Identifier: Apache-2.0
"""Run folders as commands see them: who writes there, how far it is, whether it is undamaged."""
