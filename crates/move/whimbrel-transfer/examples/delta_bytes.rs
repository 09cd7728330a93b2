//! Measures the transfer of a second version of a memory image: `delta_bytes FIRST LATER [KBIT/S]`.
//!
//! There are two stores in temporary folders, both with the first image, one with the later one too. The
//! other pulls it over calls in this process, which are counted as the wire would frame them. Prints bytes
//! both ways and the processor time of both sides.

use std::{
    collections::BTreeMap,
    error::Error,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use whimbrel_core::{Accel, ByteSize, CapsuleId, MachineConfig, PAGE_SIZE, PageRun};
use whimbrel_image::{FORMAT, ImageRef, Manifest};
use whimbrel_store::{Options as StoreOptions, Store};
use whimbrel_transfer::{Answer, Holder, Holders, Link, LinkError, Options, Server, pull};
use whimbrel_wire::{Reply, Request};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

struct Local {
    server: Server,
    rate: Option<f64>,
}

struct LocalLink(Server, Option<f64>);

/// Nanoseconds of processor time that answering took.
static ANSWERING: AtomicU64 = AtomicU64::new(0);

struct Done(Result<Reply, LinkError>);

impl Holder for Local {
    fn name(&self) -> &str {
        "local"
    }
    fn connect(&self) -> Result<Arc<dyn Link>, LinkError> {
        Ok(Arc::new(LocalLink(self.server.clone(), self.rate)))
    }
}

impl Link for LocalLink {
    fn start(&self, request: Request) -> Result<Box<dyn Answer>, LinkError> {
        let begun = thread_time();
        let answer = self.0.answer(&|_: &CapsuleId| true, &request);
        ANSWERING.fetch_add(thread_time().saturating_sub(begun).as_nanos() as u64, Ordering::Relaxed);
        let answer = answer.map_err(|source| LinkError::Refused { source });
        if let (Some(rate), Ok(reply)) = (self.1, &answer) {
            std::thread::sleep(Duration::from_secs_f64(
                (reply.header.len() + reply.payload.len()) as f64 / rate,
            ));
        }
        Ok(Box::new(Done(answer)))
    }
    fn bytes(&self) -> (u64, u64) {
        (0, 0)
    }
}

impl Answer for Done {
    fn wait(self: Box<Self>) -> Result<Reply, LinkError> {
        self.0
    }
}

fn capsule(store: &Store, memory: &[u8], base: Option<CapsuleId>) -> Outcome<CapsuleId> {
    let pages = (memory.len() / PAGE_SIZE) as u64;
    let writer = store.writer()?;
    let old = base.map(|base| store.manifest(&base)).transpose()?;
    let mut image = writer.image(old.and_then(|old| old.images[0].root), pages)?;
    image.put(PageRun::new(0, pages), memory)?;
    let machine = MachineConfig {
        memory: ByteSize(memory.len() as u64),
        cpus: 1,
        machine: "pc".into(),
        cpu: "max".into(),
        accel: Accel::Tcg,
        disks: vec![],
        nics: vec![],
        boot: None,
    };
    let manifest = Manifest {
        format: FORMAT,
        machine,
        device: vec![],
        images: vec![ImageRef { name: "memory".into(), pages, root: image.finish()?.root, cuts: None }],
        parents: base.into_iter().collect(),
        time: 1,
        host: "alpha".into(),
        labels: BTreeMap::new(),
        working_set: None,
    };
    Ok(writer.commit(&manifest, &["it".parse()?])?)
}

/// What this thread, and all of this process, ended threads included, spent on a processor.
fn thread_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(text.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0))
}

/// In hundredths of a second, the ticks of `/proc/self/stat`.
fn process_time() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let ticks = text.split(' ').skip(13).take(2).filter_map(|number| number.parse::<u64>().ok());
    Duration::from_millis(ticks.sum::<u64>() * 10)
}

fn open(dir: &Path) -> Outcome<Store> {
    Ok(Store::open(dir, StoreOptions::create())?)
}

fn main() -> Outcome {
    let args: Vec<String> = std::env::args().collect();
    let [_, first, later, rate @ ..] = &args[..] else {
        return Err("delta_bytes FIRST LATER [KBIT/S]".into());
    };
    let rate = rate.first().map(|rate| rate.parse::<f64>()).transpose()?.map(|rate| rate * 125.0);
    let (there, here) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let (first, later) = (std::fs::read(first)?, std::fs::read(later)?);
    let (from, to) = (open(there.path())?, open(here.path())?);
    let old = capsule(&from, &first, None)?;
    capsule(&to, &first, None)?;
    let new = capsule(&from, &later, Some(old))?;
    drop((from, to));
    // Opened again: nothing is in a cache.
    let (from, to) = (open(there.path())?, open(here.path())?);
    let sources = Holders::new(vec![Box::new(Local { server: Server::new(from), rate })]);
    let cancel = AtomicBool::new(false);
    let options = Options {
        bases: vec![old],
        page_sources: &[],
        cancel: &cancel,
        progress: &mut |_| (),
        holder_timeout: Duration::from_secs(1),
    };
    if std::env::var_os("W").is_some() {
        eprintln!("{}", std::process::id());
        std::thread::sleep(Duration::from_secs(2));
    }
    let (begun, used) = (Instant::now(), process_time());
    let report = pull(&to, &sources, new, &["it".parse()?], options)?;
    println!("{} bytes both ways, {:?}, {:?}", report.sent + report.received, begun.elapsed(), report);
    let answering = Duration::from_nanos(ANSWERING.load(Ordering::Relaxed));
    println!("processor time: {:?}, of which the server {answering:?}", process_time().saturating_sub(used));
    Ok(())
}
