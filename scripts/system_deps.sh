#!/usr/bin/env bash
# Makes sure that what some tests need of the system is there: Debian's libucx0 (older than the wheel, built with verbs),
# for the tests that run against it, iproute2's `ip`, for those on a bad network, a C++ compiler, for the one that
# runs the kernels' arithmetic on the host, and Prometheus with promtool, for those of the metrics. Needs root and apt; without them it says which tests will be skipped, or fail.
# KVXFER_SYSTEM_DEPS=0 leaves the machine as it is.
set -euo pipefail

have_ucx() {
    ldconfig -p 2>/dev/null | grep -q 'libucp\.so\.0'
}

have_ip() {
    command -v ip >/dev/null 2>&1 || [ -x /usr/sbin/ip ] || [ -x /sbin/ip ]
}

have_cxx() {
    command -v "${CXX:-c++}" >/dev/null 2>&1
}

# try_install PACKAGE WHAT_FOR: where that is allowed and possible.
try_install() {
    [ "${KVXFER_SYSTEM_DEPS:-1}" != 0 ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1 || return 0
    echo "kvxfer: installing $1 for $2"
    local command=(apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=120 "$1")
    export DEBIAN_FRONTEND=noninteractive
    "${command[@]}" </dev/null >/dev/null 2>&1 \
        || { apt-get update </dev/null >/dev/null 2>&1 || true; "${command[@]}" </dev/null >/dev/null 2>&1; } || true
}

have_cxx || try_install g++ "the test that runs the kernels' arithmetic on the host (about 20 s)"
have_cxx || echo "kvxfer: no C++ compiler (g++, or what CXX names): the tests in pack_kernel.rs will fail" >&2

have_ip || try_install iproute2 "the tests on a bad network (about 10 s)"
have_ip || echo "kvxfer: no ip (iproute2): the tests on a bad network are skipped" >&2

have_prometheus() {
    command -v prometheus >/dev/null 2>&1 && command -v promtool >/dev/null 2>&1
}

have_prometheus || try_install prometheus "the tests that scrape an agent and check the alert rules (about 30 s)"
have_prometheus || echo "kvxfer: no prometheus: the tests that scrape an agent and check the alert rules are skipped" >&2

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
