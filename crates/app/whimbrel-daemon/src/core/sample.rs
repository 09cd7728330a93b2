//! Samples for tests: a daemon without machines, and a small capsule.

use crate::{core::directories::Directories, daemon::Daemon, image::ImageSources};
use std::{collections::BTreeMap, sync::Arc};
use tempfile::TempDir;
use whimbrel_core::{ByteSize, CapsuleId, MachineConfig, PAGE_SIZE, PageRun};
use whimbrel_image::{FORMAT, ImageRef, Manifest};
use whimbrel_store::Store;

/// What a sample lives in, until dropped.
pub(crate) struct Folders {
    _data: TempDir,
    _run: TempDir,
    _runtime: tokio::runtime::Runtime,
}

/// A daemon called alpha that serves nobody, and filters the ports of all machines but `router`.
pub(crate) fn daemon() -> (Arc<Daemon>, Folders) {
    let (data, run) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let directories = Directories::create(data.path(), run.path()).unwrap();
    let (name, unfiltered) = ("alpha".parse().unwrap(), vec!["router".parse().unwrap()]);
    let images = ImageSources::new(Vec::new(), Default::default()).unwrap();
    let daemon = Daemon::open((name, None), directories, unfiltered, images, None, runtime.handle().clone());
    (daemon.unwrap(), Folders { _data: data, _run: run, _runtime: runtime })
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
