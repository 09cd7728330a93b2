//! Options of the verbs that create a machine about its first boot by cloud-init.

use crate::error::CliError;
use std::{
    fs,
    path::{Path, PathBuf},
};
use whimbrel_api::CloudInit;

/// Longest file of keys that is read by itself.
const KEY_MAX: u64 = 64 << 10;

#[derive(Debug, clap::Args)]
pub(crate) struct FirstBoot {
    /// Public SSH key, in a file, of who may log in; for images with cloud-init (repeatable)
    #[arg(long = "ssh-key", value_name = "FILE", help_heading = "First boot, by cloud-init")]
    ssh_keys: Vec<PathBuf>,
    /// User data for cloud-init: `#cloud-config`, a script, or MIME parts
    #[arg(long, value_name = "FILE", help_heading = "First boot, by cloud-init")]
    user_data: Option<PathBuf>,
    /// Network configuration for cloud-init [default: DHCP]
    #[arg(long, value_name = "FILE", help_heading = "First boot, by cloud-init")]
    network_config: Option<PathBuf>,
}

impl FirstBoot {
    /// What cloud-init is to do, if any of its options is given.
    pub(crate) fn cloud_init(&self) -> Result<Option<CloudInit>, CliError> {
        if self.ssh_keys.is_empty() && self.user_data.is_none() && self.network_config.is_none() {
            return Ok(None);
        }
        self.read(&self.ssh_keys).map(Some)
    }

    /// What cloud-init is to do: without --ssh-key, to let in the SSH keys of the user of this command.
    pub(crate) fn cloud_init_with_own_keys(&self) -> Result<CloudInit, CliError> {
        match self.ssh_keys.is_empty() {
            true => self.read(&own_keys()),
            false => self.read(&self.ssh_keys),
        }
    }

    fn read(&self, keys: &[PathBuf]) -> Result<CloudInit, CliError> {
        let keys = keys.iter().map(text).collect::<Result<Vec<_>, _>>()?;
        let lines = keys.iter().flat_map(|keys| keys.lines()).map(str::trim);
        Ok(CloudInit {
            user_data: self.user_data.as_ref().map(text).transpose()?,
            network_config: self.network_config.as_ref().map(text).transpose()?,
            ssh_keys: lines
                .filter(|line| !line.is_empty() && !line.starts_with('#'))
                .map(str::to_owned)
                .collect(),
        })
    }
}

fn text(path: &PathBuf) -> Result<String, CliError> {
    fs::read_to_string(path).map_err(|source| CliError::File { path: path.clone(), source })
}

/// Public keys in the folder where ssh looks for the secret ones, `~/.ssh/id_*.pub`.
fn own_keys() -> Vec<PathBuf> {
    std::env::var_os("HOME").map(|home| keys_in(&Path::new(&home).join(".ssh"))).unwrap_or_default()
}

fn keys_in(folder: &Path) -> Vec<PathBuf> {
    let is_key = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let small = fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() <= KEY_MAX);
        name.starts_with("id_") && name.ends_with(".pub") && small
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut keys: Vec<_> = entries.filter(is_key).collect();
    keys.sort_unstable();
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_public_keys_are_found() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["id_rsa", "id_rsa.pub", "id_ed25519.pub", "known_hosts", "other.pub"] {
            fs::write(folder.path().join(name), "ssh-ed25519 AAAA me\n").unwrap();
        }
        let found = keys_in(folder.path());
        let names: Vec<_> = found.iter().filter_map(|path| path.file_name()?.to_str()).collect();
        assert_eq!(names, ["id_ed25519.pub", "id_rsa.pub"]);
        assert!(keys_in(&folder.path().join("nowhere")).is_empty());
    }
}
