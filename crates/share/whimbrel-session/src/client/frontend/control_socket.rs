//! The control socket of a mount: requests of `whimbrel session`, one line of JSON each way. Before the
//! response to one that takes long there may be lines of progress; who goes away cancels it.
//!
//! The socket is in the cache's directory, which only its owner may enter, and has mode 0600. A client must
//! be that user or root. Requests are bounded.

use super::nbd_exports::{ExportStatus, NbdExports};
use crate::client::{
    content::warm_files::WarmProgress,
    session::{Session, SessionStatus},
};
use crate::proto::RelPath;
use serde::{Deserialize, Serialize};
use std::{
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{Arc, mpsc::Sender},
    thread::JoinHandle,
    time::{Duration, Instant},
};
use whimbrel_core::error_chain;

/// Longest request in bytes.
const MAX_REQUEST: u64 = 64 << 10;
/// Longest response in bytes.
const MAX_RESPONSE: u64 = 16 << 20;
/// Time limit of a client: a write-back may take long.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(3600);

/// Time between lines of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

/// Pause after a failed accept, so that it does not spin.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Requests to a mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "verb")]
pub enum Request {
    /// Report the status.
    Show,
    /// Change a setting.
    Set {
        /// Name of the setting.
        name: String,
        /// New value of the setting.
        value: String,
    },
    /// Write everything back.
    Flush,
    /// Drop cached names, attributes and unmodified data.
    Invalidate,
    /// Write everything back, unmount and end. If something cannot be written back, the session continues,
    /// unless the rest is to be left in the cache for the next session.
    End {
        /// End even if something cannot be written back.
        #[serde(default)]
        leave: bool,
    },
    /// Start or stop serving a file over NBD.
    Nbd {
        /// Path of the file in the session's directory.
        file: String,
        /// Socket to listen on; none stops the export.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        socket: Option<PathBuf>,
    },
    /// Fetch a file, or all files below a directory.
    Warm {
        /// Path in the session's directory.
        path: String,
    },
    /// Fetch them, and have their content stay in the cache.
    Pin {
        /// Path in the session's directory.
        path: String,
    },
    /// End pins at or below a path.
    Unpin {
        /// Path in the session's directory.
        path: String,
    },
}

/// Response to a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Response {
    /// Reason why the request failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Directory of the mount.
    pub mount: PathBuf,
    /// Directory of the cache; empty if the mount is of an older version.
    #[serde(default)]
    pub cache: PathBuf,
    /// File of the key of the cache, if that is encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_key: Option<PathBuf>,
    /// Process id of the mount.
    pub pid: u32,
    /// Status of the session.
    pub status: SessionStatus,
    /// Files served over NBD.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exports: Vec<ExportStatus>,
    /// What is in the cache of the files that were fetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmed: Option<WarmProgress>,
}

/// A line of an answer.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Response(Box<Response>),
    Progress(WarmProgress),
}

/// A request to a mount failed, or its socket could not be created.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}", path.display())]
pub struct ControlError {
    /// `listen on` or `ask`.
    pub action: &'static str,
    /// Path of the socket.
    pub path: PathBuf,
    /// Cause reported by the system.
    pub source: io::Error,
}

/// Control server of a mount. Dropping it removes the socket and ends all NBD exports.
pub struct Control {
    path: PathBuf,
    exports: Arc<NbdExports>,
    listener: Arc<UnixListener>,
    listening: Option<JoinHandle<()>>,
}

impl Drop for Control {
    fn drop(&mut self) {
        // The socket may be gone already.
        let _ = fs::remove_file(&self.path);
        // Wakes the accepting thread, which then gets an error.
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
        if let Some(listening) = self.listening.take() {
            // A thread that panicked does not accept either.
            let _ = listening.join();
        }
        self.exports.end_all();
    }
}

impl Control {
    /// Listens on `path`. A request to end is answered after it was sent to `ended`.
    pub fn start(
        path: &Path,
        session: Session,
        mount: PathBuf,
        ended: Sender<()>,
    ) -> Result<Self, ControlError> {
        let failed = |source| ControlError { action: "listen on", path: path.to_owned(), source };
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(failed)?;
        }
        // A socket that answers belongs to another session of this name.
        if UnixStream::connect(path).is_ok() {
            return Err(failed(io::ErrorKind::AddrInUse.into()));
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
        let exports = Arc::new(NbdExports::new(session.clone()));
        let asked = ControlServer { session, mount, ended, exports: exports.clone() };
        let listener = Arc::new(listener);
        let accepting = listener.clone();
        let listening = std::thread::spawn(move || asked.listen(&accepting));
        Ok(Self { path: path.to_owned(), exports, listener, listening: Some(listening) })
    }

    /// Ends all NBD exports, so that no client writes any more.
    pub fn end_exports(&self) {
        self.exports.end_all();
    }
}

/// State that requests refer to.
#[derive(Clone)]
struct ControlServer {
    session: Session,
    mount: PathBuf,
    ended: Sender<()>,
    exports: Arc<NbdExports>,
}

impl ControlServer {
    fn listen(self, listener: &UnixListener) {
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    let asked = self.clone();
                    std::thread::spawn(move || {
                        if let Err(error) = asked.answer(&stream) {
                            tracing::debug!(%error, "cannot answer a control request");
                        }
                    });
                }
                // The socket was shut down.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
                // The process may be out of descriptors.
                Err(_) => std::thread::sleep(ACCEPT_RETRY_PAUSE),
            }
        }
    }

    fn answer(&self, stream: &UnixStream) -> io::Result<()> {
        // Not with rustix: a process in another PID namespace has the number 0 here, which rustix rejects.
        let peer = nix::sys::socket::getsockopt(stream, nix::sys::socket::sockopt::PeerCredentials)?;
        let own = rustix::process::geteuid().as_raw();
        if peer.uid() != own && peer.uid() != 0 {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut line = String::new();
        BufReader::new(stream.take(MAX_REQUEST)).read_line(&mut line)?;
        let mut warmed = None;
        let error = match serde_json::from_str(&line) {
            Err(error) => Some(error.to_string()),
            Ok(Request::Show) => None,
            Ok(Request::Set { name, value }) => self.session.set(&name, &value).err(),
            Ok(Request::Flush) => {
                self.session.flush().err().map(|errno| format!("not everything is written back: {errno}"))
            }
            Ok(Request::Invalidate) => self.session.invalidate().err().map(|errno| errno.to_string()),
            Ok(Request::End { leave }) => end(&self.session, leave, &self.ended),
            Ok(Request::Nbd { file, socket: Some(socket) }) => self.exports.start(&file, &socket).err(),
            Ok(Request::Nbd { file, socket: None }) => self.exports.end(&file).err(),
            Ok(Request::Warm { path }) => self.warm(&path, false, stream).map(|now| warmed = Some(now)).err(),
            Ok(Request::Pin { path }) => self.warm(&path, true, stream).map(|now| warmed = Some(now)).err(),
            Ok(Request::Unpin { path }) => {
                let ended = path_of(&path)
                    .and_then(|path| self.session.unpin(&path).map_err(|error| error_chain(&error)));
                ended.err()
            }
        };
        let response = Response {
            error,
            mount: self.mount.clone(),
            cache: self.session.cache_dir().to_owned(),
            cache_key: self.session.cache_key().map(Path::to_owned),
            pid: std::process::id(),
            status: self.session.status(),
            exports: self.exports.status(),
            warmed,
        };
        let mut bytes = serde_json::to_vec(&response)?;
        bytes.push(b'\n');
        let mut stream = stream;
        stream.write_all(&bytes)
    }

    /// Fetches files while the client reads the progress; the error is a text.
    fn warm(&self, path: &str, pin: bool, mut stream: &UnixStream) -> Result<WarmProgress, String> {
        let path = path_of(path)?;
        if pin {
            self.session.pin(&path).map_err(|error| error_chain(&error))?;
        }
        let mut told = Instant::now();
        let mut report = |now: WarmProgress| {
            if told.elapsed() < PROGRESS_INTERVAL {
                return true;
            }
            told = Instant::now();
            let line = serde_json::to_vec(&now).unwrap_or_default();
            stream.write_all(&[&line[..], b"\n"].concat()).is_ok()
        };
        self.session.warm(&path, &mut report).map_err(|error| error_chain(&error))
    }
}

/// A path in the session's directory, `.` or `/` for the directory itself.
fn path_of(text: &str) -> Result<RelPath, String> {
    let inner = text.trim_matches('/');
    let inner = if inner == "." { "" } else { inner };
    RelPath::new(inner.as_bytes()).map_err(|error| format!("{text:?}: {error}"))
}

/// Ends a session; returns why it does not end. What `leave` permits to stay unsent is in the status.
fn end(session: &Session, leave: bool, ended: &Sender<()>) -> Option<String> {
    let flushed = session.flush();
    if flushed.is_ok() || leave {
        // The receiver ends the mount, unless that has happened.
        let _ = ended.send(());
        return None;
    }
    flushed.err().map(|errno| format!("{errno}; the session continues with the unsent rest"))
}

/// Sends a request to the mount that listens on `path`.
pub fn send_request(path: &Path, request: &Request) -> Result<Response, ControlError> {
    send_request_with_progress(path, request, &mut |_| {})
}

/// Sends a request to the mount that listens on `path`, and calls `show` with the progress of a long one.
pub fn send_request_with_progress(
    path: &Path,
    request: &Request,
    show: &mut dyn FnMut(WarmProgress),
) -> Result<Response, ControlError> {
    exchange(path, request, RESPONSE_TIMEOUT, show)
}

/// Asks the mount that listens on `path` for its status, for at most this time.
pub fn ask_status(path: &Path, patience: Duration) -> Result<Response, ControlError> {
    exchange(path, &Request::Show, patience, &mut |_| {})
}

fn exchange(
    path: &Path,
    request: &Request,
    patience: Duration,
    show: &mut dyn FnMut(WarmProgress),
) -> Result<Response, ControlError> {
    let failed = |source| ControlError { action: "ask", path: path.to_owned(), source };
    let mut stream = UnixStream::connect(path).map_err(failed)?;
    stream.set_read_timeout(Some(patience)).map_err(failed)?;
    let mut line = serde_json::to_vec(request).map_err(|error| failed(error.into()))?;
    line.push(b'\n');
    stream.set_write_timeout(Some(patience)).map_err(failed)?;
    stream.write_all(&line).map_err(failed)?;
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        reader.by_ref().take(MAX_RESPONSE).read_until(b'\n', &mut line).map_err(failed)?;
        match serde_json::from_slice(&line).map_err(|error| failed(error.into()))? {
            Line::Progress(now) => show(now),
            Line::Response(response) => return Ok(*response),
        }
    }
}

/// Control sockets in a directory, of live and dead mounts.
pub fn sockets(dir: &Path) -> Vec<PathBuf> {
    let Ok(found) = fs::read_dir(dir) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = found
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "sock"))
        .collect();
    paths.sort();
    paths
}
