//! Sections of the page and one sentence for every row family: what it measures.
//!
//! A row belongs to the family whose name is the longest that begins its own, at a dot. A row without a
//! family is an error: whoever adds an experiment writes its sentence here.

/// One section of the page.
pub(super) struct Section {
    pub(super) title: &'static str,
    /// One or two sentences under the title: what the experiments have in common.
    pub(super) about: &'static str,
    /// Notes of `docs/design/` that tell why goals are missed and what was tried.
    pub(super) notes: &'static [&'static str],
    /// Row families with their sentence, in the order of the page.
    pub(super) families: &'static [(&'static str, &'static str)],
}

/// Every section, in the order of the page.
pub(super) const SECTIONS: &[Section] = &[
    ONE_HOST, MIGRATION, PROTECTION, CAPSULES, PAPER, POOL, SESSIONS, TRUST, DAY, OPERATION, KEPT, PROCESSES,
];

const ONE_HOST: Section = Section {
    title: "Machines on one host",
    about: "Dirty pages, the store, NBD, checkpoints, resumes and clones, on one host.",
    notes: &["2026-11-23-measurements-run"],
    families: &[
        (
            "scan",
            "Time to find the dirty pages of an idle and of a busy guest; the peer reads `/proc/PID/pagemap`.",
        ),
        ("nbd", "A disk that Whimbrel serves over NBD, read in single pages and written from end to end."),
        (
            "checkpoint",
            "Checkpoints of a Debian guest that compiles: pause, time until durable, bytes added.",
        ),
        (
            "resume",
            "Resume of a capsule, memory on demand, with cold and warm caches, until the first instruction.",
        ),
        (
            "clone",
            "Eight clones of a running guest: time until all answer, memory of each beyond the shared template.",
        ),
        ("scan.64g", "An idle guest of 64 GiB, most of it never touched."),
        (
            "scan.kvm.faults",
            "Faults of a guest of KVM after a scan, for each dirty page; the peer takes in one scan.",
        ),
        (
            "resume.touch",
            "The first two seconds of work of a resumed guest, beside the same work with everything in memory.",
        ),
        (
            "clone.hundred",
            "A hundred clones of a guest of 128 MiB that wakes once a second: time until all answer, memory of each.",
        ),
        (
            "file.peer",
            "A Debian guest of 2 GiB that compiles, suspended and resumed, beside QEMU 10's own migration to a file.",
        ),
        (
            "host.300",
            "Memory and processor time of a daemon with 300 machines that rest: guests that wake once a second.",
        ),
        ("store.ingest", "Rate at which 1 GiB of memory enters the store."),
        ("store.restore", "Rate at which 1 GiB of memory leaves the store."),
        ("store.peers", "Two versions of one memory image, saved and restored: bytes kept and time."),
    ],
};

const PROCESSES: Section = Section {
    title: "Machine processes",
    about: "The daemon is replaced, or killed, under a running guest, which a process of its own serves meanwhile.",
    notes: &["2026-11-26-machine-processes"],
    families: &[
        (
            "vm.upgrade",
            "Longest gap that a client sees of a guest that passes from one process to another; the peer is as long a time without that.",
        ),
        (
            "daemon.gone",
            "Longest write to a disk in the guest, while the daemon is killed and started again and again, less that of a quiet minute.",
        ),
        (
            "daemon.gone.soon",
            "The same for kills right after an operation, when no process has the machine yet.",
        ),
        ("vm.epoch", "Epochs of a protection on hosts with processes for machines, beside hosts without."),
        (
            "vm.start",
            "By how much a warm resume takes longer on a host with processes for machines than on one without.",
        ),
        (
            "vm.checkpoint",
            "Rate of the first checkpoint of a machine of 1 GiB; the peer is a host of the same build without processes for machines.",
        ),
        ("vm.memory", "Memory that only the process of a machine has."),
        (
            "vm.threads",
            "Threads of the process of a machine at rest, and of a daemon with a hundred machines.",
        ),
    ],
};

const OPERATION: Section = Section {
    title: "Running a host",
    about: "What a host with 200 machines costs those who run it; 20 of the machines run and idle.",
    notes: &[],
    families: &[
        (
            "operate.web.first",
            "First load of the web page with 200 machines, nothing cached: bytes, and time until the list can be used.",
        ),
        (
            "operate.web.live",
            "How late a round of a migration is on its chart, from the end of the round on.",
        ),
        ("operate.scrape", "Time to read `/metrics` over the socket, and bytes of the page."),
        ("operate.daemon", "Memory that only the daemon has, and its processor time while nothing happens."),
        ("operate.package", "Installed size of the Debian package of a host."),
        ("operate.book", "Blocks of commands in the manual, and how many of its pages failed."),
    ],
};

const KEPT: Section = Section {
    title: "Nothing is lost",
    about: "Faults of every kind, and what they cost: nothing, where a row counts losses.",
    notes: &["2026-11-25-simulation"],
    families: &[
        ("moves.lost", "Moves of a machine whose hosts are disturbed, after which it was not the same life."),
        ("moves.both", "The same moves, after which both hosts ran it, or the switch saw it at both."),
        (
            "takeovers.lost",
            "Acknowledged writes of redis and PostgreSQL that were lost when hosts, processes, cables or the \
             witness failed.",
        ),
        (
            "capsules.lost",
            "Capsules pushed, pulled and resumed lazily under faults and beside collections: lost ones.",
        ),
        ("simulation", "Seeds of simulated faults, each with its own: rules that were broken."),
        ("mutants", "Losses that were brought back on purpose, and found by the simulation."),
        (
            "replace.gap",
            "The longest write of a guest to its disk while the process that has its machine is replaced by a new one.",
        ),
        (
            "freeze.max",
            "The longest time for which a protected guest stands still: copied for the first time, in epochs, and \
             while its standby stands still again and again.",
        ),
        (
            "stall.other",
            "The longest wait for a page of a guest that runs lazily, while one of three holders is dark.",
        ),
        (
            "soak",
            "What a daemon or a QEMU gains in memory and open files, after the first ten of each kind of work.",
        ),
    ],
};

const MIGRATION: Section = Section {
    title: "Moving machines",
    about: "Migrations of the small guest between two hosts over an emulated link, beside QEMU's precopy of the same \
            guest over the same link. Bytes are what passes the source's uplink, both ways. Both hosts have the boot \
            files of the guest beforehand.",
    notes: &["2026-11-23-measurements-migrate"],
    families: &[
        (
            "migrate.downtime",
            "Longest silence that a client sees, guest idle or writing 64 MiB at 20,000 pages a second, 1 Gbit/s.",
        ),
        ("migrate.bytes", "Bytes of the same migrations."),
        (
            "migrate.bytes.empty",
            "Bytes of an idle guest if the target has nothing of it; also if the guest frees caches first (`--free-caches`).",
        ),
        (
            "migrate.bytes.primed",
            "Bytes of an idle guest if the target holds a capsule of it that is some seconds old.",
        ),
        ("migrate.time", "Total time of the same migrations."),
        ("migrate.time.1g", "Total time of an idle guest over 1 Gbit/s."),
        ("migrate.time.256m", "Total time of an idle guest over 256 Mbit/s."),
        (
            "migrate.rates",
            "An idle guest and one that writes 2,000 whole pages a second over five links, beside QEMU's precopy, postcopy and auto-converge.",
        ),
        (
            "migrate.downtime.idle",
            "Silence seen by a client that asks 1,000 times a second, and the parts of it.",
        ),
        (
            "migrate.downtime.parts",
            "Parts of the downtime: stop, scan, devices, pages, load, link, commit, start.",
        ),
        (
            "migrate.downtime.web",
            "Longest time in which none of 100 clients received a byte of a 512 KB file, over 100 migrations (6 if quick).",
        ),
        (
            "migrate.downtime.hosts",
            "Time in which no CPU of the guest ran, as the hosts say: asked by one client, or serving 100.",
        ),
        (
            "migrate.10g",
            "Total time of a guest that writes 2,000 pages a second over 10 Gbit/s, beside QEMU's ways.",
        ),
        ("migrate.rate", "Rate at which a guest full of noise moves over a link without a limit."),
        (
            "migrate.postcopy.faults",
            "A guest with four virtual CPUs that writes at random while it moves by post-copy: pages that come a second, and waits for them.",
        ),
        ("migrate.1t", "A guest with a disk of 1 TiB of which 1 GiB is used, beside one with 16 GiB."),
        ("migrate.downtime.p99", "Worst of the migrations of `migrate.downtime.web`."),
        (
            "migrate.downtime.udp",
            "By how much the longest time between two updates was too long, for six players of a game with 20 to 50 updates a second.",
        ),
        ("migrate.web.dip", "Bytes that the same 100 clients lose while the first round runs at 100 Mbit/s."),
        (
            "migrate.thousand",
            "1,000 migrations to and fro (10 if quick) under 8 clients and 4 standing connections: requests failed and connections broken.",
        ),
        ("migrate.growth", "Downtime of an idle guest of 8 GiB beside one of 0.5 GiB."),
        (
            "migrate.cost",
            "Processor time of both daemons for each GiB of pages looked at, and growth of the larger daemon's anonymous memory.",
        ),
        (
            "migrate.muncher",
            "A guest that writes 256 of its 512 MiB at full speed, with the guest agent and without, beside QEMU's auto-converge.",
        ),
        (
            "migrate.peers",
            "An idle guest beside QEMU's auto-converge, and `--mode lazy` beside QEMU's postcopy.",
        ),
        (
            "migrate.wws.error",
            "Predicted downtime against the downtime of the migration that follows, for four ways of writing at 128 and 512 Mbit/s.",
        ),
        (
            "migrate.disk",
            "A guest that writes to its disk of 2 GiB (700 MB used); the peer mirrors the disk over NBD with `copy-mode=write-blocking`.",
        ),
        (
            "migrate.redis",
            "A redis with `appendfsync always` and its disk under clients that check every acknowledged write.",
        ),
        (
            "migrate.postgres",
            "A PostgreSQL with its disk under `pgbench` and clients that check every acknowledged row.",
        ),
        (
            "migrate.mix",
            "An Apache of 512 MiB with a disk of 1.5 GiB: small files, pictures and a CGI program, 64 clients.",
        ),
    ],
};

const PROTECTION: Section = Section {
    title: "Protection",
    about: "A Debian guest with Apache and redis (512 MiB, one processor), protected between two hosts on one machine \
            with a third as witness. Epochs of 50 ms and delta blocks of 64 bytes if a row says nothing else. `ep` and \
            `is` are small programs with the access patterns of two NAS benchmarks.",
    notes: &["2026-11-23-measurements-protect"],
    families: &[
        (
            "pause",
            "Pause of an epoch by the program's own figures over the last 1,200 epochs: idle, 100 Apache clients, `ep`.",
        ),
        ("pause.p99", "The longest of a hundred of these pauses."),
        ("output.late", "How long after its cut the output of an epoch leaves: a web server over 1 Gbit/s."),
        ("pause.kept", "Pause and delay of output while one epoch a second becomes a capsule, against none."),
        ("modes.pause", "Pause of an epoch in the modes `remus`, `epoch` and `replay`."),
        ("modes.ping", "Round trips of datagrams to an idle guest in the three modes."),
        ("ping.25ms", "Round trips of datagrams, one at a time, to an idle guest with epochs of 25 ms."),
        (
            "slowdown",
            "Work lost under protection, against before and after: epochs of one length, and stretched ones (the default). Also with the time removed that the virtual CPU waited because of the standby.",
        ),
        ("takeover", "The primary's host is killed and unplugged: longest silence that a client sees."),
        ("takeover.detected", "Part of the takeover after the standby asked the witness."),
        (
            "lost",
            "Acknowledged writes lost over kills of QEMU, daemon, host and cable, looked for after each takeover.",
        ),
        ("split", "Kills after which both hosts ran the machine, as the switch saw it."),
        (
            "bytes.fgbi64",
            "Bytes of an epoch, device state included, against its whole pages (figure 5b of the paper on FGBI).",
        ),
        (
            "bytes.steps",
            "Bytes of an epoch by the size of blocks, against the whole pages of its own window.",
        ),
        ("link", "Bytes, delay of output and length of epochs over 1 Gbit/s and 100 Mbit/s to the standby."),
        (
            "memory",
            "Growth of the larger daemon for a guest of which every page is known, with delta blocks of 64 and 256 bytes.",
        ),
        (
            "share.first",
            "Seeding of a second machine from the same disk on the same standby host, against the first.",
        ),
    ],
};

const CAPSULES: Section = Section {
    title: "Capsules over slow links",
    about: "Two hosts with one emulated link: 384 kbit/s with 20 ms round trip (SOSP 2002, section 5), 10 Mbit/s with \
            20 ms, 100 Mbit/s and 1 Gbit/s with 1 ms. Bytes are all IP packets, both ways.",
    notes: &["2026-11-23-measurements-capsule"],
    families: &[
        ("delta", "Pull of a capsule ten seconds newer than one that is here: bytes, processor time, time."),
        ("delta.rsync", "The same pull beside `rsync -z` with the older images as `--compare-dest`."),
        ("first.bytes", "First pull of a guest whose golden disk is in the hash cache or imported."),
        ("hashcache", "Lookups in the hash cache and its size for each page."),
        ("align.found", "Pages of files found again on disks with other alignments."),
        (
            "dsl.primed",
            "Resume over 384 kbit/s of what the host had ten seconds before, until the guest answers.",
        ),
        ("dsl.unprimed", "Resume over 384 kbit/s of a capsule that the host has never seen."),
        ("lan.unprimed", "Resume of 2 GiB over 100 Mbit/s, until the guest answers."),
        (
            "update.packages",
            "Disk changes of an upgrade of Debian packages, sent to a host that has the parent capsule.",
        ),
    ],
};

const PAPER: Section = Section {
    title: "Further experiments of the paper on capsules",
    about: "Sections 5.2 to 5.4 of the SOSP 2002 paper. Its guest had 256 MB, too, but ran on other machines, so its \
            figures say how cases compare with each other, not which program is faster.",
    notes: &["2026-11-23-measurements-capsule"],
    families: &[
        ("service.start", "Start of a service at another host, booted or resumed, primed or not (5.3)."),
        (
            "snapshots.bytes",
            "Snapshots of a desktop-like load, sent to a host that has all earlier ones (5.4).",
        ),
        (
            "moving",
            "Migration of capsules at work by suspend and resume: time and bytes until the guest answers and until all is there (5.2).",
        ),
    ],
};

const POOL: Section = Section {
    title: "The checkpoint pool",
    about: "Experiments of the stdchk paper (ICDCS 2008) and others. OAB (observed bandwidth) ends when `close` \
            returns, ASB (achieved bandwidth) when all is stored; for the incremental protocol and the sliding window \
            they are equal. Members run in network namespaces; `oab.default`, `oab.one`, `read.*` and `saved` have them in the \
            harness's process, with data on a tmpfs.",
    notes: &["2026-11-23-measurements-pool"],
    families: &[
        ("fuse.null", "Writes to a mount that keeps nothing: the cost of FUSE itself (table 1)."),
        (
            "oab.default",
            "1 GiB that does not compress into four benefactors, default policy, until `close` returns.",
        ),
        (
            "dcp",
            "A training of four processes saves 1 GiB of tensors to four benefactors by PyTorch's distributed \
             checkpoints: how long it waits.",
        ),
        ("oab.one", "1 GiB that does not compress into four benefactors, one copy, until `close` returns."),
        ("read.default", "The file of `oab.default` read back through a mount without a cache."),
        ("read.one", "The file of `oab.one` read back through a mount without a cache."),
        ("oab.free", "1 GiB that does not compress into four benefactors, one copy, until `close` returns."),
        ("read.cold", "The same file read back through a mount without a cache."),
        ("oab.1g", "1 GiB into two benefactors, 1 Gbit/s for each host."),
        (
            "fsch",
            "Fixed-size chunks on one core: rate, and share of a guest's memory found in its state ten seconds before.",
        ),
        ("cbch", "Content-based chunks on one core: rate, and share found."),
        ("saved", "Bytes kept of two such states, beside restic and borg."),
        (
            "peers",
            "A series of such states written until durable, beside the disk itself and other programs.",
        ),
        (
            "faults",
            "Members killed at random instants while `cp` writes; then all files are read with each benefactor away in turn.",
        ),
        ("commits", "Files that become visible in a second when 64 clients commit at once, by the database."),
        ("restart", "From the start of a manager that was killed until it has answered a client."),
        ("erasure", "Old chunks cut into pieces, and put together again with pieces lost, by one core."),
        (
            "manager.away",
            "The longest time between two files of a program that writes one after the other to a mount, while the manager in use is killed.",
        ),
        (
            "scrub",
            "Chunks on the disk read and checked: a tenth of what one second of processor time does, and the rate of the disk.",
        ),
        (
            "scale.files",
            "A manager of many files: its memory, opens of files not yet looked at, lists of chunks judged.",
        ),
        ("scale.clients", "Seven clients write files of 100 MB to twenty benefactors at once (figure 8)."),
        ("stripes", "OAB and ASB of three protocols by the width of the stripe (figures 2, 3 and 6)."),
        ("buffers", "The sliding window by its size and the width of the stripe (figures 4 and 5)."),
        (
            "dedup",
            "A series of files with three quarters of each stored before, beside files that are all new (figure 7).",
        ),
        (
            "similarity",
            "Content that checkpoints of a BLAST have in common, by ways to cut (tables 3 and 4).",
        ),
        (
            "application.pause",
            "A BLAST that stands still while a checkpoint is written and synced, in a pool and on the local disk.",
        ),
        ("application", "A BLAST with a checkpoint every two seconds, on the disk and in a pool (table 5)."),
        ("tier", "A series of files in a pool whose segments lie in an S3 store, beside a pool without one."),
        ("capsules", "Two versions of a guest pushed into a pool, and resumed from there."),
        (
            "model",
            "A model of links and manager, checked against real members, then with up to 400 benefactors (figure 8).",
        ),
    ],
};

const SESSIONS: Section = Section {
    title: "Sessions",
    about: "A directory of a server behind an emulated line of 32 ms and 30 or 100 Mbit/s, beside a local disk and \
            other programs. `no cache` writes through, `cold` begins with an empty cache, `warm` with a full one. \
            `then written back` is the time after the work until the server has everything.",
    notes: &["2026-11-23-measurements-session"],
    families: &[
        ("session.documents", "Document runs in the mounted directory (table 1 of the paper)."),
        ("session.build", "Build of a C library in the mounted directory."),
        (
            "session.warm.documents",
            "Document runs with a cache that has seen them before, beside a local disk.",
        ),
        ("session.warm.build", "The build with a cache that has seen it before, beside a local disk."),
        ("session.io", "A trace that is written and computed on (figures 3 to 5 of the paper)."),
        (
            "session.guest",
            "Documents and a trace in a guest whose disk lies on the mount or is an NBD export of one.",
        ),
        (
            "session.peers",
            "Document runs and reads beside sshfs, rclone, nbdkit and NFSv4 over the same line.",
        ),
        ("session.read", "Rate of reading a file that does not compress, and again from the cache."),
        (
            "session.random.reads",
            "Reads of 4 KiB at random places of a file, 64 at once, with an empty cache.",
        ),
        (
            "session.ls.behind",
            "Listing of a directory that nobody has looked at, while 1 GiB is written back.",
        ),
        ("session.save", "A file written anew with one page in a hundred changed, until the server has it."),
        ("session.copy", "`cp` of a file to another name on the mount, until the server has it."),
        ("session.open-dir", "Listing of a directory of 100,000 files."),
        (
            "session.two.writers",
            "A change of one client until another sees it, from the return of the call, beside one round trip.",
        ),
        (
            "session.names",
            "Memory of the client process, at its peak, after a whole tree was listed with its attributes.",
        ),
        ("session.alone.asks", "Requests of a build on a warm mount that nobody disturbs."),
        (
            "session.fsx",
            "Random operations on a file that are not as on a local disk, in four units under three policies, \
             while links are cut.",
        ),
        (
            "session.pjdfstest",
            "Checks of the public suite that pass on a mount of root; `WHIMBREL_PJDFSTEST` names its folder.",
        ),
        ("session.posix", "Wrong bytes of `fio`, random operations, git and a compiler while links are cut."),
        ("session.faults", "Synced writes lost when client, server or link die."),
        (
            "session.clone",
            "Clone of a golden machine of a server 32 ms away until it answers: first, next, over a LAN, eight at once.",
        ),
        (
            "session.clone.images",
            "Clones of different golden machines, one after the other, also by way of a host on the LAN.",
        ),
        (
            "session.clone.hosts",
            "Eight hosts clone eight golden machines of a host on their LAN at once; the slowest until its clone answers.",
        ),
        ("session.clone.scp", "`scp` of a golden machine."),
    ],
};

const TRUST: Section = Section {
    title: "Trust",
    about: "What confinement and authorization cost, and what was tried to break them.",
    notes: &["2026-11-23-qemu-user"],
    families: &[
        (
            "confine.start",
            "Start of a QEMU with a user, namespaces and limits of its own, against one without.",
        ),
        (
            "confine.resume",
            "A QEMU that waits reads a device state and runs: confined, against one that is not.",
        ),
        (
            "encrypt",
            "A GiB of memory into the store and back: with a master key, against the same without one.",
        ),
        ("may.cost", "Authorization of one request of another host, trust list and patterns included."),
        ("matrix", "Every kind of request with every right, over every kind of connection: wrong answers."),
        ("fuzz", "Parsers of outside bytes under libFuzzer with the address sanitizer: findings."),
    ],
};

const DAY: Section = Section {
    title: "The first day",
    about: "What people notice of a machine on its first day.",
    notes: &[],
    families: &[
        (
            "net.throughput",
            "A file of 256 MiB from a guest, through our port and through a tap of QEMU's own.",
        ),
        ("net.latency", "Round trips of datagrams to a guest, one at a time, the same two ways."),
        (
            "launch.cached",
            "A Debian image that is in the store, from the command until sshd in the guest greets.",
        ),
        ("image.store", "Bytes kept of five images of one Debian release, beside their qcow2 files."),
        (
            "smp.migrate",
            "Downtime of a guest whose four CPUs all write, beside one that writes as much with one; memory checked.",
        ),
        ("micro.boot", "A small Linux without a BIOS, from the command until its first program prints."),
        ("uefi.migrate", "What UEFI and a TPM add to the downtime of a move, memory checked."),
        (
            "clock",
            "By how much a guest's wall clock is off after many moves, with our agent and with qemu-ga.",
        ),
    ],
};

/// Section and place in it of a row's family.
pub(super) fn family(row: &str) -> Option<(usize, usize)> {
    let all = SECTIONS.iter().enumerate().flat_map(|(section, one)| {
        one.families.iter().enumerate().map(move |(family, (name, _))| (*name, (section, family)))
    });
    all.filter(|(name, _)| is_within(row, name)).max_by_key(|(name, _)| name.len()).map(|(_, place)| place)
}

fn is_within(row: &str, family: &str) -> bool {
    row.strip_prefix(family).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::SETS;

    #[test]
    fn every_row_that_can_be_measured_has_a_sentence() {
        let rows = SETS.iter().flat_map(|(_, experiments)| experiments.iter()).flat_map(|one| one.rows);
        let silent: Vec<_> = rows.filter(|row| family(row).is_none()).collect();
        assert!(silent.is_empty(), "add a sentence to {}: {silent:?}", file!());
    }

    #[test]
    fn the_longest_family_has_the_row() {
        let name = |row| family(row).map(|(section, at)| SECTIONS[section].families[at].0);
        assert_eq!(name("pause.p99.idle"), Some("pause.p99"));
        assert_eq!(name("pause.idle"), Some("pause"));
        assert_eq!(name("migrate.bytes.empty"), Some("migrate.bytes.empty"));
        assert_eq!(name("pauses"), None);
    }
}
