//! NBD server: listens, starts a thread for each client, and stops them all.

use crate::{connection, handshake::Export};
use std::collections::HashMap;
use std::net::Shutdown;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{fs, io};
use whimbrel_block::Device;

/// Pause after a failed accept (no descriptors left), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Clients that may wait to be accepted.
const BACKLOG: i32 = 128;

/// Options of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Name of the export, at most 4096 bytes. Clients may also use the empty name.
    pub export_name: String,
    /// Most clients at a time; further ones are disconnected at once.
    pub max_connections: usize,
    /// Most threads of one client for requests that may wait; started when needed.
    pub workers_per_connection: usize,
    /// Time limit of the handshake.
    pub handshake_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            export_name: String::new(),
            max_connections: 128,
            workers_per_connection: 16,
            handshake_timeout: Duration::from_secs(10),
        }
    }
}

/// Running server, which stops when dropped.
pub struct Server {
    inner: Arc<Inner>,
    listener: Arc<UnixListener>,
    acceptor: Option<JoinHandle<()>>,
}

struct Inner {
    device: Arc<dyn Device>,
    export: Export,
    options: Options,
    clients: Mutex<Clients>,
    left: Condvar,
}

#[derive(Default)]
struct Clients {
    stopping: bool,
    next_id: u64,
    sockets: HashMap<u64, Arc<UnixStream>>,
}

/// Listens on `path`. A socket that a dead server left is replaced.
///
/// # Errors
/// `AddrInUse` if a server answers on it; others as `bind(2)`.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    bind_by(path, |path| UnixListener::bind(path))
}

/// Listens as [`bind`] does, with a socket that only this user may connect to from its first moment on.
///
/// # Errors
/// Those of [`bind`].
pub fn bind_private(path: &Path) -> io::Result<UnixListener> {
    use rustix::{fs::Mode, net};
    bind_by(path, |path| {
        let address = net::SocketAddrUnix::new(path)?;
        let flags = net::SocketFlags::CLOEXEC;
        let socket = net::socket_with(net::AddressFamily::UNIX, net::SocketType::STREAM, flags, None)?;
        // The name gets the mode that the socket has before (net/unix/af_unix.c, `unix_bind_bsd`).
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        net::bind(&socket, &address)?;
        net::listen(&socket, BACKLOG)?;
        Ok(UnixListener::from(socket))
    })
}

fn bind_by(path: &Path, bind: impl Fn(&Path) -> io::Result<UnixListener>) -> io::Result<UnixListener> {
    match bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            // A plain file refuses connections too, and must not be removed.
            let is_socket = fs::symlink_metadata(path)?.file_type().is_socket();
            let answer = UnixStream::connect(path);
            let refused = answer.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused);
            if !(is_socket && refused) {
                return Err(error);
            }
            fs::remove_file(path)?;
            bind(path)
        }
        other => other,
    }
}

/// Serves `device` to all clients of `listener`, in threads of its own.
///
/// # Errors
/// If the export name is too long or no thread can be started.
pub fn serve(device: Arc<dyn Device>, listener: UnixListener, options: Options) -> io::Result<Server> {
    if options.export_name.len() > 4096 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the export's name is longer than 4096 bytes",
        ));
    }
    let (name, size, read_only) = (options.export_name.clone(), device.size(), device.is_read_only());
    let export = Export { name, size, read_only };
    let inner = Arc::new(Inner { device, export, options, clients: Mutex::default(), left: Condvar::new() });
    let listener = Arc::new(listener);
    let acceptor = thread::Builder::new().name("nbd-accept".to_owned()).spawn({
        let (inner, listener) = (inner.clone(), listener.clone());
        move || inner.accept(&listener)
    })?;
    Ok(Server { inner, listener, acceptor: Some(acceptor) })
}

impl Server {
    /// Number of connected clients.
    pub fn connections(&self) -> usize {
        self.inner.lock().sockets.len()
    }

    /// Disconnects all clients and returns when their last request has ended: the device is not used
    /// afterwards. Does not flush. Close a [`SwappableDevice`](whimbrel_block::SwappableDevice) first, or
    /// this waits for its waiting requests.
    pub fn stop(self) {}
}

impl Drop for Server {
    fn drop(&mut self) {
        self.inner.lock().stopping = true;
        // Wakes `accept`, which then fails (`unix(7)` sockets do that on Linux).
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
        if let Some(acceptor) = self.acceptor.take() {
            // Fails only if the thread panicked, and then it does not accept any more either.
            let _ = acceptor.join();
        }
        let clients = self.inner.lock();
        for socket in clients.sockets.values() {
            let _ = socket.shutdown(Shutdown::Both);
        }
        let some = |clients: &mut Clients| !clients.sockets.is_empty();
        drop(self.inner.left.wait_while(clients, some).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: &Arc<Self>, listener: &UnixListener) {
        loop {
            let accepted = listener.accept();
            if self.lock().stopping {
                return;
            }
            match accepted {
                Ok((socket, _)) => self.admit(socket),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a client");
                    thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    fn admit(self: &Arc<Self>, socket: UnixStream) {
        let Some(client) = Client::register(self, socket) else {
            tracing::warn!(limit = self.options.max_connections, "too many clients: disconnected one");
            return;
        };
        let started = thread::Builder::new().name("nbd-client".to_owned()).spawn(move || client.run());
        if let Err(error) = started {
            tracing::warn!(%error, "cannot start a thread for a client");
        }
    }
}

/// Entry of a client in the list of connections; removed when dropped, also by a panic.
struct Client {
    inner: Arc<Inner>,
    id: u64,
    socket: Arc<UnixStream>,
}

impl Client {
    fn register(inner: &Arc<Inner>, socket: UnixStream) -> Option<Self> {
        let socket = Arc::new(socket);
        let mut clients = inner.lock();
        if clients.sockets.len() >= inner.options.max_connections {
            return None;
        }
        let id = clients.next_id;
        clients.next_id += 1;
        clients.sockets.insert(id, socket.clone());
        drop(clients);
        Some(Self { inner: inner.clone(), id, socket })
    }

    fn run(self) {
        let Options { handshake_timeout, workers_per_connection, .. } = self.inner.options;
        let (device, export) = (self.inner.device.clone(), &self.inner.export);
        let outcome =
            connection::serve(&self.socket, device, export, handshake_timeout, workers_per_connection);
        if let Err(error) = outcome {
            tracing::debug!(
                client = self.id,
                error = &error as &dyn std::error::Error,
                "disconnected a client"
            );
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Both);
        self.inner.lock().sockets.remove(&self.id);
        self.inner.left.notify_all();
    }
}
