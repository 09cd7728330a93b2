//! Messages of a migration, in the order in which they are sent. Described in docs/protocols/migrate.md.
//!
//! Every message is a request of the wire protocol; its header is one of these types in postcard form, its
//! payload is described with the kind. The requests of one handover are handled in the order in which they
//! arrive.

use crate::{
    baseline::Baseline, boot_files::FileRun, compatibility::Incompatibility, page_batch::BATCH_PAGES_MAX,
};
use serde::{Deserialize, Serialize};
use whimbrel_core::{CapsuleId, Digest, HostName, MachineConfig, MachineName, PAGE_SIZE, PageRun, hex_id};
use whimbrel_image::compression::{self, Settings};
use whimbrel_wire::{Protocol, Version, range};
use xxhash_rust::xxh3::xxh3_64;

/// Versions of these messages and of those in [`crate::postcopy::messages`].
pub const PROTOCOL: Protocol = Protocol {
    name: "migrate",
    kinds: (range::MIGRATE, range::MIGRATE + 0x3f),
    versions: &[
        Version {
            number: 2,
            reason: "the offer says whether the user has paused the machine, which an older target would run",
        },
        Version {
            number: RETURN_VERSION,
            reason: "a commit may be answered with the machine's return, which an older target cannot say",
        },
        Version {
            number: OFFLOADS_VERSION,
            reason: "network ports have offloads, with which an older target cannot load the device state",
        },
        Version {
            number: AGENT_PORT_VERSION,
            reason: "machines have a port for qemu-ga, without which an older target cannot load the device state",
        },
        Version {
            number: FIRMWARE_VERSION,
            reason: "machines have UEFI, no BIOS at all or a TPM, and an older target would start none of them",
        },
        Version {
            number: DISPLAY_VERSION,
            reason: "machines have a screen, whose memory makes device states longer than an older target takes",
        },
        Version {
            number: DEVICES_VERSION,
            reason: "machines have Secure Boot, CD-ROM drives, SATA disks and e1000 ports, and an older target would start none of them",
        },
        Version {
            number: HOTPLUG_VERSION,
            reason: "machines have a bridge for devices that are added while they run, which is in their device state",
        },
    ],
};

/// First version with [`COMMIT_OR_RETURN`].
pub const RETURN_VERSION: u16 = 3;
/// First version whose targets and standbys load machines with offloads of network ports.
pub const OFFLOADS_VERSION: u16 = 4;
/// First version whose targets and standbys give machines a port for qemu-ga.
pub const AGENT_PORT_VERSION: u16 = 5;
/// First version whose targets and standbys start other firmware than a BIOS, and a TPM.
pub const FIRMWARE_VERSION: u16 = 6;
/// First version whose targets and standbys give machines a screen.
pub const DISPLAY_VERSION: u16 = 7;
/// First version whose targets and standbys give machines Secure Boot, CD-ROM drives and emulated devices.
pub const DEVICES_VERSION: u16 = 8;
/// First version whose targets and standbys give machines a bridge for devices that come later.
pub const HOTPLUG_VERSION: u16 = 9;

/// Offers a machine; header [`Offer`], reply [`Offered`].
pub const OFFER: u16 = 0x0100;
/// Sends a range of a boot file; header [`BootFileRange`], payload the content.
pub const BOOT_FILE: u16 = 0x0101;
/// Sends pages; header [`PagesHeader`], payload as in [`crate::page_batch`].
pub const PAGES: u16 = 0x0102;
/// Ends the copy; header [`FinishHeader`], payload the rest of the device state as one zstd frame. Answered
/// with [`Prepared`] once it is loaded and recorded.
pub const FINISH: u16 = 0x0103;
/// Commits the handover, so that the target runs the machine; header [`HandoverId`]. May be repeated. The
/// first is answered with [`RunningSince`].
pub const COMMIT: u16 = 0x0104;
/// Aborts the handover; header [`HandoverId`].
pub const ABORT: u16 = 0x0105;

/// Asks whether the target has these pages anywhere; header [`PageQuery`], reply [`PageQueryReply`]. The
/// target stores those that it has in the array before it replies. In no order with other messages.
pub const QUERY_PAGES: u16 = 0x0107;

/// Sends the probable beginning of the device state; header [`HandoverId`], payload one zstd frame. Before
/// [`FINISH`], at most once.
pub const EARLY_STATE: u16 = 0x0108;

/// Names pages of memory that the target has in the boot files of the offer; header [`FilePages`].
pub const BOOT_FILE_PAGES: u16 = 0x0109;

/// Sends frames that reached the machine's old host; header
/// [`LateFramesHeader`](crate::late_frames::LateFramesHeader), payload the frames. After [`COMMIT`], in no
/// order with it.
pub const LATE_FRAMES: u16 = 0x010a;

/// Commits the handover like [`COMMIT`], but the target may give the machine back instead; header
/// [`HandoverId`], reply [`CommitReply`]. May be repeated. From version 3 on.
pub const COMMIT_OR_RETURN: u16 = 0x010b;

/// Most bytes of a boot file in one message.
pub const BOOT_FILE_RANGE_MAX: usize = 4 << 20;
/// Most boot files of a machine: a kernel, its initial RAM disk, a firmware.
pub const BOOT_FILES_MAX: usize = 3;
/// Most bytes of a boot file.
pub const BOOT_FILE_MAX: u64 = 1 << 30;
/// Most bytes of device state: screen memory has 8 MiB, flash memory 4 MiB.
pub const DEVICE_STATE_MAX: usize = 24 << 20;
/// Most capsules that a source names as baselines.
pub const BASES_MAX: usize = 64;
/// Most bytes of a path of a file that a source names.
pub(crate) const PATH_MAX: usize = 4096;
/// Most bytes of a protection request.
pub(crate) const PROTECTION_REQUEST_MAX: usize = 4096;
/// Most arrays of a machine (memory and disks).
pub(crate) const ARRAYS_MAX: usize = 64;

hex_id! {
    /// Id of one attempt to migrate one machine. Random, so that a late message of an older attempt matches
    /// nothing.
    pub struct HandoverId;
}

/// Handover of a message: the first field of every header.
pub fn handover_of(header: &[u8]) -> Option<HandoverId> {
    postcard::take_from_bytes(header).ok().map(|(handover, _)| handover)
}

/// Machine that the source wants to migrate. The target reserves everything that this names before it
/// accepts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Id of this handover.
    pub handover: HandoverId,
    /// Name of the machine, which must be free on the target.
    pub name: MachineName,
    /// Configuration of the machine.
    #[serde(with = "crate::offered_config")]
    pub config: MachineConfig,
    /// Page arrays: memory first, then the disks in order.
    pub arrays: Vec<ArrayOffer>,
    /// Generation id of the machine, which it keeps.
    pub vmgenid: String,
    /// Capsule that the machine last came from or was saved as.
    pub origin: Option<CapsuleId>,
    /// Boot files, with their sizes.
    pub blobs: Vec<(Digest, u64)>,
    /// Version of the QEMU that runs it.
    pub qemu_version: String,
    /// Bytes of disk space that its disks take.
    pub disk_bytes: u64,
    /// Model of the processor that it runs on.
    pub processor: String,
    /// Host of its network, if that does not move to the target.
    pub tunnel: Option<HomeNetwork>,
    /// Similar capsules that the source has completely, the best first: possible baselines.
    pub bases: Vec<CapsuleId>,
    /// Files beneath its disks that the target may reach as well.
    pub files: Vec<SharedFile>,
    /// Name of the source, if pages may be missing on the target after the handover.
    pub leaves: Option<HostName>,
    /// Protection of the machine from the commit until no page is missing on the target.
    pub third: Option<BackupHost>,
    /// Whether its user has paused it: it then stays paused on the target.
    pub paused: bool,
}

/// Backup host that has all of a machine as of the pause, and gets its epochs from the target from then on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupHost {
    /// Id of the protection: the target is its primary, the source its witness.
    pub protection: [u8; 16],
    /// Id of the handover by which the backup host knows the machine.
    pub handover: HandoverId,
    /// Protection that the target sets up: a request of its own API.
    pub request: String,
}

/// Read-only file beneath a disk. Both hosts reach the same file if a marker file that the source has just
/// put beside it exists on the target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedFile {
    /// Index of the disk, from 0.
    pub disk: u32,
    /// Path of the file.
    pub path: String,
    /// Length of the file in bytes.
    pub len: u64,
    /// Time of its last change, in nanoseconds since 1970.
    pub changed: i64,
    /// Name of the marker file in the same directory.
    pub mark: String,
    /// Content of the marker file.
    pub secret: [u8; 32],
}

impl Offer {
    /// Offer of a machine with the arrays of its configuration, and defaults for everything else.
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

    /// Whether the target may choose this baseline.
    pub fn permits(&self, begun: &Baseline) -> bool {
        match begun {
            Baseline::Zeros => true,
            Baseline::Capsule(capsule) => self.bases.contains(capsule),
            Baseline::File => !self.files.is_empty(),
        }
    }
}

/// Host that has a machine's network while it runs on another one, and the tunnel between the two.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomeNetwork {
    /// Name of the home host.
    pub home: HostName,
    /// Id of the tunnel, until the machine is home again.
    pub id: TunnelId,
    /// Capsule as which that host suspended the machine, if it left in that way.
    pub capsule: Option<CapsuleId>,
}

hex_id! {
    /// Id of a tunnel. Random, and known only to hosts that have the machine.
    pub struct TunnelId;
}

/// Page array of an offer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrayOffer {
    /// Name of the array: `memory`, `disk0`, …
    pub name: String,
    /// Length of the array in pages.
    pub pages: u64,
}

/// Reply of the target to an offer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Offered {
    /// The target has reserved the resources.
    Accepted(Accepted),
    /// The machine does not fit the target; nothing was reserved.
    Misfit(Incompatibility),
}

/// Acceptance of an offer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// Boot files of the offer that the target lacks.
    pub blobs_missing: Vec<Digest>,
    /// Baseline of each array; zeros for those beyond the list.
    pub begun_as: Vec<Baseline>,
}

/// Header of a range of a boot file; ranges are sent in the order of their offsets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootFileRange {
    /// Id of the handover.
    pub handover: HandoverId,
    /// Digest of the complete boot file.
    pub digest: Digest,
    /// Offset of the range.
    pub offset: u64,
}

/// Header of pages of one array.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagesHeader {
    /// Id of the handover.
    pub handover: HandoverId,
    /// Pages and their encoding.
    pub batch: crate::page_batch::PageBatchHeader,
}

/// Pages of memory that are in files which the machine boots from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePages {
    /// Id of the handover.
    pub handover: HandoverId,
    /// Pages and their offsets in the files.
    pub runs: Vec<FileRun>,
    /// XXH3 of all of them, which detects a damaged file on either side.
    pub check: u64,
}

impl FilePages {
    /// Checksum of concatenated pages.
    pub fn check_of(content: &[u8]) -> u64 {
        xxh3_64(content)
    }

    /// Whether a correct source can send this for a memory of `len` pages and these files.
    pub(crate) fn is_valid(&self, len: u64, blobs: &[(Digest, u64)]) -> bool {
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

/// Query for pages of one array that are about to be sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageQuery {
    /// Id of the handover.
    pub handover: HandoverId,
    /// Index of the array in the offer's arrays.
    pub array: u32,
    /// Pages of the query, at most as many as in a batch, none of them zero.
    pub runs: Vec<PageRun>,
    /// Digest of each page.
    pub digests: Vec<Digest>,
}

impl PageQuery {
    /// Whether a correct source can send this for an array of `len` pages.
    pub(crate) fn is_valid(&self, len: u64) -> bool {
        let pages = self.runs.iter().fold(0u64, |sum, run| sum.saturating_add(run.len));
        let inside = |run: &PageRun| run.start.checked_add(run.len).is_some_and(|end| end <= len);
        pages <= BATCH_PAGES_MAX && pages == self.digests.len() as u64 && self.runs.iter().all(inside)
    }
}

/// Reply to a page query.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageQueryReply {
    /// Found pages: bit `i % 64` of word `i / 64` for page `i` of the query.
    pub found: Vec<u64>,
}

impl PageQueryReply {
    /// Builds the reply from one value for each page.
    pub(crate) fn of(found: &[bool]) -> Self {
        let word = |bits: &[bool]| (0..).zip(bits).fold(0, |word, (at, bit)| word | u64::from(*bit) << at);
        Self { found: found.chunks(64).map(word).collect() }
    }

    /// Whether page `page` of the query was found.
    pub fn has(&self, page: usize) -> bool {
        self.found.get(page / 64).is_some_and(|word| word >> (page % 64) & 1 == 1)
    }
}

/// End of the copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finish {
    /// Id of the handover.
    pub handover: HandoverId,
    /// Addresses seen on each network port, opaque to the protocol, so that the target can announce them.
    pub ports: Vec<Vec<u8>>,
}

/// Header of [`FINISH`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinishHeader {
    /// End of the copy.
    pub finish: Finish,
    /// Bytes of the device state that equal the early state.
    pub ahead: u32,
    /// Bytes of the device state that follow.
    pub rest: u32,
}

/// Reply to [`FINISH`]: the machine is loaded and paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Prepared {
    /// Microseconds that it took.
    pub took: u64,
}

/// Reply to [`COMMIT`]: the machine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RunningSince {
    /// Microseconds since its CPUs started.
    pub since: u64,
}

/// Reply to [`COMMIT_OR_RETURN`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommitReply {
    /// The machine runs here.
    Running(RunningSince),
    /// The machine never ran here and never will: the source takes it back.
    NeverRan,
}

/// Compresses a part of a device state; an empty part stays empty.
pub fn pack_state(state: &[u8]) -> std::io::Result<Vec<u8>> {
    if state.is_empty() {
        return Ok(Vec::new());
    }
    Ok(compression::compress(state, &[], Settings::level(1), Vec::new())?)
}

/// Decompresses at most `max` bytes of a device state.
pub(crate) fn unpack_state(packed: &[u8], max: usize) -> Option<Vec<u8>> {
    if packed.is_empty() {
        return Some(Vec::new());
    }
    compression::decompress_at_most(packed, &[], max.min(DEVICE_STATE_MAX)).ok()
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
        assert!(ask.is_valid(302) && !ask.is_valid(301));
        assert!(!PageQuery { digests: vec![], ..ask.clone() }.is_valid(302));
        assert!(!PageQuery { runs: vec![PageRun::new(u64::MAX, 2)], ..ask }.is_valid(u64::MAX));
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
            assert!(bad.parse::<TunnelId>().is_err());
        }
    }
}
