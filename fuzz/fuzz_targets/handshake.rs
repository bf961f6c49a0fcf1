//! Feeds the fuzzer's bytes to `kvxfer_fuzz::handshake`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvxfer_fuzz::handshake(bytes));
