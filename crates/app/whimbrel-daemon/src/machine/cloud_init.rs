//! Seed disk of a new machine: what cloud-init in the guest reads at its first boot.
//!
//! A small FAT file system with the label CIDATA, as cloud-init's data source NoCloud wants it
//! (docs.cloud-init.io, "NoCloud"): `meta-data`, `user-data` and, if it is given, `network-config`. The file
//! lies in the machine's folder and is the base of its last disk, so the seed goes wherever the machine goes.

use crate::{core::error::DaemonError, machine::record::DiskBase};
use std::{
    fs,
    io::{Cursor, Write},
    path::Path,
};
use whimbrel_api::CloudInit;
use whimbrel_core::{ByteSize, DiskConfig, MachineName};
use whimbrel_wire::atomic_file;

/// Name of the file in the machine's folder.
const FILE: &str = "seed.img";
/// Bytes of the file system: room for two texts of the greatest length.
const SIZE: usize = 2 << 20;
/// Label of the file system, padded with blanks.
const LABEL: &[u8; 11] = b"CIDATA     ";
/// Longest text of a user.
const TEXT_MAX: usize = 512 << 10;
/// Most keys that are taken.
const KEYS_MAX: usize = 64;
/// User data that changes nothing.
const NOTHING: &str = "#cloud-config\n{}\n";

/// Checks what a user wants the guest to be told.
pub(crate) fn check(wanted: &CloudInit) -> Result<(), DaemonError> {
    let texts = [("user data", &wanted.user_data), ("network configuration", &wanted.network_config)];
    for (what, text) in texts {
        if text.as_ref().is_some_and(|text| text.len() > TEXT_MAX) {
            return Err(DaemonError::invalid(format!("the {what} is longer than {} KiB", TEXT_MAX >> 10)));
        }
    }
    let starts =
        |text: &String| ["#", "Content-Type:", "MIME-Version:"].iter().any(|start| text.starts_with(start));
    if !wanted.user_data.as_ref().is_none_or(starts) {
        return Err(DaemonError::invalid(
            "cloud-init would ignore this user data: it must begin with #cloud-config, #! or a MIME header",
        ));
    }
    if wanted.ssh_keys.len() > KEYS_MAX {
        return Err(DaemonError::invalid(format!("at most {KEYS_MAX} SSH keys can be given")));
    }
    match wanted.ssh_keys.iter().find(|key| !is_public_key(key)) {
        Some(key) => Err(DaemonError::invalid(format!(
            "{:?} is not a public SSH key, like `ssh-ed25519 AAAA… name`",
            key.chars().take(40).collect::<String>()
        ))),
        None => Ok(()),
    }
}

/// The disk of a seed in a machine's folder, and what lies beneath it.
pub(crate) fn disk(folder: &Path) -> (DiskConfig, DiskBase) {
    (DiskConfig { size: ByteSize(SIZE as u64) }, DiskBase::File { path: folder.join(FILE) })
}

/// Whether a disk of a capsule is a seed disk, by its size and its first sector: the label of FAT12 or FAT16
/// (fatgen103, "BS_VolLab").
pub(crate) fn is_seed(disk: &DiskConfig, sector: &[u8]) -> bool {
    disk.size.0 == SIZE as u64 && sector.get(43..54) == Some(LABEL)
}

/// Writes the seed into a machine's folder, durably.
pub(crate) fn write(folder: &Path, name: &MachineName, wanted: &CloudInit) -> Result<(), DaemonError> {
    let path = folder.join(FILE);
    let failed = |source| DaemonError::io("write", &path, source);
    let image = image(&instance_id(), name, wanted).map_err(failed)?;
    fs::write(&path, image).and_then(|()| fs::File::open(&path)?.sync_all()).map_err(failed)?;
    atomic_file::sync_dir(folder).map_err(failed)
}

/// An id by which cloud-init knows that this is a new machine.
fn instance_id() -> String {
    format!("i-{:016x}", rand::random::<u64>())
}

fn image(instance: &str, name: &MachineName, wanted: &CloudInit) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; SIZE];
    let label = fatfs::FormatVolumeOptions::new().volume_label(*LABEL);
    fatfs::format_volume(Cursor::new(&mut bytes[..]), label)?;
    let volume = fatfs::FileSystem::new(Cursor::new(&mut bytes[..]), fatfs::FsOptions::new())?;
    let meta = serde_json::json!({
        "instance-id": instance,
        "local-hostname": whimbrel_net::managed::host_label(name),
        "public-keys": wanted.ssh_keys,
    });
    let user = wanted.user_data.as_deref().unwrap_or(NOTHING);
    let files = [("meta-data", Some(&*meta.to_string())), ("user-data", Some(user))];
    for (file, text) in files.into_iter().chain([("network-config", wanted.network_config.as_deref())]) {
        let Some(text) = text else { continue };
        volume.root_dir().create_file(file)?.write_all(text.as_bytes())?;
    }
    volume.unmount()?;
    Ok(bytes)
}

/// Whether `text` is one line of a kind, a key and perhaps a comment (sshd(8), "AUTHORIZED_KEYS").
fn is_public_key(text: &str) -> bool {
    let mut words = text.split(' ');
    let kind = words
        .next()
        .is_some_and(|kind| ["ssh-", "ecdsa-", "sk-"].iter().any(|start| kind.starts_with(start)));
    let base64 = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte);
    kind && words.next().is_some_and(|key| key.len() >= 32 && key.bytes().all(base64))
        && !text.contains(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    const KEY: &str =
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0i0xV0sZ0nq3o0r6JbqgqQ0d8kq2wV8m2s3sZb1e2F me@home";

    fn wanted() -> CloudInit {
        CloudInit { ssh_keys: vec![KEY.to_owned()], ..CloudInit::default() }
    }

    #[test]
    fn other_programs_find_the_label_and_the_files() {
        let dir = tempfile::tempdir().expect("a directory");
        let user = "#cloud-config\npackages: [nginx]\n".to_owned();
        let all = CloudInit {
            user_data: Some(user.clone()),
            network_config: Some("version: 2\n".into()),
            ..wanted()
        };
        write(dir.path(), &"web.1".parse().expect("a name"), &all).expect("a seed");
        let path = dir.path().join(FILE);
        let (disk, _) = disk(dir.path());
        assert!(is_seed(&disk, &fs::read(&path).expect("a seed")[..512]) && !is_seed(&disk, &[0; 512]));
        let said = |program: &str, arguments: &[&str]| {
            let output = Command::new(program).args(arguments).output().expect("a program of the host");
            String::from_utf8(output.stdout).expect("text")
        };
        let path = path.to_str().expect("a path in UTF-8");
        assert_eq!(said("blkid", &["-p", "-o", "value", "-s", "LABEL", path]).trim(), "CIDATA");
        assert_eq!(said("mtype", &["-i", path, "::user-data"]), user);
        assert_eq!(said("mtype", &["-i", path, "::network-config"]), "version: 2\n");
        let meta: serde_json::Value =
            serde_json::from_str(&said("mtype", &["-i", path, "::meta-data"])).expect("JSON");
        assert_eq!((&meta["local-hostname"], &meta["public-keys"][0]), (&"web-1".into(), &KEY.into()));
        assert!(meta["instance-id"].as_str().is_some_and(|id| id.len() > 8), "{meta}");
    }

    #[test]
    fn what_cloud_init_would_ignore_or_misread_is_refused() {
        check(&wanted()).expect("a key");
        for key in
            ["", "ssh-ed25519", "AAAAC3NzaC1lZDI1NTE5AAAAIJ0i0xV0sZ0nq3o0r6Jb", &format!("{KEY}\nssh-rsa x")]
        {
            assert!(check(&CloudInit { ssh_keys: vec![key.into()], ..wanted() }).is_err(), "{key}");
        }
        let user = |text: String| check(&CloudInit { user_data: Some(text), ..wanted() });
        assert!(user("#!/bin/sh\n".into()).is_ok() && user("packages: []".into()).is_err());
        assert!(user("#".repeat(TEXT_MAX + 1)).is_err());
    }
}
