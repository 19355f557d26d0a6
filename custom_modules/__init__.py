# SPDX-License-Identifier: Apache-2.0
"""What Megatron-Core lacks for long context; each module works on a plain Megatron-Core model."""
