//! Pins that members hold on versions: a pin ends unless its holder renews it.
//!
//! The time of a pin is far longer than the interval of renewals, so a holder that was away for days still
//! finds its version. Only the manager's clock counts. A manager that restarts gives every holder time to
//! renew.

use super::{ManagerService, invalid, service::payload};
use crate::{
    meta::{MetaError, PinRow},
    protocol::{HoldPin, ListPins, MAX_HOLDER, PinHolder, PinInfo, ReleasePin},
};
use bytes::Bytes;
use whimbrel_wire::{Answer, Call, PeerIdentity, Refusal, Reply, Request};

/// After a restart, every pin lasts at least this part of the pin timeout.
const GRACE_PART: u32 = 4;

/// Seconds between two times in milliseconds; 0 if the second is earlier.
fn seconds(from: i64, to: i64) -> u64 {
    u64::try_from((to - from) / 1000).unwrap_or(0)
}

impl ManagerService {
    pub(super) async fn pins(&self, identity: &PeerIdentity, request: Request) -> Answer {
        let PeerIdentity::Key(key) = identity else { return Err(invalid("a holder must have a key")) };
        let (meta, now) = (&self.shared.meta, self.now());
        match request.kind {
            HoldPin::KIND => {
                let (version, holder) = request.decode::<HoldPin>()?;
                let odd = |letter: char| letter.is_control();
                if holder.is_empty() || holder.len() > MAX_HOLDER || holder.contains(odd) {
                    return Err(invalid("the name of a holder must have 1 to 200 bytes"));
                }
                meta.hold_pin(version, &key.0, &holder, now, now.saturating_add(self.pin_timeout_millis()))
                    .await?;
                let seconds = u32::try_from(self.shared.pin_timeout.as_secs()).unwrap_or(u32::MAX);
                Reply::of::<HoldPin>(&seconds, Bytes::new())
            }
            ReleasePin::KIND => {
                let (version, holder, anybody) = request.decode::<ReleasePin>()?;
                let owner = (!anybody).then_some(&key.0[..]);
                meta.release_pin(version, owner, &holder).await?;
                self.policies_changed();
                Reply::of::<ReleasePin>(&(), Bytes::new())
            }
            ListPins::KIND => {
                let own = request.decode::<ListPins>()?;
                let mut rows = meta.held_pins(own.then_some(&key.0[..])).await?;
                if !own {
                    rows.extend(meta.user_pins().await?);
                }
                Reply::of::<ListPins>(&(), payload(&self.described(rows).await?)?)
            }
            other => Err(Refusal::unknown_kind(other)),
        }
    }

    async fn described(&self, rows: Vec<PinRow>) -> Result<Vec<PinInfo>, Refusal> {
        let (mut pins, now) = (Vec::with_capacity(rows.len()), self.now());
        for row in rows {
            let path = match self.shared.meta.path(row.node).await {
                // The file was removed meanwhile.
                Err(MetaError::NotFound) => continue,
                path => path?,
            };
            let held = row.held.map(|(holder, since, ends)| PinHolder {
                holder,
                since: seconds(since, now),
                left: seconds(now, ends),
            });
            pins.push(PinInfo { path, version: row.number, id: row.version, size: row.size, held });
        }
        Ok(pins)
    }

    /// Extends all pins after a restart, because holders could not renew them without a manager.
    pub(super) async fn prolong_pins(&self) -> Result<(), MetaError> {
        self.shared
            .meta
            .extend_pins(self.now().saturating_add(self.pin_timeout_millis() / i64::from(GRACE_PART)))
            .await
    }

    fn pin_timeout_millis(&self) -> i64 {
        i64::try_from(self.shared.pin_timeout.as_millis()).unwrap_or(i64::MAX / 2)
    }
}
