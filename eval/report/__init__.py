# SPDX-License-Identifier: Apache-2.0
"""The report of a run: tables, plots and the HTML page."""
