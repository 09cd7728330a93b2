//! Events of fanotify(7) with file handles, as bytes of the kernel. Pure.

/// Names in a directory appear or disappear: `FAN_MOVED_FROM`, `FAN_MOVED_TO`, `FAN_CREATE`, `FAN_DELETE`.
const NAMES: u64 = 0x40 | 0x80 | 0x100 | 0x200;
/// Events were lost (`FAN_Q_OVERFLOW`).
const OVERFLOW: u64 = 0x4000;
/// Size of the head of an event.
const HEAD: usize = 24;
/// Version of the head.
const VERSION: u8 = 3;
/// Kinds of records (`FAN_EVENT_INFO_TYPE_FID`, `_DFID_NAME`, `_DFID`).
const FILE: u8 = 1;
const DIR_WITH_NAME: u8 = 2;
const DIR: u8 = 3;
/// Bytes of a record before its handle: kind, length, file system, length and kind of the handle.
const RECORD_HEAD: usize = 4 + 8 + 4 + 4;

/// Name of a file in events: its file system, and kind and bytes of its handle there.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct FileHandle {
    pub(super) filesystem: [u8; 8],
    pub(super) kind: i32,
    pub(super) bytes: Box<[u8]>,
}

/// What happened to files of this host.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum OutsideEvent {
    /// A process has changed these files: a file, and the directory if names in it changed.
    Changed(i32, Vec<FileHandle>),
    /// Nobody knows what happened.
    Lost,
}

/// Parses events; what cannot be understood counts as lost.
pub(super) fn parse(mut bytes: &[u8]) -> Vec<OutsideEvent> {
    let mut events = Vec::new();
    while !bytes.is_empty() {
        let Some((event, rest)) = next(bytes) else {
            events.push(OutsideEvent::Lost);
            break;
        };
        events.push(event);
        bytes = rest;
    }
    events
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

fn next(bytes: &[u8]) -> Option<(OutsideEvent, &[u8])> {
    let len = u32::from_ne_bytes(number(bytes, 0)?) as usize;
    let (version, head) = (*bytes.get(4)?, u16::from_ne_bytes(number(bytes, 6)?) as usize);
    let (mask, pid) = (u64::from_ne_bytes(number(bytes, 8)?), i32::from_ne_bytes(number(bytes, 20)?));
    if len < HEAD || head < HEAD || version != VERSION {
        return None;
    }
    let (event, rest) = (bytes.get(head..len)?, bytes.get(len..)?);
    if mask & OVERFLOW != 0 {
        return Some((OutsideEvent::Lost, rest));
    }
    let (mut files, mut dirs) = (Vec::new(), Vec::new());
    let mut records = event;
    while !records.is_empty() {
        let (kind, len) = (*records.first()?, u16::from_ne_bytes(number(records, 2)?) as usize);
        let record = records.get(..len).filter(|_| len >= 4)?;
        match kind {
            FILE => files.push(handle(record)?),
            DIR_WITH_NAME | DIR => dirs.push(handle(record)?),
            _ => {}
        }
        records = records.get(len..)?;
    }
    // A changed file is reported with its directory, which does not change by that.
    if mask & NAMES != 0 || files.is_empty() {
        files.append(&mut dirs);
    }
    Some((OutsideEvent::Changed(pid, files), rest))
}

fn handle(record: &[u8]) -> Option<FileHandle> {
    let filesystem = number(record, 4)?;
    let (len, kind) =
        (u32::from_ne_bytes(number(record, 12)?) as usize, i32::from_ne_bytes(number(record, 16)?));
    let bytes = record.get(RECORD_HEAD..RECORD_HEAD.checked_add(len)?)?.into();
    Some(FileHandle { filesystem, kind, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(kind: u8, handle: &[u8], name: &[u8]) -> Vec<u8> {
        let len = (RECORD_HEAD + handle.len() + name.len()) as u16;
        let mut out = vec![kind, 0];
        out.extend(len.to_ne_bytes());
        out.extend([9; 8]);
        out.extend((handle.len() as u32).to_ne_bytes());
        out.extend(1i32.to_ne_bytes());
        out.extend(handle);
        out.extend(name);
        out
    }

    fn event(mask: u64, pid: i32, records: &[u8]) -> Vec<u8> {
        let mut out = ((HEAD + records.len()) as u32).to_ne_bytes().to_vec();
        out.extend([VERSION, 0]);
        out.extend((HEAD as u16).to_ne_bytes());
        out.extend(mask.to_ne_bytes());
        out.extend((-1i32).to_ne_bytes());
        out.extend(pid.to_ne_bytes());
        out.extend(records);
        out
    }

    fn named(bytes: &[u8]) -> FileHandle {
        FileHandle { filesystem: [9; 8], kind: 1, bytes: bytes.into() }
    }

    #[test]
    fn a_written_file_is_changed_and_its_directory_only_if_names_appear_or_disappear() {
        let both = [record(DIR_WITH_NAME, b"directory", b"name\0\0"), record(FILE, b"file", b"")].concat();
        let bytes =
            [event(0x2 | 0x8, 5, &both), event(0x200, 6, &both), event(0x4, 7, &record(DIR, b"d", b""))];
        let seen = parse(&bytes.concat());
        let expected = [
            OutsideEvent::Changed(5, vec![named(b"file")]),
            OutsideEvent::Changed(6, vec![named(b"file"), named(b"directory")]),
            OutsideEvent::Changed(7, vec![named(b"d")]),
        ];
        assert_eq!(seen, expected);
    }

    #[test]
    fn an_overflow_and_every_cut_are_told_and_not_overlooked() {
        assert_eq!(parse(&event(OVERFLOW, 0, b"")), [OutsideEvent::Lost]);
        let whole = event(0x2, 5, &record(FILE, b"file", b""));
        for cut in 1..whole.len() {
            assert_eq!(parse(&whole[..cut]), [OutsideEvent::Lost], "{cut}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let whole = event(0x100, 1, &bytes);
            prop_assert!(!parse(&whole).is_empty());
            parse(&bytes);
        }
    }
}
