//! Stream header: everything before the first device section of a QEMU migration stream. Pure, no I/O.
//!
//! The format (QEMU docs/devel/migration, migration/savevm.c and ram.c), numbers big endian:
//!
//! ```text
//! stream   = "QEVM" u32:3 [config] section* 00 [06 u32:len json]
//! config   = 07 u32:len machine-type [05 "configuration/capabilities" u32:version u32:count name*]
//! section  = 01 u32:id name u32:instance u32:version DATA footer      START, here only of "ram"
//!          | 02 u32:id DATA footer | 03 u32:id DATA footer            PART, END of the same
//!          | 04 u32:id name u32:instance u32:version DATA footer      FULL: a device
//!          | 08 u16:command u16:len DATA                              COMMAND
//! footer   = 7e u32:id          name = u8:len text
//! ram START DATA = u64:total|04 (name u64:used u64:address)* u64:10
//! ram PART/END DATA = record* u64:10
//! record   = u64:offset|flags [name, unless flag 20] (flag 02: u8 fill | flag 08: 4096 bytes)
//! ```
//!
//! Names are text after its length in one byte, including those of capabilities. The `address` is present
//! because the capability `x-ignore-shared` is on, which also omits the shared guest RAM from the records.
//! The small blocks (BIOS, option ROMs, ACPI tables) remain; a target does not load them by itself, and
//! without them a machine runs on and then hangs at its next reboot. The data of device sections cannot be
//! parsed without QEMU's tables, so the header ends at the first FULL section.
//!
//! A header stores the contents of the small blocks as flat arrays, so that one page can change and the
//! header be written again. Streams come from other hosts: every length is bounded before memory is
//! allocated, and parsing never panics.

use super::reader::Reader;
use std::ops::Range;
use whimbrel_core::{PAGE_SIZE, is_zero};

/// Most bytes of a state: small blocks and device state are under 1 MiB; devices with queues may have more.
pub const MAX_STATE: usize = 64 << 20;
/// Most bytes of small blocks.
const MAX_SMALL: u64 = 16 << 20;
/// Most RAM blocks of a stream.
const MAX_BLOCKS: usize = 64;

pub(super) const MAGIC: [u8; 8] = *b"QEVM\0\0\0\x03";
pub(super) const END_OF_STREAM: u8 = 0x00;
const START: u8 = 0x01;
const PART: u8 = 0x02;
const END: u8 = 0x03;
pub(super) const FULL: u8 = 0x04;
const SUBSECTION: u8 = 0x05;
const CONFIGURATION: u8 = 0x07;
const COMMAND: u8 = 0x08;
const FOOTER: u8 = 0x7e;

const FLAG_ZERO: u64 = 0x02;
const FLAG_MEM_SIZE: u64 = 0x04;
const FLAG_PAGE: u64 = 0x08;
const FLAG_EOS: u64 = 0x10;
const FLAG_CONTINUE: u64 = 0x20;
const OFFSET_MASK: u64 = !(PAGE_SIZE as u64 - 1);

/// The bytes are no migration stream of the expected kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The stream ends early.
    #[error("the state ends early, at byte {at}")]
    CutOff {
        /// Offset at which more was expected.
        at: u64,
    },
    /// The state exceeds the limit.
    #[error("a state of {len} bytes is too long")]
    TooLong {
        /// Length of the state.
        len: u64,
    },
    /// The magic number is missing.
    #[error("this is not a qemu state")]
    Magic,
    /// A kind of section, a name or a flag that must not be in a header.
    #[error("unexpected {what} {value:#x} at byte {at} of the state")]
    Unexpected {
        /// Kind of the field: `section`, `flags`, …
        what: &'static str,
        /// Value of the field.
        value: u64,
        /// Offset in the state.
        at: u64,
    },
    /// A name is not text.
    #[error("a name at byte {at} of the state is not text")]
    Name {
        /// Offset in the state.
        at: u64,
    },
    /// A page belongs to no block, or is outside its block.
    #[error("a page at byte {at} of the state is in no memory block")]
    Page {
        /// Offset in the state.
        at: u64,
    },
    /// The state has more memory than small blocks do; perhaps it was saved without `x-ignore-shared`.
    #[error("the state contains guest memory")]
    TooMuchMemory,
}

/// Block of guest memory: the RAM, or one of the small blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamBlock {
    /// Name of the block: `ram0`, `pc.bios`, …
    pub name: String,
    /// Bytes in use.
    pub used: u64,
    /// Content padded to whole pages; none for memory that is not in the stream.
    pub content: Option<Vec<u8>>,
}

/// Everything before the first device section, with the small blocks unpacked.
#[derive(Clone, PartialEq, Eq)]
pub struct StreamHeader {
    bytes: Vec<u8>,
    /// Length of magic and configuration, which occur once in a stream. QEMU accepts the sections after them
    /// any number of times.
    opening: usize,
    /// Configuration, commands, and the section that lists the blocks, unchanged.
    prefix: Vec<u8>,
    /// Commands between the memory and the devices, unchanged.
    commands: Vec<u8>,
    section: u32,
    blocks: Vec<RamBlock>,
}

pub(crate) struct SplitStream {
    pub(crate) head: StreamHeader,
    /// Offset of the device sections.
    devices: usize,
}

impl StreamHeader {
    /// Parses the header of `stream`, a complete device state or a header alone.
    pub fn parse(stream: &[u8]) -> Result<Self, StreamError> {
        SplitStream::parse(stream).map(|cut| cut.head)
    }

    /// Stream up to the first device section.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Start of the stream, which QEMU reads once.
    pub(super) fn opening(&self) -> &[u8] {
        self.bytes.get(..self.opening).unwrap_or_default()
    }

    /// Blocks of memory, in the order of the stream.
    pub fn blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    /// Updates the content of block `index`; returns whether it differed. After the last one, call
    /// [`StreamHeader::rewrite`].
    pub(super) fn update(&mut self, index: usize, now: &[u8]) -> bool {
        let Some(content) = self.blocks.get_mut(index).and_then(|block| block.content.as_mut()) else {
            return false;
        };
        let len = content.len().min(now.len());
        let differs = content[..len] != now[..len];
        if differs {
            content[..len].copy_from_slice(&now[..len]);
        }
        differs
    }

    /// Writes the stream again from the contents of the blocks.
    pub(super) fn rewrite(&mut self) {
        let mut bytes = self.prefix.clone();
        bytes.extend(&self.commands);
        bytes.push(END);
        bytes.extend(self.section.to_be_bytes());
        for block in &self.blocks {
            write_block(&mut bytes, block);
        }
        bytes.extend(FLAG_EOS.to_be_bytes());
        bytes.push(FOOTER);
        bytes.extend(self.section.to_be_bytes());
        self.bytes = bytes;
    }
}

fn write_block(bytes: &mut Vec<u8>, block: &RamBlock) {
    let Some(content) = &block.content else { return };
    for (index, page) in content.chunks_exact(PAGE_SIZE).enumerate() {
        let zero = is_zero(page);
        let mut word = (index * PAGE_SIZE) as u64 | if zero { FLAG_ZERO } else { FLAG_PAGE };
        word |= if index > 0 { FLAG_CONTINUE } else { 0 };
        bytes.extend(word.to_be_bytes());
        if index == 0 {
            // The name was parsed with a length of one byte.
            bytes.push(block.name.len() as u8);
            bytes.extend(block.name.bytes());
        }
        if zero { bytes.push(0) } else { bytes.extend(page) }
    }
}

impl std::fmt::Debug for StreamHeader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StreamHeader({} bytes, {} blocks)", self.bytes.len(), self.blocks.len())
    }
}

impl SplitStream {
    /// Splits `stream` before its first device section (or at its end, if it is a header alone).
    pub(crate) fn parse(stream: &[u8]) -> Result<Self, StreamError> {
        if stream.len() > MAX_STATE {
            return Err(StreamError::TooLong { len: stream.len() as u64 });
        }
        let mut parser =
            Parser { from: Reader::new(stream), section: 0, blocks: Vec::new(), small: 0, last: None };
        if parser.from.take(MAGIC.len())? != MAGIC {
            return Err(StreamError::Magic);
        }
        parser.configuration()?;
        let opening = parser.from.at();
        parser.start()?;
        let lead = stream[..parser.from.at()].to_vec();
        let commands = parser.memory(stream)?;
        let devices = parser.from.at();
        let bytes = stream[..devices].to_vec();
        let head = StreamHeader {
            bytes,
            opening,
            prefix: lead,
            commands,
            section: parser.section,
            blocks: parser.blocks,
        };
        Ok(Self { head, devices })
    }

    /// Offset of the device sections.
    pub(crate) fn devices(&self) -> usize {
        self.devices
    }

    /// Whether devices follow the header in `stream`, which was split.
    pub(crate) fn has_devices(&self, stream: &[u8]) -> bool {
        stream.get(self.devices) == Some(&FULL)
    }
}

struct Parser<'a> {
    from: Reader<'a>,
    section: u32,
    blocks: Vec<RamBlock>,
    /// Bytes of content allocated so far.
    small: u64,
    /// Block of the last page, to which the first record of the next section may belong.
    last: Option<usize>,
}

impl Parser<'_> {
    fn unexpected<T>(&self, what: &'static str, value: impl Into<u64>) -> Result<T, StreamError> {
        Err(StreamError::Unexpected { what, value: value.into(), at: self.from.at() as u64 })
    }

    /// Parses the part that the target compares with its own: machine type and capabilities.
    fn configuration(&mut self) -> Result<(), StreamError> {
        if self.from.peek()? != CONFIGURATION {
            return Ok(());
        }
        self.from.u8()?;
        let len = self.from.u32()?;
        self.from.take(len as usize)?;
        while self.from.peek()? == SUBSECTION {
            self.from.u8()?;
            if self.from.name()? != "configuration/capabilities" {
                return self.unexpected("subsection", SUBSECTION);
            }
            let _version = self.from.u32()?;
            // Each takes a byte at least, so a wrong count ends with the stream.
            for _ in 0..self.from.u32()? {
                self.from.name()?;
            }
        }
        Ok(())
    }

    /// Parses commands and the START section of `ram`.
    fn start(&mut self) -> Result<(), StreamError> {
        while self.from.peek()? == COMMAND {
            self.command()?;
        }
        match self.from.u8()? {
            START => {}
            other => return self.unexpected("section", other),
        }
        self.section = self.from.u32()?;
        if self.from.name()? != "ram" {
            return self.unexpected("section id", self.section);
        }
        let _instance = self.from.u32()?;
        let version = self.from.u32()?;
        if version != 4 {
            return self.unexpected("version of the memory section", version);
        }
        self.block_list()?;
        self.footer()
    }

    fn block_list(&mut self) -> Result<(), StreamError> {
        let word = self.from.u64()?;
        if word & !OFFSET_MASK != FLAG_MEM_SIZE {
            return self.unexpected("flags", word & !OFFSET_MASK);
        }
        let mut left = word & OFFSET_MASK;
        while left > 0 {
            let name = self.from.name()?.to_owned();
            let used = self.from.u64()?;
            let _address = self.from.u64()?;
            if self.blocks.len() == MAX_BLOCKS || used == 0 || used > left {
                return self.unexpected("block of memory of size", used);
            }
            left -= used;
            self.blocks.push(RamBlock { name, used, content: None });
        }
        match self.from.u64()? {
            FLAG_EOS => Ok(()),
            other => self.unexpected("flags", other),
        }
    }

    /// Parses PART and END sections of `ram` and the commands between and after them; returns the commands.
    fn memory(&mut self, stream: &[u8]) -> Result<Vec<u8>, StreamError> {
        let mut commands = Vec::new();
        let mut ended = false;
        loop {
            match self.from.peek() {
                Ok(FULL | END_OF_STREAM) | Err(_) if ended => return Ok(commands),
                Ok(COMMAND) => {
                    let range = self.command()?;
                    commands.extend(&stream[range]);
                }
                Ok(kind @ (PART | END)) if !ended => {
                    self.from.u8()?;
                    let id = self.from.u32()?;
                    if id != self.section {
                        return self.unexpected("section id", id);
                    }
                    self.records()?;
                    self.footer()?;
                    ended = kind == END;
                }
                Ok(other) => return self.unexpected("section", other),
                Err(error) => return Err(error),
            }
        }
    }

    fn command(&mut self) -> Result<Range<usize>, StreamError> {
        let start = self.from.at();
        self.from.u8()?;
        self.from.u16()?;
        let len = self.from.u16()?;
        self.from.take(len.into())?;
        Ok(start..self.from.at())
    }

    fn footer(&mut self) -> Result<(), StreamError> {
        let (mark, id) = (self.from.u8()?, self.from.u32()?);
        if mark != FOOTER {
            self.unexpected("footer", mark)
        } else if id != self.section {
            self.unexpected("section id", id)
        } else {
            Ok(())
        }
    }

    fn records(&mut self) -> Result<(), StreamError> {
        loop {
            let at = self.from.at() as u64;
            let word = self.from.u64()?;
            let (offset, flags) = (word & OFFSET_MASK, word & !OFFSET_MASK);
            if flags == FLAG_EOS {
                return Ok(());
            }
            if flags & FLAG_CONTINUE == 0 {
                let name = self.from.name()?;
                self.last = self.blocks.iter().position(|block| block.name == name);
            }
            let page = self.page(self.last, offset).ok_or(StreamError::Page { at })?;
            match flags & !FLAG_CONTINUE {
                FLAG_ZERO => {
                    let fill = self.from.u8()?;
                    self.content(page.block)?[page.range].fill(fill);
                }
                FLAG_PAGE => {
                    let bytes = self.from.take(PAGE_SIZE)?;
                    self.content(page.block)?[page.range].copy_from_slice(bytes);
                }
                other => return self.unexpected("flags", other),
            }
        }
    }

    fn page(&self, block: Option<usize>, offset: u64) -> Option<Page> {
        let block = block?;
        let used = self.blocks[block].used;
        // A block larger than all small ones together is refused when its content is requested.
        let start = usize::try_from(offset).ok().filter(|_| offset < used)?;
        Some(Page { block, range: start..start.checked_add(PAGE_SIZE)? })
    }

    /// Content of a block, allocated with its first page.
    fn content(&mut self, block: usize) -> Result<&mut Vec<u8>, StreamError> {
        let block = &mut self.blocks[block];
        if block.content.is_none() {
            self.small = self.small.saturating_add(block.used);
            if self.small > MAX_SMALL {
                return Err(StreamError::TooMuchMemory);
            }
            block.content = Some(vec![0; (block.used as usize).next_multiple_of(PAGE_SIZE)]);
        }
        block.content.as_mut().ok_or(StreamError::TooMuchMemory)
    }
}

struct Page {
    block: usize,
    range: Range<usize>,
}

#[cfg(test)]
#[path = "stream_header_tests.rs"]
mod tests;
