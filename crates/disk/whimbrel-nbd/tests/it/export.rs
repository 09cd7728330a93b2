//! Test server in a directory of its own, and a minimal client that sends exactly what a test needs.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use whimbrel_block::Device;
use whimbrel_nbd::{Options, Server};

/// A server on a socket in a temporary directory.
pub(crate) struct Export {
    pub(crate) server: Option<Server>,
    pub(crate) dir: tempfile::TempDir,
    options: Options,
}

impl Export {
    pub(crate) fn new(device: Arc<dyn Device>) -> Self {
        Self::with(device, Options::default())
    }

    pub(crate) fn with(device: Arc<dyn Device>, options: Options) -> Self {
        let mut export = Self { server: None, dir: tempfile::tempdir().unwrap(), options };
        export.start(device);
        export
    }

    /// Starts a server on the same path; the previous one must be stopped.
    pub(crate) fn start(&mut self, device: Arc<dyn Device>) {
        let listener = whimbrel_nbd::bind(&self.socket()).unwrap();
        self.server = Some(whimbrel_nbd::serve(device, listener, self.options.clone()).unwrap());
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("nbd.sock")
    }

    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket().display())
    }

    pub(crate) fn connections(&self) -> usize {
        self.server.as_ref().unwrap().connections()
    }

    /// Runs a tool that must succeed; returns what it printed.
    pub(crate) fn tool(&self, program: &str, args: &[&str]) -> String {
        let Output { status, stdout, stderr } = Command::new(program).args(args).output().unwrap();
        let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        assert!(status.success(), "{program} {args:?}: {status}\n{stdout}\n{stderr}");
        format!("{stdout}{stderr}")
    }

    pub(crate) fn connect(&self) -> Client {
        let socket = UnixStream::connect(self.socket()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Client { socket }
    }
}

/// Polls until `done`, at most 30 seconds.
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < deadline, "{what} did not come true");
        thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const WRITE_ZEROES: u16 = 6;

/// Encodes the header of a request.
pub(crate) fn request(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = 0x25609513u32.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

/// Client that negotiates nothing: simple replies.
pub(crate) struct Client {
    pub(crate) socket: UnixStream,
}

impl Client {
    pub(crate) fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.socket.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Oldest handshake of the protocol. Returns size and transmission flags.
    pub(crate) fn shake_hands(&mut self) -> (u64, u16) {
        assert_eq!(&self.bytes::<18>(), b"NBDMAGICIHAVEOPT\0\x03");
        self.socket.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
        let size = u64::from_be_bytes(self.bytes());
        (size, u16::from_be_bytes(self.bytes()))
    }

    pub(crate) fn request(&mut self, flags: u16, command: u16, cookie: u64, offset: u64, len: u32) {
        self.socket.write_all(&request(flags, command, cookie, offset, len)).unwrap();
    }

    /// Next simple reply: cookie and error.
    pub(crate) fn reply(&mut self) -> (u64, u32) {
        assert_eq!(self.bytes(), 0x67446698u32.to_be_bytes());
        let error = u32::from_be_bytes(self.bytes());
        (u64::from_be_bytes(self.bytes()), error)
    }

    /// Whether the server closed the connection, after any remaining output.
    pub(crate) fn is_cut_off(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.socket.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}
