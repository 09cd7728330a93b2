//! OpenAPI document of the API: schemas from the types, operations from one table.
//!
//! A table replaces attributes on handlers, because the handlers are in the daemon, which clients do not
//! link. The table uses the constants of [`routes`]. A test compares the document with the one that is
//! checked in.

use crate::{openapi_errors, openapi_examples, openapi_names::Name, routes::*, *};
use std::collections::BTreeMap;
use utoipa::{
    OpenApi,
    openapi::{
        ContentBuilder, HttpMethod, InfoBuilder, LicenseBuilder, Paths, PathsBuilder, Ref, RefOr, Required,
        ResponseBuilder, Schema,
        path::{OperationBuilder, ParameterBuilder, ParameterIn, PathItem},
        request_body::RequestBodyBuilder,
        schema::{ArrayBuilder, ObjectBuilder, Type},
        security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme},
    },
};

#[derive(OpenApi)]
#[openapi(components(schemas(
    ApiError,
    BalloonRequest,
    BucketCapsule,
    BucketRequest,
    CacheAddRequest,
    CacheInfo,
    CallerInfo,
    CapsuleDiff,
    CapsuleInfo,
    CapsuleRef,
    CheckpointRequest,
    CloneRequest,
    CpuBaseline,
    CpuBaselineRequest,
    DeriveRequest,
    EvacuateRequest,
    ExecRequest,
    ExecResult,
    ExportRequest,
    FailoverRequest,
    FileContent,
    FileReadRequest,
    FileWriteRequest,
    GoldenMatch,
    GraphNode,
    HostEvent,
    HostInfo,
    HostMachines,
    ImageOffers,
    ImagePullRequest,
    ImportRequest,
    PreviousCapsule,
    KeyChangeRequest,
    MachineInfo,
    MachineUsage,
    MatchRequest,
    MigrateRequest,
    MigrationRecord,
    Name,
    NetworkHostsRequest,
    NetworkInfo,
    NetworkRequest,
    NewToken,
    Operation,
    PoolInfo,
    PortsRequest,
    PublishedPort,
    PromoteReport,
    PromoteRequest,
    ProtectRequest,
    SnapshotRule,
    PullRequest,
    PushRequest,
    RemoteCapsule,
    RenameRequest,
    RepairRequest,
    OutdatedReport,
    RefRights,
    RefVersion,
    ResolveRequest,
    ResumeRequest,
    RewindRequest,
    RunRequest,
    ScheduleInfo,
    ScheduleReport,
    ScheduleRequest,
    ScheduleRunRequest,
    SessionInfo,
    SettingsRequest,
    StopRequest,
    StoreEncryption,
    SuspendRequest,
    TagRequest,
    Tagged,
    TokenInfo,
    TokenRequest,
    TrustEntry,
    DirtyTraceRequest
)))]
struct Schemas;

#[derive(Clone, Copy)]
enum Reply {
    /// 200 and one object.
    One(&'static str),
    /// 200 and an array of objects.
    Many(&'static str),
    /// 202 and the operation that was started.
    Begun,
    /// 204 without a body.
    Done,
    /// 200 and one object a line.
    Stream(&'static str),
    /// 200 and server-sent events, each with one object.
    Events(&'static str),
    /// 200 and bytes of text.
    Text,
    /// 200 and a dirty trace.
    Trace,
    /// 101 and a raw byte stream in both directions.
    Upgrade,
    /// 200 and this document.
    Document,
}

/// Method, path, name, body, reply, one line of explanation.
type Endpoint = (HttpMethod, &'static str, &'static str, Option<&'static str>, Reply, &'static str);

use HttpMethod::{Delete, Get, Post, Put};

#[rustfmt::skip]
const ENDPOINTS: &[Endpoint] = &[
    (Get, HOST, "host", None, Reply::One("HostInfo"), "The host"),
    (Get, HOSTS, "hosts", None, Reply::Many("HostMachines"), "Machines and room of this host and of the hosts that it trusts, which are asked"),
    (Get, CALLER, "caller", None, Reply::One("CallerInfo"), "Who calls, and the calls that are allowed"),
    (Get, OPENAPI, "openapi", None, Reply::Document, "This document"),
    (Get, METRICS, "metrics", None, Reply::Text, "Figures of the host and its machines, in the text format of Prometheus"),
    (Get, USAGE, "usage", None, Reply::Many("MachineUsage"), "Processor time, memory and traffic of all machines that have processes"),
    (Get, MACHINES, "machines", None, Reply::Many("MachineInfo"), "All machines"),
    (Post, MACHINES, "run", Some("RunRequest"), Reply::One("MachineInfo"), "Create a machine and start it"),
    (Get, MACHINE, "machine", None, Reply::One("MachineInfo"), "One machine"),
    (Delete, MACHINE, "delete", None, Reply::Done, "Delete a stopped or crashed machine and the changes on its disks"),
    (Post, MACHINE_START, "start", None, Reply::One("MachineInfo"), "Start a stopped or crashed machine from its own disks"),
    (Post, MACHINE_STOP, "stop", Some("StopRequest"), Reply::One("MachineInfo"), "Stop a machine; the answer comes once it has stopped"),
    (Post, MACHINE_PAUSE, "pause", None, Reply::One("MachineInfo"), "Pause the CPUs of a machine"),
    (Post, MACHINE_UNPAUSE, "unpause", None, Reply::One("MachineInfo"), "Continue a paused machine"),
    (Post, MACHINE_UPGRADE, "upgrade", None, Reply::One("MachineInfo"), "Take a running machine from the process that serves it, which may be of an earlier version"),
    (Post, MACHINE_BALLOON, "balloon", Some("BalloonRequest"), Reply::One("MachineInfo"), "Change the memory size of a guest with its balloon"),
    (Post, MACHINE_CHECKPOINT, "checkpoint", Some("CheckpointRequest"), Reply::Begun, "Save the state of a running machine as a capsule"),
    (Post, MACHINE_SUSPEND, "suspend", Some("SuspendRequest"), Reply::Begun, "Save the state of a machine as a capsule and end the machine"),
    (Post, MACHINE_REWIND, "rewind", Some("RewindRequest"), Reply::Begun, "Take a machine back to an earlier capsule and keep its present state"),
    (Post, MACHINE_RESOLVE, "resolve", Some("ResolveRequest"), Reply::Done, "Decide who has a machine that is between two hosts"),
    (Post, MACHINE_PROTECT, "protect", Some("ProtectRequest"), Reply::Begun, "Replicate a running machine to a standby on another host"),
    (Delete, MACHINE_PROTECT, "unprotect", None, Reply::One("MachineInfo"), "Stop protecting a machine"),
    (Post, MACHINE_FAILOVER, "failover", Some("FailoverRequest"), Reply::Begun, "Switch a machine over to its standby"),
    (Post, MACHINE_MIGRATE, "migrate", Some("MigrateRequest"), Reply::Begun, "Migrate a machine to another host"),
    (Get, MIGRATIONS, "migrations", None, Reply::Many("MigrationRecord"), "Past migrations from this host, newest first"),
    (Post, MACHINE_WWS, "dirty_trace", Some("DirtyTraceRequest"), Reply::Trace, "Sample the dirty pages of a machine; the trace is sent while it grows"),
    (Post, EVACUATE, "evacuate", Some("EvacuateRequest"), Reply::Begun, "Migrate all machines of a host to other hosts"),
    (Post, MACHINE_SETTINGS, "set", Some("SettingsRequest"), Reply::One("MachineInfo"), "Change when a machine starts by itself, its labels, its note and its hardware"),
    (Post, MACHINE_RENAME, "rename", Some("RenameRequest"), Reply::One("MachineInfo"), "Give a machine that is off or suspended another name"),
    (Post, MACHINE_EXEC, "exec", Some("ExecRequest"), Reply::One("ExecResult"), "Run a program in the guest, through qemu-ga; the answer comes at its end"),
    (Post, MACHINE_FILE_READ, "readFile", Some("FileReadRequest"), Reply::One("FileContent"), "Read a part of a file in the guest, through qemu-ga"),
    (Post, MACHINE_FILE_WRITE, "writeFile", Some("FileWriteRequest"), Reply::Done, "Write a part of a file in the guest, through qemu-ga"),
    (Get, MACHINE_CONSOLE, "console", None, Reply::Upgrade, "Serial port of a machine, with `Upgrade: whimbrel-console`, or as a WebSocket with that subprotocol"),
    (Get, MACHINE_DISPLAY, "display", None, Reply::Upgrade, "Screen, keyboard and pointer of a machine (RFB), with `Upgrade: whimbrel-display`, or as a WebSocket with that subprotocol"),
    (Get, MACHINE_CONSOLE_LOG, "console_log", None, Reply::Text, "End of the console log of a machine"),
    (Post, RESUME, "resume", Some("ResumeRequest"), Reply::Begun, "Create a machine from a capsule"),
    (Post, CLONE, "clone", Some("CloneRequest"), Reply::Begun, "Create several machines from a capsule"),
    (Post, MATCH, "match_golden", Some("MatchRequest"), Reply::One("GoldenMatch"), "Find the golden capsule that fits best"),
    (Post, DERIVE, "derive", Some("DeriveRequest"), Reply::One("MachineInfo"), "Create a machine that boots from the disks of a capsule"),
    (Get, CAPSULES, "capsules", None, Reply::Many("CapsuleInfo"), "All capsules, newest first"),
    (Get, CAPSULE, "capsule", None, Reply::One("CapsuleInfo"), "One capsule"),
    (Delete, CAPSULE, "remove", None, Reply::One("PreviousCapsule"), "Remove a ref; the next gc deletes capsules without refs"),
    (Get, CAPSULE_LOG, "log", None, Reply::Many("CapsuleInfo"), "A capsule and its ancestors, newest first"),
    (Get, CAPSULE_GRAPH, "family", None, Reply::Many("GraphNode"), "A capsule, its ancestors and its descendants, parents first"),
    (Get, CAPSULE_REBASE, "outdated", None, Reply::One("OutdatedReport"), "Machines and capsules that are based on old versions of a capsule"),
    (Get, GRAPH, "graph", None, Reply::Many("GraphNode"), "All capsules, parents first"),
    (Get, REF_HISTORY, "history", None, Reply::Many("RefVersion"), "Earlier capsules of a ref, newest first"),
    (Post, PROMOTE, "promote", Some("PromoteRequest"), Reply::One("PromoteReport"), "Detach a capsule from its parents"),
    (Get, CAPSULE_DIFF, "diff", None, Reply::One("CapsuleDiff"), "Differences between two capsules"),
    (Put, TAG, "tag", Some("TagRequest"), Reply::One("Tagged"), "Give a capsule a tag"),
    (Post, STORE_GC, "gc", None, Reply::Begun, "Delete objects that no ref needs"),
    (Post, BUCKETS, "bucket", Some("BucketRequest"), Reply::Begun, "List or verify a bucket, remove a name there, or delete objects that no name needs"),
    (Post, STORE_VERIFY, "verify", None, Reply::Begun, "Read and check everything in the store"),
    (Post, STORE_REPAIR, "repair", Some("RepairRequest"), Reply::Begun, "Fetch damaged and missing objects of capsules from other hosts or a pool"),
    (Get, STORE_ENCRYPTION, "encryption", None, Reply::One("StoreEncryption"), "How the store is encrypted"),
    (Post, STORE_SEAL, "seal", None, Reply::Begun, "Encrypt what the store had before it was encrypted"),
    (Put, STORE_KEY, "changeMasterKey", Some("KeyChangeRequest"), Reply::One("StoreEncryption"), "Change the master key of an encrypted store"),
    (Post, EXPORT, "export", Some("ExportRequest"), Reply::Begun, "Write a capsule or an image to a file of the host"),
    (Post, IMPORT, "import", Some("ImportRequest"), Reply::Begun, "Read a capsule or a disk from a file of the host"),
    (Post, PULL, "pull", Some("PullRequest"), Reply::Begun, "Fetch a capsule"),
    (Post, PUSH, "push", Some("PushRequest"), Reply::Begun, "Send a machine or a capsule to another host or to a pool"),
    (Get, IMAGES, "images", None, Reply::One("ImageOffers"), "Images of distributions that the sources of the host offer"),
    (Post, IMAGES, "pullImage", Some("ImagePullRequest"), Reply::Begun, "Fetch an image of a distribution from a source, as a capsule"),
    (Get, REMOTE, "remote", None, Reply::Many("RemoteCapsule"), "Capsules that a trusted host offers"),
    (Post, CPU_BASELINE, "cpuBaseline", Some("CpuBaselineRequest"), Reply::One("CpuBaseline"), "Find the CPU model that this host and others have in common"),
    (Get, CACHE, "cache", None, Reply::One("CacheInfo"), "State of the hash cache"),
    (Post, CACHE, "cacheAdd", Some("CacheAddRequest"), Reply::Begun, "Index the pages of a file, so that transfers can skip them"),
    (Get, NETWORKS, "networks", None, Reply::Many("NetworkInfo"), "Managed networks"),
    (Post, NETWORKS, "createNetwork", Some("NetworkRequest"), Reply::One("NetworkInfo"), "Create a network with a bridge, addresses, names and a way out"),
    (Get, NETWORK, "network", None, Reply::One("NetworkInfo"), "One network; published ports are tried"),
    (Post, NETWORK_HOSTS, "networkHosts", Some("NetworkHostsRequest"), Reply::One("NetworkInfo"), "Share a network with other hosts, or no longer"),
    (Delete, NETWORK, "deleteNetwork", None, Reply::Done, "Delete a network that no machine uses"),
    (Get, SESSIONS, "sessions", None, Reply::Many("SessionInfo"), "Sessions that root has mounted on the host"),
    (Get, POOLS, "pools", None, Reply::Many("PoolInfo"), "Pools that the host knows; their managers are asked"),
    (Post, MACHINE_PORTS, "ports", Some("PortsRequest"), Reply::Many("PublishedPort"), "Publish ports of a machine on the host, or no longer; the answer has all of its ports"),
    (Get, TRUST, "trusted", None, Reply::Many("TrustEntry"), "Trusted hosts"),
    (Post, TRUST, "trust", Some("TrustEntry"), Reply::One("TrustEntry"), "Trust a host; its name and key must be new"),
    (Put, TRUST_ENTRY, "limit", Some("RefRights"), Reply::One("TrustEntry"), "Set which refs a trusted host may use"),
    (Delete, TRUST_ENTRY, "distrust", None, Reply::Done, "Remove a trusted host"),
    (Get, TOKENS, "tokens", None, Reply::Many("TokenInfo"), "Tokens of the API"),
    (Post, TOKENS, "createToken", Some("TokenRequest"), Reply::One("NewToken"), "Create a token; its text is in no other answer"),
    (Delete, TOKEN, "revokeToken", None, Reply::Done, "Revoke a token; streams that it opened end"),
    (Get, WIRE, "wire", None, Reply::Upgrade, "The protocol between hosts, with `Upgrade: whimbrel-wire`"),
    (Get, SCHEDULES, "schedules", None, Reply::Many("ScheduleInfo"), "Work that the daemon does by itself"),
    (Post, SCHEDULES, "createSchedule", Some("ScheduleRequest"), Reply::One("ScheduleInfo"), "Create a schedule"),
    (Get, SCHEDULE, "schedule", None, Reply::One("ScheduleInfo"), "One schedule, with its last runs and its capsules"),
    (Delete, SCHEDULE, "deleteSchedule", None, Reply::Done, "Delete a schedule; its capsules stay"),
    (Post, SCHEDULE_RUN, "runSchedule", Some("ScheduleRunRequest"), Reply::One("ScheduleReport"), "Run a schedule now, or say what it would remove; the answer comes at its end"),
    (Get, EVENTS, "hostEvents", None, Reply::Events("HostEvent"), "What happens on the host, as server-sent events; `Last-Event-ID` or `since` goes on after an event"),
    (Get, OPERATIONS, "operations", None, Reply::Many("Operation"), "Operations that run or have ended recently"),
    (Get, OPERATION, "operation", None, Reply::One("Operation"), "One operation"),
    (Delete, OPERATION, "cancel", None, Reply::One("Operation"), "Cancel an operation; its last state says what it left"),
    (Get, OPERATION_EVENTS, "events", None, Reply::Stream("Operation"), "States of one operation, one per line, until it has ended"),
];

/// OpenAPI document of this version.
pub fn openapi() -> utoipa::openapi::OpenApi {
    let mut document = Schemas::openapi();
    document.info = InfoBuilder::new()
        .title("Whimbrel host")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some("HTTP API of the daemon, over its unix socket, and with a token over TLS."))
        .license(Some(LicenseBuilder::new().name("Apache-2.0 OR MIT").build()))
        .build();
    let components = document.components.get_or_insert_default();
    document.paths = paths(&components.schemas);
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer);
    let bearer =
        bearer.description(Some("Token over TLS; on the unix socket the user of the process counts"));
    components.add_security_scheme("token", SecurityScheme::Http(bearer.build()));
    components.responses.extend(openapi_errors::responses());
    openapi_examples::add_to(&mut components.schemas);
    open_flattened(&mut components.schemas);
    document.security =
        Some(vec![SecurityRequirement::new("token", Vec::<String>::new()), SecurityRequirement::default()]);
    document
}

/// Method and path of every call of the document.
pub fn documented_calls() -> impl Iterator<Item = (String, &'static str)> {
    let method = |method: &HttpMethod| match method {
        Get => "GET",
        Post => "POST",
        Put => "PUT",
        _ => "DELETE",
    };
    ENDPOINTS.iter().map(move |(call, path, ..)| (method(call).to_owned(), *path))
}

/// OpenAPI document as indented JSON, as it is checked in.
pub fn openapi_json() -> String {
    let mut text = openapi().to_pretty_json().expect("a document of strings and maps has a JSON form");
    text.push('\n');
    text
}

/// Status of the answer of a call that succeeds, like `POST /v1/resume`; 200 for a call that the document
/// does not have.
pub fn success_status(call: &str) -> u16 {
    let (method, path) = call.split_once(' ').unwrap_or_default();
    let found = documented_calls().zip(ENDPOINTS).find(|((known, at), _)| known == method && *at == path);
    found.map_or(200, |(_, (.., reply, _))| reply.status())
}

fn paths(schemas: &BTreeMap<String, RefOr<Schema>>) -> Paths {
    ENDPOINTS
        .iter()
        .fold(PathsBuilder::new(), |paths, endpoint| {
            let (method, path, ..) = endpoint;
            paths.path(*path, PathItem::new(method.clone(), operation_of(endpoint, schemas)))
        })
        .build()
}

fn operation_of(
    (method, path, id, body, reply, summary): &Endpoint,
    schemas: &BTreeMap<String, RefOr<Schema>>,
) -> OperationBuilder {
    let mut operation = OperationBuilder::new().operation_id(Some(*id)).summary(Some(*summary));
    for name in path.split('{').skip(1).filter_map(|rest| rest.split('}').next()) {
        let schema = match name {
            "id" => number(),
            "capsule" | "other" => reference_to("CapsuleRef"),
            _ => reference_to("Name"),
        };
        operation = operation.parameter(parameter(name, ParameterIn::Path, Required::True, schema));
    }
    let query = match *path {
        MACHINE_CONSOLE_LOG => vec![(CONSOLE_LOG_BYTES, number()), (CONSOLE_LOG_FOLLOW, boolean())],
        CAPSULE_REBASE => vec![(REBASE_ONTO, reference_to("CapsuleRef"))],
        EVENTS => vec![(EVENTS_SINCE, number()), (EVENTS_FOLLOW, boolean())],
        MACHINE if *method == Delete => vec![(DELETE_UNREADABLE, boolean())],
        _ => Vec::new(),
    };
    // No body stands for an object without fields.
    let needed = match body.and_then(|body| schemas.get(body)) {
        Some(RefOr::T(Schema::Object(object))) if object.required.is_empty() => Required::False,
        _ => Required::True,
    };
    let names = path.contains('{') || !query.is_empty() || body.is_some();
    for (name, schema) in query {
        operation = operation.parameter(parameter(name, ParameterIn::Query, Required::False, schema));
    }
    if let Some(body) = body {
        let content = ContentBuilder::new().schema(Some(reference_to(body))).build();
        let body = RequestBodyBuilder::new().content("application/json", content).required(Some(needed));
        operation = operation.request_body(Some(body.build()));
    }
    let (status, response) = (reply.status().to_string(), success(*reply));
    let failure = json("Error", Some(reference_to("ApiError")));
    let operation = operation.response(status, response.build()).response("default", failure.build());
    openapi_errors::add_errors(operation, method, names)
}

/// Some replies contain a request and more fields beside its own. A part of an `allOf` that forbids other
/// fields would forbid those, so such a part is written out, without that.
fn open_flattened(schemas: &mut BTreeMap<String, RefOr<Schema>>) {
    let closed: BTreeMap<String, Schema> = schemas
        .iter()
        .filter_map(|(name, schema)| match schema {
            RefOr::T(Schema::Object(object)) if object.additional_properties.is_some() => {
                let mut object = object.clone();
                (object.additional_properties, object.examples) = (None, Vec::new());
                let reference = Ref::from_schema_name(name).ref_location;
                (!object.properties.is_empty()).then_some((reference, Schema::Object(object)))
            }
            _ => None,
        })
        .collect();
    for schema in schemas.values_mut() {
        let RefOr::T(Schema::AllOf(all)) = schema else { continue };
        for part in &mut all.items {
            let RefOr::Ref(reference) = &*part else { continue };
            if let Some(open) = closed.get(&reference.ref_location) {
                *part = RefOr::T(open.clone());
            }
        }
    }
}

fn number() -> RefOr<Schema> {
    ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(0)).into()
}

fn boolean() -> RefOr<Schema> {
    ObjectBuilder::new().schema_type(Type::Boolean).into()
}

fn parameter(name: &str, place: ParameterIn, required: Required, schema: RefOr<Schema>) -> ParameterBuilder {
    ParameterBuilder::new().name(name).parameter_in(place).required(required).schema(Some(schema))
}

impl Reply {
    fn status(self) -> u16 {
        match self {
            Self::Begun => 202,
            Self::Done => 204,
            Self::Upgrade => 101,
            _ => 200,
        }
    }
}

fn success(reply: Reply) -> ResponseBuilder {
    match reply {
        Reply::One(name) => json("Done", Some(reference_to(name))),
        Reply::Many(name) => {
            let list = ArrayBuilder::new().items(Ref::from_schema_name(name)).build();
            json("Done", Some(RefOr::T(Schema::Array(list))))
        }
        Reply::Begun => json("The operation was started", Some(reference_to("Operation"))),
        Reply::Done => ResponseBuilder::new().description("Done"),
        Reply::Stream(name) => content("One object per line", NDJSON, Some(reference_to(name))),
        Reply::Events(name) => content("Events, whose data are objects", EVENT_STREAM, Some(event_of(name))),
        Reply::Trace => content("Dirty trace, one record for each sample", WWS_TRACE, None),
        Reply::Text => content("Bytes as they were printed", "text/plain", None),
        Reply::Upgrade => ResponseBuilder::new().description("A raw byte stream follows"),
        Reply::Document => json("An OpenAPI document", None),
    }
}

/// Schema of a server-sent event: what it is about is JSON in its `data`.
fn event_of(name: &str) -> RefOr<Schema> {
    let text = format!("JSON text of a {name}");
    let data = ObjectBuilder::new()
        .schema_type(Type::String)
        .content_media_type("application/json")
        .description(Some(text));
    ObjectBuilder::new().property("data", data).required("data").into()
}

fn json(description: &str, schema: Option<RefOr<Schema>>) -> ResponseBuilder {
    content(description, "application/json", schema)
}

fn content(description: &str, kind: &str, schema: Option<RefOr<Schema>>) -> ResponseBuilder {
    let content = ContentBuilder::new().schema(schema).build();
    ResponseBuilder::new().description(description).content(kind, content)
}

fn reference_to(name: &str) -> RefOr<Schema> {
    RefOr::Ref(Ref::from_schema_name(name))
}
