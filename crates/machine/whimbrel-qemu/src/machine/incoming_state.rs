//! Loading the state of CPUs and devices: QEMU's ordinary incoming migration, from a socket of ours.
//!
//! What of it can be done before there is a state, [`Qemu::expect_state`] does: QEMU is told, connected to,
//! and reads the head, nine tenths of a state, while the machine still runs elsewhere. Then a load is the
//! devices and QEMU's own work.
//!
//! A QEMU that was told ends, or is of no use, when the state that comes is no good, or the socket is closed
//! before it has come. So only one that is ended anyway if nothing comes may be told ahead.

use super::{
    Qemu,
    device_state::{STATE_TIMEOUT, io_error, remove},
};
use crate::{
    qmp::MachineEvent,
    state::{StateError, StreamHeader, StreamRemainder, with_identity_first},
};
use serde_json::json;
use std::{
    io::{self, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::{Mutex, PoisonError, mpsc::Receiver},
};

/// Whether a machine that is loaded is the one that it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmIdentity {
    /// The same machine, elsewhere: its guest is told nothing.
    Kept,
    /// Perhaps a copy: its guest is told to look at its generation id.
    New,
}

/// The way into a QEMU that was told to read a state.
#[derive(Debug)]
pub(super) struct Incoming {
    stream: UnixStream,
    /// In a lock, since whoever waits may be looked at by others meanwhile.
    events: Mutex<Receiver<MachineEvent>>,
    /// The head that it has read, if it has read any of it.
    head: Option<StreamHeader>,
}

impl Qemu {
    /// Has an incoming QEMU read the head that its state will most likely have, which [`Qemu::load`] need not
    /// wait for then.
    ///
    /// Its memory need not be filled yet. A head that turns out to be another one costs no more than without
    /// this. Said again, it changes nothing.
    pub fn expect_state(&mut self, head: &[u8]) -> Result<(), StateError> {
        if self.incoming.is_some() {
            return Ok(());
        }
        let head = StreamHeader::parse(head)?;
        let mut incoming = self.tell_incoming()?;
        incoming.write(head.as_bytes())?;
        incoming.head = Some(head);
        self.incoming = Some(incoming);
        Ok(())
    }

    /// Loads `state` into an incoming QEMU whose memory is filled, or will be on demand. The machine is
    /// paused afterwards.
    ///
    /// On failure the QEMU is of no use any more; most often it has ended.
    pub fn load(&mut self, state: &[u8]) -> Result<(), StateError> {
        self.load_to_run(state, VmIdentity::New)?;
        self.refresh_header()
    }

    /// The same for a machine that somebody waits for: [`Qemu::refresh_header`] does what is left, before a
    /// state of it is taken.
    pub fn load_to_run(&mut self, state: &[u8], identity: VmIdentity) -> Result<(), StateError> {
        let told = self.incoming.take();
        let StreamRemainder { head, sections, devices } =
            StreamRemainder::of(state, told.as_ref().and_then(|told| told.head.as_ref()))?;
        let moved = match identity {
            VmIdentity::Kept => with_identity_first(devices),
            VmIdentity::New => None,
        };
        let mut incoming = told.map_or_else(|| self.tell_incoming(), Ok)?;
        incoming.write(sections)?;
        incoming.write(moved.as_deref().unwrap_or(devices))?;
        incoming.end()?;
        let events = incoming.events.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.wait_migrated("load", &events)?;
        self.saver.loaded = head.or(incoming.head);
        Ok(())
    }

    fn tell_incoming(&self) -> Result<Incoming, StateError> {
        let path = self.dir.join("state");
        remove(&path)?;
        let events = self.qmp.subscribe();
        self.qmp.execute("migrate-incoming", json!({"uri": format!("unix:{}", path.display())}))?;
        let stream = UnixStream::connect(&path).map_err(io_error("connect to the reader of"));
        let removed = remove(&path);
        let stream = stream?;
        removed?;
        stream.set_write_timeout(Some(STATE_TIMEOUT)).map_err(io_error("write"))?;
        Ok(Incoming { stream, events: Mutex::new(events), head: None })
    }
}

impl Incoming {
    fn write(&mut self, bytes: &[u8]) -> Result<(), StateError> {
        unless_closed(self.stream.write_all(bytes))
    }

    fn end(&mut self) -> Result<(), StateError> {
        unless_closed(self.stream.shutdown(Shutdown::Write))
    }
}

/// What QEMU has closed it rejects, and its event or its end says so in its own words.
fn unless_closed(done: io::Result<()>) -> Result<(), StateError> {
    match done {
        Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::NotConnected) => {
            Ok(())
        }
        done => done.map_err(io_error("write")),
    }
}
