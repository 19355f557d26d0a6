#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
exec bash "$(dirname "$0")/call.sh" first 290 a weights
