//! Commands of the host to the guest agent.

use crate::{
    codec::{Malformed, Reader, Writer},
    frame::Frame,
};

/// Most pages of a sample.
pub const SAMPLE_MAX: usize = 4096;

/// Command of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Announces the host; answered by [`Report::Ready`](crate::Report::Ready). Earlier commands are void:
    /// stunned processes continue.
    Hello {
        /// Name of the host.
        host: String,
        /// Name of the machine.
        machine: String,
        /// Pages of memory that the machine has.
        pages: u64,
    },
    /// Drop clean caches; answered by [`Report::Freed`](crate::Report::Freed).
    FreeCaches,
    /// Stun the processes that write most of these pages, for `lease_ms` unless [`Command::ExtendStun`]
    /// follows; answered by [`Report::Stunned`](crate::Report::Stunned).
    Stun {
        /// Duration of the stun without an extension.
        lease_ms: u32,
        /// Pages that a process may have written without being stunned.
        limit: u32,
        /// Pages that all processes without a stun may write together.
        spare: u32,
        /// Number of written pages that each page of the sample represents.
        each: u32,
        /// Some of the pages written during one sampling interval, as indices into memory; at most
        /// [`SAMPLE_MAX`].
        sample: Vec<u32>,
    },
    /// Extend the stun. Not answered.
    ExtendStun {
        /// Duration from now on.
        lease_ms: u32,
    },
    /// Release all stunned processes; answered by [`Report::Released`](crate::Report::Released).
    Release,
    /// Announce the guest's addresses on the network; answered by
    /// [`Report::Announced`](crate::Report::Announced).
    Announce,
    /// Result of a guest request, with the id of the request. Not answered.
    RequestResult(RequestOutcome),
    /// Set the wall clock forward if it is behind; answered by
    /// [`Report::ClockSet`](crate::Report::ClockSet). Only for agents with
    /// [`FEATURE_CLOCK`](crate::FEATURE_CLOCK).
    SetClock {
        /// Milliseconds since 1970, UTC, by the clock of the host.
        unix_ms: u64,
    },
}

/// Result of a guest request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestOutcome {
    /// The operation has started.
    Started,
    /// The request was refused, with the reason.
    Refused(String),
    /// The operation succeeded, with its result.
    Done(String),
    /// The operation failed, with the reason.
    Failed(String),
}

const HELLO: u8 = 1;
const FREE_CACHES: u8 = 2;
const STUN: u8 = 3;
const EXTEND_STUN: u8 = 4;
const RELEASE: u8 = 5;
const ANNOUNCE: u8 = 6;
const REQUEST_RESULT: u8 = 7;
const SET_CLOCK: u8 = 8;

impl Command {
    /// Encodes the command as a frame.
    pub fn to_frame(&self, session: u32, id: u32) -> Frame {
        let out = Writer::default();
        let (kind, out) = match self {
            Self::Hello { host, machine, pages } => (HELLO, out.text(host).text(machine).u64(*pages)),
            Self::FreeCaches => (FREE_CACHES, out),
            Self::Stun { lease_ms, limit, spare, each, sample } => {
                let sample = &sample[..sample.len().min(SAMPLE_MAX)];
                let out = out.u32(*lease_ms).u32(*limit).u32(*spare).u32(*each).u32(sample.len() as u32);
                (STUN, sample.iter().fold(out, |out, page| out.u32(*page)))
            }
            Self::ExtendStun { lease_ms } => (EXTEND_STUN, out.u32(*lease_ms)),
            Self::Release => (RELEASE, out),
            Self::Announce => (ANNOUNCE, out),
            Self::RequestResult(RequestOutcome::Started) => (REQUEST_RESULT, out.u8(0).text("")),
            Self::RequestResult(RequestOutcome::Refused(why)) => (REQUEST_RESULT, out.u8(1).text(why)),
            Self::RequestResult(RequestOutcome::Done(what)) => (REQUEST_RESULT, out.u8(2).text(what)),
            Self::RequestResult(RequestOutcome::Failed(why)) => (REQUEST_RESULT, out.u8(3).text(why)),
            Self::SetClock { unix_ms } => (SET_CLOCK, out.u64(*unix_ms)),
        };
        Frame { kind, session, id, payload: out.0 }
    }

    /// Decodes a command from a frame.
    pub fn from_frame(frame: &Frame) -> Result<Self, Malformed> {
        let mut from = Reader(&frame.payload);
        let order = match frame.kind {
            HELLO => Self::Hello { host: from.text()?, machine: from.text()?, pages: from.u64()? },
            FREE_CACHES => Self::FreeCaches,
            STUN => Self::stun(&mut from)?,
            EXTEND_STUN => Self::ExtendStun { lease_ms: from.u32()? },
            RELEASE => Self::Release,
            ANNOUNCE => Self::Announce,
            REQUEST_RESULT => match (from.u8()?, from.text()?) {
                (0, _) => Self::RequestResult(RequestOutcome::Started),
                (1, why) => Self::RequestResult(RequestOutcome::Refused(why)),
                (2, what) => Self::RequestResult(RequestOutcome::Done(what)),
                (3, why) => Self::RequestResult(RequestOutcome::Failed(why)),
                _ => return Err(Malformed { what: "outcome" }),
            },
            SET_CLOCK => Self::SetClock { unix_ms: from.u64()? },
            _ => return Err(Malformed { what: "kind" }),
        };
        from.end()?;
        Ok(order)
    }

    fn stun(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (lease_ms, limit, spare, each) = (from.u32()?, from.u32()?, from.u32()?, from.u32()?);
        let count = from.count(SAMPLE_MAX, 4)?;
        let sample = (0..count).map(|_| from.u32()).collect::<Result<_, _>>()?;
        Ok(Self::Stun { lease_ms, limit, spare, each, sample })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn outcome() -> impl Strategy<Value = RequestOutcome> {
        prop_oneof![
            Just(RequestOutcome::Started),
            "[a-z ]{0,40}".prop_map(RequestOutcome::Refused),
            "[a-z ]{0,40}".prop_map(RequestOutcome::Done),
            "[a-z ]{0,40}".prop_map(RequestOutcome::Failed),
        ]
    }

    fn order() -> impl Strategy<Value = Command> {
        let sample = prop::collection::vec(any::<u32>(), 0..50);
        prop_oneof![
            ("[a-z]{0,9}", "[a-z]{0,9}", any::<u64>()).prop_map(|(host, machine, pages)| Command::Hello {
                host,
                machine,
                pages
            }),
            Just(Command::FreeCaches),
            (any::<[u32; 4]>(), sample).prop_map(|([lease_ms, limit, spare, each], sample)| Command::Stun {
                lease_ms,
                limit,
                spare,
                each,
                sample
            }),
            any::<u32>().prop_map(|lease_ms| Command::ExtendStun { lease_ms }),
            Just(Command::Release),
            Just(Command::Announce),
            outcome().prop_map(Command::RequestResult),
        ]
    }

    proptest! {
        #[test]
        fn orders_arrive_as_they_were_given(order in order(), session: u32, id: u32) {
            let frame = order.to_frame(session, id);
            prop_assert_eq!((frame.session, frame.id), (session, id));
            prop_assert_eq!(Command::from_frame(&frame), Ok(order));
        }

        #[test]
        fn whatever_comes_is_an_order_or_an_error(kind in 0..10u8, payload in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(order) = Command::from_frame(&Frame { kind, session: 0, id: 0, payload: payload.clone() }) {
                prop_assert_eq!(Command::from_frame(&order.to_frame(0, 0)), Ok(order));
            }
        }
    }

    #[test]
    fn a_text_that_is_too_long_is_cut_at_a_character() {
        let told = Command::RequestResult(RequestOutcome::Refused("ä".repeat(200)));
        assert_eq!(
            Command::from_frame(&told.to_frame(0, 0)),
            Ok(Command::RequestResult(RequestOutcome::Refused("ä".repeat(127))))
        );
    }
}
