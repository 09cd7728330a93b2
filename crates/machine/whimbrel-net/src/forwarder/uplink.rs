//! Network side of a forwarder: a tap device of the host, or a frame pipe.

use crate::offload::{self, HEADER, NOTHING_LEFT};
use rustix::io::Errno;
use std::{borrow::Cow, fs::File, sync::Arc};

/// Form of a frame in a port: what QEMU's end of the link has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// As on the wire.
    Plain,
    /// After a header of offloads.
    WithOffloads,
}

/// Device or pipe, and the form of its frames.
pub(crate) struct NetworkSide {
    pub(crate) file: Arc<File>,
    /// Whether its frames have headers of offloads. Those of a port without them have none either.
    pub(crate) has_offloads: bool,
}

impl Form {
    /// The frame of a packet of this form.
    pub(super) fn frame_of(self, packet: &[u8]) -> &[u8] {
        match self {
            Form::Plain => packet,
            Form::WithOffloads => offload::frame_of(packet),
        }
    }

    /// Header of a frame as on the wire.
    pub(super) fn header(self) -> &'static [u8] {
        match self {
            Form::Plain => &[],
            Form::WithOffloads => &NOTHING_LEFT,
        }
    }

    /// Frames as on the wire that say the same as a packet of this form.
    pub(super) fn plain(self, packet: &[u8]) -> Vec<Cow<'_, [u8]>> {
        match self {
            Form::Plain => vec![Cow::Borrowed(packet)],
            Form::WithOffloads => offload::plain(packet),
        }
    }
}

impl NetworkSide {
    /// Reads a packet of this form; zero if the other end of a pipe was closed.
    pub(super) fn read(&self, room: &mut [u8], form: Form) -> Result<usize, Errno> {
        if self.has_offloads || form == Form::Plain {
            return rustix::io::read(&self.file, room);
        }
        let (header, frame) = room.split_at_mut(HEADER);
        header.copy_from_slice(&NOTHING_LEFT);
        let len = rustix::io::read(&self.file, frame)?;
        Ok(if len == 0 { 0 } else { HEADER + len })
    }

    /// Writes a packet of this form.
    pub(super) fn write(&self, packet: &[u8], form: Form) -> Result<(), Errno> {
        if self.has_offloads || form == Form::Plain {
            return rustix::io::write(&self.file, packet).map(drop);
        }
        form.plain(packet).iter().try_for_each(|frame| rustix::io::write(&self.file, frame).map(drop))
    }
}
