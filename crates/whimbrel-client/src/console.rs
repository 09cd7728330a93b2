//! The console of a machine: a connection that stops being HTTP and becomes a raw byte stream (RFC 9110, 7.8).

use crate::{Client, ClientError, connection::Call};
use hyper::{Method, StatusCode, header, upgrade::Upgraded};
use hyper_util::rt::TokioIo;
use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use whimbrel_api::routes;
use whimbrel_core::MachineName;

/// Both directions of a machine's serial port. The end of the stream is the end of the machine, or of the daemon.
#[derive(Debug)]
pub struct Console(TokioIo<Upgraded>);

impl Client {
    /// Opens the console of a machine.
    pub async fn console(&self, name: &MachineName) -> Result<Console, ClientError> {
        let call = Call::new(Method::GET, routes::machine(routes::MACHINE_CONSOLE, name))
            .upgrade(routes::CONSOLE_PROTOCOL);
        let label = call.label();
        let response = call.send(self.socket()).await?;
        let protocol = response.headers().get(header::UPGRADE).map(|value| value.as_bytes());
        if response.status() != StatusCode::SWITCHING_PROTOCOLS
            || protocol != Some(routes::CONSOLE_PROTOCOL.as_bytes())
        {
            let answer = io::Error::other(format!("status {} instead of a console", response.status()));
            return Err(ClientError::protocol(&label, answer));
        }
        let upgraded =
            hyper::upgrade::on(response).await.map_err(|error| ClientError::protocol(&label, error))?;
        Ok(Console(TokioIo::new(upgraded)))
    }
}

impl AsyncRead for Console {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, into)
    }
}

impl AsyncWrite for Console {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
