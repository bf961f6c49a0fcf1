#!/usr/bin/env bash
# Runs the tests: run_tests.sh all|rust|loom|python [arguments for pytest]
# `make test` calls it; pytest comes last, so that its closing line is the last line of a good run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what="${1:-all}"
shift || true
venv="${VENV:-.venv}"
extras="test,ucx,kernels${EXTRAS:+,$EXTRAS}"
summary=()

say() { echo "kvxfer: $*"; }

# stage NAME COMMAND...: runs the command and notes how long it took.
stage() {
    local name="$1" began="$SECONDS"
    shift
    say "== $name"
    "$@"
    summary+=("$(printf '%-34s %5d s' "$name" "$((SECONDS - began))")")
}

set_up() {
    "${PYTHON:-python3}" scripts/setup_env.py ${EXPLICIT_PYTHON:+--explicit-python} --extras "$extras" "$@"
}

# Where the two copies of UCX lie. All tests run on the wheel's, unless KVXFER_UCX_LIBRARY names another; the Rust
# tests of UCX run on the system's too, and a Python test can ask for either through these variables.
export_ucx() {
    local wheel system
    wheel="$("$venv/bin/python" -c 'import importlib.util as u, pathlib as p
spec = u.find_spec("libucx")
print(p.Path(spec.origin).parent / "lib" / "libucp.so.0" if spec and spec.origin else "")')"
    if [ -n "$wheel" ] && [ -e "$wheel" ]; then
        export KVXFER_TEST_UCX_WHEEL="$wheel" KVXFER_REQUIRE_UCX=1
        export KVXFER_UCX_LIBRARY="${KVXFER_UCX_LIBRARY:-$wheel}"
        say "UCX wheel:  $wheel"
    fi
    system="$(ldconfig -p 2>/dev/null | awk '$1 == "libucp.so.0" { print $NF; exit }' || true)"
    if [ -n "$system" ]; then
        export KVXFER_TEST_UCX_SYSTEM="$system" KVXFER_REQUIRE_UCX=1
        say "UCX system: $system"
    fi
}

# The same crates are named each time, so that cargo builds them with the same features, once.
workspace=(--locked --workspace --exclude kvxfer-py)

rust_tests() {
    say "building and running the Rust tests (about 2 minutes the first time)"
    if cargo nextest --version >/dev/null 2>&1; then
        cargo nextest run "${workspace[@]}" --config-file scripts/nextest.toml
    else
        cargo test "${workspace[@]}" --lib --bins --tests
    fi
}

rust_tests_system_ucx() {
    local -x KVXFER_UCX_LIBRARY="$KVXFER_TEST_UCX_SYSTEM"
    if cargo nextest --version >/dev/null 2>&1; then
        cargo nextest run "${workspace[@]}" --config-file scripts/nextest.toml \
            -E 'package(kvxfer-ucx-sys) or binary(/ucx/) or test(/ucx/)'
    else
        cargo test --locked -p kvxfer-ucx-sys -p kvxfer-fabric --tests
    fi
}

# The flag goes to the engine alone: its dependencies are those of the other tests, and not built anew.
loom_tests() {
    local tests
    say "building and running the loom models (about half a minute after the other Rust tests)"
    tests="$(cargo rustc --locked --quiet -p kvxfer-engine --lib --profile test --message-format=json -- --cfg loom |
        "${PYTHON:-python3}" -c 'import json, sys
for one in map(json.loads, sys.stdin):
    if one["reason"] == "compiler-message":
        print(one["message"]["rendered"], file=sys.stderr, end="")
    elif one.get("executable"):
        print(one["executable"])')"
    "$tests" --quiet loom_tests::
}

all_rust_tests() {
    stage "Rust tests" rust_tests
    stage "Rust tests, loom" loom_tests
    if [ -n "${KVXFER_TEST_UCX_SYSTEM:-}" ]; then
        stage "Rust tests, the system's UCX" rust_tests_system_ucx
    fi
    stage "Rust doc tests" rust_doc_tests
}

rust_doc_tests() {
    cargo test "${workspace[@]}" --doc --quiet
}

print_summary() {
    say "time of each stage:"
    printf '    %s\n' "${summary[@]}"
}

python_tests() {
    local arguments=("$@") folder
    if [ "${#arguments[@]}" -eq 0 ]; then
        # Much of their time is waiting, so two at once take little more than one; a file stays together, as its tests share peers.
        arguments+=(-n 2 --dist loadfile)
        for folder in tests/unit tests/loopback tests/faults tests/gpu; do
            if compgen -G "$folder/**/test_*.py" >/dev/null || compgen -G "$folder/test_*.py" >/dev/null; then
                arguments+=("$folder")
            fi
        done
    fi
    say "== pytest (its own time is in its last line)"
    exec "$venv/bin/python" -m pytest -q --timeout=120 --durations=5 "${arguments[@]}"
}

case "$what" in
    all)
        stage "set-up: venv and packages" set_up
        stage "set-up: system packages" scripts/system_deps.sh
        export_ucx
        all_rust_tests
        stage "extension, release mode" set_up --extension
        print_summary
        python_tests "$@"
        ;;
    rust)
        stage "set-up: venv and packages" set_up
        stage "set-up: system packages" scripts/system_deps.sh
        export_ucx
        all_rust_tests
        print_summary
        ;;
    loom)
        stage "Rust tests, loom" loom_tests
        print_summary
        ;;
    python)
        stage "set-up: venv, packages, extension" set_up --extension
        stage "set-up: system packages" scripts/system_deps.sh
        export_ucx
        print_summary
        python_tests "$@"
        ;;
    *)
        echo "usage: run_tests.sh all|rust|loom|python [arguments for pytest]" >&2
        exit 2
        ;;
esac
