//! Samples for tests: daemons without machines, and a small capsule.

use crate::{core::directories::Directories, daemon::Daemon, image::ImageSources, server::peer_rpc};
use std::{collections::BTreeMap, sync::Arc};
use tempfile::TempDir;
use tokio::net::TcpListener;
use whimbrel_core::{ByteSize, CapsuleId, HostName, MachineConfig, PAGE_SIZE, PageRun};
use whimbrel_image::{FORMAT, ImageRef, Manifest};
use whimbrel_store::Store;
use whimbrel_wire::{Identity, PublicKey, Rights, TrustedPeer};

/// An address where nobody serves.
const NOWHERE: &str = "127.0.0.1:1";

/// What a sample lives in, until dropped.
pub(crate) struct Folders {
    _data: TempDir,
    _run: TempDir,
    _runtime: tokio::runtime::Runtime,
}

/// A daemon called alpha that serves nobody, and filters the ports of all machines but `router`.
pub(crate) fn daemon() -> (Arc<Daemon>, Folders) {
    named("alpha".parse().unwrap())
}

fn named(name: HostName) -> (Arc<Daemon>, Folders) {
    let (data, run) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let directories = Directories::create(data.path(), run.path()).unwrap();
    let unfiltered = vec!["router".parse().unwrap()];
    let images = ImageSources::new(Vec::new(), Default::default()).unwrap();
    let daemon = Daemon::open((name, None), directories, unfiltered, images, None, runtime.handle().clone());
    (daemon.unwrap(), Folders { _data: data, _run: run, _runtime: runtime })
}

/// Daemons of these names that serve each other on loopback, with all rights. Each trusts `absent` beside
/// them, a host that nobody reaches.
pub(crate) fn hosts<const N: usize>(names: [&str; N]) -> ([Arc<Daemon>; N], Vec<Folders>) {
    let made = names.map(|name| named(name.parse().unwrap()));
    let absent = TrustedPeer { address: Some(NOWHERE.parse().unwrap()), ..peer("absent", new_key()) };
    let peers: Vec<TrustedPeer> = made.iter().map(|(host, _)| serving(host)).chain([absent]).collect();
    for (host, _) in &made {
        let others = peers.iter().filter(|peer| peer.name != host.name);
        others.for_each(|other| host.trust.add(other.clone()).unwrap());
    }
    let (hosts, folders): (Vec<_>, Vec<_>) = made.into_iter().unzip();
    (hosts.try_into().unwrap_or_else(|_| unreachable!("as many as names")), folders)
}

/// A host that `host` trusts and that never answers, as long as the listener is there.
pub(crate) fn trust_hung(host: &Daemon, name: &str) -> std::net::TcpListener {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string().parse().unwrap();
    host.trust.add(TrustedPeer { address: Some(address), ..peer(name, new_key()) }).unwrap();
    listener
}

/// How others know a host that is served from now on.
fn serving(host: &Arc<Daemon>) -> TrustedPeer {
    let listener = host.runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap().to_string().parse().unwrap();
    peer_rpc::serve(host.clone(), listener);
    TrustedPeer { address: Some(address), ..peer(host.name.as_str(), host.identity().unwrap().public_key()) }
}

/// A host without an address.
fn peer(name: &str, key: PublicKey) -> TrustedPeer {
    let (name, rights) = (name.parse().unwrap(), Rights::all());
    TrustedPeer { name, key: Some(key), address: None, rights, read: None, write: None }
}

fn new_key() -> PublicKey {
    Identity::ephemeral().unwrap().public_key()
}

/// A capsule of two pages that are filled with `fill`.
pub(crate) fn capsule(store: &Store, fill: u8, parents: Vec<CapsuleId>, name: &str) -> CapsuleId {
    let writer = store.writer().unwrap();
    let mut image = writer.image(None, 2).unwrap();
    image.put(PageRun::new(0, 2), &[fill; 2 * PAGE_SIZE]).unwrap();
    let root = image.finish().unwrap().root;
    let machine = MachineConfig::minimal(ByteSize(2 * PAGE_SIZE as u64));
    let manifest = Manifest {
        format: FORMAT,
        machine,
        device: vec![],
        images: vec![ImageRef { name: "memory".into(), pages: 2, root, cuts: None }],
        parents,
        time: 1,
        host: "alpha".into(),
        labels: BTreeMap::new(),
        working_set: None,
    };
    writer.commit(&manifest, &[name.parse().unwrap()]).unwrap()
}
