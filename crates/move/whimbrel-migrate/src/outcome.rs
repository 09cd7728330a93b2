//! Outcome of a handover: the actions of a source that has committed or given up. The target is told until it
//! answers.
//!
//! After the commit point there is no failure: [`confirm`] repeats the commit, over new connections where
//! needed, or until it is told to stop and leave that to a later call. The target may answer that the machine
//! never ran there: then it is this host's again.

use crate::{
    handover::{AbortedAction, CommittedAction, Source, SourceAction, SourceEvent},
    link::{self, Answer, Link, LinkError},
    protocol::{self, CommitReply, HandoverId, RunningSince},
    source::BoxError,
};
use bytes::Bytes;
use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Delays between repeated commits: the first and the longest.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(5)];

/// First action of a committed source, under way.
pub struct PendingCommit {
    action: CommittedAction,
    /// Commit that was sent.
    sent: Option<Result<SentCommit, LinkError>>,
}

impl PendingCommit {
    /// Starts an action: a commit is sent at once.
    pub(crate) fn start(action: CommittedAction, link: &dyn Link, handover: HandoverId) -> Self {
        let sent = matches!(action, CommittedAction::SendCommit).then(|| SentCommit::send(link, handover));
        Self { action, sent }
    }

    /// Commit that was not sent yet: the handover is that of an earlier daemon.
    pub fn unsent() -> Self {
        Self { action: CommittedAction::SendCommit, sent: None }
    }
}

impl std::fmt::Debug for PendingCommit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PendingCommit({:?}, sent: {})", self.action, self.sent.is_some())
    }
}

/// What a committed source needs of its daemon.
pub trait CommittedHost {
    /// Makes a new connection to the target.
    fn connect(&self) -> Result<Box<dyn Link>, BoxError>;

    /// Sleeps between attempts; returns whether to continue.
    fn wait(&self, pause: Duration) -> bool;

    /// Removes the paused machine and the record of the handover: the target runs the machine.
    fn free_machine(&mut self);

    /// Records durably that the machine, which never ran on the target, belongs to this host. After an error
    /// either may be on the disk.
    fn record_ours(&mut self) -> Result<(), BoxError>;

    /// Lets the machine run here again, with everything dirty for a later migration.
    fn resume_here(&mut self);

    /// Carries out an action of an aborted handover, or leaves it to [`abort`].
    fn aborted(&mut self, action: AbortedAction);
}

/// How a commit ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confirmed {
    /// The machine runs on the target, since this instant as far as the target reports it.
    Runs(Instant),
    /// The machine never ran on the target, and is this host's again.
    Returned,
    /// [`CommittedHost::wait`] said to stop before the outcome was known and recorded.
    Open,
}

/// Repeats the commit until there is a reply, then frees the machine or takes it back.
pub fn confirm(handover: HandoverId, first: PendingCommit, host: &mut dyn CommittedHost) -> Confirmed {
    let PendingCommit { action, sent } = first;
    let mut confirmation = Confirmation { handover, sent, pause: RETRY_DELAYS[0], outcome: Confirmed::Open };
    let mut state = Source::Committed;
    let mut actions = VecDeque::from([SourceAction::Committed(action)]);
    while let Some(action) = actions.pop_front() {
        let event = match action {
            SourceAction::Committed(action) => confirmation.execute(action, host),
            SourceAction::Aborted(action) => {
                host.aborted(action);
                None
            }
            // The table has none of these after the commit point, as its test checks.
            SourceAction::RecordAndOffer
            | SourceAction::Pause
            | SourceAction::RecordHandover
            | SourceAction::RecordOurs
            | SourceAction::ResumeHere => None,
        };
        let Some(event) = event else { continue };
        if event == SourceEvent::Failed && !confirmation.wait(host) {
            return Confirmed::Open;
        }
        let (next, more) = state.step(event);
        state = next;
        actions.extend(more);
    }
    confirmation.outcome
}

/// Confirmation of one handover, under way.
struct Confirmation {
    handover: HandoverId,
    /// Commit that was sent already.
    sent: Option<Result<SentCommit, LinkError>>,
    /// Delay before the next attempt.
    pause: Duration,
    outcome: Confirmed,
}

impl Confirmation {
    /// Carries out one action; returns the event that it causes.
    fn execute(&mut self, action: CommittedAction, host: &mut dyn CommittedHost) -> Option<SourceEvent> {
        match action {
            CommittedAction::SendCommit => {
                let handover = self.handover;
                let sent = match self.sent.take() {
                    Some(sent) => sent.map_err(BoxError::from),
                    None => host.connect().and_then(|link| Ok(SentCommit::send(&*link, handover)?)),
                };
                return Some(match sent.and_then(SentCommit::wait) {
                    Ok(CommitReply::Running(said)) => {
                        self.outcome = Confirmed::Runs(since(said));
                        SourceEvent::TargetRuns
                    }
                    Ok(CommitReply::NeverRan) => SourceEvent::TargetNeverRan,
                    Err(error) => {
                        tracing::warn!(%handover, error = &*error, "the target has not confirmed the handover yet");
                        SourceEvent::Failed
                    }
                });
            }
            CommittedAction::RecordOurs => {
                return Some(match host.record_ours() {
                    Ok(()) => SourceEvent::Recorded,
                    Err(error) => {
                        tracing::error!(handover = %self.handover, error = &*error, "a machine came back and cannot be recorded: it stays paused until there is room for its record");
                        SourceEvent::Failed
                    }
                });
            }
            CommittedAction::ResumeHere => {
                self.outcome = Confirmed::Returned;
                host.resume_here();
            }
            CommittedAction::FreeMachine => host.free_machine(),
        }
        None
    }

    /// Waits before the next attempt; returns whether there is to be one.
    fn wait(&mut self, host: &dyn CommittedHost) -> bool {
        let goes_on = host.wait(self.pause);
        self.pause = (self.pause * 2).min(RETRY_DELAYS[1]);
        goes_on
    }
}

/// Tells the target to discard a handover that was aborted; `remove_record` is called once it has. May be
/// repeated.
pub fn abort(link: &dyn Link, handover: HandoverId, remove_record: impl Fn()) -> Result<(), LinkError> {
    let mut actions = VecDeque::from_iter(AbortedAction::after(SourceEvent::Failed));
    while let Some(action) = actions.pop_front() {
        match action {
            AbortedAction::SendAbort => {
                link::call(link, protocol::ABORT, &handover, Bytes::new())?;
                actions.extend(AbortedAction::after(SourceEvent::TargetDiscarded));
            }
            AbortedAction::RemoveRecord => remove_record(),
        }
    }
    Ok(())
}

/// Commit whose reply has not arrived.
struct SentCommit {
    answer: Box<dyn Answer>,
    /// Whether the target may give the machine back.
    returnable: bool,
}

impl SentCommit {
    /// Sends a commit; one that may be answered with the machine's return if the target knows that.
    fn send(link: &dyn Link, handover: HandoverId) -> Result<Self, LinkError> {
        let header = postcard::to_stdvec(&handover).expect("an id is always encodable");
        let returnable = link.gives_back();
        let kind = if returnable { protocol::COMMIT_OR_RETURN } else { protocol::COMMIT };
        Ok(Self { answer: link.send(kind, header, Bytes::new())?, returnable })
    }

    fn wait(self) -> Result<CommitReply, BoxError> {
        let reply = self.answer.wait()?;
        match self.returnable {
            true => Ok(postcard::from_bytes(&reply)?),
            false => Ok(CommitReply::Running(postcard::from_bytes(&reply).unwrap_or_default())),
        }
    }
}

/// Start of the machine's CPUs by the reply to a commit.
fn since(said: RunningSince) -> Instant {
    let now = Instant::now();
    now.checked_sub(Duration::from_micros(said.since)).unwrap_or(now)
}
