//! Transports of the line protocol: TCP port 7000 and the serial console.

use crate::{
    answer::TestAgent,
    request::{LINE_MAX, parse},
};
use std::{
    fs::OpenOptions,
    io::{self, BufRead, BufReader, Read, Write},
    net::TcpListener,
    sync::Arc,
    thread::{self, JoinHandle},
};

const CONSOLE: &str = "/dev/ttyS0";
const PORT: u16 = 7000;

/// Answers connections for ever, in threads of their own.
pub(crate) fn start_tcp(witness: &Arc<TestAgent>) {
    let listener = match TcpListener::bind(("0.0.0.0", PORT)) {
        Ok(listener) => listener,
        Err(error) => return eprintln!("test agent: cannot listen on port {PORT}: {error}"),
    };
    let witness = Arc::clone(witness);
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let witness = Arc::clone(&witness);
            thread::spawn(move || {
                let _ = stream.set_nodelay(true);
                // The normal end of a connection is that the client closes it.
                let _ = converse(&witness, &stream, &stream);
            });
        }
    });
}

/// Answers on the console, if there is one, until it is closed.
pub(crate) fn start_console(witness: &Arc<TestAgent>) -> Option<JoinHandle<()>> {
    let reader = OpenOptions::new().read(true).write(true).open(CONSOLE).ok()?;
    let writer = reader.try_clone().ok()?;
    let witness = Arc::clone(witness);
    Some(thread::spawn(move || {
        let _ = converse(&witness, reader, writer);
    }))
}

fn converse(witness: &TestAgent, reader: impl Read, mut writer: impl Write) -> io::Result<()> {
    let mut reader = BufReader::new(reader);
    loop {
        let mut line = Vec::new();
        if (&mut reader).take(LINE_MAX as u64).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        if let Some(request) = std::str::from_utf8(&line).ok().and_then(parse) {
            // One write, so that the kernel's messages do not appear inside the line.
            writer.write_all(format!("{}\r\n", witness.answer(&request)).as_bytes())?;
        }
    }
}
