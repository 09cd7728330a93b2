//! Requests of the transmission phase: decodes 28 bytes and checks them. Pure.

use crate::constants::*;
use crate::handshake::{Agreed, Export};

/// Bytes of a request header.
pub(crate) const REQUEST_SIZE: usize = 28;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) flags: u16,
    pub(crate) command: Command,
    /// Number that the client chose, returned in the reply.
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) len: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    WriteZeroes,
    BlockStatus,
    Unknown(u16),
}

/// Errors after which the stream cannot be parsed further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("a request has the wrong magic number {found:#x}")]
    Magic { found: u32 },
    #[error("a write of {len} bytes is too long")]
    PayloadTooLong { len: u32 },
}

impl Request {
    pub(crate) fn parse(header: &[u8; REQUEST_SIZE]) -> Result<Self, RequestError> {
        let [m0, m1, m2, m3, f0, f1, c0, c1, rest @ ..] = *header;
        let found = u32::from_be_bytes([m0, m1, m2, m3]);
        if found != REQUEST_MAGIC {
            return Err(RequestError::Magic { found });
        }
        let [k0, k1, k2, k3, k4, k5, k6, k7, o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, l2, l3] = rest;
        let request = Self {
            flags: u16::from_be_bytes([f0, f1]),
            command: Command::from(u16::from_be_bytes([c0, c1])),
            cookie: u64::from_be_bytes([k0, k1, k2, k3, k4, k5, k6, k7]),
            offset: u64::from_be_bytes([o0, o1, o2, o3, o4, o5, o6, o7]),
            len: u32::from_be_bytes([l0, l1, l2, l3]),
        };
        match request.payload() {
            len if len > MAX_PAYLOAD => Err(RequestError::PayloadTooLong { len }),
            _ => Ok(request),
        }
    }

    pub(crate) fn payload(&self) -> u32 {
        if self.command == Command::Write { self.len } else { 0 }
    }

    pub(crate) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Checks whether this export, after this handshake, accepts the request.
    pub(crate) fn check(&self, export: &Export, agreed: Agreed) -> Result<(), WireError> {
        let writes = matches!(self.command, Command::Write | Command::Trim | Command::WriteZeroes);
        if self.flags & !self.command.flags() != 0 {
            return Err(WireError::Invalid);
        }
        if writes && export.read_only {
            return Err(WireError::Perm);
        }
        match self.command {
            Command::Unknown(_) => return Err(WireError::Invalid),
            Command::Disconnect | Command::Flush => return Ok(()),
            Command::BlockStatus if !agreed.allocation || self.len == 0 => return Err(WireError::Invalid),
            Command::Read if self.len > MAX_PAYLOAD => return Err(WireError::Overflow),
            _ => {}
        }
        match self.offset.checked_add(u64::from(self.len)) {
            Some(end) if end <= export.size => Ok(()),
            _ if writes => Err(WireError::NoSpace),
            _ => Err(WireError::Invalid),
        }
    }
}

impl From<u16> for Command {
    fn from(number: u16) -> Self {
        match number {
            0 => Command::Read,
            1 => Command::Write,
            2 => Command::Disconnect,
            3 => Command::Flush,
            4 => Command::Trim,
            6 => Command::WriteZeroes,
            7 => Command::BlockStatus,
            other => Command::Unknown(other),
        }
    }
}

impl Command {
    /// Flags that this command allows. FUA is harmless everywhere, and the protocol asks servers to accept
    /// it.
    fn flags(self) -> u16 {
        CMD_FUA
            | match self {
                Command::Read => CMD_DF,
                Command::WriteZeroes => CMD_NO_HOLE,
                Command::BlockStatus => CMD_REQ_ONE,
                _ => 0,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_accepted_request_leaves_the_export(mut header in prop::array::uniform28(any::<u8>()),
                number in 0..9u16, flags in 0..20u16, small in any::<bool>(), read_only in any::<bool>()) {
            header[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
            header[4..6].copy_from_slice(&flags.to_be_bytes());
            header[6..8].copy_from_slice(&number.to_be_bytes());
            if small {
                header[16..21].fill(0);
                header[24..26].fill(0);
            }
            let export = Export { name: String::new(), size: 1 << 22, read_only };
            let Ok(request) = Request::parse(&header) else { return Ok(()) };
            prop_assert!(request.payload() <= MAX_PAYLOAD);
            let agreed = Agreed { structured: true, allocation: true };
            if request.check(&export, agreed).is_ok() && !matches!(number, 2 | 3) {
                prop_assert!(request.offset.checked_add(request.len.into()).unwrap() <= export.size);
                prop_assert!(!(read_only && matches!(number, 1 | 4 | 6)));
            }
        }
    }

    #[test]
    fn wrong_magic_and_endless_payloads_end_the_stream() {
        let mut header = [0; REQUEST_SIZE];
        assert_eq!(Request::parse(&header), Err(RequestError::Magic { found: 0 }));
        header[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        header[7] = 1;
        header[24..].fill(0xff);
        assert_eq!(Request::parse(&header), Err(RequestError::PayloadTooLong { len: u32::MAX }));
    }
}
