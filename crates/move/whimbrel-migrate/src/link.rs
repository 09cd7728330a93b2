//! Link of a migration: the requests that it sends over the connection to the other host (the wire, or a fake
//! in tests).

use bytes::Bytes;
use std::error::Error;

/// Ordered channel of requests to the other host; any number may be unanswered.
pub trait Link: Send + Sync {
    /// Sends a request after all earlier ones; blocks while too many bytes are in flight.
    fn send(&self, kind: u16, header: Vec<u8>, payload: Bytes) -> Result<Box<dyn Answer>, LinkError>;

    /// Sends a short request that may overtake others.
    fn ask(&self, kind: u16, header: Vec<u8>, payload: Bytes) -> Result<Box<dyn Answer>, LinkError> {
        self.send(kind, header, payload)
    }

    /// Limits the link to this many bytes a second from now on; `None` removes the limit.
    fn limit_rate(&self, _rate: Option<u64>) {}

    /// Number of bytes sent so far, framing included.
    fn bytes_sent(&self) -> u64;

    /// Whether the other side answers [`COMMIT_OR_RETURN`](crate::protocol::COMMIT_OR_RETURN).
    fn gives_back(&self) -> bool {
        false
    }

    /// Closes the link at once: every wait for a reply ends with an error.
    fn close(&self) {}
}

/// Reply that has not arrived yet.
pub trait Answer: Send {
    /// Blocks until the reply (its header) arrives or the link is known to be lost.
    fn wait(self: Box<Self>) -> Result<Bytes, LinkError>;
}

/// Reason why a request did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The connection failed; whether the request was handled is unknown.
    #[error("the connection to the target is lost")]
    Lost {
        /// Cause reported by the connection.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The target replied with an error.
    #[error("the target answered: {reason}")]
    Refused {
        /// Text of the target's error.
        reason: String,
    },
}

/// Sends a request and waits for its reply.
pub(crate) fn call(
    link: &dyn Link,
    kind: u16,
    header: &impl serde::Serialize,
    payload: Bytes,
) -> Result<Bytes, LinkError> {
    let header = postcard::to_stdvec(header).expect("a header is always encodable");
    link.send(kind, header, payload)?.wait()
}
