//! Relay between the page in a browser and the APIs of several hosts. The page shows a password; the relay
//! asks each host with the host's own token, which the browser never has.
//!
//! `/hosts` lists the hosts, and what is below `/hosts/NAME/v1/` are the calls of that host, also those that
//! become WebSockets. Only headers that mean something to the API are passed on.

use axum::{
    Router,
    body::Body,
    extract::{Path, State},
    http::{
        HeaderMap, HeaderName, HeaderValue, Request, StatusCode, header, request::Builder, response::Parts,
    },
    response::{IntoResponse, Response},
    routing::{any, get},
};
use hyper_util::rt::TokioIo;
use serde::{Serialize, Serializer, ser::SerializeStruct};
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};
use whimbrel_api::{ApiError, ErrorCode, routes};
use whimbrel_client::Client;

/// Headers of a request that the API of a host reads.
const PASSED_ON: [HeaderName; 6] = [
    header::ACCEPT,
    header::CONTENT_TYPE,
    header::UPGRADE,
    header::SEC_WEBSOCKET_KEY,
    header::SEC_WEBSOCKET_VERSION,
    header::SEC_WEBSOCKET_EXTENSIONS,
];

/// A host of the page.
#[derive(Debug)]
pub(super) struct PageHost {
    pub(super) name: String,
    pub(super) client: Client,
    /// Whether it has refused its token. It is not asked again: its limit of failed logins would lock out all
    /// of this computer.
    refused: AtomicBool,
}

impl PageHost {
    pub(super) fn new(name: String, client: Client) -> Self {
        Self { name, client, refused: AtomicBool::new(false) }
    }

    fn refusal(&self) -> Response {
        let text = format!("the host {} does not accept the token that `whimbrel web` has for it", self.name);
        refuse(
            &ApiError::new(ErrorCode::Untrusted, text)
                .with_hint("start `whimbrel web` again with another one"),
        )
    }

    /// The answer of the host, as the page gets it. A refused token is that of the host, not of the page.
    fn answer(&self, mut head: Parts, body: Body) -> Response {
        if head.status == StatusCode::UNAUTHORIZED {
            self.refused.store(true, Ordering::Relaxed);
            return self.refusal();
        }
        if head.status != StatusCode::SWITCHING_PROTOCOLS {
            for own in [header::CONNECTION, header::TRANSFER_ENCODING] {
                head.headers.remove(own);
            }
        }
        Response::from_parts(head, body)
    }
}

impl Serialize for PageHost {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut host = serializer.serialize_struct("PageHost", 2)?;
        host.serialize_field("name", &self.name)?;
        host.serialize_field("address", &self.client.address())?;
        host.end()
    }
}

pub(super) struct Relay {
    /// What a browser shows in place of a token.
    pub(super) password: String,
    pub(super) hosts: Vec<PageHost>,
}

impl Relay {
    /// The page, and the way from it to the hosts.
    pub(super) fn router(self) -> Router {
        let calls = Router::new()
            .route("/hosts", get(list))
            .route("/hosts/{name}/{*path}", any(pass_on))
            .with_state(Arc::new(self));
        calls.merge(whimbrel_daemon::page_of_several_hosts())
    }

    /// Whether the request shows the password: as a token, or among the subprotocols of a WebSocket.
    fn admits(&self, headers: &HeaderMap) -> bool {
        let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        let shown = match text(header::AUTHORIZATION) {
            Some(value) => value.strip_prefix("Bearer "),
            None => text(header::SEC_WEBSOCKET_PROTOCOL).and_then(|all| {
                all.split(',').find_map(|one| one.trim().strip_prefix(routes::BEARER_SUBPROTOCOL))
            }),
        };
        // In the same time wherever they differ.
        let is_equal = aws_lc_rs::constant_time::verify_slices_are_equal;
        shown.is_some_and(|shown| is_equal(shown.as_bytes(), self.password.as_bytes()).is_ok())
    }
}

async fn list(State(relay): State<Arc<Relay>>, headers: HeaderMap) -> Response {
    match relay.admits(&headers) {
        true => axum::Json(&relay.hosts).into_response(),
        false => refuse(&stranger()),
    }
}

async fn pass_on(
    State(relay): State<Arc<Relay>>,
    Path((name, _)): Path<(String, String)>,
    mut request: Request<Body>,
) -> Response {
    if !relay.admits(request.headers()) {
        return refuse(&stranger());
    }
    let Some(host) = relay.hosts.iter().find(|host| host.name == name) else {
        return refuse(&ApiError::new(ErrorCode::NotFound, format!("this page has no host {name:?}")));
    };
    if host.refused.load(Ordering::Relaxed) {
        return host.refusal();
    }
    let Some(path) = request.uri().path_and_query().and_then(|path| api_path(path.as_str())) else {
        return refuse(&ApiError::new(ErrorCode::NotFound, "only calls of the API are passed on"));
    };
    let passed = head_of(&request, path);
    let browser = request.headers().contains_key(header::UPGRADE).then(|| hyper::upgrade::on(&mut request));
    match host.client.pass_on(passed, request.into_body()).await {
        Ok(mut answer) => {
            if let (StatusCode::SWITCHING_PROTOCOLS, Some(browser)) = (answer.status(), browser) {
                tokio::spawn(join(browser, hyper::upgrade::on(&mut answer)));
            }
            let (head, body) = answer.into_parts();
            host.answer(head, Body::new(body))
        }
        Err(error) => refuse(&ApiError::from_error(ErrorCode::Unreachable, &error)),
    }
}

/// What is passed on of a request beside its body, for this path at its host.
fn head_of(request: &Request<Body>, path: &str) -> Builder {
    let headers = request.headers();
    let mut passed = Request::builder().method(request.method()).uri(path);
    for name in PASSED_ON {
        if let Some(value) = headers.get(&name) {
            passed = passed.header(name, value);
        }
    }
    if headers.contains_key(header::UPGRADE) {
        passed = passed.header(header::CONNECTION, "upgrade");
        if let Some(protocols) = subprotocols(headers) {
            passed = passed.header(header::SEC_WEBSOCKET_PROTOCOL, protocols);
        }
    }
    passed
}

/// Path and query of a call at its host, from those at the relay. As they came: a name in it stays encoded.
fn api_path(whole: &str) -> Option<&str> {
    let rest = whole.strip_prefix("/hosts/")?;
    let path = &rest[rest.find('/')?..];
    path.starts_with("/v1/").then_some(path)
}

/// The offered subprotocols without the one that has the password.
fn subprotocols(headers: &HeaderMap) -> Option<String> {
    let offered = headers.get(header::SEC_WEBSOCKET_PROTOCOL)?.to_str().ok()?;
    let rest = offered.split(',').map(str::trim).filter(|one| !one.starts_with(routes::BEARER_SUBPROTOCOL));
    Some(rest.collect::<Vec<_>>().join(", "))
}

/// Copies bytes both ways between a browser and a host until one of them ends.
async fn join(browser: hyper::upgrade::OnUpgrade, host: hyper::upgrade::OnUpgrade) {
    let joined = async {
        let (browser, host) = tokio::try_join!(browser, host).map_err(std::io::Error::other)?;
        tokio::io::copy_bidirectional(&mut TokioIo::new(browser), &mut TokioIo::new(host)).await
    };
    if let Err(error) = joined.await {
        tracing::debug!(%error, "a stream between a browser and a host broke");
    }
}

fn stranger() -> ApiError {
    ApiError::new(ErrorCode::Unauthenticated, "this is not the password of the page")
        .with_hint("`whimbrel web` has printed it")
}

fn refuse(error: &ApiError) -> Response {
    let status = StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (status, axum::Json(error)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_calls_of_the_api_are_passed_on_and_as_they_came() {
        assert_eq!(api_path("/hosts/a/v1/machines/x%2Fy?z=1"), Some("/v1/machines/x%2Fy?z=1"));
        assert_eq!(api_path("/hosts/fd00%3A%3A1/v1/host"), Some("/v1/host"));
        for other in
            ["/hosts/a/metrics", "/hosts/a/v1", "/hosts/a", "/v1/host", "/hosts//a/v1/x", "/hosts/a//v1/x"]
        {
            assert_eq!(api_path(other), None, "{other}");
        }
    }

    #[test]
    fn the_password_is_shown_as_a_token_or_among_subprotocols_and_goes_no_further() {
        let relay = Relay { password: "secret".into(), hosts: Vec::new() };
        let headers = |name: HeaderName, value: &'static str| {
            HeaderMap::from_iter([(name, HeaderValue::from_static(value))])
        };
        assert!(relay.admits(&headers(header::AUTHORIZATION, "Bearer secret")));
        let socket = headers(header::SEC_WEBSOCKET_PROTOCOL, "whimbrel-console, bearer.secret");
        assert!(relay.admits(&socket));
        assert_eq!(subprotocols(&socket).as_deref(), Some("whimbrel-console"));
        for (name, value) in [
            (header::AUTHORIZATION, "secret"),
            (header::AUTHORIZATION, "Bearer secre"),
            (header::AUTHORIZATION, "Bearer "),
            (header::SEC_WEBSOCKET_PROTOCOL, "bearer.other"),
            (header::COOKIE, "secret"),
        ] {
            assert!(!relay.admits(&headers(name.clone(), value)), "{name}: {value}");
        }
    }
}
