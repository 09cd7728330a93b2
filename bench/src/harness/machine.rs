//! The machine a result belongs to, in one line. Two results compare only if these lines are alike.

use std::process::Command;

/// CPU model and count, memory, kernel, QEMU.
pub(crate) fn describe() -> String {
    let cpu = field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown CPU".into());
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let memory = field("/proc/meminfo", "MemTotal")
        .and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok())
        .map_or(0, |kib| kib >> 20);
    let kernel = first_line("uname", &["-r"]).unwrap_or_else(|| "unknown".into());
    let qemu = first_line("qemu-system-x86_64", &["--version"])
        .and_then(|line| line.split_whitespace().nth(3).map(str::to_owned))
        .unwrap_or_else(|| "absent".into());
    format!("{cpu}, {cores} cores, {memory} GiB, Linux {kernel}, QEMU {qemu}")
}

/// The commit of the checkout, with `+` if the work tree differs from it.
pub(crate) fn commit() -> String {
    let id = first_line("git", &["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".into());
    let changed = first_line("git", &["status", "--porcelain", "--untracked-files=no"]).is_some();
    if changed { id + "+" } else { id }
}

/// The day of today in UTC, `2026-11-23`.
pub(crate) fn date() -> Option<String> {
    first_line("date", &["-u", "+%F"])
}

/// The value of the first line `key : value` in the file at `path`.
fn field(path: &str, key: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let (_, value) =
        text.lines().filter_map(|line| line.split_once(':')).find(|(name, _)| name.trim() == key)?;
    Some(value.trim().to_owned())
}

fn first_line(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.lines().next().map(|line| line.trim().to_owned())
}
