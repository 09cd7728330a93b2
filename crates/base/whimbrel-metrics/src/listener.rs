//! Listener for Prometheus, which cannot scrape a unix socket: HTTP without TLS or tokens, one page.
//!
//! Whoever reaches the address reads the page and can do nothing else. Connections are few and bounded, and
//! pages are made one after the other, so that many callers cost no more than one.

use crate::CONTENT_TYPE;
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header,
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Mutex, Semaphore},
};

/// Most connections at once; further ones are closed.
const CONNECTIONS_MAX: usize = 16;
/// Longest time without the head of a request, so longer than the usual minute between two scrapes.
const IDLE: Duration = Duration::from_secs(90);
/// Pause after a connection could not be accepted.
const RETRY: Duration = Duration::from_millis(100);

/// Listens on `address`.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Serves `/metrics` with the page that `page` makes, until dropped.
pub async fn serve<F, P>(listener: TcpListener, page: F)
where
    F: Fn() -> P + Send + Sync + 'static,
    P: Future<Output = String> + Send,
{
    let (page, one, places) = (Arc::new(page), Arc::new(Mutex::new(())), Semaphore::new(CONNECTIONS_MAX));
    let places = Arc::new(places);
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                let Ok(place) = places.clone().try_acquire_owned() else {
                    tracing::debug!(%from, "too many connections for metrics; one was closed");
                    continue;
                };
                let (page, one) = (page.clone(), one.clone());
                tokio::spawn(async move {
                    connection(stream, page, one).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection for metrics");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

async fn connection<F, P>(stream: TcpStream, page: Arc<F>, one: Arc<Mutex<()>>)
where
    F: Fn() -> P + Send + Sync + 'static,
    P: Future<Output = String> + Send,
{
    let answer = service_fn(move |request| {
        let (page, one) = (page.clone(), one.clone());
        async move { Ok::<_, Infallible>(answer(&request, &*page, &one).await) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .serve_connection(TokioIo::new(stream), answer)
        .await;
    if let Err(error) = served {
        tracing::trace!(%error, "a connection for metrics ended");
    }
}

async fn answer<F, P>(request: &Request<Incoming>, page: &F, one: &Mutex<()>) -> Response<Full<Bytes>>
where
    F: Fn() -> P,
    P: Future<Output = String>,
{
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/metrics") => {
            let _turn = one.lock().await;
            (StatusCode::OK, page().await)
        }
        (&Method::GET | &Method::HEAD, _) => (StatusCode::NOT_FOUND, "the page is /metrics\n".to_owned()),
        _ => (StatusCode::METHOD_NOT_ALLOWED, "only GET\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    let kind = header::HeaderValue::from_static(CONTENT_TYPE);
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn ask(address: SocketAddr, head: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("{head} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn only_the_page_is_served_and_only_for_reading() {
        let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(serve(listener, || async { "up 1\n".to_owned() }));
        let page = ask(address, "GET /metrics").await;
        assert!(page.starts_with("HTTP/1.1 200") && page.ends_with("\r\n\r\nup 1\n"), "{page}");
        assert!(page.contains(CONTENT_TYPE), "{page}");
        assert!(ask(address, "GET /v1/host").await.starts_with("HTTP/1.1 404"));
        assert!(ask(address, "POST /metrics").await.starts_with("HTTP/1.1 405"));
        serving.abort();
    }

    #[tokio::test]
    async fn connections_that_say_nothing_are_bounded() {
        let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(serve(listener, || async { String::new() }));
        let mut silent = Vec::new();
        for _ in 0..CONNECTIONS_MAX {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let mut one_more = TcpStream::connect(address).await.unwrap();
        assert_eq!(one_more.read(&mut [0]).await.unwrap(), 0, "it was closed");
        serving.abort();
    }
}
