//! Parts of a report: answers of the daemon, its records, figures and log, and checks of the host.
//!
//! Each part is bounded in time and size, and one that cannot be had is named with the reason: a report is
//! made when something does not work. Directories with keys, tokens and disks are never opened, and what is
//! read goes through [`redact`].

mod redact;

use crate::{context::Context, doctor};
use redact::Redactor;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};
use whimbrel_api::routes;

/// Time for one answer of the daemon.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most bytes of one part; of a log, the last ones.
const PART_MAX: usize = 8 << 20;
/// Lines of the journal.
const JOURNAL_LINES: &str = "20000";
/// Most records of one kind.
const RECORDS_MAX: usize = 2000;

/// Answers of the daemon. Trust and tokens are not among them.
const ANSWERS: &[(&str, &str)] = &[
    ("host", routes::HOST),
    ("machines", routes::MACHINES),
    ("capsules", routes::CAPSULES),
    ("operations", routes::OPERATIONS),
    ("migrations", routes::MIGRATIONS),
    ("schedules", routes::SCHEDULES),
    ("networks", routes::NETWORKS),
    ("cache", routes::CACHE),
    ("encryption", routes::STORE_ENCRYPTION),
];
/// Files of records below the data directory: folder, and the file in each of its folders, if they are
/// folders.
const RECORDS: &[(&str, Option<&str>)] =
    &[("machines", Some("machine.json")), ("schedules", None), ("protections", None), ("networks", None)];

/// Parts by their names in the report, and why others are missing.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) parts: BTreeMap<String, Vec<u8>>,
    pub(crate) missing: Vec<String>,
    redactor: Redactor,
}

impl Report {
    /// Gathers everything that can be had.
    pub(crate) async fn gather(context: &Context, logs: &[PathBuf]) -> Self {
        let mut report = Self::default();
        report.add_json("versions.json", versions(context));
        if let Some(socket) = context.client.socket() {
            let checks = json!(doctor::checks(Some(socket)));
            report.add_json("doctor.json", checks);
        }
        let mut data = None;
        for (name, path) in ANSWERS {
            let answer = report.answer(context, name, path).await;
            let answer = answer.and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
            if *name == "host" {
                data = answer.as_ref().and_then(|host| host["data"].as_str()).map(PathBuf::from);
            }
            answer.into_iter().for_each(|answer| report.add_json(&format!("api/{name}.json"), answer));
        }
        for (name, path) in [("metrics.txt", routes::METRICS), ("events.txt", "/v1/events?follow=false")] {
            if let Some(bytes) = report.answer(context, name, path).await {
                report.add_text(name, &String::from_utf8_lossy(&bytes));
            }
        }
        if context.client.socket().is_some() {
            report.add_records(data.as_deref());
            report.add_logs(logs);
        }
        let missing = report.missing.join("\n");
        report.add_text("missing.txt", &missing);
        report
    }

    async fn answer(&mut self, context: &Context, name: &str, path: &str) -> Option<Vec<u8>> {
        let call = context.client.call("GET", path, None, PART_MAX);
        match tokio::time::timeout(PATIENCE, call).await {
            Ok(Ok(bytes)) => return Some(bytes.to_vec()),
            Ok(Err(error)) => self.missing.push(format!("{name}: {error}")),
            Err(_) => self.missing.push(format!("{name}: no answer within {} s", PATIENCE.as_secs())),
        }
        None
    }

    fn add_json(&mut self, name: &str, mut value: Value) {
        self.redactor.json(&mut value);
        let text = serde_json::to_string_pretty(&value).unwrap_or_default();
        self.parts.insert(name.to_owned(), text.into_bytes());
    }

    fn add_text(&mut self, name: &str, text: &str) {
        let text = self.redactor.text(text);
        self.parts.insert(name.to_owned(), text.into_bytes());
    }

    /// Records of the daemon. One that is no JSON is named and left out, since nothing could be hidden in it.
    fn add_records(&mut self, data: Option<&Path>) {
        let Some(data) = data else { return };
        for (folder, inner) in RECORDS {
            let entries = std::fs::read_dir(data.join(folder)).into_iter().flatten().flatten();
            for entry in entries.take(RECORDS_MAX) {
                let path = inner.map_or_else(|| entry.path(), |inner| entry.path().join(inner));
                if path.extension().is_none_or(|kind| kind != "json") || !path.is_file() {
                    continue;
                }
                let name = path.strip_prefix(data).unwrap_or(&path).display().to_string();
                match end_of(&path).map(|bytes| serde_json::from_slice(&bytes)) {
                    Ok(Ok(record)) => self.add_json(&format!("records/{name}"), record),
                    Ok(Err(error)) => self.missing.push(format!("{name}: {error}")),
                    Err(error) => self.missing.push(format!("{name}: {error}")),
                }
            }
        }
    }

    fn add_logs(&mut self, logs: &[PathBuf]) {
        for (number, path) in logs.iter().enumerate() {
            match end_of(path) {
                Ok(bytes) => {
                    self.add_text(&format!("logs/{}.log", number + 1), &String::from_utf8_lossy(&bytes));
                }
                Err(error) => self.missing.push(format!("{}: {error}", path.display())),
            }
        }
        let journal = ["--unit=whimbrel", "--no-pager", "--output=short-iso", "--lines", JOURNAL_LINES];
        match printed("journalctl", &journal) {
            Some(text) => self.add_text("logs/journal.log", &text),
            None => self.missing.push("journal: journalctl has none of the unit whimbrel".to_owned()),
        }
    }
}

/// Last bytes of a file.
fn end_of(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(PART_MAX as u64)))?;
    let mut bytes = Vec::new();
    file.take(PART_MAX as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// What a program prints, if it succeeds.
fn printed(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    let kept = output.stdout.len().saturating_sub(PART_MAX);
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout[kept..]).into_owned())
}

fn versions(context: &Context) -> Value {
    let system = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let system = system.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    let qemu = printed("qemu-system-x86_64", &["--version"]);
    json!({
        "whimbrel": env!("CARGO_PKG_VERSION"),
        "system": system.map(|name| name.trim_matches('"')),
        "kernel": printed("uname", &["-srvm"]).map(|text| text.trim().to_owned()),
        "qemu": qemu.and_then(|text| text.lines().next().map(str::to_owned)),
        "elsewhere": context.remote.is_some(),
    })
}
