//! Files and folders that COPY takes from the folder of a recipe.

use crate::{commands::cp, context::Context, error::CliError};
use std::{
    fs::{self, File},
    io::Read,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};
use whimbrel_core::{Digest, MachineName};

/// Bytes of an archive that are hashed at once.
const PART: u64 = 1 << 20;
/// Archive in the guest, until it is unpacked.
const ARCHIVE: &str = "/.whimbrel-copy.tar";

/// A file or folder that COPY names.
#[derive(Debug)]
pub(super) struct CopySource {
    path: PathBuf,
    is_folder: bool,
    /// Content, names and modes; times and owners are left out.
    pub(super) digest: Digest,
}

impl CopySource {
    pub(super) fn read(folder: &Path, name: &str) -> Result<Self, CliError> {
        let path = folder.join(name);
        let about = fs::metadata(&path).map_err(|source| CliError::File { path: path.clone(), source })?;
        let mut source = Self { path, is_folder: about.is_dir(), digest: Digest::of(b"") };
        source.digest = source.hash()?;
        Ok(source)
    }

    fn hash(&self) -> Result<Digest, CliError> {
        let mut tar = self.tar(&["--sort=name", "--mtime=@0", "--format=gnu"])?.spawn().map_err(no_tar)?;
        let mut archive = tar.stdout.take().expect("a pipe was asked for");
        let (mut digest, mut part) = (Digest::of(b""), Vec::new());
        loop {
            part.clear();
            part.extend(digest.as_bytes());
            let read = archive.by_ref().take(PART).read_to_end(&mut part);
            if read.map_err(CliError::io("read what is to be copied"))? == 0 {
                break;
            }
            digest = Digest::of(&part);
        }
        match tar.wait().map_err(no_tar)?.success() {
            true => Ok(digest),
            false => Err(self.unreadable()),
        }
    }

    /// The program that writes an archive: of the content of a folder, or of a file.
    fn tar(&self, options: &[&str]) -> Result<Command, CliError> {
        let (folder, what) = match self.is_folder {
            true => (self.path.as_path(), Path::new(".")),
            false => {
                let name = self.path.file_name().map(Path::new).ok_or_else(|| self.unreadable())?;
                (self.path.parent().unwrap_or(Path::new("/")), name)
            }
        };
        let mut tar = Command::new("tar");
        tar.args(options).args(["--owner=0", "--group=0", "--numeric-owner", "-cf", "-", "-C"]);
        tar.arg(folder).arg("--").arg(what).stdin(Stdio::null()).stdout(Stdio::piped());
        Ok(tar)
    }

    fn unreadable(&self) -> CliError {
        CliError::Step {
            step: format!("copy {}", self.path.display()),
            said: "tar could not read all of it".to_owned(),
        }
    }

    /// Sends it to the guest, and returns what a shell is to do there with it. A file goes to `to`, or into
    /// that if it ends in `/`; of a folder, the content goes into `to`. Refused if it is no longer what the
    /// digest says: the state of the step would be taken for that of other content.
    pub(super) async fn send(
        &self,
        context: &Context,
        machine: &MachineName,
        to: &str,
    ) -> Result<String, CliError> {
        let then = self.send_now(context, machine, to).await?;
        if self.hash()? == self.digest {
            return Ok(then);
        }
        let step = format!("copy {}", self.path.display());
        Err(CliError::Step { step, said: "it has changed since the build began".to_owned() })
    }

    async fn send_now(&self, context: &Context, machine: &MachineName, to: &str) -> Result<String, CliError> {
        if self.is_folder {
            let mut tar = self.tar(&[])?.spawn().map_err(no_tar)?;
            let archive = tar.stdout.take().expect("a pipe was asked for");
            cp::send(context, machine, ARCHIVE, archive).await?;
            if !tar.wait().map_err(no_tar)?.success() {
                return Err(self.unreadable());
            }
            return Ok(format!(
                "mkdir -p \"$to\" && $tar -xf {ARCHIVE} -C \"$to\"; status=$?; rm -f {ARCHIVE}; exit $status"
            ));
        }
        let failed = |source| CliError::File { path: self.path.clone(), source };
        let file = File::open(&self.path).map_err(failed)?;
        let mode = file.metadata().map_err(failed)?.permissions().mode() & 0o7777;
        cp::send(context, machine, ARCHIVE, file).await?;
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let place = if to.ends_with('/') { crate::first_boot::shell_word(&name) } else { String::new() };
        Ok(format!(
            "to=\"$to\"{place}; mkdir -p \"${{to%/*}}/\" && chmod {mode:o} {ARCHIVE} && mv -f {ARCHIVE} \"$to\""
        ))
    }
}

fn no_tar(source: std::io::Error) -> CliError {
    CliError::Step { step: "run tar".to_owned(), said: source.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_the_same_until_a_name_a_mode_or_a_byte_of_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let site = dir.path().join("site");
        fs::create_dir(&site).unwrap();
        let file = site.join("index.html");
        let now = || CopySource::read(dir.path(), "site").unwrap().digest;
        fs::write(&file, "one").unwrap();
        let first = now();
        File::options().write(true).open(&file).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(now(), first, "only its time has changed");
        fs::write(&file, "two").unwrap();
        let second = now();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let third = now();
        fs::rename(&file, site.join("other.html")).unwrap();
        let all = [first, second, third, now()];
        assert!((1..4).all(|at| !all[..at].contains(&all[at])), "{all:?}");
        let one = CopySource::read(dir.path(), "site/other.html").unwrap();
        assert!(!one.is_folder && one.digest != now());
        assert!(matches!(CopySource::read(dir.path(), "absent"), Err(CliError::File { .. })));
    }
}
