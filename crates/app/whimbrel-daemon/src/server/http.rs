//! HTTP server of the daemon: each route parses a request, calls one method of [`Daemon`] on a blocking
//! thread, and returns the outcome.
//!
//! No logic here. Bodies are bounded, unknown fields are refused, and every failure is an `ApiError`.

use crate::{core::error::DaemonError, daemon::Daemon, server::peer_rpc};
use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{DefaultBodyLimit, FromRequest, FromRequestParts, Path, Query, Request, State},
    http::{StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
    routing::{delete, get, post, put},
};
use futures_util::StreamExt;
use hyper_util::rt::TokioIo;
use serde::{Deserialize, de::DeserializeOwned};
use std::{fmt::Display, str::FromStr, sync::Arc};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use whimbrel_api::*;
use whimbrel_core::{HostName, MachineName, RefName};

/// Longest request: requests carry settings, never data.
const BODY_MAX: usize = 1 << 20;
/// Most bytes of a console log in one answer.
const LOG_MAX: u64 = 1 << 20;

type Shared = State<Arc<Daemon>>;
type Answer<T> = Result<Json<T>, Failure>;

/// Adds routes whose handlers parse the parameter of the path and the body, and call one method.
macro_rules! routes {
    ($router:expr; $($method:ident $path:ident
        ($($name:ident: $kind:ty)?) ($($body:ident: $request:ty)?) => $work:expr;)*) => {
        $router $(.route(routes::$path, $method(
            |State(host): Shared, $(At($name): At<$kind>,)? $(Wanted($body): Wanted<$request>,)?| {
                blocking(host, $work)
            }
        )))*
    };
}

pub(crate) fn router(host: Arc<Daemon>) -> Router {
    let router = capsule_routes(machine_routes(Router::new()))
        .route(routes::MACHINE, delete(delete_machine))
        .route(routes::MACHINE_WWS, post(wws))
        .route(routes::MACHINE_CONSOLE, get(console))
        .route(routes::MACHINE_CONSOLE_LOG, get(console_log))
        .route(routes::CAPSULE_REBASE, get(rebase))
        .route(routes::CAPSULE_DIFF, get(diff))
        .route(routes::WIRE, get(wire))
        .route(routes::OPERATION_EVENTS, get(events))
        .route(routes::OPENAPI, get(openapi))
        .fallback(no_route);
    router.layer(DefaultBodyLimit::max(BODY_MAX)).with_state(host)
}

fn machine_routes(router: Router<Arc<Daemon>>) -> Router<Arc<Daemon>> {
    routes! { router;
        get HOST () () => |host| host.info();
        get MACHINES () () => machines;
        post MACHINES () (request: RunRequest) => move |host| host.run(request);
        get MACHINE (name: MachineName) () => move |host| machine(host, &name);
        post MACHINE_START (name: MachineName) () => move |host| host.start(&name);
        post MACHINE_STOP (name: MachineName) (request: StopRequest) => move |host| host.stop(&name, request);
        post MACHINE_PAUSE (name: MachineName) () => move |host| host.set_paused(&name, true);
        post MACHINE_UNPAUSE (name: MachineName) () => move |host| host.set_paused(&name, false);
        post MACHINE_BALLOON (name: MachineName) (request: BalloonRequest) => move |host| host.balloon(&name, request.size);
        post MACHINE_CHECKPOINT (name: MachineName) (request: CheckpointRequest) => move |host| host.checkpoint(&name, request);
        post MACHINE_SUSPEND (name: MachineName) (request: SuspendRequest) => move |host| host.suspend(&name, request);
        post MACHINE_MIGRATE (name: MachineName) (request: MigrateRequest) => move |host| host.migrate(&name, request);
        post MACHINE_PROTECT (name: MachineName) (request: ProtectRequest) => move |host| host.protect(&name, request);
        delete MACHINE_PROTECT (name: MachineName) () => move |host| host.unprotect(&name);
        post MACHINE_FAILOVER (name: MachineName) (request: FailoverRequest) => move |host| host.failover(&name, request);
        post MACHINE_RESOLVE (name: MachineName) (request: ResolveRequest) => move |host| host.resolve(&name, &request);
        get MIGRATIONS () () => |host| host.past_migrations();
        post EVACUATE () (request: EvacuateRequest) => move |host| host.evacuate(request);
        get NETWORKS () () => |host| Ok(host.networks.list());
        post NETWORKS () (request: NetworkRequest) => move |host| host.networks.create(&request);
        get NETWORK (name: String) () => move |host| host.networks.show(&name);
        delete NETWORK (name: String) () => move |host| host.delete_network(&name);
        post MACHINE_PORTS (name: MachineName) (request: PortsRequest) => move |host| host.change_ports(&name, &request);
        get TRUST () () => |host| host.trust_list();
        post TRUST () (entry: TrustEntry) => move |host| host.trust_add(entry);
        put TRUST_ENTRY (name: HostName) (rights: RefRights) => move |host| host.trust_limit(&name, rights);
        delete TRUST_ENTRY (name: HostName) () => move |host| host.trust_remove(&name);
        get OPERATIONS () () => |host| Ok(host.operations().list());
        get OPERATION (id: OperationId) () => move |host| Ok(host.operations().watch(id)?.borrow().clone());
        delete OPERATION (id: OperationId) () => move |host| host.operations().cancel(id);
    }
}

fn capsule_routes(router: Router<Arc<Daemon>>) -> Router<Arc<Daemon>> {
    routes! { router;
        post RESUME () (request: ResumeRequest) => move |host| host.resume(request);
        post CLONE () (request: CloneRequest) => move |host| host.clone_machines(request);
        post MATCH () (request: MatchRequest) => move |host| host.match_golden(&request);
        post DERIVE () (request: DeriveRequest) => move |host| host.derive(request);
        post PROMOTE () (request: PromoteRequest) => move |host| host.promote(request);
        get GRAPH () () => |host| host.graph(None);
        get CAPSULE_GRAPH (capsule: CapsuleRef) () => move |host| host.graph(Some(&capsule));
        get REF_HISTORY (name: RefName) () => move |host| host.ref_history(&name);
        get CAPSULES () () => |host| host.capsules();
        get CAPSULE (capsule: CapsuleRef) () => move |host| host.capsule(&capsule);
        delete CAPSULE (name: RefName) () => move |host| host.remove_ref(&name);
        get CAPSULE_LOG (capsule: CapsuleRef) () => move |host| host.log(&capsule);
        put TAG (tag: RefName) (request: TagRequest) => move |host| host.tag(&tag, &request.capsule);
        post STORE_GC () () => |host| Ok(host.gc());
        post STORE_VERIFY () () => |host| Ok(host.verify());
        post STORE_REPAIR () (request: RepairRequest) => move |host| host.repair(request);
        post EXPORT () (request: ExportRequest) => move |host| host.export(request);
        post IMPORT () (request: ImportRequest) => move |host| host.import(request);
        post PULL () (request: PullRequest) => move |host| host.pull(request);
        post PUSH () (request: PushRequest) => move |host| host.push(request);
        get REMOTE (name: HostName) () => move |host| host.remote_capsules(&name);
        get CACHE () () => |host| host.cache_info();
        post CACHE () (request: CacheAddRequest) => move |host| host.cache_add(request);
    }
}

struct Failure(ApiError);

impl From<DaemonError> for Failure {
    fn from(error: DaemonError) -> Self {
        Self(error.to_api())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(self.0.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(self.0)).into_response()
    }
}

async fn blocking<T: Send + 'static>(
    host: Arc<Daemon>,
    work: impl FnOnce(&Arc<Daemon>) -> Result<T, DaemonError> + Send + 'static,
) -> Answer<T> {
    match tokio::task::spawn_blocking(move || work(&host)).await {
        Ok(outcome) => Ok(Json(outcome?)),
        Err(_) => Err(DaemonError::Panicked.into()),
    }
}

/// The parameter of a path.
struct At<T>(T);

impl<T: FromStr<Err: Display>> FromRequestParts<Arc<Daemon>> for At<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, host: &Arc<Daemon>) -> Result<Self, Failure> {
        let Path(text) = Path::<String>::from_request_parts(parts, host)
            .await
            .map_err(|error| Failure(ApiError::new(ErrorCode::Invalid, error.to_string())))?;
        named(&text).map(Self)
    }
}

/// The body of a request; an empty one stands for `{}`.
struct Wanted<T>(T);

impl<T: DeserializeOwned> FromRequest<Arc<Daemon>> for Wanted<T> {
    type Rejection = Response;

    async fn from_request(request: Request, host: &Arc<Daemon>) -> Result<Self, Response> {
        let body = Bytes::from_request(request, host).await.map_err(IntoResponse::into_response)?;
        let text: &[u8] = if body.is_empty() { b"{}" } else { &body };
        serde_json::from_slice(text).map(Self).map_err(|error| {
            let api = ApiError::new(ErrorCode::Invalid, "the request body cannot be read");
            Failure(ApiError { causes: vec![error.to_string()], ..api }).into_response()
        })
    }
}

fn named<T: FromStr<Err: Display>>(text: &str) -> Result<T, Failure> {
    text.parse().map_err(|error: T::Err| Failure(ApiError::new(ErrorCode::Invalid, error.to_string())))
}

async fn no_route() -> Failure {
    Failure(
        ApiError::new(ErrorCode::NotFound, "there is no such path in this API")
            .with_hint("see /v1/openapi.json"),
    )
}

async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], whimbrel_api::openapi_json()).into_response()
}

fn machines(host: &Arc<Daemon>) -> Result<Vec<MachineInfo>, DaemonError> {
    let mut machines = host.machine_infos();
    host.add_away(&mut machines);
    Ok(machines)
}

fn machine(host: &Arc<Daemon>, name: &MachineName) -> Result<MachineInfo, DaemonError> {
    let mut info = [host.machines.get(name)?.info()];
    host.protections.add_to(&mut info);
    host.uploads.add_to(&mut info);
    let [info] = info;
    Ok(info)
}

/// Streams the dirty trace of a machine, one chunk for each sample.
async fn wws(
    State(host): Shared,
    At(name): At<MachineName>,
    Wanted(request): Wanted<DirtyTraceRequest>,
) -> Result<Response, Failure> {
    let begin = move || host.dirty_trace(&name, &request);
    let pieces = tokio::task::spawn_blocking(begin).await.map_err(|_| DaemonError::Panicked)??;
    let pieces = futures_util::stream::unfold(pieces, |mut pieces| async move {
        let piece = pieces.recv().await?;
        Some((Ok::<_, std::convert::Infallible>(piece), pieces))
    });
    Ok(([(header::CONTENT_TYPE, routes::WWS_TRACE)], Body::from_stream(pieces)).into_response())
}

#[derive(Deserialize)]
struct RebaseQuery {
    onto: Option<String>,
}

async fn rebase(
    State(host): Shared,
    At(capsule): At<CapsuleRef>,
    Query(query): Query<RebaseQuery>,
) -> Answer<OutdatedReport> {
    let onto: Option<CapsuleRef> = query.onto.as_deref().map(named).transpose()?;
    blocking(host, move |host| host.outdated_report(&capsule, onto.as_ref())).await
}

#[derive(Deserialize)]
struct DeleteQuery {
    #[serde(default)]
    unreadable: bool,
}

async fn delete_machine(
    State(host): Shared,
    At(name): At<MachineName>,
    Query(query): Query<DeleteQuery>,
) -> Answer<()> {
    let delete = move |host: &Arc<Daemon>| match query.unreadable {
        true => host.machines.unreadable.delete(&host.directories, &name),
        false => host.delete(&name),
    };
    blocking(host, delete).await
}

async fn diff(State(host): Shared, Path((a, b)): Path<(String, String)>) -> Answer<CapsuleDiff> {
    let (a, b): (CapsuleRef, CapsuleRef) = (named(&a)?, named(&b)?);
    blocking(host, move |host| host.diff(&a, &b)).await
}

/// Streams snapshots, one line each, until the operation has ended.
async fn events(State(host): Shared, At(id): At<OperationId>) -> Result<Response, Failure> {
    let watch = host.operations().watch(id)?;
    let snapshots = futures_util::stream::unfold(Some(watch), |watch| async move {
        let mut watch = watch?;
        let operation = watch.borrow_and_update().clone();
        let ended = operation.state != OperationState::Running;
        // The sender lives in the table; if it is dropped the last snapshot was the end.
        let more = !ended && watch.changed().await.is_ok();
        Some((operation, (more || !ended).then_some(watch)))
    });
    let lines = snapshots.map(|operation| {
        let mut line = serde_json::to_vec(&operation).expect("an operation is always encodable");
        line.push(b'\n');
        Ok::<_, std::convert::Infallible>(Bytes::from(line))
    });
    Ok(([(header::CONTENT_TYPE, routes::NDJSON)], Body::from_stream(lines)).into_response())
}

#[derive(Deserialize)]
struct LogQuery {
    bytes: Option<u64>,
}

async fn console_log(
    State(host): Shared,
    At(name): At<MachineName>,
    Query(query): Query<LogQuery>,
) -> Result<Response, Failure> {
    let bytes = query.bytes.unwrap_or(LOG_MAX).min(LOG_MAX);
    let Json(text) = blocking(host, move |host| host.machines.get(&name)?.console_log(bytes)).await?;
    Ok(([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response())
}

/// Turns the connection into the machine's serial port.
async fn console(
    State(host): Shared,
    At(name): At<MachineName>,
    request: Request,
) -> Result<Response, Failure> {
    expect_upgrade(&request, routes::CONSOLE_PROTOCOL)?;
    let Json(mut serial) = blocking(host, move |host| host.machines.get(&name)?.console()).await?;
    tokio::spawn(async move {
        let Ok(upgraded) = hyper::upgrade::on(request).await else { return };
        let (mut from_user, mut to_user) = tokio::io::split(TokioIo::new(upgraded));
        let mut typed = [0; 1024];
        loop {
            tokio::select! {
                printed = serial.output.recv() => match printed {
                    Some(bytes) if to_user.write_all(&bytes).await.is_ok() => {}
                    _ => break,
                },
                count = from_user.read(&mut typed) => match count {
                    Ok(count) if count > 0 && serial.input.send(typed[..count].to_vec()).await.is_ok() => {}
                    _ => break,
                },
            }
        }
    });
    Ok(switching(routes::CONSOLE_PROTOCOL))
}

async fn wire(State(host): Shared, request: Request) -> Result<Response, Failure> {
    expect_upgrade(&request, routes::WIRE_PROTOCOL)?;
    tokio::spawn(async move {
        let Ok(upgraded) = hyper::upgrade::on(request).await else { return };
        peer_rpc::serve_stream(host, TokioIo::new(upgraded)).await;
    });
    Ok(switching(routes::WIRE_PROTOCOL))
}

fn expect_upgrade(request: &Request, protocol: &str) -> Result<(), Failure> {
    let asked = request.headers().get(header::UPGRADE).and_then(|value| value.to_str().ok());
    if asked == Some(protocol) {
        return Ok(());
    }
    Err(DaemonError::invalid(format!("send the header `Upgrade: {protocol}`")).into())
}

/// From here on the connection is a raw byte stream (RFC 9110, 7.8).
fn switching(protocol: &'static str) -> Response {
    let switch = [(header::UPGRADE, protocol), (header::CONNECTION, "upgrade")];
    (StatusCode::SWITCHING_PROTOCOLS, switch).into_response()
}
