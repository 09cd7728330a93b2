//! What a standby reads from its primary: headers of messages, pieces of epochs, their seals.

use std::collections::BTreeMap;
use whimbrel_core::{Digest, PAGE_SIZE, PageRun};
use whimbrel_migrate::{
    postcopy::messages::MissingPages,
    protocol::{Finish, HandoverId},
    target::{HostError, IncomingMachine},
};
use whimbrel_protect::{
    codec::{BlockSize, CodecOptions, encoder::Encoder},
    protocol::{
        Compare, DEVICES, EndProtection, EpochEnd, EpochPages, ProtectionId, StartRequest, WitnessRequest,
    },
    standby::EpochReceiver,
};

/// Lengths of the standby's arrays.
const ARRAYS: [u64; 2] = [64, 16];

/// Memory and a disk; whoever writes outside of them has not been checked.
#[derive(Default)]
struct Room(BTreeMap<(usize, u64), Vec<u8>>);

impl Room {
    fn check(array: usize, run: PageRun) {
        let end = run.start.checked_add(run.len).expect("a run that ends");
        assert!(ARRAYS.get(array).is_some_and(|len| end <= *len), "pages that are not there");
    }
}

impl IncomingMachine for Room {
    fn boot_files_missing(&self) -> Vec<Digest> {
        Vec::new()
    }
    fn store_boot_file(&mut self, _: Digest, _: Vec<u8>) -> Result<(), HostError> {
        Ok(())
    }
    fn write(&mut self, array: usize, run: PageRun, data: &[u8]) -> Result<(), HostError> {
        Self::check(array, run);
        for (page, content) in run.pages().zip(data.chunks_exact(PAGE_SIZE)) {
            self.0.insert((array, page), content.to_vec());
        }
        Ok(())
    }
    fn zero(&mut self, array: usize, run: PageRun) -> Result<(), HostError> {
        Self::check(array, run);
        run.pages().for_each(|page| drop(self.0.remove(&(array, page))));
        Ok(())
    }
    fn read(&self, array: usize, run: PageRun, out: &mut [u8]) -> Result<(), HostError> {
        Self::check(array, run);
        for (page, out) in run.pages().zip(out.chunks_exact_mut(PAGE_SIZE)) {
            match self.0.get(&(array, page)) {
                Some(content) => out.copy_from_slice(content),
                None => out.fill(0),
            }
        }
        Ok(())
    }
    fn add_missing(&mut self, _: &MissingPages, _: &[u8]) -> Result<(), HostError> {
        Ok(())
    }
    fn prepare(&mut self, _: &Finish, _: &[u8]) -> Result<(), HostError> {
        Ok(())
    }
    fn run(&mut self) -> Result<(), HostError> {
        Ok(())
    }
    fn discard(&mut self) {}
}

/// Messages one after the other: a byte that says which, two bytes of header length, four of payload length,
/// both. What they make of a standby is a machine of a whole epoch, or none.
pub fn protect(data: &[u8]) {
    let mut receiver =
        EpochReceiver::new(Box::new(Room::default()), ARRAYS.to_vec(), Vec::new(), HandoverId([1; 16]));
    let current = receiver.committed_epoch();
    let mut rest = data;
    while let Some((which, header, payload, after)) = message(rest) {
        rest = after;
        let before = current.epoch().0;
        match which % 6 {
            0 => {
                let Ok(piece) = postcard::from_bytes::<EpochPages>(header) else { continue };
                let done = receiver.store_pages(&piece, payload);
                assert!(
                    piece.epoch.is_none() || current.epoch().0 == before,
                    "an epoch is applied in pieces"
                );
                drop(done);
            }
            1 => {
                let Ok(seal) = postcard::from_bytes::<EpochEnd>(header) else { continue };
                let epoch = seal.epoch;
                match receiver.end_epoch(seal, payload.to_vec()) {
                    Ok(()) => assert_eq!(current.epoch().0, Some(epoch)),
                    Err(_) => assert!([before, None].contains(&current.epoch().0)),
                }
            }
            2 => {
                let Ok(asked) = postcard::from_bytes::<Compare>(header) else { continue };
                let _ = receiver.compare(&asked, payload);
            }
            3 => drop(postcard::from_bytes::<StartRequest>(header)),
            4 => drop(postcard::from_bytes::<WitnessRequest>(header)),
            _ => drop(postcard::from_bytes::<EndProtection>(header)),
        }
    }
    let whole = current.epoch().0.is_some();
    assert_eq!(receiver.take_over().is_ok(), whole, "what it can take over from");
}

/// Which message, its header, its payload, and what follows it.
type Message<'a> = (u8, &'a [u8], &'a [u8], &'a [u8]);

fn message(data: &[u8]) -> Option<Message<'_>> {
    let (which, rest) = data.split_first()?;
    let (header, rest) = rest.split_first_chunk::<2>()?;
    let (payload, rest) = rest.split_first_chunk::<4>()?;
    let (header, rest) = rest.split_at_checked(u16::from_le_bytes(*header).into())?;
    let (payload, rest) = rest.split_at_checked(u32::from_le_bytes(*payload) as usize)?;
    Some((*which, header, payload, rest))
}

/// A first copy, two epochs and a comparison, in each coding.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let codings =
        [CodecOptions::REMUS, CodecOptions::fine(BlockSize::B64), CodecOptions::fine(BlockSize::B256)];
    codings.into_iter().map(|coding| session(coding).unwrap_or_default()).collect()
}

fn session(coding: CodecOptions) -> std::io::Result<Vec<u8>> {
    let id = ProtectionId([2; 16]);
    let mut encoder = Encoder::new(coding, 1, 1 << 20);
    let mut out = Vec::new();
    let mut page: Vec<u8> =
        (0..PAGE_SIZE as u32).map(|at| (at.wrapping_mul(0x9e37_79b1) >> 20) as u8).collect();
    let piece = |epoch, array| EpochPages { id, epoch, array, block: coding.block };
    let seal =
        |epoch, pages, device_bytes| EpochEnd { id, epoch, pages, device_bytes, ports: vec![vec![1, 2]] };
    let (first, _) = encoder.encode(0, [(5, &page[..]), (9, &page[..])].into_iter())?;
    put(&mut out, 0, &piece(None, 0), &first);
    put(&mut out, 1, &seal(0, 0, None), &[7; 100]);
    for epoch in 1..=2 {
        page[70] = page[70].wrapping_add(1);
        page[640..704].fill(0);
        let (pages, _) = encoder.encode(0, [(5, &page[..])].into_iter())?;
        put(&mut out, 0, &piece(Some(epoch), 0), &pages);
        let (devices, _) = encoder.encode(DEVICES, [(0, &page[..])].into_iter())?;
        put(&mut out, 0, &piece(Some(epoch), DEVICES), &devices);
        put(&mut out, 1, &seal(epoch, 2, Some(100)), &[]);
    }
    let asked = Compare { id, array: 0, run: PageRun::new(5, 1) };
    put(&mut out, 2, &asked, &whimbrel_protect::codec::page_digest(&page));
    Ok(out)
}

fn put(out: &mut Vec<u8>, which: u8, header: &impl serde::Serialize, payload: &[u8]) {
    let header = postcard::to_stdvec(header).unwrap_or_default();
    out.push(which);
    out.extend((header.len() as u16).to_le_bytes());
    out.extend((payload.len() as u32).to_le_bytes());
    out.extend(header);
    out.extend_from_slice(payload);
}
