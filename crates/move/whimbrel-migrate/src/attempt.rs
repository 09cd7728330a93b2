//! One attempt of a source: carries out the actions of [`Source`] from the offer to the commit point.
//!
//! [`Attempt::execute`] has every action in one `match`. The capture loop pauses the machine through the
//! attempt, so that the pause is an action too. Actions of the next part begin here, and go on in
//! [`crate::outcome`].

use crate::{
    boot_files::BootFiles,
    handover::{AbortedAction, Source, SourceAction, SourceEvent},
    link::{self, Link},
    outcome::PendingCommit,
    protocol::{self, Accepted, Offer, Offered},
    source::{BoxError, MigrateError, OpenBootFile},
    watchdog::Watchdog,
};
use bytes::Bytes;
use std::{thread, time::Duration};
use whimbrel_capture::CaptureError;
use whimbrel_machine::{Machine, MachineError};

/// Durable record of a handover on the source.
pub trait HandoverRecord: Send {
    /// Records that the handover has begun, before the target hears of it.
    fn begin(&mut self) -> Result<(), BoxError>;

    /// Records that the machine was handed over: the commit point. After an error either may be on the disk.
    fn commit(&mut self) -> Result<(), BoxError>;

    /// Records that the machine belongs to this host, after a failed [`HandoverRecord::commit`]. Repeats the
    /// write until it is durable. An error says that the daemon ends first: the machine then stays paused and
    /// the target waits, until a later daemon has read which of the two the disk has.
    fn revert(&mut self) -> Result<(), BoxError>;

    /// Carries out an action of an aborted handover, or leaves it to [`crate::abort`].
    fn aborted(&mut self, action: AbortedAction);
}

/// State of the source in one attempt, and what its actions need.
pub(crate) struct Attempt<'a> {
    state: Source,
    machine: &'a mut dyn Machine,
    record: &'a mut dyn HandoverRecord,
    watchdog: &'a Watchdog<'a>,
    link: &'a dyn Link,
    offer: &'a Offer,
    open_boot_file: OpenBootFile<'a>,
    /// Reply to the offer, and the index of the boot files.
    offered: Option<(Bytes, BootFiles)>,
    commit: Option<PendingCommit>,
    /// Whether the machine was paused here, or may be after a failed pause.
    paused: bool,
}

impl<'a> Attempt<'a> {
    pub(crate) fn new(
        machine: &'a mut dyn Machine,
        record: &'a mut dyn HandoverRecord,
        watchdog: &'a Watchdog<'a>,
        (link, offer, open_boot_file): (&'a dyn Link, &'a Offer, OpenBootFile<'a>),
    ) -> Self {
        Self {
            state: Source::initial().0,
            machine,
            record,
            watchdog,
            link,
            offer,
            open_boot_file,
            offered: None,
            commit: None,
            paused: false,
        }
    }

    /// Records and offers the machine; returns the acceptance and the index of its boot files.
    pub(crate) fn begin(&mut self) -> Result<(Accepted, BootFiles), MigrateError> {
        self.run(Source::initial())?;
        let (reply, boot_files) = self.offered.take().unwrap_or_default();
        match postcard::from_bytes(&reply).map_err(MigrateError::Answer)? {
            Offered::Accepted(accepted) => Ok((accepted, boot_files)),
            Offered::Misfit(misfit) => Err(MigrateError::Incompatible(misfit)),
        }
    }

    /// The target has loaded the machine: passes the commit point, unless the watchdog was faster.
    pub(crate) fn target_ready(&mut self) -> Result<PendingCommit, MigrateError> {
        if let Some(reason) = self.watchdog.end() {
            return Err(reason);
        }
        self.run(self.state.step(SourceEvent::TargetReady))?;
        Ok(self.commit.take().unwrap_or_else(PendingCommit::unsent))
    }

    /// The attempt failed in something else than an action: the machine runs on here.
    pub(crate) fn failed(&mut self) {
        if let Source::Copying | Source::Stopped = self.state
            && let Err(error) = self.run(self.state.step(SourceEvent::Failed))
        {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "a failed migration could not be undone"
            );
        }
    }

    /// Carries out the actions of a transition and of those that follow from them. Returns the first failure.
    fn run(&mut self, first: (Source, &'static [SourceAction])) -> Result<(), MigrateError> {
        let (mut next, mut failure) = (Some(first), None);
        while let Some((state, actions)) = next.take() {
            self.state = state;
            for action in actions {
                match self.execute(*action) {
                    Ok(event) => next = event.map(|event| state.step(event)).or(next),
                    Err(error) => {
                        failure.get_or_insert(error);
                        next = Some(state.step(SourceEvent::Failed));
                        break;
                    }
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Carries out one action; returns the event that it causes.
    fn execute(&mut self, action: SourceAction) -> Result<Option<SourceEvent>, MigrateError> {
        match action {
            SourceAction::RecordAndOffer => {
                self.record.begin().map_err(MigrateError::Record)?;
                self.offered = Some(self.send_offer()?);
            }
            SourceAction::Pause => {
                self.watchdog.pausing();
                self.paused = true;
                let paused = self.machine.pause();
                paused.map_err(|error| MigrateError::Capture(CaptureError::Machine(error)))?;
            }
            SourceAction::RecordHandover => {
                self.record.commit().map_err(MigrateError::Record)?;
                return Ok(Some(SourceEvent::Recorded));
            }
            SourceAction::RecordOurs => match self.record.revert() {
                Ok(()) => return Ok(Some(SourceEvent::Recorded)),
                Err(error) => {
                    tracing::error!(error = &*error, "the machine stays paused: who has it is open")
                }
            },
            SourceAction::ResumeHere => {
                if self.paused
                    && let Err(error) = self.unpause()
                {
                    tracing::error!(%error, "the machine stays paused after a failed migration");
                }
            }
            SourceAction::Committed(action) => {
                self.commit = Some(PendingCommit::start(action, self.link, self.offer.handover));
            }
            SourceAction::Aborted(action) => self.record.aborted(action),
        }
        Ok(None)
    }

    /// Sends the offer. Indexes the boot files while the target reserves resources.
    fn send_offer(&self) -> Result<(Bytes, BootFiles), MigrateError> {
        let (offer, open, link) = (self.offer, self.open_boot_file, self.link);
        thread::scope(|scope| {
            let boot = scope.spawn(|| BootFiles::index(&offer.blobs, open));
            let accepted = link::call(link, protocol::OFFER, offer, Bytes::new());
            // Boot files only save bytes, so a failure to index them is ignored.
            Ok((accepted.map_err(MigrateError::Offer)?, boot.join().unwrap_or_default()))
        })
    }
}

/// The machine as the capture loop sees it.
impl Machine for Attempt<'_> {
    fn early_device_state(&mut self) -> Option<Vec<u8>> {
        self.machine.early_device_state()
    }

    fn about_to_pause(&mut self) {
        self.machine.about_to_pause();
    }

    fn slow_down(&mut self, predicted: Duration) -> bool {
        self.machine.slow_down(predicted)
    }

    fn pause(&mut self) -> Result<(), MachineError> {
        self.run(self.state.step(SourceEvent::RoundsOver)).map_err(|error| match error {
            MigrateError::Capture(CaptureError::Machine(error)) => error,
            error => MachineError::new("pause", error),
        })
    }

    fn unpause(&mut self) -> Result<(), MachineError> {
        self.paused = false;
        self.machine.unpause()
    }

    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        self.machine.device_state()
    }
}
