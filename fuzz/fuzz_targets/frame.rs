//! See `crates/weir-decoders`.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weir_decoders::run("frame", bytes));
