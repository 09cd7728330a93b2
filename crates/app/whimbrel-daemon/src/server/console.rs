//! Consoles of machines over HTTP: as a plain stream for clients, and as a WebSocket for browsers.
//!
//! Both are one call of the API, judged and noted once, and end when the rights of the caller do.

use crate::{
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
    let (mut parts, body) = request.into_parts();
    let socket = WebSocketUpgrade::from_request_parts(&mut parts, &host).await;
    let request = Request::from_parts(parts, body);
    if socket.is_err() {
        expect_upgrade(&request, routes::CONSOLE_PROTOCOL)?;
    }
    let Json(serial) = blocking(host, move |host| host.machines.get(&name)?.console()).await?;
    if let Ok(socket) = socket {
        let socket = socket.protocols([routes::CONSOLE_PROTOCOL]).max_message_size(TYPED_MAX);
        return Ok(socket.on_upgrade(|socket| console_of_browser(socket, serial, asker)));
    }
    tokio::spawn(console_of_client(request, serial, asker));
    Ok(switching(routes::CONSOLE_PROTOCOL))
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
