# SPDX-License-Identifier: Apache-2.0
"""Lightning callbacks: the only modules of this room that import lightning."""
