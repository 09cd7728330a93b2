//! HTTP connection for one call: one request, one reply. Knows HTTP and the limits, not the API.

use crate::{ClientError, client::DaemonPlace};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::{Method, Request, Response, body::Incoming, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::UnixStream,
};
use whimbrel_api::{ApiError, ErrorCode};
use whimbrel_wire::web_tls;

/// Most bytes of a JSON reply: a list of some ten thousand capsules.
pub(crate) const JSON_MAX: usize = 64 << 20;
/// Most bytes of an error reply.
const ERROR_MAX: usize = 1 << 20;

pub(crate) struct Call {
    method: Method,
    path: String,
    body: Option<Vec<u8>>,
    upgrade: Option<&'static str>,
}

impl Call {
    pub(crate) fn new(method: Method, path: impl Into<String>) -> Self {
        Self { method, path: path.into(), body: None, upgrade: None }
    }

    pub(crate) fn json(self, body: &impl Serialize) -> Result<Self, ClientError> {
        let body = serde_json::to_vec(body).map_err(|error| ClientError::protocol(&self.label(), error))?;
        Ok(Self { body: Some(body), ..self })
    }

    pub(crate) fn upgrade(self, protocol: &'static str) -> Self {
        Self { upgrade: Some(protocol), ..self }
    }

    pub(crate) fn label(&self) -> String {
        format!("{} {}", self.method, self.path)
    }

    fn request(self, daemon: &DaemonPlace) -> Result<Request<Full<Bytes>>, hyper::http::Error> {
        // The host name means nothing on a unix socket, but HTTP/1.1 demands one (RFC 9112, 3.2).
        let host = match daemon {
            DaemonPlace::Socket(_) => "whimbrel".to_owned(),
            DaemonPlace::Remote(remote) => remote.address.to_string().replacen("https://", "", 1),
        };
        let mut request = Request::builder().method(self.method).uri(self.path).header(header::HOST, host);
        if let DaemonPlace::Remote(remote) = daemon {
            request = request.header(header::AUTHORIZATION, format!("Bearer {}", remote.token));
        }
        if let Some(protocol) = self.upgrade {
            request = request.header(header::CONNECTION, "upgrade").header(header::UPGRADE, protocol);
        }
        if self.body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        request.body(Full::new(self.body.unwrap_or_default().into()))
    }

    /// Sends the call and waits for the headers of a successful reply.
    pub(crate) async fn send(self, daemon: &DaemonPlace) -> Result<Response<Incoming>, ClientError> {
        match daemon {
            DaemonPlace::Socket(socket) => {
                let stream = UnixStream::connect(socket).await;
                let stream = stream.map_err(|source| ClientError::connecting(socket.clone(), source))?;
                self.send_over(stream, daemon).await
            }
            DaemonPlace::Remote(remote) => {
                let address = &remote.address;
                let stream = web_tls::connect(&address.host, address.port, remote.fingerprint).await;
                let stream = stream.map_err(|source| ClientError::Remote {
                    address: address.to_string(),
                    source: Box::new(source),
                })?;
                self.send_over(stream, daemon).await
            }
        }
    }

    async fn send_over(
        self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        daemon: &DaemonPlace,
    ) -> Result<Response<Incoming>, ClientError> {
        let label = self.label();
        let fail = |error: hyper::Error| ClientError::protocol(&label, error);
        let request = self.request(daemon).map_err(|error| ClientError::protocol(&label, error))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(fail)?;
        // The task ends once the reply has been read or dropped; its error reaches the reader too.
        tokio::spawn(connection.with_upgrades());
        let response = sender.send_request(request).await.map_err(fail)?;
        if response.status().is_client_error() || response.status().is_server_error() {
            return Err(refusal(&label, response).await);
        }
        Ok(response)
    }

    /// Sends the call and decodes the JSON of the reply.
    pub(crate) async fn read<T: DeserializeOwned>(self, daemon: &DaemonPlace) -> Result<T, ClientError> {
        let label = self.label();
        let bytes = body(&label, self.send(daemon).await?, JSON_MAX).await?;
        // A call without a result may have no body.
        let text: &[u8] = if bytes.is_empty() { b"null" } else { &bytes };
        serde_json::from_slice(text).map_err(|error| ClientError::protocol(&label, error))
    }

    /// Sends the call and reads at most `limit` bytes of text.
    pub(crate) async fn read_bytes(self, daemon: &DaemonPlace, limit: usize) -> Result<Bytes, ClientError> {
        let label = self.label();
        body(&label, self.send(daemon).await?, limit).await
    }
}

/// Reads the complete body, if it has at most `limit` bytes.
async fn body(label: &str, response: Response<Incoming>, limit: usize) -> Result<Bytes, ClientError> {
    match Limited::new(response.into_body(), limit).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => {
            Err(ClientError::TooLarge { request: label.to_owned(), limit })
        }
        Err(error) => Err(ClientError::protocol(label, error)),
    }
}

/// Error of an error reply. If the server is not Whimbrel, it has another format; then the error has the
/// status.
async fn refusal(label: &str, response: Response<Incoming>) -> ClientError {
    let status = response.status();
    let bytes = match body(label, response, ERROR_MAX).await {
        Ok(bytes) => bytes,
        Err(error) => return error,
    };
    let error = serde_json::from_slice(&bytes).unwrap_or_else(|_| {
        ApiError::new(
            ErrorCode::Internal,
            format!("the daemon answered {status} to {label} without a reason"),
        )
    });
    ClientError::Api(error)
}
