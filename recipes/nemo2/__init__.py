# SPDX-License-Identifier: Apache-2.0
"""Parts of a recipe that configure NeMo and Megatron-Core."""
