//! `whimbrel session warm` and `pin`: fetch files into the cache, with progress.

use super::{send_with_progress, size};
use crate::{context::Context, error::CliError, progress::Display};
use std::path::Path;
use whimbrel_api::{Progress, Unit};
use whimbrel_session::client::{ControlRequest, WarmProgress};

/// Has the session fetch files, and shows how far it has come.
pub(super) fn fetch(
    dir: &Path,
    name: &str,
    request: &ControlRequest,
    context: &Context,
) -> Result<(), CliError> {
    let display = Display::titled(&context.output, format!("session {name}"));
    let mut show = |now: WarmProgress| {
        let stage = Progress::stage("fetching", Unit::Bytes);
        display.show(&Progress { done: now.here, total: Some(now.total), ..stage });
    };
    let answered = send_with_progress(dir, name, request, &mut show);
    display.finish();
    let warmed = answered?.warmed.unwrap_or_default();
    context.output.result(&warmed, |WarmProgress { files, total, here }| {
        let left = match total - here {
            0 => String::new(),
            left => format!("; {} are not, because they changed or had no room", size(left)),
        };
        format!("{} of {files} files are in the cache{left}\n", size(*here))
    })
}
