# SPDX-License-Identifier: Apache-2.0
"""Measures of a step: seconds by part, model FLOPs, loss by position and source, GPU sensors."""
