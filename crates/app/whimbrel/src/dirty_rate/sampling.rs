//! Sampling of a machine: shows each sample while the dirty trace arrives, and saves the trace.

use crate::{context::Context, error::CliError};
use indicatif::{ProgressBar, ProgressDrawTarget};
use std::{
    collections::VecDeque,
    fs::File,
    io::{IsTerminal, Write},
    time::{Duration, Instant},
};
use tokio::{
    select,
    signal::unix::{SignalKind, signal},
};
use whimbrel_api::DirtyTraceRequest;
use whimbrel_capture::dirty_trace::{DirtyTrace, Reader, Sample};
use whimbrel_core::{MachineName, PageRun, PageSet};

/// Interval of lines without a terminal; `DRAW_EVERY` is that on a terminal.
const LINE_EVERY: Duration = Duration::from_secs(1);
const DRAW_EVERY: Duration = Duration::from_millis(100);

pub(crate) struct Sampling<'a> {
    context: &'a Context,
    name: &'a MachineName,
    save: Option<File>,
    window: Window,
    display: Display,
}

enum Display {
    Silent,
    Line(ProgressBar),
    Lines,
}

/// Samples of the last window.
struct Window {
    length: Duration,
    samples: VecDeque<(Duration, Vec<PageRun>)>,
    took: Duration,
}

impl<'a> Sampling<'a> {
    pub(crate) fn start(
        context: &'a Context,
        name: &'a MachineName,
        window: Duration,
        save: Option<File>,
    ) -> Self {
        let display = if context.output.quiet {
            Display::Silent
        } else if std::io::stderr().is_terminal() {
            Display::Line(ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10)))
        } else {
            Display::Lines
        };
        let window = Window { length: window, samples: VecDeque::new(), took: Duration::ZERO };
        Self { context, name, save, window, display }
    }

    /// Samples until the time has passed, the machine is gone, or Ctrl-C is pressed.
    pub(crate) async fn run(mut self, request: &DirtyTraceRequest) -> Result<DirtyTrace, CliError> {
        let mut interrupts = signal(SignalKind::interrupt()).map_err(CliError::io("watch for Ctrl-C"))?;
        let mut pieces = self.context.client.dirty_trace(self.name, request).await?;
        let mut reader = Reader::default();
        let mut samples = Vec::new();
        let mut shown: Option<Instant> = None;
        loop {
            let piece = select! {
                piece = pieces.next() => piece?,
                _ = interrupts.recv() => None,
            };
            let Some(piece) = piece else { break };
            if let Some(file) = &mut self.save {
                file.write_all(&piece).map_err(CliError::io("write the trace"))?;
            }
            reader.feed(&piece);
            while let Some(sample) = reader.sample().map_err(nonsense)? {
                self.window.push(&sample);
                let pages = reader.header().map_err(nonsense)?.map_or(0, |head| head.pages);
                self.show(&sample, pages, &mut shown);
                samples.push(sample);
            }
        }
        if let Display::Line(bar) = &self.display {
            bar.finish_and_clear();
        }
        if let Some(file) = &self.save {
            file.sync_all().map_err(CliError::io("write the trace"))?;
        }
        let head = reader.header().map_err(nonsense)?.ok_or_else(|| nonsense("the trace has no header"))?;
        Ok(DirtyTrace { header: head, samples })
    }

    fn show(&self, sample: &Sample, pages: u64, shown: &mut Option<Instant>) {
        let every = match &self.display {
            Display::Silent => return,
            Display::Line(_) => DRAW_EVERY,
            Display::Lines => LINE_EVERY,
        };
        if shown.is_some_and(|shown| shown.elapsed() < every) {
            return;
        }
        *shown = Some(Instant::now());
        let text = format!(
            "{}: {} pages in this sample, {} in the last {:.1} s, {:.0} pages/s",
            self.name,
            sample.count(),
            self.window.unique(pages),
            self.window.took.as_secs_f64(),
            self.window.rate(),
        );
        match &self.display {
            Display::Line(bar) => bar.set_message(text),
            _ => self.context.output.remark(&text),
        }
    }
}

impl Window {
    fn push(&mut self, sample: &Sample) {
        self.took += sample.duration;
        self.samples.push_back((sample.duration, sample.dirty.clone()));
        while let Some((took, _)) = self.samples.front().filter(|(took, _)| self.took - *took >= self.length)
        {
            self.took -= *took;
            self.samples.pop_front();
        }
    }

    /// Distinct pages of the window.
    fn unique(&self, pages: u64) -> u64 {
        let mut set = PageSet::empty(pages);
        self.samples.iter().flat_map(|(_, runs)| runs).for_each(|run| set.insert_run(*run));
        set.count()
    }

    /// Pages per second; a page counts once in each sample.
    fn rate(&self) -> f64 {
        let dirtied: u64 = self.samples.iter().flat_map(|(_, runs)| runs).map(|run| run.len).sum();
        dirtied as f64 / self.took.as_secs_f64().max(1e-6)
    }
}

fn nonsense(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> CliError {
    CliError::io("read the dirty trace of the daemon")(std::io::Error::other(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_forgets_what_lies_before_it() {
        let mut window =
            Window { length: Duration::from_millis(100), samples: VecDeque::new(), took: Duration::ZERO };
        for first in 0..5 {
            let dirty = vec![PageRun::new(first, 3)];
            window.push(&Sample { duration: Duration::from_millis(50), dirty });
        }
        assert_eq!((window.took, window.unique(100)), (Duration::from_millis(100), 4));
        assert!((window.rate() - 60.0).abs() < 1e-9);
    }
}
