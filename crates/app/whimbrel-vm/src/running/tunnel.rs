//! Tunnel of a machine whose network is on another host, as the machine sees it. Who keeps connections to
//! other hosts makes it.

use super::{NetworkPort, RunningError};
use std::sync::{Arc, Mutex};
use whimbrel_api::TunnelInfo;
use whimbrel_core::lock;

/// End of a tunnel at the ports of a machine. Dropping it closes it.
pub trait Tunnel: Send + Sync {
    /// Connects to the home host, now and whenever the connection is lost.
    fn open(&self);

    /// Ends the tunnel for good: another host has the machine now.
    fn close(&self);

    /// State of the tunnel, readable without the machine.
    fn view(&self) -> TunnelView;
}

/// Makes the tunnel of a machine, once its ports are there.
pub type ConnectTunnel = Box<dyn FnOnce(&mut [NetworkPort]) -> Result<Box<dyn Tunnel>, RunningError> + Send>;

/// State of a tunnel as `ps` shows it.
#[derive(Debug, Clone)]
pub struct TunnelView(Arc<Mutex<TunnelInfo>>);

impl TunnelView {
    /// View that shows this state until it is set.
    pub fn new(info: TunnelInfo) -> Self {
        Self(Arc::new(Mutex::new(info)))
    }

    /// Copy of the present state.
    pub fn info(&self) -> TunnelInfo {
        lock(&self.0).clone()
    }

    /// Sets whether it is connected, and why not.
    pub fn set(&self, connected: bool, reason: Option<String>) {
        let mut info = lock(&self.0);
        (info.connected, info.reason) = (connected, reason);
    }
}
