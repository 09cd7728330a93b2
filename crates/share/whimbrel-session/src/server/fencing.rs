//! Whose turn it is to change files for a client: that of its last session, whichever process of this host
//! serves it.
//!
//! A server that ssh starts is another process for every connection, and the one of a connection that broke
//! may still read what was on its way. A file for each client, in a folder of the server's user alone, holds
//! the number of its last session (8 bytes, little-endian). A session begins by raising it under an exclusive
//! lock; every change is made under a shared one, if the number is still its own. Nothing here has to survive
//! the host: nor does any process.

use super::refuse;
use crate::proto::ClientId;
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};
use whimbrel_wire::Refusal;

/// A turn, which lasts until the next one begins.
#[derive(Debug)]
pub(super) struct FencingToken {
    path: PathBuf,
    number: u64,
}

fn failed(error: io::Error) -> Refusal {
    refuse("look whose turn it is")(Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

fn number_in(file: &File) -> io::Result<u64> {
    let mut bytes = [0; 8];
    match file.read_exact_at(&mut bytes, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
        read => read.map(|()| u64::from_le_bytes(bytes)),
    }
}

impl FencingToken {
    /// The next one of a client. Waits for changes under way in the last one.
    pub(super) fn start(dir: &Path, client: &ClientId) -> Result<Self, Refusal> {
        let name: String = client.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        let path = dir.join(name);
        let raise = || {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(&path)?;
            flock(&file, FlockOperation::LockExclusive)?;
            let number = number_in(&file)?.wrapping_add(1);
            file.write_all_at(&number.to_le_bytes(), 0)?;
            Ok(number)
        };
        let number = raise().map_err(failed)?;
        Ok(Self { path, number })
    }

    /// To be held while something is changed; none if it is not its turn any more.
    pub(super) fn hold(&self) -> Result<Option<File>, Refusal> {
        // A lock belongs to what was opened: each change has its own.
        let file = match fs::File::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(failed)?,
        };
        flock(&file, FlockOperation::LockShared).map_err(|errno| failed(errno.into()))?;
        let own = number_in(&file).map_err(failed)? == self.number;
        Ok(own.then_some(file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::mpsc, thread, time::Duration};

    #[test]
    fn a_turn_begins_when_the_last_one_holds_nothing_and_ends_it() {
        let dir = tempfile::tempdir().unwrap();
        let (client, other) = (ClientId::random(), ClientId::random());
        let first = FencingToken::start(dir.path(), &client).unwrap();
        let held = [first.hold().unwrap().unwrap(), first.hold().unwrap().unwrap()];
        FencingToken::start(dir.path(), &other).unwrap();
        let (begun, begins) = mpsc::channel();
        let at = dir.path().to_owned();
        let beginning = thread::spawn(move || begun.send(FencingToken::start(&at, &client).unwrap()));
        let [one, another] = held;
        drop(one);
        assert!(begins.recv_timeout(Duration::from_millis(50)).is_err(), "a change is under way");
        drop(another);
        let second = begins.recv().unwrap();
        beginning.join().unwrap().unwrap();
        assert!(first.hold().unwrap().is_none() && second.hold().unwrap().is_some());
        // Somebody tidied up: the client begins another session.
        fs::remove_file(&second.path).unwrap();
        assert!(second.hold().unwrap().is_none());
    }
}
