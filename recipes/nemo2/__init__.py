# SPDX-License-Identifier: Apache-2.0
"""The parts of a recipe that are configurations of NeMo and Megatron-Core."""
