//! The initial RAM disk of a machine of a container image: drivers, and a script that mounts the disk.

use crate::{Archive, GuestPrograms, Modules};

const INIT: &str = include_str!("initrd.sh");

/// An initial RAM disk with these modules.
pub fn initrd(programs: &GuestPrograms, modules: &Modules) -> Vec<u8> {
    let mut archive = Archive::new();
    for directory in ["bin", "proc", "sys", "dev", "root", "modules"] {
        archive.directory(directory);
    }
    archive.file("init", 0o755, INIT.as_bytes());
    archive.file("bin/busybox", 0o755, &programs.busybox);
    for (name, content) in &modules.files {
        archive.file(&format!("modules/{name}"), 0o644, content);
    }
    let order: String = modules.files.iter().map(|(name, _)| format!("{name}\n")).collect();
    archive.file("modules/order", 0o644, order.as_bytes());
    archive.finish()
}
