//! An etcd as the witness: one key for each protection, changed in single transactions over its JSON gateway.
//!
//! The rules are those of [`RegisterWitness`]. This module encodes and decodes transactions (etcd 3.4,
//! `/v3/kv/txn`), and bounds the time of a query: members are asked one after the other, the one that
//! answered last first, each for its share of the timeout. A member that did not answer in time may have made
//! the change all the same, so every request can be repeated.
//!
//! Keys: `whimbrel/protections/ID` is `open`, `taken` or `closed`; `whimbrel/about/ID` tells people which
//! hosts take part. Whoever may write these keys decides which host runs a machine; the etcd controls access
//! by the `credentials` of this host. A user gets a token, which is requested with the password when there is
//! none or it is refused.

mod credentials;

use crate::daemon::Daemon;
use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use credentials::{Credentials, CredentialsError, User};
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, StatusCode, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::{Value, json};
use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use whimbrel_core::lock;
use whimbrel_protect::{
    clock::BootTime,
    lease::{WitnessQuery, WitnessReply, WitnessState},
    protocol::ProtectionId,
    register_witness::{RegisterReply, RegisterRequest, RegisterWitness},
};

/// Longest reply that is read; an expected one has one key.
const REPLY_MAX: usize = 64 << 10;

type Failure = Box<dyn std::error::Error + Send + Sync>;
type Connection = http1::SendRequest<Full<Bytes>>;

/// Client of an etcd for one protection of this host.
pub(in crate::protect) struct Etcd {
    runtime: tokio::runtime::Handle,
    endpoints: Vec<String>,
    /// Index of the member that answered last, and an idle connection.
    last: AtomicUsize,
    idle: Mutex<Option<(usize, Connection)>>,
    /// Credentials of this host; without them no query is sent.
    credentials: Result<Credentials, CredentialsError>,
    /// Token of the user.
    token: Mutex<Option<String>>,
    id: ProtectionId,
    primary: String,
    register: Mutex<RegisterWitness>,
}

impl Etcd {
    pub(in crate::protect) fn new(
        host: &Daemon,
        endpoints: Vec<String>,
        id: ProtectionId,
        term: Duration,
    ) -> Self {
        let login = Credentials::of(&host.directories.data().join("etcd"));
        if let Err(error) = &login {
            let error = error as &dyn std::error::Error;
            tracing::error!(error, "the credentials for etcd cannot be used; no etcd is asked");
        }
        Self::with(host.runtime.clone(), login, endpoints, id, host.name.to_string(), term)
    }

    fn with(
        runtime: tokio::runtime::Handle,
        credentials: Result<Credentials, CredentialsError>,
        endpoints: Vec<String>,
        id: ProtectionId,
        primary: String,
        term: Duration,
    ) -> Self {
        let (last, idle, token) = (AtomicUsize::new(0), Mutex::default(), Mutex::default());
        let register = Mutex::new(RegisterWitness::new(term));
        Self { runtime, endpoints, last, idle, credentials, token, id, primary, register }
    }

    /// Sends a query; none if no member answered within `patience`.
    pub(in crate::protect) fn ask(
        &self,
        question: &WitnessQuery,
        patience: Duration,
    ) -> Option<WitnessReply> {
        let attempt = lock(&self.register).attempt(question, BootTime::now());
        let about = match question {
            WitnessQuery::Register { standby, term_ms } => {
                json!({ "primary": self.primary, "standby": standby, "term_ms": term_ms }).to_string()
            }
            _ => String::new(),
        };
        let outcome = self.transact(attempt, &about, patience)?;
        Some(RegisterWitness::verdict(question, outcome))
    }

    /// Reads the state, so that the time since its last change is known when it is needed.
    pub(in crate::protect) fn poll(&self, patience: Duration) {
        let _ = self.transact(RegisterRequest::Read, "", patience);
    }

    fn transact(&self, attempt: RegisterRequest, about: &str, patience: Duration) -> Option<RegisterReply> {
        let body = Bytes::from(transaction(self.id, attempt, about).to_string());
        let reply = self.runtime.block_on(self.query_any(&body, patience))?;
        let outcome = parse_reply(attempt, &reply);
        match outcome {
            Ok(outcome) => {
                lock(&self.register).handle_reply(outcome, BootTime::now());
                Some(outcome)
            }
            Err(error) => {
                tracing::warn!(protection = %self.id, error = &*error as &dyn std::error::Error, "an etcd sent an invalid reply");
                None
            }
        }
    }

    /// The reply of the first member that answers.
    async fn query_any(&self, body: &Bytes, patience: Duration) -> Option<Bytes> {
        let (begun, count) = (Instant::now(), self.endpoints.len());
        let first = self.last.load(Ordering::Relaxed);
        for nth in 0..count {
            let which = (first + nth) % count;
            let left = patience.saturating_sub(begun.elapsed()) / (count - nth) as u32;
            let asked = tokio::time::timeout(left.max(Duration::from_millis(1)), self.query_one(which, body));
            let failure = match asked.await {
                Ok(Ok(reply)) => {
                    self.last.store(which, Ordering::Relaxed);
                    return Some(reply);
                }
                Ok(Err(failure)) => failure,
                Err(_) => "the member is silent".into(),
            };
            tracing::debug!(
                etcd = self.endpoints[which],
                error = &*failure as &dyn std::error::Error,
                "no reply from an etcd member"
            );
        }
        None
    }

    async fn query_one(&self, which: usize, body: &Bytes) -> Result<Bytes, Failure> {
        let Ok(login) = &self.credentials else {
            return Err("the credentials for etcd cannot be used".into());
        };
        let endpoint = &self.endpoints[which];
        let mut connection = match self.idle(which) {
            Some(connection) => connection,
            None => connect(endpoint, login).await?,
        };
        // Taken out, so that a token on which an etcd hangs, as after a restored backup, is not used again.
        let mut token = lock(&self.token).take();
        let mut is_new = false;
        let reply = loop {
            if let (None, Some(user)) = (&token, &login.user) {
                token = Some(authenticate(&mut connection, endpoint, user).await?);
                is_new = true;
            }
            let (status, reply) =
                post(&mut connection, endpoint, "/v3/kv/txn", token.as_deref(), body).await?;
            match status {
                // The token has expired, or the member was restarted.
                StatusCode::UNAUTHORIZED if token.is_some() && !is_new => token = None,
                status if status.is_success() => break reply,
                status => return Err(refusal(status, &reply)),
            }
        };
        *lock(&self.token) = token;
        *lock(&self.idle) = Some((which, connection));
        Ok(reply)
    }

    /// Takes the idle connection, if it is to this member and still open. Otherwise it is dropped.
    fn idle(&self, which: usize) -> Option<Connection> {
        let (to, connection) = lock(&self.idle).take()?;
        (to == which && !connection.is_closed()).then_some(connection)
    }
}

async fn connect(endpoint: &str, login: &Credentials) -> Result<Connection, Failure> {
    let stream = TcpStream::connect(endpoint).await?;
    stream.set_nodelay(true)?;
    match &login.tls {
        Some(tls) => handshake(tls.connect(credentials::server_name(endpoint)?, stream).await?).await,
        None => handshake(stream).await,
    }
}

async fn handshake<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
) -> Result<Connection, Failure> {
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // The task ends when the sender is dropped; an earlier error reaches the sender.
    tokio::spawn(connection);
    Ok(sender)
}

async fn post(
    connection: &mut Connection,
    endpoint: &str,
    path: &str,
    token: Option<&str>,
    body: &Bytes,
) -> Result<(StatusCode, Bytes), Failure> {
    let request = Request::builder()
        .method(Method::POST)
        .uri(path)
        .header(header::HOST, endpoint)
        .header(header::CONTENT_TYPE, "application/json");
    let request =
        token.into_iter().fold(request, |request, token| request.header(header::AUTHORIZATION, token));
    connection.ready().await?;
    let response = connection.send_request(request.body(Full::new(body.clone()))?).await?;
    let status = response.status();
    Ok((status, Limited::new(response.into_body(), REPLY_MAX).collect().await?.to_bytes()))
}

/// Requests a token for the user.
async fn authenticate(connection: &mut Connection, endpoint: &str, user: &User) -> Result<String, Failure> {
    #[derive(Deserialize)]
    struct Authenticated {
        token: String,
    }
    let body = Bytes::from(json!({ "name": user.name, "password": user.password }).to_string());
    let (status, reply) = post(connection, endpoint, "/v3/auth/authenticate", None, &body).await?;
    match status.is_success() {
        true => Ok(serde_json::from_slice::<Authenticated>(&reply)?.token),
        false => Err(refusal(status, &reply)),
    }
}

fn refusal(status: StatusCode, reply: &[u8]) -> Failure {
    format!("{status}: {}", String::from_utf8_lossy(&reply[..reply.len().min(200)])).into()
}

fn state_name(stand: WitnessState) -> &'static str {
    match stand {
        WitnessState::Open => "open",
        WitnessState::Taken => "taken",
        WitnessState::Closed => "closed",
    }
}

/// Encodes a transaction for etcd, where bytes are base64 and long numbers are strings.
fn transaction(id: ProtectionId, attempt: RegisterRequest, about: &str) -> Value {
    let text = |text: &str| BASE64_STANDARD.encode(text);
    let (key, about_key) =
        (text(&format!("whimbrel/protections/{id}")), text(&format!("whimbrel/about/{id}")));
    let put = |key: &str, value: &str| json!({ "requestPut": { "key": key, "value": text(value) } });
    let value =
        |result: &str| json!({ "key": key, "target": "VALUE", "result": result, "value": text("open") });
    let (compare, success) = match attempt {
        RegisterRequest::Register => (
            json!([{ "key": key, "target": "VERSION", "result": "EQUAL", "version": "0" }]),
            json!([put(&key, "open"), put(&about_key, about)]),
        ),
        RegisterRequest::Put { state: stand, revision: over } => {
            let of = |revision: u64| json!({ "key": key, "target": "MOD", "result": "EQUAL", "modRevision": revision.to_string() });
            let compare: Vec<Value> = [value("EQUAL")].into_iter().chain(over.map(of)).collect();
            (Value::from(compare), json!([put(&key, state_name(stand))]))
        }
        // Compares with a condition that never holds (a revision is never negative), so that success is not
        // reported.
        RegisterRequest::Read => {
            (json!([{ "key": key, "target": "MOD", "result": "LESS", "modRevision": "0" }]), json!([]))
        }
        RegisterRequest::Remove => (
            json!([value("NOT_EQUAL")]),
            json!([{ "requestDeleteRange": { "key": key } }, { "requestDeleteRange": { "key": about_key } }]),
        ),
    };
    json!({ "compare": compare, "success": success, "failure": [{ "requestRange": { "key": key } }] })
}

#[derive(Deserialize)]
struct Reply {
    #[serde(default)]
    succeeded: bool,
    #[serde(default)]
    responses: Vec<Part>,
}

#[derive(Deserialize)]
struct Part {
    response_range: Option<Found>,
}

#[derive(Deserialize)]
struct Found {
    #[serde(default)]
    kvs: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    value: String,
    mod_revision: String,
}

/// Decodes a reply. Etcd omits values that are zero, empty or false.
fn parse_reply(attempt: RegisterRequest, reply: &[u8]) -> Result<RegisterReply, Failure> {
    let reply: Reply = serde_json::from_slice(reply)?;
    if reply.succeeded {
        return match attempt {
            RegisterRequest::Read => Err("a condition succeeded that never holds".into()),
            _ => Ok(RegisterReply::Done),
        };
    }
    let found =
        reply.responses.into_iter().find_map(|part| part.response_range).ok_or("the reply has no state")?;
    let Some(entry) = found.kvs.into_iter().next() else { return Ok(RegisterReply::State(None)) };
    let value = BASE64_STANDARD.decode(&entry.value)?;
    let all = [WitnessState::Open, WitnessState::Taken, WitnessState::Closed];
    let stand =
        all.into_iter().find(|stand| state_name(*stand).as_bytes() == value).ok_or("the state is unknown")?;
    Ok(RegisterReply::State(Some((stand, entry.mod_revision.parse()?))))
}

#[cfg(test)]
pub(crate) mod tests;
