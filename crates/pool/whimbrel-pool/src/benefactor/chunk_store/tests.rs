//! Tests of the chunk store: restarts, damage, full disks and compaction.

use super::*;
use rand::{Rng, SeedableRng, rngs::StdRng};
use whimbrel_image::pack_frame::{Encoder, Kind};

fn chunk(seed: u64, len: usize) -> (Digest, Bytes) {
    let mut raw = vec![0; len];
    StdRng::seed_from_u64(seed).fill(&mut raw[..]);
    (Digest::of(&raw), Encoder::new(1).encode(Kind::Blob, &raw, &[len]).unwrap().into())
}

fn open(dir: &Path) -> ChunkStore {
    ChunkStore::open(dir, 1 << 30, 0).unwrap()
}

#[test]
fn chunks_are_there_again_after_a_restart_and_a_torn_tail_is_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let chunks: Vec<_> = (0..20).map(|seed| chunk(seed, 5000 + seed as usize)).collect();
    let store = open(dir.path());
    store.put(&chunks).unwrap();
    store.put(&chunks[3..6]).unwrap();
    assert_eq!(store.usage().chunks, 20, "putting twice keeps once");
    drop(store);
    let path = dir.path().join(name_of(1));
    let whole = fs::metadata(&path).unwrap().len();
    for cut in [1, 47, 3000] {
        File::options().write(true).open(&path).unwrap().set_len(whole - cut).unwrap();
        let store = open(dir.path());
        assert_eq!(store.usage().chunks, 19, "cut by {cut}");
        let last = chunks.iter().filter(|(digest, _)| store.get(digest).is_err()).count();
        assert_eq!(last, 1);
        store.put(&chunks).unwrap();
        for (digest, frame) in &chunks {
            assert_eq!(store.get(digest).unwrap(), frame);
        }
    }
}

#[test]
fn what_a_killed_process_left_in_the_page_cache_is_synced_by_the_next_flush() {
    let dir = tempfile::tempdir().unwrap();
    let (digest, frame) = chunk(1, 5000);
    open(dir.path()).put(&[(digest, frame)]).unwrap();
    let store = open(dir.path());
    assert!(store.state().unsynced);
    assert_eq!(store.flush(&[digest]).unwrap(), [true]);
    assert!(!store.state().unsynced);
}

#[test]
fn ranges_of_digests_are_listed_in_order_and_whole() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let chunks: Vec<_> = (0..50).map(|seed| chunk(seed, 100)).collect();
    store.put(&chunks).unwrap();
    let mut all: Vec<Digest> = chunks.iter().map(|(digest, _)| *digest).collect();
    all.sort();
    let (mut found, mut from) = (Vec::new(), Some(Digest([0; 32])));
    while let Some(start) = from {
        let part = store.list(&start, 7);
        from =
            part.last().and_then(|(last, _)| crate::protocol::next_digest(*last)).filter(|_| part.len() == 7);
        found.extend(part.into_iter().map(|(digest, _)| digest));
    }
    assert_eq!(found, all);
}

#[test]
fn a_damaged_chunk_is_never_served_and_can_be_put_again() {
    let dir = tempfile::tempdir().unwrap();
    let (digest, frame) = chunk(1, 9000);
    let store = open(dir.path());
    store.put(&[(digest, frame.clone())]).unwrap();
    let file = File::options().write(true).open(dir.path().join(name_of(1))).unwrap();
    file.write_all_at(b"?", 4000).unwrap();
    assert!(matches!(store.get(&digest), Err(ChunkError::Damaged { .. })));
    assert!(matches!(store.get(&digest), Err(ChunkError::Missing { .. })), "forgotten");
    store.put(&[(digest, frame)]).unwrap();
    store.get(&digest).unwrap();
    assert_eq!(store.verify(), (1, vec![]));
}

#[test]
fn deleting_frees_space_and_spares_what_was_put_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let chunks: Vec<_> = (0..90).map(|seed| chunk(seed, 1 << 20)).collect();
    chunks.iter().for_each(|chunk| store.put(std::slice::from_ref(chunk)).unwrap());
    let listed = Instant::now();
    store.put(&chunks[5..6]).unwrap();
    let digests: Vec<_> = chunks[..60].iter().map(|(digest, _)| *digest).collect();
    assert_eq!(store.delete(&digests, listed), 59, "the one put again stays");
    assert!(store.compact().unwrap() > 50 << 20);
    for (at, (digest, frame)) in chunks.iter().enumerate() {
        let here = store.get(digest);
        assert_eq!(here.is_ok(), at == 5 || at >= 60, "{at}");
        if let Ok(found) = here {
            assert_eq!(found, frame);
        }
    }
    drop(store);
    assert_eq!(open(dir.path()).usage().chunks, 31);
}

#[test]
fn a_full_store_refuses_before_it_writes_and_one_folder_has_one_owner() {
    let dir = tempfile::tempdir().unwrap();
    let store = ChunkStore::open(dir.path(), 10_000, 0).unwrap();
    store.put(&[chunk(1, 6000)]).unwrap();
    assert!(matches!(store.put(&[chunk(2, 6000)]), Err(ChunkError::Full { .. })));
    assert_eq!(store.usage().chunks, 1);
    assert!(matches!(ChunkStore::open(dir.path(), 1, 0), Err(ChunkError::InUse { .. })));
}

#[test]
fn what_a_malicious_sender_offers_is_no_chunk() {
    let (digest, frame) = chunk(1, 5000);
    assert!(open_frame(&digest, &frame).is_ok());
    assert!(matches!(open_frame(&Digest::of(b"other"), &frame), Err(FrameFault::Digest { .. })));
    assert!(open_frame(&digest, &frame[..4000]).is_err());
    let mut longer = frame.to_vec();
    longer.push(0);
    assert_eq!(open_frame(&digest, &longer), Err(FrameFault::Length));
    use segment::FrameFault;
}

/// A small disk, unmounted at the end.
struct Disk(tempfile::TempDir);

impl Disk {
    fn new(size: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "none"]).arg(dir.path());
        assert!(mount.status().unwrap().success());
        Self(dir)
    }

    /// Fills the disk with a file, as its owner may.
    fn fill(&self) -> PathBuf {
        let path = self.0.path().join("of the owner");
        let file = File::create(&path).unwrap();
        let mut at = 0;
        while file.write_all_at(&[1; 4096], at).is_ok() {
            at += 4096;
        }
        path
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_refuses_and_compacts_and_takes_chunks_again_when_it_has_room() {
    let disk = Disk::new("120m");
    let dir = disk.0.path().join("chunks");
    let store = open(&dir);
    let chunks: Vec<_> = (0..70).map(|seed| chunk(seed, 1 << 20)).collect();
    chunks.iter().for_each(|chunk| store.put(std::slice::from_ref(chunk)).unwrap());
    store.flush(&[]).unwrap();
    let free = rustix::fs::statvfs(&dir).map(|stat| stat.f_bavail * stat.f_frsize).unwrap();
    assert_eq!(store.usage().free, free - SEGMENT / 2, "room for compaction is left");

    let filler = disk.fill();
    let all: Vec<Digest> = chunks.iter().map(|(digest, _)| *digest).collect();
    store.delete(&all[..40], Instant::now());
    let refused = store.compact();
    assert!(matches!(refused, Err(ChunkError::Full { .. })), "{refused:?}");
    for (digest, frame) in &chunks[40..] {
        assert_eq!(store.get(digest).unwrap(), frame);
    }
    assert_eq!(store.flush(&all[40..]).unwrap(), [true; 30], "nothing is latched");
    // A segment without chunks needs no room to go.
    store.delete(&all[40..64], Instant::now());
    assert!(store.compact().unwrap() >= 63 << 20);
    fs::remove_file(filler).unwrap();
    store.put(&chunks[..1]).unwrap();
    drop(store);
    let store = open(&dir);
    assert_eq!(store.verify(), (store.usage().chunks, vec![]));
    store.get(&all[0]).unwrap();
}

#[test]
fn a_latched_store_offers_no_room() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    assert!(store.usage().free > 0);
    let latched = store.failed("sync", 1)(io::Error::from_raw_os_error(5));
    assert!(matches!(latched, ChunkError::Io { .. }));
    assert_eq!(store.usage().free, 0);
    assert!(matches!(store.put(&[chunk(1, 100)]), Err(ChunkError::Latched)));
}

#[test]
fn a_closed_segment_is_not_read_again_at_the_start_unless_its_file_of_heads_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let chunks: Vec<_> = (0..70).map(|seed| chunk(seed, 1 << 20)).collect();
    let store = open(dir.path());
    chunks.iter().for_each(|chunk| store.put(std::slice::from_ref(chunk)).unwrap());
    drop(store);
    let (heads, segment) = (dir.path().join("00000001.heads"), dir.path().join(name_of(1)));
    let stored = fs::read(&heads).unwrap();
    // The first record has no head any more, which only reading the segment shows.
    let file = File::options().read(true).write(true).open(&segment).unwrap();
    let mut head = [0; RECORD];
    file.read_exact_at(&mut head, 0).unwrap();
    file.write_all_at(&[0; RECORD], 0).unwrap();
    let store = open(dir.path());
    assert_eq!(store.usage().chunks, 70);
    chunks.iter().for_each(|(digest, frame)| assert_eq!(store.get(digest).unwrap(), frame));
    drop(store);
    file.write_all_at(&head, 0).unwrap();
    for wrong in [&stored[RECORD..], &stored[..RECORD + 1], b"", &[7; RECORD]] {
        fs::write(&heads, wrong).unwrap();
        assert_eq!(open(dir.path()).usage().chunks, 70, "the segment was read");
        assert_eq!(fs::read(&heads).unwrap(), stored, "and its heads were written again");
    }
    let live: u64 = open(dir.path()).state().segments.values().map(|segment| segment.live).sum();
    assert_eq!(live, chunks.iter().map(|(_, frame)| (RECORD + frame.len()) as u64).sum::<u64>());
}
