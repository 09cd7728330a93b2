//! The NBD server has no public parser, so a whole session goes through a socket to a server that lives as
//! long as the process.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tempfile::TempDir;
use whimbrel_block::MemDevice;
use whimbrel_nbd::{Options, Server, bind, serve};

/// Bytes of the disk.
const SIZE: usize = 64 << 10;
/// A session that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(20);

struct Running {
    socket: PathBuf,
    _server: Server,
    _folder: TempDir,
}

fn server() -> &'static Running {
    static SERVER: OnceLock<Running> = OnceLock::new();
    SERVER.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder for the socket");
        let socket = folder.path().join("nbd");
        let listener = bind(&socket).expect("a socket");
        let server =
            serve(Arc::new(MemDevice::new(vec![0; SIZE])), listener, Options::default()).expect("a server");
        Running { socket, _server: server, _folder: folder }
    })
}

/// Everything a client says; the server must end the connection by itself once the client has said it.
pub fn nbd_session(data: &[u8]) {
    let mut stream = UnixStream::connect(&server().socket).expect("the server is still there");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
    let mut reader = stream.try_clone().expect("a second handle");
    let answers = std::thread::spawn(move || {
        let mut sink = [0; 4096];
        loop {
            match reader.read(&mut sink) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("the session hangs"),
                // Cut off with something unread: the server has no use for the rest.
                Err(_) => return,
            }
        }
    });
    // The server may cut us off in the middle, which is its right.
    let _ = stream.write_all(data);
    let _ = stream.shutdown(Shutdown::Write);
    answers.join().expect("the session ends");
}
