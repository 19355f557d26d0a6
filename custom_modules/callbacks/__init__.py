# SPDX-License-Identifier: Apache-2.0
"""Lightning callbacks: the only modules of `custom_modules` that import lightning."""
