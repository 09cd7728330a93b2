//! Failpoints: named places at which a test stops the daemon.
//!
//! `WHIMBREL_FAILPOINTS` names a directory. At a failpoint with a file `NAME.hold` there, the daemon creates
//! `NAME.reached` and waits until the first file is gone. The feature `failpoints` is for tests only, since
//! others can then stop the daemon (CONTRIBUTING.md); a build without it never looks at the variable.

use std::{env, fs, path::PathBuf, sync::LazyLock, time::Duration};

static DIRECTORY: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
    let enabled = cfg!(feature = "failpoints");
    enabled.then(|| env::var_os("WHIMBREL_FAILPOINTS").map(PathBuf::from)).flatten()
});

/// Interval at which a stopped daemon polls for the end of its wait.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Failpoints of an incoming machine, of a rewind and of new devices. The source waits for the answer
/// meanwhile, so the former stop the whole migration.
#[derive(Debug, Clone, Copy)]
pub enum Failpoint {
    /// The machine is offered; nothing is reserved.
    Offer,
    /// Pages arrive while the machine runs on the source.
    Pages,
    /// The machine is paused on the source; its last pages and its device state are here.
    Last,
    /// The machine is loaded and marked; the source does not know yet.
    Ready,
    /// The source has committed; the machine does not run yet.
    Commit,
    /// The machine runs and its record is written; the source does not know yet.
    Running,
    /// The machine runs while pages are missing; the background fetch has requested none.
    Fetch,
    /// The machine is suspended as it was; nothing of the earlier state is loaded.
    Rewind,
    /// A device is in the record of a running machine, which does not have it yet.
    Device,
}

impl Failpoint {
    fn name(self) -> &'static str {
        match self {
            Self::Offer => "offer",
            Self::Pages => "pages",
            Self::Last => "last",
            Self::Ready => "ready",
            Self::Commit => "commit",
            Self::Running => "running",
            Self::Fetch => "fetch",
            Self::Rewind => "rewind",
            Self::Device => "device",
        }
    }

    /// Stops here if a test asks for it.
    pub fn reached(self) {
        self.reached_unless(|| false);
    }

    /// Like [`Failpoint::reached`], but the wait also ends when `called_off` returns true.
    pub fn reached_unless(self, called_off: impl Fn() -> bool) {
        let Some(directory) = &*DIRECTORY else { return };
        let hold = directory.join(self.name()).with_extension("hold");
        if !hold.exists() {
            return;
        }
        if let Err(error) = fs::write(hold.with_extension("reached"), "") {
            return tracing::error!(%error, stage = self.name(), "could not report a failpoint");
        }
        while hold.exists() && !called_off() {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}
