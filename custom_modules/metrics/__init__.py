# SPDX-License-Identifier: Apache-2.0
"""What a step measures: seconds by part, model FLOPs, loss by position and source, GPU sensors."""
