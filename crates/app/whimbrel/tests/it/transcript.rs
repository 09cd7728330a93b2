//! Output of every verb, as text and as JSON, against a daemon with fixed answers.
//!
//! The JSON is part of the interface: a change here breaks scripts of users.

use crate::fake::Daemon;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const VERBS: &[&str] = &[
    "ps",
    "ps --all-hosts",
    "run web --memory 1M --disk /img/web.img,size=8K --net br0",
    "stop web",
    "unpause web",
    "upgrade web",
    "inspect web",
    "set web --autostart 1 --restart always:3 --label tier=front --unlabel owner",
    "edit web",
    "rename old web",
    "logs web --bytes 4K",
    "logs web -f",
    "events --past",
    "balloon web 512K",
    "delete web",
    "checkpoint web --tag before --label ticket=4711",
    "suspend web",
    "resume before --full",
    "clone before --count 2",
    "clone --match ram>=512K,os=debian --count 2",
    "derive golden kid --memory 2M --net none",
    "migrate web beta --downtime-max 30ms --rate-max 100Mbit",
    "migrations web",
    "migrations db",
    "evacuate --to beta --parallel 2",
    "dirty-rate web --window 1s --bandwidth 8Mbit,1Gbit --rounds 2",
    "ls",
    "log web",
    "show before",
    "diff before web",
    "tag web before",
    "promote golden",
    "outdated golden --onto golden-2",
    "log golden --refs",
    "log golden --graph",
    "untag before web",
    "rm before web",
    "gc",
    "schedule ls",
    "schedule show nightly",
    "schedule run nightly --dry-run",
    "schedule rm nightly",
    "verify",
    "repair",
    "encryption status",
    "encryption seal",
    "encryption rotate --key-file /etc/new.key",
    "export before /backup/web.capsule",
    "import /backup/web.capsule web",
    "open /backup/web.whimbrel 7f1e6b4a90c2d83f5e7a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60",
    "trust add beta ed25519:OTHER 10.0.0.2:7400",
    "trust set beta --read web,golden*",
    "trust ls",
    "trust rm beta",
    "key",
];

fn transcript(daemon: &Daemon, option: &str, verbs: &[&str]) -> String {
    let mut all = String::new();
    for verb in verbs {
        let line = format!("{verb}{option}");
        let output = daemon.output(&line);
        let (out, err) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        all += &format!("$ whimbrel {line}\n{out}");
        err.lines().for_each(|line| all += &format!("stderr: {line}\n"));
        match output.status.code() {
            Some(0) => all += "\n",
            code => all += &format!("exit code {code:?}\n\n"),
        }
    }
    all
}

#[test]
fn every_verb_says_to_people_what_was_reviewed() {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let hours_ago = now - Duration::from_secs(3 * 3600 + 1800);
    let daemon = Daemon::start(hours_ago.as_millis() as u64);
    let mut verbs = VERBS.to_vec();
    verbs.extend(["migrations", "migrations nobody", "log --graph", "top --count 1", "console web --log"]);
    crate::kept::compare("people.txt", &transcript(&daemon, "", &verbs));
}

#[test]
fn every_verb_says_to_programs_what_was_promised() {
    let daemon = Daemon::start(1_000);
    let mut verbs = VERBS.to_vec();
    verbs.push("top --count 1");
    crate::kept::compare("json.txt", &transcript(&daemon, " --json", &verbs));
}
