//! The serial port of a machine, for one person or many.

use crate::core::error::DaemonError;
use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};
use tokio::sync::mpsc;
use whimbrel_qemu::Console;

/// Pieces of output or input that wait for a slow side.
const QUEUE: usize = 64;
/// How often a silent console is asked whether anybody still listens.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What is needed to look at a console without touching its machine.
#[derive(Clone)]
pub(crate) struct ConsoleView {
    console: Arc<Console>,
    log: PathBuf,
}

/// Both directions of a serial port, for an async face.
pub(crate) struct SerialStream {
    /// What the guest prints, the last lines before now included. Ends with the machine.
    pub(crate) output: mpsc::Receiver<Vec<u8>>,
    /// What the user types.
    pub(crate) input: mpsc::Sender<Vec<u8>>,
}

impl ConsoleView {
    pub(crate) fn new(console: Arc<Console>, log: PathBuf) -> Self {
        Self { console, log }
    }

    /// The end of what was printed since the machine began.
    pub(crate) fn log(&self, bytes: u64) -> String {
        let tail = || {
            let mut file = File::open(&self.log)?;
            let len = file.metadata()?.len();
            file.seek(SeekFrom::Start(len.saturating_sub(bytes)))?;
            let mut tail = Vec::new();
            file.take(bytes).read_to_end(&mut tail)?;
            std::io::Result::Ok(tail)
        };
        String::from_utf8_lossy(&tail().unwrap_or_default()).into_owned()
    }

    /// Joins the console.
    pub(crate) fn open(&self) -> Result<SerialStream, DaemonError> {
        let subscription = self.console.subscribe();
        let (print, output) = mpsc::channel::<Vec<u8>>(QUEUE);
        let (input, mut typed) = mpsc::channel::<Vec<u8>>(QUEUE);
        let console = self.console.clone();
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
        };
        let reader = move || {
            while let Ok(piece) = subscription.receive(LOOK_EVERY) {
                let gone =
                    if piece.is_empty() { print.is_closed() } else { print.blocking_send(piece).is_err() };
                if gone {
                    return;
                }
            }
        };
        let writer = move || {
            while let Some(keys) = typed.blocking_recv() {
                if console.write(&keys).is_err() {
                    return;
                }
            }
        };
        spawn("console-out", Box::new(reader))
            .and_then(|()| spawn("console-in", Box::new(writer)))
            .map_err(|source| DaemonError::io("follow", &self.log, source))?;
        Ok(SerialStream { output, input })
    }
}
