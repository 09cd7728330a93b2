//! Transport of a tunnel: batches over a connection between hosts. They arrive in order; each is answered, so
//! that the relay knows that it is no longer in flight. A refusal means that the other end has no such tunnel
//! any more: the connection is closed.

use super::protocol::{Frames, FramesCall, STREAM};
use tokio::runtime::Handle;
use whimbrel_migrate::protocol::TunnelId;
use whimbrel_net::tunnel::{InFlightBatch, Transport};
use whimbrel_wire::{CallError, Connection, Request};

pub(crate) struct WireTransport {
    pub(crate) id: TunnelId,
    pub(crate) connection: Connection,
    pub(crate) runtime: Handle,
}

impl Transport for WireTransport {
    fn send(&mut self, batch: Vec<u8>, receipt: InFlightBatch) {
        let request = Request::of::<FramesCall>(&Frames { id: self.id }, batch.into());
        let pending = request.and_then(|request| self.connection.send_blocking(request.ordered(STREAM)));
        // Without a connection the batch is lost; the away end learns of it otherwise.
        let Ok(pending) = pending else { return };
        let connection = self.connection.clone();
        self.runtime.spawn(async move {
            if let Err(CallError::Refused { source }) = pending.await {
                tracing::info!(%source, "the other end of a tunnel refuses frames");
                connection.close();
            }
            drop(receipt);
        });
    }
}
