//! The control socket of a mount: what `whimbrel session` asks, one line of JSON each way.
//!
//! The socket lies in the cache's folder, which only its owner may enter, has mode 0600, and who connects
//! must be that user or root. Requests are bounded.

use super::{
    nbd_exports::{ExportStatus, NbdExports},
    session::{Session, SessionStatus},
};
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
    time::Duration,
};

/// Longest request.
const MAX_REQUEST: u64 = 64 << 10;
/// Longest answer.
const MAX_RESPONSE: u64 = 16 << 20;
/// A write-back may take long; a question may not.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Pause after a failed accept, so that it does not spin.
const PAUSE: Duration = Duration::from_millis(50);

/// What can be asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "verb")]
pub enum Request {
    /// How it is.
    Show,
    /// Change a setting.
    Set {
        /// Its name.
        name: String,
        /// Its value.
        value: String,
    },
    /// Write everything back.
    Flush,
    /// Forget what is believed and clean.
    Invalidate,
    /// Write everything back, unmount and end. What cannot be written back keeps it going, unless it is to be
    /// left in the cache for the next session.
    End {
        /// End in any case.
        #[serde(default)]
        leave: bool,
    },
    /// Serve a file over NBD, or serve it no longer.
    Nbd {
        /// The file, below the session's directory.
        file: String,
        /// Where; none ends the export.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        socket: Option<PathBuf>,
    },
}

/// What is answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Response {
    /// Why it was not done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Where it is mounted.
    pub mount: PathBuf,
    /// The process.
    pub pid: u32,
    /// How it is.
    pub status: SessionStatus,
    /// Files that are served over NBD.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exports: Vec<ExportStatus>,
}

/// Asking failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}", path.display())]
pub struct ControlError {
    /// `listen on` or `ask`.
    pub action: &'static str,
    /// The socket.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// Answers questions until it is dropped. Then the socket is gone, and nothing is served over NBD any more.
pub struct Control {
    path: PathBuf,
    exports: Arc<NbdExports>,
    listener: Arc<UnixListener>,
    listening: Option<JoinHandle<()>>,
}

impl Drop for Control {
    fn drop(&mut self) {
        // Gone already is as good.
        let _ = fs::remove_file(&self.path);
        // Wakes the thread that accepts, which then sees an error.
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
        if let Some(listening) = self.listening.take() {
            // One that panicked accepts nobody either.
            let _ = listening.join();
        }
        self.exports.end_all();
    }
}

impl Control {
    /// Listens on `path`. Who asks for the end is told when `ended` has been heard.
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
        // One that answers is another session's, whose name this is.
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
        let asked = Asked { session, mount, ended, exports: exports.clone() };
        let listener = Arc::new(listener);
        let accepting = listener.clone();
        let listening = std::thread::spawn(move || asked.listen(&accepting));
        Ok(Self { path: path.to_owned(), exports, listener, listening: Some(listening) })
    }

    /// Ends what is served over NBD, so that no client writes any more.
    pub fn end_exports(&self) {
        self.exports.end_all();
    }
}

/// Whom questions are about.
#[derive(Clone)]
struct Asked {
    session: Session,
    mount: PathBuf,
    ended: Sender<()>,
    exports: Arc<NbdExports>,
}

impl Asked {
    fn listen(self, listener: &UnixListener) {
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    let asked = self.clone();
                    std::thread::spawn(move || {
                        if let Err(error) = asked.answer(&stream) {
                            tracing::debug!(%error, "a question was not answered");
                        }
                    });
                }
                // It was shut down.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
                // No descriptors are left, say.
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    fn answer(&self, stream: &UnixStream) -> io::Result<()> {
        // Not by rustix: who is in another PID namespace has the number 0 here, which it takes for none.
        let peer = nix::sys::socket::getsockopt(stream, nix::sys::socket::sockopt::PeerCredentials)?;
        let own = rustix::process::geteuid().as_raw();
        if peer.uid() != own && peer.uid() != 0 {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut line = String::new();
        BufReader::new(stream.take(MAX_REQUEST)).read_line(&mut line)?;
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
        };
        let response = Response {
            error,
            mount: self.mount.clone(),
            pid: std::process::id(),
            status: self.session.status(),
            exports: self.exports.status(),
        };
        let mut bytes = serde_json::to_vec(&response)?;
        bytes.push(b'\n');
        let mut stream = stream;
        stream.write_all(&bytes)
    }
}

/// Why a session does not end, or what it leaves behind.
fn end(session: &Session, leave: bool, ended: &Sender<()>) -> Option<String> {
    let flushed = session.flush();
    if flushed.is_ok() || leave {
        // Whoever waits for it ends the mount, unless that has happened.
        let _ = ended.send(());
    }
    let errno = flushed.err()?;
    let then = if leave {
        "the rest stays in the cache"
    } else {
        "the session goes on unless told to leave the rest"
    };
    Some(format!("{errno}; {then}"))
}

/// Asks the mount that listens on `path`.
pub fn ask(path: &Path, request: &Request) -> Result<Response, ControlError> {
    let failed = |source| ControlError { action: "ask", path: path.to_owned(), source };
    let mut stream = UnixStream::connect(path).map_err(failed)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
    let mut line = serde_json::to_vec(request).map_err(|error| failed(error.into()))?;
    line.push(b'\n');
    stream.write_all(&line).map_err(failed)?;
    let mut bytes = Vec::new();
    stream.take(MAX_RESPONSE).read_to_end(&mut bytes).map_err(failed)?;
    serde_json::from_slice(&bytes).map_err(|error| failed(error.into()))
}

/// Sockets in a folder, of mounts that live or died.
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
