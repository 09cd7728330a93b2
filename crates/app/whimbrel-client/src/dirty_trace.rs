//! The trace of a working set, as it comes. What is in it is not looked at here.

use crate::{Client, ClientError, connection::Call};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::{Method, body::Incoming};
use whimbrel_api::{DirtyTraceRequest, routes};
use whimbrel_core::MachineName;

/// Pieces of a trace. It ends when its time is over or the machine is no longer there; dropping it ends the
/// sampling.
#[derive(Debug)]
pub struct TraceStream {
    label: String,
    body: Incoming,
}

impl Client {
    /// Begins to sample what a machine dirties.
    pub async fn wws(
        &self,
        name: &MachineName,
        request: &DirtyTraceRequest,
    ) -> Result<TraceStream, ClientError> {
        let call = Call::new(Method::POST, routes::machine(routes::MACHINE_WWS, name));
        let label = call.label();
        let body = serde_json::to_vec(request).map_err(|error| ClientError::protocol(&label, error))?;
        Ok(TraceStream { body: call.json(body).send(self.socket()).await?.into_body(), label })
    }
}

impl TraceStream {
    /// The next bytes; none at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        loop {
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(ClientError::protocol(&self.label, error)),
                // Trailers are not for us.
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => return Ok(Some(data)),
                    Err(_) => continue,
                },
            }
        }
    }
}
