//! Who runs the machine: the handover as two pure state machines, one for each side.
//!
//! ```text
//!   source                                        target
//!   Copying  ---- offer, pages ---------------->  Receiving
//!   Stopped  ---- last pages, device state ---->  (loads, stays paused)
//!            <--- ready -----------------------   Prepared
//!   COMMIT POINT: the source writes down "handed over" and syncs it; from here on it never runs again
//!   Committed --- commit (repeated until answered) ->
//!            <--- running ---------------------   Running
//!   Done
//! ```
//!
//! Before the commit point any failure makes the source go on and the target forget. After it only the target
//! may run, so the source repeats `commit` until it is answered. A target that is `Prepared` and hears nothing
//! must wait: it cannot know on which side of the commit point the source is.
//!
//! No I/O and no clock here; `explore` in the tests walks every interleaving of both sides with lost,
//! repeated and delayed messages and with crashes, and checks that never both run and that the machine is
//! never lost.

/// The source's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The machine runs here and is being copied (or was not even offered yet).
    Copying,
    /// The machine is paused here; its last pages and device state are on their way.
    Stopped,
    /// Handed over, written down: it never runs here again. The target may not know yet.
    Committed,
    /// The target said that it runs. Nothing is left here.
    Done,
    /// Given up before the commit point: the machine runs here.
    Aborted,
}

/// What the source hears or decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceEvent {
    /// Little enough is left: stop and send the rest.
    RoundsOver,
    /// The target has everything, loaded and paused.
    TargetReady,
    /// The target says that the machine runs there.
    TargetRuns,
    /// Anything went wrong, or the user cancelled: link lost, target refused, local error.
    Failed,
    /// This daemon came back after a crash and found its durable record.
    Restarted,
}

/// What the source must do, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceAction {
    /// Pause the machine and send what is left.
    StopAndSend,
    /// Write down, durably, that the machine was handed over.
    RecordHandover,
    /// Tell the target to run it; again after each silence.
    SendCommit,
    /// Tell the target to forget it (best effort).
    SendAbort,
    /// Let the machine run here again, with every page it has sent unseen again.
    GoOn,
    /// End the paused machine here and free what it held.
    Retire,
}

impl Source {
    /// The one transition function.
    pub fn step(self, event: SourceEvent) -> (Source, &'static [SourceAction]) {
        use {Source::*, SourceAction::*, SourceEvent::*};
        match (self, event) {
            (Copying, RoundsOver) => (Stopped, &[StopAndSend]),
            (Stopped, TargetReady) => (Committed, &[RecordHandover, SendCommit]),
            (Copying | Stopped, Failed | Restarted) => (Aborted, &[SendAbort, GoOn]),
            (Committed, TargetRuns) => (Done, &[Retire]),
            (Committed, Failed | Restarted) => (Committed, &[SendCommit]),
            // Late or repeated news changes nothing.
            (state, _) => (state, &[]),
        }
    }

    /// Whether the machine may run on the source.
    pub fn may_run(self) -> bool {
        matches!(self, Source::Copying | Source::Aborted)
    }
}

/// The target's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    /// Room is reserved, pages arrive. Nothing here is worth keeping if the source goes away.
    Receiving,
    /// Everything is here, loaded and paused; only the source's word decides what happens.
    Prepared,
    /// The machine runs here.
    Running,
    /// Forgotten.
    Discarded,
}

/// What the target hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TargetEvent {
    /// The last pages and the device state came and were loaded.
    Loaded,
    /// The source committed.
    Commit,
    /// The source gave up.
    Abort,
    /// The connection to the source is gone, or this side failed to load.
    Failed,
    /// This daemon came back after a crash.
    Restarted,
}

/// What the target must do, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TargetAction {
    /// Write down, durably, that a prepared machine waits here; then tell the source.
    RecordAndSayReady,
    /// Let the machine run, open its network, announce it; then tell the source.
    RunAndSaySo,
    /// Tell the source (again) that the machine runs here.
    SayRunning,
    /// End it and free what it held.
    Discard,
}

impl Target {
    /// The one transition function.
    pub fn step(self, event: TargetEvent) -> (Target, &'static [TargetAction]) {
        use {Target::*, TargetAction::*, TargetEvent::*};
        match (self, event) {
            (Receiving, Loaded) => (Prepared, &[RecordAndSayReady]),
            (Receiving, Abort | Failed | Restarted) => (Discarded, &[Discard]),
            (Prepared, Commit) => (Running, &[RunAndSaySo]),
            (Prepared, Abort) => (Discarded, &[Discard]),
            (Running, Commit) => (Running, &[SayRunning]),
            (state, _) => (state, &[]),
        }
    }

    /// Whether the machine may run on the target.
    pub fn may_run(self) -> bool {
        self == Target::Running
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashSet, VecDeque};

    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    enum Message {
        Last,
        Ready,
        Commit,
        Abort,
        Runs,
    }

    /// Both sides and everything under way. Messages are never removed by delivery: that models loss (never
    /// delivered), repetition (delivered twice) and delay (delivered later than younger ones) in one.
    #[derive(Debug, Clone, PartialEq, Eq, Hash)]
    struct Both {
        source: Source,
        target: Target,
        sent: [bool; 5],
    }

    impl Both {
        fn start() -> Self {
            Self { source: Source::Copying, target: Target::Receiving, sent: [false; 5] }
        }

        fn source(&self, event: SourceEvent) -> Both {
            let (source, actions) = self.source.step(event);
            let mut next = Both { source, ..self.clone() };
            for action in actions {
                match action {
                    SourceAction::StopAndSend => next.sent[Message::Last as usize] = true,
                    SourceAction::SendCommit => next.sent[Message::Commit as usize] = true,
                    SourceAction::SendAbort => next.sent[Message::Abort as usize] = true,
                    SourceAction::RecordHandover | SourceAction::GoOn | SourceAction::Retire => {}
                }
            }
            next
        }

        fn target(&self, event: TargetEvent) -> Both {
            let (target, actions) = self.target.step(event);
            let mut next = Both { target, ..self.clone() };
            for action in actions {
                match action {
                    TargetAction::RecordAndSayReady => next.sent[Message::Ready as usize] = true,
                    TargetAction::RunAndSaySo | TargetAction::SayRunning => {
                        next.sent[Message::Runs as usize] = true;
                    }
                    TargetAction::Discard => {}
                }
            }
            next
        }

        fn has(&self, message: Message) -> bool {
            self.sent[message as usize]
        }

        fn successors(&self) -> Vec<Both> {
            use Message::*;
            let mut all = vec![
                self.source(SourceEvent::RoundsOver),
                self.source(SourceEvent::Failed),
                self.source(SourceEvent::Restarted),
                self.target(TargetEvent::Failed),
                self.target(TargetEvent::Restarted),
            ];
            let deliveries = [
                (Last, self.target(TargetEvent::Loaded)),
                (Commit, self.target(TargetEvent::Commit)),
                (Abort, self.target(TargetEvent::Abort)),
                (Ready, self.source(SourceEvent::TargetReady)),
                (Runs, self.source(SourceEvent::TargetRuns)),
            ];
            all.extend(deliveries.into_iter().filter(|(m, _)| self.has(*m)).map(|(_, next)| next));
            all
        }
    }

    fn explore(mut visit: impl FnMut(&Both)) -> usize {
        let mut seen = HashSet::from([Both::start()]);
        let mut queue = VecDeque::from([Both::start()]);
        while let Some(both) = queue.pop_front() {
            visit(&both);
            for next in both.successors() {
                if seen.insert(next.clone()) {
                    queue.push_back(next);
                }
            }
        }
        seen.len()
    }

    #[test]
    fn never_do_both_sides_run() {
        let states = explore(|both| {
            assert!(!(both.source.may_run() && both.target.may_run()), "{both:?}");
        });
        assert!(states >= 12, "the walk reached only {states} states");
    }

    #[test]
    fn the_machine_is_never_lost() {
        explore(|both| {
            let source_has_it = !matches!(both.source, Source::Done);
            let target_has_it = both.target != Target::Discarded;
            assert!(source_has_it || target_has_it, "{both:?}");
            if matches!(both.source, Source::Committed | Source::Done) {
                assert!(matches!(both.target, Target::Prepared | Target::Running), "{both:?}");
            }
        });
    }

    /// From everywhere, if messages get through from now on, exactly one side ends up running.
    #[test]
    fn a_healed_link_always_ends_with_one_runner() {
        explore(|both| {
            let mut now = both.clone();
            for _ in 0..8 {
                let event = match now.source {
                    Source::Copying => SourceEvent::RoundsOver,
                    Source::Committed => SourceEvent::Restarted,
                    _ => SourceEvent::TargetRuns,
                };
                now = now.source(event);
                for (message, event) in [
                    (Message::Last, TargetEvent::Loaded),
                    (Message::Commit, TargetEvent::Commit),
                    (Message::Abort, TargetEvent::Abort),
                ] {
                    if now.has(message) {
                        now = now.target(event);
                    }
                }
                if now.target == Target::Prepared && now.source == Source::Stopped {
                    now = now.source(SourceEvent::TargetReady);
                }
                if now.target == Target::Running {
                    now = now.source(SourceEvent::TargetRuns);
                }
                if now.target == Target::Discarded && now.source == Source::Stopped {
                    now = now.source(SourceEvent::Failed);
                }
            }
            assert!(now.source.may_run() != now.target.may_run(), "{both:?} ended as {now:?}");
        });
    }
}
