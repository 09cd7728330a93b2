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

/// A variable of an environment, as `NAME=VALUE`.
pub(crate) fn variable(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("it must be NAME=VALUE")?;
    let is_first = |first: char| first.is_ascii_alphabetic() || first == '_';
    match name.starts_with(is_first) && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    {
        true => Ok((name.to_owned(), value.to_owned())),
        false => Err(format!("{name:?} is no name of a variable")),
    }
}

/// `text` as one word of a shell.
pub(crate) fn shell_word(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// A script for the machine of a container image that sets these variables, and goes on with `script`.
pub(crate) fn script_of(variables: &[(String, String)], script: Option<&str>) -> Result<String, CliError> {
    let usage = || CliError::Usage {
        problem: "the user data is no script, so no variables can be set beside it".to_owned(),
        hint: "begin the file with `#!/bin/sh`, or leave it out".to_owned(),
    };
    let script = script.map(|script| script.strip_prefix("#!").ok_or_else(usage)).transpose()?;
    let rest = script.and_then(|script| script.split_once('\n')).map_or("", |(_, rest)| rest);
    let line = |(name, value): &(String, String)| format!("export {name}={}\n", shell_word(value));
    Ok(format!("#!/bin/sh\n{}{rest}", variables.iter().map(line).collect::<String>()))
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
    fn variables_are_set_before_a_script_goes_on() {
        let set = [variable("A=it's $b").unwrap(), variable("_x=").unwrap()];
        let script = script_of(&set, Some("#!/bin/sh -e\nprintf '%s|%s' \"$A\" \"$_x\"\n")).unwrap();
        let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "it's $b|");
        assert!(script_of(&set, None).unwrap().ends_with("export _x=''\n"));
        assert!(script_of(&set, Some("#cloud-config\n")).is_err());
        for bad in ["A", "=x", "1=x", "A B=x", "A;reboot=x", ""] {
            variable(bad).unwrap_err();
        }
    }

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
