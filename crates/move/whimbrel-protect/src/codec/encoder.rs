//! Makes pieces: pages of one array, reduced to what the standby lacks.
//!
//! Whatever a page looks like, it is in the piece: one whose blocks all seem to be as they were still travels
//! as its digest, so that a hash that hides a change is found out. Each block that travels is first looked
//! for among those of this piece (compared byte by byte before it is shared), then offered to the codes in
//! the order of their price.

use super::{
    BlockSize, ByteCounts, CHECK_BYTES, CodecOptions, FallbackCompressor, PIECE_PAGES_MAX,
    bit_io::BitWriter,
    block_hashes::{BlockHashes, PageChange},
    check_of,
    page_references::ReferenceWriter,
    sections::{RAW_GZIP, RAW_PLAIN, RAW_ZSTD, SECTIONS, Section, join, push_number},
    shared_pages::{PageReference, SharingMachine},
    sparse, wkdm,
};
use std::{
    collections::{HashMap, HashSet},
    io::{self, Write as _},
};
use whimbrel_core::PAGE_SIZE;

pub(super) const PAGE_ZERO: u64 = 0;
pub(super) const PAGE_WHOLE: u64 = 1;
pub(super) const PAGE_BLOCKS: u64 = 2;
pub(super) const PAGE_SAME: u64 = 3;
pub(super) const PAGE_NAMED: u64 = 4;
/// Bits of how a page travels.
pub(super) const PAGE_BITS: u32 = 3;

pub(super) const BLOCK_RAW: u32 = 0;
pub(super) const BLOCK_SPARSE: u32 = 1;
pub(super) const BLOCK_WORDS: u32 = 2;
pub(super) const BLOCK_SHARED: u32 = 3;

/// zstd's fastest ordinary level: what is left for it is what nothing cheaper could shrink.
const ZSTD_LEVEL: i32 = 1;

/// The array that is the machine's memory.
const MEMORY: u32 = 0;

/// Makes pieces of one protection.
pub struct Encoder {
    coding: CodecOptions,
    hashes: BlockHashes,
    zstd: zstd::bulk::Compressor<'static>,
    piece: Piece,
    first_copy: bool,
    /// If pages of other machines may be named.
    member: Option<SharingMachine>,
    /// Pages that the standby did not get right: they are not named once more.
    plain: HashSet<(u32, u64)>,
}

/// The sections of the piece in the making.
#[derive(Default)]
struct Piece {
    pages: Vec<u8>,
    checks: Vec<u8>,
    masks: Vec<u8>,
    kinds: BitWriter,
    shared: Vec<u8>,
    sparse: Vec<u8>,
    words: wkdm::Packer,
    raw: Vec<u8>,
    names: ReferenceWriter,
    /// Every block that travels, one after the other, and by its hash where the first of its kind is.
    blocks: Vec<u8>,
    known: HashMap<u64, u32>,
    volume: ByteCounts,
}

impl Encoder {
    /// An encoder whose table of hashes takes at most `hash_bytes_max`.
    pub fn new(coding: CodecOptions, seed: u64, hash_bytes_max: usize) -> io::Result<Self> {
        let hashes = BlockHashes::new(coding.block, seed, hash_bytes_max);
        Ok(Self {
            coding,
            hashes,
            zstd: zstd::bulk::Compressor::new(ZSTD_LEVEL)?,
            piece: Piece::default(),
            first_copy: false,
            member: None,
            plain: HashSet::new(),
        })
    }

    /// From now on pages that the standby has of this or another machine are named, if anything is shared at
    /// all.
    pub fn share_with(&mut self, member: SharingMachine) {
        self.member = Some(member).filter(|_| self.coding.share);
    }

    /// Pages of the last piece that were named: the standby may ask for them again.
    pub fn named(&self) -> &[u64] {
        self.piece.names.pages()
    }

    /// Bytes that the table of hashes takes.
    pub fn hash_bytes(&self) -> usize {
        self.hashes.bytes()
    }

    /// A first copy begins, or has ended: it is not known any more what the standby has. While it lasts only
    /// memory is remembered: most of a disk is never written again, and would take the room of what is.
    pub fn first_copy(&mut self, lasts: bool) {
        if lasts {
            self.hashes.forget_all();
        }
        self.first_copy = lasts;
    }

    /// The standby assembled something else from this page: all of it travels next.
    pub fn forget(&mut self, array: u32, page: u64) {
        self.hashes.forget(array, page);
        if self.member.is_some() {
            self.plain.insert((array, page));
        }
    }

    /// Makes a piece of at most [`PIECE_PAGES_MAX`] pages, in ascending order, each with its content.
    pub fn encode<'a>(
        &mut self,
        array: u32,
        pages: impl Iterator<Item = (u64, &'a [u8])>,
    ) -> io::Result<(Vec<u8>, ByteCounts)> {
        self.piece.clear();
        let mut before = 0;
        for (number, content) in pages.take(PIECE_PAGES_MAX) {
            self.page(array, number, number - before, content);
            before = number;
        }
        self.finish()
    }

    fn page(&mut self, array: u32, number: u64, distance: u64, content: &[u8]) {
        let piece = &mut self.piece;
        piece.volume.pages += 1;
        piece.volume.dirty += PAGE_SIZE as u64;
        let change = match self.first_copy && array != MEMORY {
            true => PageChange::New,
            false => self.hashes.change(array, number, content),
        };
        let block = self.coding.block;
        // The base line sends what it finds, zeros too.
        if self.coding != CodecOptions::REMUS && whimbrel_core::is_zero(content) {
            return push_number(distance << PAGE_BITS | PAGE_ZERO, &mut piece.pages);
        }
        if change == PageChange::New
            && let Some(name) = self.name(array, number, content)
        {
            return self.piece.name(number, distance, name, content);
        }
        let piece = &mut self.piece;
        let (kind, mask) = match change {
            PageChange::New => (PAGE_WHOLE, u64::MAX),
            PageChange::Blocks(0) => (PAGE_SAME, 0),
            PageChange::Blocks(mask) => (PAGE_BLOCKS, mask),
        };
        push_number(distance << PAGE_BITS | kind, &mut piece.pages);
        if kind != PAGE_WHOLE {
            piece.checks.extend(check_of(content));
        }
        if kind == PAGE_BLOCKS {
            piece.masks.extend(&mask.to_le_bytes()[..mask_bytes(block)]);
        }
        for (index, bytes) in content.chunks_exact(block.bytes()).enumerate() {
            if mask >> index & 1 == 1 {
                piece.block(&self.coding, bytes);
            }
        }
    }

    /// By what name the standby has all of this page, as far as is known.
    fn name(&mut self, array: u32, number: u64, content: &[u8]) -> Option<PageReference> {
        let member = self.member.as_ref()?;
        let plain = self.plain.remove(&(array, number));
        // Of whole pages every one is new in every epoch: only most of a first copy stays as it is.
        if self.coding.block == BlockSize::Page && !self.first_copy && !plain {
            return None;
        }
        let name = member.name(array, number, content, plain)?;
        self.piece.names.has_room(&name).then_some(name)
    }

    fn finish(&mut self) -> io::Result<(Vec<u8>, ByteCounts)> {
        let piece = &self.piece;
        let compressed = match self.coding.general {
            FallbackCompressor::Zstd if !piece.raw.is_empty() => {
                Some((RAW_ZSTD, self.zstd.compress(&piece.raw)?))
            }
            FallbackCompressor::Gzip if !piece.raw.is_empty() => Some((RAW_GZIP, gzip(&piece.raw)?)),
            _ => None,
        };
        let smaller = compressed.filter(|(_, small)| small.len() < piece.raw.len());
        let (raw_code, raw) =
            smaller.as_ref().map_or((RAW_PLAIN, &piece.raw[..]), |(code, small)| (*code, &small[..]));
        let raw_length = (piece.raw.len() as u32).to_le_bytes();
        let words = piece.words.streams();
        let words = match words.iter().all(|stream| stream.is_empty()) {
            true => Vec::new(),
            false => {
                let lengths = words.iter().flat_map(|stream| (stream.len() as u32).to_le_bytes());
                lengths.chain(words.iter().flat_map(|stream| stream.iter().copied())).collect()
            }
        };
        let mut parts = [&[][..]; SECTIONS];
        parts[Section::Pages as usize] = &piece.pages;
        parts[Section::Checks as usize] = &piece.checks;
        parts[Section::Masks as usize] = &piece.masks;
        parts[Section::Kinds as usize] = piece.kinds.bytes();
        parts[Section::Shared as usize] = &piece.shared;
        parts[Section::Sparse as usize] = &piece.sparse;
        parts[Section::Words as usize] = &words;
        parts[Section::RawLength as usize] = &raw_length;
        parts[Section::Raw as usize] = raw;
        let raw_code = [raw_code];
        parts[Section::RawCode as usize] = &raw_code;
        let names = piece.names.encoded();
        parts[Section::Names as usize] = &names;
        let payload = join(parts);
        let volume = ByteCounts { sent: payload.len() as u64, ..piece.volume };
        Ok((payload, volume))
    }
}

impl Piece {
    fn clear(&mut self) {
        for part in [&mut self.pages, &mut self.checks, &mut self.masks, &mut self.shared, &mut self.sparse] {
            part.clear();
        }
        self.kinds.clear();
        self.words.clear();
        self.raw.clear();
        self.blocks.clear();
        self.known.clear();
        self.names.clear();
        self.volume = ByteCounts::default();
    }

    fn name(&mut self, number: u64, distance: u64, name: PageReference, content: &[u8]) {
        push_number(distance << PAGE_BITS | PAGE_NAMED, &mut self.pages);
        self.checks.extend(check_of(content));
        self.names.push(number, name);
        self.volume.changed += PAGE_SIZE as u64;
    }

    fn block(&mut self, coding: &CodecOptions, block: &[u8]) {
        self.volume.changed += block.len() as u64;
        let index = (self.blocks.len() / block.len()) as u32;
        if coding.share {
            let hash = xxhash_rust::xxh3::xxh3_64(block);
            match self.known.get(&hash) {
                Some(first) if self.blocks[*first as usize * block.len()..][..block.len()] == *block => {
                    push_number(u64::from(index - first), &mut self.shared);
                    self.kinds.push(BLOCK_SHARED, 2);
                    self.blocks.extend_from_slice(block);
                    return;
                }
                Some(_) => {}
                None => {
                    self.known.insert(hash, index);
                }
            }
            self.blocks.extend_from_slice(block);
        }
        self.volume.unshared += block.len() as u64;
        let kind = if coding.sparse && sparse::encode(block, &mut self.sparse) {
            BLOCK_SPARSE
        } else if coding.wkdm && self.words.push(block) {
            BLOCK_WORDS
        } else {
            self.raw.extend_from_slice(block);
            BLOCK_RAW
        };
        self.kinds.push(kind, 2);
    }
}

fn gzip(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes)?;
    encoder.finish()
}

/// Bytes of a page's mask.
pub(super) const fn mask_bytes(block: BlockSize) -> usize {
    block.in_page().div_ceil(8)
}

/// Bytes of the digests of `pages` pages at most: what a piece comes to beside blocks.
pub const fn overhead_max(pages: usize) -> usize {
    pages * (CHECK_BYTES + 8 + 10)
}
