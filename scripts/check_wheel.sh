#!/usr/bin/env bash
# Imports the one wheel in dist/ in a bare venv that has numpy and nothing else, away from the checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${1:-python3}"
wheels=(dist/kvxfer-*.whl)
if [ "${#wheels[@]}" -ne 1 ] || [ ! -f "${wheels[0]}" ]; then
    echo "kvxfer: expected one wheel in dist/, found: ${wheels[*]}" >&2
    exit 1
fi
wheel="$(pwd)/${wheels[0]}"
case "$wheel" in
    *-cp310-abi3-*) ;;
    *) echo "kvxfer: $wheel is no abi3 wheel for Python >= 3.10" >&2; exit 1 ;;
esac

echo "kvxfer: importing the wheel in a bare venv with only numpy (about 15 s) ..."
bare="$(mktemp -d)"
trap 'rm -rf "$bare"' EXIT
"$python" -m venv "$bare/venv"
pip=("$bare/venv/bin/python" -m pip --disable-pip-version-check --no-input install --quiet --progress-bar=off)
"${pip[@]}" --constraint constraints.txt numpy
"${pip[@]}" --no-deps --no-index "$wheel"
cd "$bare"
"$bare/venv/bin/python" -I - <<'PY'
import importlib.metadata as metadata
import sys

import kvxfer

assert "site-packages" in kvxfer.__file__, kvxfer.__file__
extra = {name.lower() for d in metadata.distributions() if (name := d.metadata["Name"])} - {
    "numpy", "kvxfer", "pip", "setuptools",
}
assert not extra, f"the bare venv holds more than numpy: {extra}"
heavy = {"torch", "cupy", "vllm", "sglang"} & set(sys.modules)
assert not heavy, f"import kvxfer pulled in {heavy}"
print(f"kvxfer: import works on Python {sys.version.split()[0]} with numpy {metadata.version('numpy')}")
PY
"$bare/venv/bin/kvxfer" --help >/dev/null
echo "kvxfer: the wheel lies at $wheel ($(du -h "$wheel" | cut -f1))"
