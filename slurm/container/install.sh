#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs Longhaul on a Python that has NVIDIA's torch, CUDA and Transformer Engine.
#
#   install.sh pins [WHEELS]      check the image, then install the lock
#   install.sh longhaul           install the package of this tree, then check everything
#
# WHEELS is a folder of distributions; if it has any, pip asks no index. The lock names all of
# them with hashes, so pip resolves nothing (--no-deps) and cannot bring another torch: NeMo,
# Megatron-Core and Lightning all ask for one. `python -m pip` and not `pip`: the image's `pip` writes to
# the system's folder, which the virtual environment in front of it hides.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
tree="$(cd "$here/../.." && pwd)"
python="${PYTHON:-python}"
kept="${KEPT:-/opt/longhaul/image.txt}"
# The image pins its own Python packages for everybody by PIP_CONSTRAINT; some of Longhaul's differ.
unset PIP_CONSTRAINT

case "${1:-}" in
pins)
    wheels="${2:-}"
    source=()
    if [ -n "$wheels" ] && [ -n "$(ls -A "$wheels")" ]; then
        source=(--no-index --find-links "$wheels")
    fi
    "$python" "$here/versions.py" image "$tree/pyproject.toml"
    mkdir -p "$(dirname "$kept")"
    "$python" "$here/versions.py" kept >"$kept"
    "$python" -m pip install --disable-pip-version-check --root-user-action=ignore \
        ${source[@]+"${source[@]}"} \
        --no-deps --require-hashes --constraint "$kept" --requirement "$here/lock.txt"
    ;;
longhaul)
    # The lock has the setuptools that pyproject.toml builds with, so none is fetched.
    "$python" -m pip install --disable-pip-version-check --root-user-action=ignore \
        --no-index --no-deps --no-build-isolation "$tree"
    cd /
    "$python" -m slurm.container.versions installed "$kept"
    ;;
*)
    echo "usage: install.sh pins [WHEELS] | install.sh longhaul" >&2
    exit 2
    ;;
esac
