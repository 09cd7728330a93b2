//! The gate of the API: finds out who asks, judges the call, and notes the outcome.
//!
//! [`admit`] stands before every path, also unknown ones; [`authorize`] before each call. Extractors get the
//! [`Asker`] and judge what the request names.

use crate::server::{
    access::{
        Access, Origin,
        audit::Entry,
        endpoints::Endpoint,
        may::{Action, ApiUser, Object, may},
    },
    http::Failure,
    listen::Place,
};
use axum::{
    body::Body,
    extract::{FromRequestParts, Request, State},
    http::{HeaderValue, Method, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures_util::StreamExt;
use std::{
    sync::{Arc, Mutex},
    time::Instant,
};
use tokio::sync::Notify;
use whimbrel_api::{ApiError, CallerInfo, ErrorCode, Role, routes};
use whimbrel_core::lock;

/// Longest path, and most objects, in an entry of the audit log.
const PATH_MAX: usize = 300;
const OBJECTS_MAX: usize = 20;
/// What an unjudged request is: nobody may do it.
const UNJUDGED: Action = Action { name: "this", role: Role::Admin };

/// A connection over which requests come.
#[derive(Debug, Clone)]
pub(crate) struct Connected {
    pub(crate) origin: Origin,
    /// Told once a request was let in.
    pub(crate) known: Arc<Notify>,
    /// Place among the connections, for as long as anything of it is in use.
    #[expect(dead_code, reason = "held, not read")]
    pub(crate) place: Option<Arc<Place>>,
}

/// Sender of a request, and what it has named so far.
#[derive(Clone)]
pub(crate) struct Asker {
    pub(crate) identity: Arc<ApiUser>,
    pub(crate) access: Arc<Access>,
    call: Option<Endpoint>,
    objects: Arc<Mutex<Vec<String>>>,
    #[expect(dead_code, reason = "held, not read")]
    connected: Connected,
}

impl Asker {
    fn new(identity: ApiUser, access: Arc<Access>, connected: Connected) -> Self {
        Self { identity: Arc::new(identity), access, call: None, objects: Arc::default(), connected }
    }

    pub(crate) fn action(&self) -> Action {
        self.call.map_or(UNJUDGED, Endpoint::action)
    }

    /// Judges an object, and notes it for the audit log.
    pub(crate) fn may(&self, object: Object<'_>) -> Result<(), ApiError> {
        if object != Object::Host {
            self.noted(object.text());
        }
        self.silently(object)
    }

    /// Judges an object of an answer.
    pub(crate) fn silently(&self, object: Object<'_>) -> Result<(), ApiError> {
        may(&self.identity, self.action(), object)
    }

    /// For objects of an answer: notes nothing.
    pub(crate) fn quiet(&self) -> Self {
        Self { objects: Arc::default(), ..self.clone() }
    }

    pub(crate) fn noted(&self, object: String) {
        let mut objects = lock(&self.objects);
        if objects.len() < OBJECTS_MAX {
            objects.push(object);
        }
    }

    /// What the caller may do.
    pub(crate) fn info(&self) -> CallerInfo {
        let ApiUser { name, role, token, .. } = &*self.identity;
        let allowed = |call: &&Endpoint| may(&self.identity, call.action(), call.object()).is_ok();
        let token = token.as_ref();
        CallerInfo {
            name: name.clone(),
            role: *role,
            machines: token.and_then(|token| token.machines.clone()),
            capsules: token.and_then(|token| token.capsules.clone()),
            expires_ms: token.and_then(|token| token.expires_ms),
            calls: Endpoint::ALL.iter().filter(allowed).map(|call| call.text()).collect(),
        }
    }

    /// Ends when what the caller has opened must end: its token was revoked or has expired.
    pub(crate) async fn ended(&self) {
        match &self.identity.token {
            Some(token) => self.access.tokens.ended(token).await,
            None => std::future::pending().await,
        }
    }
}

impl<S: Sync> FromRequestParts<S> for Asker {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        let asker = parts.extensions.get::<Self>().cloned();
        asker.ok_or_else(|| Failure(ApiError::new(ErrorCode::Internal, "a request came past the gate")))
    }
}

/// Lets a request in if it is known who sends it, and notes its outcome.
pub(crate) async fn admit(State(access): State<Arc<Access>>, mut request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let Some(connected) = request.extensions().get::<Connected>().cloned() else {
        return Failure(ApiError::new(ErrorCode::Internal, "a request came from nowhere")).into_response();
    };
    let line = (request.method().clone(), short_path(&request));
    let (asking, bearer, origin) = (access.clone(), bearer(&request), connected.origin);
    let identify = move || asking.identify(origin, bearer.as_deref());
    let identity = tokio::task::spawn_blocking(identify).await;
    let identity = identity.unwrap_or_else(|_| Err(ApiError::new(ErrorCode::Internal, "the check failed")));
    let (asker, response) = match identity {
        Ok(identity) => {
            connected.known.notify_one();
            let asker = Asker::new(identity, access.clone(), connected);
            request.extensions_mut().insert(asker.clone());
            (Some(asker), next.run(request).await)
        }
        // What is refused for being too often is not noted, or it would fill the log.
        Err(error) if error.code == ErrorCode::RateLimited => {
            access.calls.observe("none", "refused", begun.elapsed());
            return Failure(error).into_response();
        }
        Err(error) => (None, Failure(error).into_response()),
    };
    let call = response.extensions().get::<Endpoint>().copied();
    let status = response.status().as_u16();
    let name = call.map_or("none", |call| call.action().name);
    access.calls.observe(name, outcome(status), begun.elapsed());
    if is_refusal(status) || call.is_none_or(Endpoint::is_noted) {
        let asker = asker.clone();
        let note = move || note(&access, (origin, asker.as_ref()), line, status, begun);
        let _ = tokio::task::spawn_blocking(note).await;
    }
    match asker {
        Some(asker) if call.is_some_and(Endpoint::is_stream) => until_ended(asker, response),
        _ => response,
    }
}

fn is_refusal(status: u16) -> bool {
    matches!(status, 401 | 403)
}

fn outcome(status: u16) -> &'static str {
    match status {
        _ if is_refusal(status) => "refused",
        400.. => "failed",
        _ => "done",
    }
}

fn note(
    access: &Access,
    (origin, asker): (Origin, Option<&Asker>),
    (method, path): (Method, String),
    status: u16,
    begun: Instant,
) {
    let objects = asker.map(|asker| std::mem::take(&mut *lock(&asker.objects)));
    access.audit.note(&Entry {
        time_ms: crate::now_ms(),
        who: asker.map(|asker| asker.identity.name.as_str()),
        from: origin.to_string(),
        method: method.as_str(),
        path: &path,
        objects: objects.unwrap_or_default(),
        outcome: outcome(status),
        status,
        ms: begun.elapsed().as_millis() as u64,
    });
}

/// Judges a call as such; its parameters and body are judged when they are read.
pub(crate) async fn authorize(endpoint: Endpoint, mut request: Request, next: Next) -> Response {
    let judged = match request.extensions_mut().get_mut::<Asker>() {
        None => Err(ApiError::new(ErrorCode::Internal, "a request came past the gate")),
        Some(asker) => {
            asker.call = Some(endpoint);
            asker.silently(endpoint.object())
        }
    };
    let mut response = match judged {
        Ok(()) => next.run(request).await,
        Err(error) => Failure(error).into_response(),
    };
    response.extensions_mut().insert(endpoint);
    response
}

fn until_ended(asker: Asker, response: Response) -> Response {
    let (head, body) = response.into_parts();
    let ended = async move { asker.ended().await };
    Response::from_parts(head, Body::from_stream(body.into_data_stream().take_until(Box::pin(ended))))
}

fn short_path(request: &Request) -> String {
    request.uri().path().chars().take(PATH_MAX).collect()
}

/// The token of a request: in its `Authorization`, or among the subprotocols of a browser's WebSocket.
fn bearer(request: &Request) -> Option<String> {
    let text = |name| request.headers().get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    if let Some(value) = text(header::AUTHORIZATION) {
        let (scheme, token) = value.split_once(' ')?;
        return scheme.eq_ignore_ascii_case("bearer").then(|| token.trim().to_owned());
    }
    let offered = text(header::SEC_WEBSOCKET_PROTOCOL)?;
    offered.split(',').find_map(|one| one.trim().strip_prefix(routes::BEARER_SUBPROTOCOL)).map(str::to_owned)
}

/// Refuses what a page of another site makes a browser send, which has no token and would count as a failed
/// login of its user's address. Browsers say so themselves (W3C, Fetch Metadata Request Headers).
pub(crate) async fn refuse_other_sites(request: Request, next: Next) -> Response {
    let site = request.headers().get("sec-fetch-site").and_then(|value| value.to_str().ok());
    match site {
        None | Some("same-origin" | "none") => next.run(request).await,
        Some(_) => {
            let text = "a page of another site sent this request";
            Failure(ApiError::new(ErrorCode::Forbidden, text)).into_response()
        }
    }
}
