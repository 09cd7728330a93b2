//! Taking the state of CPUs and devices.
//!
//! Taking costs one QMP command and one look at the small blocks while the machine is paused (about 1 ms):
//! the head, taken once from QEMU's own migration stream, is kept up to date by reading the small blocks from
//! the process, and `xen-save-devices-state` gives the rest.
//!
//! Where the head comes from: a machine whose memory is shared can be migrated without its memory at any time
//! (7 ms, and it goes on running afterwards). One whose memory is private cannot; its head is the one it was
//! loaded with.

use super::Qemu;
use crate::{
    launch::{LaunchError, Sharing},
    qmp::{MachineEvent, PendingCommand, QmpError},
    state::{
        DeviceState, MAX_STATE, RamBlockAddresses, ShownBlock, StateError, StreamHeader, compose,
        device_sections, parse_ramblocks,
    },
};
use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    io::{self, Read},
    os::{
        fd::AsRawFd,
        unix::{
            fs::FileExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::Path,
    sync::mpsc::{Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};
use whimbrel_machine::{MachineError, UnpauseReport};

/// How long a state may take to be written or read by QEMU. It takes 10 ms.
pub(super) const STATE_TIMEOUT: Duration = Duration::from_secs(30);

/// What taking the state needs to remember.
#[derive(Debug)]
pub(super) struct DeviceStateCache {
    sharing: Sharing,
    /// QEMU writes the device sections into this file, which has no name and lies in memory.
    scratch: File,
    known: Option<Known>,
    /// The head of what was loaded, of which the small blocks are still to be found.
    pub(super) loaded: Option<StreamHeader>,
    /// Whether the head changed since it was last handed out.
    changed: bool,
    /// Asked for together with the stop of the machine, and not answered yet.
    under_way: Option<PendingCommand>,
}

#[derive(Debug)]
struct Known {
    head: StreamHeader,
    /// Where the small blocks lie; none if they cannot be watched.
    places: Option<RamBlockAddresses>,
}

impl DeviceStateCache {
    pub(super) fn new(sharing: Sharing) -> Result<Self, LaunchError> {
        let scratch = memfd_create("whimbrel-devices", MemfdFlags::CLOEXEC);
        let scratch =
            scratch.map_err(|errno| LaunchError::Io { what: "a memory file", source: errno.into() })?;
        Ok(Self {
            sharing,
            scratch: scratch.into(),
            known: None,
            loaded: None,
            changed: true,
            under_way: None,
        })
    }
}

impl Qemu {
    /// Takes the head of the device state ahead of time, which stops a running machine for about 10 ms.
    ///
    /// Call it right after the start, before anybody watches. Without it, the first state of a paused machine
    /// takes that long. Does nothing for private memory, whose head comes with [`Qemu::load`] or
    /// [`Qemu::set_head`]. Afterwards the machine runs or not as before, also on failure (as far as QEMU
    /// still obeys).
    pub fn prepare_device_state(&mut self) -> Result<(), StateError> {
        if self.saver.sharing == Sharing::Private {
            return Ok(());
        }
        self.saver.loaded = None;
        if !self.qmp.is_running() {
            return self.take_head();
        }
        self.qmp.execute("stop", json!({}))?;
        let taken = self.take_head();
        self.qmp.execute("cont", json!({}))?;
        taken
    }

    /// The state of CPUs and devices in its two parts. Only while paused.
    pub fn save_device_state(&mut self) -> Result<DeviceState<'_>, StateError> {
        if self.qmp.is_running() {
            return Err(StateError::NotPaused);
        }
        self.refresh_head()?;
        let devices = self.save_devices()?;
        let head_changed = std::mem::take(&mut self.saver.changed);
        let known = self.saver.known.as_ref().ok_or(StateError::NoHead)?;
        Ok(DeviceState { head: known.head.as_bytes(), head_changed, devices })
    }

    /// Stops the machine and asks in the same breath for its devices, which QEMU then writes down while
    /// whoever stopped it looks at its memory. [`Qemu::go_on_saved`] comes next.
    ///
    /// QEMU reads what it is told byte by byte, 3 us each: `xen-save-devices-state` takes it a third of a
    /// millisecond to read, which it does while it stops.
    pub(super) fn stop_to_save(&mut self) -> Result<(), QmpError> {
        let save = self.save_command();
        let [stop, save] = self.qmp.ask([("stop", json!({})), save])?;
        self.saver.under_way = Some(save);
        self.qmp.answer(stop).map(drop)
    }

    /// Lets the machine go on once its devices are written down. The state is put together when it runs
    /// already.
    pub(super) fn go_on_saved(&mut self) -> UnpauseReport {
        let begun = Instant::now();
        let head = self.refresh_head();
        let under_way = self.saver.under_way.take().ok_or(StateError::NotPaused);
        // QEMU does what it is told in order: it goes on when it has written, whether or not we know of that.
        let cont = self.qmp.ask([("cont", json!({}))]);
        let saved = under_way.and_then(|save| Ok(self.qmp.answer(save)?));
        let devices = begun.elapsed();
        let goes_on = cont.and_then(|[cont]| self.qmp.answer(cont));
        let go_on = begun.elapsed() - devices;
        let device_state = head.and(saved).and_then(|_| self.read_saved());
        let device_state = device_state.map_err(|error| MachineError::new("save the devices of", error));
        let goes_on = goes_on.map_err(|error| MachineError::new("resume", error));
        UnpauseReport { device_state: goes_on.and(device_state), devices, go_on }
    }

    /// The state whose devices were just written down.
    fn read_saved(&mut self) -> Result<Vec<u8>, StateError> {
        let devices = self.read_devices()?;
        let known = self.saver.known.as_ref().ok_or(StateError::NoHead)?;
        Ok(compose(known.head.as_bytes(), &devices))
    }

    /// Gives the head to use: that of `state`, the device state this machine was resumed from. Call it before
    /// the machine runs.
    pub fn set_head(&mut self, state: &[u8]) -> Result<(), StateError> {
        self.adopt_head(StreamHeader::parse(state)?)
    }

    /// The head now in use, to keep where a restart of this program finds it again.
    pub fn head(&self) -> Option<&StreamHeader> {
        self.saver.loaded.as_ref().or(self.saver.known.as_ref().map(|known| &known.head))
    }

    /// Finds the small blocks of a machine that was loaded to run. Whoever takes its state first does it
    /// otherwise.
    pub fn refresh_header(&mut self) -> Result<(), StateError> {
        match self.saver.loaded.take() {
            Some(head) => self.adopt_head(head),
            None => Ok(()),
        }
    }

    /// Waits until QEMU has finished a transfer of state.
    pub(super) fn wait_migrated(
        &self,
        action: &'static str,
        events: &Receiver<MachineEvent>,
    ) -> Result<(), StateError> {
        let deadline = Instant::now() + STATE_TIMEOUT;
        let timed_out = StateError::TimedOut { action, after: STATE_TIMEOUT };
        loop {
            match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(MachineEvent::Migration { status }) => match status.as_str() {
                    "completed" => return Ok(()),
                    "failed" | "cancelled" => return Err(self.refusal(action)),
                    _ => {}
                },
                Ok(MachineEvent::Disconnected) | Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.refusal(action));
                }
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => return Err(timed_out),
            }
        }
    }

    /// Why QEMU failed: its answer while it lives, what it wrote last when it has ended.
    fn refusal(&self, action: &'static str) -> StateError {
        let answer = self.qmp.execute_within("query-migrate", json!({}), Duration::from_secs(1));
        let words = answer.ok().and_then(|answer| answer["error-desc"].as_str().map(str::to_owned));
        let words = words.unwrap_or_else(|| {
            // Its last words are complete once it has ended.
            self.process.wait(Duration::from_secs(1));
            self.process.words()
        });
        StateError::Refused { action, words }
    }

    fn refresh_head(&mut self) -> Result<(), StateError> {
        self.refresh_header()?;
        let shared = self.saver.sharing == Sharing::Shared;
        let Some(known) = &mut self.saver.known else {
            return if shared { self.take_head() } else { Err(StateError::NoHead) };
        };
        let Some(places) = &mut known.places else {
            return if shared { self.take_head() } else { Err(StateError::Unwatched) };
        };
        if !places.refresh(&mut known.head).map_err(io_error("compare"))? {
            return Ok(());
        }
        self.saver.changed = true;
        // A block that has another length now is known by its changed contents; the list of blocks is then
        // out of date.
        let shown = self.shown_blocks()?;
        let head = self.head().ok_or(StateError::NoHead)?;
        match head
            .blocks()
            .iter()
            .all(|block| shown.iter().any(|s| s.name == block.name && s.used == block.used))
        {
            true => Ok(()),
            false if shared => self.take_head(),
            false => Err(StateError::Unwatched),
        }
    }

    /// Takes the head from a migration stream. The machine must be paused and stays so.
    fn take_head(&mut self) -> Result<(), StateError> {
        let path = self.dir.join("state");
        remove(&path)?;
        let listener = UnixListener::bind(&path).map_err(io_error("listen for"))?;
        let events = self.qmp.subscribe();
        let reader = thread::Builder::new()
            .name("qemu-state".into())
            .spawn(move || read_stream(&listener))
            .map_err(io_error("read"))?;
        let uri = format!("unix:{}", path.display());
        let asked = self.qmp.execute("migrate", json!({"uri": uri})).map_err(StateError::from);
        let saved = asked.and_then(|_| self.wait_migrated("save", &events));
        if matches!(saved, Err(StateError::TimedOut { .. })) {
            // A transfer still under way would forbid the next one. If this fails too, QEMU obeys no more.
            let _ = self.qmp.execute("migrate_cancel", json!({}));
        }
        // Whatever happened, the reader waits no longer: closed unread, this connection makes its accept or
        // read return.
        drop(UnixStream::connect(&path));
        let removed = remove(&path);
        let stream = reader.join().unwrap_or_else(|_| Err(io::Error::other("the reader panicked")));
        saved.and(removed)?;
        self.adopt_head(StreamHeader::parse(&stream.map_err(io_error("read"))?)?)
    }

    fn adopt_head(&mut self, head: StreamHeader) -> Result<(), StateError> {
        let shown = self.shown_blocks()?;
        let places = RamBlockAddresses::find(self.pid(), &head, &shown)
            .map_err(io_error("find the small blocks of"))?;
        if places.is_none() {
            tracing::warn!(
                pid = self.pid(),
                "small memory blocks not found, every state will be taken the slow way"
            );
        }
        self.saver.changed = true;
        self.saver.known = Some(Known { head, places });
        Ok(())
    }

    fn shown_blocks(&self) -> Result<Vec<ShownBlock>, QmpError> {
        self.monitor("info ramblock").map(|table| parse_ramblocks(&table))
    }

    fn save_command(&self) -> (&'static str, Value) {
        let path = format!("/proc/{}/fd/{}", std::process::id(), self.saver.scratch.as_raw_fd());
        // Its name notwithstanding, it has nothing to do with Xen. Not live: QEMU would give up its disks.
        ("xen-save-devices-state", json!({"filename": path, "live": false}))
    }

    fn save_devices(&self) -> Result<Vec<u8>, StateError> {
        let (command, arguments) = self.save_command();
        self.qmp.execute(command, arguments)?;
        self.read_devices()
    }

    fn read_devices(&self) -> Result<Vec<u8>, StateError> {
        let scratch = &self.saver.scratch;
        let len = scratch.metadata().map_err(io_error("read"))?.len();
        if len > MAX_STATE as u64 {
            return Err(crate::state::StreamError::TooLong { len }.into());
        }
        let mut blob = vec![0; len as usize];
        scratch.read_exact_at(&mut blob, 0).map_err(io_error("read"))?;
        Ok(device_sections(blob)?)
    }
}

/// Reads the stream of the first connection to its end.
fn read_stream(listener: &UnixListener) -> io::Result<Vec<u8>> {
    let (stream, _) = listener.accept()?;
    stream.set_read_timeout(Some(STATE_TIMEOUT))?;
    let mut bytes = Vec::new();
    // One byte more than allowed, so that the parser sees what is too long.
    stream.take(MAX_STATE as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

pub(super) fn remove(path: &Path) -> Result<(), StateError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(StateError::Io { action: "clear the socket for", source })
        }
        _ => Ok(()),
    }
}

pub(super) fn io_error(action: &'static str) -> impl FnOnce(io::Error) -> StateError {
    move |source| StateError::Io { action, source }
}
