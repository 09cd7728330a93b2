//! Access to the API: every request is authenticated, judged, and noted in the audit log.
//!
//! [`may::may`] is the only place that decides, and is pure. `endpoints` is the table of all calls: what role
//! each needs, and whether it is about objects. `objects` says which machines, capsules and files a request
//! names: the extractors of `server/http.rs` ask for each of them, so that no handler gets a name that was
//! not judged. Tokens and groups are looked up at the request, so a revoked token is refused at once, also on
//! a connection that is open.

pub(crate) mod audit;
pub(crate) mod endpoints;
pub(crate) mod filter;
pub(crate) mod gate;
mod groups;
pub(crate) mod login_limit;
pub(crate) mod may;
pub(crate) mod objects;
#[cfg(test)]
mod tests;
pub(crate) mod tokens;

use crate::core::{directories::Directories, error::DaemonError};
use audit::AuditLog;
use login_limit::{LoginLimit, Source};
use may::{ApiUser, Scope};
use std::{
    fmt,
    net::IpAddr,
    sync::{Arc, Mutex},
    time::Instant,
};
use tokens::Tokens;
use whimbrel_api::{ApiError, ErrorCode, Role};
use whimbrel_core::lock;
use whimbrel_metrics::CallDurations;

/// State of the checks that all listeners of the API share.
pub(crate) struct Access {
    pub(crate) tokens: Tokens,
    pub(crate) audit: AuditLog,
    /// Durations of calls, for metrics.
    pub(crate) calls: CallDurations,
    groups: Vec<(String, Role)>,
    logins: Mutex<LoginLimit>,
}

/// Where a request comes from, as the kernel knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A process on this host, over the unix socket.
    Socket { uid: u32, gid: u32 },
    /// A connection over TCP: with TLS, or from this host.
    Tcp(IpAddr),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket { uid, .. } => write!(f, "socket, user {uid}"),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

impl Access {
    /// Opens the tokens and the audit log. `groups` of this host have a role on the unix socket.
    pub(crate) fn open(
        directories: &Directories,
        groups: Vec<(String, Role)>,
    ) -> Result<Arc<Self>, DaemonError> {
        groups::check(&groups)?;
        Ok(Arc::new(Self {
            tokens: Tokens::load(directories.api_tokens()),
            audit: AuditLog::open(&directories.audit()),
            calls: CallDurations::default(),
            groups,
            logins: Mutex::default(),
        }))
    }

    /// Whether users other than that of the daemon may use the socket.
    pub(crate) fn has_groups(&self) -> bool {
        !self.groups.is_empty()
    }

    /// Finds out who sends a request. Reads the user database for others than the daemon's user, so it may
    /// block.
    pub(crate) fn identify(&self, origin: Origin, bearer: Option<&str>) -> Result<ApiUser, ApiError> {
        let source = match origin {
            Origin::Socket { uid, .. } => Source::User(uid),
            Origin::Tcp(address) => Source::of(address),
        };
        if !lock(&self.logins).may_try(source, Instant::now()) {
            let text = "too many failed logins from this address or user";
            return Err(ApiError::new(ErrorCode::RateLimited, text).with_hint("wait a minute"));
        }
        let found = match (origin, bearer) {
            // A token given on the socket counts, so that its rights can be tried there.
            (_, Some(token)) => self.tokens.find(token).ok_or_else(unknown_token),
            (Origin::Socket { uid, gid }, None) => self.user(uid, gid),
            (Origin::Tcp(_), None) => Err(no_token()),
        };
        found.inspect_err(|_| {
            // Root must get in whatever else its programs do.
            if source != Source::User(0) {
                lock(&self.logins).failed(source, Instant::now());
            }
        })
    }

    fn user(&self, uid: u32, gid: u32) -> Result<ApiUser, ApiError> {
        let name = format!("user {}", groups::user_name(uid));
        if uid == 0 || uid == rustix::process::geteuid().as_raw() {
            return Ok(ApiUser { name, role: Role::Admin, scope: Scope::all(), token: None });
        }
        let role = groups::of(uid, gid).into_iter().filter_map(|group| {
            self.groups.iter().filter(|(name, _)| *name == group).map(|(_, role)| *role).max()
        });
        match role.max() {
            Some(role) => Ok(ApiUser { name, role, scope: Scope::all(), token: None }),
            None => Err(ApiError::new(ErrorCode::Forbidden, format!("{name} has no role on this host"))
                .with_hint("run as root, or start the daemon with `--api-group GROUP=ROLE`")),
        }
    }
}

fn no_token() -> ApiError {
    ApiError::new(ErrorCode::Unauthenticated, "this request has no token")
        .with_hint("use --token-file; `whimbrel token create` on the host makes a token")
}

fn unknown_token() -> ApiError {
    ApiError::new(ErrorCode::Unauthenticated, "this token is unknown, revoked or expired")
        .with_hint("`whimbrel token create` on the host makes a new one")
}
