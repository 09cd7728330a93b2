//! The bytes of guest messages stay as long as their version does.

use whimbrel_guest_protocol::{Command, GuestRequest, Process, Report, RequestOutcome, VERSION};
use whimbrel_wire::{VersionRange, golden::check};

fn commands() -> Vec<(&'static str, Command)> {
    let result = |outcome: fn(String) -> RequestOutcome| Command::RequestResult(outcome("a".into()));
    let stun = Command::Stun { lease_ms: 3000, limit: 40, spare: 7, each: 2, sample: vec![1, 70_000] };
    vec![
        ("Hello", Command::Hello { host: "alpha".into(), machine: "web".into(), pages: 70_000 }),
        ("FreeCaches", Command::FreeCaches),
        ("Stun", stun),
        ("ExtendStun", Command::ExtendStun { lease_ms: 3000 }),
        ("Release", Command::Release),
        ("Announce", Command::Announce),
        ("RequestResult-started", Command::RequestResult(RequestOutcome::Started)),
        ("RequestResult-refused", result(RequestOutcome::Refused)),
        ("RequestResult-done", result(RequestOutcome::Done)),
        ("RequestResult-failed", result(RequestOutcome::Failed)),
        ("SetClock", Command::SetClock { unix_ms: 1_800_000_000_000 }),
    ]
}

fn reports() -> Vec<(&'static str, Report)> {
    let process = || Process { pid: 70_000, pages: 7, name: "cc1".into() };
    vec![
        ("Ready", Report::Ready { features: 7, version: "0.1.0".into() }),
        ("Freed", Report::Freed { before: 1, after: 5_000_000_000 }),
        ("Stunned", Report::Stunned { held: vec![process()], spared: vec![process()] }),
        ("Released", Report::Released { count: 2 }),
        ("Announced", Report::Announced { frames: 2 }),
        ("Request-migrate", Report::Request(GuestRequest::Migrate { host: "beta".into() })),
        ("Request-checkpoint", Report::Request(GuestRequest::Checkpoint { tag: "a".into() })),
        ("ClockSet", Report::ClockSet { forward_ms: 90_000 }),
        ("Failed", Report::Failed { reason: "a".into() }),
    ]
}

#[test]
fn messages_keep_their_bytes_as_long_as_their_version_stays() {
    let commands = commands().into_iter().map(|(name, command)| (name, command.to_frame(1, 2).encode()));
    let reports = reports().into_iter().map(|(name, report)| (name, report.to_frame(1, 2).encode()));
    let version = u16::from(VERSION);
    let samples: Vec<_> = commands.chain(reports).collect();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/messages.txt");
    check(path, VersionRange { oldest: version, newest: version }, &samples);
}
