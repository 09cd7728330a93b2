#![no_main]
//! libFuzzer's way into [`whimbrel_fuzz::cuts`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| whimbrel_fuzz::cuts(data));
