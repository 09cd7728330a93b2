//! File copies on the server, so that content need not be sent to the client and back.
//!
//! The kernel copies, and shares blocks where the file system can. If it cannot copy between the two files,
//! bytes are read and written. Holes stay holes, except in a target without any. The target is checked as in
//! a write; the source must have the version that the client knows, before and after. A failed copy leaves a
//! partial result with the client's stamp.

use super::{
    name_changes,
    open_files::{errno_of, reserved_end},
    quota::taken_by_write,
    refuse,
    sessions::ServedSession,
    stale,
};
use crate::proto::{Attr, Copied, Copy};
use rustix::{
    fs::{FallocateFlags, SeekFrom, copy_file_range, fallocate, ftruncate, seek},
    io::Errno,
};
use std::{fs::File, os::unix::fs::FileExt};
use whimbrel_wire::Refusal;

/// Most bytes of one request: a longer one would block the file, and delay the reply, for too long.
const MAX_REQUEST: u64 = 64 << 20;
/// Bytes read and written at once where the kernel does not copy.
const BUFFER_SIZE: u64 = 1 << 20;

/// Copies what `wanted` requests, up to the limit of one request.
pub(super) fn copy(session: &ServedSession, wanted: &Copy) -> Result<Copied, Refusal> {
    let from = session.files.get(&session.tree, &wanted.from, false)?;
    let to = session.files.get(&session.tree, &wanted.to, true)?;
    let source = from.stamped_attr()?;
    if source.mtime != wanted.from_mtime {
        return Err(stale());
    }
    let there = source.size.saturating_sub(wanted.from_offset);
    let len = wanted.len.min(MAX_REQUEST).min(there);
    let end = wanted.offset.checked_add(len).filter(|end| i64::try_from(*end).is_ok());
    end.ok_or_else(|| refuse("write beyond the largest file size")(Errno::FBIG))?;
    let within = wanted.from.ident == wanted.to.ident;
    if within && wanted.from_offset.abs_diff(wanted.offset) < len {
        return Err(refuse("copy between overlapping ranges of a file")(Errno::INVAL));
    }
    let stretch = |now: &Attr| {
        let mut copy =
            Copying { from: from.file(), to: to.file(), size: now.size, reserved: reserved_end(now) };
        copy.copy_range(wanted.from_offset, wanted.offset, len)
    };
    let more = |now: &Attr| taken_by_write(now, wanted.offset, len);
    let (attr, len) = to.write_stamped((&wanted.expect, wanted.stamp), more, stretch)?;
    if !within && from.stamped_attr()?.version() != source.version() {
        return Err(stale());
    }
    let attr = if wanted.durable { name_changes::sync(session, &wanted.to)? } else { attr };
    Ok(Copied { len, attr })
}

struct Copying<'a> {
    from: &'a File,
    to: &'a File,
    /// Current size of the written file.
    size: u64,
    /// End of the bytes that keep their space when they become zeros.
    reserved: u64,
}

impl Copying<'_> {
    /// Copies up to `len` bytes and returns how many there were.
    fn copy_range(&mut self, begin: u64, to: u64, len: u64) -> Result<u64, Refusal> {
        let (mut at, end) = (begin, begin + len);
        while at < end {
            // A file system without holes reports that everything is data.
            let data = match seek(self.from, SeekFrom::Data(at)) {
                Ok(data) => data.min(end),
                Err(Errno::NXIO) => end,
                Err(_) => at,
            };
            self.write_hole(to + (at - begin), data - at)?;
            let hole = match seek(self.from, SeekFrom::Hole(data)) {
                Ok(hole) if hole > data => hole.min(end),
                _ => end,
            };
            let copied = self.copy_data(data, to + (data - begin), hole - data)?;
            at = data + copied;
            if at < hole {
                // The source was truncated meanwhile.
                break;
            }
        }
        Ok(at - begin)
    }

    fn write_hole(&mut self, at: u64, len: u64) -> Result<(), Refusal> {
        let (end, within) = (at + len, self.size.saturating_sub(at).min(len));
        let zero = if at < self.reserved { FallocateFlags::ZERO_RANGE } else { FallocateFlags::PUNCH_HOLE };
        if within > 0 && fallocate(self.to, zero | FallocateFlags::KEEP_SIZE, at, within).is_err() {
            let zeros = vec![0; BUFFER_SIZE.min(within) as usize];
            for from in (at..at + within).step_by(BUFFER_SIZE as usize) {
                let piece = (at + within - from).min(BUFFER_SIZE) as usize;
                self.put(&zeros[..piece], from)?;
            }
        }
        if end > self.size && len > 0 {
            ftruncate(self.to, end).map_err(refuse("change the size"))?;
            self.size = end;
        }
        Ok(())
    }

    /// Copies a range of data; returns how many bytes there were.
    fn copy_data(&mut self, from: u64, to: u64, len: u64) -> Result<u64, Refusal> {
        let (mut source, mut place, end) = (from, to, from + len);
        while source < end {
            let left = (end - source) as usize;
            match copy_file_range(self.from, Some(&mut source), self.to, Some(&mut place), left) {
                Ok(0) => break,
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                    let copied = self.read_and_write(source, place, end - source)?;
                    source += copied;
                    place += copied;
                    break;
                }
                Err(errno) => return Err(refuse("copy within the server")(errno)),
            }
        }
        self.size = self.size.max(place);
        Ok(source - from)
    }

    fn read_and_write(&self, from: u64, to: u64, len: u64) -> Result<u64, Refusal> {
        let mut buffer = vec![0; BUFFER_SIZE.min(len) as usize];
        let mut done = 0;
        while done < len {
            let wanted = (len - done).min(BUFFER_SIZE) as usize;
            match self.from.read_at(&mut buffer[..wanted], from + done) {
                Ok(0) => break,
                Ok(read) => {
                    self.put(&buffer[..read], to + done)?;
                    done += read as u64;
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(refuse("read the file")(errno_of(&error))),
            }
        }
        Ok(done)
    }

    fn put(&self, bytes: &[u8], at: u64) -> Result<(), Refusal> {
        self.to.write_all_at(bytes, at).map_err(|error| refuse("write the file")(errno_of(&error)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const HOLE: u64 = 1 << 20;

    /// Data, a hole, data, a hole to the end.
    fn source(path: &std::path::Path) -> Vec<u8> {
        let file = File::create(path).unwrap();
        file.write_all_at(&[7; 10_000], 0).unwrap();
        file.write_all_at(&[8; 10_000], HOLE).unwrap();
        file.set_len(3 * HOLE).unwrap();
        fs::read(path).unwrap()
    }

    #[test]
    fn every_way_to_copy_a_stretch_gives_what_a_read_and_a_write_would() {
        let dir = tempfile::tempdir().unwrap();
        // Another file system, where there is one: the kernel does not copy between most of them.
        let shm = tempfile::tempdir_in("/dev/shm").unwrap_or_else(|_| tempfile::tempdir().unwrap());
        for (number, place) in [dir.path(), shm.path()].into_iter().enumerate() {
            let from_path = place.join("from");
            let content = source(&from_path);
            for (from, at, len) in
                [(0, 0, 3 * HOLE), (5_000, 123, HOLE), (HOLE + 9_000, 700_000, 2 * HOLE - 9_000)]
            {
                for by_hand in [false, true] {
                    let path = dir.path().join("to");
                    let mut expected = vec![1; 2 << 20];
                    fs::write(&path, &expected).unwrap();
                    let to = File::options().write(true).open(&path).unwrap();
                    let source = File::open(&from_path).unwrap();
                    let mut copying = Copying { from: &source, to: &to, size: 2 << 20, reserved: 0 };
                    let copied = match by_hand {
                        false => copying.copy_range(from, at, len),
                        true => copying.read_and_write(from, at, len),
                    };
                    assert_eq!(copied.unwrap(), len);
                    let (end, part) = ((at + len) as usize, &content[from as usize..(from + len) as usize]);
                    expected.resize(expected.len().max(end), 0);
                    expected[at as usize..end].copy_from_slice(part);
                    assert!(
                        fs::read(&path).unwrap() == expected,
                        "{number}: {from} to {at}, {len}, {by_hand}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_source_that_ends_earlier_gives_what_there_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("from");
        fs::write(&path, [3; 5000]).unwrap();
        let (from, to) = (File::open(&path).unwrap(), File::create(dir.path().join("to")).unwrap());
        let mut copying = Copying { from: &from, to: &to, size: 0, reserved: 0 };
        assert_eq!(copying.copy_data(1000, 0, 9000).unwrap(), 4000);
        assert_eq!(copying.read_and_write(1000, 0, 9000).unwrap(), 4000);
        assert_eq!((copying.size, to.metadata().unwrap().len()), (4000, 4000));
    }
}
