//! Event stream of an operation: one JSON object a line until the operation has ended.

use crate::{Client, ClientError, connection::Call};
use http_body_util::BodyExt;
use hyper::{Method, body::Incoming};
use whimbrel_api::{Operation, OperationId, routes};

/// Most bytes of a line. A result with tens of thousands of rounds fits.
const LINE_MAX: usize = 4 << 20;

impl Client {
    /// Waits until an operation has ended and returns its last state. `on_progress` gets every snapshot,
    /// including the last.
    ///
    /// Dropping the future does not affect the operation. [`Client::cancel`] ends it.
    ///
    /// # Errors
    /// [`ClientError::Lost`] if the daemon ends first; a failed operation is no error here.
    pub async fn watch_operation(
        &self,
        id: OperationId,
        mut on_progress: impl FnMut(&Operation),
    ) -> Result<Operation, ClientError> {
        let mut lines = self.events(id).await?;
        loop {
            let operation = lines.next().await?.ok_or(ClientError::Lost { operation: id })?;
            on_progress(&operation);
            if operation.state.is_ended() {
                return Ok(operation);
            }
        }
    }

    async fn events(&self, id: OperationId) -> Result<Lines, ClientError> {
        let call = Call::new(Method::GET, routes::path(routes::OPERATION_EVENTS, id));
        let label = call.label();
        Ok(Lines {
            label,
            operation: id,
            body: call.send(self.daemon()).await?.into_body(),
            buffer: Vec::new(),
        })
    }
}

/// Splits a body that arrives in parts of any size into snapshots.
struct Lines {
    label: String,
    operation: OperationId,
    body: Incoming,
    buffer: Vec<u8>,
}

impl Lines {
    /// Next snapshot, or none at the end of the stream. A last line without a line feed is ignored.
    async fn next(&mut self) -> Result<Option<Operation>, ClientError> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.buffer[searched..].iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=searched + end).collect();
                return self.parse(&line).map(Some);
            }
            searched = self.buffer.len();
            if searched > LINE_MAX {
                return Err(ClientError::TooLarge { request: self.label.clone(), limit: LINE_MAX });
            }
            match self.body.frame().await {
                Some(Ok(frame)) => self.buffer.extend_from_slice(frame.data_ref().map_or(&[], |data| data)),
                // A daemon that is killed truncates the chunked body, as does one whose socket is closed.
                Some(Err(_)) => return Err(ClientError::Lost { operation: self.operation }),
                None => return Ok(None),
            }
        }
    }

    fn parse(&self, line: &[u8]) -> Result<Operation, ClientError> {
        serde_json::from_slice(line).map_err(|error| ClientError::protocol(&self.label, error))
    }
}
