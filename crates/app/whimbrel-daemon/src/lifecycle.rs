//! Start and stop of the daemon.

use crate::{
    core::{directories::Directories, error::DaemonError},
    daemon::Daemon,
    server::{http, peer_rpc},
};
use std::{
    fs::{self, File, TryLockError},
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::net::{TcpListener, UnixListener};
use whimbrel_core::{HostName, MachineName};

/// Time for operations under way to clean up when the daemon is told to stop.
const PATIENCE: Duration = Duration::from_secs(20);

/// Options of the daemon.
#[derive(Debug, Clone)]
pub struct DaemonOptions {
    /// Name of this host among its peers.
    pub name: HostName,
    /// Address for connections of other hosts; none accepts none.
    pub listen: Option<SocketAddr>,
    /// Directory for data that survives a reboot: store, machines, key.
    pub data: PathBuf,
    /// Directory on a tmpfs for files that survive the daemon: guest memory, sockets.
    pub run_dir: PathBuf,
    /// Unix socket of the HTTP API.
    pub socket: PathBuf,
    /// Machines whose guests may send frames of other stations: routers and bridges.
    pub unfiltered: Vec<MachineName>,
}

/// Serves until SIGTERM or SIGINT. Machines keep running; the next daemon adopts them.
pub fn run(options: DaemonOptions) -> Result<(), DaemonError> {
    // Files of the daemon have memory and disks of guests in them.
    whimbrel_wire::private_dir::restrict_new_files();
    let layout = Directories::create(&options.data, &options.run_dir)?;
    let _lock = lock(&layout)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|source| DaemonError::io("start threads for", &options.data, source))?;
    let (name, unfiltered) = (options.name.clone(), options.unfiltered.clone());
    let host = Daemon::open(name, options.listen, layout, unfiltered, runtime.handle().clone())?;
    host.recover_machines()?;
    host.start_uploads();
    host.start_naming_read_capsules();
    host.start_pinning();
    host.start_networks();
    host.start_freeing_memory()?;
    let served = runtime.block_on(serve(&options, host.clone()));
    host.close();
    host.operations().cancel_all(PATIENCE);
    host.cleanup.wait(PATIENCE);
    host.detach_machines();
    runtime.shutdown_timeout(Duration::from_secs(2));
    let _ = fs::remove_file(&options.socket);
    served
}

/// Allows one daemon for each data directory. The lock ends with the process, however that ends.
fn lock(layout: &Directories) -> Result<File, DaemonError> {
    let path = layout.data().join("lock");
    let file = File::create(&path).map_err(|source| DaemonError::io("create", &path, source))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(DaemonError::AlreadyServed { path: layout.data().to_owned() }),
        Err(TryLockError::Error(source)) => Err(DaemonError::io("lock", &path, source)),
    }
}

async fn serve(options: &DaemonOptions, host: Arc<Daemon>) -> Result<(), DaemonError> {
    let api = bind_api(&options.socket).await?;
    if let Some(address) = options.listen {
        let path = PathBuf::from(address.to_string());
        let listener =
            TcpListener::bind(address).await.map_err(|source| DaemonError::io("listen on", &path, source))?;
        peer_rpc::serve(host.clone(), listener);
    }
    tracing::info!(host = %options.name, socket = %options.socket.display(), "serving");
    let served = axum::serve(api, http::router(host)).with_graceful_shutdown(asked_to_stop());
    tokio::select! {
        served = served => served.map_err(|source| DaemonError::io("serve", &options.socket, source)),
        // Event streams would delay a graceful shutdown until their operations end.
        () = async { asked_to_stop().await; tokio::time::sleep(Duration::from_millis(200)).await } => Ok(()),
    }
}

/// The API socket: for its owner only. Never replaces one on which another daemon listens.
async fn bind_api(path: &Path) -> Result<UnixListener, DaemonError> {
    let io = |action| move |source| DaemonError::io(action, path, source);
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(io("create the directory of"))?;
    }
    if tokio::net::UnixStream::connect(path).await.is_ok() {
        return Err(DaemonError::AlreadyServed { path: path.to_owned() });
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io("replace")(error)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(io("listen on"))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(io("restrict"))?;
    Ok(listener)
}

async fn asked_to_stop() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        tracing::error!("cannot receive signals; stop the daemon with SIGKILL");
        return std::future::pending().await;
    };
    tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
}
