//! Programs and files inside a guest, through qemu-ga.
//!
//! Nothing here holds the machine lock, so a program may run for as long as its caller waits. A guest that
//! lies only misleads the caller: what it says is returned to them and to nobody else.

use crate::{core::error::DaemonError, daemon::Daemon};
use base64::{Engine, engine::general_purpose::STANDARD};
use std::time::{Duration, Instant};
use whimbrel_api::{ExecRequest, ExecResult, FileContent, FileReadRequest, FileWriteRequest};
use whimbrel_core::MachineName;
use whimbrel_qemu::{QemuGaError, QemuGaSession};

/// Time for qemu-ga to give a sign of life.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time that a program has by default, and at most.
const TIMEOUT_S: u64 = 60;
const TIMEOUT_MAX_S: u64 = 3600;
/// Intervals at which a program is asked about: the first, and the longest.
const FIRST_LOOK: Duration = Duration::from_millis(20);
const LONGEST_LOOK: Duration = Duration::from_secs(1);
/// Most words and bytes of a command with its environment.
const WORDS_MAX: usize = 1000;
const COMMAND_MAX: usize = 256 << 10;
/// Longest part of a file in one call.
const CHUNK_MAX: usize = 512 << 10;
const PATH_MAX: usize = 4096;

impl Daemon {
    /// Runs a program in the guest of a machine and waits for its end.
    pub(crate) fn exec(&self, name: &MachineName, request: &ExecRequest) -> Result<ExecResult, DaemonError> {
        let input = check(request)?;
        let ga = self.machines.get(name)?.qemu_ga()?;
        let failed = |source| DaemonError::Agent { name: name.clone(), source };
        let seconds = request.timeout_s.unwrap_or(TIMEOUT_S).min(TIMEOUT_MAX_S);
        let deadline = Instant::now() + Duration::from_secs(seconds);
        let mut session = ga.session(PATIENCE).map_err(failed)?;
        let pid = session.exec(&request.command, &request.env, &input).map_err(failed)?;
        drop(session);
        let mut look = FIRST_LOOK;
        loop {
            let status = ga.session(PATIENCE).and_then(|mut session| session.exec_status(pid));
            match status {
                Ok(status) if status.exited => {
                    return Ok(ExecResult {
                        exit_code: status.exit_code,
                        signal: status.signal,
                        stdout: STANDARD.encode(status.stdout),
                        stderr: STANDARD.encode(status.stderr),
                        truncated: status.truncated,
                    });
                }
                // Somebody else has the port for a moment.
                Ok(_) | Err(QemuGaError::Busy) => {}
                Err(source) => return Err(failed(source)),
            }
            if Instant::now() >= deadline || !self.sleep_unless_closing(look) {
                return Err(DaemonError::StillExecutes { name: name.clone(), pid, seconds });
            }
            look = (look * 2).min(LONGEST_LOOK);
        }
    }

    /// Reads a part of a file of the guest.
    pub(crate) fn read_guest_file(
        &self,
        name: &MachineName,
        request: &FileReadRequest,
    ) -> Result<FileContent, DaemonError> {
        let length = request.length as usize;
        if !(1..=CHUNK_MAX).contains(&length) {
            return Err(DaemonError::invalid(format!("between 1 and {CHUNK_MAX} bytes are read at once")));
        }
        self.with_file(name, &request.path, "r", |session, handle| {
            if request.offset > 0 {
                session.seek_file(handle, request.offset)?;
            }
            let chunk = session.read_file(handle, length)?;
            Ok(FileContent { data: STANDARD.encode(chunk.bytes), end: chunk.end })
        })
    }

    /// Writes a part of a file of the guest. The part at the beginning makes the file, or empties it.
    pub(crate) fn write_guest_file(
        &self,
        name: &MachineName,
        request: &FileWriteRequest,
    ) -> Result<(), DaemonError> {
        let bytes =
            STANDARD.decode(&request.data).map_err(|_| DaemonError::invalid("`data` is no Base64"))?;
        if bytes.len() > CHUNK_MAX {
            return Err(DaemonError::invalid(format!("at most {CHUNK_MAX} bytes are written at once")));
        }
        let mode = if request.offset == 0 { "w" } else { "r+" };
        self.with_file(name, &request.path, mode, |session, handle| {
            if request.offset > 0 {
                session.seek_file(handle, request.offset)?;
            }
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                match session.write_file(handle, rest)? {
                    0 => return Err(QemuGaError::Malformed { command: "guest-file-write" }),
                    written => rest = &rest[written..],
                }
            }
            Ok(())
        })
    }

    /// Works with an open file and closes it.
    fn with_file<T>(
        &self,
        name: &MachineName,
        path: &str,
        mode: &str,
        work: impl FnOnce(&mut QemuGaSession<'_>, i64) -> Result<T, QemuGaError>,
    ) -> Result<T, DaemonError> {
        if path.is_empty() || path.len() > PATH_MAX || path.contains('\0') {
            return Err(DaemonError::invalid("that is no path of a file"));
        }
        let ga = self.machines.get(name)?.qemu_ga()?;
        let done = ga.session(PATIENCE).and_then(|mut session| {
            let handle = session.open_file(path, mode)?;
            let done = work(&mut session, handle);
            // A write that fails may show only here.
            let closed = session.close_file(handle);
            done.and_then(|done| closed.map(|()| done))
        });
        done.map_err(|source| DaemonError::Agent { name: name.clone(), source })
    }
}

/// Checks a command. Returns its input.
fn check(request: &ExecRequest) -> Result<Vec<u8>, DaemonError> {
    let words = || request.command.iter().chain(&request.env);
    if request.command.first().is_none_or(String::is_empty) {
        return Err(DaemonError::invalid("name a program"));
    }
    if words().count() > WORDS_MAX || words().map(String::len).sum::<usize>() > COMMAND_MAX {
        return Err(DaemonError::invalid(format!(
            "a command has at most {WORDS_MAX} words of {COMMAND_MAX} bytes together"
        )));
    }
    if words().any(|word| word.contains('\0')) || request.env.iter().any(|word| !word.contains('=')) {
        return Err(DaemonError::invalid("write the environment as NAME=VALUE, and no zero bytes"));
    }
    STANDARD.decode(&request.input).map_err(|_| DaemonError::invalid("`input` is no Base64"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(command: &[&str], env: &[&str]) -> ExecRequest {
        let owned = |words: &[&str]| words.iter().map(ToString::to_string).collect();
        ExecRequest { command: owned(command), env: owned(env), ..ExecRequest::default() }
    }

    #[test]
    fn a_command_that_no_guest_could_run_is_refused_before_it_is_sent() {
        assert_eq!(check(&ExecRequest { input: "aGk=".into(), ..asked(&["cat"], &["A=1"]) }).unwrap(), b"hi");
        for wrong in [
            asked(&[], &[]),
            asked(&[""], &[]),
            asked(&["a\0b"], &[]),
            asked(&["env"], &["A"]),
            asked(&vec!["x"; 1001], &[]),
            asked(&["x", &"x".repeat(COMMAND_MAX)], &[]),
            ExecRequest { input: "?".into(), ..asked(&["cat"], &[]) },
        ] {
            assert!(check(&wrong).is_err(), "{wrong:?}");
        }
    }
}
