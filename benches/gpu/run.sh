#!/usr/bin/env bash
# Tests and measures kvxfer on the GPU of this host in under six minutes.
#
#   benches/gpu/run.sh [--out DIR] [--docs] WHEELS   from the wheels in that folder, without a network
#   benches/gpu/run.sh [--out DIR] --stub [WHEELS]   the whole script on the stub driver: its numbers mean nothing
#
# WHEELS holds kvxfer's abi3 wheel, libucx-cu12 (unless the host has a UCX with CUDA) and, if it is to be compared, NIXL's. numpy,
# pytest and pytest-timeout are the host's own, and so are torch and cupy, which are used if they are there. PYTHON names the interpreter. DIR (gpu-results) gets result.json, table.md and the
# log; --docs puts the table into docs/gpu.md. Each stage has a time limit, and one that fails does not keep the later ones from
# running. Ends with 1 if a stage failed, with 2 if only a bar was missed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out="gpu-results" stub="" docs="" wheels=""
while [ "$#" -gt 0 ]; do
    case "$1" in
        --out) out="$2"; shift ;;
        --stub) stub=1 ;;
        --docs) docs=1 ;;
        -*) echo "kvxfer: $1 is not known: --out DIR, --stub and --docs are" >&2; exit 64 ;;
        *) wheels="$1" ;;
    esac
    shift
done
if [ -z "$wheels" ] && [ -z "$stub" ]; then
    echo "kvxfer: name the folder with the wheels (make wheel puts kvxfer's into dist/)" >&2
    exit 64
fi

python="${PYTHON:-python3}"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
log="$out/run.log"
: > "$log" > "$work/status"
began=$SECONDS
# Whatever takes longest, the whole must end.
limit=345

# stage NAME SECONDS COMMAND...
stage() {
    local name="$1" most="$2" left=$((limit - SECONDS + began)) status=0
    shift 2
    if [ "$left" -lt 5 ]; then
        status=skipped
    else
        echo "kvxfer: $name ..." | tee -a "$log"
        timeout --kill-after=5 "$((most < left ? most : left))" "$@" >> "$log" 2>&1 || status=$?
    fi
    echo "$name $status" >> "$work/status"
    [ "$status" = 0 ] || { echo "kvxfer: $name failed ($status), see $log" >&2; tail -n 15 "$log" >&2; }
}

bench() { stage "$1" "$2" "$python" benches/gpu/bench.py "$1" --out "$work/$1.json"; }

PYTHONPATH="$(pwd)/tests/support:$(pwd)/benches/gpu"
export PYTHONPATH OPENBLAS_NUM_THREADS=1 PYTHONUNBUFFERED=1
if [ -n "$wheels" ]; then
    names=(kvxfer)
    for name in libucx-cu12 nixl-cu13 nixl-cu12; do
        if compgen -G "$wheels/${name//-/_}-*.whl" > /dev/null; then names+=("$name"); fi
    done
    stage install 60 "$python" -m pip install --quiet --no-index --no-deps --no-compile --find-links "$wheels" --target "$work/site" \
        "${names[@]}"
    PYTHONPATH="$work/site:$PYTHONPATH"
fi
# A system's own UCX would be taken before the wheel's, and may lack CUDA.
if [ -z "${KVXFER_UCX_LIBRARY:-}" ]; then
    KVXFER_UCX_LIBRARY="$("$python" -c 'from kvxfer._memory import ucx_wheel_dir as d; print(d() / "libucp.so.0" if d() else "")' 2>> "$log" || true)"
    [ -z "$KVXFER_UCX_LIBRARY" ] || export KVXFER_UCX_LIBRARY
fi
tests=(-k "gpu-")
if [ -n "$stub" ]; then
    stage stub 30 "$python" -c 'import pathlib, sys, cuda_stub; f = pathlib.Path(sys.argv[1]); cuda_stub.build(f, source=cuda_stub.APP); cuda_stub.build_nvml(f)' "$work"
    export KVXFER_CUDA_LIBRARY="$work/libcuda.so.1" LD_LIBRARY_PATH="$work"
    # The other cases are tests of their own there.
    tests=(-k "stub-kernels or stub-memory")
elif "$python" -c 'import xdist' 2> /dev/null; then
    tests+=(-n 4)
fi

bench machine 30
stage tests 120 "$python" -m pytest -q -p no:cacheprovider --junitxml="$work/tests.xml" "${tests[@]}" tests/gpu
bench kernels 45
bench hand_off 90
bench loop 75
bench nixl 45
bench protocols 45
bench single_writes 45
bench doctor 60

arguments=("$work" "$out")
[ -z "$docs" ] || arguments+=(--docs docs/gpu.md)
"$python" benches/gpu/report.py "${arguments[@]}"
