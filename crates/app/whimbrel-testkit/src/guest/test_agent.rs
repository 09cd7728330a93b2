//! Client of the test agent inside a guest.
//!
//! It sends `whimbrel? TOKEN VERB` over any stream: TCP (port 7000), or a console that has other lines too. A
//! thread reads until the stream ends; requests wait for the answer with their token, for at most
//! [`ANSWER_TIMEOUT`].

use rand::random;
use std::{
    collections::{HashMap, VecDeque},
    io::{self, BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpStream},
    os::unix::net::UnixStream,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use whimbrel_core::lock;

/// Timeout of an answer. Generous: a guest without hardware virtualisation shares two cores with others.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);
/// Wait after the first ping, which is repeated because a console drops input before the guest listens.
const FIRST_PING: Duration = Duration::from_millis(300);
/// Longest wait after a ping: a busy guest is not asked more often than it can answer.
const SLOWEST_PING: Duration = Duration::from_secs(5);
/// Lines of the console retained to explain a failure.
const RECENT_LINES: usize = 40;

/// Connection to a test agent.
pub struct TestAgent {
    writer: Box<dyn Write + Send>,
    answers: Receiver<String>,
    seen: Arc<Mutex<VecDeque<String>>>,
}

/// Connection that is closed when its writing end is dropped, so that the reading thread ends, and a console
/// of which QEMU serves one at a time is free for the next one.
struct Closing<S> {
    stream: S,
    close: fn(&S) -> io::Result<()>,
}

impl<S: Write> Write for Closing<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl<S> Drop for Closing<S> {
    fn drop(&mut self) {
        // Fails only if the connection is closed, and then the reader ends too.
        let _ = (self.close)(&self.stream);
    }
}

/// Result of a full check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckResult {
    /// Not checked, or nothing to check.
    None,
    /// Content is as expected, with its checksum.
    Good(u64),
    /// Content differs from the expectation.
    Bad,
}

/// Identity of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Random number that is only in the guest's memory.
    pub nonce: u64,
    /// Counter of milliseconds lived, roughly; it only grows.
    pub counter: u64,
    /// Whether the counter has always grown by one.
    pub steady: bool,
    /// Check of the buffer in memory ([`TestAgent::check`] only).
    pub ram: CheckResult,
    /// Check of the blocks written to the disk ([`TestAgent::check`] only).
    pub disk: CheckResult,
    /// Uptime according to the guest's kernel.
    pub uptime: Duration,
    /// Generation id that the VMM provides.
    pub genid: Option<u128>,
    /// Boot id of the guest's kernel.
    pub boot: String,
}

/// Cause of a missing answer.
#[derive(Debug, thiserror::Error)]
pub enum TestAgentError {
    /// The answer did not arrive in time.
    #[error("the guest did not answer {verb:?} in {patience:?}; its last lines: {lines:#?}")]
    Silent {
        /// Verb of the request.
        verb: String,
        /// Timeout of the request.
        patience: Duration,
        /// Last lines received instead.
        lines: Vec<String>,
    },
    /// The stream ended before the answer.
    #[error("the guest closed the stream after {verb:?}; its last lines: {lines:#?}")]
    HungUp {
        /// Verb of the request.
        verb: String,
        /// Last lines received.
        lines: Vec<String>,
    },
    /// The request could not be written.
    #[error("cannot write to the guest")]
    Write(#[source] io::Error),
    /// The answer is invalid, or reports a failure in the guest.
    #[error("the guest answered {verb:?} with {answer:?}")]
    Answer {
        /// Verb of the request.
        verb: String,
        /// Text of the answer.
        answer: String,
    },
}

impl TestAgent {
    /// Connects over `reader` and `writer`, two ends of one stream.
    pub fn over(reader: impl Read + Send + 'static, writer: impl Write + Send + 'static) -> Self {
        let (sender, answers) = channel();
        let seen = Arc::new(Mutex::new(VecDeque::new()));
        let lines = Arc::clone(&seen);
        thread::spawn(move || read_lines(BufReader::new(reader), &sender, &lines));
        Self { writer: Box::new(writer), answers, seen }
    }

    /// Connects over a TCP stream.
    pub fn connected(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let close = |stream: &TcpStream| stream.shutdown(Shutdown::Both);
        Ok(Self::over(stream.try_clone()?, Closing { stream, close }))
    }

    /// Connects over the socket of a console.
    pub fn over_console(stream: UnixStream) -> io::Result<Self> {
        let close = |stream: &UnixStream| stream.shutdown(Shutdown::Both);
        Ok(Self::over(stream.try_clone()?, Closing { stream, close }))
    }

    /// Waits until the test agent answers, for at most `patience`.
    pub fn wait_ready(&mut self, patience: Duration) -> Result<(), TestAgentError> {
        let (token, deadline) = (new_token(), Instant::now() + patience);
        let mut wait = FIRST_PING;
        loop {
            self.send(&token, "ping")?;
            match self.receive(&token, "ping", wait) {
                Err(TestAgentError::Silent { .. }) if Instant::now() < deadline => {}
                other => return other.map(drop),
            }
            wait = (wait * 5 / 4).min(SLOWEST_PING);
        }
    }

    /// Queries the identity without full checks: fast.
    pub fn state(&mut self) -> Result<Identity, TestAgentError> {
        self.identity("state", ANSWER_TIMEOUT)
    }

    /// Like [`TestAgent::state`], for a guest that may lose the query because it reboots.
    pub fn state_within(&mut self, patience: Duration) -> Result<Identity, TestAgentError> {
        self.identity("state", patience)
    }

    /// Queries the identity with checksums of the complete buffer and of every block written.
    pub fn check(&mut self) -> Result<Identity, TestAgentError> {
        self.identity("check", ANSWER_TIMEOUT)
    }

    /// Writes `blocks` blocks of 4 KiB to the disk and syncs.
    pub fn write(&mut self, blocks: u64) -> Result<Identity, TestAgentError> {
        self.identity(&format!("write {blocks}"), ANSWER_TIMEOUT)
    }

    /// Longest time of a write to the disk since the last such question. The guest writes blocks all the time
    /// from the first one on.
    pub fn longest_write(&mut self) -> Result<Duration, TestAgentError> {
        let (token, verb) = (new_token(), "stall");
        self.send(&token, verb)?;
        let answer = self.receive(&token, verb, ANSWER_TIMEOUT)?;
        let longest: Option<u64> = answer.strip_prefix("longest_us=").and_then(|text| text.parse().ok());
        let failed = TestAgentError::Answer { verb: verb.to_owned(), answer };
        longest.map(Duration::from_micros).ok_or(failed)
    }

    /// Dirties a region of `mib` MiB at `pages_per_second` (0: as fast as possible), `bytes_per_page` in each
    /// page.
    pub fn dirty(
        &mut self,
        mib: u32,
        pages_per_second: u32,
        bytes_per_page: u32,
    ) -> Result<Identity, TestAgentError> {
        self.identity(&format!("dirty {mib} {pages_per_second} {bytes_per_page}"), ANSWER_TIMEOUT)
    }

    /// Stops dirtying memory.
    pub fn calm(&mut self) -> Result<Identity, TestAgentError> {
        self.identity("calm", ANSWER_TIMEOUT)
    }

    /// Reads the complete disk into the page cache; returns the memory figures afterwards.
    pub fn fill_cache(&mut self) -> Result<GuestMemory, TestAgentError> {
        self.ask_memory("cache")
    }

    /// Queries the memory figures of the guest.
    pub fn memory(&mut self) -> Result<GuestMemory, TestAgentError> {
        self.ask_memory("memory")
    }

    /// Asks by how much the wall clock of the guest is behind that of this process; negative if it is ahead.
    /// Half of the time that the question took is added, the answer's way back.
    pub fn clock_lag_ms(&mut self) -> Result<f64, TestAgentError> {
        let (verb, begun) = ("clock", Instant::now());
        let answer = self.ask(verb)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let guest = answer.strip_prefix("unix_us=").and_then(|text| text.parse::<f64>().ok());
        let guest = guest.ok_or(TestAgentError::Answer { verb: verb.to_owned(), answer })?;
        Ok((now.as_secs_f64() - begun.elapsed().as_secs_f64() / 2.0) * 1e3 - guest / 1e3)
    }

    /// Queries what the guest's TPM has, after `value` was put into it, if one is given.
    pub fn tpm(&mut self, value: Option<u64>) -> Result<TpmContent, TestAgentError> {
        let verb = value.map_or("tpm".to_owned(), |value| format!("tpm {value}"));
        let answer = self.ask(&verb)?;
        TpmContent::parse(&answer).ok_or(TestAgentError::Answer { verb, answer })
    }

    fn ask(&mut self, verb: &str) -> Result<String, TestAgentError> {
        let token = new_token();
        self.send(&token, verb)?;
        self.receive(&token, verb, ANSWER_TIMEOUT)
    }

    fn ask_memory(&mut self, verb: &str) -> Result<GuestMemory, TestAgentError> {
        let answer = self.ask(verb)?;
        GuestMemory::parse(&answer).ok_or(TestAgentError::Answer { verb: verb.to_owned(), answer })
    }

    /// Requests a reboot, which has no answer.
    pub fn reboot(&mut self) -> Result<(), TestAgentError> {
        self.send(&new_token(), "reboot")
    }

    /// Requests a power-off, which has no answer.
    pub fn power_off(&mut self) -> Result<(), TestAgentError> {
        self.send(&new_token(), "poweroff")
    }

    /// Last lines that were received.
    pub fn last_lines(&self) -> Vec<String> {
        lock(&self.seen).iter().cloned().collect()
    }

    fn identity(&mut self, verb: &str, patience: Duration) -> Result<Identity, TestAgentError> {
        let token = new_token();
        self.send(&token, verb)?;
        let answer = self.receive(&token, verb, patience)?;
        Identity::parse(&answer).ok_or(TestAgentError::Answer { verb: verb.to_owned(), answer })
    }

    fn send(&mut self, token: &str, verb: &str) -> Result<(), TestAgentError> {
        // One write: over TCP one segment, on a console no other output in between.
        let line = format!("whimbrel? {token} {verb}\n");
        self.writer
            .write_all(line.as_bytes())
            .and_then(|()| self.writer.flush())
            .map_err(TestAgentError::Write)
    }

    fn receive(&mut self, token: &str, verb: &str, patience: Duration) -> Result<String, TestAgentError> {
        let deadline = Instant::now() + patience;
        let verb = verb.to_owned();
        loop {
            match self.answers.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(answer) => {
                    // An answer with another token is for an earlier request that timed out.
                    if let Some(text) = answer.strip_prefix(token).and_then(|text| text.strip_prefix(' ')) {
                        return Ok(text.to_owned());
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    return Err(TestAgentError::Silent { verb, patience, lines: self.last_lines() });
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(TestAgentError::HungUp { verb, lines: self.last_lines() });
                }
            }
        }
    }
}

/// Memory of a guest in bytes, according to its kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestMemory {
    /// Total memory now.
    pub total: u64,
    /// Memory that is not used.
    pub free: u64,
    /// Memory that programs could get without swapping.
    pub available: u64,
    /// Cached blocks of devices and files.
    pub cached: u64,
}

impl GuestMemory {
    fn parse(answer: &str) -> Option<Self> {
        let field = |name: &str| {
            let value = answer.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
            value?.parse::<u64>().ok().map(|kib| kib << 10)
        };
        let cached = field("buffers")? + field("cached")?;
        Some(Self { total: field("total")?, free: field("free")?, available: field("available")?, cached })
    }
}

/// Content of a guest's TPM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TpmContent {
    /// A register, which begins as zeros at each boot.
    pub register: String,
    /// The value in non-volatile memory, if one was put there.
    pub stored: Option<u64>,
}

impl TpmContent {
    fn parse(answer: &str) -> Option<Self> {
        let (register, stored) = answer.strip_prefix("register=")?.split_once(" stored=")?;
        let stored = if stored == "none" { None } else { Some(stored.parse().ok()?) };
        Some(Self { register: register.to_owned(), stored })
    }
}

impl Identity {
    fn parse(answer: &str) -> Option<Self> {
        let fields: HashMap<&str, &str> =
            answer.split_whitespace().filter_map(|word| word.split_once('=')).collect();
        Some(Self {
            nonce: u64::from_str_radix(fields.get("nonce")?, 16).ok()?,
            counter: fields.get("counter")?.parse().ok()?,
            steady: *fields.get("steady")? == "ok",
            ram: CheckResult::parse(fields.get("ram")?)?,
            disk: CheckResult::parse(fields.get("disk")?)?,
            uptime: Duration::try_from_secs_f64(fields.get("uptime")?.parse().ok()?).ok()?,
            genid: u128::from_str_radix(fields.get("genid")?, 16).ok(),
            boot: (*fields.get("boot")?).to_owned(),
        })
    }
}

impl CheckResult {
    fn parse(text: &str) -> Option<Self> {
        match text.split_once(':') {
            None => matches!(text, "-" | "none").then_some(Self::None),
            Some((sum, "ok")) => u64::from_str_radix(sum, 16).ok().map(Self::Good),
            Some(_) => Some(Self::Bad),
        }
    }
}

/// Panics unless `after` is a later moment of the same life as `before`: not rebooted, no page lost.
#[track_caller]
pub fn assert_same_life(before: &Identity, after: &Identity) {
    assert_eq!(before.nonce, after.nonce, "the guest is another one, or was rebooted: {before:?} {after:?}");
    assert_eq!(before.boot, after.boot, "the kernel was booted again");
    assert!(after.counter >= before.counter, "time went back: {before:?} {after:?}");
    assert!(after.uptime >= before.uptime, "the kernel's clock went back: {before:?} {after:?}");
    assert!(before.steady && after.steady, "the counter jumped: {before:?} {after:?}");
    assert_ne!(after.ram, CheckResult::Bad, "memory was lost: {after:?}");
    assert_ne!(after.disk, CheckResult::Bad, "writes to the disk were lost: {after:?}");
    if let (CheckResult::Good(before), CheckResult::Good(after)) = (before.ram, after.ram) {
        assert_eq!(before, after, "the buffer holds something else");
    }
}

fn new_token() -> String {
    format!("{:016x}", random::<u64>())
}

fn read_lines(mut reader: impl BufRead, answers: &Sender<String>, seen: &Mutex<VecDeque<String>>) {
    let mut line = Vec::new();
    loop {
        line.clear();
        // A guest that crashes may send anything, also without line feeds.
        match reader.by_ref().take(4096).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let text = String::from_utf8_lossy(&line);
        if let Some((_, answer)) = text.split_once("whimbrel! ")
            && answers.send(answer.trim_end().to_owned()).is_err()
        {
            return;
        }
        let mut seen = lock(seen);
        if seen.len() == RECENT_LINES {
            seen.pop_front();
        }
        seen.push_back(text.trim_end().to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str =
        "nonce=00ff counter=0000000012 steady=ok ram=0a:ok disk=none uptime=000000003.25 genid=none boot=abc";

    #[test]
    fn an_answer_with_a_bad_checksum_never_reads_as_good() {
        let good = Identity::parse(ANSWER).unwrap();
        assert_eq!((good.nonce, good.ram, good.disk), (255, CheckResult::Good(10), CheckResult::None));
        let bad = Identity::parse(&ANSWER.replace("0a:ok", "0a:bad")).unwrap();
        assert_eq!(bad.ram, CheckResult::Bad);
        assert!(Identity::parse("nonce=1").is_none());
    }

    #[test]
    #[should_panic(expected = "another one")]
    fn a_rebooted_guest_is_not_the_same_life() {
        let before = Identity::parse(ANSWER).unwrap();
        assert_same_life(&before, &Identity { nonce: 1, ..before.clone() });
    }
}
