# SPDX-License-Identifier: Apache-2.0
"""Short samples that train a longer context, and the tokens chosen for them."""
