//! Meta statements on groups: files that appear together, such as the checkpoints of all ranks of a step.
//!
//! A group begins as a folder with a hidden name beside its later one. Its commit renames that folder, in
//! one transaction that also counts its files, so its files are there together or not at all. A committed
//! group is removed as a whole only.

use super::{
    database::{Meta, signed, unsigned},
    driver::{Row, Tx, query},
    files, pins, versions,
};
use crate::{
    meta::{MetaError, Result},
    protocol::{GroupInfo, MAX_NAME, NewGroup, NewNode, Node, NodeId},
};

/// Most nested folders; deeper nesting means damage.
const DEEPEST: usize = 256;
/// Name of an open group's folder: this, its name, and [`SUFFIX`].
const PREFIX: &str = ".";
const SUFFIX: &str = ".group";

const COLUMNS: &str = "step_group.node, node.parent, node.name, step_group.files, step_group.job,
    step_group.started, step_group.committed";

/// A group with its folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupRow {
    pub(crate) node: NodeId,
    pub(crate) parent: NodeId,
    /// Name of its folder by now.
    pub(crate) folder: String,
    pub(crate) files: u64,
    pub(crate) job: String,
    pub(crate) started: i64,
    /// 0 while it is open.
    pub(crate) committed: i64,
}

impl GroupRow {
    fn of(row: &Row) -> Result<Self> {
        Ok(Self {
            node: unsigned(row.try_get(0)?),
            parent: unsigned(row.try_get(1)?),
            folder: row.try_get(2)?,
            files: unsigned(row.try_get(3)?),
            job: row.try_get(4)?,
            started: row.try_get(5)?,
            committed: row.try_get(6)?,
        })
    }

    fn is_open(&self) -> bool {
        self.committed == 0
    }

    /// Name without what hides an open group.
    pub(crate) fn name(&self) -> &str {
        let hidden = self.folder.strip_prefix(PREFIX).and_then(|name| name.strip_suffix(SUFFIX));
        if self.is_open() { hidden.unwrap_or(&self.folder) } else { &self.folder }
    }
}

/// Name of the folder of an open group.
fn hidden(name: &str) -> Result<String> {
    let hidden = format!("{PREFIX}{name}{SUFFIX}");
    if name.is_empty() || hidden.len() > MAX_NAME {
        return Err(MetaError::Invalid("the name of the group is empty or too long"));
    }
    Ok(hidden)
}

impl Meta {
    /// Begins a group and returns its folder. One that was begun under this name before and is still open is
    /// removed with its files.
    pub(crate) async fn begin_group(
        &self,
        (parent, name): (NodeId, &str),
        group: &NewGroup,
        now: i64,
    ) -> Result<Node> {
        files::check_name(name)?;
        let hidden = hidden(name)?;
        let mut tx = self.write.begin().await?;
        if files::find(&mut tx, parent, name).await?.is_some() {
            return Err(MetaError::Exists);
        }
        if let Some(old) = files::find(&mut tx, parent, &hidden).await? {
            let open = by_node(&mut tx, old.id).await?.ok_or(MetaError::Exists)?;
            remove_in(&mut tx, open.node, now).await?;
        }
        let NewGroup { files, job, mode, uid, gid } = group.clone();
        let make = NewNode { parent, name: hidden, folder: true, mode, uid, gid };
        let folder = files::make_in(&mut tx, &make, now).await?;
        query("INSERT INTO step_group (node, files, job, started, committed) VALUES ($1, $2, $3, $4, 0)")
            .bind(signed(folder.id)?)
            .bind(i64::from(files))
            .bind(&job)
            .bind(now)
            .execute(&mut tx)
            .await?;
        self.finish(tx).await?;
        Ok(folder)
    }

    /// Commits an open group: its folder gets its name. Refused if it has fewer files than it was begun
    /// for. A repeated commit changes nothing. Earlier open groups of the job beside it, which no rank
    /// completes any more, are removed.
    pub(crate) async fn commit_group(&self, (parent, name): (NodeId, &str), now: i64) -> Result<Node> {
        let mut tx = self.write.begin().await?;
        let Some(folder) = files::find(&mut tx, parent, &hidden(name)?).await? else {
            return self.committed_group(tx, parent, name).await;
        };
        let group = by_node(&mut tx, folder.id).await?.ok_or(MetaError::NotFound)?;
        let found = count_files(&mut tx, folder.id).await?;
        if found < group.files {
            return Err(MetaError::Incomplete { found, expected: group.files });
        }
        if files::find(&mut tx, parent, name).await?.is_some() {
            return Err(MetaError::Exists);
        }
        files::move_to(&mut tx, folder.id, (parent, name), now).await?;
        query("UPDATE step_group SET committed = $2 WHERE node = $1")
            .bind(signed(folder.id)?)
            .bind(now)
            .execute(&mut tx)
            .await?;
        for old in open_before(&mut tx, &group).await? {
            remove_in(&mut tx, old, now).await?;
        }
        let node = files::get(&mut tx, folder.id).await?.ok_or(MetaError::NotFound)?;
        self.finish(tx).await?;
        Ok(node)
    }

    /// The answer to a commit that is repeated, because its answer was lost.
    async fn committed_group(&self, mut tx: Tx<'_>, parent: NodeId, name: &str) -> Result<Node> {
        let node = files::find(&mut tx, parent, name).await?.ok_or(MetaError::NotFound)?;
        let group = by_node(&mut tx, node.id).await?.filter(|group| !group.is_open());
        drop(tx);
        group.ok_or(MetaError::NotFound)?;
        self.synced().await?;
        Ok(node)
    }

    /// Removes an open group with its files.
    pub(crate) async fn abandon_group(&self, (parent, name): (NodeId, &str), now: i64) -> Result<()> {
        let mut tx = self.write.begin().await?;
        let folder = files::find(&mut tx, parent, &hidden(name)?).await?.ok_or(MetaError::NotFound)?;
        let group = by_node(&mut tx, folder.id).await?.ok_or(MetaError::NotFound)?;
        remove_in(&mut tx, group.node, now).await?;
        self.finish(tx).await
    }

    /// Removes a group with all its files, or nothing of it if one of them is pinned. True if it was there.
    pub(crate) async fn remove_group(&self, node: NodeId, now: i64) -> Result<bool> {
        let mut tx = self.write.begin().await?;
        if by_node(&mut tx, node).await?.is_none() {
            return Ok(false);
        }
        remove_in(&mut tx, node, now).await?;
        self.finish(tx).await?;
        Ok(true)
    }

    /// All groups of all folders, those that were begun first come first.
    pub(crate) async fn groups(&self) -> Result<Vec<GroupRow>> {
        let text = format!(
            "SELECT {COLUMNS} FROM step_group JOIN node ON node.id = step_group.node ORDER BY started, node.id"
        );
        query(text).fetch_all(&self.read).await?.iter().map(GroupRow::of).collect()
    }

    /// The groups in a folder, with the files that they have.
    pub(crate) async fn groups_in(&self, folder: NodeId) -> Result<Vec<GroupInfo>> {
        let mut found = Vec::new();
        for group in self.groups().await?.into_iter().filter(|group| group.parent == folder) {
            let (files, size, pinned) = self.contents(group.node).await?;
            found.push(GroupInfo {
                name: group.name().to_owned(),
                is_committed: !group.is_open(),
                expected: group.files,
                files,
                size,
                pinned,
                job: group.job,
                created: group.committed.max(group.started) * 1_000_000,
            });
        }
        Ok(found)
    }

    /// Number and bytes of the files of a group, and whether a version of one is pinned.
    pub(crate) async fn contents(&self, group: NodeId) -> Result<(u64, u64, bool)> {
        let text = format!(
            "{BELOW} SELECT COUNT(*), CAST(COALESCE(SUM(size), 0) AS BIGINT),
                 (SELECT COUNT(*) FROM version WHERE node IN (SELECT id FROM below)
                  AND (pinned <> 0 OR id IN (SELECT version FROM held)))
             FROM node WHERE folder = 0 AND version > 0 AND id IN (SELECT id FROM below)"
        );
        let row = query(text).bind(signed(group)?).fetch_one(&self.read).await?;
        Ok((unsigned(row.try_get(0)?), unsigned(row.try_get(1)?), row.try_get::<i64>(2)? > 0))
    }

    /// Whether a folder is that of a group, or below it.
    pub(crate) async fn is_in_group(&self, folder: NodeId) -> Result<bool> {
        let mut at = folder;
        for _ in 0..DEEPEST {
            if at <= 1 {
                return Ok(false);
            }
            let row = query(
                "SELECT parent, (SELECT COUNT(*) FROM step_group WHERE step_group.node = node.id)
                 FROM node WHERE id = $1",
            )
            .bind(signed(at)?)
            .fetch_optional(&self.read)
            .await?;
            let Some(row) = row else { return Ok(false) };
            if row.try_get::<i64>(1)? > 0 {
                return Ok(true);
            }
            at = unsigned(row.try_get(0)?);
        }
        Err(MetaError::Invalid("folders are nested too deeply"))
    }
}

/// Start of a statement with a table `below` of a folder and everything in it.
const BELOW: &str = "WITH RECURSIVE below(id) AS (
    SELECT id FROM node WHERE id = $1 UNION SELECT node.id FROM node JOIN below ON node.parent = below.id)";

async fn by_node(tx: &mut Tx<'_>, node: NodeId) -> Result<Option<GroupRow>> {
    let text = format!(
        "SELECT {COLUMNS} FROM step_group JOIN node ON node.id = step_group.node WHERE step_group.node = $1"
    );
    let row = query(text).bind(signed(node)?).fetch_optional(&mut *tx).await?;
    row.map(|row| GroupRow::of(&row)).transpose()
}

/// Files of a group that were committed.
async fn count_files(tx: &mut Tx<'_>, group: NodeId) -> Result<u64> {
    let text = format!(
        "{BELOW} SELECT COUNT(*) FROM node WHERE folder = 0 AND version > 0 AND id IN (SELECT id FROM below)"
    );
    Ok(unsigned(query(text).bind(signed(group)?).fetch_one(&mut *tx).await?.try_get(0)?))
}

/// Open groups of the same job in the same folder that were begun before; none without a job.
async fn open_before(tx: &mut Tx<'_>, group: &GroupRow) -> Result<Vec<NodeId>> {
    if group.job.is_empty() {
        return Ok(Vec::new());
    }
    let rows = query(
        "SELECT step_group.node FROM step_group JOIN node ON node.id = step_group.node
         WHERE node.parent = $1 AND step_group.job = $2 AND step_group.committed = 0 AND step_group.node < $3",
    )
    .bind(signed(group.parent)?)
    .bind(&group.job)
    .bind(signed(group.node)?)
    .fetch_all(&mut *tx)
    .await?;
    rows.iter().map(|row| Ok(unsigned(row.try_get(0)?))).collect()
}

/// Removes the folder of a group with everything in it. Refused if a version is pinned.
async fn remove_in(tx: &mut Tx<'_>, group: NodeId, now: i64) -> Result<()> {
    let folder = files::get(tx, group).await?.ok_or(MetaError::NotFound)?;
    let rows =
        query(format!("{BELOW} SELECT node.id, node.folder FROM node WHERE id IN (SELECT id FROM below)"))
            .bind(signed(group)?)
            .fetch_all(&mut *tx)
            .await?;
    let mut all = Vec::with_capacity(rows.len());
    for row in rows {
        all.push((unsigned(row.try_get(0)?), row.try_get::<i64>(1)? != 0));
    }
    for (file, _) in all.iter().filter(|(_, is_folder)| !is_folder) {
        pins::refuse_pinned(tx, *file, None, now).await?;
        versions::drop_all(tx, *file, now).await?;
    }
    for (node, _) in &all {
        files::delete(tx, *node).await?;
    }
    query("DELETE FROM step_group WHERE node = $1").bind(signed(group)?).execute(&mut *tx).await?;
    files::touch(tx, folder.parent, now).await
}
