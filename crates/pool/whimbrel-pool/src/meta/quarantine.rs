//! The quarantine after a restore: chunks that the manager does not know are not deleted.
//!
//! They belong to files that were written after the backup, and a newer backup may turn up. The counter
//! `quarantine` has the end of it; a restore writes the length there, as a negative number.

use super::{database::Meta, driver::query};
use crate::{meta::Result, protocol::BenefactorId};

/// Chunks that leave the repair queue in one statement.
const HEALED: u64 = 20_000;

impl Meta {
    /// Starts a quarantine that waits for a manager, and returns its end, 0 for none.
    pub(crate) async fn start_quarantine(&self, now: i64) -> Result<i64> {
        query("UPDATE counter SET value = $1 - value WHERE name = 'quarantine' AND value < 0")
            .bind(now)
            .execute(&self.write)
            .await?;
        self.synced().await?;
        let row =
            query("SELECT value FROM counter WHERE name = 'quarantine'").fetch_optional(&self.read).await?;
        row.map_or(Ok(0), |row| row.try_get(0))
    }

    /// Removes chunks from the repair queue of which `counted` benefactors have enough copies: after a
    /// restore, all chunks are in it. Returns whether there may be more.
    pub(crate) async fn remove_healed(&self, counted: &[BenefactorId]) -> Result<bool> {
        let counted: Vec<String> = counted.iter().map(ToString::to_string).collect();
        if counted.is_empty() {
            return Ok(false);
        }
        let removed = query(format!(
            "DELETE FROM repair WHERE chunk IN (
                 SELECT repair.chunk FROM repair JOIN chunk ON chunk.id = repair.chunk
                 WHERE repair.since = 0 AND chunk.want <=
                     (SELECT COUNT(*) FROM place WHERE place.chunk = chunk.id AND place.benefactor IN ({}))
                 LIMIT {HEALED})",
            counted.join(", ")
        ))
        .execute(&self.write)
        .await?;
        Ok(removed == HEALED)
    }
}
