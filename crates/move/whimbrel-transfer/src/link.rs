//! What a sync needs of a connection to another host. The wire gives it ([`WireLink`]); so does a fake.

use bytes::Bytes;
use std::error::Error;
use whimbrel_wire::{Call, CallError, Connection, Pending, Refusal, Reply, Request};

/// A channel of calls to another host; any number may be unanswered. Plain threads use it.
pub trait Link: Send + Sync {
    /// Sends a request; blocks only while too much is under way.
    fn start(&self, request: Request) -> Result<Box<dyn Answer>, LinkError>;

    /// Bytes sent and received so far, framing included.
    fn bytes(&self) -> (u64, u64);
}

/// A reply that is on its way.
pub trait Answer: Send {
    /// Blocks until the reply is here or is known never to come.
    fn wait(self: Box<Self>) -> Result<Reply, LinkError>;
}

/// Why there is no reply.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LinkError {
    /// None will come.
    #[error("the connection is lost")]
    Lost {
        /// Why.
        #[source]
        source: std::sync::Arc<dyn Error + Send + Sync>,
    },
    /// The peer said no.
    #[error("the peer refused")]
    Refused {
        /// Its words.
        #[source]
        source: Refusal,
    },
    /// The peer said something that is no answer.
    #[error("the peer's answer cannot be read")]
    Garbage {
        /// Why.
        #[source]
        source: std::sync::Arc<dyn Error + Send + Sync>,
    },
}

impl LinkError {
    /// The connection is gone because of `source`.
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

/// One call, waited for.
pub fn call<C: Call>(
    link: &dyn Link,
    header: &C::Header,
    payload: Bytes,
) -> Result<(C::Reply, Bytes), LinkError> {
    let reply = link.start(Request::of::<C>(header, payload)?)?.wait()?;
    Ok((reply.decode::<C>()?, reply.payload))
}

/// A connection of the wire.
#[derive(Debug, Clone)]
pub struct WireLink(pub Connection);

impl Link for WireLink {
    fn start(&self, request: Request) -> Result<Box<dyn Answer>, LinkError> {
        Ok(Box::new(OnItsWay(self.0.send_blocking(request)?)))
    }

    fn bytes(&self) -> (u64, u64) {
        let traffic = self.0.traffic();
        (traffic.sent, traffic.received)
    }
}

struct OnItsWay(Pending);

impl Answer for OnItsWay {
    fn wait(self: Box<Self>) -> Result<Reply, LinkError> {
        Ok(self.0.wait()?)
    }
}
