//! Fetches files of sources: small ones whole, and images into a file, with their checksums checked.
//!
//! Nothing is taken on trust: lengths are bounded before anything is read, redirections are few and stay in
//! TLS, and a server that is silent is left. An image whose connection breaks is continued from where it
//! broke, or begun anew if the server cannot do that.

use super::{
    checksum::Checksum,
    location::Location,
    proxy::{self, Route},
    registry_login::Authorization,
};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{
    Request, Response, StatusCode, Uri,
    body::{Bytes, Incoming},
    client::conn::http1,
    header,
};
use hyper_util::rt::TokioIo;
use std::{
    error::Error,
    fs::File,
    io::{self, Read},
    ops::ControlFlow,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tokio::time::timeout;

/// Largest image file, and largest sum of the layers of an image.
pub(super) const IMAGE_MAX: u64 = 256 << 30;
/// Longest time without a byte.
const SILENCE: Duration = Duration::from_secs(30);
/// Longest time until a cancel is seen.
const GLANCE: Duration = Duration::from_millis(200);
/// Most redirections of a request.
const REDIRECTIONS: usize = 5;
/// Connections that an image may need beyond the first.
const RETRIES: u32 = 8;
/// Time before another connection, for each one that failed.
const PAUSE: Duration = Duration::from_millis(500);
/// Bytes of a file that are read at once.
const CHUNK: usize = 1 << 20;

/// A file that cannot be had, or is not what its source says.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each variant says what its fields are")]
pub enum FetchError {
    #[error("{text:?} is no path or address of an image that can be used")]
    Address { text: String },
    #[error("cannot read {}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("cannot connect to {host}")]
    Connect { host: String, source: Box<dyn Error + Send + Sync> },
    #[error("the connection broke")]
    Broken { source: Box<dyn Error + Send + Sync> },
    #[error("the server sent nothing for {} s", SILENCE.as_secs())]
    Silent,
    #[error("the server answered {status}")]
    Status { status: StatusCode },
    #[error("the server does not give it to everybody, or not by this login (`login` of the source)")]
    Unauthorized { challenge: String },
    #[error("the server redirects more than {REDIRECTIONS} times")]
    Redirections,
    #[error("the server sends another part of the file than it was asked for")]
    OtherPart,
    #[error("there are more than {limit} bytes")]
    TooLong { limit: u64 },
    #[error("the checksum of the file is {found}, and the source lists {expected}")]
    Checksum { expected: String, found: String },
    #[error("no valid signature: {reason}")]
    Signature { reason: String },
    #[error("the list cannot be read: {reason}")]
    List { reason: String },
    #[error("cancelled")]
    Cancelled,
}

impl FetchError {
    /// Whether the file is not there, rather than out of reach.
    pub(crate) fn is_absent(&self) -> bool {
        match self {
            Self::File { source, .. } => source.kind() == io::ErrorKind::NotFound,
            Self::Status { status } => [StatusCode::NOT_FOUND, StatusCode::GONE].contains(status),
            _ => false,
        }
    }

    /// Whether another try may succeed.
    fn is_passing(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Broken { .. } | Self::Silent => true,
            Self::Status { status } => status.is_server_error(),
            _ => false,
        }
    }

    /// Whether what came is not what the source or its owner vouches for.
    pub(crate) fn is_distrust(&self) -> bool {
        matches!(self, Self::Checksum { .. } | Self::Signature { .. })
    }

    fn broken(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Broken { source: source.into() }
    }
}

/// What a request says beside the address.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Said<'a> {
    /// Kinds of content that are read.
    pub(super) accept: Option<&'a str>,
    /// Login or token by which the server knows that it may answer.
    pub(super) authorization: Option<&'a Authorization>,
}

/// Reads a file of at most `max` bytes.
pub(super) async fn read(location: &Location, max: usize) -> Result<Vec<u8>, FetchError> {
    read_with(location, max, Said::default()).await
}

/// Reads a file of at most `max` bytes; a server is told `said`.
pub(super) async fn read_with(
    location: &Location,
    max: usize,
    said: Said<'_>,
) -> Result<Vec<u8>, FetchError> {
    let too_long = || FetchError::TooLong { limit: max as u64 };
    match location {
        Location::File(path) => {
            let failed = |source| FetchError::File { path: path.clone(), source };
            let (file, mut bytes) = (File::open(path).map_err(failed)?, Vec::new());
            file.take(max as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
            if bytes.len() > max { Err(too_long()) } else { Ok(bytes) }
        }
        Location::Web(_) => {
            let body = get(location, 0, said).await?.into_body();
            let body = timeout(SILENCE, Limited::new(body, max).collect()).await;
            match body.map_err(|_| FetchError::Silent)? {
                Ok(body) => Ok(body.to_bytes().to_vec()),
                Err(error) if error.is::<http_body_util::LengthLimitError>() => Err(too_long()),
                Err(error) => Err(FetchError::broken(error)),
            }
        }
    }
}

/// An image to fetch into an empty file.
pub(super) struct Download<'a> {
    pub(super) location: &'a Location,
    pub(super) checksum: &'a Checksum,
    /// Length that the source says.
    pub(super) size: Option<u64>,
    pub(super) file: &'a File,
    pub(super) said: Said<'a>,
}

/// Hears how many bytes of how many are there, and says whether to go on.
pub(super) type Progress<'a> = dyn FnMut(u64, Option<u64>) -> ControlFlow<()> + Send + 'a;

impl Download<'_> {
    /// Fetches the file and checks it.
    pub(super) async fn run(&self, progress: &mut Progress<'_>) -> Result<(), FetchError> {
        let mut sink = Sink::new(self);
        match self.location {
            Location::File(path) => sink.copy(path, progress)?,
            Location::Web(_) => self.receive(&mut sink, progress).await?,
        }
        sink.check()
    }

    async fn receive(&self, sink: &mut Sink<'_>, progress: &mut Progress<'_>) -> Result<(), FetchError> {
        let mut failures = 0;
        loop {
            match self.receive_part(sink, progress).await {
                Err(error) if error.is_passing() && failures < RETRIES => {
                    failures += 1;
                    let cause = &error as &dyn Error;
                    tracing::info!(location = %self.location, done = sink.done, error = cause, "trying again");
                    tokio::time::sleep(PAUSE * failures).await;
                    if progress(sink.done, self.size).is_break() {
                        return Err(FetchError::Cancelled);
                    }
                }
                ended => return ended,
            }
        }
    }

    /// Receives from where the last connection ended, up to the end or a failure.
    async fn receive_part(&self, sink: &mut Sink<'_>, progress: &mut Progress<'_>) -> Result<(), FetchError> {
        let response = get(self.location, sink.done, self.said).await?;
        match (response.status(), first_byte(&response)) {
            (StatusCode::PARTIAL_CONTENT, Some(first)) if first == sink.done => {}
            (StatusCode::PARTIAL_CONTENT, _) => return Err(FetchError::OtherPart),
            _ => sink.begin_anew(),
        }
        let length = response.headers().get(header::CONTENT_LENGTH);
        let length = length.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        let total = length.map(|length| sink.done.saturating_add(length));
        if total.is_some_and(|total| total > sink.limit) {
            return Err(FetchError::TooLong { limit: sink.limit });
        }
        let (mut body, mut heard) = (response.into_body(), Instant::now());
        loop {
            if progress(sink.done, total.or(self.size)).is_break() {
                return Err(FetchError::Cancelled);
            }
            match timeout(GLANCE, body.frame()).await {
                Err(_) if heard.elapsed() > SILENCE => return Err(FetchError::Silent),
                Err(_) => continue,
                Ok(None) if total.is_some_and(|total| sink.done < total) => {
                    return Err(FetchError::broken("the file is cut off"));
                }
                Ok(None) => return Ok(()),
                Ok(Some(frame)) => {
                    heard = Instant::now();
                    let frame = frame.map_err(FetchError::broken)?;
                    sink.put(frame.data_ref().map_or(&[][..], |data| data))?;
                }
            }
        }
    }
}

/// The file that an image is written to, and its digest.
struct Sink<'a> {
    wanted: &'a Download<'a>,
    context: aws_lc_rs::digest::Context,
    done: u64,
    limit: u64,
}

impl<'a> Sink<'a> {
    fn new(wanted: &'a Download<'a>) -> Self {
        let limit = wanted.size.unwrap_or(IMAGE_MAX).min(IMAGE_MAX);
        Self { wanted, context: wanted.checksum.context(), done: 0, limit }
    }

    fn begin_anew(&mut self) {
        // What is there is written over, and the same limit holds for what is written.
        (self.context, self.done) = (self.wanted.checksum.context(), 0);
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), FetchError> {
        if bytes.len() as u64 > self.limit - self.done {
            return Err(FetchError::TooLong { limit: self.limit });
        }
        let written = self.wanted.file.write_all_at(bytes, self.done);
        written.map_err(|source| FetchError::File { path: "the downloaded file".into(), source })?;
        self.context.update(bytes);
        self.done += bytes.len() as u64;
        Ok(())
    }

    fn copy(&mut self, path: &Path, progress: &mut Progress<'_>) -> Result<(), FetchError> {
        let failed = |source| FetchError::File { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(failed)?;
        let total = file.metadata().map_err(failed)?.len();
        let mut buffer = vec![0; CHUNK];
        loop {
            match file.read(&mut buffer).map_err(failed)? {
                0 => return Ok(()),
                count => self.put(&buffer[..count])?,
            }
            if progress(self.done, Some(total)).is_break() {
                return Err(FetchError::Cancelled);
            }
        }
    }

    /// Compares the checksum, and cuts off what an earlier, longer try may have left.
    fn check(self) -> Result<(), FetchError> {
        let (expected, found) = (self.wanted.checksum.to_string(), Checksum::of(self.context).to_string());
        if expected != found {
            return Err(FetchError::Checksum { expected, found });
        }
        let cut = self.wanted.file.set_len(self.done);
        cut.map_err(|source| FetchError::File { path: "the downloaded file".into(), source })
    }
}

/// First byte of a part, from `Content-Range: bytes FIRST-LAST/LENGTH` (RFC 9110, 14.4).
fn first_byte(response: &Response<Incoming>) -> Option<u64> {
    let range = response.headers().get(header::CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split_once('-')?.0.parse().ok()
}

/// Requests a file from byte `from` on. The answer is a success; it may be the whole file all the same.
async fn get(location: &Location, from: u64, said: Said<'_>) -> Result<Response<Incoming>, FetchError> {
    let (mut location, mut said) = (location.clone(), said);
    for _ in 0..=REDIRECTIONS {
        let Location::Web(address) = &location else {
            return Err(FetchError::Address { text: location.to_string() });
        };
        let response = timeout(SILENCE, ask(address, from, said)).await.map_err(|_| FetchError::Silent)??;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let header = |name| response.headers().get(name).and_then(|next| next.to_str().ok());
        match header(header::LOCATION) {
            // A server to which another one redirects knows from the address who asks.
            Some(next) if status.is_redirection() => {
                (location, said.authorization) = (location.redirected(next)?, None)
            }
            _ if status == StatusCode::UNAUTHORIZED => {
                let challenge = header(header::WWW_AUTHENTICATE).unwrap_or_default().to_owned();
                return Err(FetchError::Unauthorized { challenge });
            }
            _ => return Err(FetchError::Status { status }),
        }
    }
    Err(FetchError::Redirections)
}

async fn ask(address: &Uri, from: u64, said: Said<'_>) -> Result<Response<Incoming>, FetchError> {
    let host = address.host().unwrap_or_default().to_owned();
    let route = proxy::connect(&proxy::PROXIES, address).await;
    send(address, (from, said), route.map_err(|source| FetchError::Connect { host, source })?).await
}

async fn send(
    address: &Uri,
    (from, said): (u64, Said<'_>),
    route: Route,
) -> Result<Response<Incoming>, FetchError> {
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(route.stream)).await.map_err(FetchError::broken)?;
    // The task ends with the body; its error reaches the reader too.
    tokio::spawn(connection);
    let host = address.authority().map_or("", |place| place.as_str());
    let mut request = Request::builder().uri(route.target).header(header::HOST, host);
    if let Some(headers) = request.headers_mut() {
        headers.extend(route.headers);
    }
    request = request.header(header::USER_AGENT, concat!("whimbrel/", env!("CARGO_PKG_VERSION")));
    if let Some(accept) = said.accept {
        request = request.header(header::ACCEPT, accept);
    }
    if let Some(authorization) = said.authorization {
        request = request.header(header::AUTHORIZATION, authorization.header());
    }
    if from > 0 {
        request = request.header(header::RANGE, format!("bytes={from}-"));
    }
    let request = request.body(Empty::<Bytes>::new()).map_err(FetchError::broken)?;
    sender.send_request(request).await.map_err(FetchError::broken)
}

#[cfg(test)]
#[path = "download_tests.rs"]
mod tests;
