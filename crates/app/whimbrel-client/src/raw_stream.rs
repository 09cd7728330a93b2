//! Raw streams: connections upgraded from HTTP to a byte stream (RFC 9110, 7.8), for the console and
//! the screen of a machine, and the protocol between hosts.

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

/// Both directions of a raw stream. The call that opened it defines the meaning of its end.
#[derive(Debug)]
pub struct RawStream(TokioIo<Upgraded>);

impl Client {
    /// Opens the console of a machine. The stream ends with the machine or the daemon.
    pub async fn console(&self, name: &MachineName) -> Result<RawStream, ClientError> {
        self.switch_protocol(routes::path(routes::MACHINE_CONSOLE, name), routes::CONSOLE_PROTOCOL).await
    }

    /// Opens the screen of a machine: RFB (RFC 6143), in which the server speaks first.
    pub async fn display(&self, name: &MachineName) -> Result<RawStream, ClientError> {
        self.switch_protocol(routes::path(routes::MACHINE_DISPLAY, name), routes::DISPLAY_PROTOCOL).await
    }

    /// Opens a stream of the protocol between hosts. It ends when the daemon ends or closes the connection to
    /// the peer.
    pub async fn wire(&self) -> Result<RawStream, ClientError> {
        self.switch_protocol(routes::WIRE.to_owned(), routes::WIRE_PROTOCOL).await
    }

    async fn switch_protocol(&self, path: String, protocol: &'static str) -> Result<RawStream, ClientError> {
        let call = Call::new(Method::GET, path).upgrade(protocol);
        let label = call.label();
        let response = call.send(self.daemon()).await?;
        let offered = response.headers().get(header::UPGRADE).map(|value| value.as_bytes());
        if response.status() != StatusCode::SWITCHING_PROTOCOLS || offered != Some(protocol.as_bytes()) {
            let answer = io::Error::other(format!("status {} instead of {protocol}", response.status()));
            return Err(ClientError::protocol(&label, answer));
        }
        let upgraded =
            hyper::upgrade::on(response).await.map_err(|error| ClientError::protocol(&label, error))?;
        Ok(RawStream(TokioIo::new(upgraded)))
    }
}

impl AsyncRead for RawStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, into)
    }
}

impl AsyncWrite for RawStream {
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
