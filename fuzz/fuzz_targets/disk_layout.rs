#![no_main]
//! libFuzzer's way into [`whimbrel_fuzz::disk_layout`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| whimbrel_fuzz::disk_layout(data));
