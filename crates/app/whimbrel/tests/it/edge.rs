//! Exit codes, errors, interrupts and broken pipes of the real binary.

use crate::fake::{Daemon, wait_for, whimbrel};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Stdio},
};

fn interrupt(child: &Child) {
    kill_process(Pid::from_raw(child.id() as i32).unwrap(), Signal::INT).unwrap();
}

#[test]
fn every_refusal_has_its_documented_exit_code() {
    let daemon = Daemon::start(0);
    for (name, code) in [
        ("not_found", 3),
        ("name_taken", 4),
        ("busy", 4),
        ("invalid", 2),
        ("unreachable", 5),
        ("untrusted", 5),
        ("damaged", 6),
        ("no_space", 1),
        ("qemu_failed", 1),
        ("unsupported", 1),
        ("internal", 1),
    ] {
        let output = daemon.output(&format!("pause {name}"));
        let text = String::from_utf8(output.stderr).unwrap();
        let expected =
            format!("error: refused as {name}\n  because: it was written so\nhint: do something else\n");
        assert_eq!((output.status.code(), text), (Some(code), expected));
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn with_json_an_error_is_one_object_on_stderr() {
    let daemon = Daemon::start(0);
    let output = daemon.output("pause busy --json");
    let error: whimbrel_api::ApiError = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!((error.code, error.causes.len()), (whimbrel_api::ErrorCode::Busy, 1));
}

#[test]
fn a_daemon_that_is_not_there_is_unreachable_and_the_hint_starts_one() {
    let output = whimbrel("ps --socket /nonexistent/host.sock").output().unwrap();
    assert_eq!(output.status.code(), Some(5));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        text.contains("/nonexistent/host.sock") && text.contains("hint: start one with `whimbrel host"),
        "{text}"
    );
}

#[test]
fn wrong_arguments_say_what_would_be_right() {
    for (arguments, advice) in [
        ("run ../etc --memory 1G", "begin with a letter or digit"),
        ("run web --memory lots", "like 512M"),
        ("run web --memory 1G --initrd x", "--kernel"),
        ("migrate web beta --rate-max fast", "800Mbit"),
        ("migrate web beta --downtime-max 50", "50ms"),
        ("resume web --lazy --full", "cannot be used with"),
        ("clone web --count 0", "1..=1000"),
        ("untag", "<NAME>"),
        ("export web f.capsule --image disk0", "--format raw"),
        ("open web.whimbrel 1234", "64 hexadecimal digits"),
    ] {
        let output = whimbrel(arguments).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments}: {text}");
        assert!(text.contains(advice), "{arguments}: {text}");
    }
}

#[test]
fn a_failed_operation_is_an_error_with_the_daemons_own_words() {
    let daemon = Daemon::start(0);
    let output = daemon.output("checkpoint full -q");
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        (output.status.code(), text.as_str()),
        (Some(1), "error: the store is full\nhint: run `whimbrel gc`\n")
    );
}

#[test]
fn quiet_means_that_only_the_result_is_printed() {
    let daemon = Daemon::start(0);
    let (loud, quiet) = (daemon.output("gc"), daemon.output("gc -q"));
    assert_eq!(String::from_utf8(loud.stderr).unwrap(), "gc web: copying\n");
    assert!(quiet.stderr.is_empty() && quiet.stdout == loud.stdout);
}

#[test]
fn ctrl_c_cancels_on_the_daemon_and_tells_what_is_left() {
    let daemon = Daemon::start(0);
    let mut child =
        daemon.command("checkpoint slow").stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    daemon.wait_until_watched();
    interrupt(&child);
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{text}");
    assert!(daemon.was_cancelled());
    assert!(text.contains("cancelling checkpoint"), "{text}");
    assert!(text.ends_with("error: cancelled: the machine runs on, nothing was stored\n"), "{text}");
}

#[test]
fn clones_that_boot_are_gone_when_they_are_interrupted() {
    let daemon = Daemon::start(0);
    let mut command = daemon.command("clone golden --count 3 --prefix slow --set hostname=slow");
    let mut child = command.stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    daemon.wait_until_watched();
    interrupt(&child);
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{text}");
    assert!(text.ends_with("error: cancelled: no clone is left\n"), "{text}");
    assert_eq!(daemon.deleted(), ["slow-1", "slow-2"]);
}

#[test]
fn a_reader_who_goes_away_is_no_error() {
    let daemon = Daemon::start(0);
    let mut child =
        daemon.command("top --interval 100ms").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    reader.read_line(&mut String::new()).unwrap();
    drop(reader);
    let mut status = None;
    wait_for("top to see the broken pipe", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!((status.unwrap().code(), text.as_str()), (Some(0), ""));
}

#[test]
fn doctor_reports_every_check_and_its_fix() {
    let daemon = Daemon::start(0);
    let output = daemon.output("doctor --json");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    assert!(checks.len() > 8);
    assert!(checks.iter().all(|check| check["verdict"] == "ok" || check["fix"].is_string()), "{report}");
    let daemon_row = checks.iter().find(|check| check["name"] == "daemon").unwrap();
    assert_eq!(daemon_row["verdict"], "ok");
    assert_eq!(report["healthy"].as_bool(), Some(output.status.code() == Some(0)));
}

#[test]
fn doctor_names_damaged_files_of_a_data_folder_without_a_daemon() {
    let data = tempfile::tempdir().unwrap();
    let examine = || whimbrel("doctor --json --data").arg(data.path()).output().unwrap();
    assert_eq!(examine().status.code(), Some(0));
    let path = data.path().join("handovers.json");
    std::fs::write(&path, "{").unwrap();
    let output = examine();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let damaged = &report["damaged"][0];
    assert_eq!((output.status.code(), damaged["file"].as_str()), (Some(6), path.to_str()), "{report}");
    assert!(damaged["fix"].as_str().is_some_and(|fix| fix.contains("whimbrel resolve")), "{report}");
    assert_eq!(std::fs::read_to_string(path).unwrap(), "{", "an examination changes nothing");
}

#[test]
fn completions_name_every_verb() {
    let output = whimbrel("completions bash").output().unwrap();
    let script = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && script.contains("checkpoint") && script.contains("unpause"));
}
