#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the image of a clean commit. Further arguments go to `docker build`.
#
#   build.sh                                  user and group 1000
#   build.sh --build-arg USER_ID="$(id -u)" --build-arg GROUP_ID="$(id -g)"
#   build.sh --build-context wheels=DIR       with the wheels of a folder, no index
#   build.sh --build-arg NEMO_DIGEST=sha256:...
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/../.."

if [ -n "$(git status --porcelain)" ]; then
    echo "The tree has changes that no commit holds: the image's revision would name another tree." >&2
    exit 1
fi
version="$(sed -nE 's/^version = "([^"]+)"$/\1/p' pyproject.toml)"
revision="$(git rev-parse HEAD)"
exec env DOCKER_BUILDKIT=1 docker build --file slurm/container/Dockerfile \
    --tag "longhaul:$version-${revision:0:12}" \
    --build-arg VERSION="$version" \
    --build-arg REVISION="$revision" \
    --build-arg SOURCE="$(git remote get-url origin 2>/dev/null | sed -E 's#//[^/@]*@#//#' || true)" \
    --build-arg SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)" \
    "$@" .
