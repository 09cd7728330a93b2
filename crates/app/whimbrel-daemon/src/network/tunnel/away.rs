//! Away end of a tunnel: the ports of a machine that runs here, and the connection to the host that has its
//! network.
//!
//! Without a connection the machine's frames are dropped, as with a pulled cable, and connecting is retried
//! at intervals that grow to a few seconds. After each connect the machine is announced at home.

use super::{
    OpenEnd, address_of, lock,
    protocol::{Close, CloseCall, Open, OpenCall},
    records::CloseRecord,
    transport::WireTransport,
};
use crate::{core::error::DaemonError, daemon::Daemon, machine::record::Record, server::peer_rpc};
use bytes::Bytes;
use std::{
    sync::{Arc, Mutex, Weak},
    time::Duration,
};
use tokio::{runtime::Handle, task::JoinHandle};
use whimbrel_api::TunnelInfo;
use whimbrel_core::{HostName, MachineName, error_chain};
use whimbrel_migrate::protocol::HomeNetwork;
use whimbrel_net::{Port, tunnel::Relay};
use whimbrel_vm::{ConnectTunnel, NetworkPort, RunningError, Tunnel, TunnelView};
use whimbrel_wire::{CallError, Connection};

/// First and longest interval between attempts to connect.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// Longest interval between attempts to tell a home host that it may end a tunnel; nobody waits for that.
const NOTIFY_RETRY_MAX: Duration = Duration::from_secs(60);
/// Time limit for the home host to create its devices.
const PATIENCE: Duration = Duration::from_secs(20);

struct AwayEnd {
    connection_task: Arc<ConnectionTask>,
    runtime: Handle,
    task: Mutex<Option<JoinHandle<()>>>,
}

struct ConnectionTask {
    host: Weak<Daemon>,
    name: MachineName,
    tunnel: HomeNetwork,
    relay: Arc<Relay>,
    ports: Vec<Weak<Port>>,
    view: TunnelView,
}

impl AwayEnd {
    /// The end at these ports of the machine `name`. Opening it connects it.
    fn new(
        host: &Daemon,
        name: &MachineName,
        tunnel: HomeNetwork,
        ports: &mut [NetworkPort],
    ) -> Result<Self, RunningError> {
        let sockets = ports.iter_mut().map(|port| port.take_pipe_end().map(Into::into)).collect();
        let relay = Relay::start(sockets, None);
        let failed = |source| RunningError::Port { port: "tunnel".to_owned(), source };
        let relay = relay.map_err(|error| failed(Box::new(error).into()))?;
        let info = TunnelInfo { home: tunnel.home.clone(), away: None, connected: false, reason: None };
        let keeper = ConnectionTask {
            host: host.me.clone(),
            name: name.clone(),
            tunnel,
            relay: Arc::new(relay),
            ports: ports.iter().map(NetworkPort::port).collect(),
            view: TunnelView::new(info),
        };
        let (keeper, runtime) = (Arc::new(keeper), host.runtime.clone());
        Ok(Self { connection_task: keeper, runtime, task: Mutex::default() })
    }
}

impl Tunnel for AwayEnd {
    fn open(&self) {
        let keeper = self.connection_task.clone();
        lock(&self.task)
            .get_or_insert_with(|| self.runtime.spawn(async move { keeper.keep_connected().await }));
    }

    fn close(&self) {
        lock(&self.task).take().into_iter().for_each(|task| task.abort());
        self.connection_task.disconnect(None);
    }

    fn view(&self) -> TunnelView {
        self.connection_task.view.clone()
    }
}

impl Drop for AwayEnd {
    fn drop(&mut self) {
        self.close();
    }
}

impl ConnectionTask {
    async fn keep_connected(&self) {
        let mut pause = RETRY_MIN;
        loop {
            let reason = match self.connect().await {
                Ok(connection) => {
                    pause = RETRY_MIN;
                    let reason = connection.closed().await.to_string();
                    tracing::info!(machine = %self.name, home = %self.tunnel.home, reason, "a tunnel lost its connection");
                    reason
                }
                Err(reason) => reason,
            };
            self.disconnect(Some(reason));
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_MAX);
        }
    }

    /// Connects, has the home end opened, and lets frames pass.
    async fn connect(&self) -> Result<Connection, String> {
        let connection = connect(&self.host, &self.tunnel.home).await?;
        let host = self.host.upgrade().ok_or("the daemon is stopping")?;
        // Before the home end is opened, as its first frames come at once.
        let end = OpenEnd { relay: self.relay.clone(), peer: address_of(connection.peer()) };
        lock(&host.tunnels.ends).insert(self.tunnel.id, end);
        let open = Open { id: self.tunnel.id, name: self.name.clone(), capsule: self.tunnel.capsule };
        let opened = connection.request::<OpenCall>(&open, Bytes::new());
        match tokio::time::timeout(PATIENCE, opened).await {
            Ok(Ok(_)) => {}
            Ok(Err(CallError::Refused { source })) => return Err(source.text),
            Ok(Err(error)) => return Err(error_chain(&error)),
            Err(_) => return Err("the home host does not answer".to_owned()),
        }
        let (id, runtime) = (self.tunnel.id, host.runtime.clone());
        self.relay.set_transport(Some(Box::new(WireTransport {
            id,
            connection: connection.clone(),
            runtime,
        })));
        self.view.set(true, None);
        // No bridge at home knows yet where to send the machine's frames.
        self.ports.iter().filter_map(Weak::upgrade).for_each(|port| port.announce());
        tracing::info!(machine = %self.name, home = %self.tunnel.home, "a tunnel is open");
        Ok(connection)
    }

    fn disconnect(&self, reason: Option<String>) {
        self.relay.set_transport(None);
        self.view.set(false, reason);
        if let Some(host) = self.host.upgrade() {
            host.tunnels.remove_end(self.tunnel.id);
        }
    }
}

/// Makes a separate connection, as frames must not wait behind pages.
pub(crate) async fn connect(host: &Weak<Daemon>, to: &HostName) -> Result<Connection, String> {
    let (host, to) = (host.upgrade().ok_or("the daemon is stopping")?, to.clone());
    let connected = tokio::task::spawn_blocking(move || peer_rpc::connect_separately(&host, &to)).await;
    connected.map_err(|_| "the daemon failed".to_owned())?.map_err(|error| error_chain(&error))
}

impl Daemon {
    /// The tunnel of a machine of this record while it runs here, if its network is elsewhere.
    pub(crate) fn away_tunnel<'a>(&self, record: &'a Record) -> Option<&'a HomeNetwork> {
        record.tunnel.as_ref().filter(|tunnel| tunnel.home != self.name)
    }

    /// Makes the away end for a machine of this record, if its network is on another host.
    pub(crate) fn away_end(&self, record: &Record) -> Option<ConnectTunnel> {
        let tunnel = self.away_tunnel(record)?.clone();
        let (host, name) = (self.me.clone(), record.name.clone());
        Some(Box::new(move |ports| {
            let stopping =
                || RunningError::Port { port: "tunnel".to_owned(), source: "the daemon is stopping".into() };
            let host = host.upgrade().ok_or_else(stopping)?;
            Ok(Box::new(AwayEnd::new(&host, &name, tunnel, ports)?))
        }))
    }

    /// Ends the tunnel of this record's machine. The home host is told as soon as it can be reached, if need
    /// be by a later daemon.
    pub(crate) fn leave_home(&self, record: &mut Record) {
        record.tunnel.take().into_iter().for_each(|tunnel| self.leave_tunnel(tunnel));
    }

    pub(crate) fn leave_tunnel(&self, tunnel: HomeNetwork) {
        if tunnel.home == self.name {
            return self.tunnels.end(tunnel.id);
        }
        let note = CloseRecord { id: tunnel.id, home: tunnel.home };
        if let Err(error) = self.tunnels.records.put_close(&note) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "could not record that a home host must end a tunnel");
        }
        self.start_notifying_home(note);
    }

    /// Continues to tell home hosts what an earlier daemon could not.
    pub(crate) fn notify_homes(&self) {
        self.tunnels.records.closes().into_iter().for_each(|note| self.start_notifying_home(note));
    }

    fn start_notifying_home(&self, note: CloseRecord) {
        let host = self.me.clone();
        self.runtime.spawn(async move {
            let mut pause = RETRY_MIN;
            while !notify_home(&host, &note).await {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(NOTIFY_RETRY_MAX);
            }
            host.upgrade().into_iter().for_each(|host| host.tunnels.records.remove_close(note.id));
        });
    }
}

/// Tells the home host that it may end a tunnel. True if it knows now, or is no longer trusted.
async fn notify_home(host: &Weak<Daemon>, note: &CloseRecord) -> bool {
    let Some(strong) = host.upgrade() else { return false };
    if let Err(DaemonError::Untrusted { .. }) = strong.route(&note.home) {
        return true;
    }
    drop(strong);
    let Ok(connection) = connect(host, &note.home).await else { return false };
    let close = Close { id: note.id };
    let told = connection.request::<CloseCall>(&close, Bytes::new());
    matches!(tokio::time::timeout(PATIENCE, told).await, Ok(Ok(_) | Err(CallError::Refused { .. })))
}
