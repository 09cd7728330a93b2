//! Edge of the program: parses the arguments, runs the command, prints its error once, chooses the exit code.

use crate::{
    cli::{Cli, Command},
    context::Context,
    error::{CliError, exit},
    output::printable,
};
use std::{
    io::{IsTerminal, Write},
    process::ExitCode,
};
use tracing_subscriber::EnvFilter;
use whimbrel_api::ApiError;

pub(crate) fn run() -> ExitCode {
    let cli = Cli::from_arguments();
    log_to_stderr(cli.verbose, cli.command.is_daemon());
    let json = cli.json;
    match dispatch(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if failure.is_broken_pipe() => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.is_told() {
                report(&failure, json);
            }
            ExitCode::from(failure.exit_code())
        }
    }
}

/// Runs verbs that call the daemon in a runtime of one thread. All others bring their own.
fn dispatch(cli: Cli) -> Result<(), CliError> {
    let context = Context::new(&cli);
    match cli.command {
        Command::Host(args) => args.run(cli.socket),
        Command::Vm(args) => args.run(),
        Command::UnpackLayer(args) => args.run(),
        Command::DecompressImage(args) => args.run(),
        Command::Completions(args) => args.run(),
        Command::Manuals(args) => args.run(),
        Command::Doctor(args) => args.run(&context?),
        Command::Mount(args) => args.run(&context?),
        Command::Pool(args) => args.run(&context?),
        Command::Session(args) => args.run(&context?),
        Command::Call(call) => {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(CliError::io("start the runtime"))?;
            runtime.block_on(call.run(&context?))
        }
    }
}

/// Logs warnings of a command and, in a daemon, also what it does; `-v` adds a level.
fn log_to_stderr(verbose: u8, daemon: bool) {
    let level = match verbose + u8::from(daemon) {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_env("WHIMBREL_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let colours = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr).init();
}

/// Prints an error. Nobody can be told if stderr is closed.
fn report(failure: &CliError, json: bool) {
    let error = failure.to_api();
    let text =
        if json { serde_json::to_string(&error).unwrap_or_default() + "\n" } else { for_people(&error) };
    let _ = std::io::stderr().write_all(printable(&text).as_bytes());
}

fn for_people(error: &ApiError) -> String {
    let mut text = format!("error: {}\n", error.message);
    error.causes.iter().for_each(|cause| text += &format!("  because: {cause}\n"));
    error.hint.iter().for_each(|hint| text += &format!("hint: {hint}\n"));
    text
}

const _: () = assert!(exit::USAGE == 2, "clap exits with 2 on a usage error, and so do we");

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_api::ErrorCode;

    #[test]
    fn an_error_is_printed_once_with_its_causes_and_its_hint() {
        let mut error = ApiError::new(ErrorCode::QemuFailed, "cannot start web").with_hint("see its log");
        error.causes = vec!["qemu exited with 1".into(), "no such machine type".into()];
        let text = "error: cannot start web\n  because: qemu exited with 1\n  because: no such machine type\n\
                    hint: see its log\n";
        assert_eq!(for_people(&error), text);
    }
}
