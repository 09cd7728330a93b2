//! Events of this host, in order: a bounded buffer for readers who come later, and a wake-up for those who
//! follow it. They are in a log too, so that those of earlier daemons are known.
//!
//! Numbers go on from the last event that is known, or begin at the time of the daemon's start in
//! milliseconds, whichever is larger: they grow across restarts, also if the log is lost.

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};
use tokio::sync::watch;
use whimbrel_api::{EventKind, HostEvent};
use whimbrel_wire::{LineLog, LogBounds};

/// Most events that are retained.
const RETAINED_MAX: usize = 1000;
/// Most characters of a text.
const TEXT_MAX: usize = 500;

/// Bounds of the log: more than the events that are retained.
const BOUNDS: LogBounds = LogBounds { file_max: 1 << 20, old_files: 1 };

/// The events of this host.
#[derive(Debug)]
pub(crate) struct EventLog {
    retained: Mutex<VecDeque<HostEvent>>,
    /// Number of the last event.
    last: watch::Sender<u64>,
    log: Option<LineLog>,
}

impl Default for EventLog {
    fn default() -> Self {
        Self { retained: Mutex::default(), last: watch::Sender::new(crate::now_ms()), log: None }
    }
}

impl EventLog {
    /// Opens the log `path`, in a folder of its own.
    pub(crate) fn open(path: PathBuf) -> Self {
        let log = LineLog::open(path, BOUNDS);
        let mut known: Vec<HostEvent> = log.entries();
        // Events of one moment are in the log in any order.
        known.sort_by_key(|event| event.number);
        let known: VecDeque<_> = known.split_off(known.len().saturating_sub(RETAINED_MAX)).into();
        let last = known.back().map_or(0, |event| event.number).max(crate::now_ms());
        Self { retained: Mutex::new(known), last: watch::Sender::new(last), log: Some(log) }
    }

    /// Appends an event, and wakes those who follow.
    pub(crate) fn add(&self, kind: EventKind, subject: impl ToString, text: &str) {
        let mut retained = self.retained.lock().unwrap_or_else(PoisonError::into_inner);
        let number = *self.last.borrow() + 1;
        let text = text.chars().take(TEXT_MAX).collect();
        let event = HostEvent { number, time_ms: crate::now_ms(), subject: subject.to_string(), kind, text };
        retained.push_back(event.clone());
        if retained.len() > RETAINED_MAX {
            retained.pop_front();
        }
        self.last.send_replace(number);
        drop(retained);
        // A disk that does not answer holds no reader of events.
        self.log.iter().for_each(|log| log.add(&event));
    }

    /// Events after the one with this number; with none, all that are retained. Says first if some that the
    /// caller does not know are gone.
    pub(crate) fn after(&self, known: Option<u64>) -> Vec<HostEvent> {
        let retained = self.retained.lock().unwrap_or_else(PoisonError::into_inner);
        // A number from the future is of a daemon whose clock was ahead.
        let known = known.filter(|number| *number <= *self.last.borrow());
        let after = |event: &&HostEvent| known.is_none_or(|number| event.number > number);
        let mut events: Vec<_> = retained.iter().filter(after).cloned().collect();
        // Numbers between two daemons belong to no event, so only the oldest one tells of a gap.
        if let (Some(number), Some(oldest)) = (known, retained.front())
            && oldest.number > number + 1
        {
            let (number, time_ms) = (oldest.number - 1, oldest.time_ms);
            let text = "earlier events are no longer known".to_owned();
            let missed = HostEvent { number, time_ms, subject: String::new(), kind: EventKind::Missed, text };
            events.insert(0, missed);
        }
        events
    }

    /// Changes with every event.
    pub(crate) fn follow(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(events: &[HostEvent]) -> Vec<u64> {
        events.iter().map(|event| event.number).collect()
    }

    #[test]
    fn a_reader_goes_on_after_what_it_knows_and_hears_of_a_gap() {
        let log = EventLog::default();
        for number in 0..RETAINED_MAX + 10 {
            log.add(EventKind::Machine, "web", &number.to_string());
        }
        let all = log.after(None);
        assert_eq!(all.len(), RETAINED_MAX, "the buffer is bounded");
        let (first, last) = (all[0].number, all[RETAINED_MAX - 1].number);
        assert!(log.after(Some(last)).is_empty());
        assert_eq!(numbers(&log.after(Some(last - 2))), [last - 1, last]);
        assert_eq!(log.after(Some(first - 1)).len(), RETAINED_MAX, "nothing is missing");
        let gap = log.after(Some(first - 2));
        assert_eq!((gap[0].kind, gap.len()), (EventKind::Missed, RETAINED_MAX + 1));
        assert_eq!(log.after(Some(last + 1)).len(), RETAINED_MAX, "a number of another daemon");
    }

    #[test]
    fn events_of_earlier_daemons_are_known_and_numbers_go_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events/events.jsonl");
        let ahead = crate::now_ms() + 1_000_000;
        let before = EventLog::open(path.clone());
        // The clock of that daemon was ahead.
        before.last.send_replace(ahead);
        before.add(EventKind::Takeover, "web", "by beta");
        let now = EventLog::open(path.clone());
        now.add(EventKind::Machine, "web", "running");
        assert_eq!(numbers(&now.after(None)), [ahead + 1, ahead + 2]);
        assert_eq!(now.after(None)[0].kind, EventKind::Takeover);
        assert_eq!(numbers(&now.after(Some(ahead + 1))), [ahead + 2]);
        for number in 0..RETAINED_MAX {
            now.add(EventKind::Machine, "web", &number.to_string());
        }
        assert_eq!(EventLog::open(path).after(None), now.after(None));
    }

    #[test]
    fn a_follower_is_woken_and_long_texts_are_cut() {
        let log = EventLog::default();
        let mut follow = log.follow();
        log.add(EventKind::Machine, "web", &"ü".repeat(2 * TEXT_MAX));
        assert!(follow.has_changed().unwrap());
        assert_eq!(*follow.borrow_and_update(), log.after(None)[0].number);
        assert_eq!(log.after(None)[0].text.chars().count(), TEXT_MAX);
    }
}
