//! The witness over a machine's serial console, by way of the daemon.

use super::Daemon;
use anyhow::{Result, ensure};
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use whimbrel_testkit::guest::TestAgent;

/// Longest head of an answer that is read.
const HEAD_MAX: usize = 8192;

/// The witness of `machine`, which may not be up yet.
pub(crate) fn console(daemon: &Daemon, machine: &str) -> Result<TestAgent> {
    let mut stream = UnixStream::connect(daemon.socket())?;
    write!(
        stream,
        "GET /v1/machines/{machine}/console HTTP/1.1\r\nHost: whimbrel\r\n\
         Connection: upgrade\r\nUpgrade: whimbrel-console\r\n\r\n"
    )?;
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") && head.len() < HEAD_MAX {
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    ensure!(head.starts_with(b"HTTP/1.1 101"), "no console of {machine}: {}", String::from_utf8_lossy(&head));
    Ok(TestAgent::over_console(stream)?)
}
