# SPDX-License-Identifier: Apache-2.0
"""Loss of held-out documents: by position, by how much is read, and of short documents."""
