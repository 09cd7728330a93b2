//! Long work: begin it, show its progress, cancel it on Ctrl-C, say how it ended.
//!
//! The daemon owns the operation; losing this process changes nothing for it. The first Ctrl-C asks the
//! daemon to cancel and goes on watching, because only the daemon knows what state is left. The second one
//! just leaves.

use crate::{context::Context, error::CliError, progress::Display, result_text, round_text};
use std::future::Future;
use tokio::{
    pin, select,
    signal::unix::{Signal, SignalKind, signal},
};
use whimbrel_api::{Operation, OperationId, OperationResult, OperationState, PostcopyInfo};
use whimbrel_client::ClientError;

/// Does what `begin` begins, to its end, and prints the result.
pub(crate) async fn perform(
    context: &Context,
    begin: impl Future<Output = Result<Operation, ClientError>>,
) -> Result<(), CliError> {
    let ended = complete(context, begin).await?;
    match &ended.state {
        OperationState::Succeeded { result } => {
            context.output.result(&ended, |_| result_text::describe(result))?;
            verdict(&ended.subject, result)
        }
        _ => Err(ClientError::Lost { operation: ended.id }.into()),
    }
}

/// Does what `begin` begins, to its end, which is a success.
pub(crate) async fn complete(
    context: &Context,
    begin: impl Future<Output = Result<Operation, ClientError>>,
) -> Result<Operation, CliError> {
    // Before the request goes out, so that no Ctrl-C can fall between it and the watching.
    let mut interrupts = signal(SignalKind::interrupt()).map_err(CliError::io("watch for Ctrl-C"))?;
    let begun = select! {
        begun = begin => begun?,
        _ = interrupts.recv() => return Err(CliError::Interrupted { operation: None }),
    };
    let ended = watch(context, &begun, &mut interrupts).await?;
    match &ended.state {
        OperationState::Succeeded { .. } => Ok(ended),
        OperationState::Failed { error } => Err(CliError::Operation(error.clone())),
        OperationState::Cancelled { left } => Err(CliError::Cancelled { left: left.clone() }),
        OperationState::Running => Err(ClientError::Lost { operation: ended.id }.into()),
    }
}

/// A verification that found damage has succeeded, and its answer is no; so has an evacuation that left a
/// machine.
fn verdict(subject: &str, result: &OperationResult) -> Result<(), CliError> {
    match result {
        OperationResult::Verify { damaged, .. } if !damaged.is_empty() => {
            Err(CliError::Damaged { damaged: damaged.clone() })
        }
        OperationResult::Evacuate(report) if !report.empty => Err(CliError::NotEmpty {
            host: subject.to_owned(),
            machines: crate::evacuation_text::stay(report),
        }),
        _ => Ok(()),
    }
}

async fn watch(context: &Context, begun: &Operation, interrupts: &mut Signal) -> Result<Operation, CliError> {
    let display = Display::new(&context.output, begun);
    let mut told = 0;
    let mut rest = None;
    let follow = context.client.watch_operation(begun.id, |operation| {
        display.show(&operation.progress);
        tell_rounds(context, operation, &mut told, &display);
        tell_rest(context, operation, &mut rest);
    });
    pin!(follow);
    let mut cancelled = false;
    let ended = loop {
        select! {
            ended = &mut follow => break ended,
            _ = interrupts.recv() => {
                if cancelled {
                    return Err(CliError::Interrupted { operation: Some(begun.id) });
                }
                cancelled = true;
                display.note(&format!("cancelling {}; Ctrl-C again leaves without waiting", begun.kind));
                cancel(context, begun.id, &display).await;
            }
        }
    };
    display.finish();
    Ok(ended?)
}

/// Tells of the rounds of a migration that have ended since `told` of them had.
fn tell_rounds(context: &Context, operation: &Operation, told: &mut usize, display: &Display) {
    let known = round_text::known(operation);
    for (at, round) in known.iter().enumerate().skip(*told) {
        let last = round_text::is_over(operation) && at + 1 == known.len();
        if !context.output.json {
            display.note(&round_text::sentence(at + 1, round, last));
        } else if let Err(error) = context.output.event(&round_text::Line::new(at + 1, round, last)) {
            // Whoever read along is gone. The result, if it can be written, says all of it again.
            tracing::debug!(%error, "a round was not told");
        }
    }
    *told = known.len().max(*told);
}

/// Tells programs how much of a machine that runs elsewhere is still to come, whenever that has changed.
/// People see a bar.
fn tell_rest(context: &Context, operation: &Operation, told: &mut Option<PostcopyInfo>) {
    let Some(rest) = operation.progress.postcopy.as_ref().filter(|_| context.output.json) else { return };
    if told.as_ref() != Some(rest) {
        *told = Some(rest.clone());
        if let Err(error) = context.output.event(&round_text::Rest::new(rest)) {
            tracing::debug!(%error, "the rest of a machine was not told");
        }
    }
}

/// Asks the daemon to cancel. A refusal (it has just ended, or is past its last way back) is told, not fatal:
/// how the operation really ends comes through the stream.
async fn cancel(context: &Context, id: OperationId, display: &Display) {
    if let Err(error) = context.client.cancel(id).await {
        display.note(&format!("the daemon does not cancel it: {error}"));
    }
}
