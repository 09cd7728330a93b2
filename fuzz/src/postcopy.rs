//! What a target of post-copy decodes: pages that it is owed, as a message and as the file that outlives its
//! daemon, and the reply to a fetch. Whatever they say, sets stay inside their arrays and a reader gets its
//! pages or an error.

use bytes::Bytes;
use std::sync::Arc;
use whimbrel_core::{Digest, PAGE_SIZE, PageRun, PageSet};
use whimbrel_migrate::{
    link::LinkError,
    postcopy::{
        PageFetcher, decode_sets, encode_sets,
        messages::{FetchPriority, Fetched},
        page_fetcher::{FetchConnection, PendingReply},
    },
    protocol::HandoverId,
};

/// Pages of memory and of a disk.
const LENGTHS: [u64; 2] = [1024, 64];
/// What somebody reads.
const READ: PageRun = PageRun { start: 60, len: 8 };
/// A block of a zstd frame is no longer.
const BLOCK_MAX: usize = 128 << 10;

/// A byte that says what the rest is: 0 a file without its digest, 1 a message, 2 a message before it is
/// packed, 3 a length byte, so much of a reply's header, and its payload.
pub fn postcopy(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    match kind {
        0 => file(rest),
        1 => message(rest),
        2 => message(&packed(&rest[..rest.len().min(BLOCK_MAX)])),
        3 => reply(rest),
        _ => {}
    }
}

/// The digest is put right: what a damaged one does is known.
fn file(body: &[u8]) {
    let bytes = [body, &Digest::of(body).0].concat();
    let Ok(sets) = decode_sets(&bytes, &LENGTHS) else { return };
    let within = |(array, set): &(u32, PageSet)| LENGTHS.get(*array as usize) == Some(&set.len());
    assert!(sets.iter().all(within));
    let again = encode_sets(&sets).expect("sets that were read can be written");
    assert_eq!(decode_sets(&again, &LENGTHS).expect("and read"), sets);
}

fn message(piece: &[u8]) {
    for (array, len) in LENGTHS.iter().enumerate() {
        let taking = taking();
        if let Ok(set) = taking.add_missing(array, false, piece) {
            assert_eq!((set.len(), &set), (*len, &taking.missing_at_start(array)));
            assert!(set.runs().all(|run| run.end() <= *len));
        }
    }
}

fn reply(rest: &[u8]) {
    // Pages or an error.
    let _ = read(rest);
}

/// What somebody who reads gets of a reply.
fn read(rest: &[u8]) -> Option<Vec<u8>> {
    let (length, rest) = rest.split_first()?;
    let (header, payload) = rest.split_at_checked(usize::from(*length))?;
    let taking = taking();
    taking.restore_missing(vec![(0, PageSet::full(LENGTHS[0]))]);
    let reply = Reply(Bytes::copy_from_slice(header), Bytes::copy_from_slice(payload));
    taking.accept_connection(FetchPriority::Urgent, Arc::new(reply));
    let mut out = vec![0xee; READ.bytes()];
    taking.read(0, READ, &mut out, true).ok().map(|()| out)
}

fn taking() -> PageFetcher {
    PageFetcher::new(HandoverId([7; 16]), "alpha".parse().expect("a name"), &LENGTHS)
}

/// A connection over which the same comes whatever is asked: header and payload.
struct Reply(Bytes, Bytes);

impl FetchConnection for Reply {
    fn request(&self, _: u16, _: Vec<u8>) -> Result<Box<dyn PendingReply>, LinkError> {
        Ok(Box::new(Reply(self.0.clone(), self.1.clone())))
    }

    fn close(&self) {}
}

impl PendingReply for Reply {
    fn wait(self: Box<Self>) -> Result<(Bytes, Bytes), LinkError> {
        Ok((self.0, self.1))
    }
}

/// A zstd frame of one block that is not compressed (RFC 8878, section 3.1.1).
fn packed(raw: &[u8]) -> Vec<u8> {
    let size = raw.len() as u32;
    let block = (size << 3 | 1).to_le_bytes();
    [&[0x28, 0xb5, 0x2f, 0xfd, 0xa0][..], &size.to_le_bytes(), &block[..3], raw].concat()
}

/// One of each kind.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let runs = [PageRun::new(3, 5), PageRun::new(40, 24)];
    let mut set = PageSet::empty(LENGTHS[1]);
    runs.iter().for_each(|run| set.insert_run(*run));
    let mut file = encode_sets(&[(1, set), (0, PageSet::full(LENGTHS[0]))]).expect("sets can be written");
    file.truncate(file.len() - Digest::of(&[]).0.len());
    let raw = postcard::to_stdvec(&runs[..]).expect("runs can be written");
    let header =
        postcard::to_stdvec(&Fetched { zero: vec![PageRun::new(60, 7)] }).expect("a header can be written");
    let reply = [&[header.len() as u8], &header[..], &packed(&[9; PAGE_SIZE])].concat();
    let kinds = [(0, file), (1, packed(&raw)), (2, raw), (3, reply)];
    kinds.into_iter().map(|(kind, rest): (u8, Vec<u8>)| [&[kind][..], &rest].concat()).collect()
}

/// Whether nothing is wrong with a seed.
pub fn accepts_postcopy_seed(seed: &[u8]) -> bool {
    let Some((kind, rest)) = seed.split_first() else { return false };
    match kind {
        0 => decode_sets(&[rest, &Digest::of(rest).0].concat(), &LENGTHS).is_ok(),
        1 => taking().add_missing(1, false, rest).is_ok(),
        2 => taking().add_missing(1, false, &packed(rest)).is_ok(),
        _ => {
            let expected = [vec![0; 7 * PAGE_SIZE], vec![9; PAGE_SIZE]].concat();
            read(rest) == Some(expected)
        }
    }
}
