#![no_main]
//! libFuzzer's way into [`whimbrel_fuzz::postcopy`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| whimbrel_fuzz::postcopy(data));
