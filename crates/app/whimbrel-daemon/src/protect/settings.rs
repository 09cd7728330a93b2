//! Protection settings: checks a request to protect a machine and converts it for the protection crate.

use crate::{core::error::DaemonError, migrate::source::meant_rate};
use std::time::Duration;
use whimbrel_api::{ProtectBlock, ProtectMode, ProtectRequest};
use whimbrel_core::{HostName, MachineName, WitnessAddress};
use whimbrel_protect::{
    codec::{BlockSize, CodecOptions},
    protocol::SnapshotRule,
};

/// Lengths of epochs, in milliseconds.
const EPOCHS: std::ops::RangeInclusive<u64> = 25..=1000;
const EPOCH: u64 = 50;
/// Factors by which epochs may be longer while no output waits.
const STRETCHES: std::ops::RangeInclusive<u32> = 1..=20;
const STRETCH: u32 = 4;
/// Lengths of epochs in mode replay, where output does not wait for them.
const REPLAY_EPOCHS: std::ops::RangeInclusive<u64> = 100..=10_000;
const REPLAY_EPOCH: u64 = 1000;
/// Lease terms, in milliseconds. The default takes over within half a second; a host that may be busy for
/// longer than that at a time needs more.
const TERMS: std::ops::RangeInclusive<u64> = 200..=60_000;
const TERM: u64 = 400;
/// Intervals between stored epochs, in milliseconds, and the number of stored epochs.
const SNAPSHOT_INTERVALS: std::ops::RangeInclusive<u64> = 1000..=7 * 86_400_000;
const SNAPSHOT_COUNTS: std::ops::RangeInclusive<u32> = 1..=10_000;
/// Most spare hosts.
const SPARES_MAX: usize = 16;

/// The settings of a protection.
#[derive(Debug, Clone)]
pub(in crate::protect) struct ProtectionSettings {
    pub(in crate::protect) request: ProtectRequest,
    pub(in crate::protect) epoch: Duration,
    /// Factor by which an epoch may be longer while no output waits.
    pub(in crate::protect) stretch: u32,
    pub(in crate::protect) term: Duration,
    pub(in crate::protect) coding: CodecOptions,
    pub(in crate::protect) snapshots: Option<SnapshotRule>,
    /// Most bytes a second that are sent to the standby.
    pub(in crate::protect) rate_max: Option<u64>,
    /// Whether output waits until the standby has the inputs, instead of the epoch.
    pub(in crate::protect) replay: bool,
}

impl ProtectionSettings {
    pub(in crate::protect) fn of(request: &ProtectRequest) -> Result<Self, DaemonError> {
        let within = |what, value: Option<u64>, range: std::ops::RangeInclusive<u64>, usual| {
            let value = value.unwrap_or(usual);
            match range.contains(&value) {
                true => Ok(Duration::from_millis(value)),
                false => Err(DaemonError::invalid(format!(
                    "{what} of {value} ms is not between {} and {} ms",
                    range.start(),
                    range.end()
                ))),
            }
        };
        let replay = request.mode == ProtectMode::Replay;
        let (epochs, usual) = if replay { (REPLAY_EPOCHS, REPLAY_EPOCH) } else { (EPOCHS, EPOCH) };
        let epoch = within("an epoch", request.epoch_ms, epochs, usual)?;
        if replay && request.group.is_some() {
            return Err(DaemonError::invalid(
                "mode replay releases output before an epoch is complete: it cannot be used in a group",
            ));
        }
        let stretch = stretch(request)?;
        let term = within("a lease", request.lease_ms, TERMS, TERM)?;
        let then = request.then.as_ref();
        if then.is_some_and(|then| {
            *then == request.host || request.witness.as_ref().and_then(WitnessAddress::host) == Some(then)
        }) {
            return Err(DaemonError::invalid("the next standby cannot be the standby or the witness"));
        }
        check_spares(request)?;
        let keep = request.keep.map(|rule| {
            within("the interval between stored epochs", Some(rule.every_ms), SNAPSHOT_INTERVALS, 0)?;
            match SNAPSHOT_COUNTS.contains(&rule.count) {
                true => Ok(SnapshotRule { every_ms: rule.every_ms, count: rule.count }),
                false => Err(DaemonError::invalid(format!(
                    "{} stored epochs are not between {} and {}",
                    rule.count,
                    SNAPSHOT_COUNTS.start(),
                    SNAPSHOT_COUNTS.end()
                ))),
            }
        });
        if let Some(group) = &request.group
            && group.parse::<MachineName>().is_err()
        {
            return Err(DaemonError::invalid(format!(
                "{group:?} is not a valid group name: the rules are those of machine names"
            )));
        }
        let (coding, keep) = (coding(request)?, keep.transpose()?);
        let rate_max = meant_rate("maximum rate", request.rate_max)?;
        Ok(Self { request: request.clone(), epoch, stretch, term, coding, snapshots: keep, rate_max, replay })
    }

    /// The protection that the standby requests after a takeover from `primary`. Where a next standby
    /// is named,
    /// the two alternate; otherwise it is the first spare, and the primary becomes the last.
    pub(in crate::protect) fn next_protection(&self, primary: &HostName) -> Option<String> {
        let mut next = self.request.clone();
        match &self.request.then {
            Some(then) => {
                next.host = then.clone();
                next.then = Some(self.request.host.clone());
            }
            None => {
                next.host = self.request.spares.first()?.clone();
                next.spares.remove(0);
                next.spares.push(primary.clone());
            }
        }
        Some(serde_json::to_string(&next).expect("names and numbers"))
    }

    /// The protection after the standby was lost: the first spare is the standby, and the lost one
    /// becomes the
    /// last spare. None without spares.
    pub(in crate::protect) fn with_next_spare(&self) -> Option<Self> {
        let mut request = self.request.clone();
        let next = request.spares.first()?.clone();
        request.spares.remove(0);
        request.spares.push(std::mem::replace(&mut request.host, next));
        Some(Self { request, ..self.clone() })
    }

    /// Most bytes of the table of hashes: enough if every page of the guest's memory is written, which is
    /// 1/16 of memory with blocks of 64 bytes, 1/32 with 128, 1/64 with 256; and a quarter of that for pages
    /// of disks.
    pub(in crate::protect) fn hash_bytes_max(&self, memory: u64) -> usize {
        let blocks = self.coding.block.in_page() as u64;
        (memory / 4096 * blocks * 5 + (1 << 20)) as usize
    }
}

/// Checks that the spares are hosts with no other part in the protection.
fn check_spares(request: &ProtectRequest) -> Result<(), DaemonError> {
    let ProtectRequest { host, witness, then, spares, .. } = request;
    if spares.len() > SPARES_MAX {
        return Err(DaemonError::invalid(format!("{} spare hosts are more than {SPARES_MAX}", spares.len())));
    }
    let witness = witness.as_ref().and_then(WitnessAddress::host);
    for (index, spare) in spares.iter().enumerate() {
        if spare == host || Some(spare) == witness || spares[..index].contains(spare) {
            return Err(DaemonError::invalid(format!(
                "the spare {spare} is the standby, the witness or a spare already"
            )));
        }
        if Some(spare) == then.as_ref() {
            return Err(DaemonError::invalid(format!("the spare {spare} is the next standby already")));
        }
    }
    Ok(())
}

/// Checks the stretch factor. A group captures epochs when all are due, so a longer one would delay the
/// others; in mode replay nothing waits for epochs.
fn stretch(request: &ProtectRequest) -> Result<u32, DaemonError> {
    let whole = request.mode == ProtectMode::Epoch && request.group.is_none();
    match request.stretch {
        None => Ok(if whole { STRETCH } else { 1 }),
        Some(times) if !STRETCHES.contains(&times) => {
            let (least, most) = (STRETCHES.start(), STRETCHES.end());
            Err(DaemonError::invalid(format!(
                "a stretch factor of {times} is not between {least} and {most}"
            )))
        }
        Some(2..) if request.mode == ProtectMode::Replay || request.group.is_some() => {
            Err(DaemonError::invalid("epochs of a group or of mode replay cannot be stretched"))
        }
        Some(times) => Ok(times),
    }
}

fn coding(request: &ProtectRequest) -> Result<CodecOptions, DaemonError> {
    if request.mode == ProtectMode::Remus {
        return match request.block {
            None | Some(ProtectBlock::Page) => Ok(CodecOptions::REMUS),
            _ => Err(DaemonError::invalid(
                "mode remus sends whole pages as they are: it cannot be combined with a block size",
            )),
        };
    }
    let block = match request.block.unwrap_or_default() {
        ProtectBlock::B64 => BlockSize::B64,
        ProtectBlock::B128 => BlockSize::B128,
        ProtectBlock::B256 => BlockSize::B256,
        ProtectBlock::Page => BlockSize::Page,
    };
    Ok(CodecOptions::fine(block))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(text: &str) -> Result<ProtectionSettings, DaemonError> {
        ProtectionSettings::of(&serde_json::from_str(text).unwrap())
    }

    #[test]
    fn a_lost_standby_is_the_last_to_be_tried_again_and_so_is_a_primary_that_was_taken_over() {
        let ring = |settings: &ProtectionSettings| {
            let ProtectRequest { host, spares, .. } = &settings.request;
            std::iter::once(host).chain(spares).map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        let first = request(r#"{"host":"beta","witness":"w","spares":["gamma","delta"]}"#).unwrap();
        let second = first.with_next_spare().unwrap();
        assert_eq!(ring(&second), "gamma delta beta");
        assert_eq!(ring(&second.with_next_spare().unwrap()), "delta beta gamma");
        let alpha = "alpha".parse().unwrap();
        let taken = request(&second.next_protection(&alpha).unwrap()).unwrap();
        assert_eq!(ring(&taken), "delta beta alpha");
        assert!(request(r#"{"host":"beta"}"#).unwrap().with_next_spare().is_none());
        let both = request(r#"{"host":"beta","then":"alpha","spares":["delta"]}"#).unwrap();
        assert_eq!(ring(&request(&both.next_protection(&alpha).unwrap()).unwrap()), "alpha delta");
        for spares in [r#"["beta"]"#, r#"["w"]"#, r#"["a","a"]"#, r#"["t"]"#] {
            let text = format!(r#"{{"host":"beta","witness":"w","then":"t","spares":{spares}}}"#);
            assert!(request(&text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_out_of_bounds_or_contradicts_itself_is_refused() {
        let usual = request(r#"{"host":"beta"}"#).unwrap();
        assert_eq!(
            (usual.epoch, usual.coding),
            (Duration::from_millis(50), CodecOptions::fine(BlockSize::B64))
        );
        assert!(request(r#"{"host":"beta","epoch_ms":24}"#).is_err());
        assert!(request(r#"{"host":"beta","lease_ms":100}"#).is_err());
        assert!(request(r#"{"host":"beta","then":"beta"}"#).is_err());
        assert!(request(r#"{"host":"beta","rate_max":100}"#).is_err());
        assert!(request(r#"{"host":"beta","group":"a/b"}"#).is_err());
        let stretched =
            |more: &str| request(&format!(r#"{{"host":"beta"{more}}}"#)).ok().map(|all| all.stretch);
        assert_eq!((stretched(""), stretched(r#","group":"shop""#)), (Some(4), Some(1)));
        assert_eq!((stretched(r#","mode":"remus""#), stretched(r#","mode":"replay""#)), (Some(1), Some(1)));
        assert_eq!(
            (stretched(r#","mode":"remus","stretch":2"#), stretched(r#","stretch":1"#)),
            (Some(2), Some(1))
        );
        assert_eq!((stretched(r#","stretch":0"#), stretched(r#","stretch":21"#)), (None, None));
        assert_eq!(stretched(r#","group":"shop","stretch":2"#), None);
        let kept = |every, count| {
            request(&format!(r#"{{"host":"beta","keep":{{"every_ms":{every},"count":{count}}}}}"#))
        };
        assert_eq!(kept(60_000, 60).unwrap().snapshots, Some(SnapshotRule { every_ms: 60_000, count: 60 }));
        assert!(kept(999, 60).is_err() && kept(60_000, 0).is_err() && kept(60_000, 10_001).is_err());
        assert!(request(r#"{"host":"beta","witness":"gamma","then":"gamma"}"#).is_err());
        let alpha = "alpha".parse().unwrap();
        let next =
            request(r#"{"host":"beta","epoch_ms":25,"then":"delta"}"#).unwrap().next_protection(&alpha);
        let next = request(&next.unwrap()).unwrap();
        assert_eq!(
            (next.request.host.to_string(), next.epoch),
            ("delta".to_owned(), Duration::from_millis(25))
        );
        assert_eq!(next.request.then.as_ref().map(ToString::to_string), Some("beta".to_owned()));
        assert!(request(r#"{"host":"beta","mode":"remus","block":"64"}"#).is_err());
        let replay = request(r#"{"host":"beta","mode":"replay"}"#).unwrap();
        assert!(replay.replay && replay.epoch == Duration::from_secs(1) && replay.coding == usual.coding);
        assert!(request(r#"{"host":"beta","mode":"replay","epoch_ms":50}"#).is_err());
        assert!(request(r#"{"host":"beta","mode":"replay","group":"shop"}"#).is_err());
        assert_eq!(request(r#"{"host":"beta","mode":"remus"}"#).unwrap().coding, CodecOptions::REMUS);
    }
}
