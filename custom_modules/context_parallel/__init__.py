# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: ring, Ulysses, head-chunked and their hybrids, with their costs."""
