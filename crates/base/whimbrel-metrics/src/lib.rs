//! Figures of a daemon for Prometheus: the text format, histograms, the process, and the listener.
//!
//! Text format 0.0.4 (<https://prometheus.io/docs/instrumenting/exposition_formats/>). A daemon lists its
//! metrics once, with [`metrics!`]; what it lists is what its [`Page`] can show and what the manual says.
//! Names have base units (`_seconds`, `_bytes`), counters end in `_total`. Most figures are read from the
//! state of the daemon when Prometheus asks; only events that leave no state are counted ([`Histogram`],
//! [`CallDurations`]).

mod calls;
mod histogram;
mod listener;
mod page;
mod process;

pub use calls::CallDurations;
pub use histogram::{Histogram, bounds};
pub use listener::{bind, serve};
pub use page::{CONTENT_TYPE, Family, Page};
pub use process::{PROCESS, ProcessUsage, own_process, usage_of};

/// MetricKind of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows, until the daemon restarts.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts of observations up to certain values.
    Histogram,
}

impl MetricKind {
    /// Name in the text format.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Name, kind, labels and meaning of one metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// Name with the unit at its end.
    pub name: &'static str,
    /// MetricKind of the metric.
    pub kind: MetricKind,
    /// Names of its labels, in the order in which samples give their values.
    pub labels: &'static [&'static str],
    /// One line for people.
    pub help: &'static str,
}

/// Defines a constant for each metric, and the list of all of them.
#[macro_export]
macro_rules! metrics {
    ($(#[$doc:meta])* $visible:vis $all:ident: $($name:ident = $kind:ident $text:literal [$($label:literal),*] $help:literal;)*) => {
        $(const $name: $crate::Metric = $crate::Metric {
            name: $text,
            kind: $crate::MetricKind::$kind,
            labels: &[$($label),*],
            help: $help,
        };)*
        $(#[$doc])*
        $visible const $all: &[$crate::Metric] = &[$($name),*];
    };
}
