//! Stream of the events of a host: server-sent events, one JSON object each.

use crate::{ByteStream, Client, ClientError, connection::Call};
use hyper::Method;
use whimbrel_api::{HostEvent, routes};

/// Most bytes of an event.
const EVENT_MAX: usize = 64 << 10;

/// Events of a host, in order.
#[derive(Debug)]
pub struct EventStream {
    body: ByteStream,
    buffer: Vec<u8>,
}

impl Client {
    /// Events after the one with the number `since`; with none, all that the host still knows. With `follow`
    /// the stream goes on with events to come.
    pub async fn host_events(&self, since: Option<u64>, follow: bool) -> Result<EventStream, ClientError> {
        let call = Call::new(Method::GET, routes::events_since(since, follow));
        Ok(EventStream { body: self.bytes(call).await?, buffer: Vec::new() })
    }
}

impl EventStream {
    /// Next event; none at the end.
    pub async fn next(&mut self) -> Result<Option<HostEvent>, ClientError> {
        loop {
            while let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                // Other lines are the number once more, comments and ends of events.
                if let Some(data) = line.strip_prefix(b"data: ") {
                    let event = serde_json::from_slice(data);
                    return event.map(Some).map_err(|error| ClientError::protocol(self.body.label(), error));
                }
            }
            if self.buffer.len() > EVENT_MAX {
                return Err(ClientError::TooLarge {
                    request: self.body.label().to_owned(),
                    limit: EVENT_MAX,
                });
            }
            match self.body.next().await? {
                Some(bytes) => self.buffer.extend_from_slice(&bytes),
                None => return Ok(None),
            }
        }
    }
}
