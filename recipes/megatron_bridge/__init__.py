# SPDX-License-Identifier: Apache-2.0
"""A recipe as a configuration of Megatron-Bridge: docs/megatron_bridge.md; light."""
