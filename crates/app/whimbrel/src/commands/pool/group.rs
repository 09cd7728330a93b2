//! Files that appear together, such as those of all ranks of a step: `whimbrel pool group`.

use super::PoolArgs;
use crate::{
    context::Context,
    error::CliError,
    table::{count, table},
};
use clap::Subcommand;
use serde::Serialize;
use tokio::runtime::Runtime;
use whimbrel_core::ByteSize;
use whimbrel_pool::{
    client::{Pool, Result},
    protocol::{GroupInfo, NewGroup, NodeId},
};

const EXAMPLES: &str = "\
Examples:
  DIR=$(whimbrel pool group begin /blast/step40 --files 64 --job 4711 --manager MANAGER)
                                                     one rank begins; all write to /mnt/ckpt$DIR
  whimbrel pool group commit /blast/step40 --manager MANAGER      when all have closed their files
  whimbrel pool group ls /blast --manager MANAGER
  whimbrel pool group end 4711 --manager MANAGER     the job has ended well: remove its groups
  whimbrel pool policy /blast --keep-last 3 --manager MANAGER     retain the newest three groups";

/// Make files appear together, such as those of all ranks of a step
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Group {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Begin a group; prints the hidden folder for its files
    Begin(Begin),
    /// Make the files of a group visible, all of them or none
    Commit(OfGroup),
    /// Remove a group that was not committed
    Abandon(OfGroup),
    /// List the groups in a folder
    Ls(Ls),
    /// Remove all groups of a job that has ended well
    End(End),
}

/// Begin a group; prints the hidden folder for its files
///
/// A group that was begun there before and not committed is removed.
#[derive(Debug, clap::Args)]
struct Begin {
    /// Path of the group, like /blast/step40; the folder above it must exist
    path: String,
    /// Files without which the group is not committed, such as one for each rank
    #[arg(long, value_name = "N")]
    files: u32,
    /// Job that it belongs to
    #[arg(long, default_value = "", hide_default_value = true)]
    job: String,
    #[command(flatten)]
    member: PoolArgs,
}

/// The group that an action is about.
#[derive(Debug, clap::Args)]
struct OfGroup {
    /// Path of the group, like /blast/step40
    path: String,
    #[command(flatten)]
    member: PoolArgs,
}

/// List the groups in a folder
#[derive(Debug, clap::Args)]
struct Ls {
    /// Folder, like /blast
    path: String,
    #[command(flatten)]
    member: PoolArgs,
}

/// Remove all groups of a job that has ended well
///
/// Groups with a pinned version stay.
#[derive(Debug, clap::Args)]
struct End {
    /// Job, as it was named to `begin`
    job: String,
    #[command(flatten)]
    member: PoolArgs,
}

#[derive(Debug, Serialize)]
struct Folder {
    folder: String,
}

#[derive(Debug, Serialize)]
struct Ended {
    removed: u64,
    pinned: u64,
}

/// The folder above a path, and the last name of it.
async fn split<'a>(pool: &Pool, path: &'a str) -> Result<(NodeId, &'a str)> {
    let (above, name) = path.trim_end_matches('/').rsplit_once('/').unwrap_or(("", path));
    Ok((pool.find(above).await?.id, name))
}

fn beside(path: &str, name: &str) -> String {
    let above = path.trim_end_matches('/').rsplit_once('/').map_or("", |(above, _)| above);
    format!("{above}/{name}")
}

impl Group {
    pub(super) fn run(self, context: &Context, runtime: &Runtime) -> std::result::Result<(), CliError> {
        match self.action {
            Action::Begin(args) => args.run(context, runtime),
            Action::Commit(args) => args.commit(context, runtime),
            Action::Abandon(args) => args.abandon(context, runtime),
            Action::Ls(args) => args.run(context, runtime),
            Action::End(args) => args.run(context, runtime),
        }
    }
}

impl Begin {
    fn run(self, context: &Context, runtime: &Runtime) -> std::result::Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let group = NewGroup { files: self.files, job: self.job, mode: 0o755, uid, gid };
        let begun = pool.block(async {
            let (parent, name) = split(&pool, &self.path).await?;
            pool.begin_group(parent, name, group).await
        });
        let folder = beside(&self.path, &begun.map_err(CliError::Pool)?.name);
        context.output.result(&Folder { folder }, |shown| shown.folder.clone())
    }
}

impl OfGroup {
    fn commit(self, context: &Context, runtime: &Runtime) -> std::result::Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        let committed = pool.block(async {
            let (parent, name) = split(&pool, &self.path).await?;
            pool.commit_group(parent, name).await
        });
        let folder = beside(&self.path, &committed.map_err(CliError::Pool)?.name);
        context.output.result(&Folder { folder }, |shown| format!("{} is complete", shown.folder))
    }

    fn abandon(self, context: &Context, runtime: &Runtime) -> std::result::Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        let abandoned = pool.block(async {
            let (parent, name) = split(&pool, &self.path).await?;
            pool.abandon_group(parent, name).await
        });
        abandoned.map_err(CliError::Pool)?;
        context.output.result(&Folder { folder: self.path }, |shown| format!("{} is removed", shown.folder))
    }
}

impl Ls {
    fn run(self, context: &Context, runtime: &Runtime) -> std::result::Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        let groups = pool.block(async { pool.groups(pool.find(&self.path).await?.id).await });
        context.output.result(groups.map_err(CliError::Pool)?.as_slice(), |groups: &[GroupInfo]| {
            let rows = groups.iter().map(|group| {
                let state = if group.is_committed { "complete" } else { "open" };
                let pinned = if group.pinned { "pinned" } else { "" };
                [
                    group.name.clone(),
                    state.to_owned(),
                    format!("{} of {}", group.files, group.expected),
                    ByteSize(group.size).to_string(),
                    group.job.clone(),
                    pinned.to_owned(),
                ]
            });
            table(["GROUP", "STATE", "FILES", "SIZE", "JOB", ""], rows, "no groups")
        })
    }
}

impl End {
    fn run(self, context: &Context, runtime: &Runtime) -> std::result::Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        let (removed, pinned) = pool.block(pool.end_job(&self.job)).map_err(CliError::Pool)?;
        context.output.result(&Ended { removed, pinned }, |ended| {
            let stay = match ended.pinned {
                0 => String::new(),
                pinned => format!("; {} with pinned versions stay", count(pinned, "group")),
            };
            format!("{} removed{stay}", count(ended.removed, "group"))
        })
    }
}
