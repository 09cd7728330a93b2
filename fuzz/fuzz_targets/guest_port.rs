#![no_main]
//! libFuzzer's way into [`whimbrel_fuzz::guest_port`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| whimbrel_fuzz::guest_port(data));
