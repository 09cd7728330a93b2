//! Saving the device state of CPUs and devices.
//!
//! It costs one QMP command and one read of the small memory blocks while the machine is paused (about 1 ms).
//! The stream header, taken once from QEMU's own migration stream, is updated by reading the small blocks
//! from the process, and `xen-save-devices-state` returns the rest.
//!
//! Origin of the header: a machine with shared memory can be migrated without its memory at any time (7 ms,
//! and it continues to run afterwards). One with private memory cannot; its header is the one that it was
//! loaded with.

use super::{
    Qemu,
    held_pipe::{HELD_SIZE, HeldPipe},
};
use crate::{
    launch::{LaunchError, Sharing},
    machine_user::QemuDir,
    qmp::{MachineEvent, PendingCommand, QmpError},
    state::{
        DeviceState, ListedBlock, MAX_STATE, RamBlockAddresses, StateError, StreamHeader, compose,
        device_sections, parse_ramblocks,
    },
};
use rustix::fs::OFlags;
use serde_json::{Value, json};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::unix::{
        fs::{FileExt, OpenOptionsExt},
        net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::mpsc::{Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};
use whimbrel_machine::{MachineError, UnpauseReport};

/// Socket in the runtime directory over which QEMU reads or writes a state.
pub(super) const STATE: &str = "state";
/// File in the runtime directory into which QEMU writes the device sections.
const SCRATCH: &str = "devices";
/// Time in which QEMU must write or read a state. It takes 10 ms.
pub(super) const STATE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time in which QEMU has parsed a command that was sent ahead.
const PARSING: Duration = Duration::from_micros(500);
/// How often it is looked whether QEMU refuses to write into the pipe.
const HOLD_POLL: Duration = Duration::from_millis(20);
/// How long an answer is awaited before the pipe is read: all but the largest states fit into it.
const HOLD_READ: Duration = Duration::from_millis(1);

/// Data kept between two saves of the device state.
#[derive(Debug)]
pub(super) struct DeviceStateCache {
    sharing: Sharing,
    scratch: File,
    known: Option<CachedHeader>,
    /// Header of the loaded state, whose small blocks were not located yet.
    pub(super) loaded: Option<StreamHeader>,
    /// Whether the header changed since it was last returned.
    changed: bool,
    /// Save command of the next pause, of which QEMU lacks the last brace.
    begun_save: Option<PendingCommand>,
    /// Save command that was sent together with the pause, and not answered yet.
    pending_save: Option<PendingSave>,
    pipe: Holding,
    /// Length of the device sections that were saved last.
    last_len: usize,
}

/// What holds QEMU while it saves.
#[derive(Debug, Default)]
enum Holding {
    /// No pipe was passed to QEMU yet.
    #[default]
    Untried,
    /// A pipe, to which QEMU has the other end.
    Pipe(HeldPipe),
    /// Nothing: this QEMU could not use a pipe.
    Refused,
}

/// How a state is being saved.
#[derive(Debug)]
enum PendingSave {
    /// Into the file, of a machine that was stopped before.
    Stopped(PendingCommand),
    /// Into the pipe, by the one command that has stopped the machine and lets it go on.
    Held(PendingCommand),
}

#[derive(Debug)]
struct CachedHeader {
    head: StreamHeader,
    /// Addresses of the small blocks; none if they cannot be read.
    places: Option<RamBlockAddresses>,
}

impl DeviceStateCache {
    pub(super) fn new(dir: &QemuDir, sharing: Sharing) -> Result<Self, LaunchError> {
        let path = dir.path().join(SCRATCH);
        let mut options = OpenOptions::new();
        // QEMU may have put a link there.
        options
            .read(true)
            .write(true)
            .create(true)
            .mode(0o600)
            .custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
        let scratch = options.open(&path).and_then(|scratch| dir.give(&path).map(|()| scratch));
        let scratch =
            scratch.map_err(|source| LaunchError::Io { what: "the file of the device state", source })?;
        Ok(Self {
            sharing,
            scratch,
            known: None,
            loaded: None,
            changed: true,
            begun_save: None,
            pending_save: None,
            pipe: Holding::Untried,
            last_len: 0,
        })
    }

    pub(super) fn sharing(&self) -> Sharing {
        self.sharing
    }

    /// Forgets the pipe, because another process may pass one of its own to QEMU.
    pub(super) fn forget_pipe(&mut self) {
        self.pipe = Holding::Untried;
    }

    /// Whether a save was requested and not read.
    pub(super) fn is_saving(&self) -> bool {
        self.pending_save.is_some()
    }
}

impl Qemu {
    /// Takes the stream header ahead of time, which pauses a running machine for about 10 ms.
    ///
    /// Call it right after the start, before the machine is used. Without it, the first save of a paused
    /// machine takes that long. Does nothing for private memory, whose header comes with [`Qemu::load`] or
    /// [`Qemu::set_head`]. Afterwards the machine runs or not as before, also on failure (if QEMU still
    /// accepts commands).
    pub fn prepare_device_state(&mut self) -> Result<(), StateError> {
        if self.state_cache.sharing == Sharing::Private {
            return Ok(());
        }
        self.state_cache.loaded = None;
        if !self.qmp.is_running() {
            return self.take_header();
        }
        self.qmp.execute("stop", json!({}))?;
        let taken = self.take_header();
        self.qmp.execute("cont", json!({}))?;
        taken
    }

    /// Saves the device state in its two parts. Only while paused.
    pub fn save_device_state(&mut self) -> Result<DeviceState<'_>, StateError> {
        if self.qmp.is_running() {
            return Err(StateError::NotPaused);
        }
        self.update_header()?;
        let devices = self.save_devices()?;
        let head_changed = std::mem::take(&mut self.state_cache.changed);
        let known = self.state_cache.known.as_ref().ok_or(StateError::NoHeader)?;
        Ok(DeviceState { head: known.head.as_bytes(), head_changed, devices })
    }

    /// Sends the command of the next pause ahead, but for its end: QEMU parses it byte by byte, 3 us each, a
    /// third of a millisecond. [`Qemu::pause_and_save`] must follow at once.
    pub(super) fn begin_pause(&mut self) {
        if self.state_cache.begun_save.is_some() || !self.may_hold() {
            return;
        }
        let Holding::Pipe(pipe) = &self.state_cache.pipe else { return };
        match self.qmp.begin_command(save_command(pipe.path())) {
            Ok(save) => {
                self.state_cache.begun_save = Some(save);
                thread::sleep(PARSING);
            }
            Err(error) => tracing::debug!(%error, "the command of a pause is not sent ahead"),
        }
    }

    /// Pauses the machine while QEMU saves its device state. [`Qemu::unpause_saved`] must follow.
    ///
    /// If it can, by the one command that does all of it (see [`HeldPipe`]). Otherwise by two in one message,
    /// so that QEMU writes the state while the caller reads memory.
    pub(super) fn pause_and_save(&mut self) -> Result<(), MachineError> {
        let failed = |error: StateError| MachineError::new("pause", error);
        let can_hold = self.state_cache.begun_save.is_some() || self.may_hold();
        if can_hold && self.pause_held().map_err(failed)? {
            return Ok(());
        }
        let path = self.dir.seen_by_qemu(SCRATCH);
        let sent = self.qmp.send_commands([("stop", json!({})), save_command(&path)]);
        let [stop, save] = sent.map_err(|error| failed(error.into()))?;
        self.state_cache.pending_save = Some(PendingSave::Stopped(save));
        self.qmp.answer(stop).map(drop).map_err(|error| failed(error.into()))
    }

    /// Unpauses the machine once its devices are written. The state is composed when it runs already.
    pub(super) fn unpause_saved(&mut self) -> UnpauseReport {
        match self.state_cache.pending_save.take() {
            Some(PendingSave::Held(save)) => self.release_held(save),
            Some(PendingSave::Stopped(save)) => self.unpause_stopped(Ok(save)),
            None => self.unpause_stopped(Err(StateError::NotPaused)),
        }
    }

    /// Whether the next pause can be held by the pipe. A state that fits into it would not hold QEMU, and one
    /// whose header has to be taken anew needs other commands during the pause.
    fn may_hold(&mut self) -> bool {
        let cache = &mut self.state_cache;
        let has_header = cache.known.as_ref().is_some_and(|known| known.places.is_some());
        let is_large = cache.last_len > 2 * HELD_SIZE;
        if !has_header || !is_large || cache.loaded.is_some() || !self.qmp.is_running() {
            return false;
        }
        if matches!(cache.pipe, Holding::Untried) {
            cache.pipe = HeldPipe::pass_to(&self.qmp, &self.dir).map_or_else(
                |error| {
                    tracing::warn!(%error, "QEMU takes no pipe and is stopped by name");
                    Holding::Refused
                },
                Holding::Pipe,
            );
        }
        matches!(cache.pipe, Holding::Pipe(_))
    }

    /// Pauses the machine by the pipe. False if that was not possible: then the machine runs.
    fn pause_held(&mut self) -> Result<bool, StateError> {
        let begun = self.state_cache.begun_save.take();
        let Holding::Pipe(pipe) = &self.state_cache.pipe else { return Ok(false) };
        let save = match begun {
            Some(save) => self.qmp.finish_command().map(|()| save)?,
            None => self.qmp.send_commands([save_command(pipe.path())]).map(|[save]| save)?,
        };
        let deadline = Instant::now() + STATE_TIMEOUT;
        let answer = loop {
            match pipe.wait(HOLD_POLL) {
                Ok(true) => {
                    self.qmp.note_stopped();
                    return self.check_held(save);
                }
                Ok(false) => {}
                Err(source) => break Some(Err(QmpError::Io(source))),
            }
            let answer = self.qmp.answer_soon(&save, Duration::ZERO);
            if answer.is_some() || Instant::now() > deadline {
                break answer;
            }
        };
        // Closed, it holds nobody.
        self.state_cache.pipe = Holding::Refused;
        match answer {
            None => Err(StateError::TimedOut { action: "save", after: STATE_TIMEOUT }),
            Some(Err(QmpError::Refused { words, .. })) => {
                tracing::warn!(words, "QEMU cannot save through a pipe and is stopped by name");
                Ok(false)
            }
            Some(answer) => Ok(answer.map(|_| false)?),
        }
    }

    /// Whether a machine that is held can be saved so. Otherwise it is let go: the guest has had the small
    /// blocks made larger, or may have, and their lengths can be asked for in another pause only.
    fn check_held(&mut self, save: PendingCommand) -> Result<bool, StateError> {
        self.state_cache.pending_save = Some(PendingSave::Held(save));
        let is_same = match &mut self.state_cache.known {
            Some(CachedHeader { head, places: Some(places) }) => {
                places.refresh(head).map(|changed| !changed).map_err(io_error("compare"))
            }
            _ => Ok(false),
        };
        if let Ok(true) = is_same {
            return Ok(true);
        }
        let report = self.unpause_saved();
        tracing::debug!(error = ?report.device_state.err(), "the small blocks have changed; pausing once more");
        self.state_cache.changed = true;
        is_same
    }

    /// Lets a machine go on that the pipe holds.
    fn release_held(&mut self, save: PendingCommand) -> UnpauseReport {
        let begun = Instant::now();
        // One that was answered did not stand still.
        let early = self.qmp.answer_soon(&save, Duration::ZERO);
        if let Holding::Pipe(pipe) = &self.state_cache.pipe {
            pipe.release();
        }
        let device_state_time = begun.elapsed();
        let saved = match early {
            None => self.read_held(&save),
            Some(answer) => {
                // QEMU's events of that pause may have come before it was taken down.
                let asked = self.qmp.ask_running();
                let failed = answer.and(asked).err();
                Err(failed.map_or(StateError::NotPaused, StateError::from))
            }
        };
        let unpause_time = begun.elapsed() - device_state_time;
        let holds = match &mut self.state_cache.pipe {
            Holding::Pipe(pipe) => pipe.hold(),
            _ => false,
        };
        if saved.is_err() || !holds {
            self.state_cache.pipe = Holding::Refused;
        }
        let device_state = saved.and_then(|blob| self.compose_saved(blob));
        let device_state = device_state.map_err(|error| MachineError::new("save the devices of", error));
        UnpauseReport { device_state, device_state_time, unpause_time }
    }

    /// What QEMU writes into the pipe until it has answered: by then the machine runs.
    fn read_held(&mut self, save: &PendingCommand) -> Result<Vec<u8>, StateError> {
        let deadline = Instant::now() + STATE_TIMEOUT;
        let mut blob = Vec::with_capacity(self.state_cache.last_len);
        loop {
            let answer = self.qmp.answer_soon(save, HOLD_READ);
            let Holding::Pipe(pipe) = &mut self.state_cache.pipe else { return Err(StateError::NotPaused) };
            pipe.drain(&mut blob, MAX_STATE).map_err(io_error("read"))?;
            match answer {
                _ if blob.len() > MAX_STATE => {
                    return Err(crate::state::StreamError::TooLong { len: blob.len() as u64 }.into());
                }
                Some(answer) => return Ok(answer.map(|_| blob)?),
                None if Instant::now() < deadline => {}
                None => return Err(StateError::TimedOut { action: "save", after: STATE_TIMEOUT }),
            }
        }
    }

    fn unpause_stopped(&mut self, under_way: Result<PendingCommand, StateError>) -> UnpauseReport {
        let begun = Instant::now();
        let head = self.update_header();
        // QEMU executes commands in order: it unpauses after it has written, even if that answer is not read
        // yet.
        let cont = self.qmp.send_commands([("cont", json!({}))]);
        let saved = under_way.and_then(|save| Ok(self.qmp.answer(save)?));
        let devices = begun.elapsed();
        let goes_on = cont.and_then(|[cont]| self.qmp.answer(cont));
        let go_on = begun.elapsed() - devices;
        let device_state = head.and(saved).and_then(|_| self.read_saved());
        let device_state = device_state.map_err(|error| MachineError::new("save the devices of", error));
        let goes_on = goes_on.map_err(|error| MachineError::new("resume", error));
        UnpauseReport {
            device_state: goes_on.and(device_state),
            device_state_time: devices,
            unpause_time: go_on,
        }
    }

    /// Composes the state from the devices that were just written.
    fn read_saved(&mut self) -> Result<Vec<u8>, StateError> {
        let blob = self.read_devices()?;
        self.compose_saved(blob)
    }

    fn compose_saved(&mut self, blob: Vec<u8>) -> Result<Vec<u8>, StateError> {
        self.state_cache.last_len = blob.len();
        let devices = device_sections(blob)?;
        let known = self.state_cache.known.as_ref().ok_or(StateError::NoHeader)?;
        Ok(compose(known.head.as_bytes(), &devices))
    }

    /// Sets the header: that of `state`, the device state from which this machine was resumed. Call it before
    /// the machine runs.
    pub fn set_head(&mut self, state: &[u8]) -> Result<(), StateError> {
        self.set_header(StreamHeader::parse(state)?)
    }

    /// Present header, to be stored for a restart of the daemon.
    pub fn head(&self) -> Option<&StreamHeader> {
        self.state_cache.loaded.as_ref().or(self.state_cache.known.as_ref().map(|known| &known.head))
    }

    /// Locates the small blocks of a machine after [`Qemu::load_to_run`]. Otherwise the first save does it.
    pub fn refresh_header(&mut self) -> Result<(), StateError> {
        match self.state_cache.loaded.take() {
            Some(head) => self.set_header(head),
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

    /// Error of QEMU: its answer if it lives, its last output if it has ended.
    fn refusal(&self, action: &'static str) -> StateError {
        let answer = self.qmp.execute_within("query-migrate", json!({}), Duration::from_secs(1));
        let words = answer.ok().and_then(|answer| answer["error-desc"].as_str().map(str::to_owned));
        let words = words.unwrap_or_else(|| {
            // The output is complete once QEMU has ended.
            self.process.wait(Duration::from_secs(1));
            self.process.last_output()
        });
        StateError::Refused { action, words }
    }

    fn update_header(&mut self) -> Result<(), StateError> {
        self.refresh_header()?;
        let shared = self.state_cache.sharing == Sharing::Shared;
        let Some(known) = &mut self.state_cache.known else {
            return if shared { self.take_header() } else { Err(StateError::NoHeader) };
        };
        let Some(places) = &mut known.places else {
            return if shared { self.take_header() } else { Err(StateError::BlocksNotFound) };
        };
        if !places.refresh(&mut known.head).map_err(io_error("compare"))? {
            return Ok(());
        }
        self.state_cache.changed = true;
        // A block whose length changed is found by its changed content; then the list of blocks is out of
        // date.
        let shown = self.shown_blocks()?;
        let head = self.head().ok_or(StateError::NoHeader)?;
        match head
            .blocks()
            .iter()
            .all(|block| shown.iter().any(|s| s.name == block.name && s.used == block.used))
        {
            true => Ok(()),
            false if shared => self.take_header(),
            false => Err(StateError::BlocksNotFound),
        }
    }

    /// Takes the header from a migration stream. The machine must be paused and stays so.
    fn take_header(&mut self) -> Result<(), StateError> {
        let path = self.dir.path().join(STATE);
        remove(&path)?;
        let listener = UnixListener::bind(&path).map_err(io_error("listen for"))?;
        self.dir.give(&path).map_err(io_error("listen for"))?;
        let events = self.qmp.subscribe();
        let reader = thread::Builder::new()
            .name("qemu-state".into())
            .spawn(move || read_stream(&listener))
            .map_err(io_error("read"))?;
        let uri = format!("unix:{}", self.dir.seen_by_qemu(STATE));
        let asked = self.qmp.execute("migrate", json!({"uri": uri})).map_err(StateError::from);
        let saved = asked.and_then(|_| self.wait_migrated("save", &events));
        if matches!(saved, Err(StateError::TimedOut { .. })) {
            // An unfinished transfer would prevent the next one. If this fails too, QEMU accepts no more
            // commands.
            let _ = self.qmp.execute("migrate_cancel", json!({}));
        }
        // Ends the reader in any case: this connection, closed without data, makes its accept or read return.
        drop(UnixStream::connect(&path));
        let removed = remove(&path);
        let stream = reader.join().unwrap_or_else(|_| Err(io::Error::other("the reader panicked")));
        saved.and(removed)?;
        self.set_header(StreamHeader::parse(&stream.map_err(io_error("read"))?)?)
    }

    fn set_header(&mut self, head: StreamHeader) -> Result<(), StateError> {
        let shown = self.shown_blocks()?;
        let places = RamBlockAddresses::find(self.pid(), &head, &shown)
            .map_err(io_error("find the small blocks of"))?;
        if places.is_none() {
            tracing::warn!(
                pid = self.pid(),
                "small memory blocks not found; saving the device state will be slower"
            );
        }
        self.state_cache.changed = true;
        self.state_cache.known = Some(CachedHeader { head, places });
        Ok(())
    }

    fn shown_blocks(&self) -> Result<Vec<ListedBlock>, QmpError> {
        self.monitor("info ramblock").map(|table| parse_ramblocks(&table))
    }

    fn save_devices(&mut self) -> Result<Vec<u8>, StateError> {
        let path = self.dir.seen_by_qemu(SCRATCH);
        let (command, arguments) = save_command(&path);
        self.qmp.execute(command, arguments)?;
        let blob = self.read_devices()?;
        self.state_cache.last_len = blob.len();
        Ok(device_sections(blob)?)
    }

    fn read_devices(&self) -> Result<Vec<u8>, StateError> {
        let scratch = &self.state_cache.scratch;
        let len = scratch.metadata().map_err(io_error("read"))?.len();
        if len > MAX_STATE as u64 {
            return Err(crate::state::StreamError::TooLong { len }.into());
        }
        let mut blob = vec![0; len as usize];
        scratch.read_exact_at(&mut blob, 0).map_err(io_error("read"))?;
        Ok(blob)
    }
}

/// Command to write the devices into a file.
fn save_command(path: &str) -> (&'static str, Value) {
    // Despite its name, the command is not related to Xen. Not live: otherwise QEMU would give up its disks.
    ("xen-save-devices-state", json!({"filename": path, "live": false}))
}

/// Reads the stream of the first connection to its end.
fn read_stream(listener: &UnixListener) -> io::Result<Vec<u8>> {
    let (stream, _) = listener.accept()?;
    stream.set_read_timeout(Some(STATE_TIMEOUT))?;
    let mut bytes = Vec::new();
    // One byte more than allowed, so that the parser detects a stream that is too long.
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
