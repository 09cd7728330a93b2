//! `session.clone.scp`: what a golden machine costs that is copied whole, as the paper's people did before:
//! its memory and its disk by scp, from a server 32 ms and 30 Mbit/s away.
//!
//! scp sends every byte, so what the files hold does not matter. A full run copies all of it; a short one the
//! first part of the memory alone, and says so.

use super::{
    far::{Far, WAN_30, seconds},
    peers::{Sshd, installed},
};
use crate::harness::{Row, Samples};
use crate::run::Context;
use anyhow::{Result, ensure};
use std::fs::{self, File};

/// The machines of `session.clone.*`.
const MEMORY: u64 = 320 << 20;
const DISK: u64 = 1536 << 20;
/// What a short run copies.
const PART: u64 = 24 << 20;

/// Seconds for all of a machine, or for a part of it.
pub(crate) fn scp(context: &Context) -> Result<Vec<Row>> {
    if !installed("scp") {
        return Ok(Vec::new());
    }
    let files: &[(&str, u64)] = match context.quick {
        true => &[("memory", PART)],
        false => &[("memory", MEMORY), ("disk.raw", DISK)],
    };
    let far = Far::new(WAN_30.mbit, |server| {
        files.iter().try_for_each(|(name, len)| Ok(File::create(server.join(name))?.set_len(*len)?))
    })?;
    let sshd = Sshd::start(&far)?;
    let to = far.dir.path().join("copied");
    fs::create_dir(&to)?;
    let taken = seconds(|| {
        files.iter().try_for_each(|(name, len)| {
            let status = far.namespaces[0].start(sshd.scp(&far.served().join(name), &to))?.wait()?;
            ensure!(status.success(), "scp failed: {status}");
            ensure!(fs::metadata(to.join(name))?.len() == *len, "{name} was not copied whole");
            Ok(())
        })
    })?;
    let what = match context.quick {
        true => format!("{} MiB of the memory alone", PART >> 20),
        false => "320 MiB and the disk of 1.6 GB".to_owned(),
    };
    let row =
        Row::new("session.clone.scp", format!("scp of {what}, {WAN_30}"), "s", &Samples::new(vec![taken]));
    Ok(vec![row])
}
