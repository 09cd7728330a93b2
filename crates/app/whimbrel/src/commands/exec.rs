//! `whimbrel exec`: runs a program in a guest, through qemu-ga.

use crate::{argument_types::DurationArg, context::Context, error::CliError, output};
use base64::{Engine, engine::general_purpose::STANDARD};
use std::io::{IsTerminal, Read, Write};
use whimbrel_api::{ExecRequest, ExecResult};
use whimbrel_core::MachineName;

/// Longest input: it travels in one request.
const INPUT_MAX: u64 = 512 << 10;

const EXAMPLES: &str = "\
Examples:
  whimbrel exec web -- systemctl is-active nginx
  whimbrel exec web --env LANG=C -- sh -c 'df -h | tail -n 3'
  whimbrel exec web -i -- psql shop < query.sql
  whimbrel exec web --timeout 10m -- apt-get -y upgrade";

/// Run a program in the guest of a machine and print what it prints
///
/// Needs the program qemu-ga in the guest (in most distributions the package qemu-guest-agent). No shell
/// reads the command. Output is printed when the program has ended, at most 16 MiB of it; the exit code is
/// that of the program, and 128 and the signal if a signal ended it.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
    /// Pass on what is read from standard input, at most 512 KiB
    #[arg(short, long)]
    interactive: bool,
    /// Variable of the program's environment, which has no others then (repeatable)
    #[arg(long = "env", value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Time to wait for the end of the program, which runs on after that
    #[arg(long, value_name = "DURATION", default_value = "60s")]
    timeout: DurationArg,
    /// Program and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let input = if self.interactive { STANDARD.encode(read_input()?) } else { String::new() };
        let timeout_s = Some(self.timeout.0.as_secs().max(1));
        let request = ExecRequest { command: self.command, env: self.env, input, timeout_s };
        let ended = context.client.exec(&self.name, &request).await?;
        if context.output.json {
            context.output.result(&ended, |_| String::new())?;
        } else {
            print(&ended)?;
        }
        if ended.truncated {
            context.output.remark("note: the program printed more than qemu-ga keeps; some of it is missing");
        }
        match exit_code(&ended) {
            0 => Ok(()),
            code => Err(CliError::GuestProgram { code }),
        }
    }
}

fn read_input() -> Result<Vec<u8>, CliError> {
    let mut input = Vec::new();
    let read = std::io::stdin().lock().take(INPUT_MAX + 1).read_to_end(&mut input);
    read.map_err(CliError::io("read standard input"))?;
    if input.len() as u64 > INPUT_MAX {
        return Err(CliError::Usage {
            problem: "the input is longer than 512 KiB".to_owned(),
            hint: "`whimbrel cp FILE NAME:PATH` first, and let the program read that file".to_owned(),
        });
    }
    Ok(input)
}

fn print(ended: &ExecResult) -> Result<(), CliError> {
    let bytes = |text: &str| {
        STANDARD.decode(text).map_err(|error| CliError::io("read the answer")(std::io::Error::other(error)))
    };
    output::write(&bytes(&ended.stdout)?)?;
    let errors = bytes(&ended.stderr)?;
    let mut stderr = std::io::stderr().lock();
    let written = match stderr.is_terminal() {
        true => stderr.write_all(output::printable(&String::from_utf8_lossy(&errors)).as_bytes()),
        false => stderr.write_all(&errors),
    };
    written.map_err(CliError::io("write the result"))
}

fn exit_code(ended: &ExecResult) -> u8 {
    let code = ended.exit_code.or(ended.signal.map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_failed_never_looks_like_one_that_did_not() {
        let code = |exit_code, signal| {
            exit_code_of(ExecResult {
                exit_code,
                signal,
                stdout: String::new(),
                stderr: String::new(),
                truncated: false,
            })
        };
        fn exit_code_of(ended: ExecResult) -> u8 {
            exit_code(&ended)
        }
        assert_eq!([code(Some(0), None), code(Some(3), None), code(None, Some(9))], [0, 3, 137]);
        assert_eq!([code(None, None), code(Some(256), None), code(Some(-1), None)], [1, 1, 1]);
    }
}
