//! KVM result: remembers until the next boot that KVM does not work. The probe takes seconds of a processor,
//! which every daemon and every `doctor` would spend again.
//!
//! Only a failure is stored, and only for this boot, this QEMU binary and this probe. A file that cannot be
//! read or written is ignored; only time depends on it.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// Directory below `/run`, where only root writes.
const DIR: &str = "/run/whimbrel";
/// Most bytes of a stored error, which is one line.
const WORDS_MAX: u64 = 4096;

/// Reason why KVM did not work in an earlier probe.
pub(super) fn load(qemu: &Path) -> Option<String> {
    let path = result_path(qemu).ok()?;
    let meta = fs::metadata(&path).ok()?;
    (meta.uid() == 0 && meta.len() <= WORDS_MAX).then(|| fs::read_to_string(&path).ok())?
}

/// Stores the reason why KVM did not work.
pub(super) fn save(qemu: &Path, words: &str) -> io::Result<()> {
    let path = result_path(qemu)?;
    fs::create_dir_all(DIR)?;
    let draft = path.with_extension(std::process::id().to_string());
    fs::write(&draft, words)?;
    fs::rename(draft, path)
}

fn result_path(qemu: &Path) -> io::Result<PathBuf> {
    let meta = fs::metadata(qemu)?;
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let mut name = DefaultHasher::new();
    (qemu, meta.ino(), meta.len(), meta.mtime(), boot, super::kvm::CODE).hash(&mut name);
    Ok(Path::new(DIR).join(format!("no-kvm-{:016x}", name.finish())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memo_is_of_one_binary() {
        let (a, b) = (tempfile::NamedTempFile::new().unwrap(), tempfile::NamedTempFile::new().unwrap());
        save(a.path(), "broken").unwrap();
        assert_eq!(load(a.path()).as_deref(), Some("broken"));
        assert_eq!(load(b.path()), None);
        fs::remove_file(result_path(a.path()).unwrap()).unwrap();
    }
}
