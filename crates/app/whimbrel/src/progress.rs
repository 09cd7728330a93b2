//! Progress on stderr: a bar on a terminal, else one line for each stage, and nothing if quiet.
//!
//! The numbers come from the daemon. Rates are not estimated here.

use crate::output::{Output, printable};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{cell::RefCell, io::IsTerminal, io::Write, time::Duration};
use whimbrel_api::{Operation, Progress, Unit};
use whimbrel_core::{ByteSize, PAGE_SIZE};

pub(crate) enum Display {
    Silent,
    Bar(ProgressBar),
    Lines {
        title: String,
        /// Stage that was printed last.
        stage: RefCell<String>,
    },
}

impl Display {
    pub(crate) fn new(output: &Output, operation: &Operation) -> Self {
        Self::titled(output, format!("{} {}", operation.kind, operation.subject))
    }

    /// Progress of something that is no operation of a daemon.
    pub(crate) fn titled(output: &Output, title: String) -> Self {
        if output.quiet {
            Self::Silent
        } else if std::io::stderr().is_terminal() {
            Self::Bar(bar(title))
        } else {
            Self::Lines { title, stage: RefCell::default() }
        }
    }

    pub(crate) fn show(&self, progress: &Progress) {
        match self {
            Self::Silent => {}
            Self::Bar(bar) => {
                // A stage of unknown length shows its numbers beside an empty bar.
                bar.set_length(progress.total.unwrap_or(0).max(1));
                bar.set_position(progress.total.map_or(0, |total| progress.done.min(total)));
                bar.set_message(printable(&numbers(progress)).into_owned());
            }
            Self::Lines { title, stage } => {
                if *stage.borrow() != progress.stage {
                    stage.replace(progress.stage.clone());
                    line(&format!("{title}: {}", progress.stage));
                }
            }
        }
    }

    /// Prints a line beside the progress.
    pub(crate) fn note(&self, text: &str) {
        match self {
            Self::Silent => {}
            Self::Bar(bar) => bar.suspend(|| line(text)),
            Self::Lines { .. } => line(text),
        }
    }

    /// Removes the bar before the result is printed.
    pub(crate) fn finish(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

fn bar(title: String) -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {prefix} [{bar:24}] {wide_msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ");
    let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr_with_hz(10));
    bar.set_style(style);
    bar.set_prefix(printable(&title).into_owned());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Prints a line to stderr and ignores errors.
fn line(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", printable(text));
}

/// Formats progress, like `copying round 2  120 MiB of 512 MiB  80 MiB/s  5 s left  (detail)`.
fn numbers(progress: &Progress) -> String {
    let mut text = progress.stage.clone();
    if progress.done > 0 || progress.total.is_some() {
        text += &format!("  {}", amount(progress.done, progress.unit));
    }
    if let Some(total) = progress.total {
        text += &format!(" of {}", amount(total, progress.unit));
    }
    if let Some(rate) = progress.rate_per_s.filter(|rate| *rate > 0.0) {
        text += &format!("  {}/s", amount(rate as u64, progress.unit));
        if let Some(total) = progress.total {
            let left = total.saturating_sub(progress.done) as f64 / rate;
            text += &format!("  {left:.0} s left");
        }
    }
    progress.detail.iter().for_each(|detail| text += &format!("  ({detail})"));
    text
}

/// Formats an amount; pages are shown as bytes.
fn amount(count: u64, unit: Unit) -> String {
    match unit {
        Unit::Bytes => ByteSize(count).to_string(),
        Unit::Pages => ByteSize(count.saturating_mul(PAGE_SIZE as u64)).to_string(),
        Unit::Items => count.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_show_only_what_is_known() {
        let mut progress = Progress::stage("copying", Unit::Pages);
        assert_eq!(numbers(&progress), "copying");
        progress.done = 256;
        assert_eq!(numbers(&progress), "copying  1 MiB");
        progress.total = Some(1024);
        progress.rate_per_s = Some(256.0);
        progress.detail = Some("12 % known".into());
        assert_eq!(numbers(&progress), "copying  1 MiB of 4 MiB  1 MiB/s  3 s left  (12 % known)");
    }

    #[test]
    fn a_rate_of_zero_is_no_division() {
        let progress =
            Progress { total: Some(5), rate_per_s: Some(0.0), ..Progress::stage("waiting", Unit::Items) };
        assert_eq!(numbers(&progress), "waiting  0 of 5");
    }
}
