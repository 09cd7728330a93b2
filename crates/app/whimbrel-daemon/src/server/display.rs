//! Screens of machines over HTTP: RFB (RFC 6143) as a plain stream for clients, and in a WebSocket for
//! browsers.
//!
//! QEMU is the server; its socket lies in the machine's runtime directory, so a screen needs neither the
//! machine's lock nor its process. It is one call of the API, judged and noted once, and ends when the rights
//! of the caller do.

use crate::{
    core::error::DaemonError,
    server::{
        access::gate::Asker,
        console::RawUpgrade,
        http::{At, Failure, Shared, switching},
    },
};
use axum::{
    body::Bytes,
    extract::{
        Request, State,
        ws::{Message, WebSocket},
    },
    response::Response,
};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};
use whimbrel_api::routes;
use whimbrel_core::MachineName;

/// Most bytes of a screen in one message to a browser.
const DRAWN_MAX: usize = 64 << 10;

/// Turns the connection into one to the machine's screen.
pub(super) async fn display(
    State(host): Shared,
    asker: Asker,
    At(name): At<MachineName>,
    request: Request,
) -> Result<Response, Failure> {
    let upgrade = RawUpgrade::of(request, &host, routes::DISPLAY_PROTOCOL).await?;
    let path = host.machines.get(&name)?.display()?;
    let screen = UnixStream::connect(&path).await;
    let screen = screen.map_err(|source| DaemonError::io("connect to", &path, source))?;
    match upgrade {
        RawUpgrade::Browser(socket) => {
            Ok(socket.on_upgrade(|socket| screen_of_browser(socket, screen, asker)))
        }
        RawUpgrade::Client(request) => {
            tokio::spawn(screen_of_client(request, screen, asker));
            Ok(switching(routes::DISPLAY_PROTOCOL))
        }
    }
}

/// Passes bytes both ways until a side ends or the caller may not look any more.
async fn screen_of_client(request: Request, mut screen: UnixStream, asker: Asker) {
    let Ok(upgraded) = hyper::upgrade::on(request).await else { return };
    let mut viewer = TokioIo::new(upgraded);
    tokio::select! {
        () = asker.ended() => {}
        // A side that has gone is the end, however it went.
        _ = tokio::io::copy_bidirectional(&mut viewer, &mut screen) => {}
    }
}

/// Passes what is drawn on in messages of bytes, and keys and movements to the screen.
async fn screen_of_browser(mut socket: WebSocket, screen: UnixStream, asker: Asker) {
    let (mut drawn, mut acts) = screen.into_split();
    let mut piece = vec![0; DRAWN_MAX];
    let mut ended = std::pin::pin!(asker.ended());
    loop {
        tokio::select! {
            () = &mut ended => break,
            count = drawn.read(&mut piece) => match count {
                Ok(count) if count > 0 => {
                    let message = Message::Binary(Bytes::copy_from_slice(&piece[..count]));
                    if socket.send(message).await.is_err() {
                        break;
                    }
                }
                _ => break,
            },
            act = socket.recv() => match act {
                Some(Ok(Message::Binary(act))) if acts.write_all(&act).await.is_ok() => {}
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                _ => break,
            },
        }
    }
    // The browser is told that this is the end; if it cannot be, the connection ends anyway.
    let _ = socket.send(Message::Close(None)).await;
}
