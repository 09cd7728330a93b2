//! Meta statements on pins of holders, which keep versions that machines use.
//!
//! A pin has an end, which its holder extends by renewing it; after its end it has no effect. Pinning and
//! removing a version both lock its row first, so one of the two is refused.

use super::{
    database::{Meta, signed, unsigned},
    driver::{Row, Tx, query},
};
use crate::{
    meta::{MetaError, PinRow, Result},
    protocol::NodeId,
};
use std::collections::HashMap;

/// Most holders named in a refusal.
const NAMED: usize = 4;

impl Meta {
    /// Pins a version for a holder until `ends`, or renews the pin.
    pub(crate) async fn hold_pin(
        &self,
        version: u64,
        owner: &[u8],
        holder: &str,
        now: i64,
        ends: i64,
    ) -> Result<()> {
        let mut tx = self.write.begin().await?;
        let text = format!("SELECT id FROM version WHERE id = $1{}", tx.row_lock());
        let found = query(text).bind(signed(version)?).fetch_optional(&mut tx).await?;
        found.ok_or(MetaError::NotFound)?;
        query(
            "INSERT INTO held (version, owner, holder, since, ends) VALUES ($1, $2, $3, $4, $5)
             ON CONFLICT (version, owner, holder) DO UPDATE SET ends = $5",
        )
        .bind(signed(version)?)
        .bind(owner.to_vec())
        .bind(holder)
        .bind(now)
        .bind(ends)
        .execute(&mut tx)
        .await?;
        self.finish(tx).await
    }

    /// Removes a holder's pins: those of `owner`, or of any owner with this name.
    pub(crate) async fn release_pin(&self, version: u64, owner: Option<&[u8]>, holder: &str) -> Result<()> {
        let own = if owner.is_some() { "AND owner = $3" } else { "" };
        let text = format!("DELETE FROM held WHERE version = $1 AND holder = $2 {own}");
        let query = query(text).bind(signed(version)?).bind(holder);
        let query = match owner {
            Some(owner) => query.bind(owner.to_vec()),
            None => query,
        };
        let done = query.execute(&self.write).await?;
        if done > 0 { self.synced().await } else { Err(MetaError::NotFound) }
    }

    /// All pins of holders, or those of one owner.
    pub(crate) async fn held_pins(&self, owner: Option<&[u8]>) -> Result<Vec<PinRow>> {
        let own = if owner.is_some() { "WHERE owner = $1" } else { "" };
        let text = format!(
            "SELECT version.node, version.number, version.id, version.size, holder, since, ends
             FROM held JOIN version ON version.id = held.version {own} ORDER BY version.node, version.number, holder"
        );
        let query = query(text);
        let query = match owner {
            Some(owner) => query.bind(owner.to_vec()),
            None => query,
        };
        let rows = query.fetch_all(&self.read).await?;
        let pin = |row: &Row| {
            let held = Some((row.try_get(4)?, row.try_get(5)?, row.try_get(6)?));
            Ok(PinRow { held, ..pin_of(row)? })
        };
        rows.iter().map(pin).collect()
    }

    pub(crate) async fn user_pins(&self) -> Result<Vec<PinRow>> {
        let rows =
            query("SELECT node, number, id, size FROM version WHERE pinned <> 0 ORDER BY node, number")
                .fetch_all(&self.read)
                .await?;
        rows.iter().map(pin_of).collect()
    }

    pub(crate) async fn expire_pins(&self, now: i64) -> Result<u64> {
        let gone = query("DELETE FROM held WHERE ends < $1").bind(now).execute(&self.write).await?;
        Ok(gone)
    }

    /// Extends all pins to `ends` at least, because they could not be renewed without a manager.
    pub(crate) async fn extend_pins(&self, ends: i64) -> Result<()> {
        query("UPDATE held SET ends = $1 WHERE ends < $1").bind(ends).execute(&self.write).await?;
        Ok(())
    }

    /// The holders of each version, of one file or of all.
    pub(crate) async fn holders(&self, node: Option<NodeId>) -> Result<HashMap<u64, Vec<String>>> {
        let rows = match node {
            None => query("SELECT version, holder FROM held ORDER BY holder").fetch_all(&self.read).await?,
            Some(node) => {
                let text = "SELECT version, holder FROM held JOIN version ON version.id = held.version
                     WHERE version.node = $1 ORDER BY holder";
                query(text).bind(signed(node)?).fetch_all(&self.read).await?
            }
        };
        let mut out: HashMap<u64, Vec<String>> = HashMap::new();
        for row in rows {
            out.entry(unsigned(row.try_get(0)?)).or_default().push(row.try_get(1)?);
        }
        Ok(out)
    }
}

fn pin_of(row: &Row) -> Result<PinRow> {
    Ok(PinRow {
        node: unsigned(row.try_get(0)?),
        number: row.try_get::<i64>(1)? as u32,
        version: unsigned(row.try_get(2)?),
        size: unsigned(row.try_get(3)?),
        held: None,
    })
}

/// Refuses if a version of a file is pinned: the one with this number, or any. Nobody can pin one of them
/// before the transaction ends.
pub(crate) async fn refuse_pinned(
    tx: &mut Tx<'_>,
    node: NodeId,
    number: Option<u32>,
    now: i64,
) -> Result<()> {
    let text = format!(
        "SELECT id, number, pinned FROM version WHERE node = $1 ORDER BY number DESC{}",
        tx.row_lock()
    );
    let rows = query(text).bind(signed(node)?).fetch_all(&mut *tx).await?;
    for row in rows {
        let (id, found, pinned): (i64, i64, i64) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        if number.is_some_and(|number| i64::from(number) != found) {
            continue;
        }
        let held =
            query("SELECT holder FROM held WHERE version = $1 AND ends >= $2 ORDER BY holder LIMIT $3")
                .bind(id)
                .bind(now)
                .bind(NAMED as i64)
                .fetch_all(&mut *tx)
                .await?;
        let mut by: Vec<String> =
            held.iter().map(|row| row.try_get(0)).collect::<std::result::Result<_, _>>()?;
        by.extend((pinned != 0).then(|| "hand".to_owned()));
        if !by.is_empty() {
            return Err(MetaError::Pinned { number: found as u32, by: by.join(", ") });
        }
    }
    Ok(())
}

pub(crate) async fn delete_orphaned_pins(tx: &mut Tx<'_>) -> Result<()> {
    query("DELETE FROM held WHERE NOT EXISTS (SELECT 1 FROM version WHERE version.id = held.version)")
        .execute(&mut *tx)
        .await?;
    Ok(())
}
