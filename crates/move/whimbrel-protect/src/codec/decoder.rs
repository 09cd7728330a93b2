//! Decoder: assembles and checks the pages of a batch from its content and from pages that are here.

use super::{
    BATCH_PAGES_MAX, BlockSize, DIGEST_BYTES,
    bit_io::BitReader,
    encoder::{
        BLOCK_RAW, BLOCK_SHARED, BLOCK_SPARSE, BLOCK_WORDS, PAGE_BITS, PAGE_BLOCKS, PAGE_REFERENCE,
        PAGE_SAME, PAGE_WHOLE, PAGE_ZERO, mask_bytes,
    },
    page_digest,
    page_references::ReferenceReader,
    sections::{DamagedEpochPages, RAW_PLAIN, RAW_ZSTD, Section, split, split_n},
    shared_pages::PageReference,
    sparse,
    wkdm::Unpacker,
};
use whimbrel_core::{PAGE_SIZE, varint};
use whimbrel_image::{compression::decompress_at_most, delta_blocks};

/// Destination of decoded pages, and source of their older versions.
pub trait PageSink {
    /// Error of the destination.
    type Error: From<DamagedEpochPages>;

    /// Reads the version of a page that the primary sent last.
    fn older(&self, page: u64, out: &mut [u8]) -> Result<(), Self::Error>;

    /// Reads a referenced page of this or another machine, if possible. The content is checked before use.
    fn referenced(&self, name: &PageReference, out: &mut [u8]) -> bool;

    /// Stores a page; none stands for zeros.
    fn page(&mut self, page: u64, content: Option<&[u8]>) -> Result<(), Self::Error>;
}

/// Decodes batches of pages.
#[derive(Default)]
pub struct Decoder {
    blocks: Vec<u8>,
}

struct Entry {
    page: u64,
    kind: u64,
    mask: u64,
}

impl Decoder {
    /// Decodes a batch for an array of `len` pages. Returns the pages whose digest was wrong; they were not
    /// stored and must be sent again.
    pub fn decode<A: PageSink>(
        &mut self,
        payload: &[u8],
        block: BlockSize,
        len: u64,
        into: &mut A,
    ) -> Result<Vec<u64>, A::Error> {
        let parts = split(payload)?;
        let entries = entries(&parts, block, len)?;
        let count = entries.iter().map(|entry| entry.mask.count_ones() as usize).sum();
        self.blocks(&parts, block, count)?;
        let mut blocks = &self.blocks[..];
        let mut checks = parts[Section::Checks as usize].chunks_exact(DIGEST_BYTES);
        let mut names = ReferenceReader::new(parts[Section::References as usize])?;
        let (mut wrong, mut page) = (Vec::new(), vec![0; PAGE_SIZE]);
        for entry in entries {
            if entry.kind == PAGE_ZERO {
                into.page(entry.page, None)?;
                continue;
            }
            let mut is_here = true;
            match entry.kind {
                PAGE_WHOLE => {}
                PAGE_REFERENCE => {
                    let name = names.pull().ok_or(damaged("a page has no reference"))?;
                    is_here = into.referenced(&name, &mut page);
                }
                _ => into.older(entry.page, &mut page)?,
            }
            blocks = delta_blocks::scatter(blocks, entry.mask, block.bytes(), &mut page)
                .ok_or(damaged("there are too few blocks"))?;
            let is_right = entry.kind == PAGE_WHOLE || checks.next() == Some(&page_digest(&page));
            if !is_here || !is_right {
                wrong.push(entry.page);
                continue;
            }
            into.page(entry.page, Some(&page))?;
        }
        Ok(wrong)
    }

    /// Decodes `count` blocks into the buffer.
    fn blocks(&mut self, parts: &[&[u8]], block: BlockSize, count: usize) -> Result<(), DamagedEpochPages> {
        let raw = Self::raw(parts, count * block.bytes())?;
        let (mut raw, size) = (&raw[..], block.bytes());
        let mut kinds = BitReader::new(parts[Section::Kinds as usize]);
        let mut shared = parts[Section::Shared as usize];
        let mut sparse_blocks = parts[Section::Sparse as usize];
        let streams = match parts[Section::Words as usize] {
            [] => [&[][..]; 4],
            some => split_n::<4>(some)?,
        };
        let mut words = Unpacker::new(streams);
        self.blocks.clear();
        self.blocks.resize(count * size, 0);
        for index in 0..count {
            let (before, rest) = self.blocks.split_at_mut(index * size);
            let out = &mut rest[..size];
            match kinds.pull(2).ok_or(damaged("blocks have no kind"))? {
                BLOCK_RAW => {
                    let (bytes, after) =
                        raw.split_at_checked(size).ok_or(damaged("there are too few plain blocks"))?;
                    out.copy_from_slice(bytes);
                    raw = after;
                }
                BLOCK_SPARSE => {
                    sparse_blocks =
                        sparse::decode(sparse_blocks, out).ok_or(damaged("a sparse block is damaged"))?;
                }
                BLOCK_WORDS => words.pull(out).ok_or(damaged("a block of words is damaged"))?,
                BLOCK_SHARED => {
                    let ago =
                        varint::take(&mut shared).ok().ok_or(damaged("a shared block has no distance"))?;
                    let from = usize::try_from(ago).ok().filter(|ago| (1..=index).contains(ago));
                    let from = index - from.ok_or(damaged("a shared block is out of range"))?;
                    out.copy_from_slice(&before[from * size..][..size]);
                }
                _ => return Err(damaged("a block of an unknown kind")),
            }
        }
        Ok(())
    }

    /// The bytes of plain blocks, at most `most`.
    fn raw(parts: &[&[u8]], most: usize) -> Result<Vec<u8>, DamagedEpochPages> {
        let length = parts[Section::RawLength as usize].first_chunk::<4>();
        let length = u32::from_le_bytes(*length.ok_or(damaged("a length is missing"))?) as usize;
        if length > most {
            return Err(damaged("its blocks exceed its pages"));
        }
        let bytes = parts[Section::Raw as usize];
        let raw = match *parts[Section::RawCode as usize] {
            [RAW_PLAIN] => bytes.to_vec(),
            [RAW_ZSTD] => {
                decompress_at_most(bytes, &[], length).map_err(|_| damaged("its blocks do not decompress"))?
            }
            _ => return Err(damaged("its blocks are compressed by an unknown method")),
        };
        if raw.len() == length { Ok(raw) } else { Err(damaged("its blocks have another length")) }
    }
}

fn entries(parts: &[&[u8]], block: BlockSize, len: u64) -> Result<Vec<Entry>, DamagedEpochPages> {
    let mut bytes = parts[Section::Pages as usize];
    let mut masks = parts[Section::Masks as usize];
    let all = u64::MAX >> (64 - block.in_page());
    let (mut entries, mut page) = (Vec::new(), 0u64);
    while !bytes.is_empty() {
        let number = varint::take(&mut bytes).ok().ok_or(damaged("the list of pages is damaged"))?;
        let (distance, kind) = (number >> PAGE_BITS, number & ((1 << PAGE_BITS) - 1));
        page = page.checked_add(distance).filter(|page| *page < len).ok_or(damaged("a page is too high"))?;
        if entries.len() >= BATCH_PAGES_MAX || (distance == 0 && !entries.is_empty()) {
            return Err(damaged("the list of pages is too long or not ascending"));
        }
        let mask = match kind {
            PAGE_WHOLE => all,
            PAGE_BLOCKS => {
                let (mask, rest) =
                    masks.split_at_checked(mask_bytes(block)).ok_or(damaged("masks are missing"))?;
                masks = rest;
                mask.iter().rev().fold(0, |mask, byte| mask << 8 | u64::from(*byte)) & all
            }
            PAGE_ZERO | PAGE_SAME | PAGE_REFERENCE => 0,
            _ => return Err(damaged("a page of an unknown kind")),
        };
        entries.push(Entry { page, kind, mask });
    }
    Ok(entries)
}

fn damaged(what: &'static str) -> DamagedEpochPages {
    DamagedEpochPages { what }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{ByteCounts, CodecOptions, encoder::Encoder};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const PAGES: u64 = 40;

    /// What the standby has.
    #[derive(Default)]
    struct Copy(BTreeMap<u64, Vec<u8>>);

    impl PageSink for Copy {
        type Error = DamagedEpochPages;

        fn older(&self, page: u64, out: &mut [u8]) -> Result<(), DamagedEpochPages> {
            match self.0.get(&page) {
                Some(content) => out.copy_from_slice(content),
                None => out.fill(0),
            }
            Ok(())
        }

        fn referenced(&self, _: &PageReference, _: &mut [u8]) -> bool {
            false
        }

        fn page(&mut self, page: u64, content: Option<&[u8]>) -> Result<(), DamagedEpochPages> {
            self.0.insert(page, content.map_or_else(|| vec![0; PAGE_SIZE], <[u8]>::to_vec));
            Ok(())
        }
    }

    fn codings() -> impl Strategy<Value = CodecOptions> {
        let block =
            prop::sample::select(vec![BlockSize::B64, BlockSize::B128, BlockSize::B256, BlockSize::Page]);
        (block, any::<bool>()).prop_map(|(block, compact)| CodecOptions { block, compact })
    }

    /// A write: where, how long, what kind of bytes.
    fn writes() -> impl Strategy<Value = Vec<(u64, usize, usize, u8, u64)>> {
        prop::collection::vec((0..PAGES, 0..PAGE_SIZE, 1..600usize, 0..4u8, any::<u64>()), 1..60)
    }

    fn apply(memory: &mut BTreeMap<u64, Vec<u8>>, (page, at, len, kind, seed): (u64, usize, usize, u8, u64)) {
        let content = memory.entry(page).or_insert_with(|| vec![0; PAGE_SIZE]);
        let end = (at + len).min(PAGE_SIZE);
        for (index, byte) in content[at..end].iter_mut().enumerate() {
            *byte = match kind {
                0 => 0,
                1 => seed.to_le_bytes()[index % 8],
                2 => ((index as u64).wrapping_mul(seed | 1) >> 13) as u8,
                _ => u8::from(index % 50 == 0),
            };
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_copy_is_the_original_after_every_epoch(
            coding in codings(), epochs in prop::collection::vec(writes(), 1..6), seed: u64,
        ) {
            let (mut memory, mut copy) = (BTreeMap::new(), Copy::default());
            let mut encoder = Encoder::new(coding, seed, 1 << 20);
            let mut decoder = Decoder::default();
            for writes in epochs {
                let dirty: std::collections::BTreeSet<u64> = writes.iter().map(|write| write.0).collect();
                writes.into_iter().for_each(|write| apply(&mut memory, write));
                let pages = dirty.iter().map(|page| (*page, &memory[page][..]));
                let (payload, volume) = encoder.encode(0, pages).unwrap();
                prop_assert_eq!(volume.pages, dirty.len() as u64);
                prop_assert!(volume.unshared <= volume.changed && volume.changed <= volume.dirty);
                let wrong = decoder.decode(&payload, coding.block, PAGES, &mut copy).unwrap();
                prop_assert!(wrong.is_empty());
                prop_assert_eq!(&copy.0, &memory);
            }
        }

        #[test]
        fn damage_is_an_error_and_never_more_than_the_pages_that_may_be(
            coding in codings(), writes in writes(), flips in prop::collection::vec((any::<usize>(), any::<u8>()), 1..8),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut memory = BTreeMap::new();
            writes.into_iter().for_each(|write| apply(&mut memory, write));
            let mut encoder = Encoder::new(coding, 1, 1 << 20);
            let (mut payload, _) = encoder.encode(0, memory.iter().map(|(page, data)| (*page, &data[..]))).unwrap();
            let len = payload.len();
            flips.iter().for_each(|(at, value)| payload[at % len] ^= value);
            let mut decoder = Decoder::default();
            let _ = decoder.decode(&payload, coding.block, PAGES, &mut Copy::default());
            let _ = decoder.decode(&payload[..cut.index(len)], coding.block, PAGES, &mut Copy::default());
        }
    }

    #[test]
    fn settings_are_on_the_wire_as_version_0_1_had_them() {
        let fine = CodecOptions::fine(BlockSize::B128);
        for (options, bytes) in [(fine, [1, 1, 1, 1, 1]), (CodecOptions::REMUS, [3, 0, 0, 0, 0])] {
            assert_eq!(postcard::to_stdvec(&options).unwrap(), bytes);
            assert_eq!(postcard::from_bytes(&bytes), Ok(options));
        }
    }

    #[test]
    fn a_change_that_the_hashes_hide_is_asked_for_again() {
        let coding = CodecOptions::fine(BlockSize::B64);
        let mut encoder = Encoder::new(coding, 1, 1 << 20);
        let (mut decoder, mut copy) = (Decoder::default(), Copy::default());
        let page = vec![3; PAGE_SIZE];
        let (payload, _) = encoder.encode(0, [(5, &page[..])].into_iter()).unwrap();
        assert_eq!(decoder.decode(&payload, coding.block, PAGES, &mut copy), Ok(vec![]));
        // As a collision would do: here the copy differs although the hashes say that it does not.
        copy.0.get_mut(&5).unwrap()[100] = 4;
        let (payload, volume) = encoder.encode(0, [(5, &page[..])].into_iter()).unwrap();
        assert_eq!(volume.changed, 0);
        assert_eq!(decoder.decode(&payload, coding.block, PAGES, &mut copy), Ok(vec![5]));
        encoder.forget(0, 5);
        let (payload, _) = encoder.encode(0, [(5, &page[..])].into_iter()).unwrap();
        assert_eq!(decoder.decode(&payload, coding.block, PAGES, &mut copy), Ok(vec![]));
        assert_eq!(copy.0[&5], page);
    }

    #[test]
    fn each_step_makes_less_of_a_typical_epoch() {
        // In each page a few words change: counters, a pointer, and one block that is the same in all of
        // them.
        let sent = |coding: CodecOptions| -> ByteCounts {
            let noise = |page| {
                (0..PAGE_SIZE as u64)
                    .map(move |at| ((at + 1).wrapping_mul(page * 2 + 0x9e37_79b9) >> 7) as u8)
            };
            let mut memory: BTreeMap<u64, Vec<u8>> =
                (0..PAGES).map(|page| (page, noise(page).collect())).collect();
            let mut encoder = Encoder::new(coding, 1, 1 << 20);
            encoder.encode(0, memory.iter().map(|(page, data)| (*page, &data[..]))).unwrap();
            for (page, data) in &mut memory {
                data[8] = data[8].wrapping_add(1);
                data[640..704].fill(0);
                data[700] = *page as u8;
                data[1024..1088].fill(7);
            }
            encoder.encode(0, memory.iter().map(|(page, data)| (*page, &data[..]))).unwrap().1
        };
        let remus = sent(CodecOptions::REMUS);
        let nothing = CodecOptions { compact: false, block: BlockSize::B64 };
        let (fine, all) = (sent(nothing), sent(CodecOptions::fine(BlockSize::B64)));
        assert!(remus.sent > PAGES * 4096 && remus.changed == remus.dirty);
        assert!(
            fine.sent < remus.sent / 10 && all.sent < fine.sent && all.unshared < all.changed,
            "{fine:?} {all:?}"
        );
    }
}
