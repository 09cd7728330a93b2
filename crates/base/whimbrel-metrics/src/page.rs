//! The page that Prometheus reads.

use crate::{Histogram, Metric, MetricKind};
use std::fmt::Write as _;

/// Content type of a page.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Samples as text, metric by metric.
#[derive(Debug, Default)]
pub struct Page(String);

/// The samples of one metric. Its head is written with the first of them, so a metric without samples is not
/// on the page.
#[derive(Debug)]
pub struct Family<'a> {
    text: &'a mut String,
    metric: &'a Metric,
    begun: bool,
}

impl Page {
    /// Makes an empty page.
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts a metric. All of its samples must follow here.
    pub fn family<'a>(&'a mut self, metric: &'a Metric) -> Family<'a> {
        Family { text: &mut self.0, metric, begun: false }
    }

    /// Adds a metric that has one sample without labels.
    pub fn single(&mut self, metric: &Metric, value: f64) {
        self.family(metric).sample(&[], value);
    }

    /// The text of the page.
    pub fn into_text(self) -> String {
        self.0
    }
}

impl Family<'_> {
    /// Adds a sample; `labels` has a value for each label of the metric.
    pub fn sample(&mut self, labels: &[&str], value: f64) {
        self.begin();
        self.line("", labels, None, value);
    }

    /// Adds a histogram.
    pub fn histogram(&mut self, labels: &[&str], histogram: &Histogram) {
        self.begin();
        let (buckets, sum) = histogram.read();
        for (bound, count) in &buckets {
            self.line("_bucket", labels, Some(*bound), *count as f64);
        }
        self.line("_sum", labels, None, sum);
        self.line("_count", labels, None, buckets.last().map_or(0, |(_, count)| *count) as f64);
    }

    fn begin(&mut self) {
        if !std::mem::replace(&mut self.begun, true) {
            let Metric { name, kind, help, .. } = self.metric;
            let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {}", kind.name());
        }
    }

    fn line(&mut self, suffix: &str, labels: &[&str], bound: Option<f64>, value: f64) {
        assert_eq!(labels.len(), self.metric.labels.len(), "{}", self.metric.name);
        assert_eq!(suffix.is_empty(), self.metric.kind != MetricKind::Histogram, "{}", self.metric.name);
        self.text.push_str(self.metric.name);
        self.text.push_str(suffix);
        let mut open = '{';
        for (name, value) in self.metric.labels.iter().zip(labels) {
            self.text.push(open);
            open = ',';
            let _ = write!(self.text, "{name}=\"");
            escape(value, self.text);
            self.text.push('"');
        }
        if let Some(bound) = bound {
            let _ = write!(self.text, "{open}le=\"{}\"", Number(bound));
            open = ',';
        }
        if open == ',' {
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {}", Number(value));
    }
}

/// Adds the value of a label. The format escapes these three characters.
fn escape(value: &str, text: &mut String) {
    for letter in value.chars() {
        match letter {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            other => text.push(other),
        }
    }
}

/// A number as the format writes it.
struct Number(f64);

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            f64::INFINITY => f.write_str("+Inf"),
            f64::NEG_INFINITY => f.write_str("-Inf"),
            number => write!(f, "{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    crate::metrics! {
        /// Metrics of the tests.
        ALL:
        UP = Gauge "up" [] "Whether it is up.";
        OPEN = Gauge "open_files" ["name"] "Open files by name.";
        TOOK = Histogram "took_seconds" ["call"] "Time of calls.";
    }

    #[test]
    fn the_text_is_that_of_the_format() {
        let mut page = Page::new();
        page.single(&UP, 1.0);
        page.family(&OPEN).sample(&["a\"b\\c\nd"], 0.5);
        let took = Histogram::new(&[0.1]);
        took.observe(0.25);
        page.family(&TOOK).histogram(&["x"], &took);
        let expected = "# HELP up Whether it is up.\n# TYPE up gauge\nup 1\n\
            # HELP open_files Open files by name.\n# TYPE open_files gauge\n\
            open_files{name=\"a\\\"b\\\\c\\nd\"} 0.5\n\
            # HELP took_seconds Time of calls.\n# TYPE took_seconds histogram\n\
            took_seconds_bucket{call=\"x\",le=\"0.1\"} 0\ntook_seconds_bucket{call=\"x\",le=\"+Inf\"} 1\n\
            took_seconds_sum{call=\"x\"} 0.25\ntook_seconds_count{call=\"x\"} 1\n";
        assert_eq!(page.into_text(), expected);
        assert_eq!(ALL.len(), 3);
    }

    #[test]
    fn a_metric_without_samples_is_not_on_the_page() {
        let mut page = Page::new();
        page.family(&OPEN);
        assert_eq!(page.into_text(), "");
    }
}
