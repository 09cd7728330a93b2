//! Connections to servers, by an HTTP proxy where the environment of the daemon names one: `https_proxy`,
//! `http_proxy`, `all_proxy` and `no_proxy`, as curl reads them.
//!
//! What is asked over TLS passes a proxy in a tunnel (`CONNECT`, RFC 9110, 9.3.6), which sees the name of the
//! server and nothing else. Everything else it is asked for by whole addresses (RFC 9112, 3.2.2).

use http_body_util::Empty;
use hyper::{
    HeaderMap, Request, Uri,
    body::Bytes,
    client::conn::http1,
    header::{self, HeaderValue},
};
use hyper_util::{client::proxy::matcher::Matcher, rt::TokioIo};
use std::{error::Error, sync::LazyLock};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use whimbrel_wire::web_tls;

/// Proxies of this process.
pub(super) static PROXIES: LazyLock<Matcher> = LazyLock::new(Matcher::from_env);

type Failure = Box<dyn Error + Send + Sync>;

/// Stream to a server.
pub(super) trait ServerStream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> ServerStream for T {}

/// Connection on which a server can be asked for an address.
pub(super) struct Route {
    pub(super) stream: Box<dyn ServerStream>,
    /// What the server is asked for: a path, or the whole address if it is a proxy.
    pub(super) target: String,
    /// Headers for a proxy.
    pub(super) headers: HeaderMap,
}

/// Connects to the server of an address.
pub(super) async fn connect(proxies: &Matcher, address: &Uri) -> Result<Route, Failure> {
    let host = address.host().unwrap_or_default();
    let secure = address.scheme_str() == Some("https");
    let port = address.port_u16().unwrap_or(if secure { 443 } else { 80 });
    let path = address.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    let route = |stream, target| Route { stream, target, headers: HeaderMap::new() };
    let Some(proxy) = proxies.intercept(address) else {
        return Ok(match secure {
            true => route(Box::new(web_tls::connect(bare(host), port, None).await?), path),
            false => route(Box::new(TcpStream::connect((bare(host), port)).await?), path),
        });
    };
    let login = proxy.basic_auth().cloned();
    let stream = to_proxy(proxy.uri()).await?;
    if !secure {
        let headers = login.map(|login| (header::PROXY_AUTHORIZATION, login)).into_iter().collect();
        return Ok(Route { headers, ..route(Box::new(stream), address.to_string()) });
    }
    let tunnel = tunnel(stream, &format!("{host}:{port}"), login).await?;
    Ok(route(Box::new(web_tls::connect_over(tunnel, bare(host), None).await?), path))
}

/// A host without the brackets that an address of IPv6 has.
fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

async fn to_proxy(proxy: &Uri) -> Result<TcpStream, Failure> {
    let host = proxy.host().unwrap_or_default();
    if proxy.scheme_str() != Some("http") {
        return Err(format!("the proxy {proxy} is none of HTTP").into());
    }
    let dialled = TcpStream::connect((bare(host), proxy.port_u16().unwrap_or(80))).await;
    dialled.map_err(|error| format!("no connection to the proxy {host}: {error}").into())
}

/// Has a proxy connect to a server.
async fn tunnel(
    stream: TcpStream,
    server: &str,
    login: Option<HeaderValue>,
) -> Result<impl ServerStream + use<>, Failure> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection.with_upgrades());
    let mut request = Request::connect(server).header(header::HOST, server);
    if let Some(login) = login {
        request = request.header(header::PROXY_AUTHORIZATION, login);
    }
    let response = sender.send_request(request.body(Empty::<Bytes>::new())?).await?;
    match response.status() {
        status if status.is_success() => Ok(TokioIo::new(hyper::upgrade::on(response).await?)),
        status => Err(format!("the proxy answered {status}").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    /// A proxy that answers so, and then sends back what comes. Returns what it was asked.
    async fn proxy(answer: &'static [u8]) -> (Matcher, tokio::task::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://me:secret@{}", listener.local_addr().unwrap());
        let asked = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut asked = Vec::new();
            while !asked.ends_with(b"\r\n\r\n") {
                asked.push(stream.read_u8().await.unwrap());
            }
            stream.write_all(answer).await.unwrap();
            let (mut read, mut write) = stream.split();
            let _ = tokio::io::copy(&mut read, &mut write).await;
            String::from_utf8(asked).unwrap().to_lowercase()
        });
        (Matcher::builder().all(address).no("near.test,10.0.0.0/8").build(), asked)
    }

    #[tokio::test]
    async fn a_tunnel_leads_there_and_back_and_a_refusal_is_told() {
        let (proxies, asked) = proxy(b"HTTP/1.1 200 Connected\r\n\r\n").await;
        let uri: Uri = "https://far.test/x".parse().unwrap();
        let found = proxies.intercept(&uri).unwrap();
        let stream = to_proxy(found.uri()).await.unwrap();
        let mut tunnel = tunnel(stream, "far.test:443", found.basic_auth().cloned()).await.unwrap();
        tunnel.write_all(b"hello").await.unwrap();
        let mut back = [0; 5];
        tunnel.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"hello");
        drop(tunnel);
        let asked = asked.await.unwrap();
        assert!(asked.starts_with("connect far.test:443 http/1.1\r\n"), "{asked}");
        assert!(asked.contains("proxy-authorization: basic "), "{asked}");

        let (proxies, _asked) = proxy(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n").await;
        let refused = connect(&proxies, &uri).await.err().unwrap().to_string();
        assert!(refused.contains("403"), "{refused}");
    }

    #[tokio::test]
    async fn what_is_near_needs_no_proxy_and_what_is_not_tls_is_asked_for_whole() {
        let (proxies, _asked) = proxy(b"").await;
        let route = connect(&proxies, &"http://far.test/a?b".parse().unwrap()).await.unwrap();
        assert_eq!(route.target, "http://far.test/a?b");
        assert!(route.headers.contains_key(header::PROXY_AUTHORIZATION));
        for near in ["http://near.test/a", "http://www.near.test/a", "http://10.1.2.3/a"] {
            assert!(proxies.intercept(&near.parse().unwrap()).is_none(), "{near}");
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let direct = format!("http://{}/a?b", listener.local_addr().unwrap()).parse().unwrap();
        let route = connect(&Matcher::builder().build(), &direct).await.unwrap();
        assert_eq!((route.target.as_str(), route.headers.len()), ("/a?b", 0));
        let other = Matcher::builder().all("socks5://127.0.0.1:1").build();
        assert!(connect(&other, &"http://far.test/".parse().unwrap()).await.is_err());
    }
}
