//! The witness over the serial console, by way of the daemon: works for machines without a network.

use crate::{HostProcess, PATIENCE};
use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};
use whimbrel_testkit::guest::{Identity, TestAgent};

/// The witness of `machine` over its console.
pub fn console(host: &HostProcess, machine: &str) -> TestAgent {
    let stream = console_stream(host, machine);
    TestAgent::over_console(stream).expect("a second handle")
}

/// The console of `machine`, from now on.
pub fn console_stream(host: &HostProcess, machine: &str) -> UnixStream {
    let mut stream = UnixStream::connect(host.socket()).expect("the daemon's socket");
    let request = format!(
        "GET /v1/machines/{machine}/console HTTP/1.1\r\nHost: whimbrel\r\n\
         Connection: upgrade\r\nUpgrade: whimbrel-console\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).expect("a request");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        assert_eq!(stream.read(&mut byte).expect("an answer"), 1, "{}", String::from_utf8_lossy(&head));
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    assert!(head.starts_with("HTTP/1.1 101"), "no console: {head}");
    stream
}

/// How long the first answer of a guest that reboots is waited for, since it loses what is on the console.
const FIRST_WAIT: Duration = Duration::from_secs(5);

/// Waits until the guest has come up again after a reboot: another boot, another nonce.
pub fn wait_reborn(witness: &mut TestAgent, before: &Identity) {
    let (deadline, mut patience) = (Instant::now() + PATIENCE, FIRST_WAIT);
    loop {
        match witness.wait_ready(patience).and_then(|()| witness.state_within(patience)) {
            Ok(now) if now.boot != before.boot => {
                assert_ne!(now.nonce, before.nonce, "another boot with the memory of the last one");
                return;
            }
            outcome => assert!(Instant::now() < deadline, "it does not come up again: {outcome:?}"),
        }
        // A guest on a busy host is given longer each time.
        patience += FIRST_WAIT;
        std::thread::sleep(Duration::from_millis(200));
    }
}
