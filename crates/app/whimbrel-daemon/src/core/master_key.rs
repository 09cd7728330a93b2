//! Master key of an encrypted store: a file, a credential of systemd, or the output of a command.
//!
//! It is read once, when the daemon starts, and kept in no file. A file that others may read, or that lies in
//! the folder that it is to protect, is refused: whoever takes the disk would have both.

use crate::core::error::DaemonError;
use std::{
    fmt::Display,
    fs::File,
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};
use whimbrel_store::MasterKey;

/// Name of the credential with the key (`LoadCredentialEncrypted=` in a unit of systemd).
const CREDENTIAL: &str = "whimbrel-master-key";
/// Most bytes of a key as text, with whatever blanks are around it.
const KEY_MAX: u64 = 4096;
/// Time that a command has to print the key. The daemon does not start before that.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// Exit code of coreutils' `timeout` for a command that it ended.
const TIMED_OUT: i32 = 124;

/// Where the master key comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeySource {
    /// A file with 64 hexadecimal digits.
    File(PathBuf),
    /// A command line for `sh` that prints them.
    Command(String),
    /// The credential `whimbrel-master-key` that systemd gives to its unit.
    Credential,
}

impl KeySource {
    /// Reads the key. `data` is the folder that it protects.
    pub(crate) fn read(&self, data: &Path) -> Result<MasterKey, DaemonError> {
        match self {
            Self::File(path) => read_file(path, data),
            Self::Command(line) => run(line, COMMAND_TIMEOUT),
            Self::Credential => {
                let dir = std::env::var_os("CREDENTIALS_DIRECTORY").ok_or_else(|| {
                    unusable("systemd", "$CREDENTIALS_DIRECTORY is not set, and no file or command was named")
                })?;
                let path = Path::new(&dir).join(CREDENTIAL);
                let file = File::open(&path).map_err(|error| unusable(path.display(), error))?;
                parse(path.display(), file)
            }
        }
    }
}

/// Reads a key file that only its owner may read, outside of `data`.
pub(crate) fn read_file(path: &Path, data: &Path) -> Result<MasterKey, DaemonError> {
    let place = path.display();
    let file = File::open(path).map_err(|error| unusable(&place, error))?;
    let mode = file.metadata().map_err(|error| unusable(&place, error))?.mode();
    if mode & 0o077 != 0 {
        return Err(unusable(&place, "other users may read it; `chmod 600` it"));
    }
    let real = |path: &Path| path.canonicalize().map_err(|error| unusable(path.display(), error));
    if real(path)?.starts_with(real(data)?) {
        return Err(unusable(&place, "it lies in the folder that it protects, so a thief would have both"));
    }
    parse(place, file)
}

/// Runs a command line with its processes for at most `limit`.
fn run(line: &str, limit: Duration) -> Result<MasterKey, DaemonError> {
    let place = format!("`{line}`");
    let failed = |error: io::Error| unusable(&place, error);
    let mut command = Command::new("timeout");
    command
        .args(["--kill-after=5", &limit.as_secs_f64().to_string(), "sh", "-c", line])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    let key = match child.stdout.take() {
        Some(output) => parse(&place, output),
        None => Err(unusable(&place, "it has no output")),
    };
    let status = child.wait().map_err(failed)?;
    match status.code() {
        Some(0) => key,
        Some(TIMED_OUT) => Err(unusable(&place, format!("it had not ended after {} s", limit.as_secs_f64()))),
        _ => Err(unusable(&place, format!("it ended with {status}"))),
    }
}

fn parse(place: impl Display, input: impl Read) -> Result<MasterKey, DaemonError> {
    let mut text = String::new();
    let read = input.take(KEY_MAX).read_to_string(&mut text);
    read.map_err(|error| unusable(&place, error))?;
    text.parse().map_err(|error: whimbrel_store::MasterKeyError| unusable(&place, error))
}

fn unusable(place: impl Display, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> DaemonError {
    DaemonError::MasterKey { place: place.to_string(), source: source.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt};

    #[test]
    fn a_key_that_others_may_read_or_that_lies_with_the_data_is_refused() {
        let (dir, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (path, inside) = (dir.path().join("key"), data.path().join("key"));
        for path in [&path, &inside] {
            fs::write(path, "ab".repeat(32)).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
        }
        let read = |path: &Path| KeySource::File(path.to_owned()).read(data.path());
        let key = read(&path).unwrap();
        assert!(read(&inside).is_err());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(read(&path).is_err());
        let command = |line: &str| KeySource::Command(line.to_owned()).read(data.path());
        assert_eq!(command(&format!("cat {}", path.display())).unwrap(), key);
        for line in ["true", "exit 3", "yes | head -c 100000", "echo ab"] {
            assert!(command(line).is_err(), "{line}");
        }
        assert!(command(&format!("cat {}; exit 1", path.display())).is_err(), "a failed command has no key");
    }

    #[test]
    fn a_command_that_hangs_does_not_hang_the_daemon() {
        let refused = run("sleep 600 & wait", Duration::from_millis(100)).unwrap_err();
        assert!(whimbrel_core::error_chain(&refused).contains("had not ended after 0.1 s"), "{refused:?}");
    }
}
