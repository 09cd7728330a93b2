//! Meta statements on codings of folders, and on versions and chunks that are to be cut into pieces.

use super::{
    chunks::digest_of,
    database::{BATCH, Meta, list, signed, unsigned},
    driver::query,
    versions::pieces_of,
};
use crate::{
    erasure::{Coding, MIN_FRAME},
    meta::{MetaError, Result, reference_counts},
    protocol::{BenefactorId, ChunkId, NodeId},
};
use whimbrel_core::Digest;

/// Most nested folders; deeper nesting means damage.
const DEEPEST: usize = 256;

/// A chunk that is to be cut into pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChunkToCode {
    pub(crate) chunk: ChunkId,
    pub(crate) digest: Digest,
    pub(crate) places: Vec<BenefactorId>,
}

/// A version of which not all chunks were looked at for pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UncodedVersion {
    pub(crate) version: u64,
    pub(crate) file: NodeId,
    pub(crate) folder: NodeId,
    /// Time of the commit in milliseconds.
    pub(crate) created: i64,
    /// The coding of the file itself.
    pub(crate) own: Option<Coding>,
}

fn parse(text: &str) -> Result<Coding> {
    serde_json::from_str(text).map_err(|_| MetaError::Damaged { what: "coding" })
}

impl Meta {
    /// The coding set on a file or folder, and the one that applies: its own or the nearest folder's.
    pub(crate) async fn coding(&self, node: NodeId) -> Result<(Option<Coding>, Option<Coding>)> {
        let mut at = node;
        for depth in 0..DEEPEST {
            let row = query("SELECT parent, coding FROM node WHERE id = $1")
                .bind(signed(at)?)
                .fetch_optional(&self.read)
                .await?;
            let row = row.ok_or(MetaError::NotFound)?;
            if let Some(text) = row.try_get::<Option<String>>(1)? {
                let coding = parse(&text)?;
                return Ok(((depth == 0).then_some(coding), Some(coding)));
            }
            if at == 1 {
                break;
            }
            at = unsigned(row.try_get(0)?);
        }
        Ok((None, None))
    }

    pub(crate) async fn set_coding(&self, node: NodeId, coding: Option<&Coding>) -> Result<()> {
        let text = coding.map(serde_json::to_string).transpose();
        let text = text.map_err(|_| MetaError::Invalid("the coding cannot be stored"))?;
        let done = query("UPDATE node SET coding = $2 WHERE id = $1")
            .bind(signed(node)?)
            .bind(text)
            .execute(&self.write)
            .await?;
        if done == 1 { self.synced().await } else { Err(MetaError::NotFound) }
    }

    /// Whether any file or folder has a coding.
    pub(crate) async fn has_codings(&self) -> Result<bool> {
        let some = query("SELECT id FROM node WHERE coding IS NOT NULL LIMIT 1");
        Ok(some.fetch_optional(&self.read).await?.is_some())
    }

    /// The next versions behind a number of which not all chunks were looked at.
    pub(crate) async fn uncoded_versions(&self, behind: u64, most: usize) -> Result<Vec<UncodedVersion>> {
        let rows = query(
            "SELECT version.id, node.id, node.parent, version.created, node.coding
             FROM version JOIN node ON node.id = version.node
             WHERE version.coded = 0 AND version.id > $1 ORDER BY version.id LIMIT $2",
        )
        .bind(signed(behind)?)
        .bind(most as i64)
        .fetch_all(&self.read)
        .await?;
        let mut found = Vec::with_capacity(rows.len());
        for row in rows {
            found.push(UncodedVersion {
                version: unsigned(row.try_get(0)?),
                file: unsigned(row.try_get(1)?),
                folder: unsigned(row.try_get(2)?),
                created: row.try_get::<i64>(3)? / 1_000_000,
                own: row.try_get::<Option<String>>(4)?.as_deref().map(parse).transpose()?,
            });
        }
        Ok(found)
    }

    /// Chunks of a version that are kept in copies and long enough for pieces, from a part of its map on, and
    /// the part from which to continue. Parts are counted in statements.
    pub(crate) async fn chunks_to_code(
        &self,
        version: u64,
        from: usize,
        most: usize,
    ) -> Result<(Vec<ChunkToCode>, usize)> {
        let pieces = pieces_of(&self.map(version).await?)?;
        let (mut found, mut next) = (Vec::new(), from);
        for batch in reference_counts::numbers(&pieces).chunks(BATCH).skip(from) {
            let text = format!(
                "SELECT id, digest FROM chunk WHERE id IN ({}) AND coded = 0 AND refs > 0 AND stored >= {MIN_FRAME}",
                list(1, batch.len())
            );
            let mut query = query(text);
            for chunk in batch {
                query = query.bind(signed(*chunk)?);
            }
            for row in query.fetch_all(&self.read).await? {
                let (chunk, digest) = (unsigned(row.try_get(0)?), digest_of(row.try_get(1)?)?);
                found.push(ChunkToCode { chunk, digest, places: Vec::new() });
            }
            if found.len() >= most {
                break;
            }
            next += 1;
        }
        found.truncate(most);
        let ids: Vec<ChunkId> = found.iter().map(|one| one.chunk).collect();
        let located = self.locate(&ids).await?;
        found.iter_mut().zip(located).for_each(|(one, located)| one.places = located.places);
        Ok((found, next))
    }

    /// Records that all chunks of a version were looked at.
    pub(crate) async fn mark_coded(&self, version: u64) -> Result<()> {
        query("UPDATE version SET coded = 1 WHERE id = $1")
            .bind(signed(version)?)
            .execute(&self.write)
            .await?;
        self.synced().await
    }
}
