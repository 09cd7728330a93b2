//! Start and stop of the daemon.

use crate::{
    core::{directories::Directories, error::DaemonError, master_key::KeySource},
    daemon::Daemon,
    image::{ContainerSettings, ImageSource, ImageSources},
    server::{
        access::Access,
        listen::{self, Api},
        metrics, peer_rpc,
    },
};
use std::{
    fs::{self, File, TryLockError},
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use whimbrel_api::Role;
use whimbrel_core::{Accel, HostName, MachineName};
use whimbrel_store::Store;
use whimbrel_vm::runtime_dir;
use whimbrel_wire::web_tls::{Acceptor, ServerCertificate};

/// Time for operations under way to clean up when the daemon is told to stop.
const PATIENCE: Duration = Duration::from_secs(20);

/// Time for which the lock of a daemon that was killed may outlive it: a child that it was just starting has
/// the file until it is another program.
const LAST_BREATH: Duration = Duration::from_secs(2);
const LOCK_POLL: Duration = Duration::from_millis(20);

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
    /// Executor of guest instructions; none uses KVM if the probe finds that it works.
    pub accel: Option<Accel>,
    /// Machines whose guests may send frames of other stations: routers and bridges.
    pub unfiltered: Vec<MachineName>,
    /// Where the master key of the store comes from; none if the store is not encrypted.
    pub encryption: Option<KeySource>,
    /// Pools to show beside those that are used, each as a manager prints it.
    pub pools: Vec<String>,
    /// Sources of images.
    pub image_sources: Vec<ImageSource>,
    /// What machines of container images get beside their files.
    pub containers: ContainerSettings,
    /// Address of the HTTP API for users elsewhere, with tokens, over TLS.
    pub api_listen: Option<SocketAddr>,
    /// Another address of the API and its web page. Without TLS on loopback, else with it.
    pub web: Option<SocketAddr>,
    /// Files of the API's certificate chain and its key, in PEM; none makes a certificate of the host's own.
    pub api_certificate: Option<(PathBuf, PathBuf)>,
    /// Groups of this host and their roles on the socket.
    pub api_groups: Vec<(String, Role)>,
    /// Address at which anybody may read the metrics, without TLS or a token; none has them in the API only.
    pub metrics: Option<SocketAddr>,
    /// Whether a process for each machine serves it while it is at rest, and from the end of this daemon,
    /// also if it is killed, to the start of the next.
    pub machine_processes: bool,
}

/// Serves until SIGTERM or SIGINT. Machines keep running; the next daemon has them.
pub fn run(options: DaemonOptions) -> Result<(), DaemonError> {
    // Files of the daemon have memory and disks of guests in them.
    whimbrel_wire::private_dir::restrict_new_files();
    if let Some(accel) = options.accel {
        whimbrel_qemu::choose_accel(accel);
    }
    let layout = Directories::create(&options.data, &options.run_dir)?;
    let _lock = lock(&layout)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|source| DaemonError::io("start threads for", &options.data, source))?;
    let images = ImageSources::new(options.image_sources.clone(), options.containers.clone())?;
    let (name, unfiltered) = (options.name.clone(), options.unfiltered.clone());
    let key = options.encryption.as_ref().map(|source| source.read(&options.data)).transpose()?;
    if key.is_some() && Store::is_plain(&layout.store()) {
        // Processes of machines could not read what will be sealed; the machines are adopted. While they pin
        // what they read, the store does not become encrypted.
        runtime_dir::end_machine_processes(&layout.runtime_dirs())?;
    }
    let place = (name, options.listen);
    let host = Daemon::open(place, layout, unfiltered, images, key, runtime.handle().clone())?;
    host.add_pools(&options.pools)?;
    // Where `whimbrel mount` makes them for root: beside the API's.
    if let Some(folder) = options.socket.parent() {
        host.session_sockets.get_or_init(|| folder.join("sessions"));
    }
    host.recover_machines(options.machine_processes)
        .inspect_err(|_| host.detach_machines(options.machine_processes))?;
    host.start_uploads();
    host.finish_renames();
    host.start_naming_read_capsules();
    host.start_pinning();
    host.start_networks();
    host.start_freeing_memory()?;
    host.start_machines_by_themselves();
    host.start_schedules();
    host.start_asking_addresses();
    host.start_machine_processes(options.machine_processes)?;
    let served = runtime.block_on(serve(&options, host.clone()));
    host.close();
    host.operations().cancel_all(PATIENCE);
    host.cleanup.wait(PATIENCE);
    host.detach_machines(options.machine_processes);
    runtime.shutdown_timeout(Duration::from_secs(2));
    served
}

/// Allows one daemon for each data directory. The lock ends with the process, however that ends.
fn lock(layout: &Directories) -> Result<File, DaemonError> {
    let path = layout.data().join("lock");
    let file = File::create(&path).map_err(|source| DaemonError::io("create", &path, source))?;
    let deadline = Instant::now() + LAST_BREATH;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(LOCK_POLL),
            Err(TryLockError::WouldBlock) => {
                return Err(DaemonError::AlreadyServed { path: layout.data().to_owned() });
            }
            Err(TryLockError::Error(source)) => return Err(DaemonError::io("lock", &path, source)),
        }
    }
}

async fn serve(options: &DaemonOptions, host: Arc<Daemon>) -> Result<(), DaemonError> {
    let access = Access::open(&host.directories, options.api_groups.clone())?;
    let socket = listen::bind_socket(&options.socket, access.has_groups()).await?;
    // Not before it is this daemon's own: it may be that of another, for which this one makes room.
    let _file = SocketFile(&options.socket);
    if let Some(address) = options.metrics {
        let listener = listen::bind_tcp(address).await?;
        let (host, access) = (host.clone(), access.clone());
        host.clone().runtime.spawn(whimbrel_metrics::serve(listener, move || {
            let (host, access) = (host.clone(), access.clone());
            let page = tokio::task::spawn_blocking(move || metrics::page(&host, &access));
            async { page.await.unwrap_or_default() }
        }));
    }
    let api = Api::new(host.clone(), access);
    if let Some(address) = options.listen {
        peer_rpc::serve(host.clone(), listen::bind_tcp(address).await?);
    }
    serve_tcp(options, &host, &api).await?;
    tracing::info!(host = %options.name, socket = %options.socket.display(), "serving");
    tokio::select! {
        () = api.serve_socket(socket) => {}
        () = asked_to_stop() => {}
    }
    // Answers under way get out; streams would last until their operations end.
    tokio::time::sleep(Duration::from_millis(200)).await;
    Ok(())
}

/// The file of the API socket, which ends with this.
struct SocketFile<'a>(&'a Path);

impl Drop for SocketFile<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.0);
    }
}

/// Serves the API and its web page over TCP. Whoever carries a token in the clear can read it, so only
/// loopback is without TLS: no setting makes a network's address so.
async fn serve_tcp(options: &DaemonOptions, host: &Daemon, api: &Api) -> Result<(), DaemonError> {
    let (plain, web): (Vec<_>, Vec<_>) = options.web.into_iter().partition(|web| web.ip().is_loopback());
    for address in plain {
        let listener = listen::bind_tcp(address).await?;
        tracing::info!(listen = %address, "serving the web page to this host, without TLS");
        host.runtime.spawn(api.clone().serve_tcp(listener, None));
    }
    let secure: Vec<_> = options.api_listen.into_iter().chain(web).collect();
    if secure.is_empty() {
        return Ok(());
    }
    let acceptor = match acceptor(options, &secure, host) {
        Ok(acceptor) => acceptor,
        // The files are Whimbrel's own and damaged, so no setting is wrong: everything else is served.
        Err(error) if options.api_certificate.is_none() => {
            let error = &error as &dyn std::error::Error;
            tracing::error!(
                error,
                "the API and its web page are not served over TLS: restore api.crt and api.key, or move both away for new ones"
            );
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    for address in secure {
        let listener = listen::bind_tcp(address).await?;
        host.runtime.spawn(api.clone().serve_tcp(listener, Some(acceptor.clone())));
    }
    Ok(())
}

/// TLS of the API, with the certificate from files or one of the host's own, whose fingerprint is logged.
fn acceptor(
    options: &DaemonOptions,
    addresses: &[SocketAddr],
    host: &Daemon,
) -> Result<Acceptor, DaemonError> {
    let failed = |source| DaemonError::Certificate { source };
    let certificate = match &options.api_certificate {
        Some((chain, key)) => ServerCertificate::read(chain, key),
        None => {
            let own = [host.name.to_string(), "localhost".into()];
            let names = own.into_iter().chain(addresses.iter().map(|address| address.ip().to_string()));
            ServerCertificate::load_or_create(&host.directories.key_dir(), names.collect())
        }
    }
    .map_err(failed)?;
    let fingerprint = certificate.fingerprint();
    tracing::info!(listen = ?addresses, %fingerprint, "serving the API and its web page over TLS");
    certificate.acceptor().map_err(failed)
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
