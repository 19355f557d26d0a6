# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 from 8K to 16K tokens on a machine without a GPU: the commands of docs/real_model.md."""
