# SPDX-License-Identifier: Apache-2.0
"""The jobs of a ladder, on this machine and on Slurm: checks, training and evaluation."""
