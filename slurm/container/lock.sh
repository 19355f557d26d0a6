#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes lock.txt: the closure of pyproject.toml and its extra `eval` for the image's Python, at the
# versions that the tests run with (constraints-py311.txt), hashed, without what stays the image's.
# `wheel` is for packages that come as source: pip asks for it to build them, offline too.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
tree="$(cd "$here/../.." && pwd)"
python="${PYTHON:-python}"
resolved="$(mktemp)"
trap 'rm -f "$resolved" "$here/lock.txt.part"' EXIT

cd "$tree"
"$python" -m uv pip compile pyproject.toml --extra eval --python-version 3.12 \
    --python-platform x86_64-manylinux_2_39 --constraint constraints-py311.txt \
    --generate-hashes --no-header --no-annotate --quiet --output-file "$resolved" - <<<"wheel"
{
    echo "# SPDX-License-Identifier: Apache-2.0"
    echo "# Written by slurm/container/lock.sh; not by hand."
    "$python" "$here/versions.py" lock <"$resolved"
} >"$here/lock.txt.part"
mv "$here/lock.txt.part" "$here/lock.txt"
