//! Dictionary code: for blocks whose 32-bit words repeat, or differ only in their lowest bits, as pointers
//! do.
//!
//! The scheme of WKdm as its authors describe it (Wilson, Kaplan and Smaragdakis, USENIX 1999, section 4; the
//! paper's reference 17), written anew: a direct-mapped dictionary of 16 recent words, found by a hash of a
//! word's upper 22 bits. A word is zero, equal to the dictionary's, equal in the upper bits, or new. Two bits
//! a word say which; entries, lower bits and new words follow in streams of their own. The dictionary
//! continues from block to block within a batch, since a block of 64 bytes alone has little to repeat.

use super::bit_io::{BitReader, BitWriter};

const ENTRIES: usize = 16;
const LOW_BITS: u32 = 10;

const ZERO: u32 = 0;
const PARTIAL: u32 = 1;
const NEW: u32 = 2;
const EXACT: u32 = 3;

fn entry_of(word: u32) -> usize {
    ((word >> LOW_BITS).wrapping_mul(0x9e37_79b1) >> 28) as usize
}

/// Encodes blocks of a batch.
#[derive(Debug, Default)]
pub struct Packer {
    dictionary: [u32; ENTRIES],
    tags: BitWriter,
    entries: BitWriter,
    lows: BitWriter,
    words: Vec<u8>,
}

/// The state before a block, to go back to.
type Mark = ([u32; ENTRIES], usize, usize, usize, usize);

impl Packer {
    /// Resets the state for a new batch.
    pub fn clear(&mut self) {
        self.dictionary = [0; ENTRIES];
        [&mut self.tags, &mut self.entries, &mut self.lows].into_iter().for_each(BitWriter::clear);
        self.words.clear();
    }

    /// Adds `block` if it takes at most five eighths of its size. Returns whether it did.
    pub fn push(&mut self, block: &[u8]) -> bool {
        let mark: Mark =
            (self.dictionary, self.tags.len(), self.entries.len(), self.lows.len(), self.words.len());
        for word in block.as_chunks::<4>().0 {
            self.word(u32::from_le_bytes(*word));
        }
        let bits = self.tags.len() - mark.1 + self.entries.len() - mark.2 + self.lows.len() - mark.3;
        let pays = bits + (self.words.len() - mark.4) * 8 <= block.len() * 5;
        if !pays {
            self.dictionary = mark.0;
            self.tags.truncate(mark.1);
            self.entries.truncate(mark.2);
            self.lows.truncate(mark.3);
            self.words.truncate(mark.4);
        }
        pays
    }

    fn word(&mut self, word: u32) {
        if word == 0 {
            return self.tags.push(ZERO, 2);
        }
        let entry = entry_of(word);
        let known = std::mem::replace(&mut self.dictionary[entry], word);
        if known == word {
            self.tags.push(EXACT, 2);
            self.entries.push(entry as u32, 4);
        } else if known >> LOW_BITS == word >> LOW_BITS {
            self.tags.push(PARTIAL, 2);
            self.entries.push(entry as u32, 4);
            self.lows.push(word & ((1 << LOW_BITS) - 1), LOW_BITS);
        } else {
            self.tags.push(NEW, 2);
            self.words.extend(word.to_le_bytes());
        }
    }

    /// The streams: kinds of words, entries, lower bits, new words.
    pub fn streams(&self) -> [&[u8]; 4] {
        [self.tags.bytes(), self.entries.bytes(), self.lows.bytes(), &self.words]
    }
}

/// Decodes blocks of a batch.
#[derive(Debug)]
pub struct Unpacker<'a> {
    dictionary: [u32; ENTRIES],
    tags: BitReader<'a>,
    entries: BitReader<'a>,
    lows: BitReader<'a>,
    words: &'a [u8],
}

impl<'a> Unpacker<'a> {
    /// A decoder of these streams of one batch.
    pub fn new([tags, entries, lows, words]: [&'a [u8]; 4]) -> Self {
        let [tags, entries, lows] = [tags, entries, lows].map(BitReader::new);
        Self { dictionary: [0; ENTRIES], tags, entries, lows, words }
    }

    /// Decodes the next block; none if the streams end.
    pub fn pull(&mut self, block: &mut [u8]) -> Option<()> {
        for out in block.as_chunks_mut::<4>().0 {
            *out = self.word()?.to_le_bytes();
        }
        Some(())
    }

    fn word(&mut self) -> Option<u32> {
        let word = match self.tags.pull(2)? {
            ZERO => return Some(0),
            EXACT => self.dictionary[self.entries.pull(4)? as usize],
            PARTIAL => {
                let known = self.dictionary[self.entries.pull(4)? as usize];
                known >> LOW_BITS << LOW_BITS | self.lows.pull(LOW_BITS)?
            }
            _ => {
                let (word, rest) = self.words.split_first_chunk::<4>()?;
                self.words = rest;
                u32::from_le_bytes(*word)
            }
        };
        self.dictionary[entry_of(word)] = word;
        Some(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words() -> impl Strategy<Value = u32> {
        prop_oneof![
            3 => Just(0u32),
            3 => (0..64u32).prop_map(|low| 0x7f3a_1000 + low * 8),
            1 => any::<u32>(),
        ]
    }

    proptest! {
        #[test]
        fn blocks_come_back_whichever_of_them_were_taken(
            blocks in prop::collection::vec(prop::collection::vec(words(), 16), 0..40),
        ) {
            let bytes = |block: &Vec<u32>| block.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
            let mut packer = Packer::default();
            let taken: Vec<_> = blocks.iter().map(bytes).filter(|block| packer.push(block)).collect();
            let mut unpacker = Unpacker::new(packer.streams());
            for block in taken {
                let mut back = [0; 64];
                prop_assert!(unpacker.pull(&mut back).is_some());
                prop_assert_eq!(&back[..], &block[..]);
            }
        }

        #[test]
        fn garbage_is_refused_or_read(a: Vec<u8>, b: Vec<u8>, c: Vec<u8>, d: Vec<u8>) {
            let mut unpacker = Unpacker::new([&a, &b, &c, &d]);
            while unpacker.pull(&mut [0; 64]).is_some() {}
        }
    }

    #[test]
    fn pointers_into_one_place_take_five_eighths_and_noise_is_left_to_others() {
        let mut packer = Packer::default();
        let pointers: Vec<u8> = (0..16u32).flat_map(|at| (0x5581_2000 + at * 16).to_le_bytes()).collect();
        assert!(packer.push(&pointers));
        let noise: Vec<u8> = (1..17u32).flat_map(|at| at.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
        let before = packer.streams().map(<[u8]>::len);
        assert!(!packer.push(&noise));
        assert_eq!(packer.streams().map(<[u8]>::len), before);
    }
}
