//! Dedup over a slow link: content that this host has is not sent, even if other programs damage it.

use crate::common::{pattern, until};
use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    os::unix::{
        fs::{FileExt, PermissionsExt},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tempfile::TempDir;
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Runtime,
};
use whimbrel_fuse::{MountOptions, Mounted};
use whimbrel_session::{
    client::{Connector, FuseOperations, Policy, Session, SessionOptions},
    proto::DigestCall,
    server::{Export, Limits, Server},
};
use whimbrel_testkit::lab::{LinkConfig, LinkEmulator, Namespace};
use whimbrel_wire::{
    Answer, BoxFuture, Call, ConnectError, ConnectStep, Connection, Endpoint, Peer, PeerIdentity, Refusal,
    Request, Rights, Service, connect_io,
};

const PAGE: usize = 4096;
const SIZE: usize = 3 << 20;
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 2);

struct Tcp(SocketAddr);

impl Connector for Tcp {
    fn connect(&self) -> BoxFuture<'_, Result<Connection, ConnectError>> {
        Box::pin(async {
            let stream = TcpStream::connect(self.0).await;
            let stream = stream.map_err(|source| ConnectError::Io { step: ConnectStep::Dial, source })?;
            let (reader, writer) = tokio::io::split(stream);
            let endpoint = Endpoint::new("client".parse().unwrap(), ());
            connect_io(reader, writer, PeerIdentity::Stdio, Rights::all(), &endpoint).await
        })
    }

    fn destination(&self) -> String {
        self.0.to_string()
    }
}

/// A server that can act like an older one without digests.
struct Aged {
    server: Server,
    old: Arc<AtomicBool>,
}

impl Service for Aged {
    fn handle<'a>(&'a self, peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        if request.kind == DigestCall::KIND && self.old.load(Ordering::SeqCst) {
            return Box::pin(async move { Err(Refusal::unknown_kind(request.kind)) });
        }
        self.server.handle(peer, request)
    }
}

/// A server at the other end of a link of 20 Mbit/s and 32 ms.
struct Far {
    near: Runtime,
    old: Arc<AtomicBool>,
    address: SocketAddr,
    // Dropped in this order.
    _far: Runtime,
    link: LinkEmulator,
    _namespaces: [Namespace; 2],
    dir: TempDir,
}

fn runtime_in(namespace: &Namespace) -> Runtime {
    namespace
        .run(|| tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build())
        .unwrap()
}

impl Far {
    fn new(fill: impl FnOnce(&Path)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["server", "mount"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        fill(&dir.path().join("server"));
        let namespaces = [Namespace::new().unwrap(), Namespace::new().unwrap()];
        let config = LinkConfig::new(20, Duration::from_millis(16));
        let ends = ((&namespaces[0], CLIENT), (&namespaces[1], SERVER));
        let link = LinkEmulator::between(ends.0, ends.1, config, 1).unwrap();
        let (near, far) = (runtime_in(&namespaces[0]), runtime_in(&namespaces[1]));
        let listener = far.block_on(far.spawn(TcpListener::bind((SERVER, 0)))).unwrap().unwrap();
        let address = listener.local_addr().unwrap();
        let old = Arc::new(AtomicBool::new(false));
        let limits = Limits { share: true, ownership: true, ..Limits::default() };
        let server = Server::new(vec![Export::new(&dir.path().join("server")).unwrap()], false, limits);
        let aged = old.clone();
        far.spawn(async move {
            let mut living = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (reader, writer) = tokio::io::split(stream);
                let service = Aged { server: server.clone(), old: aged.clone() };
                let endpoint = Endpoint::new("server".parse().unwrap(), service);
                living.push(connect_io(reader, writer, PeerIdentity::Stdio, Rights::all(), &endpoint).await);
            }
        });
        Self { near, old, address, _far: far, link, _namespaces: namespaces, dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn mount(&self, cache: &str, change: impl FnOnce(&mut SessionOptions)) -> Near {
        let directory = self.path("server").canonicalize().unwrap().into_os_string().into_encoded_bytes();
        let mut options = SessionOptions::new(directory, self.path(cache));
        options.capacity = 64 << 20;
        options.settings.fresh = None;
        change(&mut options);
        let begin = Session::start(Arc::new(Tcp(self.address)), options);
        let session = self.near.block_on(self.near.spawn(begin)).unwrap().unwrap();
        let options = MountOptions::new("test", "whimbrel");
        let mounted = Mounted::new(FuseOperations::new(&session), &self.path("mount"), &options).unwrap();
        session.mounted(mounted.notifier().unwrap());
        until("the round trip is known", || session.status().round_trip_ms.is_some());
        Near { session, mounted: Some(mounted) }
    }

    /// Reads a file, and returns how many bytes came over the link.
    fn read(&self, name: &str) -> (Vec<u8>, u64) {
        let before = self.link.bytes()[1];
        let content = fs::read(self.path("mount").join(name)).unwrap();
        (content, self.link.bytes()[1] - before)
    }
}

struct Near {
    session: Session,
    mounted: Option<Mounted>,
}

impl Near {
    fn end(mut self) {
        self.session.end().unwrap();
        self.mounted.take();
    }
}

/// Whether the table has the pages of a disk. Two threads that index at once may lose an entry in it.
fn knows_a_disk(near: &Near) -> bool {
    near.session.status().known_pages >= (SIZE / PAGE) as u64 - 8
}

/// A disk image, and another that differs in some pages and is longer.
fn disks() -> (Vec<u8>, Vec<u8>) {
    let golden = pattern(SIZE, 1);
    let mut clone = golden.clone();
    for number in (0..SIZE / PAGE).step_by(100) {
        clone[number * PAGE..(number + 1) * PAGE].copy_from_slice(&pattern(PAGE, number as u64 + 7));
    }
    clone.extend(pattern(1000, 99));
    (golden, clone)
}

#[test]
fn what_was_read_under_another_name_is_not_sent_again() {
    let (golden, clone) = disks();
    let far = Far::new(|server| {
        fs::write(server.join("golden.raw"), &golden).unwrap();
        fs::write(server.join("clone.raw"), &clone).unwrap();
        fs::write(server.join("twin.raw"), &golden[..SIZE / 2]).unwrap();
    });
    let near = far.mount("cache", |options| options.slow_round_trip = Duration::ZERO);
    let (content, whole) = far.read("golden.raw");
    assert!(content == golden && whole > SIZE as u64);
    let asked = near.session.status().requests["digest"];
    assert_eq!(asked, 0, "where only its own pages are known, none of them is known by another name");
    until("its pages are known", || knows_a_disk(&near));
    let (content, sent) = far.read("clone.raw");
    assert!(content == clone, "wrong bytes");
    eprintln!(
        "{whole} bytes came for a disk, {sent} for one that differs in {} pages",
        SIZE / PAGE / 100 + 2
    );
    assert!(sent < whole / 8, "{sent} of {whole} bytes came over the link");
    assert!(near.session.status().found_pages > 700);
    far.old.store(true, Ordering::SeqCst);
    let (content, sent) = far.read("twin.raw");
    assert!(
        content == golden[..SIZE / 2] && sent > SIZE as u64 / 2,
        "an older server sends all of it: {sent}"
    );
    near.end();
}

/// Writes a file back, and returns how many bytes went over the link.
fn sent_back(far: &Far, near: &Near) -> u64 {
    let before = far.link.bytes()[0];
    near.session.flush().unwrap();
    far.link.bytes()[0] - before
}

#[test]
fn what_the_server_has_where_it_is_written_is_not_sent_back() {
    let (golden, clone) = disks();
    let far = Far::new(|server| {
        fs::write(server.join("disk.raw"), &golden).unwrap();
        fs::write(server.join("other.raw"), &golden).unwrap();
    });
    let near = far.mount("cache", |options| {
        options.settings.policy = Policy::Back;
        options.settings.delay = None;
    });
    let (disk, there) = (far.path("mount").join("disk.raw"), far.path("server").join("disk.raw"));
    // Truncated and rewritten, with some pages that differ and a longer tail.
    fs::write(&disk, &clone).unwrap();
    let sent = sent_back(&far, &near);
    assert!(fs::read(&there).unwrap() == clone, "wrong bytes");
    eprintln!(
        "{sent} bytes went for a disk that was written anew and differs in {} pages",
        SIZE / PAGE / 100 + 2
    );
    assert!(sent < SIZE as u64 / 6, "{sent} bytes were sent for pages that are there");
    let spared = near.session.status().spared_pages;
    assert!(spared > 700, "{spared}");
    // Overwritten in place, and shorter.
    fs::OpenOptions::new().write(true).open(&disk).unwrap().write_all_at(&golden, 0).unwrap();
    let sent = sent_back(&far, &near);
    assert!(fs::read(&there).unwrap()[..SIZE] == golden && sent < SIZE as u64 / 6, "{sent}");
    fs::write(&disk, &golden[..SIZE - 5000]).unwrap();
    let sent = sent_back(&far, &near);
    assert!(fs::read(&there).unwrap() == golden[..SIZE - 5000] && sent < 20_000, "{sent}");
    // Pages that were not sent can be evicted and fetched again.
    near.session.invalidate().unwrap();
    assert!(fs::read(&disk).unwrap() == golden[..SIZE - 5000], "wrong bytes");
    // A file rewritten with a hole is truncated on the server.
    let holed = fs::File::create(&disk).unwrap();
    holed.write_all_at(&golden[..1000], 0).unwrap();
    holed.write_all_at(&golden[1 << 20..], 1 << 20).unwrap();
    sent_back(&far, &near);
    let content = fs::read(&there).unwrap();
    assert!(content[1000..1 << 20].iter().all(|byte| *byte == 0) && content[1 << 20..] == golden[1 << 20..]);
    // An older server gets all content.
    far.old.store(true, Ordering::SeqCst);
    fs::write(far.path("mount").join("other.raw"), &clone).unwrap();
    let sent = sent_back(&far, &near);
    assert!(fs::read(far.path("server").join("other.raw")).unwrap() == clone && sent > SIZE as u64, "{sent}");
    assert_eq!(near.session.status().events, []);
    near.end();
}

#[test]
fn what_a_named_file_of_this_host_has_is_not_sent_and_nothing_it_has_is_believed() {
    let (golden, clone) = disks();
    let far = Far::new(|server| fs::write(server.join("clone.raw"), &clone).unwrap());
    let here = far.path("golden.raw");
    fs::write(&here, &golden).unwrap();
    let (known, absent) = (here.clone(), far.path("absent.raw"));
    let near = far.mount("cache", |options| {
        options.references = vec![absent, known];
        options.slow_round_trip = Duration::ZERO;
    });
    until("the file was looked through", || knows_a_disk(&near));
    // Another program changes the file afterwards.
    let file = fs::OpenOptions::new().write(true).open(&here).unwrap();
    (10..40).for_each(|number| file.write_all_at(&[7; PAGE], number * PAGE as u64).unwrap());
    let (content, sent) = far.read("clone.raw");
    assert!(content == clone, "wrong bytes");
    assert!(sent < SIZE as u64 / 6, "{sent} bytes came over the link");
    let events = near.session.status().events;
    assert!(events.len() == 1 && events[0].text.contains("absent.raw"), "{events:?}");
    near.end();
}

/// A directory that only its owner can list.
fn shared_dir(far: &Far) -> PathBuf {
    let dir = far.path("shared");
    fs::create_dir(&dir).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o1733)).unwrap();
    // Another user must be able to reach the directory.
    fs::set_permissions(far.dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
    dir
}

fn pieces(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn as_nobody(program: &str, arguments: &[&Path]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).uid(65_534).gid(65_534).stdout(std::process::Stdio::null());
    command.stderr(std::process::Stdio::null()).status().unwrap().success()
}

#[test]
fn what_one_user_read_is_not_sent_to_another_and_only_the_server_says_where_it_is() {
    let (golden, clone) = disks();
    let far = Far::new(|server| {
        fs::write(server.join("golden.raw"), &golden).unwrap();
        fs::write(server.join("copy.raw"), &golden).unwrap();
        fs::write(server.join("clone.raw"), &clone).unwrap();
    });
    let dir = shared_dir(&far);
    let sharing = |options: &mut SessionOptions| options.shared_cache = Some(dir.clone());
    let near = far.mount("first", sharing);
    assert!(far.read("golden.raw").0 == golden && far.read("clone.raw").0 == clone);
    until("the last has been given", || pieces(&dir).len() > 2 * SIZE / 65_536);
    near.end();
    let given = pieces(&dir);
    assert!(!as_nobody("ls", &[&dir]), "names can be listed");
    assert!(as_nobody("cat", &[&given[0]]), "who knows a name may read");
    assert!(!as_nobody("rm", &["-f".as_ref(), &given[0]]), "what others gave can be removed");

    let near = far.mount("second", sharing);
    let (content, sent) = far.read("golden.raw");
    assert!(content == golden && sent < SIZE as u64 / 20, "{sent} bytes came for what another has read");
    eprintln!("{sent} bytes came for a disk that another user has read");
    near.end();
    // A file with equal content that nobody has read: its digests alone find nothing.
    let near = far.mount("third", sharing);
    let (content, sent) = far.read("copy.raw");
    assert!(content == golden && sent > SIZE as u64, "{sent} bytes came for what nobody has read");
    near.end();
}

#[test]
fn wrong_bytes_that_somebody_puts_among_the_shared_are_fetched_from_the_server() {
    let (golden, _) = disks();
    let far = Far::new(|server| fs::write(server.join("golden.raw"), &golden).unwrap());
    let dir = shared_dir(&far);
    let sharing = |options: &mut SessionOptions| options.shared_cache = Some(dir.clone());
    let near = far.mount("first", sharing);
    assert!(far.read("golden.raw").0 == golden);
    until("the last has been given", || pieces(&dir).len() >= SIZE / 65_536);
    near.end();
    for (number, piece) in pieces(&dir).into_iter().enumerate() {
        fs::remove_file(&piece).unwrap();
        match number % 4 {
            0 => fs::write(&piece, vec![7; 65_536]).unwrap(),
            1 => fs::write(&piece, &golden[..65_536]).unwrap(),
            2 => std::os::unix::fs::symlink(far.path("server/golden.raw"), &piece).unwrap(),
            _ => fs::create_dir(&piece).unwrap(),
        }
    }
    let near = far.mount("second", sharing);
    let (content, sent) = far.read("golden.raw");
    assert!(content == golden && sent > SIZE as u64 * 9 / 10, "{sent}");
    near.end();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o1777)).unwrap();
    let near = far.mount("third", sharing);
    let events = near.session.status().events;
    assert!(events.len() == 1 && events[0].text.contains("1733"), "{events:?}");
    near.end();
}
