//! Fencing tokens: only the last session of a client may change files, whichever process of this host serves
//! it.
//!
//! A server started by ssh is a new process for each connection, and the process of a broken connection may
//! still be reading delayed requests. A file for each client, in a directory of the server's user alone,
//! holds the number of its last session (8 bytes, little-endian). A session begins by raising it under an
//! exclusive lock. Every change is made under a shared lock, if the number is still the session's own. None
//! of this has to survive a restart of the host, because no server process does.

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

/// Fencing token of a session, valid until the next session of the client begins.
#[derive(Debug)]
pub(super) struct FencingToken {
    path: PathBuf,
    number: u64,
}

fn failed(error: io::Error) -> Refusal {
    refuse("check the fencing token")(Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

fn number_in(file: &File) -> io::Result<u64> {
    let mut bytes = [0; 8];
    match file.read_exact_at(&mut bytes, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
        read => read.map(|()| u64::from_le_bytes(bytes)),
    }
}

impl FencingToken {
    /// The next token of a client. Waits for changes in progress under the last one.
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

    /// Locks the token during a change; none if it is not valid any more.
    pub(super) fn lock(&self) -> Result<Option<File>, Refusal> {
        // A lock belongs to an open file description, so each change opens its own.
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
        let held = [first.lock().unwrap().unwrap(), first.lock().unwrap().unwrap()];
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
        assert!(first.lock().unwrap().is_none() && second.lock().unwrap().is_some());
        // If the file was removed, the client begins another session.
        fs::remove_file(&second.path).unwrap();
        assert!(second.lock().unwrap().is_none());
    }
}
