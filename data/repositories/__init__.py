# SPDX-License-Identifier: Apache-2.0
"""Repositories of code, each as one document, Python files in the order of their imports."""
