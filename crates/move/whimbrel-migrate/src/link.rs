//! What a migration needs of the connection between the hosts. The wire protocol gives it; so does a fake.

use bytes::Bytes;
use std::error::Error;

/// An ordered channel of requests to the other host; any number may be unanswered.
pub trait Link: Send + Sync {
    /// Sends a request after all earlier ones; blocks while too much is under way.
    fn send(&self, kind: u16, header: Vec<u8>, payload: Bytes) -> Result<Box<dyn Answer>, LinkError>;

    /// Sends a request that is short and in no order with others; it may overtake them.
    fn ask(&self, kind: u16, header: Vec<u8>, payload: Bytes) -> Result<Box<dyn Answer>, LinkError> {
        self.send(kind, header, payload)
    }

    /// From now on at most so many bytes a second go out; none lifts the limit.
    fn limit_rate(&self, _rate: Option<u64>) {}

    /// Bytes sent so far, framing included.
    fn bytes_sent(&self) -> u64;
}

/// A reply that is on its way.
pub trait Answer: Send {
    /// Blocks until the reply is here (its header) or the link is known to be lost.
    fn wait(self: Box<Self>) -> Result<Bytes, LinkError>;
}

/// Why a request was not answered with success.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// No answer will come; whether the request was handled is unknown.
    #[error("the connection to the target is lost")]
    Lost {
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The target answered that it could not do it.
    #[error("the target answered: {reason}")]
    Refused {
        /// The target's words.
        reason: String,
    },
}

/// A request that must be answered before the next step.
pub(crate) fn call(
    link: &dyn Link,
    kind: u16,
    header: &impl serde::Serialize,
    payload: Bytes,
) -> Result<Bytes, LinkError> {
    let header = postcard::to_stdvec(header).expect("a header is always encodable");
    link.send(kind, header, payload)?.wait()
}
