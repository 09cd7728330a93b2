//! A scripted daemon on a real socket, and the binary run against it.
//!
//! It answers every route with one fixed thing. Operation 1 succeeds after a snapshot; operation 2
//! (checkpoint of `slow`) runs until it is cancelled; operation 3 (checkpoint of `full`) fails.

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{Path, Request, State},
    http::{Response, StatusCode, header},
    response::IntoResponse,
    routing::{delete, get, post, put},
};
use futures_util::stream;
use serde_json::{Value, json};
use std::{
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixListener,
    runtime::Runtime,
    sync::watch,
};
use whimbrel_api::{ApiError, ErrorCode, routes};
use whimbrel_capture::dirty_trace::{DirtyTrace, DirtyTraceHeader, Sample};
use whimbrel_core::PageRun;

pub(crate) struct Daemon {
    _runtime: Runtime,
    directory: TempDir,
    script: Arc<Script>,
}

struct Script {
    /// What all times in answers are.
    time_ms: u64,
    /// Whether somebody watches operation 2.
    watched: watch::Sender<bool>,
    /// Whether operation 2 was cancelled.
    cancelled: watch::Sender<bool>,
    /// Machines that were deleted.
    deleted: Mutex<Vec<String>>,
    /// The console sends this and then everything back that it gets.
    greeting: &'static str,
}

impl Daemon {
    pub(crate) fn start(time_ms: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let runtime = Runtime::new().unwrap();
        let script = Script {
            time_ms,
            watched: watch::channel(false).0,
            cancelled: watch::channel(false).0,
            deleted: Mutex::default(),
            greeting: "login: ",
        };
        let script = Arc::new(script);
        let listener =
            runtime.block_on(async { UnixListener::bind(directory.path().join("host.sock")) }).unwrap();
        let router = router(script.clone());
        runtime.spawn(async move { axum::serve(listener, router).await });
        Self { _runtime: runtime, directory, script }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("host.sock")
    }

    /// The binary with `arguments` (separated by blanks), talking to this daemon, on no terminal.
    pub(crate) fn command(&self, arguments: &str) -> Command {
        let mut command = whimbrel(arguments);
        command.env("WHIMBREL_SOCKET", self.socket());
        command
    }

    pub(crate) fn output(&self, arguments: &str) -> Output {
        self.command(arguments).output().unwrap()
    }

    pub(crate) fn wait_until_watched(&self) {
        wait_for("somebody to watch operation 2", || *self.script.watched.borrow());
    }

    pub(crate) fn deleted(&self) -> Vec<String> {
        self.script.deleted.lock().unwrap().clone()
    }

    pub(crate) fn was_cancelled(&self) -> bool {
        *self.script.cancelled.borrow()
    }
}

/// The binary as a test finds it: nothing of the user's environment decides what it says.
pub(crate) fn whimbrel(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_whimbrel"));
    command.args(arguments.split_whitespace()).env("COLUMNS", "100").env_remove("WHIMBREL_SOCKET");
    command.env_remove("WHIMBREL_LOG").env_remove("VISUAL").env("EDITOR", "true").stdin(Stdio::null());
    command
}

/// Asks again and again until it is so, and gives up after a generous while.
pub(crate) fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn router(script: Arc<Script>) -> Router {
    let machine = |State(script): State<Arc<Script>>| async move { Json(script.machine()) };
    let capsule = |State(script): State<Arc<Script>>| async move { Json(script.capsule()) };
    let done = || async { StatusCode::NO_CONTENT };
    Router::new()
        .route("/v1/networks", get(|| async { Json(Vec::<()>::new()) }))
        .route(routes::HOST, get(host))
        .route(routes::HOSTS, get(hosts))
        .route(routes::USAGE, get(|| async { Json(usage()) }))
        .route(routes::MACHINES, get(machines).post(machine))
        .route(routes::MACHINE, get(machine).delete(delete_machine))
        .route(routes::MACHINE_STOP, post(machine))
        .route(routes::MACHINE_PAUSE, post(refuse))
        .route(routes::MACHINE_UNPAUSE, post(machine))
        .route(routes::MACHINE_UPGRADE, post(machine))
        .route(routes::MACHINE_BALLOON, post(machine))
        .route(routes::MACHINE_RENAME, post(machine))
        .route(routes::MACHINE_SETTINGS, post(machine))
        .route(routes::EVENTS, get(host_events))
        .route(routes::SCHEDULES, get(schedules))
        .route(routes::SCHEDULE, get(|| async { Json(schedule()) }).delete(done))
        .route(routes::SCHEDULE_RUN, post(|| async {
            Json(json!({"retained": ["schedule.nightly.1795564800000"], "removed": ["schedule.nightly.1795478400000"]}))
        }))
        .route(routes::MACHINE_CHECKPOINT, post(checkpoint))
        .route(routes::MACHINE_SUSPEND, post(|| begin("suspend")))
        .route(routes::MACHINE_MIGRATE, post(|| begin("migrate")))
        .route(routes::MIGRATIONS, get(migrations))
        .route(routes::MACHINE_WWS, post(|| async { Bytes::from(trace()) }))
        .route(routes::EVACUATE, post(|| begin("evacuate")))
        .route(routes::MACHINE_CONSOLE, get(console))
        .route(routes::MACHINE_CONSOLE_LOG, get(|| async { "boot\n" }))
        .route(routes::RESUME, post(|| begin("resume")))
        .route(routes::CLONE, post(|| begin("clone")))
        .route(routes::MATCH, post(|| async { Json(golden()) }))
        .route(routes::DERIVE, post(derive))
        .route(routes::PROMOTE, post(|| async { Json(promotion()) }))
        .route(routes::GRAPH, get(graph))
        .route(routes::CAPSULE_GRAPH, get(graph))
        .route(routes::CAPSULE_REBASE, get(rebase))
        .route(routes::REF_HISTORY, get(versions))
        .route(routes::CAPSULES, get(capsules))
        .route(routes::CAPSULE, get(capsule).delete(|| async { Json(left_behind()) }))
        .route(routes::CAPSULE_LOG, get(capsules))
        .route(routes::CAPSULE_DIFF, get(diff))
        .route(routes::TAG, put(tag))
        .route(routes::STORE_GC, post(|| begin("gc")))
        .route(routes::STORE_VERIFY, post(|| begin("verify")))
        .route(routes::STORE_REPAIR, post(|| begin("repair")))
        .route(routes::STORE_ENCRYPTION, get(|| async { Json(encryption()) }))
        .route(routes::STORE_SEAL, post(|| begin("seal")))
        .route(routes::STORE_KEY, put(|| async { Json(encryption()) }))
        .route(routes::EXPORT, post(|| begin("export")))
        .route(routes::IMPORT, post(|| begin("import")))
        .route(
            routes::TRUST,
            get(|| async { Json(json!([trust_entry()])) }).post(|| async { Json(trust_entry()) }),
        )
        .route(routes::TRUST_ENTRY, put(|| async { Json(limited_entry()) }).delete(done))
        .route(routes::OPERATION, delete(cancel))
        .route(routes::OPERATION_EVENTS, get(events))
        .with_state(script)
}

impl Script {
    fn machine(&self) -> Value {
        json!({"name": "web", "state": {"kind": "loading", "resident_pages": 64, "total_pages": 256}, "memory": 1048576,
            "cpus": 2, "accel": "tcg", "disks": [{"size": 8192, "base": "/img/web.img", "owned": 4096}],
            "nics": [{"mac": "52:54:00:00:00:01", "bridge": "br0"}], "pid": null, "since_ms": self.time_ms,
            "origin": id('a'), "operation": null, "restarts": {"count": 3, "gave_up": true},
            "settings": {"autostart": {"kind": "on", "order": 1, "delay_s": 30},
                "restart": {"policy": "always", "limit": 3}, "labels": {"tier": "front"}, "note": "of ann"}})
    }

    fn capsule(&self) -> Value {
        json!({"id": id('b'), "names": ["before", "web"], "machine": "web", "active": true, "time_ms": self.time_ms,
            "host": "alpha", "memory": 1048576, "images": [{"name": "memory", "pages": 256, "size": 1048576, "root": id('c')}],
            "parents": [id('a')], "labels": {"ticket": "4711"}})
    }
}

async fn delete_machine(State(script): State<Arc<Script>>, Path(name): Path<String>) -> StatusCode {
    script.deleted.lock().unwrap().push(name);
    StatusCode::NO_CONTENT
}

/// Machine with the name that was asked for. Of `slow-2` it takes until it was watched for a while.
async fn derive(State(script): State<Arc<Script>>, Json(request): Json<Value>) -> Json<Value> {
    if request["name"] == "slow-2" {
        script.watched.send_replace(true);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let mut machine = script.machine();
    if request["name"].as_str().is_some_and(|name| name.starts_with("slow")) {
        machine["name"] = request["name"].clone();
    }
    Json(machine)
}

fn id(digit: char) -> String {
    digit.to_string().repeat(64)
}

async fn host() -> Json<Value> {
    Json(
        json!({"name": "alpha", "version": "0.1.0", "public_key": "ed25519:KEY", "listen": null, "data": "/data",
        "pid": 1, "qemu_version": "7.2.22", "accel": "tcg", "machines": 1, "uptime_s": 12600,
        "store": {"capsules": 2, "stored": 12288, "logical": 2097152, "free": 1073741824}}),
    )
}

fn schedule() -> Value {
    json!({"name": "nightly", "every_ms": 86_400_000, "offset_ms": 10_800_000, "created_ms": 1_795_000_000_000_u64,
        "next_ms": 1_795_575_600_000_u64, "running": true, "tags": ["schedule.nightly.1795489200000"],
        "work": {"kind": "checkpoint", "machine": "web", "retain": {"daily": 7, "weekly": 4}},
        "runs": [{"started_ms": 1_795_489_200_000_u64, "ended_ms": 1_795_489_201_500_u64, "succeeded": true,
            "text": "capsule bbbbbbbbbbbb; 1 old tag removed"}]})
}

async fn schedules(State(script): State<Arc<Script>>) -> Json<Value> {
    let mut schedule = schedule();
    schedule["runs"][0]["started_ms"] = script.time_ms.into();
    Json(json!([schedule]))
}

async fn host_events() -> impl IntoResponse {
    let event = |number: u64, event: Value| {
        let mut event = event;
        event["number"] = number.into();
        event["time_ms"] = 1_795_639_262_000_u64.into();
        format!("id: {number}\ndata: {event}\n\n")
    };
    let text = ":\n\n".to_owned()
        + &event(7, json!({"subject": "web", "kind": "machine", "text": "running"}))
        + &event(
            8,
            json!({"subject": "web", "kind": "operation_ended", "operation": "checkpoint", "text": "succeeded"}),
        )
        + &event(9, json!({"subject": "web", "kind": "self_start", "text": "started"}));
    ([(header::CONTENT_TYPE, routes::EVENT_STREAM)], text)
}

async fn machines(State(script): State<Arc<Script>>) -> Json<Value> {
    Json(json!([script.machine()]))
}

async fn hosts(State(script): State<Arc<Script>>) -> Json<Value> {
    let memory = json!({"total": 1 << 30, "spare": 1 << 29});
    Json(json!([
        {"name": "alpha", "memory": memory, "machines": [script.machine()]},
        {"name": "beta", "machines": [], "failure": "no answer within 5 s"},
    ]))
}

fn usage() -> Value {
    json!([{"name": "web", "at_ms": 1000, "cpu_ms": 500, "resident": 65536, "received": 1, "sent": 2, "read": 3,
        "written": 4}])
}

async fn capsules(State(script): State<Arc<Script>>) -> Json<Value> {
    let mut first = script.capsule();
    first["id"] = id('a').into();
    first["names"] = json!([]);
    first["parents"] = json!([]);
    first["active"] = false.into();
    Json(json!([script.capsule(), first]))
}

/// Golden capsule, its update, and a child of the old one with a child of its own.
async fn graph(State(script): State<Arc<Script>>) -> Json<Value> {
    let node = |digit, names: &[&str], under: &[char], children: &[char], machines: Value| {
        let ids = |digits: &[char]| digits.iter().map(|digit| id(*digit)).collect::<Vec<_>>();
        let mut node = script.capsule();
        let more = json!({"id": id(digit), "names": names, "parents": ids(under), "under": ids(under), "children": ids(children),
            "active": digit == 'c' || digit == 'd', "machines": machines, "adds": 1048576, "labels": {}});
        node.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        node
    };
    let on = |name: &str, live: bool| json!([{"name": name, "live": live}]);
    let mut elsewhere = node('e', &[], &['b'], &[], json!([]));
    elsewhere["adds"] = Value::Null;
    Json(json!([
        node('b', &["golden-1"], &[], &['c', 'e'], json!([])),
        node('c', &[], &['b'], &['d'], json!([])),
        node('d', &["web"], &['c'], &[], on("web", true)),
        elsewhere,
        node('a', &["golden"], &[], &[], on("db", false)),
    ]))
}

async fn rebase(State(script): State<Arc<Script>>) -> Json<Value> {
    let standing = |machine: Value, names: Value, disks: Value, unknown: Value| json!({"capsule": id('d'), "names": names, "machine": machine, "old": id('b'), "disks": disks, "unknown": unknown});
    let disks = json!([{"name": "disk0", "changed": 300, "updated": 120, "conflicts": 3, "conflict_runs": [[7, 2], [90, 1]]}]);
    Json(json!({"onto": id('a'), "old": [
        {"capsule": id('b'), "previous": null, "time_ms": script.time_ms, "here": true},
        {"capsule": id('f'), "previous": null, "time_ms": 0, "here": false}],
        "standing": [standing(Value::Null, json!(["web"]), disks.clone(), Value::Null),
            standing("web".into(), json!(["web"]), disks, Value::Null),
            standing("db".into(), json!([]), json!([]), "db is busy with a checkpoint".into())]}))
}

async fn versions(State(script): State<Arc<Script>>) -> Json<Value> {
    Json(json!([{"capsule": id('a'), "previous": id('b'), "time_ms": script.time_ms, "here": true},
        {"capsule": id('b'), "previous": null, "time_ms": 0, "here": false}]))
}

fn promotion() -> Value {
    json!({"capsule": id('c'), "was": id('b'), "parents": [id('a')], "refs": ["golden"], "bytes_copied": 0,
        "bytes_added": 1229, "ms": 3.25})
}

fn left_behind() -> Value {
    json!({"capsule": id('b'), "names": ["golden-1"], "children": [id('c'), id('d')]})
}

async fn tag(State(script): State<Arc<Script>>) -> Json<Value> {
    let mut tagged = script.capsule();
    tagged["left"] = json!({"capsule": id('a'), "names": [], "children": [id('c')]});
    Json(tagged)
}

async fn diff() -> Json<Value> {
    Json(json!({"a": id('a'), "b": id('b'), "config": [{"field": "cpus", "a": "1", "b": "2"}], "images": [
        {"name": "memory", "pages_a": 256, "pages_b": 256, "changed": 3, "new_contents": 2}]}))
}

fn trust_entry() -> Value {
    json!({"name": "beta", "key": "ed25519:OTHER", "address": "10.0.0.2:7400"})
}

fn limited_entry() -> Value {
    json!({"name": "beta", "key": "ed25519:OTHER", "address": "10.0.0.2:7400", "read": ["web", "golden*"]})
}

/// Refuses with the code that the machine is named after.
async fn refuse(Path(name): Path<String>) -> impl IntoResponse {
    let code = ErrorCode::ALL.into_iter().find(|code| code.as_str() == name).unwrap();
    let mut error = ApiError::new(code, format!("refused as {code}")).with_hint("do something else");
    error.causes = vec!["it was written so".to_owned()];
    (StatusCode::from_u16(code.http_status()).unwrap(), Json(error))
}

fn operation(number: u64, kind: &str, state: Value) -> Value {
    let progress = json!({"stage": "copying", "done": 1, "total": 4, "unit": "pages", "rate_per_s": 2.0});
    let mut operation =
        json!({"id": number, "kind": kind, "subject": "web", "started_ms": 1, "progress": progress});
    operation.as_object_mut().unwrap().extend(state.as_object().unwrap().clone());
    operation
}

/// Two seconds of a machine that writes ten pages again and again and ten others each time.
fn trace() -> Vec<u8> {
    let every = Duration::from_millis(50);
    let head = DirtyTraceHeader { pages: 1024, populated: 512, interval: every, start_ms: 1 };
    let sample = |k: u64| {
        let dirty = vec![PageRun::new(0, 10), PageRun::new(20 + 10 * k, 10)];
        Sample { duration: every, dirty }
    };
    DirtyTrace { header: head, samples: (0..40u64).map(sample).collect() }.write()
}

/// The capsule that fits best, which is here.
fn golden() -> Value {
    json!({"name": "web-base", "capsule": id('b'), "attributes": {"ram": 1048576, "disk": 8192, "cpus": 1,
        "active": true, "time_ms": 0, "labels": {"os": "debian"}}})
}

/// Begins an operation whose kind its number tells.
async fn begin(kind: &'static str) -> (StatusCode, Json<Value>) {
    let number = 10 + KINDS.iter().position(|known| *known == kind).unwrap() as u64;
    (StatusCode::ACCEPTED, Json(operation(number, kind, json!({"state": "running"}))))
}

const KINDS: [&str; 12] = [
    "checkpoint",
    "suspend",
    "resume",
    "clone",
    "migrate",
    "gc",
    "verify",
    "export",
    "import",
    "evacuate",
    "repair",
    "seal",
];

async fn checkpoint(Path(name): Path<String>) -> (StatusCode, Json<Value>) {
    let number = match name.as_str() {
        "slow" => 2,
        "full" => 3,
        _ => return begin("checkpoint").await,
    };
    (StatusCode::ACCEPTED, Json(operation(number, "checkpoint", json!({"state": "running"}))))
}

fn encryption() -> Value {
    json!({"master_key": "00112233445566aa", "data_key": "ffeeddccbbaa0099", "plain": 8192})
}

fn result(kind: &str) -> Value {
    let rounds = json!([{"pages": 256, "bytes": 8192, "ms": 10.5}, {"pages": 3, "bytes": 4096, "ms": 0.5}]);
    match kind {
        "checkpoint" | "suspend" => {
            json!({"kind": kind, "capsule": id('b'), "pause_ms": 1.75, "total_ms": 412.0,
            "bytes_added": 12288, "rounds": rounds})
        }
        "resume" => json!({"kind": kind, "machines": ["web"], "to_running_ms": 151.0}),
        "clone" => json!({"kind": kind, "machines": ["web-1", "web-2"], "to_running_ms": 300.0}),
        "migrate" => json!({"kind": kind, "host": "beta", "downtime_ms": 4.5, "total_ms": 2400.0,
            "wire_bytes": 2097152, "rounds": rounds, "network": {"kind": "announced", "ports": 1}}),
        "gc" => {
            json!({"kind": kind, "freed": 4096, "stored": 8192, "moved": 1, "packs_waiting": 2})
        }
        "verify" => json!({"kind": kind, "capsules": 2, "objects": 300, "bytes": 8192,
            "damaged": [{"place": "pack 3", "problem": "digest differs at 4096"}]}),
        "seal" => json!({"kind": kind, "sealed": 8192, "plain": 4096}),
        "repair" => {
            json!({"kind": kind, "dropped": 2, "asked": ["beta", "gamma"], "failure": "beta does not answer",
            "capsules": [{"capsule": id('b'), "names": ["machine.web", "before"], "healed": 7, "missing": 0},
                {"capsule": id('d'), "names": [], "healed": 0, "missing": 1}]})
        }
        "evacuate" => {
            let one = |name: &str, pages: u64, host: Value, outcome: Value| json!({"name": name, "memory": 1048576, "dirtied_pages": pages, "host": host, "outcome": outcome});
            let error = ApiError::new(ErrorCode::Busy, "db is busy with a checkpoint");
            let stopped = json!({"name": "old", "memory": 1048576, "outcome": {"kind": "left", "state": {"kind": "stopped"}}});
            json!({"kind": kind, "empty": false, "dry_run": false, "machines": [
                one("web", 12, "beta".into(), json!({"kind": "moved", "downtime_ms": 4.5, "total_ms": 2400.0})),
                one("db", 34, "beta".into(), json!({"kind": "failed", "error": error})),
                one("big", 5678, Value::Null, json!({"kind": "no_room", "reasons": ["beta: it needs 1 MiB of memory, 4 KiB are free"]})),
                stopped]})
        }
        "export" => json!({"kind": kind, "path": "/backup/web.capsule", "bytes": 8192}),
        _ => json!({"kind": kind, "capsule": id('b'), "added": 8192}),
    }
}

async fn events(State(script): State<Arc<Script>>, Path(number): Path<u64>) -> Response<Body> {
    match number {
        2 => until_cancelled(script),
        3 => {
            let error = ApiError::new(ErrorCode::NoSpace, "the store is full").with_hint("run `whimbrel gc`");
            lines(&[operation(3, "checkpoint", json!({"state": "failed", "error": error}))])
        }
        _ => {
            let kind = KINDS[number as usize - 10];
            let running = operation(number, kind, json!({"state": "running"}));
            let ended = json!({"state": "succeeded", "result": result(kind)});
            lines(&[running, operation(number, kind, ended)])
        }
    }
}

async fn migrations(State(script): State<Arc<Script>>) -> Json<Value> {
    let round = |pages: u64, bytes: u64, begun: f64, ms: f64, left: u64| {
        json!({"pages": pages, "bytes": bytes, "begun_ms": begun, "ms": ms, "left": left, "skipped": left / 8,
            "limit": 12_500_000, "downtime_ms": left as f64 / 30.0})
    };
    Json(json!([
        {"id": "0badcafe", "machine": "web", "from": "alpha", "started_ms": script.time_ms, "total_ms": 9_000.0,
            "request": {"host": "beta", "rate_min": 12_500_000, "rate_max": 62_500_000},
            "rounds": [round(25_600, 60_000_000, 0.0, 5_000.0, 4_000), round(3_500, 12_000_000, 5_000.0, 900.0, 1_500),
                round(1_500, 6_000_000, 5_900.0, 96.0, 0)],
            "end": "moved", "downtime_ms": 110.0, "pause": {"stop_ms": 0.5, "scan_ms": 0.75, "devices_ms": 1.25,
                "pages_ms": 96.0, "load_ms": 5.0, "link_ms": 2.5, "commit_ms": 3.0, "start_ms": 1.0}, "wire_bytes": 80_000_000, "stopped_by": "rate_above_max",
            "network": {"kind": "announced", "ports": 1}},
        {"id": "00c0ffee", "machine": "db", "from": "alpha", "started_ms": script.time_ms, "total_ms": 70.0,
            "request": {"host": "gamma"}, "rounds": [], "end": "failed", "reason": "cannot reach host gamma"},
    ]))
}

fn lines(values: &[Value]) -> Response<Body> {
    Response::new(values.iter().map(|value| format!("{value}\n")).collect::<String>().into())
}

/// One snapshot at once, the last one when somebody has cancelled.
fn until_cancelled(script: Arc<Script>) -> Response<Body> {
    let steps = stream::unfold((0, script), |(step, script)| async move {
        let state = match step {
            0 => json!({"state": "running"}),
            1 => {
                script.watched.send_replace(true);
                script.cancelled.subscribe().wait_for(|cancelled| *cancelled).await.ok()?;
                json!({"state": "cancelled", "left": "the machine runs on, nothing was stored"})
            }
            _ => return None,
        };
        let line = Bytes::from(format!("{}\n", operation(2, "checkpoint", state)));
        Some((Ok::<_, std::io::Error>(line), (step + 1, script)))
    });
    Response::new(Body::from_stream(steps))
}

async fn cancel(State(script): State<Arc<Script>>) -> Json<Value> {
    script.cancelled.send_replace(true);
    Json(operation(2, "checkpoint", json!({"state": "running"})))
}

async fn console(State(script): State<Arc<Script>>, mut request: Request) -> Response<Body> {
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let mut stream = hyper_util::rt::TokioIo::new(upgrade.await.unwrap());
        stream.write_all(script.greeting.as_bytes()).await.unwrap();
        let mut buffer = [0; 256];
        while let Ok(count @ 1..) = stream.read(&mut buffer).await {
            if buffer[..count].ends_with(b"exit\n") || stream.write_all(&buffer[..count]).await.is_err() {
                break;
            }
        }
        let _ = stream.shutdown().await;
    });
    let head =
        Response::builder().status(StatusCode::SWITCHING_PROTOCOLS).header(header::CONNECTION, "upgrade");
    head.header(header::UPGRADE, routes::CONSOLE_PROTOCOL).body(Body::empty()).unwrap()
}
