#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
exec bash "$(dirname "$0")/call.sh" second 430 a b weights
