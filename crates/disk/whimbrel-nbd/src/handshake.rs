//! Handshake: a pure state machine, option bytes in, reply bytes out.
//!
//! ```text
//!   greeting ->
//!            <- client flags           then any number of
//!            <- option
//!    replies ->                        until EXPORT_NAME or GO is accepted (transmission begins) or ABORT
//! ```
//!
//! A malformed option that can be skipped gets an error reply and the handshake continues. A wrong magic
//! number, an oversize option or an unknown name for `EXPORT_NAME` (which has no error reply) ends the
//! connection.

use crate::constants::*;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone)]
pub(crate) struct Export {
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(crate) read_only: bool,
}

/// Result of the negotiation for the transmission phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Agreed {
    pub(crate) structured: bool,
    /// The client may query `base:allocation`.
    pub(crate) allocation: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    More,
    /// The step used this number of bytes; the handshake continues.
    Used(usize),
    /// The step used this number of bytes; the transmission phase begins.
    Transmission(usize, Agreed),
    /// The client aborted the handshake.
    Abort,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HandshakeError {
    #[error("unknown client flags {flags:#x}")]
    Flags { flags: u32 },
    #[error("an option has the wrong magic number {found:#x}")]
    Magic { found: u64 },
    #[error("an option of {len} bytes is too long")]
    TooLong { len: u32 },
    #[error("the client requested an unknown export")]
    NoSuchExport,
}

/// Server side of a handshake.
pub(crate) struct Handshake<'a> {
    export: &'a Export,
    phase: Phase,
    agreed: Agreed,
}

enum Phase {
    Flags,
    Options { no_zeroes: bool },
}

/// Fields of an option, consumed from the front; `None` when they are missing.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk()?;
        self.0 = tail;
        Some(*head)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// Text after its length.
    fn text(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.bytes(len as usize)
    }

    fn end<T>(&self, value: T) -> Option<T> {
        self.0.is_empty().then_some(value)
    }
}

impl Export {
    pub(crate) fn flags(&self) -> u16 {
        let always = EXPORT_HAS_FLAGS | EXPORT_FLUSH | EXPORT_DF | EXPORT_MULTI_CONN;
        match self.read_only {
            true => always | EXPORT_READ_ONLY,
            false => always | EXPORT_FUA | EXPORT_TRIM | EXPORT_WRITE_ZEROES,
        }
    }

    fn answers_to(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }
}

impl<'a> Handshake<'a> {
    /// Starts a handshake with the greeting.
    pub(crate) fn new(export: &'a Export, out: &mut Vec<u8>) -> Self {
        out.extend(NBDMAGIC.to_be_bytes());
        out.extend(IHAVEOPT.to_be_bytes());
        out.extend((FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
        Self { export, phase: Phase::Flags, agreed: Agreed::default() }
    }

    /// Runs one step with the bytes received and not yet used.
    pub(crate) fn step(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<Progress, HandshakeError> {
        let mut fields = Fields(input);
        match self.phase {
            Phase::Flags => {
                let Some(flags) = fields.u32() else { return Ok(Progress::More) };
                if flags & !u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) != 0 {
                    return Err(HandshakeError::Flags { flags });
                }
                self.phase = Phase::Options { no_zeroes: flags & u32::from(FLAG_NO_ZEROES) != 0 };
                Ok(Progress::Used(4))
            }
            Phase::Options { no_zeroes } => {
                // The magic number is checked as soon as it has arrived, so that a client with another
                // protocol is not waited for.
                match fields.u64() {
                    None => return Ok(Progress::More),
                    Some(IHAVEOPT) => {}
                    Some(found) => return Err(HandshakeError::Magic { found }),
                }
                let (Some(option), Some(len)) = (fields.u32(), fields.u32()) else {
                    return Ok(Progress::More);
                };
                if len as usize > MAX_OPTION {
                    return Err(HandshakeError::TooLong { len });
                }
                let Some(data) = fields.bytes(len as usize) else { return Ok(Progress::More) };
                self.option(option, data, no_zeroes, out)
            }
        }
    }

    fn option(
        &mut self,
        option: u32,
        data: &[u8],
        no_zeroes: bool,
        out: &mut Vec<u8>,
    ) -> Result<Progress, HandshakeError> {
        let used = 16 + data.len();
        match option {
            OPT_EXPORT_NAME => {
                if !self.export.answers_to(data) {
                    return Err(HandshakeError::NoSuchExport);
                }
                out.extend(self.export.size.to_be_bytes());
                out.extend(self.export.flags().to_be_bytes());
                out.extend([0; 124].iter().filter(|_| !no_zeroes));
                return Ok(Progress::Transmission(used, self.agreed));
            }
            OPT_ABORT => {
                reply(out, option, REP_ACK, &[]);
                return Ok(Progress::Abort);
            }
            OPT_GO if self.info(option, data, out) => return Ok(Progress::Transmission(used, self.agreed)),
            OPT_GO => {}
            OPT_INFO => {
                self.info(option, data, out);
            }
            OPT_LIST if data.is_empty() => {
                reply(out, option, REP_SERVER, &[&length(&self.export.name), self.export.name.as_bytes()]);
                reply(out, option, REP_ACK, &[]);
            }
            OPT_STRUCTURED_REPLY if data.is_empty() => {
                self.agreed.structured = true;
                reply(out, option, REP_ACK, &[]);
            }
            OPT_LIST | OPT_STRUCTURED_REPLY => reply(out, option, REP_ERR_INVALID, &[]),
            OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT => self.meta_context(option, data, out),
            _ => reply(out, option, REP_ERR_UNSUP, &[]),
        }
        Ok(Progress::Used(used))
    }

    /// Answers INFO and GO; true if acknowledged.
    fn info(&self, option: u32, data: &[u8], out: &mut Vec<u8>) -> bool {
        let Some((name, wanted)) = parse_info(data) else {
            reply(out, option, REP_ERR_INVALID, &[]);
            return false;
        };
        if !self.export.answers_to(name) {
            reply(out, option, REP_ERR_UNKNOWN, &[]);
            return false;
        }
        let (size, flags) = (self.export.size.to_be_bytes(), self.export.flags().to_be_bytes());
        reply(out, option, REP_INFO, &[&INFO_EXPORT.to_be_bytes(), &size, &flags]);
        if wanted.contains(&INFO_BLOCK_SIZE) {
            let sizes = [MIN_BLOCK, PREFERRED_BLOCK, MAX_PAYLOAD].map(u32::to_be_bytes);
            reply(out, option, REP_INFO, &[&INFO_BLOCK_SIZE.to_be_bytes(), &sizes[0], &sizes[1], &sizes[2]]);
        }
        reply(out, option, REP_ACK, &[]);
        true
    }

    fn meta_context(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) {
        let setting = option == OPT_SET_META_CONTEXT;
        let Some((name, queries)) = parse_queries(data).filter(|_| self.agreed.structured) else {
            return reply(out, option, REP_ERR_INVALID, &[]);
        };
        if !self.export.answers_to(name) {
            return reply(out, option, REP_ERR_UNKNOWN, &[]);
        }
        // A list without queries requests everything, a set without queries nothing.
        let everything = !setting && (queries.is_empty() || queries.contains(&b"base:".as_slice()));
        let hit = everything || queries.contains(&ALLOCATION);
        if setting {
            self.agreed.allocation = hit;
        }
        if hit {
            let id = if setting { ALLOCATION_ID } else { 0 };
            reply(out, option, REP_META_CONTEXT, &[&id.to_be_bytes(), ALLOCATION]);
        }
        reply(out, option, REP_ACK, &[]);
    }
}

/// Decodes name and requested kinds of an INFO or GO.
fn parse_info(data: &[u8]) -> Option<(&[u8], Vec<u16>)> {
    let mut fields = Fields(data);
    let name = fields.text()?;
    let count = fields.u16()?;
    let wanted = (0..count).map(|_| fields.u16()).collect::<Option<_>>()?;
    fields.end((name, wanted))
}

/// Decodes name and queries of a meta context option. `data` has at most `MAX_OPTION` bytes, so the list is
/// bounded.
fn parse_queries(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let mut fields = Fields(data);
    let name = fields.text()?;
    let count = fields.u32()?;
    let mut queries = Vec::new();
    for _ in 0..count {
        queries.push(fields.text()?);
    }
    fields.end((name, queries))
}

fn length(text: &str) -> [u8; 4] {
    (text.len() as u32).to_be_bytes()
}

fn reply(out: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    out.extend(REPLY_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend((len as u32).to_be_bytes());
    parts.iter().for_each(|part| out.extend_from_slice(part));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn export() -> Export {
        Export { name: "disk0".to_owned(), size: 1 << 20, read_only: false }
    }

    fn option(kind: u32, data: &[u8]) -> Vec<u8> {
        [&IHAVEOPT.to_be_bytes()[..], &kind.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
    }

    /// Feeds `input` byte by byte or at once and returns the last outcome.
    fn drive(input: &[u8], piece: usize) -> (Result<Progress, HandshakeError>, Vec<u8>) {
        let (export, mut out) = (export(), Vec::new());
        let mut handshake = Handshake::new(&export, &mut out);
        let (mut start, mut end) = (0, 0);
        loop {
            match handshake.step(&input[start..end], &mut out) {
                Ok(Progress::Used(used)) => start += used,
                Ok(Progress::More) if end < input.len() => end = (end + piece).min(input.len()),
                other => return (other, out),
            }
        }
    }

    proptest! {
        #[test]
        fn garbage_never_panics_and_pieces_do_not_matter(tail in prop::collection::vec(any::<u8>(), 0..200),
                kind in 0..12u32, data in prop::collection::vec(any::<u8>(), 0..40), piece in 1..50usize) {
            let input = [&[0, 0, 0, 3][..], &option(kind, &data), &tail].concat();
            prop_assert_eq!(drive(&input, piece), drive(&input, input.len()));
        }
    }

    #[test]
    fn an_oversize_option_is_refused_before_its_data_is_awaited() {
        let mut input = [&[0, 0, 0, 3][..], &option(OPT_GO, &[])].concat();
        input[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(drive(&input, 1).0, Err(HandshakeError::TooLong { len: u32::MAX }));
    }

    #[test]
    fn contexts_need_structured_replies_and_go_needs_the_right_name() {
        let query = [&0u32.to_be_bytes()[..], &1u32.to_be_bytes(), &15u32.to_be_bytes(), ALLOCATION].concat();
        let go = |name: &str| [&length(name)[..], name.as_bytes(), &[0, 0]].concat();
        let with =
            |options: &[Vec<u8>]| drive(&[&[0, 0, 0, 3], &options.concat()[..]].concat(), 7).0.unwrap();
        let (set, structured) = (option(OPT_SET_META_CONTEXT, &query), option(OPT_STRUCTURED_REPLY, &[]));
        let last = option(OPT_GO, &go("disk0"));
        let agreed = |progress| match progress {
            Progress::Transmission(_, agreed) => (agreed.structured, agreed.allocation),
            other => panic!("{other:?}"),
        };
        assert_eq!(agreed(with(&[set.clone(), structured.clone(), last.clone()])), (true, false));
        assert_eq!(agreed(with(&[structured, set, last])), (true, true));
        assert_eq!(with(&[option(OPT_GO, &go("disk1"))]), Progress::More);
    }
}
