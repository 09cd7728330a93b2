//! What the demo found: a table for people, JSON for programs.

use crate::client::Seen;
use comfy_table::{ContentArrangement, Table, presets};
use serde_json::{Map, Value, json};
use std::time::Duration;
use whimbrel_core::ByteSize;
use whimbrel_testkit::lab::{StreamEnd, StreamReport};

/// One step and how it went.
pub(crate) struct Step {
    pub(crate) name: &'static str,
    /// From the request to its answer, or as long as the demo waited for more.
    pub(crate) took: Duration,
    /// What was sent or stored.
    pub(crate) bytes: Option<u64>,
    /// None for a step before which there was nothing to see.
    pub(crate) seen: Option<Seen>,
    /// A remark for people.
    pub(crate) detail: String,
    /// What the daemon said.
    pub(crate) result: Value,
}

/// All steps.
pub(crate) struct Report {
    pub(crate) steps: Vec<Step>,
    /// The stream that was open from the first step to the last.
    pub(crate) stream: StreamReport,
}

impl Step {
    /// A step that a client watched.
    pub(crate) fn watched(
        name: &'static str,
        bytes: Option<u64>,
        seen: Seen,
        detail: String,
        result: Value,
    ) -> Self {
        Self { name, took: seen.took, bytes, seen: Some(seen), detail, result }
    }

    fn kept(&self) -> bool {
        self.seen.as_ref().is_none_or(|seen| seen.stream && seen.proof.broken().is_empty())
    }

    fn row(&self) -> [String; 7] {
        let none = || "-".to_owned();
        let seen = |show: fn(&Seen) -> String| self.seen.as_ref().map_or_else(none, show);
        [
            self.name.to_owned(),
            duration(self.took),
            seen(|seen| duration(seen.downtime)),
            self.bytes.map_or_else(none, |bytes| ByteSize(bytes).to_string()),
            seen(|seen| if seen.stream { "yes" } else { "NO" }.to_owned()),
            seen(|seen| match seen.proof.broken().as_slice() {
                [] => "yes".to_owned(),
                broken => format!("NO: {}", broken.join(", ")),
            }),
            self.detail.clone(),
        ]
    }

    fn json(&self) -> Value {
        let mut value = json!({
            "step": self.name,
            "seconds": self.took.as_secs_f64(),
            "bytes": self.bytes,
            "result": self.result,
        });
        if let Some(seen) = &self.seen {
            let parts = seen.proof.parts().map(|(what, holds)| (what.to_owned(), holds.into()));
            value["client_downtime_ms"] = (seen.downtime.as_secs_f64() * 1e3).into();
            value["stream_unbroken"] = seen.stream.into();
            value["identity_proven"] = seen.proof.broken().is_empty().into();
            value["identity"] = parts.collect::<Map<_, _>>().into();
        }
        value
    }
}

impl Report {
    /// Whether every promise was kept.
    pub(crate) fn kept(&self) -> bool {
        self.stream.end == StreamEnd::Stopped && self.steps.iter().all(Step::kept)
    }

    /// For programs.
    pub(crate) fn json(&self) -> String {
        let value = json!({
            "kept": self.kept(),
            "steps": self.steps.iter().map(Step::json).collect::<Vec<_>>(),
            "stream": {
                "unbroken": self.stream.end == StreamEnd::Stopped,
                "lines": self.stream.lines,
                "longest_gap_ms": self.stream.longest_gap.as_secs_f64() * 1e3,
            },
        });
        format!("{value:#}")
    }

    /// For people.
    pub(crate) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        let header =
            ["STEP", "TIME", "CLIENT DOWNTIME", "BYTES", "STREAM UNBROKEN", "IDENTITY PROVEN", "NOTES"];
        table.set_header(header);
        table.add_rows(self.steps.iter().map(Step::row));
        let rows: String = table.lines().map(|line| format!("{}\n", line.trim())).collect();
        let verdict = if self.kept() { "Every promise was kept." } else { "A PROMISE WAS BROKEN." };
        format!(
            "\n{rows}\nStream: {}; longest wait {}.\nIdentity: a nonce that lives in memory alone, a counter that only \
             grows, checksums of the memory and of the disk,\nbefore and after each step; for clones also that no two \
             generation ids are equal.\n{verdict}",
            self.stream_in_words(),
            duration(self.stream.longest_gap),
        )
    }

    fn stream_in_words(&self) -> String {
        let lines = self.stream.lines;
        match self.stream.end {
            StreamEnd::Stopped => {
                format!("{lines} numbered lines over one TCP connection, none missing, none twice")
            }
            StreamEnd::Lost => format!("the TCP connection was lost after {lines} lines"),
            StreamEnd::Broken { expected } => format!("line {expected} did not come when it was its turn"),
        }
    }
}

/// Milliseconds of a result of the daemon, as people read them.
pub(crate) fn ms(value: &Value) -> String {
    value
        .as_f64()
        .map_or_else(|| "an unknown time".to_owned(), |ms| duration(Duration::from_secs_f64(ms / 1e3)))
}

fn duration(duration: Duration) -> String {
    match duration.as_secs_f64() * 1e3 {
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms if ms < 1000.0 => format!("{ms:.0} ms"),
        ms => format!("{:.1} s", ms / 1e3),
    }
}
