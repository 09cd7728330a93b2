#![no_main]
//! libFuzzer's way into [`whimbrel_fuzz::qemu_state`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| whimbrel_fuzz::qemu_state(data));
