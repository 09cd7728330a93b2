//! Link of a transfer: the calls that it makes over a connection to another host ([`WireLink`], or a fake in
//! tests).

use bytes::Bytes;
use std::{error::Error, time::Duration};
use whimbrel_wire::{Call, CallError, Connection, Pending, Refusal, Reply, Request};

/// Channel of calls to another host, for plain threads; any number of calls may be unanswered.
pub trait Link: Send + Sync {
    /// Sends a request; blocks only while too many bytes are in flight.
    fn start(&self, request: Request) -> Result<Box<dyn Answer>, LinkError>;

    /// Bytes sent and received so far, framing included.
    fn bytes(&self) -> (u64, u64);
}

/// Reply that has not arrived yet.
pub trait Answer: Send {
    /// Blocks until the reply arrives or is known never to arrive.
    fn wait(self: Box<Self>) -> Result<Reply, LinkError>;

    /// Blocks until [`Answer::wait`] need not, and for at most `timeout`. Returns whether it need not.
    fn wait_ready(&mut self, timeout: Duration) -> bool {
        let _ = timeout;
        true
    }
}

/// Reason why there is no reply.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LinkError {
    /// The connection failed, so no reply will arrive.
    #[error("the connection is lost")]
    Lost {
        /// Cause reported by the connection.
        source: std::sync::Arc<dyn Error + Send + Sync>,
    },
    /// The peer refused the request.
    #[error("the peer refused")]
    Refused {
        /// Refusal of the peer.
        source: Refusal,
    },
    /// The peer sent something that cannot be decoded as the reply.
    #[error("cannot decode the reply of the peer")]
    Garbage {
        /// Cause reported by the decoder.
        source: std::sync::Arc<dyn Error + Send + Sync>,
    },
}

impl LinkError {
    /// Error of a connection that failed because of `source`.
    pub fn lost(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Lost { source: source.into().into() }
    }
}

impl From<CallError> for LinkError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused { source } => Self::Refused { source },
            CallError::Closed { .. } => Self::lost(error),
            CallError::Unsendable { .. } | CallError::Header { .. } => {
                Self::Garbage { source: std::sync::Arc::new(error) }
            }
        }
    }
}

/// Makes one call and waits for its reply.
pub fn call<C: Call>(
    link: &dyn Link,
    header: &C::Header,
    payload: Bytes,
) -> Result<(C::Reply, Bytes), LinkError> {
    let reply = link.start(Request::of::<C>(header, payload)?)?.wait()?;
    Ok((reply.decode::<C>()?, reply.payload))
}

/// Link over a connection of the wire protocol.
#[derive(Debug, Clone)]
pub struct WireLink(pub Connection);

impl Link for WireLink {
    fn start(&self, request: Request) -> Result<Box<dyn Answer>, LinkError> {
        Ok(Box::new(WireAnswer { pending: self.0.send_blocking(request)?, arrived: None }))
    }

    fn bytes(&self) -> (u64, u64) {
        let traffic = self.0.traffic();
        (traffic.sent, traffic.received)
    }
}

struct WireAnswer {
    pending: Pending,
    arrived: Option<Result<Reply, CallError>>,
}

impl Answer for WireAnswer {
    fn wait(self: Box<Self>) -> Result<Reply, LinkError> {
        let Self { pending, arrived } = *self;
        Ok(arrived.unwrap_or_else(|| pending.wait())?)
    }

    fn wait_ready(&mut self, timeout: Duration) -> bool {
        if self.arrived.is_none() {
            self.arrived = self.pending.wait_for(timeout);
        }
        self.arrived.is_some()
    }
}
