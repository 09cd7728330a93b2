//! Reports of the guest agent to the host.

use crate::{
    codec::{Malformed, Reader, Writer},
    frame::Frame,
};

/// Most processes of a list.
pub const PROCESSES_MAX: usize = 64;
/// Features of this version, for [`Report::Ready`]: bit 0 drops caches, bit 1 stuns, bit 2 announces, bit 3
/// sets the clock.
pub const FEATURES: u32 = 0b111 | FEATURE_CLOCK;
/// Feature of agents that understand [`Command::SetClock`](crate::Command::SetClock).
pub const FEATURE_CLOCK: u32 = 0b1000;

/// Report of the guest agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// The agent is ready: sent at its start, and as answer to every
    /// [`Command::Hello`](crate::Command::Hello).
    Ready {
        /// Bitmap of its features, see [`FEATURES`].
        features: u32,
        /// Version of the agent, for people.
        version: String,
    },
    /// Clean caches were dropped.
    Freed {
        /// Free memory before, in bytes.
        before: u64,
        /// Free memory afterwards, in bytes.
        after: u64,
    },
    /// Processes were stunned.
    Stunned {
        /// Stunned processes, at most [`PROCESSES_MAX`].
        held: Vec<Process>,
        /// Processes that wrote too much but must not be stunned.
        spared: Vec<Process>,
    },
    /// All stunned processes were released.
    Released {
        /// Number of released processes.
        count: u32,
    },
    /// The guest's addresses were announced on the network.
    Announced {
        /// Number of frames sent.
        frames: u32,
    },
    /// Request of the guest; answered by [`Command::RequestResult`](crate::Command::RequestResult).
    Request(GuestRequest),
    /// The wall clock is not behind any more.
    ClockSet {
        /// Milliseconds by which it was set forward.
        forward_ms: u64,
    },
    /// The command failed or was refused.
    Failed {
        /// Reason of the failure.
        reason: String,
    },
}

/// Process of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Process id in the guest.
    pub pid: u32,
    /// Estimated number of pages that it wrote.
    pub pages: u32,
    /// Name of the process.
    pub name: String,
}

/// Request of the guest to the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestRequest {
    /// Migrate the machine.
    Migrate {
        /// Name of the target host.
        host: String,
    },
    /// Save the machine as a capsule.
    Checkpoint {
        /// Tag of the capsule; empty for none.
        tag: String,
    },
}

const READY: u8 = 0x81;
const FREED: u8 = 0x82;
const STUNNED: u8 = 0x83;
const RELEASED: u8 = 0x85;
const ANNOUNCED: u8 = 0x86;
const ASK: u8 = 0x87;
const CLOCK_SET: u8 = 0x88;
const FAILED: u8 = 0xff;

/// Bytes of a process without a name.
const PROCESS_LEAST: usize = 9;

impl Report {
    /// Encodes the report as a frame.
    pub fn to_frame(&self, session: u32, id: u32) -> Frame {
        let out = Writer::default();
        let (kind, out) = match self {
            Self::Ready { features, version } => (READY, out.u32(*features).text(version)),
            Self::Freed { before, after } => (FREED, out.u64(*before).u64(*after)),
            Self::Stunned { held, spared } => (STUNNED, put(put(out, held), spared)),
            Self::Released { count } => (RELEASED, out.u32(*count)),
            Self::Announced { frames } => (ANNOUNCED, out.u32(*frames)),
            Self::Request(GuestRequest::Migrate { host }) => (ASK, out.u8(0).text(host)),
            Self::Request(GuestRequest::Checkpoint { tag }) => (ASK, out.u8(1).text(tag)),
            Self::ClockSet { forward_ms } => (CLOCK_SET, out.u64(*forward_ms)),
            Self::Failed { reason } => (FAILED, out.text(reason)),
        };
        Frame { kind, session, id, payload: out.0 }
    }

    /// Decodes a report from a frame.
    pub fn from_frame(frame: &Frame) -> Result<Self, Malformed> {
        let mut from = Reader(&frame.payload);
        let word = match frame.kind {
            READY => Self::Ready { features: from.u32()?, version: from.text()? },
            FREED => Self::Freed { before: from.u64()?, after: from.u64()? },
            STUNNED => Self::Stunned { held: processes(&mut from)?, spared: processes(&mut from)? },
            RELEASED => Self::Released { count: from.u32()? },
            ANNOUNCED => Self::Announced { frames: from.u32()? },
            ASK => match (from.u8()?, from.text()?) {
                (0, host) => Self::Request(GuestRequest::Migrate { host }),
                (1, tag) => Self::Request(GuestRequest::Checkpoint { tag }),
                _ => return Err(Malformed { what: "request" }),
            },
            CLOCK_SET => Self::ClockSet { forward_ms: from.u64()? },
            FAILED => Self::Failed { reason: from.text()? },
            _ => return Err(Malformed { what: "kind" }),
        };
        from.end()?;
        Ok(word)
    }
}

fn put(out: Writer, processes: &[Process]) -> Writer {
    let processes = &processes[..processes.len().min(PROCESSES_MAX)];
    let each = |out: Writer, process: &Process| out.u32(process.pid).u32(process.pages).text(&process.name);
    processes.iter().fold(out.u32(processes.len() as u32), each)
}

fn processes(from: &mut Reader<'_>) -> Result<Vec<Process>, Malformed> {
    let count = from.count(PROCESSES_MAX, PROCESS_LEAST)?;
    let mut one = || Ok(Process { pid: from.u32()?, pages: from.u32()?, name: from.text()? });
    (0..count).map(|_| one()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn process() -> impl Strategy<Value = Process> {
        (any::<u32>(), any::<u32>(), "[a-z]{0,20}").prop_map(|(pid, pages, name)| Process {
            pid,
            pages,
            name,
        })
    }

    fn word() -> impl Strategy<Value = Report> {
        let list = || prop::collection::vec(process(), 0..5);
        prop_oneof![
            (any::<u32>(), "[0-9.]{0,8}").prop_map(|(features, version)| Report::Ready { features, version }),
            (any::<u64>(), any::<u64>()).prop_map(|(before, after)| Report::Freed { before, after }),
            (list(), list()).prop_map(|(held, spared)| Report::Stunned { held, spared }),
            any::<u32>().prop_map(|count| Report::Released { count }),
            any::<u32>().prop_map(|frames| Report::Announced { frames }),
            "[a-z]{0,9}".prop_map(|host| Report::Request(GuestRequest::Migrate { host })),
            "[a-z]{0,9}".prop_map(|tag| Report::Request(GuestRequest::Checkpoint { tag })),
            any::<u64>().prop_map(|forward_ms| Report::ClockSet { forward_ms }),
            "[a-z ]{0,90}".prop_map(|reason| Report::Failed { reason }),
        ]
    }

    proptest! {
        #[test]
        fn words_arrive_as_they_were_said(word in word(), session: u32, id: u32) {
            prop_assert_eq!(Report::from_frame(&word.to_frame(session, id)), Ok(word));
        }

        #[test]
        fn whatever_comes_is_a_word_or_an_error(kind: u8, payload in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(word) = Report::from_frame(&Frame { kind, session: 0, id: 0, payload: payload.clone() }) {
                prop_assert_eq!(Report::from_frame(&word.to_frame(0, 0)), Ok(word));
            }
        }
    }

    #[test]
    fn a_list_that_claims_more_than_there_is_is_refused_before_it_is_made() {
        let payload = u32::MAX.to_le_bytes().to_vec();
        assert!(Report::from_frame(&Frame { kind: STUNNED, session: 0, id: 0, payload }).is_err());
    }
}
