//! Loading the device state: QEMU's ordinary incoming migration, from a Unix socket.
//!
//! [`Qemu::expect_state`] does the part that needs no state: QEMU gets the command and the connection, and
//! reads the stream header, nine tenths of a state, while the machine still runs on the source. Then a load
//! transfers only the devices.
//!
//! After that command, QEMU ends or becomes useless if the state is invalid, or the socket is closed before
//! the state has arrived. So use it only for a QEMU that is ended anyway if no state arrives.

use super::{
    Qemu,
    device_state::{STATE, STATE_TIMEOUT, io_error, remove},
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

/// Identity of a loaded machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmIdentity {
    /// Unchanged: the machine moved to another host, and the guest is not notified.
    Unchanged,
    /// Possibly a copy: the guest is notified to read its generation id.
    New,
}

/// Connection to a QEMU that was told to read a state.
#[derive(Debug)]
pub(super) struct Incoming {
    stream: UnixStream,
    /// In a mutex, because other threads may inspect the machine while one waits.
    events: Mutex<Receiver<MachineEvent>>,
    /// Header that it has read, if any.
    head: Option<StreamHeader>,
}

impl Qemu {
    /// Lets an incoming QEMU read the stream header that its state will most likely have, so that
    /// [`Qemu::load`] does not wait for it.
    ///
    /// Its memory need not be filled yet. A header that proves different costs no more than without this
    /// call. A repeated call has no effect.
    pub fn expect_state(&mut self, head: &[u8]) -> Result<(), StateError> {
        if self.incoming.is_some() {
            return Ok(());
        }
        let head = StreamHeader::parse(head)?;
        let mut incoming = self.start_incoming()?;
        incoming.write(head.as_bytes())?;
        incoming.head = Some(head);
        self.incoming = Some(incoming);
        Ok(())
    }

    /// Loads `state` into an incoming QEMU whose memory is filled, or will be on demand. The machine is
    /// paused afterwards.
    ///
    /// After a failure the QEMU is useless; usually it has ended.
    pub fn load(&mut self, state: &[u8]) -> Result<(), StateError> {
        self.load_to_run(state, VmIdentity::New)?;
        self.refresh_header()
    }

    /// Loads `state` as [`Qemu::load`] does, but faster, for a machine that is to run at once:
    /// [`Qemu::refresh_header`] does the rest before its state is saved.
    pub fn load_to_run(&mut self, state: &[u8], identity: VmIdentity) -> Result<(), StateError> {
        let told = self.incoming.take();
        let StreamRemainder { head, sections, devices } =
            StreamRemainder::of(state, told.as_ref().and_then(|told| told.head.as_ref()))?;
        let moved = match identity {
            VmIdentity::Unchanged => with_identity_first(devices),
            VmIdentity::New => None,
        };
        let mut incoming = told.map_or_else(|| self.start_incoming(), Ok)?;
        incoming.write(sections)?;
        incoming.write(moved.as_deref().unwrap_or(devices))?;
        incoming.end()?;
        let events = incoming.events.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.wait_migrated("load", &events)?;
        self.state_cache.loaded = head.or(incoming.head);
        Ok(())
    }

    fn start_incoming(&self) -> Result<Incoming, StateError> {
        let path = self.dir.path().join(STATE);
        remove(&path)?;
        let events = self.qmp.subscribe();
        let uri = format!("unix:{}", self.dir.seen_by_qemu(STATE));
        self.qmp.execute("migrate-incoming", json!({"uri": uri}))?;
        let stream = UnixStream::connect(&path).map_err(io_error("connect to the reader of"));
        self.dir.close().map_err(io_error("close the directory of the reader of"))?;
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

/// If QEMU closed the stream, it rejects the state, and its event or its output has the reason.
fn unless_closed(done: io::Result<()>) -> Result<(), StateError> {
    match done {
        Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::NotConnected) => {
            Ok(())
        }
        done => done.map_err(io_error("write")),
    }
}
