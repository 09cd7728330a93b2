//! Reproducible pseudorandom numbers (xorshift64*) and a checksum. Not for secrets.

use std::{fs::File, io::Read};

#[derive(Debug, Clone)]
pub(crate) struct Noise(u64);

impl Noise {
    /// Creates the stream of `seed`.
    pub(crate) fn new(seed: u64) -> Self {
        // Zero is the one state that an xorshift never leaves; similar seeds must not give similar streams.
        Self(mix(seed) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }
}

/// Spreads the bits of `value` over the complete word (the finaliser of splitmix64).
pub(crate) fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// Checksum that depends on the order of its words.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Checksum(u64);

impl Checksum {
    pub(crate) fn add(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(23);
    }

    /// Checksum of the words so far.
    pub(crate) fn value(self) -> u64 {
        mix(self.0)
    }
}

/// Unpredictable number from the kernel.
pub(crate) fn unpredictable() -> u64 {
    let mut bytes = [0; 8];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.expect("/dev/urandom can be read");
    u64::from_ne_bytes(bytes)
}
