//! NBD server: listens, starts a thread for each client, and stops them all, or suspends them for another
//! server.

use crate::connection::{ConnectionError, ConnectionState, Service};
use crate::handshake::Export;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::collections::HashMap;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{fs, io};
use whimbrel_block::Device;
use whimbrel_core::lock;

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

/// Parts of a suspended server, for another one, perhaps in another process.
#[derive(Debug)]
pub struct ServerParts {
    /// Socket on which clients connect.
    pub listener: UnixListener,
    /// Connections with their clients, which do not notice.
    pub connections: Vec<(UnixStream, ConnectionState)>,
}

struct Inner {
    device: Arc<dyn Device>,
    export: Export,
    options: Options,
    clients: Mutex<Clients>,
    left: Condvar,
    /// Eventfd that is readable once the server stops or is suspended.
    wake: OwnedFd,
}

#[derive(Default)]
struct Clients {
    ending: Option<Ending>,
    next_id: u64,
    connected: HashMap<u64, Connected>,
    suspended: Vec<(UnixStream, ConnectionState)>,
}

/// How a server ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Stop,
    Suspend,
}

struct Connected {
    socket: Arc<UnixStream>,
    /// Whether the handshake is over.
    has_agreed: bool,
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
    serve_parts(device, ServerParts { listener, connections: Vec::new() }, options)
}

/// Serves `device` in place of a server of the same device and export that was suspended.
///
/// # Errors
/// As [`serve`], or if a connection has a state that no server leaves.
pub fn serve_parts(device: Arc<dyn Device>, parts: ServerParts, options: Options) -> io::Result<Server> {
    let invalid = |words| io::Error::new(io::ErrorKind::InvalidInput, words);
    if options.export_name.len() > 4096 {
        return Err(invalid("the export's name is longer than 4096 bytes"));
    }
    let ServerParts { listener, connections } = parts;
    if connections.iter().any(|(_, state)| !state.is_valid()) {
        return Err(invalid("the state of a connection is invalid"));
    }
    let (name, size, read_only) = (options.export_name.clone(), device.size(), device.is_read_only());
    let export = Export { name, size, read_only };
    // A client may have left between the event and the call that accepts it.
    listener.set_nonblocking(true)?;
    let wake = eventfd(0, EventfdFlags::CLOEXEC)?;
    let (clients, left) = (Mutex::default(), Condvar::new());
    let inner = Arc::new(Inner { device, export, options, clients, left, wake });
    for (socket, state) in connections {
        inner.admit(socket, Some(state));
    }
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
        lock(&self.inner.clients).connected.len()
    }

    /// Copy of the socket on which clients connect.
    pub fn listener(&self) -> io::Result<UnixListener> {
        self.listener.try_clone()
    }

    /// Disconnects all clients and returns when their last request has ended: the device is not used
    /// afterwards. Does not flush. Close a [`SwappableDevice`](whimbrel_block::SwappableDevice) first, or
    /// this waits for its waiting requests.
    pub fn stop(self) {}

    /// Stops serving between two requests and leaves the connections open: the device is not used
    /// afterwards. Clients that are not past their handshake, or have not sent the rest of a request or
    /// read their replies after `patience`, are disconnected.
    pub fn suspend(mut self, patience: Duration) -> io::Result<ServerParts> {
        self.end_accepting(Ending::Suspend);
        let clients = lock(&self.inner.clients);
        for client in clients.connected.values().filter(|client| !client.has_agreed) {
            let _ = client.socket.shutdown(Shutdown::Both);
        }
        let some = |clients: &mut Clients| !clients.connected.is_empty();
        let waited = self.inner.left.wait_timeout_while(clients, patience, some);
        let mut clients = waited.unwrap_or_else(PoisonError::into_inner).0;
        clients.disconnect_all();
        clients = self.inner.left.wait_while(clients, some).unwrap_or_else(PoisonError::into_inner);
        let connections = std::mem::take(&mut clients.suspended);
        drop(clients);
        Ok(ServerParts { listener: self.listener.try_clone()?, connections })
    }

    /// Begins what [`Server::suspend`] does, without waiting: several servers then end their threads at once.
    pub fn begin_suspend(&self) {
        self.wake_threads(Ending::Suspend);
    }

    fn wake_threads(&self, ending: Ending) {
        lock(&self.inner.clients).ending.get_or_insert(ending);
        // Fails only after 2^64 calls.
        let _ = rustix::io::write(&self.inner.wake, &1_u64.to_ne_bytes());
    }

    /// Ends the thread that accepts clients. The socket stays as it is, as another process may have it too.
    fn end_accepting(&mut self, ending: Ending) {
        self.wake_threads(ending);
        if let Some(acceptor) = self.acceptor.take() {
            // Fails only if the thread panicked, and then it does not accept any more either.
            let _ = acceptor.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end_accepting(Ending::Stop);
        let clients = lock(&self.inner.clients);
        clients.disconnect_all();
        let some = |clients: &mut Clients| !clients.connected.is_empty();
        drop(self.inner.left.wait_while(clients, some).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Clients {
    fn disconnect_all(&self) {
        for client in self.connected.values() {
            // Fails only if the client closed it first.
            let _ = client.socket.shutdown(Shutdown::Both);
        }
    }
}

impl Inner {
    fn accept(self: &Arc<Self>, listener: &UnixListener) {
        loop {
            let mut events = [PollFd::new(&self.wake, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
            // Interrupted or failed, the next call says.
            let _ = poll(&mut events, None);
            if lock(&self.clients).ending.is_some() {
                return;
            }
            match listener.accept() {
                Ok((socket, _)) => self.admit(socket, None),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a client");
                    thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    fn admit(self: &Arc<Self>, socket: UnixStream, state: Option<ConnectionState>) {
        let Some(client) = Client::register(self, socket, state.is_some()) else {
            tracing::warn!(limit = self.options.max_connections, "too many clients: disconnected one");
            return;
        };
        let started = thread::Builder::new().name("nbd-client".to_owned()).spawn(move || client.run(state));
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
    fn register(inner: &Arc<Inner>, socket: UnixStream, has_agreed: bool) -> Option<Self> {
        let socket = Arc::new(socket);
        let mut clients = lock(&inner.clients);
        if clients.connected.len() >= inner.options.max_connections {
            return None;
        }
        let id = clients.next_id;
        clients.next_id += 1;
        clients.connected.insert(id, Connected { socket: socket.clone(), has_agreed });
        drop(clients);
        Some(Self { inner: inner.clone(), id, socket })
    }

    fn run(mut self, state: Option<ConnectionState>) {
        match self.serve(state) {
            Ok(None) => {}
            Ok(Some(left)) => self.leave(left),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::debug!(client = self.id, error, "disconnected a client");
            }
        }
    }

    fn serve(&self, state: Option<ConnectionState>) -> Result<Option<ConnectionState>, ConnectionError> {
        let Options { handshake_timeout, workers_per_connection, .. } = self.inner.options;
        let service = Service {
            device: self.inner.device.clone(),
            export: &self.inner.export,
            handshake_timeout,
            workers: workers_per_connection,
            stop: self.inner.wake.as_fd(),
        };
        let state = match state {
            Some(state) => Some(state),
            None => service.negotiate(&self.socket)?,
        };
        let Some(state) = state else { return Ok(None) };
        if let Some(client) = lock(&self.inner.clients).connected.get_mut(&self.id) {
            client.has_agreed = true;
        }
        service.serve(&self.socket, &state)
    }

    /// Leaves the connection to another server, if that is why it was stopped.
    fn leave(&mut self, state: ConnectionState) {
        let mut clients = lock(&self.inner.clients);
        if clients.ending == Some(Ending::Suspend)
            && let Ok(socket) = self.socket.try_clone()
        {
            clients.suspended.push((socket, state));
            clients.connected.remove(&self.id);
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // One that was suspended is not in the list any more.
        if let Some(client) = lock(&self.inner.clients).connected.remove(&self.id) {
            let _ = client.socket.shutdown(Shutdown::Both);
        }
        self.inner.left.notify_all();
    }
}

whimbrel_core::opaque_debug!(Server);
