//! HTTP server of the daemon: each route parses a request, calls one method of [`Daemon`] on a blocking
//! thread, and returns the outcome.
//!
//! No logic here. Bodies are bounded, unknown fields are refused, and every failure is an `ApiError`.

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    schedule::Actions,
    server::{
        access::{
            Access,
            endpoints::Endpoint,
            gate::{self, Asker},
            objects::{Named, Subject},
        },
        console::console,
        display::display,
        metrics, peer_rpc, sessions, streams,
        strict_json::Strict,
        web_page,
    },
};
use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{DefaultBodyLimit, FromRequest, FromRequestParts, Path, Query, Request, State},
    handler::Handler,
    http::{Method, StatusCode, header, request::Parts},
    middleware::{from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::on,
};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, de::DeserializeOwned};
use std::{fmt::Display, str::FromStr, sync::Arc, time::Duration};
use whimbrel_api::*;
use whimbrel_core::{HostName, MachineName, RefName};

/// Longest request: requests carry settings, never data.
const BODY_MAX: usize = 1 << 20;
/// Longest time for a request to arrive.
const BODY_PATIENCE: Duration = Duration::from_secs(30);

pub(super) type Shared = State<Arc<Daemon>>;
pub(super) type Answer<T> = Result<Json<T>, Failure>;

/// Adds routes whose handlers parse the parameter of the path and the body, and call one method.
macro_rules! routes {
    ($router:expr; $($endpoint:ident
        ($($name:ident: $kind:ty)?) ($($body:ident: $request:ty)?) => $work:expr;)*) => {
        $router $(.call(Endpoint::$endpoint,
            |State(host): Shared, $(At($name): At<$kind>,)? $(Wanted($body): Wanted<$request>,)?| {
                blocking(host, $work)
            }
        ))*
    };
}

/// Adds routes whose answers leave out what the caller may not see.
macro_rules! lists {
    ($router:expr; $($endpoint:ident ($($name:ident: $kind:ty)?) => $work:expr;)*) => {
        $router $(.call(Endpoint::$endpoint,
            |State(host): Shared, asker: Asker, $(At($name): At<$kind>,)?| {
                let work: Box<dyn FnOnce(&Arc<Daemon>, &Asker) -> _ + Send> = Box::new($work);
                blocking(host, move |host| work(host, &asker))
            }
        ))*
    };
}

/// The calls of the API, each judged before its handler.
pub(crate) struct Calls(Router<Arc<Daemon>>);

impl Calls {
    fn call<T: 'static>(self, endpoint: Endpoint, handler: impl Handler<T, Arc<Daemon>>) -> Self {
        let status = StatusCode::from_u16(success_status(&endpoint.text())).unwrap_or(StatusCode::OK);
        let judged = from_fn(move |request, next| async move {
            as_documented(status, gate::authorize(endpoint, request, next).await)
        });
        Self(self.0.route(endpoint.path(), on(endpoint.method(), handler).route_layer(judged)))
    }
}

/// The API. Requests need a `Connected` extension, which says where they come from.
pub(crate) fn router(host: Arc<Daemon>, access: Arc<Access>) -> Router {
    let calls = token_routes(list_routes(capsule_routes(machine_routes(Calls(Router::new())))))
        .call(Endpoint::Delete, delete_machine)
        .call(Endpoint::DirtyTrace, wws)
        .call(Endpoint::Console, console)
        .call(Endpoint::Display, display)
        .call(Endpoint::ConsoleLog, streams::console_log)
        .call(Endpoint::HostEvents, streams::host_events)
        .call(Endpoint::Outdated, rebase)
        .call(Endpoint::Diff, diff)
        .call(Endpoint::Wire, wire)
        .call(Endpoint::Events, streams::operation_events)
        .call(Endpoint::Metrics, metrics_page)
        .call(Endpoint::Caller, caller)
        .call(Endpoint::OpenApi, openapi);
    let router = calls
        .0
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(DefaultBodyLimit::max(BODY_MAX));
    let router = router.layer(from_fn_with_state(access, gate::admit)).with_state(host);
    router.layer(from_fn(gate::refuse_other_sites)).merge(web_page::routes())
}

fn list_routes(calls: Calls) -> Calls {
    lists! { calls;
        Machines () => |host, asker| machines(host).map(|all| asker.machines(all));
        Usage () => |host, asker| Ok(asker.usage(host.machines.usage()));
        Migrations () => |host, asker| host.past_migrations().map(|all| asker.migrations(all));
        Networks () => |host, asker| {
            Ok(host.network_infos().into_iter().map(|network| asker.network(network)).collect::<Vec<_>>())
        };
        Network (name: NetworkName) => move |host, asker| {
            host.network_info(name.0.as_str()).map(|network| asker.network(network))
        };
        Schedules () => |host, asker| {
            Ok(asker.schedules(host.schedules.list(&Actions(host.clone()))))
        };
        Operations () => |host, asker| Ok(asker.operations(host, host.operations().list()));
        Capsules () => |host, asker| host.capsules().map(|all| asker.capsules(host, all));
        CapsuleLog (capsule: CapsuleRef) => move |host, asker| {
            host.log(&capsule).map(|all| asker.capsules(host, all))
        };
        Graph () => |host, asker| host.graph(None).map(|all| asker.graph(host, all));
        CapsuleGraph (capsule: CapsuleRef) => move |host, asker| {
            host.graph(Some(&capsule)).map(|all| asker.graph(host, all))
        };
    }
}

fn token_routes(calls: Calls) -> Calls {
    lists! { calls;
        Tokens () => |_, asker| asker.access.tokens.list();
        RevokeToken (name: TokenName) => move |_, asker| asker.access.tokens.revoke(&name.0);
    }
    .call(Endpoint::CreateToken, create_token)
}

async fn create_token(
    State(host): Shared,
    asker: Asker,
    Wanted(request): Wanted<TokenRequest>,
) -> Answer<NewToken> {
    blocking(host, move |_| asker.access.tokens.create(request)).await
}

fn machine_routes(calls: Calls) -> Calls {
    routes! { calls;
        HostInfo () () => |host| host.info();
        Run () (request: RunRequest) => move |host| host.run(request);
        Machine (name: MachineName) () => move |host| machine(host, &name);
        Start (name: MachineName) () => move |host| host.start(&name);
        Stop (name: MachineName) (request: StopRequest) => move |host| host.stop(&name, request);
        Pause (name: MachineName) () => move |host| host.set_paused(&name, true);
        Unpause (name: MachineName) () => move |host| host.set_paused(&name, false);
        Upgrade (name: MachineName) () => move |host| host.upgrade(&name);
        Settings (name: MachineName) (request: SettingsRequest) => move |host| host.change_settings(&name, &request);
        Rename (name: MachineName) (request: RenameRequest) => move |host| host.rename(&name, &request);
        Exec (name: MachineName) (request: ExecRequest) => move |host| host.exec(&name, &request);
        ReadFile (name: MachineName) (request: FileReadRequest) => move |host| host.read_guest_file(&name, &request);
        WriteFile (name: MachineName) (request: FileWriteRequest) => move |host| host.write_guest_file(&name, &request);
        Balloon (name: MachineName) (request: BalloonRequest) => move |host| host.balloon(&name, request.size);
        Checkpoint (name: MachineName) (request: CheckpointRequest) => move |host| host.checkpoint(&name, request);
        Rewind (name: MachineName) (request: RewindRequest) => move |host| host.rewind(&name, &request);
        Suspend (name: MachineName) (request: SuspendRequest) => move |host| host.suspend(&name, request);
        Migrate (name: MachineName) (request: MigrateRequest) => move |host| host.migrate(&name, request);
        Protect (name: MachineName) (request: ProtectRequest) => move |host| host.protect(&name, request);
        Unprotect (name: MachineName) () => move |host| host.unprotect(&name);
        Failover (name: MachineName) (request: FailoverRequest) => move |host| host.failover(&name, request);
        Resolve (name: MachineName) (request: ResolveRequest) => move |host| host.resolve(&name, &request);
        Evacuate () (request: EvacuateRequest) => move |host| host.evacuate(request);
        Ports (name: MachineName) (request: PortsRequest) => move |host| host.change_ports(&name, &request);
        CreateNetwork () (request: NetworkRequest) => move |host| host.networks.create(&request);
        NetworkHosts (name: NetworkName) (request: NetworkHostsRequest) => move |host| {
            host.change_network_hosts(name.0.as_str(), &request)
        };
        DeleteNetwork (name: NetworkName) () => move |host| host.delete_network(name.0.as_str());
        Hosts () () => |host| host.hosts();
        Sessions () () => |host| Ok(host.session_sockets.get().map_or_else(Vec::new, |folder| sessions::list(folder)));
        Pools () () => |host| Ok(host.pool_infos());
        Trusted () () => |host| host.trust_list();
        Trust () (entry: TrustEntry) => move |host| host.trust_add(entry);
        Limit (name: HostName) (rights: RefRights) => move |host| host.trust_limit(&name, rights);
        Distrust (name: HostName) () => move |host| host.trust_remove(&name);
        CreateSchedule () (request: ScheduleRequest) => move |host| Ok(host.schedules.create(request, &Actions(host.clone()))?);
        Schedule (name: ScheduleName) () => move |host| Ok(host.schedules.show(&name.0, &Actions(host.clone()))?);
        DeleteSchedule (name: ScheduleName) () => move |host| Ok(host.schedules.delete(&name.0)?);
        RunSchedule (name: ScheduleName) (request: ScheduleRunRequest) => move |host| Ok(match request.dry_run {
            true => host.schedules.dry_run(&name.0, &Actions(host.clone()))?,
            false => host.schedules.run(&name.0, &Actions(host.clone()))?,
        });
        Operation (id: OperationId) () => move |host| Ok(host.operations().watch(id)?.borrow().clone());
        Cancel (id: OperationId) () => move |host| host.operations().cancel(id);
    }
}

fn capsule_routes(calls: Calls) -> Calls {
    routes! { calls;
        Resume () (request: ResumeRequest) => move |host| host.resume(request);
        Clone () (request: CloneRequest) => move |host| host.clone_machines(request);
        CpuBaseline () (request: CpuBaselineRequest) => move |host| host.cpu_baseline(&request);
        Match () (request: MatchRequest) => move |host| host.match_golden(&request);
        Derive () (request: DeriveRequest) => move |host| host.derive(request);
        Promote () (request: PromoteRequest) => move |host| host.promote(request);
        RefHistory (name: KnownRef) () => move |host| host.ref_history(&name.0);
        Capsule (capsule: CapsuleRef) () => move |host| host.capsule(&capsule);
        Untag (name: KnownRef) () => move |host| host.remove_ref(&name.0);
        Tag (tag: TagName) (request: TagRequest) => move |host| host.tag(&tag.0, &request.capsule);
        Gc () () => |host| Ok(host.gc());
        Bucket () (request: BucketRequest) => move |host| host.tend_bucket(request);
        Verify () () => |host| Ok(host.verify());
        Repair () (request: RepairRequest) => move |host| host.repair(request);
        Encryption () () => |host| host.encryption();
        Seal () () => |host| Ok(host.seal());
        ChangeMasterKey () (request: KeyChangeRequest) => move |host| host.change_master_key(&request);
        Export () (request: ExportRequest) => move |host| host.export(request);
        Import () (request: ImportRequest) => move |host| host.import(request);
        Pull () (request: PullRequest) => move |host| host.pull(request);
        Images () () => |host| Ok(host.image_offers());
        PullImage () (request: ImagePullRequest) => move |host| host.pull_image(request);
        Push () (request: PushRequest) => move |host| host.push(request);
        Remote (name: HostName) () => move |host| host.remote_capsules(&name);
        Cache () () => |host| host.cache_info();
        CacheAdd () (request: CacheAddRequest) => move |host| host.cache_add(request);
    }
}

pub(crate) struct Failure(pub(crate) ApiError);

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

pub(super) async fn blocking<T: Send + 'static>(
    host: Arc<Daemon>,
    work: impl FnOnce(&Arc<Daemon>) -> Result<T, DaemonError> + Send + 'static,
) -> Answer<T> {
    match tokio::task::spawn_blocking(move || work(&host)).await {
        Ok(outcome) => Ok(Json(outcome?)),
        Err(_) => Err(DaemonError::Panicked.into()),
    }
}

/// The parameter of a path, once the caller may use what it names.
pub(super) struct At<T>(pub(super) T);

impl<T: FromStr<Err: Display> + Named + Send> FromRequestParts<Arc<Daemon>> for At<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, host: &Arc<Daemon>) -> Result<Self, Failure> {
        let Path(text) = Path::<String>::from_request_parts(parts, host).await.map_err(unfit)?;
        let parameter: T = named(&text)?;
        judge(parts, host, parameter.named()).await?;
        Ok(Self(parameter))
    }
}

/// Both capsules of a comparison, once the caller may use them.
struct AtBoth(CapsuleRef, CapsuleRef);

impl FromRequestParts<Arc<Daemon>> for AtBoth {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, host: &Arc<Daemon>) -> Result<Self, Failure> {
        let texts = Path::<(String, String)>::from_request_parts(parts, host).await;
        let Path((a, b)) = texts.map_err(unfit)?;
        let both: (CapsuleRef, CapsuleRef) = (named(&a)?, named(&b)?);
        judge(parts, host, both.named()).await?;
        Ok(Self(both.0, both.1))
    }
}

/// The body of a request, once the caller may use what it names; an empty one stands for `{}`.
struct Wanted<T>(T);

impl<T: DeserializeOwned + Named + Send> FromRequest<Arc<Daemon>> for Wanted<T> {
    type Rejection = Response;

    async fn from_request(request: Request, host: &Arc<Daemon>) -> Result<Self, Response> {
        let (mut parts, body) = request.into_parts();
        let request = Request::from_parts(parts.clone(), body);
        let body = tokio::time::timeout(BODY_PATIENCE, Bytes::from_request(request, host)).await;
        let body = body.map_err(|_| late())?;
        let body = body.map_err(|error| unfit(error.body_text()).into_response())?;
        let text: &[u8] = if body.is_empty() { b"{}" } else { &body };
        if !text.trim_ascii_start().starts_with(b"{") {
            return Err(unfit("the request body is not a JSON object").into_response());
        }
        // The first reader says where an error is, the second one takes no list for an object.
        let read = serde_json::from_slice::<T>(text)
            .and_then(|_| T::deserialize(Strict(serde_json::from_slice(text)?)));
        let wanted = read.map_err(|error| {
            let api = ApiError::new(ErrorCode::Invalid, "the request body cannot be read");
            Failure(ApiError { causes: vec![error.to_string()], ..api }).into_response()
        })?;
        judge(&mut parts, host, wanted.named()).await.map_err(IntoResponse::into_response)?;
        Ok(Self(wanted))
    }
}

/// The query of a request. An extractor of axum would refuse in plain text.
pub(super) struct Asked<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequestParts<Arc<Daemon>> for Asked<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, host: &Arc<Daemon>) -> Result<Self, Failure> {
        let query = Query::<T>::from_request_parts(parts, host).await;
        query.map(|Query(query)| Self(query)).map_err(|error| unfit(error.body_text()))
    }
}

fn unfit(error: impl Display) -> Failure {
    Failure(ApiError::new(ErrorCode::Invalid, error.to_string()))
}

/// Judges all that a part of a request names, on a thread that may read the store.
async fn judge(parts: &mut Parts, host: &Arc<Daemon>, subjects: Vec<Subject>) -> Result<(), Failure> {
    let asker = Asker::from_request_parts(parts, host).await?;
    let host = host.clone();
    let judge = move || subjects.iter().try_for_each(|subject| asker.judge(&host, subject));
    let judged = tokio::task::spawn_blocking(judge).await;
    judged.map_err(|_| DaemonError::Panicked)?.map_err(Failure)
}

/// Defines names in paths that are about a ref.
macro_rules! ref_names {
    ($($(#[$doc:meta])* $name:ident => $subjects:expr;)*) => {
        $($(#[$doc])*
        struct $name(RefName);

        impl FromStr for $name {
            type Err = <RefName as FromStr>::Err;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                text.parse().map(Self)
            }
        }

        impl Named for $name {
            fn named(&self) -> Vec<Subject> {
                let subjects: fn(RefName) -> Vec<Subject> = $subjects;
                subjects(self.0.clone())
            }
        })*
    };
}

ref_names! {
    /// A tag to set.
    TagName => |name| vec![Subject::NewTag(name)];
    /// A tag, or a machine by its newest capsule.
    KnownRef => |name| vec![Subject::Ref(name)];
    /// A token; the call is for everything.
    TokenName => |_| vec![];
    /// A network, which belongs to the host; its machines are left out of the answer one by one.
    NetworkName => |_| vec![];
}

/// Name of a schedule in a path.
struct ScheduleName(MachineName);

impl FromStr for ScheduleName {
    type Err = <MachineName as FromStr>::Err;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

impl Named for ScheduleName {
    fn named(&self) -> Vec<Subject> {
        vec![Subject::Schedule(self.0.clone())]
    }
}

pub(super) fn named<T: FromStr<Err: Display>>(text: &str) -> Result<T, Failure> {
    text.parse().map_err(|error: T::Err| Failure(ApiError::new(ErrorCode::Invalid, error.to_string())))
}

/// A successful answer with the status that the API's document has for its call.
fn as_documented(status: StatusCode, mut answer: Response) -> Response {
    if answer.status() != StatusCode::OK {
        return answer;
    }
    *answer.status_mut() = status;
    if status == StatusCode::NO_CONTENT {
        *answer.body_mut() = Body::empty();
        answer.headers_mut().remove(header::CONTENT_TYPE);
        answer.headers_mut().remove(header::CONTENT_LENGTH);
    }
    answer
}

async fn no_route() -> Failure {
    Failure(
        ApiError::new(ErrorCode::NotFound, "there is no such path in this API")
            .with_hint("see /v1/openapi.json"),
    )
}

async fn no_method(method: Method) -> Response {
    let text = format!("this path of the API knows no {method}");
    let error = ApiError::new(ErrorCode::Invalid, text).with_hint("see /v1/openapi.json");
    (StatusCode::METHOD_NOT_ALLOWED, Json(error)).into_response()
}

/// Answer to a request whose body did not arrive in time.
fn late() -> Response {
    let text = format!("the request body did not arrive in {} s", BODY_PATIENCE.as_secs());
    (StatusCode::REQUEST_TIMEOUT, Json(ApiError::new(ErrorCode::Invalid, text))).into_response()
}

async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], whimbrel_api::openapi_json()).into_response()
}

async fn metrics_page(State(host): Shared, asker: Asker) -> Result<Response, Failure> {
    let page = move |host: &Arc<Daemon>| Ok(metrics::page(host, &asker.access));
    let Json(text) = blocking(host, page).await?;
    Ok(([(header::CONTENT_TYPE, whimbrel_metrics::CONTENT_TYPE)], text).into_response())
}

async fn caller(asker: Asker) -> Json<CallerInfo> {
    Json(asker.info())
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
    host.self_starts.add_to(&mut info);
    host.schedules.add_to(&mut info);
    host.add_addresses(&mut info);
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
    Asked(query): Asked<RebaseQuery>,
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
    Asked(query): Asked<DeleteQuery>,
) -> Answer<()> {
    let delete = move |host: &Arc<Daemon>| match query.unreadable {
        true => host.machines.unreadable.delete(&host.directories, &name),
        false => host.delete(&name),
    };
    blocking(host, delete).await
}

async fn diff(State(host): Shared, AtBoth(a, b): AtBoth) -> Answer<CapsuleDiff> {
    blocking(host, move |host| host.diff(&a, &b)).await
}

async fn wire(State(host): Shared, asker: Asker, request: Request) -> Result<Response, Failure> {
    expect_upgrade(&request, routes::WIRE_PROTOCOL)?;
    tokio::spawn(async move {
        let Ok(upgraded) = hyper::upgrade::on(request).await else { return };
        tokio::select! {
            () = peer_rpc::serve_stream(host, TokioIo::new(upgraded)) => {}
            () = asker.ended() => {}
        }
    });
    Ok(switching(routes::WIRE_PROTOCOL))
}

pub(super) fn expect_upgrade(request: &Request, protocol: &str) -> Result<(), Failure> {
    let asked = request.headers().get(header::UPGRADE).and_then(|value| value.to_str().ok());
    if asked == Some(protocol) {
        return Ok(());
    }
    Err(DaemonError::invalid(format!("send the header `Upgrade: {protocol}`")).into())
}

/// From here on the connection is a raw byte stream (RFC 9110, 7.8).
pub(super) fn switching(protocol: &'static str) -> Response {
    let switch = [(header::UPGRADE, protocol), (header::CONNECTION, "upgrade")];
    (StatusCode::SWITCHING_PROTOCOLS, switch).into_response()
}
