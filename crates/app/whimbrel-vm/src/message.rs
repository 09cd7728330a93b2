//! Messages of a swap (`docs/protocols/machine-process.md`). Each is a packet: the version in two bytes,
//! then a postcard message of plain types. The state is the content of a sealed file, in the same form.

use crate::{
    channel::{MAX_PACKET, unseal},
    filled_pages::FilledPages,
    passable_port::PortOffer,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{os::fd::OwnedFd, path::PathBuf};
use whimbrel_block::OverlayState;
use whimbrel_capture::DirtyLogState;
use whimbrel_memory::AttachmentState;
use whimbrel_nbd::ConnectionState;
use whimbrel_net::PortState;
use whimbrel_qemu::{ConsoleState, ProcessIdentity, QemuState};

/// Version of all messages. Both programs must have the same one: the old process is asked first.
const VERSION: u16 = 4;
/// Most bytes of a state: dirty pages of several consumers of a few terabytes.
const MAX_STATE: u64 = 256 << 20;
/// Most disks of a machine; QEMU's command line has places for 14.
pub(crate) const MAX_DISKS: usize = 16;
/// Most network ports of a machine.
pub(crate) const MAX_PORTS: usize = 16;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// First message of the old process, with the description of the machine in a sealed file, and the
    /// descriptors of QEMU and memory. As many `Disk` follow as it says.
    Offer(Box<MachineOffer>),
    /// Disk of the offer, with its descriptors.
    Disk,
    Ready,
    Refused {
        reason: String,
    },
    /// Connections of the next disk, with their sockets; one message for each disk, before `State`.
    Connections(Vec<ConnectionState>),
    /// Next network port, with its tap device, its connection to QEMU and QEMU's tap device, if it has them;
    /// one message for each port, after `Connections`.
    Port {
        uplink: bool,
        guest: bool,
        device: bool,
    },
    /// Console, with its connection if it has one; before `State`.
    Console {
        connected: bool,
    },
    /// State of the machine, in the one descriptor.
    State,
    Prepared,
    Yours,
    /// The old process goes on with the machine.
    Withdrawn,
    /// The guest was stopped for so long.
    Running {
        stopped_micros: u64,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct MachineOffer {
    pub(crate) memory: AttachmentState,
    pub(crate) qemu_dir: PathBuf,
    pub(crate) qemu: ProcessIdentity,
    pub(crate) private_memory: bool,
    /// Whether the guest is meant to run.
    pub(crate) runs: bool,
    pub(crate) disks: u16,
    pub(crate) ports: Vec<PortOffer>,
    /// Socket and log of the console.
    pub(crate) console: (PathBuf, PathBuf),
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MachineState {
    pub(crate) qemu: QemuState,
    /// Dirty pages, the memory first.
    pub(crate) dirty: Vec<DirtyLogState>,
    pub(crate) overlays: Vec<OverlayState>,
    pub(crate) ports: Vec<PortState>,
    pub(crate) console: ConsoleState,
    /// Pages of lazy memory that were filled.
    pub(crate) filled: Option<FilledPages>,
    pub(crate) runs: bool,
    /// When the guest was stopped, in microseconds of `CLOCK_MONOTONIC`.
    pub(crate) stopped_at: u64,
}

/// Bytes that are no message of this version.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// The message has no version, or another one.
    #[error("a message of version {found:?}; this program speaks {VERSION}")]
    Version {
        /// Version that was found.
        found: Option<u16>,
    },
    /// The message cannot be decoded.
    #[error("a message that cannot be read")]
    Content(#[from] postcard::Error),
    /// Bytes follow the message.
    #[error("{bytes} bytes after a message")]
    Rest {
        /// Number of bytes.
        bytes: usize,
    },
    /// A message or state is longer than allowed.
    #[error("a message of {bytes} bytes")]
    TooLong {
        /// Number of bytes.
        bytes: usize,
    },
}

pub(crate) fn encode(message: &impl Serialize) -> Result<Vec<u8>, MessageError> {
    Ok(postcard::to_extend(message, VERSION.to_le_bytes().to_vec())?)
}

pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, MessageError> {
    let (version, content) = bytes.split_first_chunk::<2>().ok_or(MessageError::Version { found: None })?;
    let version = u16::from_le_bytes(*version);
    if version != VERSION {
        return Err(MessageError::Version { found: Some(version) });
    }
    match postcard::take_from_bytes(content)? {
        (message, []) => Ok(message),
        (_, rest) => Err(MessageError::Rest { bytes: rest.len() }),
    }
}

pub(crate) fn encode_message(message: &Message) -> Result<Vec<u8>, MessageError> {
    let bytes = encode(message)?;
    if bytes.len() > MAX_PACKET { Err(MessageError::TooLong { bytes: bytes.len() }) } else { Ok(bytes) }
}

pub(crate) fn encode_state(state: &MachineState) -> Result<Vec<u8>, MessageError> {
    let bytes = encode(state)?;
    let fits = bytes.len() as u64 <= MAX_STATE;
    if fits { Ok(bytes) } else { Err(MessageError::TooLong { bytes: bytes.len() }) }
}

pub(crate) fn read_state(file: OwnedFd) -> Result<MachineState, crate::PassError> {
    Ok(decode(&unseal(file, MAX_STATE)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::seal;
    use whimbrel_capture::{Consumer, ConsumerPages};
    use whimbrel_core::PageSet;
    use whimbrel_qemu::{HeldOutputState, QmpState};

    fn state() -> MachineState {
        let dirty = |array: &str| DirtyLogState {
            array: array.to_owned(),
            dirty: vec![ConsumerPages { consumer: Consumer::Store, pages: 70, words: vec![u64::MAX, 5] }],
        };
        let qmp = QmpState { rest: b"{\"ev".to_vec(), next_id: 77, running: Some(false) };
        let identity = ProcessIdentity { pid: 4711, start_time: 12 };
        let (dir, head) = ("/run/x".into(), Some(vec![1; 40]));
        let qemu = QemuState { dir, identity, private_memory: false, head, qmp };
        let (dirty, overlays) = (vec![dirty("memory"), dirty("disk0")], vec![OverlayState::default()]);
        let console = ConsoleState {
            path: "/run/x/serial".into(),
            log: "/data/x/console.log".into(),
            recent: b"login:".to_vec(),
            held: HeldOutputState::default(),
        };
        let (ports, filled) = (Vec::new(), None);
        MachineState { qemu, dirty, overlays, ports, console, filled, runs: true, stopped_at: 1 }
    }

    #[test]
    fn a_state_is_read_as_it_was_written_and_a_damaged_one_does_no_harm() {
        let bytes = encode_state(&state()).unwrap();
        assert_eq!(read_state(seal(&bytes).unwrap()).unwrap(), state());
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << bit;
                let Ok(state) = decode::<MachineState>(&damaged) else { continue };
                // What can be decoded is checked against the machine before it is used.
                for log in state.dirty.into_iter().flat_map(|log| log.dirty) {
                    let set = PageSet::from_words(log.pages, log.words);
                    assert!(set.is_none_or(|set| set.iter().all(|page| page < set.len())));
                }
            }
        }
    }

    #[test]
    fn another_version_and_hostile_bytes_are_refused() {
        let message = Message::Refused { reason: "no".to_owned() };
        let bytes = encode_message(&message).unwrap();
        assert_eq!(decode::<Message>(&bytes).unwrap(), message);
        for cut in 0..bytes.len() {
            decode::<Message>(&bytes[..cut]).unwrap_err();
        }
        let mut newer = bytes.clone();
        newer[0] += 1;
        assert!(matches!(decode::<Message>(&newer), Err(MessageError::Version { found: Some(5) })));
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(matches!(decode::<Message>(&longer), Err(MessageError::Rest { bytes: 1 })));
        // A list that says to have 2^63 elements costs no memory.
        let hostile = [&VERSION.to_le_bytes()[..], &[4], &[0xff; 8], &[0x7f]].concat();
        decode::<Message>(&hostile).unwrap_err();
        let long = Message::Refused { reason: "x".repeat(MAX_PACKET) };
        assert!(matches!(encode_message(&long), Err(MessageError::TooLong { .. })));
    }
}
