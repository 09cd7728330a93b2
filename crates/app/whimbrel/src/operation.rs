//! Operations: starts one, shows its progress, cancels it on Ctrl-C and prints its result.
//!
//! The daemon owns the operation, which continues if this process dies. The first Ctrl-C asks the daemon to
//! cancel and continues to wait, because only the daemon knows which state is left. The second one exits at
//! once.

use crate::{context::Context, error::CliError, progress::Display, result_text, round_text};
use std::future::Future;
use tokio::{
    pin, select,
    signal::unix::{Signal, SignalKind, signal},
};
use whimbrel_api::{Operation, OperationId, OperationResult, OperationState, PostcopyInfo};
use whimbrel_client::ClientError;

/// Starts an operation with `begin`, waits for its end and prints the result.
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

/// Starts an operation with `begin` and waits until it has succeeded.
pub(crate) async fn complete(
    context: &Context,
    begin: impl Future<Output = Result<Operation, ClientError>>,
) -> Result<Operation, CliError> {
    // Registered before the request is sent, so that no Ctrl-C is missed.
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

/// Turns the result of a verification that found damage, of a repair that did not heal all, or of an
/// evacuation that left machines, into an error.
fn verdict(subject: &str, result: &OperationResult) -> Result<(), CliError> {
    match result {
        OperationResult::Verify { damaged, .. } if !damaged.is_empty() => {
            Err(CliError::Damaged { damaged: damaged.clone() })
        }
        OperationResult::Repair { capsules, .. } => {
            match capsules.iter().map(|capsule| capsule.missing).sum() {
                0 => Ok(()),
                missing => Err(CliError::Missing { missing }),
            }
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
                display.note(&format!("cancelling {}; Ctrl-C again exits without waiting", begun.kind));
                cancel(context, begun.id, &display).await;
            }
        }
    };
    display.finish();
    Ok(ended?)
}

/// Prints the rounds of a migration that have ended, except the first `told` of them.
fn tell_rounds(context: &Context, operation: &Operation, told: &mut usize, display: &Display) {
    let known = round_text::known(operation);
    for (at, round) in known.iter().enumerate().skip(*told) {
        let last = round_text::is_over(operation) && at + 1 == known.len();
        if !context.output.json {
            display.note(&round_text::sentence(at + 1, round, last));
        } else if let Err(error) = context.output.event(&round_text::Line::new(at + 1, round, last)) {
            // The reader is gone. The result contains all rounds again, if it can be written.
            tracing::debug!(%error, "cannot print a round");
        }
    }
    *told = known.len().max(*told);
}

/// Prints the progress of a page fetch for programs whenever it has changed. People see a bar.
fn tell_rest(context: &Context, operation: &Operation, told: &mut Option<PostcopyInfo>) {
    let Some(rest) = operation.progress.postcopy.as_ref().filter(|_| context.output.json) else { return };
    if told.as_ref() != Some(rest) {
        *told = Some(rest.clone());
        if let Err(error) = context.output.event(&round_text::Rest::new(rest)) {
            tracing::debug!(%error, "cannot print the progress of a page fetch");
        }
    }
}

/// Asks the daemon to cancel. A refusal is only printed: the operation may have ended or passed its commit
/// point, and its end arrives through the stream.
async fn cancel(context: &Context, id: OperationId, display: &Display) {
    if let Err(error) = context.client.cancel(id).await {
        display.note(&format!("the daemon does not cancel the operation: {error}"));
    }
}
