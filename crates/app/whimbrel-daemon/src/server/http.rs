//! HTTP server of the daemon: each route parses a request, calls one method of [`Daemon`] on a blocking
//! thread, and returns the outcome.
//!
//! No logic here. Bodies are bounded, unknown fields are refused, and every failure is an `ApiError`.

use crate::{core::error::DaemonError, daemon::Daemon, server::peer_rpc};
use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{DefaultBodyLimit, Path, Query, Request, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post, put},
};
use futures_util::StreamExt;
use hyper_util::rt::TokioIo;
use serde::{Deserialize, de::DeserializeOwned};
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use whimbrel_api::{
    ApiError, CapsuleRef, ErrorCode, Operation, OperationId, OperationState, TagRequest, TrustEntry, routes,
};
use whimbrel_core::{HostName, MachineName, RefName};

/// Longest request: requests carry settings, never data.
const BODY_MAX: usize = 1 << 20;
/// Most bytes of a console log in one answer.
const LOG_MAX: u64 = 1 << 20;

type Shared = State<Arc<Daemon>>;
type Answer<T> = Result<Json<T>, Failure>;

/// All routes of the API.
pub(crate) fn router(host: Arc<Daemon>) -> Router {
    Router::new()
        .route(routes::HOST, get(host_info))
        .route(routes::MACHINES, get(machines).post(run))
        .route(routes::MACHINE, get(machine).delete(delete_machine))
        .route(routes::MACHINE_START, post(start))
        .route(routes::MACHINE_STOP, post(stop))
        .route(routes::MACHINE_PAUSE, post(pause))
        .route(routes::MACHINE_UNPAUSE, post(unpause))
        .route(routes::MACHINE_BALLOON, post(balloon))
        .route(routes::MACHINE_CHECKPOINT, post(checkpoint))
        .route(routes::MACHINE_SUSPEND, post(suspend))
        .route(routes::MACHINE_MIGRATE, post(migrate))
        .route(routes::MACHINE_PROTECT, post(protect).delete(unprotect))
        .route(routes::MACHINE_FAILOVER, post(failover))
        .route(routes::MACHINE_RESOLVE, post(resolve))
        .route(routes::MIGRATIONS, get(migrations))
        .route(routes::MACHINE_WWS, post(wws))
        .route(routes::EVACUATE, post(evacuate))
        .route(routes::MACHINE_CONSOLE, get(console))
        .route(routes::MACHINE_CONSOLE_LOG, get(console_log))
        .route(routes::RESUME, post(resume))
        .route(routes::CLONE, post(clone_machines))
        .route(routes::MATCH, post(match_golden))
        .route(routes::DERIVE, post(derive))
        .route(routes::PROMOTE, post(promote))
        .route(routes::GRAPH, get(graph))
        .route(routes::CAPSULE_GRAPH, get(capsule_graph))
        .route(routes::CAPSULE_REBASE, get(rebase))
        .route(routes::REF_HISTORY, get(ref_history))
        .route(routes::CAPSULES, get(capsules))
        .route(routes::CAPSULE, get(capsule).delete(remove_ref))
        .route(routes::CAPSULE_LOG, get(log))
        .route(routes::CAPSULE_DIFF, get(diff))
        .route(routes::TAG, put(tag))
        .route(routes::STORE_GC, post(gc))
        .route(routes::STORE_VERIFY, post(verify))
        .route(routes::EXPORT, post(export))
        .route(routes::IMPORT, post(import))
        .route(routes::PULL, post(pull))
        .route(routes::PUSH, post(push))
        .route(routes::REMOTE, get(remote))
        .route(routes::CACHE, get(cache).post(cache_add))
        .route(routes::TRUST, get(trust_list).post(trust_add))
        .route(routes::TRUST_ENTRY, put(trust_limit).delete(trust_remove))
        .route(routes::WIRE, get(wire))
        .route(routes::OPERATIONS, get(operations))
        .route(routes::OPERATION, get(operation).delete(cancel))
        .route(routes::OPERATION_EVENTS, get(events))
        .route(routes::OPENAPI, get(openapi))
        .fallback(no_route)
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .with_state(host)
}

/// A failed request.
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

/// Parses a body; an empty one stands for `{}`.
fn parse<T: DeserializeOwned>(body: &Bytes) -> Result<T, Failure> {
    let text: &[u8] = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(text).map_err(|error| {
        let api = ApiError::new(ErrorCode::Invalid, "the request body cannot be read");
        Failure(ApiError { causes: vec![error.to_string()], ..api })
    })
}

/// Parses a path parameter.
fn named<T: std::str::FromStr<Err: std::fmt::Display>>(text: &str) -> Result<T, Failure> {
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

async fn host_info(State(host): Shared) -> Answer<whimbrel_api::HostInfo> {
    blocking(host, |host| host.info()).await
}

async fn machines(State(host): Shared) -> Answer<Vec<whimbrel_api::MachineInfo>> {
    let list = |host: &Arc<Daemon>| {
        let mut machines = host.machine_infos();
        host.add_away(&mut machines);
        Ok(machines)
    };
    blocking(host, list).await
}

async fn run(State(host): Shared, body: Bytes) -> Answer<whimbrel_api::MachineInfo> {
    let request = parse(&body)?;
    blocking(host, move |host| host.run(request)).await
}

async fn machine(State(host): Shared, Path(name): Path<String>) -> Answer<whimbrel_api::MachineInfo> {
    let name: MachineName = named(&name)?;
    blocking(host, move |host| {
        let mut info = [host.machine(&name)?.info()];
        host.protections.add_to(&mut info);
        host.uploads.add_to(&mut info);
        let [info] = info;
        Ok(info)
    })
    .await
}

async fn delete_machine(State(host): Shared, Path(name): Path<String>) -> Answer<()> {
    let name: MachineName = named(&name)?;
    blocking(host, move |host| host.delete(&name)).await
}

async fn start(State(host): Shared, Path(name): Path<String>) -> Answer<whimbrel_api::MachineInfo> {
    let name: MachineName = named(&name)?;
    blocking(host, move |host| host.start(&name)).await
}

async fn stop(
    State(host): Shared,
    Path(name): Path<String>,
    body: Bytes,
) -> Answer<whimbrel_api::MachineInfo> {
    let (name, request): (MachineName, _) = (named(&name)?, parse(&body)?);
    blocking(host, move |host| host.stop(&name, request)).await
}

async fn pause(State(host): Shared, Path(name): Path<String>) -> Answer<whimbrel_api::MachineInfo> {
    let name: MachineName = named(&name)?;
    blocking(host, move |host| host.set_paused(&name, true)).await
}

async fn unpause(State(host): Shared, Path(name): Path<String>) -> Answer<whimbrel_api::MachineInfo> {
    let name: MachineName = named(&name)?;
    blocking(host, move |host| host.set_paused(&name, false)).await
}

async fn balloon(
    State(host): Shared,
    Path(name): Path<String>,
    body: Bytes,
) -> Answer<whimbrel_api::MachineInfo> {
    let (name, request): (MachineName, whimbrel_api::BalloonRequest) = (named(&name)?, parse(&body)?);
    blocking(host, move |host| host.balloon(&name, request.size)).await
}

async fn checkpoint(State(host): Shared, Path(name): Path<String>, body: Bytes) -> Answer<Operation> {
    let (name, request): (MachineName, _) = (named(&name)?, parse(&body)?);
    blocking(host, move |host| host.checkpoint(&name, request)).await
}

async fn suspend(State(host): Shared, Path(name): Path<String>, body: Bytes) -> Answer<Operation> {
    let (name, request): (MachineName, _) = (named(&name)?, parse(&body)?);
    blocking(host, move |host| host.suspend(&name, request)).await
}

async fn migrate(State(host): Shared, Path(name): Path<String>, body: Bytes) -> Answer<Operation> {
    let (name, request): (MachineName, _) = (named(&name)?, parse(&body)?);
    blocking(host, move |host| host.migrate(&name, request)).await
}

async fn protect(State(host): Shared, Path(name): Path<String>, body: Bytes) -> Answer<Operation> {
    let (name, request): (MachineName, _) = (named(&name)?, parse(&body)?);
    blocking(host, move |host| host.protect(&name, request)).await
}

async fn unprotect(State(host): Shared, Path(name): Path<String>) -> Answer<whimbrel_api::MachineInfo> {
    let name: MachineName = named(&name)?;
    blocking(host, move |host| host.unprotect(&name)).await
}

async fn failover(State(host): Shared, Path(name): Path<String>, body: Bytes) -> Answer<Operation> {
    let (name, request): (MachineName, _) = (named(&name)?, parse(&body)?);
    blocking(host, move |host| host.failover(&name, request)).await
}

async fn resolve(State(host): Shared, Path(name): Path<String>, body: Bytes) -> Answer<()> {
    let (name, request): (MachineName, _) = (named(&name)?, parse(&body)?);
    blocking(host, move |host| host.resolve(&name, &request)).await
}

async fn evacuate(State(host): Shared, body: Bytes) -> Answer<Operation> {
    let request = parse(&body)?;
    blocking(host, move |host| host.evacuate(request)).await
}

/// Streams the dirty trace of a machine, one chunk for each sample.
async fn wws(State(host): Shared, Path(name): Path<String>, body: Bytes) -> Result<Response, Failure> {
    let (name, request): (MachineName, _) = (named(&name)?, parse(&body)?);
    let begin = move || host.dirty_trace(&name, &request);
    let pieces = tokio::task::spawn_blocking(begin).await.map_err(|_| DaemonError::Panicked)??;
    let pieces = futures_util::stream::unfold(pieces, |mut pieces| async move {
        let piece = pieces.recv().await?;
        Some((Ok::<_, std::convert::Infallible>(piece), pieces))
    });
    Ok(([(header::CONTENT_TYPE, routes::WWS_TRACE)], Body::from_stream(pieces)).into_response())
}

async fn resume(State(host): Shared, body: Bytes) -> Answer<Operation> {
    let request = parse(&body)?;
    blocking(host, move |host| host.resume(request)).await
}

async fn clone_machines(State(host): Shared, body: Bytes) -> Answer<Operation> {
    let request = parse(&body)?;
    blocking(host, move |host| host.clone_machines(request)).await
}

async fn match_golden(State(host): Shared, body: Bytes) -> Answer<whimbrel_api::GoldenMatch> {
    let request = parse(&body)?;
    blocking(host, move |host| host.match_golden(&request)).await
}

async fn capsules(State(host): Shared) -> Answer<Vec<whimbrel_api::CapsuleInfo>> {
    blocking(host, |host| host.capsules()).await
}

async fn capsule(State(host): Shared, Path(capsule): Path<String>) -> Answer<whimbrel_api::CapsuleInfo> {
    let capsule: CapsuleRef = named(&capsule)?;
    blocking(host, move |host| host.capsule(&capsule)).await
}

async fn migrations(State(host): Shared) -> Answer<Vec<whimbrel_api::MigrationRecord>> {
    blocking(host, |host| host.past_migrations()).await
}

async fn derive(State(host): Shared, body: Bytes) -> Answer<whimbrel_api::MachineInfo> {
    let request = parse(&body)?;
    blocking(host, move |host| host.derive(request)).await
}

async fn promote(State(host): Shared, body: Bytes) -> Answer<whimbrel_api::PromoteReport> {
    let request = parse(&body)?;
    blocking(host, move |host| host.promote(request)).await
}

async fn graph(State(host): Shared) -> Answer<Vec<whimbrel_api::GraphNode>> {
    blocking(host, |host| host.graph(None)).await
}

async fn capsule_graph(
    State(host): Shared,
    Path(capsule): Path<String>,
) -> Answer<Vec<whimbrel_api::GraphNode>> {
    let capsule: CapsuleRef = named(&capsule)?;
    blocking(host, move |host| host.graph(Some(&capsule))).await
}

#[derive(Deserialize)]
struct RebaseQuery {
    onto: Option<String>,
}

async fn rebase(
    State(host): Shared,
    Path(capsule): Path<String>,
    Query(query): Query<RebaseQuery>,
) -> Answer<whimbrel_api::OutdatedReport> {
    let capsule: CapsuleRef = named(&capsule)?;
    let onto: Option<CapsuleRef> = query.onto.as_deref().map(named).transpose()?;
    blocking(host, move |host| host.outdated_report(&capsule, onto.as_ref())).await
}

async fn ref_history(State(host): Shared, Path(name): Path<String>) -> Answer<Vec<whimbrel_api::RefVersion>> {
    let name: RefName = named(&name)?;
    blocking(host, move |host| host.ref_history(&name)).await
}

async fn remove_ref(State(host): Shared, Path(name): Path<String>) -> Answer<whimbrel_api::PreviousCapsule> {
    let name: RefName = named(&name)?;
    blocking(host, move |host| host.remove_ref(&name)).await
}

async fn log(State(host): Shared, Path(capsule): Path<String>) -> Answer<Vec<whimbrel_api::CapsuleInfo>> {
    let capsule: CapsuleRef = named(&capsule)?;
    blocking(host, move |host| host.log(&capsule)).await
}

async fn diff(
    State(host): Shared,
    Path((a, b)): Path<(String, String)>,
) -> Answer<whimbrel_api::CapsuleDiff> {
    let (a, b): (CapsuleRef, CapsuleRef) = (named(&a)?, named(&b)?);
    blocking(host, move |host| host.diff(&a, &b)).await
}

async fn tag(State(host): Shared, Path(tag): Path<String>, body: Bytes) -> Answer<whimbrel_api::Tagged> {
    let (tag, request): (RefName, TagRequest) = (named(&tag)?, parse(&body)?);
    blocking(host, move |host| host.tag(&tag, &request.capsule)).await
}

async fn gc(State(host): Shared) -> Answer<Operation> {
    blocking(host, |host| Ok(host.gc())).await
}

async fn verify(State(host): Shared) -> Answer<Operation> {
    blocking(host, |host| Ok(host.verify())).await
}

async fn export(State(host): Shared, body: Bytes) -> Answer<Operation> {
    let request = parse(&body)?;
    blocking(host, move |host| host.export(request)).await
}

async fn import(State(host): Shared, body: Bytes) -> Answer<Operation> {
    let request = parse(&body)?;
    blocking(host, move |host| host.import(request)).await
}

async fn pull(State(host): Shared, body: Bytes) -> Answer<Operation> {
    let request = parse(&body)?;
    blocking(host, move |host| host.pull(request)).await
}

async fn push(State(host): Shared, body: Bytes) -> Answer<Operation> {
    let request = parse(&body)?;
    blocking(host, move |host| host.push(request)).await
}

async fn remote(State(host): Shared, Path(name): Path<String>) -> Answer<Vec<whimbrel_api::RemoteCapsule>> {
    let name: HostName = named(&name)?;
    blocking(host, move |host| host.remote_capsules(&name)).await
}

async fn cache(State(host): Shared) -> Answer<whimbrel_api::CacheInfo> {
    blocking(host, |host| host.cache_info()).await
}

async fn cache_add(State(host): Shared, body: Bytes) -> Answer<Operation> {
    let request = parse(&body)?;
    blocking(host, move |host| host.cache_add(request)).await
}

async fn trust_list(State(host): Shared) -> Answer<Vec<TrustEntry>> {
    blocking(host, |host| host.trust_list()).await
}

async fn trust_add(State(host): Shared, body: Bytes) -> Answer<TrustEntry> {
    let entry: TrustEntry = parse(&body)?;
    blocking(host, move |host| host.trust_add(entry)).await
}

async fn trust_limit(State(host): Shared, Path(name): Path<String>, body: Bytes) -> Answer<TrustEntry> {
    let (name, rights): (HostName, whimbrel_api::RefRights) = (named(&name)?, parse(&body)?);
    blocking(host, move |host| host.trust_limit(&name, rights)).await
}

async fn trust_remove(State(host): Shared, Path(name): Path<String>) -> Answer<()> {
    let name: HostName = named(&name)?;
    blocking(host, move |host| host.trust_remove(&name)).await
}

async fn operations(State(host): Shared) -> Answer<Vec<Operation>> {
    Ok(Json(host.operations().list()))
}

async fn operation(State(host): Shared, Path(id): Path<String>) -> Answer<Operation> {
    let id: OperationId = named(&id)?;
    let watch = host.operations().watch(id)?;
    let operation = watch.borrow().clone();
    Ok(Json(operation))
}

async fn cancel(State(host): Shared, Path(id): Path<String>) -> Answer<Operation> {
    let id: OperationId = named(&id)?;
    Ok(Json(host.operations().cancel(id)?))
}

/// Streams snapshots, one line each, until the operation has ended.
async fn events(State(host): Shared, Path(id): Path<String>) -> Result<Response, Failure> {
    let id: OperationId = named(&id)?;
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
    Path(name): Path<String>,
    Query(query): Query<LogQuery>,
) -> Result<Response, Failure> {
    let name: MachineName = named(&name)?;
    let bytes = query.bytes.unwrap_or(LOG_MAX).min(LOG_MAX);
    let Json(text) = blocking(host, move |host| host.machine(&name)?.console_log(bytes)).await?;
    Ok(([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response())
}

/// Turns the connection into the machine's serial port.
async fn console(
    State(host): Shared,
    Path(name): Path<String>,
    request: Request,
) -> Result<Response, Failure> {
    let name: MachineName = named(&name)?;
    expect_upgrade(&request, routes::CONSOLE_PROTOCOL)?;
    let Json(mut serial) = blocking(host, move |host| host.machine(&name)?.console()).await?;
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

/// Turns the connection into one of a peer.
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
