//! Listener of the image server: HTTP, for reading, of one folder. Connections are few, and those that stand
//! still are closed.

use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use std::{io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tower_http::services::ServeDir;

/// Most connections at once; further ones are closed.
const CONNECTIONS_MAX: usize = 256;
/// Longest time without the head of a request.
const IDLE: Duration = Duration::from_secs(30);
/// Longest time in milliseconds in which a client takes nothing of what is sent (tcp(7), `TCP_USER_TIMEOUT`).
const STALL_MS: u32 = 60_000;
/// Pause after a connection could not be accepted.
const RETRY: Duration = Duration::from_millis(100);

/// Listens on `address`.
pub(super) async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Serves the files below `folder`, until dropped.
pub(super) async fn serve(listener: TcpListener, folder: PathBuf) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let files = ServeDir::new(folder).append_index_html_on_directories(false);
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                let Ok(place) = places.clone().try_acquire_owned() else {
                    tracing::debug!(%from, "too many connections for images; one was closed");
                    continue;
                };
                let files = files.clone();
                tokio::spawn(async move {
                    if let Err(error) = connection(stream, files).await {
                        tracing::debug!(%from, %error, "a connection for images ended");
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection for images");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

async fn connection(
    stream: TcpStream,
    files: ServeDir,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    rustix::net::sockopt::set_tcp_user_timeout(&stream, STALL_MS)?;
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(IDLE);
    Ok(http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(files)).await?)
}
