//! Listeners of the API: the unix socket, TLS over TCP, and plain TCP for browsers on this host.
//!
//! Nothing holds up `accept`: handshakes are done by tasks. A connection that has not sent a request with a
//! valid token counts as a handshake; of those there are few, and the oldest of the address that has the most
//! gives way. Connections of one address, and of all, are bounded; a connection without a request ends soon.

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    server::{
        access::{Access, Origin, gate::Connected, login_limit::Source},
        http,
    },
};
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use std::{
    collections::HashMap,
    fs,
    net::{IpAddr, SocketAddr},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener},
    sync::{Notify, oneshot},
};
use whimbrel_core::lock;
use whimbrel_wire::{Handshakes, web_tls::Acceptor};

/// Most connections at once: of all, of one address or user, and of those that nobody is known behind.
const CONNECTIONS_MAX: usize = 512;
const OF_ONE_MAX: usize = 64;
const UNKNOWN_MAX: usize = 64;
/// Longest time without the head of a request.
const IDLE: Duration = Duration::from_secs(30);
/// Pause after a connection could not be accepted.
const RETRY: Duration = Duration::from_millis(100);

/// Connections that are open.
#[derive(Default)]
struct Open(Arc<Mutex<HashMap<Source, usize>>>);

/// The place of one connection.
#[derive(Debug)]
pub(crate) struct Place(Arc<Mutex<HashMap<Source, usize>>>, Source);

impl Open {
    /// A place for one more connection, if there is one.
    fn place(&self, of: Source) -> Option<Arc<Place>> {
        let mut open = lock(&self.0);
        let free = open.values().sum::<usize>() < CONNECTIONS_MAX
            && open.get(&of).is_none_or(|count| *count < OF_ONE_MAX);
        free.then(|| {
            *open.entry(of).or_default() += 1;
            Arc::new(Place(self.0.clone(), of))
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = lock(&self.0);
        match open.get_mut(&self.1) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(open.remove(&self.1)),
        }
    }
}

/// The router, ready for connections.
#[derive(Clone)]
pub(crate) struct Api(Router);

impl Api {
    pub(crate) fn new(host: Arc<Daemon>, access: Arc<Access>) -> Self {
        Self(http::router(host, access))
    }

    /// Serves the users of this host, until dropped.
    pub(crate) async fn serve_socket(self, listener: UnixListener) {
        let open = Open::default();
        loop {
            let accepted = listener.accept().await.and_then(|(stream, _)| Ok((stream.peer_cred()?, stream)));
            let (user, stream) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection to the API socket");
                    tokio::time::sleep(RETRY).await;
                    continue;
                }
            };
            // The owner is never refused: an operator must get in when others are too many.
            let owner = user.uid() == 0 || user.uid() == rustix::process::geteuid().as_raw();
            let place = if owner { None } else { open.place(Source::User(user.uid())) };
            if owner || place.is_some() {
                let origin = Origin::Socket { uid: user.uid(), gid: user.gid() };
                tokio::spawn(self.clone().serve(stream, Connected { origin, known: Arc::default(), place }));
            }
        }
    }

    /// Serves users elsewhere over TLS, and without an acceptor users of this host, until dropped.
    pub(crate) async fn serve_tcp(self, listener: TcpListener, acceptor: Option<Acceptor>) {
        let (open, mut unknown) = (Open::default(), Handshakes::new(UNKNOWN_MAX));
        loop {
            match listener.accept().await {
                Ok((stream, from)) => {
                    let Some(place) = open.place(Source::of(from.ip())) else {
                        tracing::debug!(%from, "too many connections; one was closed");
                        continue;
                    };
                    let evicted = unknown.begin(from.ip());
                    let (api, acceptor) = (self.clone(), acceptor.clone());
                    tokio::spawn(api.serve_user(stream, from.ip(), acceptor, place, evicted));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection to the API");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    async fn serve_user(
        self,
        stream: TcpStream,
        from: IpAddr,
        acceptor: Option<Acceptor>,
        place: Arc<Place>,
        evicted: oneshot::Receiver<()>,
    ) {
        let known = Arc::new(Notify::new());
        let connected = Connected { origin: Origin::Tcp(from), known: known.clone(), place: Some(place) };
        let serving = async {
            let Some(acceptor) = acceptor else {
                let _ = stream.set_nodelay(true);
                return self.serve(stream, connected).await;
            };
            match acceptor.accept(stream).await {
                Ok(stream) => self.serve(stream, connected).await,
                Err(error) => tracing::debug!(%from, %error, "a TLS handshake with a user failed"),
            }
        };
        tokio::select! {
            () = serving => {}
            () = gives_way(evicted, &known) => tracing::debug!(%from, "a connection gave way to newer ones"),
        }
    }

    /// Serves one connection until it ends. What was upgraded goes on, and takes the place along.
    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, connected: Connected) {
        let router = self.0.layer(Extension(connected));
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
            .with_upgrades()
            .await;
        if let Err(error) = served {
            tracing::trace!(%error, "a connection to the API ended");
        }
    }
}

/// Ends when a newer connection needs the place of one that nobody is known behind.
async fn gives_way(evicted: oneshot::Receiver<()>, known: &Notify) {
    tokio::select! {
        _ = evicted => {}
        // The receiver is dropped, which frees the place among the unknown.
        () = known.notified() => std::future::pending().await,
    }
}

/// The API socket. For its owner only, unless groups have roles: then everybody may connect, and the kernel
/// says who does. Never replaces one on which another daemon listens.
pub(crate) async fn bind_socket(path: &Path, for_groups: bool) -> Result<UnixListener, DaemonError> {
    let io = |action| move |source| DaemonError::io(action, path, source);
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(io("create the directory of"))?;
    }
    if tokio::net::UnixStream::connect(path).await.is_ok() {
        return Err(DaemonError::AlreadyServed { path: path.to_owned() });
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io("replace")(error)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(io("listen on"))?;
    let mode = if for_groups { 0o666 } else { 0o600 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(io("restrict"))?;
    if for_groups && let Some(dir) = path.parent() {
        open_to_pass(dir).map_err(io("open the directory of"))?;
    }
    Ok(listener)
}

/// Lets others go through a directory of this user, but not look into it.
fn open_to_pass(dir: &Path) -> std::io::Result<()> {
    let found = fs::metadata(dir)?;
    match found.uid() == rustix::process::geteuid().as_raw() {
        true => fs::set_permissions(dir, fs::Permissions::from_mode(found.mode() & 0o7777 | 0o011)),
        false => Ok(()),
    }
}

/// Listens for users elsewhere.
pub(crate) async fn bind_tcp(address: SocketAddr) -> Result<TcpListener, DaemonError> {
    let path = PathBuf::from(address.to_string());
    TcpListener::bind(address).await.map_err(|source| DaemonError::io("listen on", &path, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_gets_its_share_of_connections_and_others_theirs() {
        let open = Open::default();
        let places: Vec<_> = (0..OF_ONE_MAX).map(|_| open.place(Source::User(1)).unwrap()).collect();
        assert!(open.place(Source::User(1)).is_none());
        let others: Vec<_> = (2..100).flat_map(|of| (0..OF_ONE_MAX).map(move |_| of)).collect();
        let others: Vec<_> = others.into_iter().filter_map(|of| open.place(Source::User(of))).collect();
        assert_eq!(places.len() + others.len(), CONNECTIONS_MAX);
        drop((places, others));
        assert!(lock(&open.0).is_empty());
    }

    #[tokio::test]
    async fn a_connection_gives_way_until_somebody_is_known_behind_it() {
        let mut unknown = Handshakes::new(1);
        let address = IpAddr::from([10, 0, 0, 1]);
        let (first, known) = (unknown.begin(address), Notify::new());
        known.notify_one();
        let stays = gives_way(first, &known);
        tokio::select! { biased; () = stays => panic!("gave way"), () = tokio::task::yield_now() => {} }
        let second = unknown.begin(address);
        let _third = unknown.begin(address);
        gives_way(second, &Notify::new()).await;
    }
}
