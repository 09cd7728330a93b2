//! Turns the signals that ask a program to end into events.
//!
//! Handlers, not a blocked signal mask: a mask would be inherited by the daemons and every QEMU.

use crate::Event;
use std::{io, sync::mpsc::Sender, thread};
use tokio::{
    runtime::Builder,
    signal::unix::{SignalKind, signal},
};

/// From when this returns, Ctrl-C, SIGTERM and SIGHUP come as [`Event::Signal`].
pub(crate) fn forward(events: Sender<Event>) -> io::Result<()> {
    let runtime = Builder::new_current_thread().enable_io().build()?;
    let listen = |kind| {
        let _entered = runtime.enter();
        signal(kind)
    };
    let (interrupt, terminate, hangup) =
        (SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup());
    let (mut interrupts, mut terminates, mut hangups) =
        (listen(interrupt)?, listen(terminate)?, listen(hangup)?);
    thread::spawn(move || {
        runtime.block_on(async {
            loop {
                let kind = tokio::select! {
                    _ = interrupts.recv() => interrupt,
                    _ = terminates.recv() => terminate,
                    _ = hangups.recv() => hangup,
                };
                // Without a receiver the program is at its end already.
                let _ = events.send(Event::Signal(kind.as_raw_value() as u8));
            }
        });
    });
    Ok(())
}
