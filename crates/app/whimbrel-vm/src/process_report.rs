//! Report of a machine process: whoever connects to its socket is told, in one packet, what the process is
//! and what its machine has read and written. The daemon asks when it starts, when its metrics are read, and
//! now and then, to find out whether the process hangs; the machine notices nothing of it.

use crate::{
    RunningMachine,
    channel::{Channel, ChannelError},
    running::Traffic,
    runtime_dir,
};
use serde::{Deserialize, Serialize};
use std::{
    error::Error,
    io::{self, ErrorKind},
    net::IpAddr,
    path::Path,
    sync::{
        Arc, Mutex,
        mpsc::{SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};
use whimbrel_core::lock;
use whimbrel_qemu::{GuestInterface, QemuProcess};

/// Time for a process to answer.
const PATIENCE: Duration = Duration::from_millis(500);
/// Time for a process that has connected to ask, while nobody else is served.
const QUESTION: Duration = Duration::from_millis(100);
/// Time for qemu-ga in a guest to answer.
const GUEST: Duration = Duration::from_millis(500);
/// Pause before a process is asked again that is just taking its machine.
const RETRY: Duration = Duration::from_millis(5);

/// What a process is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question {
    /// A report, and nothing else.
    Report,
    /// A report, and to ask the guest for its interfaces, for a later one.
    ReportAndGuest,
}

impl Question {
    fn text(self) -> &'static [u8] {
        match self {
            Self::Report => b"report",
            Self::ReportAndGuest => b"report and guest",
        }
    }
}

/// Network interface of a guest: its hardware address and its addresses.
pub type Interface = (String, Vec<IpAddr>);

/// What a machine process says of itself and of the machine that it has.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ProcessReport {
    /// Version of its program.
    pub version: String,
    /// Name of the key with which it reads the store; none if it reads one that is not encrypted.
    pub store_key: Option<String>,
    /// Counters of the machine.
    pub traffic: Traffic,
    /// Bytes of each disk that may differ from its base, in the order of the disks.
    pub owned: Vec<u64>,
    /// Network interfaces of the guest, as qemu-ga said when it was last asked. None if it did not answer, or
    /// was not asked yet.
    #[serde(default)]
    pub interfaces: Option<Vec<Interface>>,
}

/// What qemu-ga in the guest of one machine says of its interfaces. A thread asks it, so that no guest holds
/// up a report or the machine.
pub(crate) struct GuestQuestions {
    /// None if the machine has no port for qemu-ga.
    ask: Option<SyncSender<()>>,
    answer: Arc<Mutex<Option<Vec<Interface>>>>,
}

impl GuestQuestions {
    /// For the guest of `machine`.
    pub(crate) fn start(machine: &RunningMachine) -> io::Result<Self> {
        let answer = Arc::new(Mutex::new(None));
        let Some(ga) = machine.qemu_ga.clone() else { return Ok(Self { ask: None, answer }) };
        let (ask, asked) = sync_channel::<()>(1);
        let said = answer.clone();
        let work = move || {
            for () in asked {
                let interfaces = ga.session(GUEST).and_then(|mut session| session.interfaces());
                let with_mac = |all: Vec<GuestInterface>| {
                    all.into_iter().filter_map(|one| Some((one.mac?, one.addresses))).collect()
                };
                *lock(&said) = interfaces.ok().map(with_mac);
            }
        };
        thread::Builder::new().name("guest".into()).spawn(work)?;
        Ok(Self { ask: Some(ask), answer })
    }

    /// Has the guest asked, for a later report.
    pub(crate) fn ask_again(&self) {
        // Full while the last question waits for its answer.
        self.ask.iter().for_each(|ask| _ = ask.try_send(()));
    }
}

impl ProcessReport {
    /// What this process says of `machine`, which it has.
    pub(crate) fn of(machine: &RunningMachine, guest: &GuestQuestions) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            store_key: machine.store_key().map(|key| key.id().to_string()),
            traffic: machine.traffic().read(),
            owned: machine.disks.iter().map(crate::RunningDisk::allocated_bytes).collect(),
            interfaces: lock(&guest.answer).clone(),
        }
    }

    /// Sends this to the process at the other end of `channel`, once it has asked: it cannot see whose end of
    /// the channel is closed already. Returns what it has asked for.
    pub(crate) fn send_to(&self, channel: &Channel) -> Question {
        // Always encodable: numbers and names.
        let text = serde_json::to_vec(self).unwrap_or_default();
        let told = channel.receive(QUESTION).and_then(|asked| channel.send(&text, &[]).map(|()| asked));
        let log = |error: &ChannelError| {
            tracing::debug!(error = error as &dyn Error, "could not report to another process");
        };
        match told.inspect_err(log) {
            Ok(asked) if asked.bytes == Question::ReportAndGuest.text() => Question::ReportAndGuest,
            _ => Question::Report,
        }
    }
}

/// The process that has the machine of the runtime directory `slot`, and its report. Waits for one that is
/// just taking the machine, at most for `patience`. None if there is no process, or if it does not answer.
pub fn find(slot: &Path, patience: Duration) -> Option<(QemuProcess, ProcessReport)> {
    let process = runtime_dir::machine_process(slot)?;
    let deadline = Instant::now() + patience;
    loop {
        match ask(slot, Question::Report) {
            Ok(report) => return Some((process, report)),
            Err(error) if is_unheard(&error) && process.is_alive() && Instant::now() < deadline => {
                thread::sleep(RETRY);
            }
            Err(error) => {
                let error = &error as &dyn Error;
                tracing::warn!(slot = %slot.display(), error, "the process of a machine does not answer");
                return None;
            }
        }
    }
}

/// Counters of the machine that another process has; none if it does not answer.
pub(crate) fn traffic(slot: &Path) -> Traffic {
    let log = |error: &ChannelError| {
        tracing::debug!(error = error as &dyn Error, "the process of a machine does not answer");
    };
    ask(slot, Question::Report).inspect_err(log).unwrap_or_default().traffic
}

/// Report of the process that has the machine of a runtime directory, within a second.
///
/// # Errors
/// If it does not answer.
pub fn ask(slot: &Path, question: Question) -> Result<ProcessReport, ChannelError> {
    let channel = Channel::connect_within(&runtime_dir::report_socket(slot), PATIENCE)?;
    channel.send(question.text(), &[])?;
    let answer = channel.receive(PATIENCE)?;
    let unreadable =
        |source: serde_json::Error| ChannelError::Io { action: "understand", source: source.into() };
    serde_json::from_slice(&answer.bytes).map_err(unreadable)
}

/// Whether nobody listens on the socket.
fn is_unheard(error: &ChannelError) -> bool {
    let is_so = |kind| matches!(kind, ErrorKind::NotFound | ErrorKind::ConnectionRefused);
    matches!(error, ChannelError::Io { source, .. } if is_so(source.kind()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TrafficView, channel::Listener};
    use whimbrel_qemu::ProcessIdentity;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_process_that_hangs_or_is_gone_reports_nothing() {
        let slot = tempfile::tempdir().unwrap();
        assert!(is_unheard(&ask(slot.path(), Question::Report).unwrap_err()), "nobody listens");
        let listener = Listener::bind(&runtime_dir::report_socket(slot.path())).unwrap();
        // More than the kernel lets wait.
        for _ in 0..4 {
            assert!(!is_unheard(&ask(slot.path(), Question::Report).unwrap_err()), "somebody listens");
        }
        drop(listener);
        assert!(is_unheard(&ask(slot.path(), Question::Report).unwrap_err()), "nobody listens any more");
        assert_eq!(TrafficView::InProcess(slot.path().to_owned()).read(), Traffic::default());
    }

    #[test]
    fn a_process_reports_to_whoever_asks() {
        let slot = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&runtime_dir::report_socket(slot.path())).unwrap();
        let report = ProcessReport { version: "1.2.3".into(), owned: vec![4096], ..ProcessReport::default() };
        for question in [Question::Report, Question::ReportAndGuest].repeat(100) {
            let (heard, answer) = thread::scope(|scope| {
                let heard = scope.spawn(|| report.send_to(&listener.accept(10 * SECOND).unwrap()));
                let answer = ask(slot.path(), question).unwrap();
                (heard.join().unwrap(), answer)
            });
            assert_eq!((heard, answer), (question, report.clone()));
        }
    }

    #[test]
    fn a_process_that_is_just_taking_its_machine_is_waited_for_and_one_that_hangs_is_not() {
        let slot = tempfile::tempdir().unwrap();
        let own = ProcessIdentity::of(std::process::id()).unwrap();
        assert!(find(slot.path(), SECOND).is_none(), "no process is recorded");
        runtime_dir::record_machine_process(slot.path(), own).unwrap();
        assert!(find(slot.path(), SECOND / 10).is_none(), "it never takes the machine");
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(SECOND / 10);
                let listener = Listener::bind(&runtime_dir::report_socket(slot.path())).unwrap();
                ProcessReport::default().send_to(&listener.accept(10 * SECOND).unwrap())
            });
            let (process, report) = find(slot.path(), 10 * SECOND).expect("a process that has the machine");
            assert_eq!((process.identity(), report), (own, ProcessReport::default()));
        });
        let _hangs = Listener::bind(&runtime_dir::report_socket(slot.path())).unwrap();
        let before = Instant::now();
        assert!(find(slot.path(), 600 * SECOND).is_none(), "it does not answer");
        assert!(before.elapsed() < 60 * SECOND, "it was waited for");
    }
}
