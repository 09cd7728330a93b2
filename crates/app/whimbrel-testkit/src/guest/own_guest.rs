//! Guest of our own (`guest/kvm`), for hosts whose KVM boots no stock kernel: its disk, and what it prints.
//!
//! Assembled by binutils, which come with the linker that every build needs.

use super::{
    GuestError,
    artifact_cache::{once, run, workspace},
};
use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Read},
    path::PathBuf,
    process::Command,
};

/// Size of the disk: the program, and the sectors that it writes.
const DISK_BYTES: u64 = 1 << 20;
/// Where the BIOS loads the first sector.
const LOADED_AT: &str = "0x7c00";

/// Disk image that boots the guest of our own.
#[derive(Debug)]
pub struct OwnGuest {
    /// Path of the raw image. All users share it, and none may write it.
    pub disk: PathBuf,
}

impl OwnGuest {
    /// Returns the disk, assembled on the first use and whenever its source changed.
    pub fn get() -> Result<Self, GuestError> {
        let source = workspace().join("guest/kvm/guest.s");
        let text = fs::read(&source).map_err(GuestError::file("read", &source))?;
        let name = format!("kvm-{}", &blake3::hash(&text).to_hex()[..16]);
        let folder = once("guest-files", &name, |place| {
            let (object, disk) = (place.join("guest.o"), place.join("disk.raw"));
            run(Command::new("as").arg("-o").arg(&object).arg(&source))?;
            let mut link = Command::new("ld");
            link.arg(format!("-Ttext={LOADED_AT}")).arg("--oformat=binary").arg("-o").arg(&disk).arg(&object);
            run(&mut link)?;
            let file = File::options().write(true).open(&disk);
            let grown = file.and_then(|file| file.set_len(DISK_BYTES));
            grown.map_err(GuestError::file("write", &disk))
        })?;
        Ok(Self { disk: folder.join("disk.raw") })
    }
}

/// Line of the guest: how far it is, and what it found wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tick {
    /// Rounds of each processor. They only grow, by about a hundred a second.
    pub rounds: Vec<u64>,
    /// Pages and sectors whose content was not that of their last round.
    pub bad: u64,
    /// Sectors written by the first processor.
    pub sectors: u64,
    /// Number of this start of the guest.
    pub life: u64,
}

impl Tick {
    /// Reads a line, if it is one of a guest with so many processors.
    fn parse(line: &str, processors: usize) -> Option<Self> {
        let numbers = |text: &str| {
            let words = text.split_whitespace().map(|word| u64::from_str_radix(word, 16).ok());
            words.collect::<Option<Vec<_>>>()
        };
        let (rounds, rest) = line.trim().strip_prefix("tick ")?.split_once(" bad ")?;
        let (bad, rest) = rest.split_once(" disk ")?;
        let (sectors, life) = rest.split_once(" life ")?;
        let tick = Self {
            rounds: numbers(rounds)?,
            bad: *numbers(bad)?.first()?,
            sectors: *numbers(sectors)?.first()?,
            life: *numbers(life)?.first()?,
        };
        (tick.rounds.len() == processors).then_some(tick)
    }

    /// Whether each processor, and the disk, is further than in `before`, in the same life.
    pub fn is_after(&self, before: &Self) -> bool {
        let further = self.life == before.life && self.sectors > before.sectors;
        further && self.rounds.iter().zip(&before.rounds).all(|(now, then)| now > then)
    }
}

/// Reader of the guest's serial line.
pub struct Ticks<R>(BufReader<R>, usize);

impl<R: Read> Ticks<R> {
    /// Reads `serial` of a guest with so many processors. The first line may have lost its beginning.
    pub fn new(serial: R, processors: usize) -> Self {
        Self(BufReader::new(serial), processors)
    }

    /// Next line of the guest; the time limit is that of the stream.
    pub fn next_tick(&mut self) -> io::Result<Tick> {
        loop {
            if let Some(tick) = Tick::parse(&self.line()?, self.1) {
                return Ok(tick);
            }
        }
    }

    /// Next line that the guest prints after a request.
    pub fn wait_done(&mut self) -> io::Result<()> {
        while self.line()?.trim() != "done" {}
        Ok(())
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = Vec::new();
        match self.0.read_until(b'\n', &mut line)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(String::from_utf8_lossy(&line).into_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_line_is_no_tick_and_one_of_another_guest_neither() {
        let mut ticks = Ticks::new(
            &b"0 bad 00000000 disk 00000001 life 0000000a\ntick 00000010 bad 00000000 disk 00000002 life 0000000a\n\
               tick 00000018 0000000f bad 00000001 disk 00000003 life 0000000a\n"[..],
            2,
        );
        let tick = ticks.next_tick().unwrap();
        assert_eq!(tick, Tick { rounds: vec![24, 15], bad: 1, sectors: 3, life: 10 });
        assert!(!tick.is_after(&tick));
        assert!(ticks.next_tick().is_err());
    }
}
