# SPDX-License-Identifier: Apache-2.0
"""The container image: what it is built from, and the versions that it has to hold."""
