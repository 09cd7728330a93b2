//! Outcome of a handover: the actions of a source that has committed or given up. The target is told until it
//! answers.
//!
//! After the commit point there is no failure: [`confirm`] repeats the commit, over new connections where
//! needed, or until it is told to stop and leave that to a later call.

use crate::{
    handover::{AbortedAction, CommittedAction, SourceEvent},
    link::{self, Answer, Link, LinkError},
    protocol::{self, HandoverId, RunningSince},
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
    sent: Option<Result<Box<dyn Answer>, LinkError>>,
}

impl PendingCommit {
    /// Starts an action: a commit is sent at once.
    pub(crate) fn start(action: CommittedAction, link: &dyn Link, handover: HandoverId) -> Self {
        let sent = match action {
            CommittedAction::SendCommit => Some(send_commit(link, handover)),
            CommittedAction::FreeMachine => None,
        };
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
}

/// Repeats the commit until there is a reply, then frees the machine. Returns the instant since which the
/// machine runs on the target, as far as the target reports it; nothing if `wait` said to stop.
pub fn confirm(handover: HandoverId, first: PendingCommit, host: &mut dyn CommittedHost) -> Option<Instant> {
    let (mut runs_since, mut pause) = (None, RETRY_DELAYS[0]);
    let PendingCommit { action, mut sent } = first;
    let mut actions = VecDeque::from([action]);
    while let Some(action) = actions.pop_front() {
        match action {
            CommittedAction::SendCommit => {
                let sent = match sent.take() {
                    Some(sent) => sent.map_err(BoxError::from),
                    None => host.connect().and_then(|link| Ok(send_commit(&*link, handover)?)),
                };
                let event = match sent.and_then(|sent| Ok(sent.wait()?)) {
                    Ok(reply) => {
                        runs_since = Some(since(&reply));
                        SourceEvent::TargetRuns
                    }
                    Err(error) => {
                        tracing::warn!(%handover, error = &*error, "the target has not confirmed the handover yet");
                        if !host.wait(pause) {
                            return None;
                        }
                        pause = (pause * 2).min(RETRY_DELAYS[1]);
                        SourceEvent::Failed
                    }
                };
                actions.extend(CommittedAction::after(event));
            }
            CommittedAction::FreeMachine => host.free_machine(),
        }
    }
    runs_since
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

fn send_commit(link: &dyn Link, handover: HandoverId) -> Result<Box<dyn Answer>, LinkError> {
    let header = postcard::to_stdvec(&handover).expect("an id is always encodable");
    link.send(protocol::COMMIT, header, Bytes::new())
}

/// Start of the machine's CPUs by the reply to a commit.
fn since(reply: &[u8]) -> Instant {
    let said = postcard::from_bytes::<RunningSince>(reply).unwrap_or_default();
    let now = Instant::now();
    now.checked_sub(Duration::from_micros(said.since)).unwrap_or(now)
}
