#!/usr/bin/env bash
# Makes sure that the system's own UCX (Debian's libucx0: older than the wheel, built with verbs) is there for
# the tests that run against it. Needs root and apt; without them it says which tests will be skipped.
# KVXFER_SYSTEM_DEPS=0 leaves the machine as it is.
set -euo pipefail

have_ucx() {
    ldconfig -p 2>/dev/null | grep -q 'libucp\.so\.0'
}

skip() {
    echo "kvxfer: no system UCX ($1): the tests against a system libucp.so.0 are skipped" >&2
    exit 0
}

if have_ucx; then
    exit 0
fi
[ "${KVXFER_SYSTEM_DEPS:-1}" != 0 ] || skip "KVXFER_SYSTEM_DEPS=0"
command -v apt-get >/dev/null 2>&1 || skip "no apt-get here"
[ "$(id -u)" -eq 0 ] || skip "not root; to run them: sudo apt-get install libucx0"

echo "kvxfer: installing Debian's libucx0 for the tests against a system UCX (about 15 s)"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        -o DPkg::Lock::Timeout=120 libucx0 </dev/null >"$log" 2>&1
}
# The package lists of a fresh image are empty or old, so update only when needed.
if ! install; then
    apt-get update </dev/null >>"$log" 2>&1 || true
    if ! install; then
        tail -n 5 "$log" >&2
        skip "apt-get could not install libucx0"
    fi
fi
ldconfig
have_ucx || skip "libucx0 holds no libucp.so.0"
