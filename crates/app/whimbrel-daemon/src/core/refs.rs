//! Names of capsules in the store: tags as users write them, and a reserved prefix for each machine's newest
//! capsule. So a tag and a machine may have the same name.

use crate::core::{
    error::{DaemonError, chain_code},
    history,
};
use std::collections::HashSet;
use whimbrel_api::{CapsuleRef, ErrorCode};
use whimbrel_core::{CapsuleId, Digest, MachineName, RefName};
use whimbrel_image::Manifest;
use whimbrel_store::{Expected, Store, StoreError};

/// Label with the machine that the capsule was taken from.
pub(crate) const MACHINE_LABEL: &str = "machine";
/// Label of a capsule whose balloon was inflated: the memory size before, in bytes, which a resume restores.
pub(crate) const BALLOON_LABEL: &str = "balloon";
/// Label of a capsule whose machine used a tunnel: its home host, the tunnel there, and the capsule with
/// which it left.
pub(crate) const HOME_LABEL: &str = "home";
/// Label with the capsule that the machine was derived, cloned or resumed from. It outlives the capsules in
/// between.
pub(crate) const LINEAGE_LABEL: &str = "derived-from";
const PREFIX: &str = "machine.";
/// Prefix of the tags that guests give, each below the name of its machine.
const GUEST_PREFIX: &str = "guest.";
/// Prefix of the names that [`previous`] gives.
const PREVIOUS: &str = "previous.";

/// The ref of a machine's newest capsule. A name that is too long is replaced by its digest.
pub(crate) fn machine_ref(name: &MachineName) -> RefName {
    let plain = format!("{PREFIX}{name}").parse();
    let digest = || format!("{PREFIX}{}", &Digest::of(name.as_str().as_bytes()).to_string()[..40]);
    plain.unwrap_or_else(|_| digest().parse().expect("a prefix and 40 digits are a valid ref"))
}

/// Prefix of the refs that retain what machines of other hosts read.
pub(crate) const READER: &str = "reader.";
/// Prefixes of refs that users do not give.
const RESERVED: [&str; 6] =
    [PREFIX, PREVIOUS, READER, GUEST_PREFIX, whimbrel_schedule::TAG_PREFIX, history::PREFIX];

/// The ref that retains a whole capsule after one that is still incomplete took its name.
pub(crate) fn previous(capsule: &CapsuleId) -> RefName {
    format!("{PREVIOUS}{}", capsule.short()).parse().expect("a prefix and some digits are a valid ref")
}

/// Removes the refs of [`previous`] whose names are at a whole capsule again, or are gone.
pub(crate) fn remove_outdated_previous(store: &Store) -> Result<(), StoreError> {
    let all = store.list_refs()?;
    let (previous, others): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|(name, _)| name.as_str().starts_with(PREVIOUS));
    if previous.is_empty() {
        return Ok(());
    }
    let mut needed = HashSet::new();
    for (name, capsule) in others {
        if store.is_partial(&capsule)? {
            needed.extend(store.ref_history(&name)?.into_iter().map(|version| version.id));
        }
    }
    for (name, capsule) in previous.into_iter().filter(|(_, capsule)| !needed.contains(capsule)) {
        store.delete_ref(&name, Expected::Capsule(capsule))?;
    }
    Ok(())
}

/// Refuses a tag with a reserved prefix.
pub(crate) fn check_tag(tag: Option<&RefName>) -> Result<(), DaemonError> {
    match tag {
        Some(tag) => match RESERVED.iter().find(|prefix| tag.as_str().starts_with(**prefix)) {
            Some(prefix) => {
                Err(DaemonError::invalid(format!("tags that begin with {prefix:?} are reserved")))
            }
            None => Ok(()),
        },
        None => Ok(()),
    }
}

/// The ref of a tag that the guest of a machine gives: `guest.MACHINE.TAG`. A tag with a dot could be read
/// as a part of another machine's name, so it is refused.
pub(crate) fn guest_ref(machine: &MachineName, tag: &str) -> Result<RefName, DaemonError> {
    let name = format!("{GUEST_PREFIX}{machine}.{tag}");
    match name.parse() {
        Ok(name) if !tag.contains('.') => Ok(name),
        _ => Err(DaemonError::invalid(format!("{tag:?} cannot be a tag of a guest of {machine}"))),
    }
}

/// The machine's name in the ref of a guest's tag.
pub(crate) fn guest_machine_in(name: &str) -> Option<&str> {
    Some(name.strip_prefix(GUEST_PREFIX)?.rsplit_once('.')?.0)
}

/// The tag in the ref of a tag that the guest of this machine gave.
pub(crate) fn guest_tag<'a>(name: &'a RefName, machine: &MachineName) -> Option<&'a str> {
    let (of, tag) = name.as_str().strip_prefix(GUEST_PREFIX)?.rsplit_once('.')?;
    (of == machine.as_str()).then_some(tag)
}

/// A ref as rights and users name it: a machine's ref by the machine's name.
pub(crate) fn known_as(name: &RefName) -> &str {
    name.as_str().strip_prefix(PREFIX).unwrap_or(name.as_str())
}

/// The machine whose newest capsule a ref names, if it is such a ref.
pub(crate) fn machine_named(name: &RefName) -> Option<MachineName> {
    name.as_str().strip_prefix(PREFIX)?.parse().ok()
}

/// The stored name of the ref that a caller means; none for an id.
pub(crate) fn named(store: &Store, capsule: &CapsuleRef) -> Result<Option<RefName>, DaemonError> {
    let CapsuleRef::Name(name) = capsule else { return Ok(None) };
    let machine = name.as_str().parse().ok().map(|machine| machine_ref(&machine));
    for name in [Some(name.clone()), machine].into_iter().flatten() {
        if store.get_ref(&name).map_err(store_error("read a ref"))?.is_some() {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

pub(crate) fn lineage_of(manifest: &Manifest) -> Option<CapsuleId> {
    manifest.labels.get(LINEAGE_LABEL)?.parse().ok()
}

/// The capsule that a caller means: an id, the beginning of an id, a tag, a machine's newest capsule, or an
/// epoch snapshot.
pub(crate) fn resolve(store: &Store, capsule: &CapsuleRef) -> Result<CapsuleId, DaemonError> {
    let name = match capsule {
        CapsuleRef::Id(id) if store.has(&[id.0]) == [true] => return Ok(*id),
        CapsuleRef::Id(id) => return Err(DaemonError::NotFound { what: "capsule", name: id.short() }),
        CapsuleRef::Past(past) => return history::resolve(store, past),
        CapsuleRef::Name(name) => name,
    };
    let get = |name: &RefName| store.get_ref(name).map_err(store_error("read a ref"));
    if let Some(id) = get(name)? {
        return Ok(id);
    }
    if let Ok(machine) = name.as_str().parse()
        && let Some(id) = get(&machine_ref(&machine))?
    {
        return Ok(id);
    }
    store.resolve(name.as_str()).map_err(|error| {
        if is_not_found(&error) {
            DaemonError::NotFound { what: "capsule", name: name.to_string() }
        } else {
            store_error("find a capsule")(error)
        }
    })
}

/// Whether the store does not have the object.
pub(crate) fn is_not_found(error: &StoreError) -> bool {
    matches!(error, StoreError::Unknown { .. } | StoreError::Missing { .. })
}

/// Wraps a failure of the store during `action`.
pub(crate) fn store_error(action: &'static str) -> impl Fn(StoreError) -> DaemonError {
    move |source| DaemonError::Store { action, code: code(&source), source: source.into() }
}

/// Like [`store_error`], for an action that a user may cancel; `left` says what a cancel leaves.
pub(crate) fn cancellable(action: &'static str, left: &'static str) -> impl Fn(StoreError) -> DaemonError {
    move |error| match error {
        StoreError::Cancelled => DaemonError::Cancelled { left: left.to_owned() },
        error => store_error(action)(error),
    }
}

/// What to do about a key that does not fit the store.
pub(crate) fn key_hint(error: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    match error.downcast_ref()? {
        StoreError::KeyNeeded { .. } => {
            Some("start the daemon with `--encrypt` and the `--key-file` or `--key-command` of this key")
        }
        StoreError::WrongKey { .. } => Some(
            "nothing was read or written; find the key of this name, which may be one from before a rotation",
        ),
        StoreError::Keys { .. } => {
            Some("restore the file `keys` of the store from a copy; nothing was changed")
        }
        StoreError::NotEncrypted => Some("start the daemon with `--encrypt` and a `--key-file`"),
        StoreError::InUse => Some("stop the other process, then start the daemon again"),
        _ => None,
    }
}

fn code(error: &StoreError) -> ErrorCode {
    match error {
        StoreError::KeyNeeded { .. } | StoreError::WrongKey { .. } | StoreError::NotEncrypted => {
            ErrorCode::Invalid
        }
        StoreError::InUse | StoreError::LayoutChanged => ErrorCode::Busy,
        StoreError::Keys { .. } => ErrorCode::Damaged,
        StoreError::Unknown { .. } | StoreError::NoStore { .. } => ErrorCode::NotFound,
        StoreError::Ambiguous { .. } | StoreError::OutOfRange { .. } => ErrorCode::Invalid,
        StoreError::RefChanged { .. } => ErrorCode::Busy,
        StoreError::Layout { .. } => ErrorCode::Unsupported,
        // Expected data is absent or damaged.
        StoreError::Missing { .. }
        | StoreError::MissingBase { .. }
        | StoreError::Damaged { .. }
        | StoreError::Digest { .. }
        | StoreError::Tree { .. }
        | StoreError::Manifest { .. }
        | StoreError::Index { .. }
        | StoreError::SmallFile { .. }
        | StoreError::Incomplete { .. } => ErrorCode::Damaged,
        other => chain_code(other),
    }
}

pub(crate) fn machine_of(manifest: &Manifest) -> Result<MachineName, DaemonError> {
    let name = manifest.labels.get(MACHINE_LABEL).and_then(|name| name.parse().ok());
    name.ok_or_else(|| DaemonError::invalid("the capsule names no machine; choose a name with --name"))
}

/// A ref as users see it: a machine's ref is shown as the machine's name.
pub(crate) fn display_name(name: &RefName, machine: &MachineName) -> Option<RefName> {
    if *name == machine_ref(machine) { machine.as_str().parse().ok() } else { Some(name.clone()) }
}
