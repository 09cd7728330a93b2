#![no_main]
//! libFuzzer's way into [`whimbrel_fuzz::sync_answer`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| whimbrel_fuzz::sync_answer(data));
