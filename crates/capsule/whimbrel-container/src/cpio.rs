//! Writer of cpio archives (format "newc"), which the Linux kernel unpacks as its initial RAM disk.
//!
//! Format: Linux Documentation/driver-api/early-userspace/buffer-format.rst. Pure: bytes in, bytes out.

/// Archive that is being written.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const DIRECTORY: u32 = 0o040_755;
const SYMLINK: u32 = 0o120_777;
const FILE: u32 = 0o100_000;

impl Archive {
    /// Creates an empty archive.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory; its parents must have been added before.
    pub fn directory(&mut self, path: &str) {
        self.entry(path, DIRECTORY, &[]);
    }

    /// Adds a file with the permission bits `mode`.
    pub fn file(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.entry(path, FILE | mode, content);
    }

    /// Adds a symbolic link.
    pub fn symlink(&mut self, path: &str, target: &str) {
        self.entry(path, SYMLINK, target.as_bytes());
    }

    /// Ends the archive and returns its bytes.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let content_len = u32::try_from(content.len()).expect("a file of an initial RAM disk is below 4 GiB");
        let name_len = path.len() as u32 + 1;
        // inode, mode, uid, gid, links, mtime, size, device (major, minor), special (major, minor), name,
        // check
        let fields = [self.entries, mode, 0, 0, 1, 0, content_len, 0, 0, 0, 0, name_len, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fs,
        io::Write,
        process::{Command, Stdio},
    };

    #[test]
    fn another_program_unpacks_what_was_packed() {
        let mut archive = Archive::new();
        archive.directory("bin");
        archive.file("bin/odd", 0o755, b"abcde");
        archive.file("empty", 0o600, b"");
        archive.symlink("link", "bin/odd");
        let place = tempfile::tempdir().unwrap();
        let mut busybox = Command::new("busybox");
        busybox.args(["cpio", "-i", "-d"]).current_dir(&place).stdin(Stdio::piped());
        let mut child = busybox.spawn().unwrap();
        child.stdin.take().unwrap().write_all(&archive.finish()).unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(fs::read(place.path().join("link")).unwrap(), b"abcde");
        assert_eq!(fs::read(place.path().join("empty")).unwrap(), b"");
    }
}
