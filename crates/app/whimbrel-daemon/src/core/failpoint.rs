//! Named places at which a test may hold the daemon, to break something exactly there.
//!
//! `WHIMBREL_STAGES` names a directory. A daemon that comes to a stage for which there is a file `STAGE.hold`
//! makes `STAGE.reached` and waits until the first one is gone. Without the variable this does nothing; with
//! it a daemon is only as quick as whoever made the files, so it is for tests alone (CONTRIBUTING.md).

use std::{fs, path::PathBuf, sync::LazyLock, time::Duration};

static DIRECTORY: LazyLock<Option<PathBuf>> =
    LazyLock::new(|| std::env::var_os("WHIMBREL_STAGES").map(PathBuf::from));

/// How often it is looked whether a held daemon may go on.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// A stage of an arrival. The source waits for the answer meanwhile, so they are stages of the whole
/// migration.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Failpoint {
    /// The machine is offered; nothing is reserved.
    Offer,
    /// Pages come, while the machine runs on the source.
    Pages,
    /// The machine is paused on the source; its last pages and its device state are here.
    Last,
    /// All of it is loaded and marked; the source does not know yet.
    Ready,
    /// The source has committed; the machine does not run yet.
    Commit,
    /// It runs, and is written down; the source does not know yet.
    Running,
    /// It runs while pages are missing; the background has asked for none of them.
    Fetch,
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
        }
    }

    /// The daemon has come here.
    pub(crate) fn reached(self) {
        self.reached_unless(|| false);
    }

    /// Like [`Failpoint::reached`], for work that may be called off while it is held.
    pub(crate) fn reached_unless(self, called_off: impl Fn() -> bool) {
        let Some(directory) = &*DIRECTORY else { return };
        let hold = directory.join(self.name()).with_extension("hold");
        if !hold.exists() {
            return;
        }
        if let Err(error) = fs::write(hold.with_extension("reached"), "") {
            return tracing::error!(%error, stage = self.name(), "a stage cannot be told");
        }
        while hold.exists() && !called_off() {
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}
