#![no_main]
//! libFuzzer's way into [`whimbrel_fuzz::migrate_message`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| whimbrel_fuzz::migrate_message(data));
