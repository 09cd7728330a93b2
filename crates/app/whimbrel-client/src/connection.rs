//! HTTP connection for one call: one request, one reply. Knows HTTP and the limits, not the API.

use crate::{ClientError, client::DaemonPlace};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::{
    Method, Request, Response,
    body::{Body, Incoming},
    client::conn::http1,
    header,
    http::request::Builder,
};
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use std::error::Error;
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
        let mut request = daemon.address(Request::builder().method(self.method).uri(self.path));
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
        let label = self.label();
        let request = self.request(daemon).map_err(|error| ClientError::protocol(&label, error))?;
        let response = daemon.send(&label, request).await?;
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

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

impl DaemonPlace {
    /// The request with the headers by which the daemon knows that it is meant, and by whom it is asked.
    fn address(&self, request: Builder) -> Builder {
        match self {
            // The host name means nothing on a unix socket, but HTTP/1.1 demands one (RFC 9112, 3.2).
            Self::Socket(_) => request.header(header::HOST, "whimbrel"),
            Self::Remote(remote) => {
                let host = remote.address.to_string().replacen("https://", "", 1);
                let request = request.header(header::HOST, host);
                request.header(header::AUTHORIZATION, format!("Bearer {}", remote.token))
            }
        }
    }

    async fn connect(&self) -> Result<Box<dyn Stream>, ClientError> {
        match self {
            Self::Socket(socket) => {
                let stream = UnixStream::connect(socket).await;
                Ok(Box::new(stream.map_err(|source| ClientError::connecting(socket.clone(), source))?))
            }
            Self::Remote(remote) => {
                let address = &remote.address;
                let stream = web_tls::connect(&address.host, address.port, remote.fingerprint).await;
                let failed =
                    |source| ClientError::Remote { address: address.to_string(), source: Box::new(source) };
                Ok(Box::new(stream.map_err(failed)?))
            }
        }
    }

    /// Sends a request over a connection of its own, and waits for the headers of the reply.
    async fn send<B>(&self, label: &str, request: Request<B>) -> Result<Response<Incoming>, ClientError>
    where
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let fail = |error: hyper::Error| ClientError::protocol(label, error);
        let stream = self.connect().await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(fail)?;
        // The task ends once the reply has been read or dropped; its error reaches the reader too.
        tokio::spawn(connection.with_upgrades());
        sender.send_request(request).await.map_err(fail)
    }

    /// Passes a request on as this client's own, and returns the reply, also one that refuses.
    pub(crate) async fn pass_on<B>(
        &self,
        builder: Builder,
        body: B,
    ) -> Result<Response<Incoming>, ClientError>
    where
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let label = "a request that is passed on";
        let request =
            self.address(builder).body(body).map_err(|error| ClientError::protocol(label, error))?;
        self.send(label, request).await
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
