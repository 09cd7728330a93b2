//! Programs of the host that networks are made with.

use std::{
    io::Write,
    process::{Command, Stdio},
};

/// Failure of a program.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each variant says what its fields are")]
pub enum ProgramError {
    #[error("there is no program {program}; install the package {package}")]
    Missing { program: &'static str, package: &'static str },
    #[error("cannot run {program}")]
    Run { program: &'static str, source: std::io::Error },
    #[error("{program}: {said}")]
    Failed { program: &'static str, said: String },
    #[error("cannot set {setting}")]
    Setting { setting: String, source: std::io::Error },
}

/// Most text that is repeated of a program's complaint.
const SAID_MAX: usize = 500;

/// Debian's package of a program.
fn package(program: &str) -> &'static str {
    match program {
        "nft" => "nftables",
        "dnsmasq" => "dnsmasq-base",
        _ => "iproute2",
    }
}

/// Runs a program with `input` to its end. An exit code other than 0 is an error with what it said.
pub(super) fn run(program: &'static str, arguments: &[&str], input: &str) -> Result<(), ProgramError> {
    let failed = |source| ProgramError::Run { program, source };
    let mut child =
        start(program, Command::new(program).args(arguments).stdin(Stdio::piped()).stderr(Stdio::piped()))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that ends without reading says why.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(failed)?;
    if output.status.success() {
        return Ok(());
    }
    let said: String = String::from_utf8_lossy(&output.stderr).trim().chars().take(SAID_MAX).collect();
    Err(ProgramError::Failed { program, said })
}

/// Starts a program without a terminal.
pub(super) fn start(
    program: &'static str,
    command: &mut Command,
) -> Result<std::process::Child, ProgramError> {
    command.stdout(Stdio::null()).spawn().map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => ProgramError::Missing { program, package: package(program) },
        _ => ProgramError::Run { program, source },
    })
}

/// Writes a kernel setting of this network namespace, below `/proc/sys/net` (`ip-sysctl.rst` of Linux).
pub(super) fn set(setting: &str, value: &str) -> Result<(), ProgramError> {
    let path = format!("/proc/sys/net/{setting}");
    // Written only where it differs: the folder may be read-only, with the right value in it.
    if std::fs::read_to_string(&path).is_ok_and(|now| now.trim() == value) {
        return Ok(());
    }
    std::fs::write(&path, value)
        .map_err(|source| ProgramError::Setting { setting: setting.to_owned(), source })
}

/// The user of that name if the host has one, else `nobody`.
pub(super) fn user_or_nobody(name: &'static str) -> &'static str {
    if matches!(nix::unistd::User::from_name(name), Ok(Some(_))) { name } else { "nobody" }
}
