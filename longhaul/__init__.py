# SPDX-License-Identifier: Apache-2.0
"""The command line, one short file a command."""
