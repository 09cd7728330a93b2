//! A data directory with every kind of file that a daemon keeps, and what a daemon that starts on it knows.

use crate::{
    core::directories::Directories,
    daemon::Daemon,
    image::ImageSources,
    machine::{
        commit_mark::CommitMark,
        record::{DiskBase, PendingHandover, Phase, Record},
    },
    network::managed::check_file,
    protect::{
        records::{ProtectionRecord, ProtectionRecords, ProtectionSide},
        witness::service::WitnessTable,
    },
    schedule::Actions,
    server::access::{Access, audit::Entry},
};
use std::{collections::BTreeMap, fs, path::Path, sync::Arc};
use tokio::runtime::Runtime;
use whimbrel_api::{Role, TokenRequest};
use whimbrel_block::{Cow, Device, OverlayDir, ZeroDevice};
use whimbrel_core::{ByteSize, CapsuleId, Digest, MachineConfig, PAGE_SIZE, PageRun};
use whimbrel_image::{FORMAT, ImageRef, Manifest};
use whimbrel_migrate::protocol::{HandoverId, TunnelId};
use whimbrel_protect::{
    lease::WitnessQuery,
    protocol::{ProtectionId, WitnessRequest},
};
use whimbrel_store::MasterKey;
use whimbrel_wire::{Rights, TrustedPeer, json_file, web_tls::ServerCertificate};

const DISK: u64 = 64 * PAGE_SIZE as u64;
/// What a guest wrote to its disk.
const WRITTEN: &[u8] = &[0x5a; PAGE_SIZE];

pub(super) fn parsed<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &str) -> T {
    text.parse().expect("a valid text")
}

pub(super) fn json<T: serde::de::DeserializeOwned>(text: &str) -> T {
    serde_json::from_str(text).expect("valid JSON")
}

/// A daemon on a folder, as `lifecycle` starts it, without threads that wait for work.
pub(super) struct Started {
    pub(super) host: Arc<Daemon>,
    pub(super) access: Arc<Access>,
}

impl Drop for Started {
    fn drop(&mut self) {
        self.host.close();
    }
}

pub(super) fn start(dir: &Path, runtime: &Runtime, key: Option<&MasterKey>) -> Result<Started, String> {
    let failed = |error: crate::DaemonError| whimbrel_core::error_chain(&error);
    let layout = Directories::create(&dir.join("data"), &dir.join("run")).map_err(failed)?;
    let (name, images) =
        (parsed("alpha"), ImageSources::new(Vec::new(), Default::default()).map_err(failed)?);
    let handle = runtime.handle().clone();
    let host =
        Daemon::open((name, None), layout, Vec::new(), images, key.cloned(), handle).map_err(failed)?;
    let access = Access::open(&host.directories, Vec::new()).map_err(failed)?;
    host.recover_machines(true).map_err(failed)?;
    host.load_uploads();
    Ok(Started { host, access })
}

fn config() -> MachineConfig {
    MachineConfig::minimal(ByteSize(1 << 20))
}

/// A capsule under a tag: its pages differ from those of every other seed.
fn capsule(host: &Daemon, tag: &str, seed: u8) -> CapsuleId {
    let writer = host.store.writer().expect("a writer");
    let mut image = writer.image(None, 16).expect("an image");
    for page in 0..8 {
        let content: Vec<u8> = (0..PAGE_SIZE as u32).map(|at| (at * 7 + page) as u8 ^ seed).collect();
        image.put(PageRun::new(page.into(), 1), &content).expect("a page");
    }
    let root = image.finish().expect("an image").root;
    let images = vec![ImageRef { name: "memory".into(), pages: 16, root, cuts: None }];
    let manifest = Manifest {
        format: FORMAT,
        machine: config(),
        device: vec![],
        images,
        parents: vec![],
        time: seed.into(),
        host: "alpha".into(),
        labels: BTreeMap::new(),
        working_set: None,
    };
    writer.commit(&manifest, &[parsed(tag)]).expect("a capsule")
}

fn machine(layout: &Directories, name: &str, phase: Phase, change: impl FnOnce(&mut Record)) {
    let mut record = Record::new(parsed(name), config(), vec![]);
    record.phase = phase;
    change(&mut record);
    record.save(layout).expect("a record");
}

fn overlay(layout: &Directories, name: &str) -> OverlayDir {
    OverlayDir { dir: layout.machine(&parsed(name)).join("disk0"), live_dir: layout.live_bitmaps() }
}

/// Makes a folder with one file of every kind.
pub(super) fn make(dir: &Path, runtime: &Runtime, key: Option<&MasterKey>) {
    let Started { host, access } = &start(dir, runtime, key).expect("a new folder");
    let layout = &host.directories;
    let (golden, backup) = (capsule(host, "golden", 1), capsule(host, "backup", 2));
    capsule(host, "machine.db", 3);
    let partial = capsule(host, "half", 4);
    host.store.expect_partial(&partial).expect("a mark");
    machines(layout, golden);
    handed_over(layout);
    host.handovers.start(HandoverId([9; 16]), &parsed("beta")).expect("a handover");
    protections(layout);
    let request = |text: &str| json(text);
    let nightly = r#"{"name":"nightly","work":{"kind":"gc"},"every_ms":86400000}"#;
    host.schedules.create(request(nightly), &Actions(host.clone())).expect("a schedule");
    let network = r#"{"format":1,"name":"lan0","subnet":"10.9.8.0/24","subnet6":null,"isolated":false,"leases":{},"ports":[]}"#;
    let path = layout.networks().join("lan0.json");
    json_file::replace(&path, &json::<serde_json::Value>(network)).expect("a network");
    check_file(&path).expect("a network");
    let (name, role) = (parsed("ci"), Role::Viewer);
    access
        .tokens
        .create(TokenRequest { name, role, machines: None, capsules: None, expires_s: None })
        .expect("a token");
    let key = Some(host.identity().expect("a key").public_key());
    let peer = TrustedPeer {
        name: parsed("beta"),
        key,
        address: None,
        rights: Rights::all(),
        read: None,
        write: None,
    };
    host.trust.add(peer).expect("a trusted host");
    let away = parsed("beta");
    host.tunnels.start_home(TunnelId([5; 16]), &parsed("roaming"), &config(), &away).expect("a tunnel");
    let following: serde_json::Value = json(r#"{"web": {"to": "beta", "sent": null, "kept_ms": 0}}"#);
    json_file::replace(&layout.uploads(), &following).expect("uploads");
    others(host, access, backup);
}

fn machines(layout: &Directories, golden: CapsuleId) {
    machine(layout, "web", Phase::Stopped, |record| record.bases = vec![DiskBase::Blank]);
    let base: Arc<dyn Device> = Arc::new(ZeroDevice { size: DISK });
    let disk = Cow::create(&overlay(layout, "web"), base, Digest::of(b"blank")).expect("a disk");
    disk.write_at(0, WRITTEN).and_then(|()| disk.flush()).expect("a write of the guest");
    fs::write(layout.console_log(&parsed("web")), "booted\n").expect("a console log");
    machine(layout, "db", Phase::Suspended { capsule: golden }, |_| {});
    machine(layout, "crashed", Phase::Crashed { reason: "killed".into() }, |_| {});
}

/// A machine that was handed over: its record names the handover, and the mark says that it was committed.
fn handed_over(layout: &Directories) {
    let handover = HandoverId([3; 16]);
    let leaving = PendingHandover { handover, to: parsed("beta"), keeps: false };
    machine(layout, "moved", Phase::Here, |record| record.leaving = Some(leaving));
    let mark = CommitMark::prepare(&layout.machine(&parsed("moved"))).expect("a mark");
    mark.make(handover).expect("a mark");
}

fn protections(layout: &Directories) {
    machine(layout, "guarded", Phase::Here, |_| {});
    let records = ProtectionRecords::open(layout.protections()).expect("a folder");
    let side = ProtectionSide::Primary { request: json(r#"{"host":"beta"}"#), gave_up: false };
    let id = ProtectionId([1; 16]);
    let record = ProtectionRecord::new(id, &parsed("guarded"), HandoverId([2; 16]), side);
    records.put(&record).expect("a protection");
    let leases = WitnessTable::open(layout.leases()).expect("a folder");
    let question = WitnessQuery::Register { standby: parsed("gamma"), term_ms: 400 };
    leases.answer(&parsed("beta"), &WitnessRequest { id, question }).expect("a lease");
}

fn others(host: &Daemon, access: &Access, capsule: CapsuleId) {
    let layout = &host.directories;
    let kernel = b"a kernel";
    host.write_boot_file(&Digest::of(kernel), kernel).expect("a boot file");
    fs::write(layout.prefetch_list(&capsule), "").expect("a prefetch list");
    fs::write(layout.pool_secret(), "secret\n").expect("a secret");
    assert!(host.hash_cache().is_some(), "a hash cache");
    let pooled: serde_json::Value = json(r#"{"pool": {"managers": [], "folder": "vm"}, "version": 1}"#);
    fs::create_dir_all(layout.partial_capsules()).expect("a folder");
    json_file::replace(&layout.partial_capsules().join(capsule.to_string()), &pooled).expect("a record");
    let buckets = serde_json::json!({"capsules": {capsule.to_string(): "s3://vault/vms"}});
    json_file::replace(&layout.buckets(), &buckets).expect("a record");
    let past: serde_json::Value = json(
        r#"{"format":1,"id":"0badcafe","machine":"web","from":"alpha","started_ms":1,"request":{"host":"beta"},
            "total_ms":1.0,"rounds":[],"end":"failed","reason":"on purpose"}"#,
    );
    fs::create_dir_all(layout.migrations()).expect("a folder");
    let path = layout.migrations().join("0000000000001-0badcafe.json");
    json_file::replace(&path, &past).expect("a record");
    ServerCertificate::load_or_create(&layout.key_dir(), vec!["alpha".into()]).expect("a certificate");
    access.audit.note(&Entry {
        time_ms: 1,
        who: None,
        from: "socket".into(),
        method: "POST",
        path: "/",
        objects: vec![],
        outcome: "done",
        status: 200,
        ms: 1,
    });
}

/// What a daemon knows: one line for each thing that a user could miss.
pub(super) fn known(Started { host, access }: &Started) -> BTreeMap<String, String> {
    let mut known = BTreeMap::new();
    let mut add = |kind: &str, name: &dyn std::fmt::Display, text: String| {
        known.insert(format!("{kind} {name}"), text);
    };
    let mut machines = host.machine_infos();
    host.add_away(&mut machines);
    for machine in machines {
        let state = serde_json::to_value(&machine.state).expect("a state")["kind"].to_string();
        add("machine", &machine.name, state);
    }
    let (refs, _) = host.store.readable_refs().expect("refs");
    for (name, id) in refs {
        let listed = host.store.capsules().is_ok_and(|all| all.iter().any(|capsule| capsule.id == id));
        add("tag", &name, format!("{id} listed {listed} whole {:?}", host.store.is_complete(&id).ok()));
    }
    for partial in host.store.partials().unwrap_or_default() {
        add("partial", &partial, String::new());
    }
    for schedule in host.schedules.list(&Actions(host.clone())) {
        add("schedule", &schedule.schedule.name, schedule.created_ms.to_string());
    }
    host.networks.list().iter().for_each(|network| add("network", &network.name, network.subnet.clone()));
    for token in access.tokens.list().unwrap_or_default() {
        add("token", &token.name, token.created_ms.to_string());
    }
    for peer in host.trust_list().unwrap_or_default() {
        add("peer", &peer.name, peer.key.unwrap_or_default());
    }
    for migration in host.past_migrations().unwrap_or_default() {
        add("migration", &migration.id.0, migration.started_ms.to_string());
    }
    add("key", &"alpha", host.identity().map_or_else(|_| String::new(), |key| key.public_key().to_string()));
    known
}

/// What the guest wrote to the disk of `web`.
pub(super) fn disk_is_whole(layout: &Directories) -> bool {
    let base: Arc<dyn Device> = Arc::new(ZeroDevice { size: DISK });
    let mut page = vec![0; PAGE_SIZE];
    Cow::open(&overlay(layout, "web"), base, Digest::of(b"blank"))
        .is_ok_and(|disk| disk.read_at(0, &mut page).is_ok() && page == WRITTEN)
}
