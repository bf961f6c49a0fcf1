#!/usr/bin/env bash
# Says what this machine lacks, all of it at once, before anything long starts.
#   preflight.sh [rust] [lint] [python]
# PYTHON names the interpreter (default python3). Exits 1 when something is missing.
set -euo pipefail

need_cargo="1.88"
need_python="3.10"
python="${PYTHON:-python3}"
missing=0

lack() {
    echo "kvxfer: missing: $1" >&2
    echo "        $2" >&2
    missing=1
}

# True when version $1 is at least $2 (major.minor).
at_least() {
    local have_major="${1%%.*}" have_rest="${1#*.}"
    local have_minor="${have_rest%%.*}"
    local want_major="${2%%.*}" want_minor="${2#*.}"
    [ "$have_major" -gt "$want_major" ] || { [ "$have_major" -eq "$want_major" ] && [ "$have_minor" -ge "$want_minor" ]; }
}

check_rust() {
    local how="install it with rustup (https://rustup.rs; Debian 13 has it: apt-get install rustup && rustup default stable)"
    if ! command -v cargo >/dev/null 2>&1; then
        lack "cargo >= $need_cargo" "$how. Debian's own cargo package is too old."
    else
        local version
        if ! version="$(cargo --version 2>/dev/null | awk '{print $2}')" || [ -z "$version" ]; then
            lack "a cargo that runs" "'cargo --version' fails: with rustup, run: rustup default stable"
        elif ! at_least "$version" "$need_cargo"; then
            lack "cargo >= $need_cargo (found $version at $(command -v cargo))" \
                "$how. Debian's own cargo package is too old; with rustup: rustup update stable."
        fi
    fi
    if ! command -v cc >/dev/null 2>&1; then
        lack "a C compiler and linker (cc)" "apt-get install gcc libc6-dev"
    fi
}

check_lint() {
    cargo fmt --version >/dev/null 2>&1 || lack "cargo fmt" "rustup component add rustfmt"
    cargo clippy --version >/dev/null 2>&1 || lack "cargo clippy" "rustup component add clippy"
}

check_python() {
    if ! command -v "$python" >/dev/null 2>&1; then
        lack "$python (Python >= $need_python)" "apt-get install python3 python3-venv, or name another: make PYTHON=/path/to/python3.12 ..."
        return
    fi
    local version
    if ! version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)"; then
        lack "a Python that runs" "'$python' fails to start; name another: make PYTHON=/path/to/python3.12 ..."
    elif ! at_least "$version" "$need_python"; then
        lack "Python >= $need_python (found $version at $(command -v "$python"))" \
            "name a newer one: make PYTHON=/path/to/python3.12 ..."
    elif ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        lack "Python's venv module" "apt-get install python3-venv"
    fi
}

for what in "$@"; do
    case "$what" in
        rust) check_rust ;;
        lint) check_lint ;;
        python) check_python ;;
        *) echo "preflight.sh: unknown: $what" >&2; exit 2 ;;
    esac
done
exit "$missing"
