#![no_main]
//! libFuzzer's way into [`whimbrel_fuzz::wws_trace`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| whimbrel_fuzz::wws_trace(data));
