//! Surplus copies: a benefactor that was away returns with copies that were replaced meanwhile.
//!
//! A copy above the required number is no longer counted if as many others are at benefactors that report
//! and stay, and no nearer to each other without it. It then becomes garbage like any uncounted copy.
//! A chunk that is kept in pieces requires no copies; its copies go once all its pieces are there.
//!
//! Without this, a host that is switched off every night would add a copy of all its chunks every day.

use super::{
    database::{Meta, signed, unsigned},
    driver::query,
    shards::LACKS_PIECE,
};
use crate::{
    domains::Domains,
    meta::Result,
    protocol::{BenefactorId, Inventory},
};

/// Most copies that one inventory stops counting.
const MOST: i64 = 2000;

impl Meta {
    /// Stops counting surplus copies of a benefactor in the range of an inventory; returns how many.
    pub(crate) async fn release_surplus(
        &self,
        benefactor: BenefactorId,
        inventory: &Inventory,
        alive_since: i64,
        domains: &Domains,
    ) -> Result<u64> {
        // Most inventories find none, so the writer is not kept from its work for it.
        let found = query(format!(
            "SELECT chunk.id FROM chunk CROSS JOIN place
             WHERE place.chunk = chunk.id AND place.benefactor = $1 AND chunk.digest >= $2 AND chunk.digest <= $3
                 AND chunk.refs > 0
                 AND chunk.want < (SELECT COUNT(*) FROM place other WHERE other.chunk = chunk.id)
                 AND NOT {LACKS_PIECE}
             LIMIT $4"
        ))
        .bind(i64::from(benefactor))
        .bind(inventory.from.to_vec())
        .bind(inventory.to.to_vec())
        .bind(MOST)
        .fetch_all(&self.read)
        .await?;
        if found.is_empty() {
            return Ok(0);
        }
        let (mut tx, mut released) = (self.write.begin().await?, 0);
        for row in found {
            let chunk = signed(unsigned(row.try_get(0)?))?;
            // Locks the row: two benefactors must not give up the same surplus.
            let lock =
                format!("UPDATE chunk SET want = want WHERE id = $1 AND NOT {LACKS_PIECE} RETURNING want");
            let locked = query(lock).bind(chunk);
            let Some(locked) = locked.fetch_optional(&mut tx).await? else { continue };
            let want = usize::try_from(locked.try_get::<i64>(0)?).unwrap_or(usize::MAX);
            let others = query(
                "SELECT other.benefactor FROM place other JOIN benefactor ON benefactor.id = other.benefactor
                 WHERE other.chunk = $1 AND other.benefactor <> $2 AND benefactor.seen >= $3
                     AND benefactor.lost = 0 AND benefactor.draining = 0",
            );
            let others = others.bind(chunk).bind(i64::from(benefactor)).bind(alive_since);
            let mut rest: Vec<BenefactorId> = Vec::new();
            for row in others.fetch_all(&mut tx).await? {
                rest.push(row.try_get::<i64>(0)? as BenefactorId);
            }
            if rest.len() >= want && domains.can_spare(&rest, benefactor, want) {
                let delete = query("DELETE FROM place WHERE chunk = $1 AND benefactor = $2");
                released += delete.bind(chunk).bind(i64::from(benefactor)).execute(&mut tx).await?;
            }
        }
        self.finish(tx).await?;
        Ok(released)
    }
}
