//! Target process, identified by a pidfd so that its number cannot be reused, and its data in `/proc`.

use crate::{AttachError, userfaultfd};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open},
};
use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd, RawFd},
        unix::fs::MetadataExt,
    },
};

/// Process whose memory is attached.
#[derive(Debug)]
pub(crate) struct Process {
    id: Pid,
    pidfd: OwnedFd,
}

/// Line of `/proc/PID/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) readable: bool,
    pub(crate) executable: bool,
    pub(crate) shared: bool,
    pub(crate) offset: u64,
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) name: String,
}

impl Process {
    /// Opens the running process `pid`.
    pub(crate) fn open(pid: i32) -> Result<Self, AttachError> {
        let id = Some(pid).filter(|pid| *pid > 0).and_then(Pid::from_raw).ok_or(AttachError::Gone { pid })?;
        let pidfd = pidfd_open(id, PidfdFlags::empty()).map_err(|e| match e {
            rustix::io::Errno::INVAL => AttachError::Gone { pid },
            e => AttachError::io(pid, "open a descriptor")(e.into()),
        })?;
        let process = Self { id, pidfd };
        process.alive()?;
        Ok(process)
    }

    /// The process that `pidfd` refers to, whose number is `pid` here.
    pub(crate) fn passed(pid: i32, pidfd: OwnedFd) -> Result<Self, AttachError> {
        let id = Some(pid).filter(|pid| *pid > 0).and_then(Pid::from_raw).ok_or(AttachError::Gone { pid })?;
        let process = Self { id, pidfd };
        process.alive()?;
        Ok(process)
    }

    pub(crate) fn id(&self) -> Pid {
        self.id
    }

    pub(crate) fn number(&self) -> i32 {
        self.id.as_raw_nonzero().get()
    }

    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Whether the process has ended (a zombie has).
    pub(crate) fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    pub(crate) fn alive(&self) -> Result<(), AttachError> {
        if self.has_ended() { Err(AttachError::Gone { pid: self.number() }) } else { Ok(()) }
    }

    /// Duplicates descriptor `fd` of the process.
    pub(crate) fn descriptor(&self, fd: RawFd) -> Result<OwnedFd, AttachError> {
        pidfd_getfd(&self.pidfd, fd, PidfdGetfdFlags::empty())
            .map_err(|e| AttachError::io(self.number(), "fetch a descriptor")(e.into()))
    }

    /// File in the process's `/proc` directory, open for reading.
    pub(crate) fn file(&self, name: &str) -> Result<File, AttachError> {
        let file = File::open(format!("/proc/{}/{name}", self.number()));
        let file = file.map_err(AttachError::io(self.number(), "open the /proc files"))?;
        self.alive().map(|()| file)
    }

    /// Mappings of the process in ascending order.
    pub(crate) fn mappings(&self) -> Result<Vec<Mapping>, AttachError> {
        let text = self.text("maps")?;
        Ok(text.lines().filter_map(parse_mapping).collect())
    }

    /// State letter of the main thread, and its tracer if there is one.
    pub(crate) fn state(&self) -> Result<(char, Option<i32>), AttachError> {
        let text = self.text("status")?;
        let field = |name| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let letter = field("State:").and_then(|value| value.chars().next()).unwrap_or('?');
        Ok((letter, field("TracerPid:").and_then(|value| value.parse().ok()).filter(|by| *by != 0)))
    }

    /// Whether the mapping at `address` is registered for missing pages (`um` in its flags).
    pub(crate) fn has_missing_pages(&self, address: u64) -> Result<bool, AttachError> {
        let mut inside = false;
        for line in BufReader::new(self.file("smaps")?).lines() {
            let line = line.map_err(AttachError::io(self.number(), "read the /proc files"))?;
            if let Some(mapping) = parse_mapping(&line) {
                inside = (mapping.start..mapping.end).contains(&address);
            } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| inside) {
                return Ok(flags.split(' ').any(|flag| flag == "um"));
            }
        }
        Ok(false)
    }

    pub(crate) fn userfaultfds(&self) -> Result<Vec<RawFd>, AttachError> {
        self.descriptors(|entry| {
            fs::read_link(entry.path()).is_ok_and(|target| target.as_os_str() == "anon_inode:[userfaultfd]")
        })
    }

    /// Whether the process has a virtual machine of KVM, whose page tables follow those of the process.
    pub(crate) fn has_kvm(&self) -> Result<bool, AttachError> {
        let is_machine = |entry: &fs::DirEntry| {
            fs::read_link(entry.path()).is_ok_and(|target| target.as_os_str() == "anon_inode:kvm-vm")
        };
        self.descriptors(is_machine).map(|found| !found.is_empty())
    }

    /// Number of a descriptor of the device that makes userfaultfds, if the process has one.
    pub(crate) fn userfaultfd_device(&self) -> Result<Option<RawFd>, AttachError> {
        let is_device = |entry: &fs::DirEntry| {
            fs::read_link(entry.path()).is_ok_and(|target| target.as_os_str() == userfaultfd::DEVICE)
        };
        self.descriptors(is_device).map(|found| found.first().copied())
    }

    /// Numbers of the process's descriptors of one file.
    pub(crate) fn descriptors_of(&self, device: u64, inode: u64) -> Result<Vec<RawFd>, AttachError> {
        self.descriptors(|entry| {
            fs::metadata(entry.path()).is_ok_and(|meta| (meta.dev(), meta.ino()) == (device, inode))
        })
    }

    fn descriptors(&self, is_wanted: impl Fn(&fs::DirEntry) -> bool) -> Result<Vec<RawFd>, AttachError> {
        let folder = format!("/proc/{}/fd", self.number());
        let entries = fs::read_dir(folder).map_err(AttachError::io(self.number(), "list the descriptors"))?;
        let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
        let mut fds: Vec<_> = entries.filter_map(Result::ok).filter(is_wanted).filter_map(number).collect();
        fds.sort_unstable();
        Ok(fds)
    }

    fn text(&self, name: &str) -> Result<String, AttachError> {
        let read = |mut file: File| io::read_to_string(&mut file);
        read(self.file(name)?).map_err(AttachError::io(self.number(), "read the /proc files"))
    }
}

fn parse_mapping(line: &str) -> Option<Mapping> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let rights = fields.next()?.as_bytes();
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let offset = hex(fields.next()?)?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let device = rustix::fs::makedev(hex(major)? as u32, hex(minor)? as u32);
    let inode = fields.next()?.parse().ok()?;
    let name = fields.next().unwrap_or("").trim().to_owned();
    let (readable, executable) = (rights.first() == Some(&b'r'), rights.get(2) == Some(&b'x'));
    let shared = rights.get(3) == Some(&b's');
    Some(Mapping {
        start: hex(start)?,
        end: hex(end)?,
        readable,
        executable,
        shared,
        offset,
        device,
        inode,
        name,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_mappings_is_read_with_blanks_in_its_name() {
        let line = "7f00-8f00 rw-s 00001000 fd:02 77                         /dev/shm/a b (deleted)";
        let mapping = parse_mapping(line).unwrap();
        assert_eq!((mapping.start, mapping.end, mapping.offset, mapping.inode), (0x7f00, 0x8f00, 0x1000, 77));
        assert!(mapping.shared && mapping.readable && !mapping.executable);
        assert_eq!(
            (mapping.name.as_str(), mapping.device),
            ("/dev/shm/a b (deleted)", rustix::fs::makedev(0xfd, 2))
        );
        assert_eq!(parse_mapping("nonsense"), None);
    }
}
