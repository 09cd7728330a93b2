//! `session.*`: a mounted directory of a server 32 ms and 30 or 100 Mbit/s away, beside a local disk.
//!
//! Server and mount are in network namespaces of their own with the test kit's link between them; TLS with pinned keys, as
//! `whimbrel mount --key` does it. The work is small files as a document build has them: read inputs, write and replace
//! what is made of them. Every figure is seconds by the clock.

use super::Context;
use crate::harness::{Goal, Row, Samples, scratch};
use anyhow::{Context as _, Result, anyhow, ensure};
use std::{
    fs::{self, File},
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use whimbrel_fuse::{MountOptions, Mounted};
use whimbrel_session::{
    client::{Connector, Face, Policy, Session, SessionOptions},
    server::{Export, Limits, Server},
};
use whimbrel_testkit::lab::{LinkConfig, LinkEmulator, Namespace};
use whimbrel_wire::{
    BoxFuture, ConnectError, Connection, Endpoint, Identity, PublicKey, Rights, Trust, TrustedPeer,
    connect_tls, serve_tls,
};

const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 2);
/// Half of the paper's 32 ms.
const ONE_WAY: Duration = Duration::from_millis(16);

struct Tls {
    address: String,
    key: PublicKey,
    identity: Identity,
    endpoint: Endpoint,
}

impl Connector for Tls {
    fn connect(&self) -> BoxFuture<'_, Result<Connection, ConnectError>> {
        Box::pin(connect_tls(&self.address, self.key, &self.identity, &self.endpoint))
    }

    fn destination(&self) -> String {
        self.address.clone()
    }
}

/// A server behind a link.
struct Far {
    dir: TempDir,
    connector: Arc<Tls>,
    near: Runtime,
    // Dropped in this order: the server before its namespace, the link before both ends.
    _far: Runtime,
    _link: LinkEmulator,
    _namespaces: [Namespace; 2],
}

fn runtime_in(namespace: &Namespace) -> Result<Runtime> {
    // The runtime's threads are where the thread was that made it.
    let made =
        namespace.run(|| tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build());
    Ok(made?)
}

impl Far {
    fn new(mbit: u64, fill: impl FnOnce(&Path) -> Result<()>) -> Result<Self> {
        let dir = scratch("session")?;
        for name in ["server", "mount", "keys"] {
            fs::create_dir(dir.path().join(name))?;
        }
        fill(&dir.path().join("server"))?;
        let namespaces = [Namespace::new()?, Namespace::new()?];
        let ends = ((&namespaces[0], CLIENT), (&namespaces[1], SERVER));
        let link = LinkEmulator::between(ends.0, ends.1, LinkConfig::new(mbit, ONE_WAY), 1)?;
        let (near, far) = (runtime_in(&namespaces[0])?, runtime_in(&namespaces[1])?);
        let (ours, theirs) = (Identity::ephemeral()?, Identity::ephemeral()?);
        let trust = Trust::load(&dir.path().join("keys"))?;
        let name = "mount".parse()?;
        let key = Some(ours.public_key());
        trust.add(TrustedPeer {
            name,
            key,
            address: None,
            rights: Rights::all(),
            read: None,
            write: None,
        })?;
        let server = Server::new(vec![Export::new(&dir.path().join("server"))?], false, Limits::default());
        let endpoint = Endpoint::new("state".parse()?, server);
        let key = theirs.public_key();
        let listener = far.block_on(far.spawn(tokio::net::TcpListener::bind((SERVER, 0))))??;
        let address = listener.local_addr()?.to_string();
        far.spawn(async move { serve_tls(listener, &theirs, Arc::new(trust), endpoint).await });
        let endpoint = Endpoint::new("mount".parse()?, ());
        let connector = Arc::new(Tls { address, key, identity: ours, endpoint });
        Ok(Self { dir, connector, near, _far: far, _link: link, _namespaces: namespaces })
    }

    fn mount(&self, cache: &str, policy: Policy) -> Result<Near> {
        let directory = self.dir.path().join("server").canonicalize()?.into_os_string().into_encoded_bytes();
        let mut options = SessionOptions::new(directory, self.dir.path().join(cache));
        options.capacity = 2 << 30;
        options.settings.policy = policy;
        options.settings.fresh = None;
        let begin = Session::begin(self.connector.clone(), options);
        let session = self.near.block_on(self.near.spawn(begin))??;
        let path = self.dir.path().join("mount");
        let mounted = Mounted::new(Face::new(&session), &path, &MountOptions::new("bench", "whimbrel"))?;
        if let Some(notifier) = mounted.notifier() {
            session.mounted(notifier);
        }
        Ok(Near { session, mounted: Some(mounted), path })
    }
}

/// A mount.
struct Near {
    session: Session,
    mounted: Option<Mounted>,
    path: PathBuf,
}

impl Near {
    fn end(mut self) -> Result<()> {
        let ended = self.session.end();
        self.mounted.take();
        ended.map_err(|errno| anyhow!("not everything was written back: {errno}"))?;
        let events = self.session.status().events;
        ensure!(events.is_empty(), "{events:?}");
        Ok(())
    }
}

fn seconds(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let began = Instant::now();
    work()?;
    Ok(began.elapsed().as_secs_f64())
}

/// `ls` of a directory of many files.
pub(crate) fn open_dir(context: &Context) -> Result<Vec<Row>> {
    let files = if context.quick { 20_000 } else { 100_000 };
    let far = Far::new(100, |server| {
        fs::create_dir(server.join("many"))?;
        (0..files)
            .try_for_each(|number| File::create(server.join(format!("many/file-{number:06}"))).map(drop))?;
        Ok(())
    })?;
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for round in 0..context.times(5, 2) {
        let near = far.mount(&format!("cache-{round}"), Policy::None)?;
        let list = || {
            let count = fs::read_dir(near.path.join("many"))?.count();
            ensure!(count == files, "{count} of {files} files");
            Ok(())
        };
        cold.push(seconds(list)?);
        warm.push(seconds(list)?);
        near.end()?;
    }
    let case = |what: &str| format!("{files} files, 32 ms, 100 Mbit/s, {what}");
    Ok(vec![
        Row::new("session.open-dir", case("cold"), "s", &Samples::new(cold)).goal(Goal::AtMost(3.0)),
        Row::new("session.open-dir", case("warm"), "s", &Samples::new(warm)).goal(Goal::AtMost(0.3)),
    ])
}

const INPUTS: usize = 120;
const ROUNDS: usize = 20;

fn inputs(server: &Path) -> Result<()> {
    fs::create_dir(server.join("in"))?;
    for number in 0..INPUTS {
        let text = format!("\\section{{{number}}} lorem ipsum dolor sit amet\n").repeat(200 + number * 7);
        fs::write(server.join(format!("in/{number:03}.tex")), text)?;
    }
    Ok(())
}

/// Twenty runs as of a document: read all inputs, think, write small files and one large one, by way of a temporary name.
fn documents(dir: &Path) -> Result<()> {
    for round in 0..ROUNDS {
        let mut whole = Vec::new();
        for number in 0..INPUTS {
            whole.extend(fs::read(dir.join(format!("in/{number:03}.tex")))?);
        }
        let mut digest = whole.clone();
        // The time that a typesetter takes, in proportion: some tens of milliseconds a run.
        for pass in 0..12 {
            digest.iter_mut().enumerate().for_each(|(at, byte)| *byte = byte.rotate_left(pass) ^ at as u8);
        }
        for name in ["aux", "toc", "log", "out"] {
            fs::write(dir.join(format!("main.{name}")), &whole[..40_000 + round * 100])?;
        }
        let temporary = dir.join("main.dvi.tmp");
        fs::write(&temporary, &digest)?;
        fs::rename(&temporary, dir.join("main.dvi"))?;
        fs::write(dir.join("scratch"), &digest[..100_000])?;
        fs::remove_file(dir.join("scratch"))?;
    }
    Ok(())
}

/// The same twenty runs on a local disk, on a mount with an empty cache and with a full one.
pub(crate) fn document_runs(context: &Context) -> Result<Vec<Row>> {
    let (mut local, mut cold, mut warm) = (Vec::new(), Vec::new(), Vec::new());
    let far = Far::new(100, inputs)?;
    for round in 0..context.times(5, 2) {
        let plain = scratch("session-local")?;
        inputs(plain.path())?;
        local.push(seconds(|| documents(plain.path()))?);
        let cache = format!("cache-{round}");
        let near = far.mount(&cache, Policy::Back)?;
        cold.push(seconds(|| documents(&near.path))?);
        near.end()?;
        let near = far.mount(&cache, Policy::Back)?;
        warm.push(seconds(|| documents(&near.path))?);
        near.end()?;
        let written = fs::read(far.dir.path().join("server/main.dvi")).context("what was written back")?;
        ensure!(
            written == fs::read(plain.path().join("main.dvi"))?,
            "another document came about on the server"
        );
    }
    let local = Samples::new(local);
    let case = |what: &str| format!("20 document runs, 32 ms, 100 Mbit/s, {what}");
    Ok(vec![
        Row::new("session.documents", case("cold"), "s", &Samples::new(cold)).against("local disk", &local),
        Row::new("session.documents", case("warm"), "s", &Samples::new(warm)).against("local disk", &local),
    ])
}

/// One large file, read once over the link and once more after the mount was made anew.
pub(crate) fn whole_file(context: &Context) -> Result<Vec<Row>> {
    let mib = if context.quick { 16 } else { 64 };
    let far = Far::new(100, |server| {
        let mut state = 1u64;
        let noise: Vec<u8> = (0..mib << 20)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect();
        Ok(fs::write(server.join("disk.raw"), noise)?)
    })?;
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for round in 0..context.times(3, 1) {
        for times in [&mut cold, &mut warm] {
            let near = far.mount(&format!("cache-{round}"), Policy::None)?;
            times.push(
                mib as f64
                    / seconds(|| {
                        ensure!(fs::read(near.path.join("disk.raw"))?.len() == mib << 20, "a short read");
                        Ok(())
                    })?,
            );
            near.end()?;
        }
    }
    let case = |what: &str| format!("{mib} MiB of noise, 32 ms, 100 Mbit/s, {what}");
    Ok(vec![
        Row::new("session.read", case("cold"), "MiB/s", &Samples::new(cold)).goal(Goal::AtLeast(9.0)),
        Row::new("session.read", case("warm"), "MiB/s", &Samples::new(warm)),
    ])
}
