//! Directories of the sessions of this user: keys, caches and control sockets.

use crate::error::CliError;
use std::{
    env, io,
    path::{Path, PathBuf},
};
use whimbrel_wire::private_dir;

fn home() -> PathBuf {
    env::var_os("HOME").map_or_else(|| PathBuf::from("/"), PathBuf::from)
}

fn below(variable: &str, otherwise: &str) -> PathBuf {
    let set = env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    set.unwrap_or_else(|| home().join(otherwise)).join("whimbrel")
}

/// Directory of the key of this user, and of the keys that it trusts.
pub(crate) fn keys(given: Option<&Path>) -> PathBuf {
    given.map_or_else(|| below("XDG_CONFIG_HOME", ".config"), Path::to_owned)
}

pub(crate) fn cache(given: Option<&Path>, target: &str) -> PathBuf {
    let flat: String = target
        .chars()
        .map(|letter| if letter.is_ascii_alphanumeric() || letter == '.' { letter } else { '_' })
        .collect();
    let digest = whimbrel_core::Digest::of(target.as_bytes()).to_string();
    let short: String = flat.chars().take(60).collect();
    let name = format!("{short}-{}", digest.chars().rev().take(8).collect::<String>());
    given.map_or_else(|| default_cache(&name), Path::to_owned)
}

/// A cache may have the only copy of what a program has synced, so it is not where tools and users clear up.
fn default_cache(name: &str) -> PathBuf {
    let [old, new] = [("XDG_CACHE_HOME", ".cache"), ("XDG_STATE_HOME", ".local/state")]
        .map(|(variable, otherwise)| below(variable, otherwise).join("sessions").join(name));
    used_before(old).unwrap_or(new)
}

/// The cache that an earlier version made here, if there is one: it may have unsent data.
fn used_before(cache: PathBuf) -> Option<PathBuf> {
    cache.join("lock").exists().then_some(cache)
}

/// Directory of control sockets, which must belong to this user.
pub(crate) fn control(given: Option<&Path>) -> Result<PathBuf, CliError> {
    let dir = given.map_or_else(|| at_run_time("sessions"), Path::to_owned);
    own_dir(dir).map_err(CliError::io("use the directory of control sockets"))
}

/// Directory in which servers that ssh starts share fencing tokens. It must belong to this user, too.
pub(crate) fn turns() -> io::Result<PathBuf> {
    own_dir(at_run_time("turns"))
}

fn at_run_time(what: &str) -> PathBuf {
    let own = rustix::process::geteuid();
    let dir = match env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
        Some(dir) if dir.is_absolute() => dir.join("whimbrel"),
        _ if own.is_root() => PathBuf::from("/run/whimbrel"),
        _ => env::temp_dir().join(format!("whimbrel-{}", own.as_raw())),
    };
    dir.join(what)
}

/// Creates a directory if it is missing, and refuses one that other users may replace.
fn own_dir(dir: PathBuf) -> io::Result<PathBuf> {
    let checked = private_dir::create(&dir);
    checked.map(|()| dir).map_err(|error| io::Error::new(io::ErrorKind::PermissionDenied, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_of_an_earlier_version_stays_where_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("cache");
        std::fs::create_dir(&cache).unwrap();
        assert_eq!(used_before(cache.clone()), None);
        std::fs::write(cache.join("lock"), "").unwrap();
        assert_eq!(used_before(cache.clone()), Some(cache));
    }
}
