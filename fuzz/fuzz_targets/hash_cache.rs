#![no_main]
//! libFuzzer's way into [`whimbrel_fuzz::hash_cache`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| whimbrel_fuzz::hash_cache(data));
