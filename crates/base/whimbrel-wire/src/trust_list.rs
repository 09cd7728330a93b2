//! Whom this host trusts: `trust.toml`, one `[[peer]]` each, by key like ssh's `authorized_keys`.
//!
//! A host that is only gone to, over ssh, needs no key: ssh knows its own. Every other entry has one.
//!
//! The file is the truth: every look-up notices a changed file, so `whimbrel trust add` needs no restart. It
//! is replaced atomically under a lock on `trust.lock`. A damaged file trusts nobody and is never
//! overwritten.

use crate::{PeerAddress, PublicKey, RefPatterns, Rights, TrustError, atomic_file};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};
use whimbrel_core::HostName;

/// More than any trust file needs; beyond it the file is not ours.
const MAX_FILE: u64 = 4 << 20;

/// One trusted host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrustedPeer {
    /// What we call it.
    pub name: HostName,
    /// Its key. Without one it cannot come here by TLS, nor be reached by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<PublicKey>,
    /// Where it is reached; without one it can only come here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<PeerAddress>,
    /// What it may ask of us.
    #[serde(default = "Rights::all")]
    pub rights: Rights,
    /// Which refs of ours it may read. Without this and `write` it may read and write all; with one of them
    /// only what they say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<RefPatterns>,
    /// Which refs of ours it may write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write: Option<RefPatterns>,
}

/// The way to a trusted host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    /// TLS to `address`, where this key must answer.
    Tls {
        /// As `host:port`.
        address: String,
        /// The pinned key.
        key: PublicKey,
    },
    /// The user's ssh.
    Ssh {
        /// As ssh reads it.
        destination: String,
    },
}

impl TrustedPeer {
    /// How it is reached, if it can be.
    pub fn route(&self) -> Option<Route> {
        match self.address.clone()? {
            PeerAddress::Tcp(address) => self.key.map(|key| Route::Tls { address, key }),
            PeerAddress::Ssh(destination) => Some(Route::Ssh { destination }),
        }
    }

    /// Whether one of its lists narrows which refs it may use.
    pub fn is_limited(&self) -> bool {
        self.read.is_some() || self.write.is_some()
    }

    /// Whether it may read the ref called `name`, as far as its lists say.
    pub fn reads(&self, name: &str) -> bool {
        !self.is_limited() || self.read.as_ref().is_some_and(|patterns| patterns.matches(name))
    }

    /// Whether it may write the ref called `name`, as far as its lists say.
    pub fn writes(&self, name: &str) -> bool {
        !self.is_limited() || self.write.as_ref().is_some_and(|patterns| patterns.matches(name))
    }

    /// An entry vouches for a host by its key or by ssh; one that does neither is a mistake.
    fn check(&self) -> Result<(), TrustError> {
        match (self.key, &self.address) {
            (None, None | Some(PeerAddress::Tcp(_))) => Err(TrustError::NoKey { name: self.name.clone() }),
            _ => Ok(()),
        }
    }

    fn clashes(&self, other: &Self) -> bool {
        self.name == other.name || (self.key.is_some() && self.key == other.key)
    }
}

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TrustFile {
    #[serde(default)]
    peer: Vec<TrustedPeer>,
}

/// Tells one content of the file from another: inode, size, seconds and nanoseconds of change.
type Stamp = (u64, u64, i64, i64);

/// The trust file of a host.
#[derive(Debug)]
pub struct Trust {
    path: PathBuf,
    seen: Mutex<(Option<Stamp>, Vec<TrustedPeer>)>,
}

impl Trust {
    /// The trust file `trust.toml` in `dir`; absent, it trusts nobody.
    pub fn load(dir: &Path) -> Result<Self, TrustError> {
        let trust = Self { path: dir.join("trust.toml"), seen: Mutex::default() };
        trust.list()?;
        Ok(trust)
    }

    /// All trusted hosts, as the file says now.
    pub fn list(&self) -> Result<Vec<TrustedPeer>, TrustError> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = match fs::metadata(&self.path) {
            Ok(meta) if meta.len() > MAX_FILE => {
                return Err(TrustError::TooLarge { path: self.path.clone() });
            }
            Ok(meta) => Some((meta.ino(), meta.size(), meta.ctime(), meta.ctime_nsec())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(source) => return Err(self.file("read", source)),
        };
        if stamp.is_none() || stamp != seen.0 {
            let peers = if stamp.is_some() { self.read()? } else { Vec::new() };
            *seen = (stamp, peers);
        }
        Ok(seen.1.clone())
    }

    fn read(&self) -> Result<Vec<TrustedPeer>, TrustError> {
        let text = fs::read_to_string(&self.path).map_err(|source| self.file("read", source))?;
        let file: TrustFile = toml::from_str(&text)
            .map_err(|source| TrustError::Damaged { path: self.path.clone(), source: Box::new(source) })?;
        file.peer.iter().try_for_each(TrustedPeer::check)?;
        Ok(file.peer)
    }

    /// The entry of `key`, if it is trusted.
    pub fn find(&self, key: &PublicKey) -> Result<Option<TrustedPeer>, TrustError> {
        Ok(self.list()?.into_iter().find(|peer| peer.key == Some(*key)))
    }

    /// The entry called `name`.
    pub fn named(&self, name: &HostName) -> Result<Option<TrustedPeer>, TrustError> {
        Ok(self.list()?.into_iter().find(|peer| peer.name == *name))
    }

    /// Trusts `peer`. Durable when it returns. A name or key that is already there is refused.
    pub fn add(&self, peer: TrustedPeer) -> Result<(), TrustError> {
        peer.check()?;
        self.change(|peers| {
            if let Some(old) = peers.iter().find(|old| old.clashes(&peer)) {
                return Err(TrustError::Known { name: old.name.clone() });
            }
            peers.push(peer);
            Ok(())
        })
    }

    /// Says anew which refs the host called `name` may read and write, and returns its entry. Durable when it
    /// returns.
    pub fn limit(
        &self,
        name: &HostName,
        (read, write): (Option<RefPatterns>, Option<RefPatterns>),
    ) -> Result<TrustedPeer, TrustError> {
        self.change(|peers| {
            let peer = peers.iter_mut().find(|peer| peer.name == *name);
            let peer = peer.ok_or_else(|| TrustError::Unknown { name: name.clone() })?;
            (peer.read, peer.write) = (read, write);
            Ok(peer.clone())
        })
    }

    /// Trusts the host called `name` no more and returns its entry. Durable when it returns; connections that
    /// stand go on until they end.
    pub fn remove(&self, name: &HostName) -> Result<TrustedPeer, TrustError> {
        self.change(|peers| {
            let at = peers.iter().position(|peer| peer.name == *name);
            at.map(|at| peers.remove(at)).ok_or_else(|| TrustError::Unknown { name: name.clone() })
        })
    }

    fn change<T>(
        &self,
        edit: impl FnOnce(&mut Vec<TrustedPeer>) -> Result<T, TrustError>,
    ) -> Result<T, TrustError> {
        let lock_path = self.path.with_extension("lock");
        let lock = File::options().create(true).append(true).open(lock_path);
        let lock = lock.map_err(|source| self.file("lock", source))?;
        lock.lock().map_err(|source| self.file("lock", source))?;
        let mut file = TrustFile { peer: self.list()? };
        let outcome = edit(&mut file.peer)?;
        let text = toml::to_string_pretty(&file)
            .map_err(|source| TrustError::Encode { path: self.path.clone(), source: Box::new(source) })?;
        atomic_file::replace(&self.path, text.as_bytes()).map_err(|source| self.file("write", source))?;
        Ok(outcome)
    }

    fn file(&self, action: &'static str, source: io::Error) -> TrustError {
        TrustError::File { action, path: self.path.clone(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Right;

    fn peer(name: &str, byte: u8) -> TrustedPeer {
        let address = Some("10.0.0.1:7400".parse().unwrap());
        let key = Some(PublicKey([byte; 32]));
        let (read, write) = (None, None);
        TrustedPeer { name: name.parse().unwrap(), key, address, rights: Rights::all(), read, write }
    }

    fn by_ssh(name: &str) -> TrustedPeer {
        let address = Some(format!("ssh:root@{name}").parse().unwrap());
        TrustedPeer { key: None, address, ..peer(name, 0) }
    }

    #[test]
    fn a_change_is_seen_by_a_process_that_runs_already() {
        let dir = tempfile::tempdir().unwrap();
        let (running, editor) = (Trust::load(dir.path()).unwrap(), Trust::load(dir.path()).unwrap());
        let limited = TrustedPeer { rights: Rights(vec![Right::Store]), ..peer("beta", 2) };
        editor.add(peer("alpha", 1)).unwrap();
        editor.add(limited.clone()).unwrap();
        assert_eq!(running.list().unwrap(), [peer("alpha", 1), limited.clone()]);
        assert_eq!(running.find(&PublicKey([2; 32])).unwrap(), Some(limited));
        editor.remove(&"alpha".parse().unwrap()).unwrap();
        assert_eq!(running.find(&PublicKey([1; 32])).unwrap(), None);
        assert!(matches!(editor.remove(&"alpha".parse().unwrap()), Err(TrustError::Unknown { .. })));
    }

    #[test]
    fn one_name_never_stands_for_two_keys() {
        let dir = tempfile::tempdir().unwrap();
        let trust = Trust::load(dir.path()).unwrap();
        trust.add(peer("alpha", 1)).unwrap();
        assert!(matches!(trust.add(peer("alpha", 2)), Err(TrustError::Known { .. })));
        assert!(matches!(trust.add(peer("beta", 1)), Err(TrustError::Known { .. })));
        assert_eq!(trust.list().unwrap(), [peer("alpha", 1)]);
    }

    #[test]
    fn only_ssh_makes_up_for_a_key() {
        let dir = tempfile::tempdir().unwrap();
        let trust = Trust::load(dir.path()).unwrap();
        for address in [None, peer("beta", 1).address] {
            let keyless = TrustedPeer { key: None, address, ..peer("beta", 1) };
            assert!(matches!(trust.add(keyless), Err(TrustError::NoKey { .. })));
        }
        trust.add(by_ssh("beta")).unwrap();
        trust.add(by_ssh("gamma")).unwrap();
        assert_eq!(trust.list().unwrap(), [by_ssh("beta"), by_ssh("gamma")]);
        assert_eq!(by_ssh("beta").route(), Some(Route::Ssh { destination: "root@beta".to_owned() }));
        fs::write(dir.path().join("trust.toml"), "[[peer]]\nname = \"beta\"\naddress = \"b:1\"").unwrap();
        assert!(matches!(trust.list(), Err(TrustError::NoKey { .. })));
    }

    #[test]
    fn editors_at_once_lose_no_entry() {
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for byte in 0..16 {
                let dir = dir.path();
                scope.spawn(move || Trust::load(dir).unwrap().add(peer(&format!("h{byte}"), byte)).unwrap());
            }
        });
        assert_eq!(Trust::load(dir.path()).unwrap().list().unwrap().len(), 16);
    }

    #[test]
    fn a_damaged_file_trusts_nobody_and_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let trust = Trust::load(dir.path()).unwrap();
        trust.add(peer("alpha", 1)).unwrap();
        fs::write(dir.path().join("trust.toml"), "[[peer]]\nname = 3").unwrap();
        assert!(matches!(trust.find(&PublicKey([1; 32])), Err(TrustError::Damaged { .. })));
        assert!(trust.add(peer("beta", 2)).is_err());
        assert_eq!(fs::read_to_string(dir.path().join("trust.toml")).unwrap(), "[[peer]]\nname = 3");
    }

    #[test]
    fn a_file_without_lists_gives_all_and_one_list_leaves_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let trust = Trust::load(dir.path()).unwrap();
        trust.add(peer("alpha", 1)).unwrap();
        let old = fs::read_to_string(dir.path().join("trust.toml")).unwrap();
        assert!(!old.contains("read") && !old.contains("write"), "as versions without lists wrote it: {old}");
        let alpha = &trust.list().unwrap()[0];
        assert!(alpha.reads("web") && alpha.writes("web") && !alpha.is_limited());
        let name = "alpha".parse().unwrap();
        let limited = trust.limit(&name, (Some("web,golden*".parse().unwrap()), None)).unwrap();
        assert_eq!(trust.list().unwrap(), std::slice::from_ref(&limited));
        assert!(limited.reads("golden-2") && !limited.reads("db") && !limited.writes("web"));
        let both = trust.limit(&name, (None, Some("backup*".parse().unwrap()))).unwrap();
        assert!(both.writes("backup-1") && !both.reads("backup-1"));
        assert_eq!(trust.limit(&name, (None, None)).unwrap(), peer("alpha", 1));
        assert!(matches!(
            trust.limit(&"beta".parse().unwrap(), (None, None)),
            Err(TrustError::Unknown { .. })
        ));
    }

    #[test]
    fn a_list_with_a_pattern_that_is_none_trusts_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let key = PublicKey([1; 32]);
        let entry = format!("[[peer]]\nname = \"alpha\"\nkey = \"{key}\"\n");
        for bad in ["read = [\"golden/*\"]".to_owned(), format!("write = {:?}", vec!["a"; 65])] {
            fs::write(dir.path().join("trust.toml"), format!("{entry}{bad}\n")).unwrap();
            assert!(matches!(Trust::load(dir.path()), Err(TrustError::Damaged { .. })), "{bad}");
        }
        fs::write(dir.path().join("trust.toml"), format!("{entry}read = [\"web\"]\n")).unwrap();
        assert!(Trust::load(dir.path()).unwrap().list().unwrap()[0].reads("web"));
    }
}
