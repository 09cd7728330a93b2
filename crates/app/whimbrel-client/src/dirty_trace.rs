//! Stream of a dirty trace, as the daemon sends it. Its content is not decoded here.

use crate::{Client, ClientError, connection::Call};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::{Method, body::Incoming};
use whimbrel_api::{DirtyTraceRequest, routes};
use whimbrel_core::MachineName;

/// Parts of a trace. The stream ends with the sampling time or the machine; dropping it ends the sampling.
#[derive(Debug)]
pub struct TraceStream {
    label: String,
    body: Incoming,
}

impl Client {
    /// Starts to sample the dirty pages of a machine.
    pub async fn dirty_trace(
        &self,
        name: &MachineName,
        request: &DirtyTraceRequest,
    ) -> Result<TraceStream, ClientError> {
        let call = Call::new(Method::POST, routes::path(routes::MACHINE_WWS, name)).json(request)?;
        let label = call.label();
        Ok(TraceStream { body: call.send(self.daemon()).await?.into_body(), label })
    }
}

impl TraceStream {
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
