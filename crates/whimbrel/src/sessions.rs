//! Where sessions of this user keep what they keep: keys, caches, control sockets.

use crate::failure::Failure;
use std::{
    env, fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

fn home() -> PathBuf {
    env::var_os("HOME").map_or_else(|| PathBuf::from("/"), PathBuf::from)
}

fn below(variable: &str, otherwise: &str) -> PathBuf {
    let set = env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    set.unwrap_or_else(|| home().join(otherwise)).join("whimbrel")
}

/// The folder of this user's key and of the keys it trusts.
pub(crate) fn keys(given: Option<&Path>) -> PathBuf {
    given.map_or_else(|| below("XDG_CONFIG_HOME", ".config"), Path::to_owned)
}

/// The folder of the cache of one target.
pub(crate) fn cache(given: Option<&Path>, target: &str) -> PathBuf {
    let flat: String = target
        .chars()
        .map(|letter| if letter.is_ascii_alphanumeric() || letter == '.' { letter } else { '_' })
        .collect();
    let digest = whimbrel_core::Digest::of(target.as_bytes()).to_string();
    let short: String = flat.chars().take(60).collect();
    let name = format!("{short}-{}", digest.chars().rev().take(8).collect::<String>());
    given.map_or_else(|| below("XDG_CACHE_HOME", ".cache").join("sessions").join(name), Path::to_owned)
}

/// The folder of control sockets: nobody else's, whoever was here first.
pub(crate) fn control(given: Option<&Path>) -> Result<PathBuf, Failure> {
    let own = rustix::process::geteuid();
    let usual = match env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
        Some(dir) if dir.is_absolute() => dir.join("whimbrel/sessions"),
        _ if own.is_root() => PathBuf::from("/run/whimbrel/sessions"),
        _ => env::temp_dir().join(format!("whimbrel-{}", own.as_raw())).join("sessions"),
    };
    let dir = given.map_or(usual, Path::to_owned);
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&dir)
        .map_err(Failure::io("make the folder of control sockets"))?;
    let found = fs::metadata(&dir).map_err(Failure::io("look at the folder of control sockets"))?;
    if found.uid() != own.as_raw() || found.mode() & 0o022 != 0 {
        let source = io::Error::new(io::ErrorKind::PermissionDenied, "others may write there");
        return Err(Failure::Io { action: "use the folder of control sockets", source });
    }
    Ok(dir)
}
