//! Comparing text with a file that is checked in.

use std::{env, fs, path::Path};

/// Fails at the first line that differs. With `WHIMBREL_RENEW` set it writes the file anew instead.
pub(crate) fn compare(file: &str, now: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it").join(file);
    if env::var_os("WHIMBREL_RENEW").is_some() {
        fs::write(&path, now).unwrap();
        return;
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    for (number, (kept, now)) in kept.lines().zip(now.lines()).enumerate() {
        assert_eq!(kept, now, "{file}, line {}", number + 1);
    }
    assert_eq!(kept.len(), now.len(), "{file} has another length");
}
