//! Streams of bytes as the daemon sends them: a dirty trace, the output of a machine, events. They are not
//! decoded here.

use crate::{Client, ClientError, connection::Call};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::{Method, body::Incoming};
use whimbrel_api::{DirtyTraceRequest, routes};
use whimbrel_core::MachineName;

/// Parts of an answer. A trace ends with the sampling time or the machine; dropping it ends the sampling.
#[derive(Debug)]
pub struct ByteStream {
    label: String,
    body: Incoming,
}

impl Client {
    /// Starts to sample the dirty pages of a machine.
    pub async fn dirty_trace(
        &self,
        name: &MachineName,
        request: &DirtyTraceRequest,
    ) -> Result<ByteStream, ClientError> {
        let call = Call::new(Method::POST, routes::path(routes::MACHINE_WWS, name)).json(request)?;
        self.bytes(call).await
    }

    /// Recent output of a machine on its serial port, and what it prints from now on, until it ends.
    pub async fn console_output(&self, name: &MachineName) -> Result<ByteStream, ClientError> {
        self.bytes(Call::new(Method::GET, routes::console_log_followed(name))).await
    }

    pub(crate) async fn bytes(&self, call: Call) -> Result<ByteStream, ClientError> {
        let label = call.label();
        Ok(ByteStream { body: call.send(self.daemon()).await?.into_body(), label })
    }
}

impl ByteStream {
    /// Call that it answers, for messages.
    pub(crate) fn label(&self) -> &str {
        &self.label
    }

    /// Next bytes; none at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        loop {
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(ClientError::protocol(&self.label, error)),
                // Trailers are ignored.
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => return Ok(Some(data)),
                    Err(_) => continue,
                },
            }
        }
    }
}
