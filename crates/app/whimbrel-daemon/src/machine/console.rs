//! Console: the serial port of a machine, for any number of clients.

use crate::{core::error::DaemonError, machine::entry::Use};
use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::sync::mpsc;
use whimbrel_qemu::Console;

/// Chunks of output or input that wait for a slow side.
const QUEUE: usize = 64;
/// Interval at which a silent console polls whether its client has left.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Access to a console without touching its machine.
#[derive(Clone)]
pub(crate) struct ConsoleView {
    console: Weak<Console>,
    log: PathBuf,
}

/// Both directions of a serial port, for an async caller.
pub(crate) struct SerialStream {
    /// Output of the guest, from the last lines before now on. Ends with the machine.
    pub(crate) output: mpsc::Receiver<Vec<u8>>,
    pub(crate) input: mpsc::Sender<Vec<u8>>,
}

/// The end of the output since a machine's start, as far as the log has it. The machine may have ended.
pub(crate) fn end_of_log(log: &Path, bytes: u64) -> String {
    let tail = || {
        let mut file = File::open(log)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(bytes)))?;
        let mut tail = Vec::new();
        file.take(bytes).read_to_end(&mut tail)?;
        std::io::Result::Ok(tail)
    };
    String::from_utf8_lossy(&tail().unwrap_or_default()).into_owned()
}

impl ConsoleView {
    pub(crate) fn new(console: &Arc<Console>) -> Self {
        Self { console: Arc::downgrade(console), log: console.log().to_owned() }
    }

    /// The console of a machine that another process has: only its log can be read.
    pub(crate) fn of_other(log: &Path) -> Self {
        Self { console: Weak::new(), log: log.to_owned() }
    }

    /// Opens both directions. `used` keeps the machine with the daemon as long as one of them is open.
    pub(crate) fn open(&self, used: Use) -> Result<SerialStream, DaemonError> {
        let failed = |source| DaemonError::io("read", &self.log, source);
        let console = self.console.upgrade().ok_or_else(|| failed(io::ErrorKind::NotConnected.into()))?;
        let (subscription, read) = (console.subscribe(), used.clone());
        let (print, output) = mpsc::channel::<Vec<u8>>(QUEUE);
        let (input, mut typed) = mpsc::channel::<Vec<u8>>(QUEUE);
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
        };
        let reader = move || {
            let _used = read;
            while let Ok(piece) = subscription.receive(POLL_INTERVAL) {
                let gone =
                    if piece.is_empty() { print.is_closed() } else { print.blocking_send(piece).is_err() };
                if gone {
                    return;
                }
            }
        };
        let writer = move || {
            let _used = used;
            while let Some(keys) = typed.blocking_recv() {
                // What a guest does not take is lost, as on a cable; what is typed later may arrive.
                if let Err(error) = console.write(&keys) {
                    tracing::debug!(%error, bytes = keys.len(), "a console takes no input");
                }
            }
        };
        spawn("console-out", Box::new(reader))
            .and_then(|()| spawn("console-in", Box::new(writer)))
            .map_err(|source| DaemonError::io("start threads to read", &self.log, source))?;
        Ok(SerialStream { output, input })
    }
}
