//! The messages of a migration, in the order they are sent. docs/protocols/migrate.md tells the story.
//!
//! Every message is a request of the wire protocol; its header is one of these types in postcard form, its
//! payload what the doc of the kind says. The requests of one handover are handled in the order they came.

use crate::{
    baseline::Baseline, boot_files::FileRun, compatibility::Incompatibility, page_batch::BATCH_PAGES_MAX,
};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};
use whimbrel_core::{CapsuleId, Digest, HostName, MachineConfig, MachineName, PAGE_SIZE, PageRun};
use xxhash_rust::xxh3::xxh3_64;

/// Offer a machine; header [`Offer`], reply [`Offered`].
pub const OFFER: u16 = 0x0100;
/// A piece of a file that the machine boots from; header [`BootFileRange`], payload the piece.
pub const BOOT_FILE: u16 = 0x0101;
/// Pages; header [`PagesHeader`], payload as in [`crate::page_batch`].
pub const PAGES: u16 = 0x0102;
/// All pages are sent; header [`FinishHeader`], payload the rest of the device state as one zstd frame.
/// Answered, with [`Prepared`], once loaded and written down.
pub const FINISH: u16 = 0x0103;
/// The source has committed: run it; header [`HandoverId`]. May come again. The first is answered with
/// [`RunningSince`].
pub const COMMIT: u16 = 0x0104;
/// The source has given up; header [`HandoverId`].
pub const ABORT: u16 = 0x0105;

/// Has the target these pages anywhere; header [`PageQuery`], reply [`PageQueryReply`]. Those that it has are
/// where they belong then. In no order with other messages.
pub const QUERY_PAGES: u16 = 0x0107;

/// How the device state will most likely begin; header [`HandoverId`], payload one zstd frame. Before
/// [`FINISH`], at most once.
pub const EARLY_STATE: u16 = 0x0108;

/// Pages of memory that the target finds in the files of the offer; header [`FilePages`].
pub const BOOT_FILE_PAGES: u16 = 0x0109;

/// Frames that came for the machine on its old host; header [`StraysHead`](crate::late_frames::StraysHead),
/// payload the frames. After [`COMMIT`], in no order with it.
pub const LATE_FRAMES: u16 = 0x010a;

/// Most bytes of a blob in one message.
pub const BLOB_PIECE_MAX: usize = 4 << 20;
/// Most bytes of a blob.
pub const BLOB_MAX: u64 = 1 << 30;
/// Most bytes of device state.
pub const DEVICE_STATE_MAX: usize = 8 << 20;
/// Most capsules that a source names as ones it has.
pub const BASES_MAX: usize = 64;
/// Most bytes of a path of a file that a source names.
pub const PATH_MAX: usize = 4096;
/// Most bytes of how a machine is to be protected.
pub const THIRD_MAX: usize = 4096;
/// Most arrays a machine may have (memory and disks).
pub const ARRAYS_MAX: usize = 64;

/// Names one attempt to move one machine. Random, so that a late message of an older attempt finds nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HandoverId(pub [u8; 16]);

impl fmt::Display for HandoverId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for HandoverId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HandoverId({self})")
    }
}

/// The handover that a message is about: it stands first in every header.
pub fn handover_of(header: &[u8]) -> Option<HandoverId> {
    postcard::take_from_bytes(header).ok().map(|(handover, _)| handover)
}

/// What the source wants to move. The target reserves everything that this names before it accepts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// This attempt.
    pub handover: HandoverId,
    /// The machine's name, which must be free on the target.
    pub name: MachineName,
    /// What it is made of.
    pub config: MachineConfig,
    /// Its page arrays: memory first, then the disks in order.
    pub arrays: Vec<ArrayOffer>,
    /// Its identity, which it keeps.
    pub vmgenid: String,
    /// The capsule it last came from or was saved as.
    pub origin: Option<CapsuleId>,
    /// Files it boots from, with their sizes.
    pub blobs: Vec<(Digest, u64)>,
    /// Version of the QEMU that runs it.
    pub qemu_version: String,
    /// Room that its disks take.
    pub disk_bytes: u64,
    /// The processor that it runs on.
    pub processor: String,
    /// Where its network stays, if that is not to be the target's.
    pub tunnel: Option<HomeNetwork>,
    /// Capsules that the source has whole and that resemble it, the best first: an array may begin as an
    /// image of one.
    pub bases: Vec<CapsuleId>,
    /// Files under its disks that the target may reach as well.
    pub files: Vec<SharedFile>,
    /// The source's name, if pages of the machine may stay there at the pause.
    pub leaves: Option<HostName>,
    /// The protection that the machine has from the commit on, until all of it is on the target.
    pub third: Option<BackupHost>,
    /// Its user has paused it: the target has it then, and it stays paused.
    pub paused: bool,
}

/// A third host that has all of a machine as of the pause, and follows it on the target from then on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupHost {
    /// The protection: the target is its primary, the source its witness.
    pub protection: [u8; 16],
    /// The handover by which the third host knows the machine.
    pub handover: HandoverId,
    /// How the target is to protect it: a request of its own API.
    pub request: String,
}

/// A file that lies under a disk and is never written. Both hosts reach the same one if a mark that the
/// source has just laid beside it is there on the target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedFile {
    /// Which disk, from 0.
    pub disk: u32,
    /// Where it is.
    pub path: String,
    /// Its length in bytes.
    pub len: u64,
    /// When it was changed last, in nanoseconds since 1970.
    pub changed: i64,
    /// Name of the file that is the mark, in the same directory.
    pub mark: String,
    /// What is in that.
    pub secret: [u8; 32],
}

impl Offer {
    /// A machine with these arrays, memory first, and nothing else to be said of it.
    pub fn of(handover: HandoverId, name: MachineName, config: MachineConfig) -> Self {
        let disks = config.disks.iter().map(|disk| disk.size.0 / PAGE_SIZE as u64).enumerate();
        let disks = disks.map(|(index, pages)| ArrayOffer { name: format!("disk{index}"), pages });
        let memory = ArrayOffer { name: "memory".to_owned(), pages: config.memory_pages() };
        Self {
            handover,
            name,
            arrays: std::iter::once(memory).chain(disks).collect(),
            config,
            vmgenid: String::new(),
            origin: None,
            blobs: Vec::new(),
            qemu_version: String::new(),
            disk_bytes: 0,
            processor: String::new(),
            tunnel: None,
            bases: Vec::new(),
            files: Vec::new(),
            leaves: None,
            third: None,
            paused: false,
        }
    }

    /// Whether the target may begin an array as this.
    pub fn names(&self, begun: &Baseline) -> bool {
        match begun {
            Baseline::Zeros => true,
            Baseline::Capsule(capsule) => self.bases.contains(capsule),
            Baseline::File => !self.files.is_empty(),
        }
    }
}

/// The host that has a machine's network while it runs on another one, and the tunnel between the two.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomeNetwork {
    /// The host.
    pub home: HostName,
    /// The tunnel, until the machine is home again.
    pub id: TunnelId,
    /// The capsule as which that host suspended the machine, if that is how it came away.
    pub capsule: Option<CapsuleId>,
}

/// Names a tunnel. Random, and told only to those who have the machine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TunnelId(pub [u8; 16]);

impl fmt::Display for TunnelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TunnelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Whoever knows it may open the tunnel: a log shows its beginning.
        write!(f, "TunnelId({:02x}{:02x}…)", self.0[0], self.0[1])
    }
}

/// The text is no id of a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an id of a tunnel has 32 hexadecimal digits")]
pub struct ParseTunnelIdError;

impl FromStr for TunnelId {
    type Err = ParseTunnelIdError;

    fn from_str(text: &str) -> Result<Self, ParseTunnelIdError> {
        let hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(text, 16).ok().filter(|_| hex);
        number.map(|number| Self(number.to_be_bytes())).ok_or(ParseTunnelIdError)
    }
}

/// One page array of an offer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrayOffer {
    /// `memory`, `disk0`, …
    pub name: String,
    /// Its length.
    pub pages: u64,
}

/// What the target says to an offer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Offered {
    /// Room is reserved.
    Accepted(Accepted),
    /// The machine does not fit; nothing was reserved.
    Misfit(Incompatibility),
}

/// The target has reserved room.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// Blobs of the offer that the target lacks.
    pub blobs_missing: Vec<Digest>,
    /// What each array begins as; zeros where nothing is said.
    pub begun_as: Vec<Baseline>,
}

/// A piece of a blob; pieces come in order of their offsets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootFileRange {
    /// This attempt.
    pub handover: HandoverId,
    /// The whole blob's digest.
    pub digest: Digest,
    /// Where the piece belongs.
    pub offset: u64,
}

/// Pages of one array.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagesHeader {
    /// This attempt.
    pub handover: HandoverId,
    /// Which pages and how they are encoded.
    pub batch: crate::page_batch::PageBatchHeader,
}

/// Pages of memory that are in files which the machine boots from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePages {
    /// This attempt.
    pub handover: HandoverId,
    /// Which pages, and where they are.
    pub runs: Vec<FileRun>,
    /// XXH3 over all of them: a file that is damaged on either side shows.
    pub check: u64,
}

impl FilePages {
    /// The check of pages that lie one after the other.
    pub fn check_of(content: &[u8]) -> u64 {
        xxh3_64(content)
    }

    /// Whether a sound source would say this of a memory of `len` pages and these files.
    pub(crate) fn is_sound(&self, len: u64, blobs: &[(Digest, u64)]) -> bool {
        let pages = self.runs.iter().fold(0u64, |sum, run| sum.saturating_add(run.pages.len));
        let inside = |run: &FileRun| {
            let in_memory = run.pages.start.checked_add(run.pages.len).is_some_and(|end| end <= len);
            let bytes = run.pages.len.checked_mul(PAGE_SIZE as u64);
            let end = bytes.and_then(|bytes| run.offset.checked_add(bytes));
            let file = blobs.get(usize::from(run.file));
            in_memory && end.zip(file).is_some_and(|(end, (_, size))| end <= *size)
        };
        self.runs.len() as u64 <= BATCH_PAGES_MAX && pages <= BATCH_PAGES_MAX && self.runs.iter().all(inside)
    }
}

/// Pages of one array that are about to be sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageQuery {
    /// This attempt.
    pub handover: HandoverId,
    /// Which array, as an index into the offer's arrays.
    pub array: u32,
    /// The pages, at most as many as in a batch, none of them zero.
    pub runs: Vec<PageRun>,
    /// Digest of each.
    pub digests: Vec<Digest>,
}

impl PageQuery {
    /// Whether a sound source would ask this of an array of `len` pages.
    pub(crate) fn is_sound(&self, len: u64) -> bool {
        let pages = self.runs.iter().fold(0u64, |sum, run| sum.saturating_add(run.len));
        let inside = |run: &PageRun| run.start.checked_add(run.len).is_some_and(|end| end <= len);
        pages <= BATCH_PAGES_MAX && pages == self.digests.len() as u64 && self.runs.iter().all(inside)
    }
}

/// Which of the pages asked for were there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageQueryReply {
    /// Bit `i % 64` of word `i / 64` for page `i` of the question.
    pub found: Vec<u64>,
}

impl PageQueryReply {
    /// Of one answer for each page.
    pub(crate) fn of(found: &[bool]) -> Self {
        let word = |bits: &[bool]| (0..).zip(bits).fold(0, |word, (at, bit)| word | u64::from(*bit) << at);
        Self { found: found.chunks(64).map(word).collect() }
    }

    /// Whether page `page` of the question was there.
    pub fn has(&self, page: usize) -> bool {
        self.found.get(page / 64).is_some_and(|word| word >> (page % 64) & 1 == 1)
    }
}

/// The end of the copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finish {
    /// This attempt.
    pub handover: HandoverId,
    /// Addresses seen on each network port, opaque to the protocol, so that the target can announce them.
    pub ports: Vec<Vec<u8>>,
}

/// The header of [`FINISH`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinishHeader {
    /// What ends.
    pub finish: Finish,
    /// So many bytes of the device state are as they came ahead.
    pub ahead: u32,
    /// So many follow.
    pub rest: u32,
}

/// The machine is loaded and waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Prepared {
    /// Microseconds that it took.
    pub took: u64,
}

/// The machine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RunningSince {
    /// For so many microseconds when this was said.
    pub since: u64,
}

/// Packs the beginning or the rest of a device state; nothing is nothing.
pub fn pack_state(state: &[u8]) -> std::io::Result<Vec<u8>> {
    if state.is_empty() { Ok(Vec::new()) } else { zstd::bulk::compress(state, 1) }
}

/// Unpacks at most `max` bytes of a device state.
pub(crate) fn unpack_state(packed: &[u8], max: usize) -> Option<Vec<u8>> {
    if packed.is_empty() {
        return Some(Vec::new());
    }
    zstd::bulk::decompress(packed, max.min(DEVICE_STATE_MAX)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_and_its_answer_are_these_bytes() {
        let ask = PageQuery {
            handover: HandoverId([9; 16]),
            array: 1,
            runs: vec![PageRun::new(300, 2)],
            digests: vec![Digest([1; 32]), Digest([2; 32])],
        };
        let bytes = [&[9; 16][..], &[1, 1, 0xac, 2, 2, 2], &[1; 32], &[2; 32]].concat();
        assert_eq!(postcard::to_stdvec(&ask).unwrap(), bytes);
        assert!(ask.is_sound(302) && !ask.is_sound(301));
        assert!(!PageQuery { digests: vec![], ..ask.clone() }.is_sound(302));
        assert!(!PageQuery { runs: vec![PageRun::new(u64::MAX, 2)], ..ask }.is_sound(u64::MAX));
        let mut found = [false; 70];
        (found[0], found[69]) = (true, true);
        let has = PageQueryReply::of(&found);
        assert_eq!(postcard::to_stdvec(&has).unwrap(), [2, 1, 32]);
        assert!(has.has(0) && has.has(69) && !has.has(1) && !has.has(1000));
    }

    #[test]
    fn an_id_is_read_as_it_is_written_and_nothing_else_is() {
        let id = TunnelId([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255]);
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in ["", "0", &"+".repeat(32), &"0".repeat(31), &"g".repeat(32)] {
            assert_eq!(bad.parse::<TunnelId>(), Err(ParseTunnelIdError));
        }
    }
}
