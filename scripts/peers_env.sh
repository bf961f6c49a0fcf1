#!/usr/bin/env bash
# The other libraries of `kvxfer bench peers`, at the versions of benches/peers.txt, in a venv of their own: they bring
# copies of UCX that must not meet kvxfer's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${PEERS_VENV:-.venv-peers}"
stamp="$venv/kvxfer-peers.stamp"

for library in libibverbs.so.1 librdmacm.so.1 libnuma.so.1; do
    if ! ldconfig -p | grep -qF "$library"; then
        echo "kvxfer: $library is missing, which Mooncake needs: apt-get install libibverbs1 librdmacm1 libnuma1" >&2
    fi
done
if [ -x "$venv/bin/python" ] && cmp -s benches/peers.txt "$stamp"; then
    exit 0
fi
echo "kvxfer: installing NIXL, Mooncake and ucxx into $venv (700 MB, one or two minutes) ..."
"${PYTHON:-python3}" -m venv --clear "$venv"
# Without what they ask for beyond that: PyTorch and CUDA's libraries are gigabytes, and nothing here uses them.
"$venv/bin/python" -m pip --disable-pip-version-check --no-input install --quiet --no-deps -r benches/peers.txt
cp benches/peers.txt "$stamp"
