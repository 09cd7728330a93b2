//! Consoles of machines over HTTP: as a plain stream for clients, and as a WebSocket for browsers.
//!
//! Both are one call of the API, judged and noted once, and end when the rights of the caller do.

use crate::{
    daemon::Daemon,
    machine::console::SerialStream,
    server::{
        access::gate::Asker,
        http::{At, Failure, Shared, blocking, expect_upgrade, switching},
    },
};
use axum::{
    Json,
    body::Bytes,
    extract::{
        FromRequestParts, Request, State,
        ws::{Message, WebSocket, WebSocketUpgrade},
    },
    response::Response,
};
use hyper_util::rt::TokioIo;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use whimbrel_api::routes;
use whimbrel_core::MachineName;

/// Longest message of a browser: what is pasted is sent in pieces.
const TYPED_MAX: usize = 64 << 10;

/// Turns the connection into the machine's serial port.
pub(super) async fn console(
    State(host): Shared,
    asker: Asker,
    At(name): At<MachineName>,
    request: Request,
) -> Result<Response, Failure> {
    let upgrade = RawUpgrade::of(request, &host, routes::CONSOLE_PROTOCOL).await?;
    let Json(serial) = blocking(host, move |host| host.machines.get(&name)?.console()).await?;
    match upgrade {
        RawUpgrade::Browser(socket) => {
            Ok(socket.on_upgrade(|socket| console_of_browser(socket, serial, asker)))
        }
        RawUpgrade::Client(request) => {
            tokio::spawn(console_of_client(request, serial, asker));
            Ok(switching(routes::CONSOLE_PROTOCOL))
        }
    }
}

/// How a request wants to have a raw stream.
pub(super) enum RawUpgrade {
    /// In the messages of a WebSocket.
    Browser(WebSocketUpgrade),
    /// As it is.
    Client(Request),
}

impl RawUpgrade {
    /// The way that the request asks for. Refused if it asks for none, or for another protocol.
    pub(super) async fn of(
        request: Request,
        host: &Arc<Daemon>,
        protocol: &'static str,
    ) -> Result<Self, Failure> {
        let (mut parts, body) = request.into_parts();
        if let Ok(socket) = WebSocketUpgrade::from_request_parts(&mut parts, host).await {
            return Ok(Self::Browser(socket.protocols([protocol]).max_message_size(TYPED_MAX)));
        }
        let request = Request::from_parts(parts, body);
        expect_upgrade(&request, protocol)?;
        Ok(Self::Client(request))
    }
}

/// Passes a serial port on as bytes.
async fn console_of_client(request: Request, mut serial: SerialStream, asker: Asker) {
    let Ok(upgraded) = hyper::upgrade::on(request).await else { return };
    let (mut from_user, mut to_user) = tokio::io::split(TokioIo::new(upgraded));
    let mut typed = [0; 1024];
    let mut ended = std::pin::pin!(asker.ended());
    loop {
        tokio::select! {
            () = &mut ended => break,
            printed = serial.output.recv() => match printed {
                Some(bytes) if to_user.write_all(&bytes).await.is_ok() => {}
                _ => break,
            },
            count = from_user.read(&mut typed) => match count {
                Ok(count) if count > 0 && serial.input.send(typed[..count].to_vec()).await.is_ok() => {}
                _ => break,
            },
        }
    }
}

/// Passes a serial port on to a browser, in messages of bytes, and what is typed there to the port.
async fn console_of_browser(mut socket: WebSocket, mut serial: SerialStream, asker: Asker) {
    let mut ended = std::pin::pin!(asker.ended());
    loop {
        tokio::select! {
            () = &mut ended => break,
            printed = serial.output.recv() => match printed {
                Some(bytes) if socket.send(Message::Binary(Bytes::copy_from_slice(&bytes))).await.is_ok() => {}
                _ => break,
            },
            typed = socket.recv() => match typed {
                Some(Ok(Message::Binary(typed))) if serial.input.send(typed.to_vec()).await.is_ok() => {}
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                _ => break,
            },
        }
    }
    // The browser is told that this is the end; if it cannot be, the connection ends anyway.
    let _ = socket.send(Message::Close(None)).await;
}
