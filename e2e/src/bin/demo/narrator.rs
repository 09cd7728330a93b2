//! Says on stderr what happens, a line a step with the time since the beginning.

use std::time::Instant;

/// Tells the story.
pub(crate) struct Narrator(Instant);

impl Narrator {
    /// The clock starts now.
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    /// Says one line.
    pub(crate) fn say(&self, line: &str) {
        eprintln!("[{:5.1} s] {line}", self.0.elapsed().as_secs_f64());
    }
}
