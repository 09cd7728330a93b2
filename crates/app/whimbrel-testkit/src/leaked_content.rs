//! Search for a guest's content in a host's files: it must not be there where a host is encrypted.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

/// Bytes of a sample.
const SAMPLE: usize = 16;
/// Bytes of a sample that are looked for first.
const PROBE: usize = 8;
/// Distance of the places where they are looked for: wherever a sample begins, one of its probes is there.
const STRIDE: usize = SAMPLE - PROBE + 1;
/// Most samples of one file.
const MOST: usize = 20_000;
/// Bytes that are read at once.
const PART: usize = 4 << 20;

/// Sixteen bytes each, from pages that look like nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContentSamples(BTreeSet<[u8; SAMPLE]>);

impl ContentSamples {
    /// Bytes from the middle of pages of noise, which no compression changes. A page of programs may have as
    /// many values, and zeros in its middle, which are everywhere.
    pub fn of_file(file: &Path) -> io::Result<Self> {
        let bytes = fs::read(file)?;
        let pages = bytes.as_chunks::<4096>().0.iter().filter(|page| count_values(*page) > 240);
        let middle = |page: &[u8; 4096]| std::array::from_fn(|i| page[2000 + i]);
        Ok(Self(pages.map(middle).filter(|sample| count_values(sample) > 10).take(MOST).collect()))
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The samples that are not among `others`.
    pub fn without(&self, others: &Self) -> Self {
        Self(self.0.difference(&others.0).copied().collect())
    }

    /// The samples that are somewhere in the files below a folder. A file that has gone has none.
    pub fn found_below(&self, folder: &Path) -> io::Result<Self> {
        let probes = Probes::of(self);
        let mut found = Self::default();
        for path in files_below(folder)? {
            match fs::File::open(&path).and_then(|file| probes.search(file, &mut found)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(found)
    }
}

/// Every part of [`PROBE`] bytes of every sample.
struct Probes {
    /// Whether a probe ends with these three bytes.
    ends: Vec<bool>,
    /// The samples, and the place of the probe in each.
    samples: HashMap<[u8; PROBE], Vec<([u8; SAMPLE], usize)>>,
}

impl Probes {
    fn of(samples: &ContentSamples) -> Self {
        let mut probes = Self { ends: vec![false; 1 << 24], samples: HashMap::new() };
        for sample in &samples.0 {
            for (place, probe) in sample.array_windows::<PROBE>().enumerate() {
                probes.ends[end_of(*probe)] = true;
                probes.samples.entry(*probe).or_default().push((*sample, place));
            }
        }
        probes
    }

    fn search(&self, mut file: fs::File, found: &mut ContentSamples) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(PART);
        loop {
            // A sample may lie across two parts.
            let rest = bytes.len().saturating_sub(SAMPLE - 1);
            bytes.drain(..rest);
            if Read::by_ref(&mut file).take((PART - SAMPLE) as u64).read_to_end(&mut bytes)? == 0 {
                return Ok(());
            }
            let mut at = 0;
            while let Some(probe) = bytes.get(at..).and_then(<[u8]>::first_chunk::<PROBE>) {
                if self.ends[end_of(*probe)] {
                    let here = self.samples.get(probe).into_iter().flatten();
                    let is_here = |(sample, place): &&([u8; SAMPLE], usize)| {
                        at.checked_sub(*place).is_some_and(|begin| bytes[begin..].starts_with(sample))
                    };
                    found.0.extend(here.filter(is_here).map(|(sample, _)| *sample));
                }
                at += STRIDE;
            }
        }
    }
}

/// The last three bytes of a probe, as a number.
fn end_of(probe: [u8; PROBE]) -> usize {
    (u64::from_be_bytes(probe) & 0xff_ffff) as usize
}

fn count_values(bytes: &[u8]) -> usize {
    let mut seen = [false; 256];
    bytes.iter().for_each(|byte| seen[usize::from(*byte)] = true);
    seen.iter().filter(|seen| **seen).count()
}

/// Regular files below a folder. One that goes meanwhile may be among them.
pub fn files_below(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let (mut left, mut all) = (vec![folder.to_owned()], Vec::new());
    while let Some(below) = left.pop() {
        let entries = match fs::read_dir(&below) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && below != folder => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            match entry.file_type()? {
                kind if kind.is_dir() => left.push(entry.path()),
                kind if kind.is_file() => all.push(entry.path()),
                _ => {}
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_found_wherever_it_begins_and_across_parts() {
        let noise = |seed: u64, len: usize| -> Vec<u8> {
            let mut state = seed;
            let next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            };
            std::iter::repeat_with(next).take(len).collect()
        };
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        let pages = noise(7, 64 * 4096);
        fs::write(&source, &pages).unwrap();
        let samples = ContentSamples::of_file(&source).unwrap();
        assert_eq!(samples.len(), 64);
        let sample = &pages[2000..2000 + SAMPLE];
        for begin in (0..40).chain(PART - 40..PART + 40) {
            let folder = tempfile::tempdir().unwrap();
            let mut other = noise(11, PART + 100);
            other[begin..begin + SAMPLE].copy_from_slice(sample);
            fs::write(folder.path().join("file"), &other).unwrap();
            let found = samples.found_below(folder.path()).unwrap();
            assert_eq!(found.0.iter().map(<[u8; SAMPLE]>::as_slice).collect::<Vec<_>>(), [sample], "{begin}");
            assert_eq!(samples.without(&found).len(), 63);
        }
        assert_eq!(samples.found_below(dir.path()).unwrap(), samples);
    }
}
