//! libFuzzer's way into every target. The variable `WHIMBREL_FUZZ` names the target.

#![no_main]

use std::sync::LazyLock;
use whimbrel_fuzz::{TARGETS, Target};

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("WHIMBREL_FUZZ").unwrap_or_default();
    TARGETS.iter().find(|target| target.name == name).expect("WHIMBREL_FUZZ names a target")
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| (TARGET.run)(data));
