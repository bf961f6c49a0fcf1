//! Feeds the fuzzer's bytes to `kvxfer_fuzz::node`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvxfer_fuzz::node(bytes));
