#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Store the carried part of the weights for a later call on this machine.
exec "${PYTHON:-python3}" -W ignore "$(dirname "$0")/unpack.py" --device "${DEVICE:-cuda}" weights
