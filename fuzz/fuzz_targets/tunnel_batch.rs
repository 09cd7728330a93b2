#![no_main]
//! libFuzzer's way into [`whimbrel_fuzz::tunnel_batch`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| whimbrel_fuzz::tunnel_batch(data));
