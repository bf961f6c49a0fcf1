//! Feeds the fuzzer's bytes to `kvxfer_fuzz::wire`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvxfer_fuzz::wire(bytes));
