#![no_main]
//! libFuzzer's way into [`whimbrel_fuzz::manifest`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| whimbrel_fuzz::manifest(data));
