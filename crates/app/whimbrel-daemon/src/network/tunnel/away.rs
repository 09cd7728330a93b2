//! The away end: the ports of a machine that runs here, and the way to the host that has its network.
//!
//! While there is no connection the machine's frames are dropped, as on a cable that was pulled, and one is
//! tried for again and again, ever more seldom up to a few seconds. With a new connection the machine is
//! announced at home.

use super::{
    Way, address_of, lock,
    protocol::{Close, CloseCall, Open, OpenCall},
    records::CloseRecord,
    transport::WireTransport,
};
use crate::{
    core::error::DaemonError, daemon::Daemon, machine::record::Record, running::NetworkPort, server::peer_rpc,
};
use bytes::Bytes;
use std::{
    sync::{Arc, Mutex, Weak},
    time::Duration,
};
use tokio::{runtime::Handle, task::JoinHandle};
use whimbrel_api::TunnelInfo;
use whimbrel_core::MachineName;
use whimbrel_migrate::protocol::HomeNetwork;
use whimbrel_net::{Port, tunnel::Relay};
use whimbrel_wire::{CallError, Connection};

/// From one try to the next: at first, and at most.
const SOON: Duration = Duration::from_millis(100);
const LATER: Duration = Duration::from_secs(5);
/// The same for telling a home host that it may end a tunnel: nobody waits for that.
const SOME_TIME: Duration = Duration::from_secs(60);
/// How long the home host may take to make its devices.
const PATIENCE: Duration = Duration::from_secs(20);

/// The away end of a machine's tunnel.
pub(crate) struct AwayEnd {
    keeper: Arc<Keeper>,
    runtime: Handle,
    task: Mutex<Option<JoinHandle<()>>>,
}

/// What keeps the way open.
struct Keeper {
    host: Weak<Daemon>,
    name: MachineName,
    tunnel: HomeNetwork,
    relay: Arc<Relay>,
    ports: Vec<Weak<Port>>,
    view: TunnelView,
}

/// What `ps` shows of it.
#[derive(Clone)]
pub(crate) struct TunnelView(Arc<Mutex<TunnelInfo>>);

impl TunnelView {
    pub(crate) fn info(&self) -> TunnelInfo {
        lock(&self.0).clone()
    }

    fn set(&self, connected: bool, reason: Option<String>) {
        let mut info = lock(&self.0);
        (info.connected, info.reason) = (connected, reason);
    }
}

impl AwayEnd {
    /// The end for a machine of this record, if its network is on another host. It begins with
    /// [`AwayEnd::open`].
    pub(crate) fn of(
        host: &Daemon,
        record: &Record,
        ports: &mut [NetworkPort],
    ) -> Result<Option<Self>, DaemonError> {
        let Some(tunnel) = host.is_away(record) else { return Ok(None) };
        let sockets = ports.iter_mut().map(|port| port.take_line().map(Into::into)).collect();
        let relay = Relay::start(sockets, None);
        let failed = |source| DaemonError::Port { port: "tunnel".to_owned(), source };
        let relay = relay.map_err(|error| failed(Box::new(error).into()))?;
        let info = TunnelInfo { home: tunnel.home.clone(), away: None, connected: false, reason: None };
        let keeper = Keeper {
            host: host.me.clone(),
            name: record.name.clone(),
            tunnel: tunnel.clone(),
            relay: Arc::new(relay),
            ports: ports.iter().map(NetworkPort::port).collect(),
            view: TunnelView(Arc::new(Mutex::new(info))),
        };
        let (keeper, runtime) = (Arc::new(keeper), host.runtime.clone());
        Ok(Some(Self { keeper, runtime, task: Mutex::default() }))
    }

    /// Connects to the home host, now and whenever the connection is lost.
    pub(crate) fn open(&self) {
        let keeper = self.keeper.clone();
        lock(&self.task)
            .get_or_insert_with(|| self.runtime.spawn(async move { keeper.keep_connected().await }));
    }

    /// Ends it for good: the machine is another host's now.
    pub(crate) fn close(&self) {
        lock(&self.task).take().into_iter().for_each(|task| task.abort());
        self.keeper.disconnect(None);
    }

    pub(crate) fn view(&self) -> TunnelView {
        self.keeper.view.clone()
    }
}

impl Drop for AwayEnd {
    fn drop(&mut self) {
        self.close();
    }
}

impl Keeper {
    async fn keep_connected(&self) {
        let mut pause = SOON;
        loop {
            let reason = match self.connect().await {
                Ok(connection) => {
                    pause = SOON;
                    let reason = connection.closed().await.to_string();
                    tracing::info!(machine = %self.name, home = %self.tunnel.home, reason, "a tunnel is cut off");
                    reason
                }
                Err(reason) => reason,
            };
            self.disconnect(Some(reason));
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LATER);
        }
    }

    /// Makes a connection, has the home end opened, and lets frames pass.
    async fn connect(&self) -> Result<Connection, String> {
        let connection = connect(&self.host, &self.tunnel).await?;
        let host = self.host.upgrade().ok_or("the daemon ends")?;
        // Before it is opened: its first frames come at once.
        let way = Way { relay: self.relay.clone(), peer: address_of(connection.peer()) };
        lock(&host.tunnels.aways).insert(self.tunnel.id, way);
        let open = Open { id: self.tunnel.id, name: self.name.clone(), capsule: self.tunnel.capsule };
        let opened = connection.request::<OpenCall>(&open, Bytes::new());
        match tokio::time::timeout(PATIENCE, opened).await {
            Ok(Ok(_)) => {}
            Ok(Err(CallError::Refused { source })) => return Err(source.text),
            Ok(Err(error)) => return Err(chain(&error)),
            Err(_) => return Err("it does not answer".to_owned()),
        }
        let (id, runtime) = (self.tunnel.id, host.runtime.clone());
        self.relay.set_carrier(Some(Box::new(WireTransport { id, connection: connection.clone(), runtime })));
        self.view.set(true, None);
        // At home nobody knows yet where its frames are to go.
        self.ports.iter().filter_map(Weak::upgrade).for_each(|port| port.announce());
        tracing::info!(machine = %self.name, home = %self.tunnel.home, "a tunnel is open");
        Ok(connection)
    }

    fn disconnect(&self, reason: Option<String>) {
        self.relay.set_carrier(None);
        self.view.set(false, reason);
        if let Some(host) = self.host.upgrade() {
            lock(&host.tunnels.aways).remove(&self.tunnel.id);
        }
    }
}

/// A connection of its own: frames must not wait behind pages.
async fn connect(host: &Weak<Daemon>, tunnel: &HomeNetwork) -> Result<Connection, String> {
    let (host, home) = (host.upgrade().ok_or("the daemon ends")?, tunnel.home.clone());
    let connected = tokio::task::spawn_blocking(move || peer_rpc::connect_apart(&host, &home)).await;
    connected.map_err(|_| "the daemon failed".to_owned())?.map_err(|error| chain(&error))
}

impl Daemon {
    /// The tunnel of a machine of this record while it runs here, if its network is elsewhere.
    pub(crate) fn is_away<'a>(&self, record: &'a Record) -> Option<&'a HomeNetwork> {
        record.tunnel.as_ref().filter(|tunnel| tunnel.home != self.name)
    }

    /// The machine of this record needs its home no more: that host is told, now or as soon as it can be
    /// reached, also by a later daemon.
    pub(crate) fn leave_home(&self, record: &mut Record) {
        record.tunnel.take().into_iter().for_each(|tunnel| self.leave(tunnel));
    }

    pub(crate) fn leave(&self, tunnel: HomeNetwork) {
        if tunnel.home == self.name {
            return self.tunnels.end(tunnel.id);
        }
        let note = CloseRecord { id: tunnel.id, home: tunnel.home };
        if let Err(error) = self.tunnels.notes.put_close(&note) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "a home host may not be told that a tunnel is of no more use");
        }
        self.tell_home(note);
    }

    /// Goes on telling home hosts what an earlier daemon could not.
    pub(crate) fn tell_homes(&self) {
        self.tunnels.notes.closes().into_iter().for_each(|note| self.tell_home(note));
    }

    fn tell_home(&self, note: CloseRecord) {
        let host = self.me.clone();
        self.runtime.spawn(async move {
            let mut pause = SOON;
            while !notify_home(&host, &note).await {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(SOME_TIME);
            }
            host.upgrade().into_iter().for_each(|host| host.tunnels.notes.remove_close(note.id));
        });
    }
}

/// Whether the home host knows now, or can no longer be told.
async fn notify_home(host: &Weak<Daemon>, note: &CloseRecord) -> bool {
    let Some(strong) = host.upgrade() else { return false };
    if let Err(DaemonError::Untrusted { .. }) = strong.route(&note.home) {
        return true;
    }
    drop(strong);
    let tunnel = HomeNetwork { home: note.home.clone(), id: note.id, capsule: None };
    let Ok(connection) = connect(host, &tunnel).await else { return false };
    let close = Close { id: note.id };
    let told = connection.request::<CloseCall>(&close, Bytes::new());
    matches!(tokio::time::timeout(PATIENCE, told).await, Ok(Ok(_) | Err(CallError::Refused { .. })))
}

fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
