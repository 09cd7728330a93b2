//! Meta statements on versions as input of the policies.

use super::{
    database::{Meta, RANGES, signed, unsigned},
    driver::{Row, query},
    versions::info,
};
use crate::{
    meta::{MetaError, Result, RetainedVersion},
    policy::{Policy, Retention},
    protocol::NodeId,
};

impl Meta {
    /// Folders with files to which a policy applies that does not retain every version. Of a pool without
    /// such policies, nothing is read.
    pub(crate) async fn policy_folders(&self) -> Result<Vec<NodeId>> {
        let nodes: Vec<String> = self.nodes_with_retention().await?.iter().map(u64::to_string).collect();
        let among = match nodes.len() {
            0 => return Ok(Vec::new()),
            // More only make the statement longer: every file with a policy of its own is read.
            RANGES.. => "policy IS NOT NULL".to_owned(),
            _ => format!("id IN ({})", nodes.join(", ")),
        };
        let rows = query(format!(
            "WITH RECURSIVE below(id) AS (
                 SELECT id FROM node WHERE {among}
                 UNION SELECT node.id FROM node JOIN below ON node.parent = below.id)
             SELECT DISTINCT parent FROM node WHERE folder = 0 AND id IN (SELECT id FROM below) ORDER BY parent"
        ))
        .fetch_all(&self.read)
        .await?;
        rows.iter().map(|row| Ok(unsigned(row.try_get(0)?))).collect()
    }

    /// Folders of the files that have versions behind a number, and the number of the newest version.
    pub(crate) async fn folders_changed_since(&self, version: u64) -> Result<(Vec<NodeId>, u64)> {
        // The newest first: what is committed meanwhile is seen the next time.
        let text = "SELECT CAST(COALESCE(MAX(id), 0) AS BIGINT) FROM version";
        let newest = unsigned(query(text).fetch_one(&self.read).await?.try_get(0)?);
        let rows = query(
            "SELECT DISTINCT node.parent FROM version JOIN node ON node.id = version.node WHERE version.id > $1",
        )
        .bind(signed(version)?)
        .fetch_all(&self.read)
        .await?;
        let folders: Result<Vec<NodeId>> = rows.iter().map(|row| Ok(unsigned(row.try_get(0)?))).collect();
        Ok((folders?, newest))
    }

    /// The versions of the files in a folder, or only of those with a policy of their own.
    pub(crate) async fn versions_in(&self, folder: NodeId, only_own: bool) -> Result<Vec<RetainedVersion>> {
        let which = if only_own { "AND node.policy IS NOT NULL" } else { "" };
        let rows = query(format!(
            "SELECT node.parent, node.id, node.name, node.version, version.id, number, version.size, created, chunks,
                 sent, pinned, version.modified, CAST(CASE WHEN node.policy IS NULL THEN 0 ELSE 1 END AS BIGINT)
             FROM node CROSS JOIN version WHERE version.node = node.id AND node.parent = $1 {which}"
        ))
        .bind(signed(folder)?)
        .fetch_all(&self.read)
        .await?;
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let mut holders = self.holders(None).await?;
        let kept = |row| -> Result<RetainedVersion> {
            let row: &Row = row;
            Ok(RetainedVersion {
                folder: unsigned(row.try_get(0)?),
                node: unsigned(row.try_get(1)?),
                name: row.try_get(2)?,
                current: row.try_get::<i64>(3)? == row.try_get::<i64>(4)?,
                info: info(row, 4, &mut holders)?,
                has_own_policy: row.try_get::<i64>(12)? != 0,
            })
        };
        rows.iter().map(kept).collect()
    }

    /// Files and folders with a policy of their own that does not retain every version.
    async fn nodes_with_retention(&self) -> Result<Vec<NodeId>> {
        let rows =
            query("SELECT id, policy FROM node WHERE policy IS NOT NULL").fetch_all(&self.read).await?;
        let mut nodes = Vec::new();
        for row in rows {
            let policy: Policy = serde_json::from_str(&row.try_get::<String>(1)?)
                .map_err(|_| MetaError::Damaged { what: "policy" })?;
            if policy.keep != Retention::default() {
                nodes.push(unsigned(row.try_get(0)?));
            }
        }
        Ok(nodes)
    }
}
