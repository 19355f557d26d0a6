# SPDX-License-Identifier: Apache-2.0
"""What is survived, what is detected and how it is said, and what that costs."""
