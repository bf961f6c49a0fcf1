#!/usr/bin/env bash
# Runs each fuzz target for SECONDS_EACH seconds, beginning with the kept corpus; what it finds new stays in
# fuzz/target. `make test` runs the same code without a fuzzer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../fuzz"

seconds="${SECONDS_EACH:-60}"
targets="${TARGETS:-wire handshake node}"
if ! cargo +nightly --version >/dev/null 2>&1; then
    echo "kvxfer: fuzzing needs the nightly toolchain: rustup toolchain install nightly --profile minimal" >&2
    exit 1
fi
if ! cargo +nightly fuzz --version >/dev/null 2>&1; then
    echo "kvxfer: fuzzing needs cargo-fuzz: cargo install --locked cargo-fuzz" >&2
    exit 1
fi
for target in $targets; do
    echo "kvxfer: == fuzzing $target for $seconds s"
    mkdir -p "target/corpus/$target"
    # An input that fails is left in fuzz/artifacts and named; `cargo +nightly fuzz run TARGET FILE` runs it again.
    cargo +nightly fuzz run "$target" "target/corpus/$target" "corpus/$target" -- \
        -max_total_time="$seconds" -max_len=4096 -print_final_stats=1
done
