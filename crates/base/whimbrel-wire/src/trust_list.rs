//! The trust list of a host: `trust.toml` has a `[[peer]]` table for each peer, like ssh's `authorized_keys`.
//!
//! Every entry has a key, except for a host that is only called over ssh, where ssh checks the host key.
//! Every lookup notices a changed file, so `whimbrel trust add` needs no restart. The file is replaced
//! atomically under a lock on `trust.lock`. A damaged file trusts nobody and is never overwritten.

use crate::{PeerAddress, PeerIdentity, PublicKey, RefPatterns, Rights, TrustError, atomic_file};
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io::{self, Read as _},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};
use whimbrel_core::{HostName, lock};

/// Larger than any trust list; a larger file is refused.
const MAX_FILE: u64 = 4 << 20;

/// One trusted host of the list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrustedPeer {
    /// Local name of the host.
    pub name: HostName,
    /// The host's public key. Without one there is no TLS in either direction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<PublicKey>,
    /// The host's address; without one it cannot be called from here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<PeerAddress>,
    /// Rights of the host on this host.
    #[serde(default = "Rights::all")]
    pub rights: Rights,
    /// Refs here that the host may read. Without `read` and `write` it may read and write all refs; with
    /// either, only the refs that match.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<RefPatterns>,
    /// Refs here that the host may write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write: Option<RefPatterns>,
}

/// The route to a trusted host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    /// TLS to `address`, which must present this key.
    Tls {
        /// The address as `host:port`.
        address: String,
        /// The pinned key.
        key: PublicKey,
    },
    /// The user's ssh.
    Ssh {
        /// The destination as ssh reads it.
        destination: String,
    },
}

impl TrustedPeer {
    /// The route to the host, if its entry has one.
    pub fn route(&self) -> Option<Route> {
        match self.address.clone()? {
            PeerAddress::Tcp(address) => self.key.map(|key| Route::Tls { address, key }),
            PeerAddress::Ssh(destination) => Some(Route::Ssh { destination }),
        }
    }

    /// Whether the entry limits the refs that the host may use.
    pub fn is_limited(&self) -> bool {
        self.read.is_some() || self.write.is_some()
    }

    /// Whether the ref patterns let the host read the ref `name`.
    pub fn reads(&self, name: &str) -> bool {
        !self.is_limited() || self.read.as_ref().is_some_and(|patterns| patterns.matches(name))
    }

    /// Whether the ref patterns let the host write the ref `name`.
    pub fn writes(&self, name: &str) -> bool {
        !self.is_limited() || self.write.as_ref().is_some_and(|patterns| patterns.matches(name))
    }

    /// Every entry needs a key or an ssh address.
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

/// Tells whether an open file has the same content: size, seconds and nanoseconds of its last change.
type Stamp = (u64, i64, i64);

/// The stamp of a file that is still the one of its path. A file that is replaced loses its name, perhaps
/// already between its opening and this call: it has no stamp then, and is not looked at again.
fn stamp(file: &File) -> Option<Stamp> {
    let meta = file.metadata().ok().filter(|meta| meta.nlink() > 0)?;
    Some((meta.size(), meta.ctime(), meta.ctime_nsec()))
}

/// Entries of the file, shared with those who look one up.
type Peers = Arc<Vec<Arc<TrustedPeer>>>;

/// The file as it was read last. It stays open, because to ask an open file costs a third of what its path
/// does, and each request of a peer asks.
#[derive(Debug)]
struct Seen {
    file: File,
    stamp: Stamp,
    peers: Peers,
}

/// The trust list in the file `trust.toml`.
#[derive(Debug)]
pub struct Trust {
    path: PathBuf,
    seen: Mutex<Option<Seen>>,
}

impl Trust {
    /// The list in `trust.toml` of `dir`, which is not read yet. As long as it cannot be read, nobody is
    /// trusted.
    pub fn open(dir: &Path) -> Self {
        Self { path: dir.join("trust.toml"), seen: Mutex::default() }
    }

    /// Opens `trust.toml` in `dir` and reads it; without the file, nobody is trusted.
    pub fn load(dir: &Path) -> Result<Self, TrustError> {
        let trust = Self::open(dir);
        trust.list()?;
        Ok(trust)
    }

    /// All trusted hosts of the current file.
    pub fn list(&self) -> Result<Vec<TrustedPeer>, TrustError> {
        Ok(self.peers()?.iter().map(|peer| TrustedPeer::clone(peer)).collect())
    }

    /// The list without a copy of it: it is looked up for every request of a peer.
    fn peers(&self) -> Result<Peers, TrustError> {
        let mut seen = lock(&self.seen);
        if let Some(seen) = &*seen
            && stamp(&seen.file) == Some(seen.stamp)
        {
            return Ok(seen.peers.clone());
        }
        *seen = None;
        match File::open(&self.path) {
            Ok(file) => self.read_opened(file, &mut seen),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Peers::default()),
            Err(source) => Err(self.file("read", source)),
        }
    }

    /// Reads the list, and remembers it unless its file was replaced since it was opened.
    fn read_opened(&self, file: File, seen: &mut Option<Seen>) -> Result<Peers, TrustError> {
        if file.metadata().map_err(|source| self.file("read", source))?.len() > MAX_FILE {
            return Err(TrustError::TooLarge { path: self.path.clone() });
        }
        let before = stamp(&file);
        let peers: Peers = Arc::new(self.read(&file)?.into_iter().map(Arc::new).collect());
        *seen = before.map(|stamp| Seen { file, stamp, peers: peers.clone() });
        Ok(peers)
    }

    fn read(&self, mut file: &File) -> Result<Vec<TrustedPeer>, TrustError> {
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(|source| self.file("read", source))?;
        let file: TrustFile = toml::from_str(&text)
            .map_err(|source| TrustError::Damaged { path: self.path.clone(), source: Box::new(source) })?;
        file.peer.iter().try_for_each(TrustedPeer::check)?;
        Ok(file.peer)
    }

    /// The entry of `key`, if it is trusted.
    pub fn find(&self, key: &PublicKey) -> Result<Option<Arc<TrustedPeer>>, TrustError> {
        Ok(self.peers()?.iter().find(|peer| peer.key == Some(*key)).cloned())
    }

    /// The entry of a peer that a transport has authenticated. A process on standard input has none.
    pub fn entry(&self, identity: &PeerIdentity) -> Result<Option<Arc<TrustedPeer>>, TrustError> {
        match identity {
            PeerIdentity::Key(key) => self.find(key),
            PeerIdentity::Ssh(destination) => {
                let reaches = |peer: &&Arc<TrustedPeer>| matches!(&peer.address, Some(PeerAddress::Ssh(known)) if known == destination);
                Ok(self.peers()?.iter().find(reaches).cloned())
            }
            PeerIdentity::Stdio => Ok(None),
        }
    }

    /// The entry of the host `name`.
    pub fn named(&self, name: &HostName) -> Result<Option<Arc<TrustedPeer>>, TrustError> {
        Ok(self.peers()?.iter().find(|peer| peer.name == *name).cloned())
    }

    /// Adds `peer`, durably. A name or key that is already in the list is refused.
    pub fn add(&self, peer: TrustedPeer) -> Result<(), TrustError> {
        peer.check()?;
        self.change(|peers| {
            if let Some(old) = peers.iter().find(|old| old.clashes(&peer)) {
                return Err(TrustError::AlreadyTrusted { name: old.name.clone() });
            }
            peers.push(peer);
            Ok(())
        })
    }

    /// Replaces the ref patterns of the host `name`, durably, and returns its entry.
    pub fn limit(
        &self,
        name: &HostName,
        (read, write): (Option<RefPatterns>, Option<RefPatterns>),
    ) -> Result<TrustedPeer, TrustError> {
        self.change(|peers| {
            let peer = peers.iter_mut().find(|peer| peer.name == *name);
            let peer = peer.ok_or_else(|| TrustError::NotListed { name: name.clone() })?;
            (peer.read, peer.write) = (read, write);
            Ok(peer.clone())
        })
    }

    /// Removes the host `name`, durably, and returns its entry. Its requests are refused from then on, and
    /// its open connections end within moments.
    pub fn remove(&self, name: &HostName) -> Result<TrustedPeer, TrustError> {
        self.change(|peers| {
            let at = peers.iter().position(|peer| peer.name == *name);
            at.map(|at| peers.remove(at)).ok_or_else(|| TrustError::NotListed { name: name.clone() })
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
    use std::fs;

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
        assert_eq!(running.find(&PublicKey([2; 32])).unwrap(), Some(Arc::new(limited)));
        editor.remove(&"alpha".parse().unwrap()).unwrap();
        assert_eq!(running.find(&PublicKey([1; 32])).unwrap(), None);
        assert!(matches!(editor.remove(&"alpha".parse().unwrap()), Err(TrustError::NotListed { .. })));
    }

    #[test]
    fn a_list_that_was_replaced_while_it_was_opened_is_not_believed_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let (running, editor) = (Trust::load(dir.path()).unwrap(), Trust::load(dir.path()).unwrap());
        editor.add(peer("alpha", 1)).unwrap();
        let opened = File::open(dir.path().join("trust.toml")).unwrap();
        editor.remove(&"alpha".parse().unwrap()).unwrap();
        assert_eq!(running.read_opened(opened, &mut lock(&running.seen)).unwrap().len(), 1);
        assert_eq!(running.find(&PublicKey([1; 32])).unwrap(), None);
    }

    #[test]
    fn a_file_that_was_replaced_or_removed_is_not_believed_any_more() {
        let dir = tempfile::tempdir().unwrap();
        let trust = Trust::load(dir.path()).unwrap();
        trust.add(peer("alpha", 1)).unwrap();
        let is_known = || trust.find(&PublicKey([1; 32])).unwrap().is_some();
        let [path, copy, empty] = ["trust.toml", "copy", "empty"].map(|name| dir.path().join(name));
        assert!(is_known());
        fs::hard_link(&path, &copy).unwrap();
        fs::write(&empty, "").unwrap();
        fs::rename(&empty, &path).unwrap();
        assert!(!is_known(), "it has another name, but not that of the list");
        fs::rename(&copy, &path).unwrap();
        assert!(is_known());
        fs::remove_file(&path).unwrap();
        assert!(!is_known());
    }

    #[test]
    fn one_name_never_stands_for_two_keys() {
        let dir = tempfile::tempdir().unwrap();
        let trust = Trust::load(dir.path()).unwrap();
        trust.add(peer("alpha", 1)).unwrap();
        assert!(matches!(trust.add(peer("alpha", 2)), Err(TrustError::AlreadyTrusted { .. })));
        assert!(matches!(trust.add(peer("beta", 1)), Err(TrustError::AlreadyTrusted { .. })));
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
            Err(TrustError::NotListed { .. })
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
