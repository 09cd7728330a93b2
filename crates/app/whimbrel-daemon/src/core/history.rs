//! Epoch snapshots of protected machines, and `NAME@-AGE`, which names one of them.
//!
//! Each has a ref under a reserved prefix, with the machine's name and the time at the end of its epoch by
//! the clock of the standby. So refs alone tell which snapshots exist and how old they are, here and on other
//! hosts.

use crate::core::{
    error::DaemonError,
    refs::{self, store_error},
};
use whimbrel_api::PointInTime;
use whimbrel_core::{CapsuleId, Digest, MachineName, RefName};
use whimbrel_store::{Expected, Store, StoreError};

pub(crate) const PREFIX: &str = "kept.";
/// Digits of a time in a ref, in milliseconds since 1970: refs of one machine sort by time.
const DIGITS: usize = 13;

pub(crate) fn name(machine: &MachineName, time_ms: u64) -> RefName {
    format!("{}{time_ms:0DIGITS$}", ref_prefix(machine))
        .parse()
        .expect("a prefix, a name that fits and digits")
}

/// Prefix of the refs of a machine's snapshots. A name that is too long is replaced by its digest.
fn ref_prefix(machine: &MachineName) -> String {
    let plain = format!("{PREFIX}{machine}.");
    match plain.len() + DIGITS <= 63 {
        true => plain,
        false => format!("{PREFIX}{}.", &Digest::of(machine.as_str().as_bytes()).to_string()[..40]),
    }
}

pub(crate) fn pattern(machine: &MachineName) -> String {
    format!("{}*", ref_prefix(machine))
}

/// Time of the snapshot that a ref names, if it is one of this machine.
pub(crate) fn time_of(name: &RefName, machine: &MachineName) -> Option<u64> {
    let digits = name.as_str().strip_prefix(&ref_prefix(machine))?;
    let all_digits = digits.len() == DIGITS && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| all_digits)
}

pub(crate) fn machine_in(name: &str) -> Option<&str> {
    let (machine, digits) = name.strip_prefix(PREFIX)?.rsplit_once('.')?;
    (digits.len() == DIGITS && digits.bytes().all(|byte| byte.is_ascii_digit())).then_some(machine)
}

/// The newest snapshot that is at least as old as requested.
pub(crate) fn newest_before(
    past: &PointInTime,
    kept: impl IntoIterator<Item = (RefName, CapsuleId)>,
    now_ms: u64,
) -> Result<(RefName, CapsuleId), DaemonError> {
    let dated = |(name, id): (RefName, CapsuleId)| Some((time_of(&name, &past.machine)?, (name, id)));
    let mut all: Vec<(u64, (RefName, CapsuleId))> = kept.into_iter().filter_map(dated).collect();
    all.sort_unstable_by_key(|(time, _)| *time);
    let (Some((oldest, _)), Some((newest, _))) = (all.first(), all.last()) else {
        return Err(DaemonError::NotFound { what: "epoch snapshot", name: past.to_string() });
    };
    let (oldest, newest) = (*oldest, *newest);
    let until = now_ms.saturating_sub(past.ago_ms);
    all.into_iter().rfind(|(time, _)| *time <= until).map(|(_, found)| found).ok_or_else(|| {
        let age = |time: u64| format!("{:.1} s", now_ms.saturating_sub(time) as f64 / 1e3);
        DaemonError::invalid(format!(
            "there is no epoch snapshot for {past}: the oldest of {} is {} old, the newest {}",
            past.machine,
            age(oldest),
            age(newest)
        ))
    })
}

/// The snapshot in this store that `past` names.
pub(crate) fn resolve(store: &Store, past: &PointInTime) -> Result<CapsuleId, DaemonError> {
    let kept = store.list_refs().map_err(store_error("read the refs"))?;
    newest_before(past, kept, crate::now_ms()).map(|(_, id)| id)
}

/// Snapshots of a machine in this store, with their times.
pub(crate) fn all_of(store: &Store, machine: &MachineName) -> Result<Vec<(u64, CapsuleId)>, DaemonError> {
    let refs = store.list_refs().map_err(store_error("read the refs"))?;
    Ok(refs.into_iter().filter_map(|(name, id)| Some((time_of(&name, machine)?, id))).collect())
}

/// Removes the refs of a machine's snapshots but the newest `count`. Other refs may still name them.
pub(crate) fn retain_newest(store: &Store, machine: &MachineName, count: usize) -> Result<(), DaemonError> {
    let refs = store.list_refs().map_err(refs::store_error("read the refs"))?;
    let kept: Vec<RefName> = refs.into_keys().filter(|name| time_of(name, machine).is_some()).collect();
    for name in &kept[..kept.len().saturating_sub(count)] {
        match store.delete_ref(name, Expected::Anything) {
            // A user removed the ref meanwhile.
            Ok(()) | Err(StoreError::Unknown { .. }) => {}
            Err(error) => return Err(refs::store_error("remove the ref of an epoch snapshot")(error)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn web(ago_ms: u64) -> PointInTime {
        PointInTime { machine: "web".parse().unwrap(), ago_ms }
    }

    fn retained(times: &[u64]) -> Vec<(RefName, CapsuleId)> {
        let of = |time: &u64| (name(&web(0).machine, *time), CapsuleId(Digest::of(&time.to_le_bytes())));
        times.iter().map(of).collect()
    }

    #[test]
    fn the_newest_that_is_old_enough_is_meant() {
        let mut all = retained(&[1_000_000, 1_060_000, 1_120_000]);
        all.push((name(&"web.2".parse().unwrap(), 1_050_000), CapsuleId(Digest::of(b"another's"))));
        all.push(("web".parse().unwrap(), CapsuleId(Digest::of(b"a tag"))));
        let picked = |ago| newest_before(&web(ago), all.clone(), 1_130_000).map(|(name, _)| name.to_string());
        assert_eq!(picked(0).unwrap(), "kept.web.0000001120000");
        assert_eq!(picked(10_000).unwrap(), "kept.web.0000001120000");
        assert_eq!(picked(10_001).unwrap(), "kept.web.0000001060000");
        assert_eq!(picked(130_000).unwrap(), "kept.web.0000001000000");
        let refused = picked(131_000).unwrap_err().to_string();
        assert!(refused.contains("oldest of web is 130.0 s old, the newest 10.0 s"), "{refused}");
        let nothing = newest_before(&web(0), retained(&[]), 5).unwrap_err();
        assert!(matches!(nothing, DaemonError::NotFound { .. }), "{nothing}");
    }

    #[test]
    fn any_machine_has_names_for_what_is_kept_of_it() {
        let long: MachineName = "a".repeat(63).parse().unwrap();
        let named = name(&long, crate::now_ms());
        assert!(time_of(&named, &long).is_some() && time_of(&named, &web(0).machine).is_none());
        assert_eq!(machine_in(name(&web(0).machine, 7).as_str()), Some("web"));
        assert_eq!(machine_in("kept.web"), None);
        assert_eq!(machine_in("kept.web.monday"), None);
    }
}
