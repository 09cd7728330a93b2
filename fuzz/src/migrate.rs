//! Messages of a migration to a host on which one machine is arriving: whatever they say, pages stay inside
//! its memory.

use bytes::Bytes;
use std::sync::Arc;
use whimbrel_core::{ByteSize, Digest, HostName, MachineConfig, PAGE_SIZE, PageRun};
use whimbrel_migrate::{
    boot_files::FileRun,
    late_frames::{LateFrame, LateFramesHeader},
    protocol::{self, FilePages, Finish, FinishHeader, HandoverId, Offer, PageQuery},
    target::{HostError, IncomingMachine, IncomingMigrations, TargetHost},
};

/// Pages of the machine's memory.
const PAGES: u64 = 1024;
/// A file that it boots from: one byte over and over.
const FILE: (Digest, u64) = (Digest([1; 32]), 100_000);
const ID: HandoverId = HandoverId([7; 16]);

/// Takes every machine, and has every page whose digest begins with an even byte.
struct Ground;

impl TargetHost for Ground {
    fn reserve(&self, _: &Offer, _: &HostName) -> Result<Box<dyn IncomingMachine>, HostError> {
        Ok(Box::new(Memory))
    }

    fn find_page(&self, digest: &Digest, out: &mut [u8; PAGE_SIZE]) -> bool {
        out.fill(1);
        digest.0[0].is_multiple_of(2)
    }

    fn deliver_late_frames(&self, handover: HandoverId, strays: Vec<LateFrame>) {
        assert!(strays.iter().map(|stray| stray.frame.len()).sum::<usize>() <= 1 << 20, "of {handover}");
    }
}

/// Memory that holds nothing and knows its bounds.
struct Memory;

fn check(array: usize, run: PageRun, bytes: usize) {
    assert_eq!(array, 0, "an array that the machine has not");
    assert!(run.start.checked_add(run.len).is_some_and(|end| end <= PAGES), "{run:?} is outside");
    assert_eq!(run.bytes(), bytes);
}

impl IncomingMachine for Memory {
    fn boot_files_missing(&self) -> Vec<Digest> {
        Vec::new()
    }

    fn store_boot_file(&mut self, _: Digest, _: Vec<u8>) -> Result<(), HostError> {
        panic!("no blob was missing")
    }

    fn read_boot_file(&self, digest: &Digest, offset: u64, out: &mut [u8]) -> Result<(), HostError> {
        assert_eq!(*digest, FILE.0, "a file that was not offered");
        assert!(offset.checked_add(out.len() as u64).is_some_and(|end| end <= FILE.1), "behind its end");
        out.fill(1);
        Ok(())
    }

    fn write(&mut self, array: usize, run: PageRun, data: &[u8]) -> Result<(), HostError> {
        check(array, run, data.len());
        Ok(())
    }

    fn zero(&mut self, array: usize, run: PageRun) -> Result<(), HostError> {
        check(array, run, run.bytes());
        Ok(())
    }

    fn read(&self, array: usize, run: PageRun, out: &mut [u8]) -> Result<(), HostError> {
        check(array, run, out.len());
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

/// Two bytes of kind, two of header length, the header, the payload.
pub fn migrate_message(data: &[u8]) {
    let Some((kind, rest)) = data.split_first_chunk::<2>() else { return };
    let Some((length, rest)) = rest.split_first_chunk::<2>() else { return };
    let Some((header, payload)) = rest.split_at_checked(u16::from_le_bytes(*length).into()) else { return };
    let arrivals = IncomingMigrations::new(Arc::new(Ground));
    let from = "alpha".parse().expect("a name");
    let offered = arrivals.handle(&from, protocol::OFFER, &encode(&offer()), Bytes::new());
    offered.expect("a machine that is taken");
    // Refused or not is its own business.
    let _ = arrivals.handle(&from, u16::from_le_bytes(*kind), header, Bytes::copy_from_slice(payload));
}

fn encode(header: &impl serde::Serialize) -> Vec<u8> {
    postcard::to_stdvec(header).expect("a header can be written")
}

fn offer() -> Offer {
    let config = MachineConfig::minimal(ByteSize(PAGES * PAGE_SIZE as u64));
    Offer { blobs: vec![FILE], ..Offer::of(ID, "guest".parse().expect("a name"), config) }
}

/// One message of each kind.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let message = |kind: u16, header: Vec<u8>, payload: &[u8]| {
        [&kind.to_le_bytes()[..], &(header.len() as u16).to_le_bytes(), &header, payload].concat()
    };
    let ask = PageQuery {
        handover: ID,
        array: 0,
        runs: vec![PageRun::new(3, 2), PageRun::new(1023, 1)],
        digests: vec![Digest([2; 32]), Digest([3; 32]), Digest([4; 32])],
    };
    let run = |offset, start, len| FileRun { file: 0, offset, pages: PageRun::new(start, len) };
    let in_file = |runs: Vec<FileRun>| {
        let pages: u64 = runs.iter().map(|run| run.pages.len).sum();
        // What a target that finds all of them goes on to store.
        let check = FilePages::check_of(&vec![1; pages as usize * PAGE_SIZE]);
        message(protocol::BOOT_FILE_PAGES, encode(&FilePages { handover: ID, runs, check }), &[])
    };
    let batch = crate::seeds::migrate_batches().into_iter().map(|batch| {
        let (length, rest) = batch.split_first_chunk::<2>().expect("a length");
        let (header, payload) = rest.split_at(u16::from_le_bytes(*length).into());
        // The header of a message is the id, then that of the batch.
        message(protocol::PAGES, [&ID.0[..], header].concat(), payload)
    });
    let words = [protocol::COMMIT, protocol::ABORT].map(|kind| message(kind, encode(&ID), &[]));
    let mut seeds = vec![
        message(protocol::QUERY_PAGES, encode(&ask), &[]),
        message(protocol::EARLY_STATE, encode(&ID), &pack(b"state of")),
        message(protocol::FINISH, encode(&last_word()), &pack(b" devices")),
    ];
    let strays = LateFramesHeader { handover: ID, frames: vec![(0, 60), (7, 2)] };
    seeds.push(message(protocol::LATE_FRAMES, encode(&strays), &[1; 62]));
    seeds.extend([in_file(vec![run(7, 1000, 24), run(0, 3, 1)]), in_file(vec![run(60_000, 1, 10)])]);
    seeds.extend(batch.chain(words));
    seeds
}

fn last_word() -> FinishHeader {
    FinishHeader { finish: Finish { handover: ID, ports: vec![vec![1, 2]] }, ahead: 8, rest: 8 }
}

fn pack(state: &[u8]) -> Vec<u8> {
    protocol::pack_state(state).expect("packed in memory")
}
