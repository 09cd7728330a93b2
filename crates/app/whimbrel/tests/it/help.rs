//! All help there is, in one file that a reviewer can read. Renew it with `WHIMBREL_RENEW=1 cargo test -p
//! whimbrel`.

use std::process::{Command, Stdio};

fn help(verb: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_whimbrel"));
    command.args(verb).arg("--help").env("COLUMNS", "100").env_remove("WHIMBREL_SOCKET").stdin(Stdio::null());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{verb:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Verbs that a help text lists: under `Commands:`, or in groups between the usage and the options.
fn verbs(help: &str, first: &str, end: &str) -> Vec<String> {
    let list = help.lines().skip_while(|line| *line != first).take_while(|line| *line != end);
    let names = list.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = names.filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(String::from).collect()
}

#[test]
fn the_whole_help_is_the_one_that_was_reviewed() {
    let top = help(&[]);
    let mut all = format!("$ whimbrel --help\n{top}");
    let found = verbs(&top, "Machines:", "Global options:");
    assert!(found.len() > 25, "{found:?}");
    for verb in found {
        let text = help(&[&verb]);
        for action in verbs(&text, "Commands:", "") {
            all += &format!("\n$ whimbrel {verb} {action} --help\n{}", help(&[&verb, &action]));
        }
        all += &format!("\n$ whimbrel {verb} --help\n{text}");
    }
    crate::kept::compare("help.txt", &all);
}
