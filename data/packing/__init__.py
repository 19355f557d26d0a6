# SPDX-License-Identifier: Apache-2.0
"""Documents to sequences of one length: best fit, or concatenate and cut."""
