//! Test setup: two stores, capsules in them, and links between them that fail on demand.
#![allow(dead_code)] // Each test file uses its own part of it.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tempfile::TempDir;
use whimbrel_core::{ByteSize, CapsuleId, MachineConfig, PAGE_SIZE, PageRun};
use whimbrel_image::{FORMAT, ImageRef, Manifest};
use whimbrel_store::{Options as StoreOptions, Store};
use whimbrel_transfer::{
    Answer, Holder, Holders, Link, LinkError, Options, Progress, Report, Server, TransferError,
    fetch_capsule, pull,
};
use whimbrel_wire::{Reply, Request};

/// A store in a folder of its own.
pub(crate) struct Place {
    pub(crate) store: Store,
    pub(crate) dir: TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), StoreOptions { workers: 1, ..StoreOptions::create() }).unwrap();
        Self { store, dir }
    }

    /// The store as a process that was started anew finds it.
    pub(crate) fn reopen(&mut self) {
        self.store.fetched_objects_writer().flush().unwrap();
        self.store =
            Store::open(self.dir.path(), StoreOptions { workers: 1, ..StoreOptions::default() }).unwrap();
    }

    /// A capsule of one image of memory and one blob.
    pub(crate) fn capsule(&self, memory: &[u8], device: &[u8], base: Option<CapsuleId>) -> CapsuleId {
        let pages = (memory.len() / PAGE_SIZE) as u64;
        let writer = self.store.writer().unwrap();
        let old = base.map(|base| self.store.manifest(&base).unwrap());
        let root = old.as_ref().and_then(|old| old.images[0].root);
        let mut image = writer.image(root, pages).unwrap();
        image.put(PageRun::new(0, pages), memory).unwrap();
        let root = image.finish().unwrap().root;
        let device = vec![writer.put_blob(device).unwrap()];
        let machine = MachineConfig::minimal(ByteSize(memory.len() as u64));
        let manifest = Manifest {
            format: FORMAT,
            machine,
            device,
            images: vec![ImageRef { name: "memory".into(), pages, root, cuts: None }],
            parents: base.into_iter().collect(),
            time: 1,
            host: "alpha".into(),
            labels: BTreeMap::new(),
            working_set: None,
        };
        writer.commit(&manifest, &["it".parse().unwrap()]).unwrap()
    }

    pub(crate) fn memory(&self, capsule: &CapsuleId) -> Vec<u8> {
        let manifest = self.store.manifest(capsule).unwrap();
        let image = &manifest.images[0];
        let mut memory = vec![1; image.pages as usize * PAGE_SIZE];
        self.store.image(image.root, image.pages).read(PageRun::new(0, image.pages), &mut memory).unwrap();
        memory
    }
}

/// Numbers from a seed.
pub(crate) fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

/// Memory with zero pages, text, and pages that do not shrink.
pub(crate) fn memory(pages: usize, seed: u64) -> Vec<u8> {
    let mut next = random(seed);
    let mut memory = Vec::with_capacity(pages * PAGE_SIZE);
    for _ in 0..pages {
        match next() % 4 {
            0 => memory.extend([0; PAGE_SIZE]),
            1 => memory.extend((0..PAGE_SIZE / 8).flat_map(|_| next().to_le_bytes())),
            _ => {
                let word = next();
                memory.extend((0..PAGE_SIZE as u64 / 8).flat_map(|i| (word + i / 8).to_le_bytes()));
            }
        }
    }
    memory
}

/// Changes some pages of `memory` a little, some altogether, and makes some zero.
pub(crate) fn live(memory: &mut [u8], changes: usize, seed: u64) {
    let mut next = random(seed);
    let pages = memory.len() / PAGE_SIZE;
    for _ in 0..changes {
        let page = next() as usize % pages;
        let bytes = &mut memory[page * PAGE_SIZE..][..PAGE_SIZE];
        match next() % 8 {
            0 => bytes.fill(0),
            1 => bytes.iter_mut().for_each(|byte| *byte = next() as u8),
            _ => (0..4).for_each(|_| bytes[next() as usize % PAGE_SIZE] = next() as u8),
        }
    }
}

/// What goes wrong with a peer, shared by all links to it.
pub(crate) struct Faults {
    /// Requests until the link is cut; `u64::MAX` never. Set again after each cut by `next_cut`.
    pub(crate) until_cut: AtomicU64,
    pub(crate) next_cut: Mutex<Box<dyn FnMut() -> u64 + Send>>,
    /// Dials that fail.
    pub(crate) refuse_dials: AtomicU64,
    /// Answers are spoiled from this request on.
    pub(crate) spoil_from: AtomicU64,
    /// Nothing arrives for this request and those after it.
    pub(crate) quiet_from: AtomicU64,
    /// Requests that were waited for although nothing arrives.
    pub(crate) waited: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) largest: AtomicU64,
    /// Payload bytes that reached the asker.
    pub(crate) arrived: AtomicU64,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            until_cut: AtomicU64::new(u64::MAX),
            next_cut: Mutex::new(Box::new(|| u64::MAX)),
            refuse_dials: AtomicU64::new(0),
            spoil_from: AtomicU64::new(u64::MAX),
            quiet_from: AtomicU64::new(u64::MAX),
            waited: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            largest: AtomicU64::new(0),
            arrived: AtomicU64::new(0),
        }
    }
}

/// A peer whose store is in this process.
pub(crate) struct Fake {
    pub(crate) name: &'static str,
    pub(crate) server: Server,
    pub(crate) faults: Arc<Faults>,
    pub(crate) far: Duration,
}

impl Fake {
    pub(crate) fn peer(name: &'static str, store: &Store) -> (Box<dyn Holder>, Arc<Faults>) {
        let faults = Arc::<Faults>::default();
        let fake =
            Self { name, server: Server::new(store.clone()), faults: faults.clone(), far: Duration::ZERO };
        (Box::new(fake), faults)
    }
}

impl Holder for Fake {
    fn name(&self) -> &str {
        self.name
    }

    fn connect(&self) -> Result<Arc<dyn Link>, LinkError> {
        let refused =
            self.faults.refuse_dials.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1));
        match refused {
            Ok(_) => Err(LinkError::lost("nobody answers")),
            Err(_) => {
                let (server, faults) = (self.server.clone(), self.faults.clone());
                Ok(Arc::new(FakeLink { server, faults, cut: Arc::default() }))
            }
        }
    }

    fn round_trip(&self) -> Option<Duration> {
        Some(self.far)
    }
}

/// A host that is switched off: a dial waits until the test ends it, and fails.
pub(crate) struct Dark(Arc<Silence>);

#[derive(Default)]
pub(crate) struct Silence {
    /// Dials that began, that ended, and that may end.
    counts: Mutex<(u64, u64, u64)>,
    changed: Condvar,
}

impl Dark {
    pub(crate) fn peer() -> (Box<dyn Holder>, Arc<Silence>) {
        let silence = Arc::<Silence>::default();
        (Box::new(Self(silence.clone())), silence)
    }
}

impl Silence {
    pub(crate) fn dials(&self) -> u64 {
        self.counts.lock().unwrap().0
    }

    pub(crate) fn ended(&self) -> u64 {
        self.counts.lock().unwrap().1
    }

    /// Lets one dial fail, and waits until it has.
    pub(crate) fn end_one_dial(&self) {
        let mut counts = self.counts.lock().unwrap();
        counts.2 += 1;
        self.changed.notify_all();
        let waits = |counts: &mut (u64, u64, u64)| counts.1 < counts.2;
        let (counts, late) = self.changed.wait_timeout_while(counts, Duration::from_secs(20), waits).unwrap();
        drop(counts);
        assert!(!late.timed_out(), "nobody dialled");
    }

    /// Lets all dials fail from now on.
    pub(crate) fn end(&self) {
        self.counts.lock().unwrap().2 = u64::MAX;
        self.changed.notify_all();
    }
}

impl Holder for Dark {
    fn name(&self) -> &str {
        "dark"
    }

    fn connect(&self) -> Result<Arc<dyn Link>, LinkError> {
        let mut counts = self.0.counts.lock().unwrap();
        counts.0 += 1;
        let waits = |counts: &mut (u64, u64, u64)| counts.1 >= counts.2;
        let (mut counts, _) =
            self.0.changed.wait_timeout_while(counts, Duration::from_secs(60), waits).unwrap();
        counts.1 += 1;
        self.0.changed.notify_all();
        Err(LinkError::lost("no answer"))
    }

    fn round_trip(&self) -> Option<Duration> {
        Some(Duration::ZERO)
    }
}

struct FakeLink {
    server: Server,
    faults: Arc<Faults>,
    cut: Arc<AtomicBool>,
}

impl Link for FakeLink {
    fn start(&self, request: Request) -> Result<Box<dyn Answer>, LinkError> {
        if self.cut.load(Ordering::Acquire) {
            return Err(LinkError::lost("cut before"));
        }
        let number = self.faults.requests.fetch_add(1, Ordering::AcqRel);
        if self.faults.until_cut.fetch_sub(1, Ordering::AcqRel) == 0 {
            self.cut.store(true, Ordering::Release);
            let next = (self.faults.next_cut.lock().unwrap())();
            self.faults.until_cut.store(next, Ordering::Release);
        }
        self.faults
            .bytes
            .fetch_add(request.header.len() as u64 + request.payload.len() as u64, Ordering::AcqRel);
        Ok(Box::new(FakeAnswer {
            server: self.server.clone(),
            faults: self.faults.clone(),
            cut: self.cut.clone(),
            request,
            number,
        }))
    }

    fn bytes(&self) -> (u64, u64) {
        (0, 0)
    }
}

struct FakeAnswer {
    server: Server,
    faults: Arc<Faults>,
    cut: Arc<AtomicBool>,
    request: Request,
    number: u64,
}

impl FakeAnswer {
    fn is_quiet(&self) -> bool {
        self.number >= self.faults.quiet_from.load(Ordering::Acquire)
    }
}

impl Answer for FakeAnswer {
    fn wait_ready(&mut self, _: Duration) -> bool {
        !self.is_quiet()
    }

    fn wait(self: Box<Self>) -> Result<Reply, LinkError> {
        if self.is_quiet() {
            self.faults.waited.fetch_add(1, Ordering::AcqRel);
            return Err(LinkError::lost("nothing arrived for a long time"));
        }
        // All that was under way when the link was cut is lost with it.
        if self.cut.load(Ordering::Acquire) {
            return Err(LinkError::lost("cut"));
        }
        let answer = self.server.answer(&|_: &CapsuleId| true, &self.request);
        let mut reply = answer.map_err(|source| LinkError::Refused { source })?;
        assert!(reply.header.len() <= 64 << 10 && reply.payload.len() <= 8 << 20);
        let bytes = (reply.header.len() + reply.payload.len()) as u64;
        self.faults.bytes.fetch_add(bytes, Ordering::AcqRel);
        self.faults.arrived.fetch_add(reply.payload.len() as u64, Ordering::AcqRel);
        self.faults.largest.fetch_max(reply.payload.len() as u64, Ordering::AcqRel);
        if self.number >= self.faults.spoil_from.load(Ordering::Acquire) && !reply.payload.is_empty() {
            let mut payload = reply.payload.to_vec();
            let at = payload.len() / 2;
            payload[at] ^= 0x10;
            reply.payload = payload.into();
        }
        Ok(reply)
    }
}

/// A pull that names its capsule `it`.
pub(crate) struct Asked<'a> {
    pub(crate) capsule: CapsuleId,
    pub(crate) bases: &'a [CapsuleId],
    pub(crate) patience: Duration,
}

impl<'a> Asked<'a> {
    pub(crate) fn of(capsule: CapsuleId, bases: &'a [CapsuleId]) -> Self {
        Self { capsule, bases, patience: Duration::from_secs(20) }
    }

    pub(crate) fn pull(
        &self,
        to: &Store,
        sources: &Holders,
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<Report, TransferError> {
        let cancel = AtomicBool::new(false);
        let bases = self.bases.to_vec();
        let options =
            Options { bases, page_sources: &[], cancel: &cancel, progress, holder_timeout: self.patience };
        pull(to, sources, self.capsule, &["it".parse().unwrap()], options)
    }
}

/// Pulls `capsule` and names it.
pub(crate) fn get(
    to: &Store,
    sources: &Holders,
    capsule: CapsuleId,
    bases: &[CapsuleId],
) -> Result<Report, TransferError> {
    Asked::of(capsule, bases).pull(to, sources, &mut |_| ())
}

/// Pulls without waiting for holders and without a ref, as a process does that is killed soon.
pub(crate) fn try_get(
    to: &Store,
    sources: &Holders,
    capsule: CapsuleId,
    bases: &[CapsuleId],
) -> Result<Report, TransferError> {
    let cancel = AtomicBool::new(false);
    let options = Options {
        bases: bases.to_vec(),
        page_sources: &[],
        cancel: &cancel,
        progress: &mut |_| (),
        holder_timeout: Duration::ZERO,
    };
    fetch_capsule(to, sources, capsule, options)
}
