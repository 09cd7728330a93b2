#![no_main]
//! libFuzzer's way into [`whimbrel_fuzz::image_frame`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| whimbrel_fuzz::image_frame(data));
