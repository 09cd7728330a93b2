//! The client of the witness inside a guest.
//!
//! Speaks `whimbrel? TOKEN VERB` over anything that reads and writes: a TCP stream (port 7000) or a console
//! that carries other lines too. A thread reads for as long as the stream lives; requests wait for the
//! answer with their token, for at most [`PATIENCE`].

use rand::random;
use std::{
    collections::{HashMap, VecDeque},
    io::{self, BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

/// How long an answer may take. Generous: a guest without hardware virtualisation shares two cores with
/// others.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often an unanswered first ping is repeated: a console drops what comes before anyone listens.
const PING_EVERY: Duration = Duration::from_millis(300);
/// Lines of the console kept to explain a failure.
const KEPT_LINES: usize = 40;

/// A conversation with a witness.
pub struct TestAgent {
    writer: Box<dyn Write + Send>,
    answers: Receiver<String>,
    seen: Arc<Mutex<VecDeque<String>>>,
}

/// A connection that is closed when its writing end is dropped, so that the thread that reads it ends.
struct Closing(TcpStream);

impl Write for Closing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        // It fails only if the connection is gone, and then the reader ends too.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// The result of a full check of something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckResult {
    /// Was not looked at, or there is nothing to look at.
    None,
    /// Is what it should be; the checksum.
    Good(u64),
    /// Is not what it should be.
    Bad,
}

/// Who the guest is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Random number that lives only in the guest's memory.
    pub nonce: u64,
    /// Milliseconds lived, roughly; only grows.
    pub counter: u64,
    /// Whether the counter has only ever grown by one.
    pub steady: bool,
    /// The buffer in memory ([`TestAgent::check`] only).
    pub ram: CheckResult,
    /// The blocks written to the disk ([`TestAgent::check`] only).
    pub disk: CheckResult,
    /// What the guest's kernel believes.
    pub uptime: Duration,
    /// The generation id the VMM shows.
    pub genid: Option<u128>,
    /// The kernel's id of this boot.
    pub boot: String,
}

/// Why a witness gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum TestAgentError {
    /// Nothing came in time.
    #[error("the guest did not answer {verb:?} in {patience:?}; its last lines: {lines:#?}")]
    Silent {
        /// What was asked.
        verb: String,
        /// How long was waited.
        patience: Duration,
        /// What came instead.
        lines: Vec<String>,
    },
    /// The stream ended.
    #[error("the guest hung up on {verb:?}; its last lines: {lines:#?}")]
    HungUp {
        /// What was asked.
        verb: String,
        /// What came before.
        lines: Vec<String>,
    },
    /// The request could not be written.
    #[error("cannot write to the guest")]
    Write(#[source] io::Error),
    /// The answer makes no sense, or says that something failed in the guest.
    #[error("the guest answered {verb:?} with {answer:?}")]
    Answer {
        /// What was asked.
        verb: String,
        /// What came.
        answer: String,
    },
}

impl TestAgent {
    /// Talks over `reader` and `writer`, two ends of one stream.
    pub fn over(reader: impl Read + Send + 'static, writer: impl Write + Send + 'static) -> Self {
        let (sender, answers) = channel();
        let seen = Arc::new(Mutex::new(VecDeque::new()));
        let lines = Arc::clone(&seen);
        thread::spawn(move || read_lines(BufReader::new(reader), &sender, &lines));
        Self { writer: Box::new(writer), answers, seen }
    }

    /// Talks over a TCP connection.
    pub fn connected(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self::over(stream.try_clone()?, Closing(stream)))
    }

    /// Waits until the witness answers, for at most `patience`.
    pub fn wait_ready(&mut self, patience: Duration) -> Result<(), TestAgentError> {
        let (token, deadline) = (new_token(), Instant::now() + patience);
        loop {
            self.send(&token, "ping")?;
            match self.receive(&token, "ping", PING_EVERY) {
                Err(TestAgentError::Silent { .. }) if Instant::now() < deadline => {}
                other => return other.map(drop),
            }
        }
    }

    /// Identity without reading everything: fast.
    pub fn state(&mut self) -> Result<Identity, TestAgentError> {
        self.identity("state")
    }

    /// Identity with checksums of the whole buffer and of every block written.
    pub fn check(&mut self) -> Result<Identity, TestAgentError> {
        self.identity("check")
    }

    /// Writes `blocks` blocks of 4 KiB to the disk and syncs.
    pub fn write(&mut self, blocks: u64) -> Result<Identity, TestAgentError> {
        self.identity(&format!("write {blocks}"))
    }

    /// Dirties a region of `mib` MiB at `pages_per_second` (0: as fast as it goes), `bytes_per_page` in each
    /// page.
    pub fn dirty(
        &mut self,
        mib: u32,
        pages_per_second: u32,
        bytes_per_page: u32,
    ) -> Result<Identity, TestAgentError> {
        self.identity(&format!("dirty {mib} {pages_per_second} {bytes_per_page}"))
    }

    /// Stops dirtying.
    pub fn calm(&mut self) -> Result<Identity, TestAgentError> {
        self.identity("calm")
    }

    /// Reads the whole disk into the page cache; what memory looks like then.
    pub fn fill_cache(&mut self) -> Result<GuestMemory, TestAgentError> {
        self.ask_memory("cache")
    }

    /// How much memory the guest has, and how it uses it.
    pub fn memory(&mut self) -> Result<GuestMemory, TestAgentError> {
        self.ask_memory("memory")
    }

    fn ask_memory(&mut self, verb: &str) -> Result<GuestMemory, TestAgentError> {
        let token = new_token();
        self.send(&token, verb)?;
        let answer = self.receive(&token, verb, PATIENCE)?;
        GuestMemory::parse(&answer).ok_or(TestAgentError::Answer { verb: verb.to_owned(), answer })
    }

    /// Asks for a reboot. There is no answer: the guest is gone.
    pub fn reboot(&mut self) -> Result<(), TestAgentError> {
        self.send(&new_token(), "reboot")
    }

    /// Asks the guest to end. There is no answer: the guest is gone.
    pub fn power_off(&mut self) -> Result<(), TestAgentError> {
        self.send(&new_token(), "poweroff")
    }

    /// The last lines that came.
    pub fn last_lines(&self) -> Vec<String> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    fn identity(&mut self, verb: &str) -> Result<Identity, TestAgentError> {
        let token = new_token();
        self.send(&token, verb)?;
        let answer = self.receive(&token, verb, PATIENCE)?;
        Identity::parse(&answer).ok_or(TestAgentError::Answer { verb: verb.to_owned(), answer })
    }

    fn send(&mut self, token: &str, verb: &str) -> Result<(), TestAgentError> {
        // One write: over TCP one segment, on a console nothing in between.
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
                    // An answer with another token is one that an earlier request did not wait for.
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

/// A guest's memory in bytes, as its kernel counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestMemory {
    /// All that it has now.
    pub total: u64,
    /// What nobody uses.
    pub free: u64,
    /// What programs could have without swapping.
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
        // A guest that crashes may send anything, also without end.
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
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.len() == KEPT_LINES {
            seen.pop_front();
        }
        seen.push_back(text.trim_end().to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str =
        "nonce=00ff counter=12 steady=ok ram=0a:ok disk=none uptime=3.25 genid=none boot=abc";

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
