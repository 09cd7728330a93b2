//! Meta statements on quotas: limits for the bytes of all versions in a folder, or of those of a member.
//!
//! What counts is summed up anew each time: a sum that is kept beside the versions would have to be changed
//! by all that removes and moves them.

use super::{
    database::{Meta, signed, unsigned},
    driver::query,
};
use crate::{
    meta::{MetaError, Result},
    protocol::NodeId,
};
use whimbrel_wire::PublicKey;

/// Most nested folders; deeper nesting means damage.
const DEEPEST: i64 = 256;

/// Whose bytes a quota limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum QuotaKey {
    Folder(NodeId),
    Member(PublicKey),
}

impl QuotaKey {
    /// As in the columns `folder` and `member`.
    fn columns(self) -> Result<(i64, String)> {
        Ok(match self {
            Self::Folder(folder) => (signed(folder)?, String::new()),
            Self::Member(key) => (0, key.to_string()),
        })
    }
}

impl Meta {
    /// Sets a quota, or removes it.
    pub(crate) async fn set_quota(&self, of: QuotaKey, bytes: Option<u64>) -> Result<()> {
        let (folder, member) = of.columns()?;
        let statement = match bytes {
            Some(bytes) => query(
                "INSERT INTO quota (folder, member, bytes) VALUES ($1, $2, $3)
                 ON CONFLICT (folder, member) DO UPDATE SET bytes = EXCLUDED.bytes",
            )
            .bind(folder)
            .bind(&member)
            .bind(signed(bytes)?),
            None => query("DELETE FROM quota WHERE folder = $1 AND member = $2").bind(folder).bind(&member),
        };
        statement.execute(&self.write).await?;
        self.synced().await
    }

    /// All quotas of folders that exist and of members.
    pub(crate) async fn quotas(&self) -> Result<Vec<(QuotaKey, u64)>> {
        let rows = query(
            "SELECT folder, member, bytes FROM quota
             WHERE folder = 0 OR folder IN (SELECT id FROM node) ORDER BY folder, member",
        )
        .fetch_all(&self.read)
        .await?;
        let mut found = Vec::with_capacity(rows.len());
        for row in rows {
            let of = match unsigned(row.try_get(0)?) {
                0 => {
                    let key = row.try_get::<String>(1)?.parse();
                    QuotaKey::Member(key.map_err(|_| MetaError::Damaged { what: "quota" })?)
                }
                folder => QuotaKey::Folder(folder),
            };
            found.push((of, unsigned(row.try_get(2)?)));
        }
        Ok(found)
    }

    /// Bytes of all versions that count against a quota.
    pub(crate) async fn counted_bytes(&self, of: QuotaKey) -> Result<u64> {
        let row = match of {
            QuotaKey::Folder(folder) => self.bytes_below(folder).await?,
            QuotaKey::Member(key) => {
                let text = "SELECT CAST(COALESCE(SUM(size), 0) AS BIGINT) FROM version WHERE writer = $1";
                query(text).bind(&key.to_string()).fetch_one(&self.read).await?.try_get(0)?
            }
        };
        Ok(unsigned(row))
    }

    async fn bytes_below(&self, node: NodeId) -> Result<i64> {
        query(
            "WITH RECURSIVE below(id) AS (
                 SELECT id FROM node WHERE id = $1
                 UNION SELECT node.id FROM node JOIN below ON node.parent = below.id)
             SELECT CAST(COALESCE(SUM(version.size), 0) AS BIGINT)
             FROM below JOIN version ON version.node = below.id",
        )
        .bind(signed(node)?)
        .fetch_one(&self.read)
        .await?
        .try_get(0)
    }

    /// A folder and all above it.
    pub(crate) async fn folders_above(&self, folder: NodeId) -> Result<Vec<NodeId>> {
        let rows = query(
            "WITH RECURSIVE above(id, parent, depth) AS (
                 SELECT id, parent, 0 FROM node WHERE id = $1
                 UNION SELECT node.id, node.parent, above.depth + 1 FROM node
                     JOIN above ON node.id = above.parent WHERE above.depth < $2)
             SELECT id FROM above",
        )
        .bind(signed(folder)?)
        .bind(DEEPEST)
        .fetch_all(&self.read)
        .await?;
        rows.iter().map(|row| Ok(unsigned(row.try_get(0)?))).collect()
    }

    /// Whether a session has made the commit of this number.
    pub(crate) async fn is_committed(&self, session: u64, number: u32) -> Result<bool> {
        let found = query("SELECT node FROM committed WHERE session = $1 AND number = $2")
            .bind(signed(session)?)
            .bind(i64::from(number));
        Ok(found.fetch_optional(&self.read).await?.is_some())
    }
}
