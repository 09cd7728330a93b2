//! The sets: which experiments a record holds, and in which order they are done.
//!
//! A set is made to take at most 40 minutes; `capsule`, `paper` and those whose name ends in `-long` take
//! hours.

use super::*;

/// All experiments, by the set that they belong to.
pub(crate) const SETS: [(&str, &[Experiment]); 16] = [
    ("run", RUN),
    ("migrate", MIGRATE),
    ("migrate-long", MIGRATE_LONG),
    ("protect", protect::EXPERIMENTS),
    ("protect-long", protect::LONG),
    ("session", SESSION),
    ("session-long", SESSION_LONG),
    ("pool", pool::EXPERIMENTS),
    ("pool-long", pool::LONG),
    ("capsule", capsule::EXPERIMENTS),
    ("paper", capsule::PAPER),
    ("trust", trust::EXPERIMENTS),
    ("day", day::EXPERIMENTS),
    ("operate", operate::EXPERIMENTS),
    ("kept", kept::EXPERIMENTS),
    ("vm", machine_process::EXPERIMENTS),
];

/// Machines on one host.
const RUN: &[Experiment] = &[
    Experiment { rows: &["scan.idle"], about: "find the written pages of an idle guest", run: scan::idle },
    Experiment { rows: &["scan.busy"], about: "find the written pages of a busy guest", run: scan::busy },
    Experiment {
        rows: &["scan.64g"],
        about: "find the written pages of an idle guest of 64 GiB",
        run: scan::large,
    },
    Experiment {
        rows: &["scan.kvm.faults"],
        about: "faults of a guest of KVM after a scan",
        run: scan_kvm::faults,
    },
    Experiment {
        rows: &["store.ingest", "store.restore"],
        about: "a GiB of memory into the store, and back",
        run: throughput::run,
    },
    Experiment {
        rows: &["store.peers"],
        about: "two versions of an image: bytes kept and time",
        run: store::peers,
    },
    Experiment { rows: &["nbd.randread"], about: "read single pages of a disk we serve", run: nbd::randread },
    Experiment {
        rows: &["nbd.seqwrite"],
        about: "write a disk we serve from end to end",
        run: nbd::seqwrite,
    },
    Experiment {
        rows: &["checkpoint.pause", "checkpoint.time", "checkpoint.bytes"],
        about: "keep a Debian guest that compiles, again and again",
        run: checkpoint::run,
    },
    Experiment {
        rows: &["resume.cold", "resume.warm"],
        about: "let a kept guest run again, its memory on demand",
        run: resume::run,
    },
    Experiment {
        rows: &["resume.touch"],
        about: "a resumed guest that reads all its memory, beside one that has it",
        run: resume::touch,
    },
    Experiment {
        rows: &["clone.time", "clone.memory"],
        about: "eight clones of a running guest",
        run: clone::run,
    },
    Experiment { rows: &["clone.hundred"], about: "a hundred clones at once", run: clone::hundred },
    Experiment {
        rows: &["file.peer"],
        about: "suspend and resume a guest of 2 GiB, beside QEMU 10's migration to a file",
        run: file_peer::run,
    },
    Experiment { rows: &["host.300"], about: "a daemon with 300 machines that rest", run: resting::run },
];

/// Moves of machines.
const MIGRATE: &[Experiment] = &[
    Experiment {
        rows: &[
            "migrate.downtime.hosts",
            "migrate.downtime.idle",
            "migrate.downtime.web",
            "migrate.downtime.udp",
            "migrate.downtime.p99",
        ],
        about: "what clients notice of a move beyond what a guest that only stops makes them notice",
        run: over_control::run,
    },
    Experiment {
        rows: &["migrate.10g"],
        about: "move a guest that writes over 10 Gbit/s, beside each way of QEMU's",
        run: rates::fast,
    },
    Experiment {
        rows: &["migrate.rate", "migrate.cost.cpu"],
        about: "how fast a large guest moves over a link without limit, and what that costs",
        run: move_rate::run,
    },
    Experiment {
        rows: &["migrate.1t"],
        about: "move a guest whose disk is large and almost empty",
        run: move_rate::large_disk,
    },
    Experiment {
        rows: &["migrate.postcopy.faults"],
        about: "move a guest by post-copy whose four CPUs touch its memory at random",
        run: capsule::postcopy_faults,
    },
];

/// Moves beside QEMU's, over many links and of many kinds of guests.
const MIGRATE_LONG: &[Experiment] = &[
    Experiment {
        rows: &["migrate.downtime", "migrate.bytes", "migrate.time"],
        about: "move a guest that writes over a Gbit/s",
        run: migrate::busy,
    },
    Experiment {
        rows: &[
            "migrate.downtime",
            "migrate.bytes",
            "migrate.bytes.empty",
            "migrate.bytes.primed",
            "migrate.time",
            "migrate.time.1g",
            "migrate.cost.cpu",
            "migrate.cost.memory",
        ],
        about: "move an idle guest over a Gbit/s",
        run: migrate::idle,
    },
    Experiment {
        rows: &["migrate.downtime.idle", "migrate.downtime.parts"],
        about: "how long a client hears nothing of a guest that moves, and what that time goes to",
        run: downtime::idle,
    },
    Experiment {
        rows: &["migrate.downtime.web", "migrate.downtime.p99"],
        about: "the same of a web server with a hundred clients",
        run: downtime::web,
    },
    Experiment {
        rows: &["migrate.downtime.udp"],
        about: "the same of a game with six players",
        run: downtime::game,
    },
    Experiment {
        rows: &["migrate.web.dip"],
        about: "how much less the clients of a web server get during a slow first round",
        run: to_and_fro::dip,
    },
    Experiment {
        rows: &["migrate.thousand"],
        about: "a web server that goes to and fro: what its clients lose",
        run: to_and_fro::thousand,
    },
    Experiment {
        rows: &["migrate.muncher.downtime", "migrate.muncher.time"],
        about: "move a guest that writes half of its memory flat out",
        run: muncher::run,
    },
    Experiment {
        rows: &["migrate.peers.downtime", "migrate.peers.time"],
        about: "move a guest beside QEMU's post-copy and auto-converge",
        run: peers::run,
    },
    Experiment {
        rows: &["migrate.rates"],
        about: "move a guest over five links beside QEMU's pre-copy, post-copy and auto-converge",
        run: rates::run,
    },
    Experiment {
        rows: &["migrate.wws.error"],
        about: "predict the downtime of moves, and move",
        run: wws_error::run,
    },
    Experiment {
        rows: &["migrate.disk.time", "migrate.disk.bytes"],
        about: "move a running guest with a disk that it writes to",
        run: disk_time::run,
    },
    Experiment {
        rows: &["migrate.postgres"],
        about: "move a PostgreSQL with its disk, under pgbench and clients who check their history",
        run: moved_stores::postgres,
    },
    Experiment {
        rows: &["migrate.redis"],
        about: "move a redis with its disk, under clients who check their history",
        run: moved_stores::redis,
    },
    Experiment {
        rows: &["migrate.mix"],
        about: "move a web server with pages that are made anew, with its disk",
        run: web_mix::run,
    },
    Experiment {
        rows: &["migrate.time.256m", "migrate.growth"],
        about: "move a running guest over 256 Mbit/s, and a large one",
        run: migrate::slower_and_larger,
    },
];

/// Mounted directories.
const SESSION: &[Experiment] = &[
    Experiment {
        rows: &["session.documents", "session.warm.documents"],
        about: "document runs in a directory of a server 32 ms away, beside a local disk",
        run: session::document_runs,
    },
    Experiment {
        rows: &["session.random.reads"],
        about: "read a file of a server 32 ms away at random places, many at a time",
        run: session::random_reads,
    },
    Experiment {
        rows: &["session.ls.behind"],
        about: "list a directory while much is written back",
        run: session::listing_behind,
    },
    Experiment {
        rows: &["session.build", "session.warm.build"],
        about: "build a C library on a mount 32 ms away, cache cold and warm",
        run: session::builds,
    },
    Experiment {
        rows: &["session.io"],
        about: "write a trace and compute on it on a mount 32 ms away",
        run: session::io_runs,
    },
    Experiment {
        rows: &["session.posix"],
        about: "wrong bytes of fio, random operations, git and a compiler on a mount",
        run: session::posix,
    },
    Experiment {
        rows: &["session.two.writers"],
        about: "change a file at one client until another sees it, over a link of 32 ms",
        run: session::two_writers,
    },
    Experiment {
        rows: &["session.alone.asks"],
        about: "build a C library on a warm mount, and count what is asked of the server",
        run: session::alone_asks,
    },
    Experiment {
        rows: &["session.names"],
        about: "list a million names and more of a server, and see what memory the client takes",
        run: session::names,
    },
    Experiment {
        rows: &["session.fsx"],
        about: "compare random operations on a mount with a model, while links are cut",
        run: session::fsx,
    },
    Experiment {
        rows: &["session.faults"],
        about: "synced writes that are lost when client, server or link die",
        run: session::faults,
    },
    Experiment {
        rows: &["session.pjdfstest"],
        about: "run the public suite pjdfstest on a mount of root",
        run: session::pjdfstest,
    },
    Experiment {
        rows: &["session.clone.hosts"],
        about: "clone eight golden machines of a host on the LAN on eight hosts at once",
        run: session::clone_hosts,
    },
];

/// Mounted directories beside other programs, and clones of machines.
const SESSION_LONG: &[Experiment] = &[
    Experiment {
        rows: &["session.open-dir"],
        about: "list a large directory of a server 32 ms away",
        run: session::open_dir,
    },
    Experiment {
        rows: &["session.read"],
        about: "read a file of a server 32 ms away, and again from the cache",
        run: session::whole_file,
    },
    Experiment {
        rows: &["session.save"],
        about: "write a file of a server 32 ms away anew with little changed, beside sshfs, rclone and rsync",
        run: session::save,
    },
    Experiment {
        rows: &["session.copy"],
        about: "copy a file on the mount of a server 32 ms away, beside sshfs and rclone",
        run: session::copy,
    },
    Experiment {
        rows: &["session.guest"],
        about: "documents and a trace in a guest whose disk lies on a mount, or is an NBD export of one",
        run: session::guests,
    },
    Experiment {
        rows: &["session.peers"],
        about: "sshfs, rclone, nbdkit and NFSv4 over the same link",
        run: session::peers,
    },
    Experiment {
        rows: &[
            "session.clone.first",
            "session.clone.next",
            "session.clone.lan",
            "session.clone.sequence",
            "session.clone.eight",
        ],
        about: "clone a golden machine of a server 32 ms away until the clone answers",
        run: session::clones,
    },
    Experiment {
        rows: &["session.clone.images", "session.clone.images.lan"],
        about: "clone different golden machines one after the other, and by way of a host on the LAN",
        run: session::clone_images,
    },
    Experiment {
        rows: &["session.clone.scp"],
        about: "copy a golden machine whole by scp",
        run: session::scp,
    },
];
