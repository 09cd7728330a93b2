//! Page references: the section of a batch that refers to pages the standby has, by machine, array and
//! number.
//!
//! Pages of one file or image mostly have the same order in both machines, so a page number is encoded as the
//! distance from the page after the previous one. Most references take three bytes.

use super::{sections::DamagedEpochPages, shared_pages::PageReference};
use crate::protocol::ProtectionId;
use whimbrel_core::varint;

/// Most machines to which one batch refers.
const MACHINES_MAX: usize = 64;

#[derive(Debug, Default)]
pub(super) struct ReferenceWriter {
    machines: Vec<ProtectionId>,
    references: Vec<u8>,
    next: u64,
    pages: Vec<u64>,
}

impl ReferenceWriter {
    pub(super) fn clear(&mut self) {
        self.machines.clear();
        self.references.clear();
        self.pages.clear();
        self.next = 0;
    }

    pub(super) fn pages(&self) -> &[u64] {
        &self.pages
    }

    pub(super) fn has_room(&self, name: &PageReference) -> bool {
        self.machines.len() < MACHINES_MAX || self.machines.contains(&name.of)
    }

    /// Adds a reference for page `number` of the batch.
    pub(super) fn push(&mut self, number: u64, name: PageReference) {
        let known = self.machines.iter().position(|machine| *machine == name.of);
        let machine = known.unwrap_or_else(|| {
            self.machines.push(name.of);
            self.machines.len() - 1
        });
        varint::put(&mut self.references, machine as u64);
        varint::put(&mut self.references, name.array.into());
        let distance = name.page.wrapping_sub(self.next).cast_signed();
        // Zigzag code: small numbers of either sign become small ones.
        varint::put(&mut self.references, (distance << 1 ^ distance >> 63).cast_unsigned());
        self.next = name.page.wrapping_add(1);
        self.pages.push(number);
    }

    /// The encoded section; empty without references.
    pub(super) fn encoded(&self) -> Vec<u8> {
        if self.pages.is_empty() {
            return Vec::new();
        }
        let mut out = vec![self.machines.len() as u8];
        self.machines.iter().for_each(|machine| out.extend(machine.0));
        out.extend(&self.references);
        out
    }
}

/// Reads the references of a section in order.
pub(super) struct ReferenceReader<'a> {
    machines: &'a [[u8; 16]],
    references: &'a [u8],
    next: u64,
}

impl<'a> ReferenceReader<'a> {
    pub(super) fn new(section: &'a [u8]) -> Result<Self, DamagedEpochPages> {
        let (count, rest) = section.split_first().unwrap_or((&0, &[]));
        let machines = rest.split_at_checked(usize::from(*count) * 16);
        let (machines, names) = machines.ok_or(DamagedEpochPages { what: "machines are missing" })?;
        Ok(Self { machines: machines.as_chunks().0, references: names, next: 0 })
    }

    /// The next reference; none if the section is damaged or ends.
    pub(super) fn pull(&mut self) -> Option<PageReference> {
        let machine = usize::try_from(varint::take(&mut self.references).ok()?).ok()?;
        let of = ProtectionId(*self.machines.get(machine)?);
        let array = u32::try_from(varint::take(&mut self.references).ok()?).ok()?;
        let folded = varint::take(&mut self.references).ok()?;
        let distance = (folded >> 1) ^ (folded & 1).wrapping_neg();
        let page = self.next.wrapping_add(distance);
        self.next = page.wrapping_add(1);
        Some(PageReference { of, array, page })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn names_come_back_and_garbage_is_no_name(
            told in prop::collection::vec((0..70u8, any::<u16>(), any::<u64>()), 0..100), garbage: Vec<u8>,
        ) {
            let mut names = ReferenceWriter::default();
            let told = told.into_iter().map(|(of, array, page)| PageReference { of: ProtectionId([of; 16]), array: array.into(), page });
            let mut kept = Vec::new();
            for (number, name) in (0..).zip(told) {
                if names.has_room(&name) {
                    names.push(number, name);
                    kept.push(name);
                }
            }
            let section = names.encoded();
            let mut reader = ReferenceReader::new(&section).unwrap();
            for name in kept {
                prop_assert_eq!(reader.pull(), Some(name));
            }
            prop_assert_eq!(reader.pull(), None);
            if let Ok(mut reader) = ReferenceReader::new(&garbage) {
                while reader.pull().is_some() {}
            }
        }
    }

    #[test]
    fn neighbours_take_three_bytes() {
        let mut names = ReferenceWriter::default();
        for page in 0..100 {
            names.push(page, PageReference { of: ProtectionId([3; 16]), array: 1, page: page + 70 });
        }
        // The first distance takes two.
        assert_eq!(names.encoded().len(), 1 + 16 + 301);
    }
}
