#![no_main]
//! libFuzzer's way into [`whimbrel_fuzz::nbd_session`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| whimbrel_fuzz::nbd_session(data));
