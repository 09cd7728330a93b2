//! `whimbrel bisect`: finds the capsule from which on a command fails, by running clones of the capsules
//! between a good and a bad one.

use crate::{
    argument_types::DurationArg,
    bisection::{Bisection, Verdict},
    commands::log::beside,
    context::Context,
    error::CliError,
    guest_command::exec_when_up,
    operation,
};
use serde::Serialize;
use std::{process::Stdio, time::Instant};
use whimbrel_api::{
    CapsuleInfo, CapsuleRef, CloneNetwork, CloneRequest, ExecRequest, OperationResult, OperationState,
    ResumeMode,
};
use whimbrel_client::ClientError;
use whimbrel_core::{CapsuleId, MachineName};

/// Time for a command in the guest, which is asked about for as long.
const COMMAND_S: u64 = 600;

const EXAMPLES: &str = "\
Examples:
  whimbrel bisect web --good before-upgrade -- systemctl is-active nginx
  whimbrel bisect broken --good 3fa95c81 -- sh -c '! grep -q error /var/log/app.log'
  whimbrel bisect web --good monday --outside -- sh -c 'whimbrel logs $WHIMBREL_MACHINE | grep -q ready'";

/// Find the capsule from which on a command fails
///
/// Capsules between a good and a bad one are tried, each as a clone without a network that is deleted
/// afterwards; each trial halves what is left. The command runs in the guest by qemu-ga, or on this computer
/// with --outside. As in `git bisect run`, exit code 0 means good, 125 that the capsule cannot be judged, and
/// others up to 127 mean bad.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Capsule that is bad: a tag, machine (its newest capsule) or id
    bad: CapsuleRef,
    /// Ancestor of the bad capsule that is good
    #[arg(long, value_name = "CAPSULE")]
    good: CapsuleRef,
    /// Run the command on this computer, with the name of the clone in `WHIMBREL_MACHINE`
    #[arg(long)]
    outside: bool,
    /// Prefix of the names of the clones
    #[arg(long, value_name = "NAME", default_value = "bisect")]
    prefix: MachineName,
    /// Time for the guest of a clone to answer, which may have to boot first
    #[arg(long, value_name = "DURATION", default_value = "2m")]
    timeout: DurationArg,
    /// Command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// A capsule that was tried.
#[derive(Debug, Serialize)]
struct Trial {
    capsule: CapsuleId,
    exit_code: i32,
    verdict: Verdict,
}

/// The result for programs.
#[derive(Debug, Serialize)]
struct Found {
    last_good: CapsuleInfo,
    /// More than one if capsules could not be judged.
    first_bad: Vec<CapsuleInfo>,
    trials: Vec<Trial>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let line = self.line(context).await?;
        let (mut search, mut trials) = (Bisection::between(line.len()), Vec::new());
        while let Some(state) = search.next() {
            let (capsule, left) = (&line[state], search.steps_left());
            context.output.remark(&format!("{}: at most {left} to go", beside(capsule)));
            let exit_code = self.try_capsule(context, capsule).await?;
            let verdict = Verdict::of_exit(exit_code).ok_or_else(|| CliError::Usage {
                problem: format!("the command ended with {exit_code}, which is neither good nor bad"),
                hint: "0 means good, 125 that the capsule cannot be judged, others up to 127 mean bad"
                    .to_owned(),
            })?;
            context.output.remark(&format!("{}: {}", capsule.id.short(), word(verdict)));
            search.note(state, verdict);
            trials.push(Trial { capsule: capsule.id, exit_code, verdict });
        }
        let last_good = line[search.last_good()].clone();
        let found = Found { last_good, first_bad: line[search.first_bad()].to_vec(), trials };
        context.output.result(&found, text)
    }

    /// The capsules from the good to the bad one, by age.
    async fn line(&self, context: &Context) -> Result<Vec<CapsuleInfo>, CliError> {
        let good = context.client.capsule(&self.good).await?.id;
        let mut line = context.client.log(&self.bad).await?;
        let place = line.iter().position(|capsule| capsule.id == good).filter(|place| *place > 0);
        let place = place.ok_or_else(|| CliError::Usage {
            problem: format!("{} is no ancestor of {}", self.good, self.bad),
            hint: format!("`whimbrel log {}` lists its ancestors", self.bad),
        })?;
        line.truncate(place + 1);
        line.reverse();
        Ok(line)
    }

    /// Runs the command on a clone of the capsule. Returns its exit code. The clone is deleted in any case.
    async fn try_capsule(&self, context: &Context, capsule: &CapsuleInfo) -> Result<i32, CliError> {
        let request = CloneRequest {
            capsule: capsule.id.into(),
            count: 1,
            prefix: Some(self.prefix.clone()),
            mode: ResumeMode::Lazy,
            network: CloneNetwork::Isolated,
        };
        let cloned = operation::complete(context, context.client.clone_capsule(&request)).await?;
        let OperationState::Succeeded { result: OperationResult::Clone { machines, .. } } = cloned.state
        else {
            return Err(ClientError::Lost { operation: cloned.id }.into());
        };
        let Some(clone) = machines.first() else {
            return Err(ClientError::Lost { operation: cloned.id }.into());
        };
        let code = tokio::select! {
            code = self.judge(context, clone) => code,
            _ = tokio::signal::ctrl_c() => {
                Err(CliError::Cancelled { left: format!("{clone} is deleted, nothing else was changed") })
            }
        };
        context.discard(clone).await?;
        code
    }

    async fn judge(&self, context: &Context, clone: &MachineName) -> Result<i32, CliError> {
        if self.outside {
            let mut command = tokio::process::Command::new(&self.command[0]);
            command.args(&self.command[1..]).env("WHIMBREL_MACHINE", clone.as_str()).kill_on_drop(true);
            // What the command prints is no part of the result.
            let ended = command.stdin(Stdio::null()).stdout(std::io::stderr()).status().await;
            let status = ended.map_err(CliError::io("run the command"))?;
            return Ok(status.code().unwrap_or(128));
        }
        let request = ExecRequest {
            command: self.command.clone(),
            env: Vec::new(),
            input: String::new(),
            timeout_s: Some(COMMAND_S),
        };
        let ended = exec_when_up(context, clone, &request, Instant::now() + self.timeout.0).await?;
        Ok(ended.exit_code.unwrap_or(128))
    }
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Good => "good",
        Verdict::Bad => "bad",
        Verdict::Skipped => "cannot be judged",
    }
}

fn text(found: &Found) -> String {
    let mut text = format!("last good: {}\n", beside(&found.last_good));
    match &found.first_bad[..] {
        [bad] => {
            text += &format!("first bad: {}\n", beside(bad));
            text += &format!("compare:   whimbrel diff {} {}\n", found.last_good.id.short(), bad.id.short());
        }
        some => {
            text += "first bad, one of:\n";
            some.iter().for_each(|capsule| text += &format!("  {}\n", beside(capsule)));
        }
    }
    text
}
