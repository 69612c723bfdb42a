//! See `src/targets.rs`.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weir_fuzz::run("handshake", bytes));
