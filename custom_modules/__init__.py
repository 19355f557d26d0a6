# SPDX-License-Identifier: Apache-2.0
"""Long-context modules that Megatron-Core lacks; each works on a plain Megatron-Core model."""
