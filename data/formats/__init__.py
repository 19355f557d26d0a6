# SPDX-License-Identifier: Apache-2.0
"""The records of one file of each format, in bounded memory; `data.readers` chooses the format."""
