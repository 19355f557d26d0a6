#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Unpack archives and run one list of cases: call.sh first|second|third SECONDS ARCHIVE...
set -euo pipefail
cd "$(dirname "$0")/../../.."
list=$1 left=${SECONDS_LEFT:-$2} device=${DEVICE:-cuda} out=${OUT:-runs/rental}
settings=$("${PYTHON:-python3}" -W ignore benchmarks/gpu/rental/unpack.py --device "$device" "${@:3}")
eval "$settings"
export PYTHONUNBUFFERED=1 NVTE_DISABLE_NVRTC=1
left=$((left - SECONDS))
exec timeout --kill-after=10 "$((left + 5))" "$PYTHON" -W ignore -m benchmarks.gpu "$list" \
    --device "$device" --seconds "$left" --out "$out" --rental "$LONGHAUL_RENTAL/rental.json" --missing
