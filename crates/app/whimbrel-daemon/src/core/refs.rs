//! How capsules are named in the store: tags as the user writes them, a machine's newest capsule under a
//! reserved prefix, so that a tag and a machine may have the same name.

use crate::{
    capsule::history,
    core::error::{DaemonError, chain_code},
};
use whimbrel_api::{CapsuleRef, ErrorCode};
use whimbrel_core::{CapsuleId, Digest, MachineName, RefName};
use whimbrel_image::Manifest;
use whimbrel_store::{Store, StoreError};

/// Label of a capsule that names the machine it was taken from.
pub(crate) const MACHINE_LABEL: &str = "machine";
/// Label of a capsule whose guest was squeezed: the bytes of memory it had before, and is to have again.
pub(crate) const BALLOON_LABEL: &str = "balloon";
/// Label of a capsule whose machine was away from home: the home host, the tunnel there, the capsule it came
/// away as.
pub(crate) const HOME_LABEL: &str = "home";
/// Label of a capsule that names the capsule which its machine was derived, cloned or resumed from: it
/// outlives the capsules between the two.
pub(crate) const LINEAGE_LABEL: &str = "derived-from";
const PREFIX: &str = "machine.";

/// The ref of a machine's newest capsule. A name that leaves no room for the prefix is replaced by its
/// digest.
pub(crate) fn of_machine(name: &MachineName) -> RefName {
    let plain = format!("{PREFIX}{name}").parse();
    let digest = || format!("{PREFIX}{}", &Digest::of(name.as_str().as_bytes()).to_string()[..40]);
    plain.unwrap_or_else(|_| digest().parse().expect("a prefix and 40 digits are a valid ref"))
}

/// Refuses a tag that would look like a machine's ref.
pub(crate) fn check_tag(tag: Option<&RefName>) -> Result<(), DaemonError> {
    match tag {
        Some(tag) => match [PREFIX, history::PREFIX].iter().find(|prefix| tag.as_str().starts_with(**prefix))
        {
            Some(prefix) => {
                Err(DaemonError::invalid(format!("tags that begin with {prefix:?} are reserved")))
            }
            None => Ok(()),
        },
        None => Ok(()),
    }
}

/// A ref as rights and people name it: a machine's ref under the machine's name.
pub(crate) fn known_as(name: &RefName) -> &str {
    name.as_str().strip_prefix(PREFIX).unwrap_or(name.as_str())
}

/// The machine whose newest capsule a ref of a store names, if it is such a ref.
pub(crate) fn machine_named(name: &RefName) -> Option<MachineName> {
    name.as_str().strip_prefix(PREFIX)?.parse().ok()
}

/// The ref that a caller means, as it is called in the store; none if it means no ref but an id.
pub(crate) fn named(store: &Store, capsule: &CapsuleRef) -> Result<Option<RefName>, DaemonError> {
    let CapsuleRef::Name(name) = capsule else { return Ok(None) };
    let machine = name.as_str().parse().ok().map(|machine| of_machine(&machine));
    for name in [Some(name.clone()), machine].into_iter().flatten() {
        if store.get_ref(&name).map_err(store_error("read a ref"))?.is_some() {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// The capsule that the machine of this one was made from.
pub(crate) fn lineage_of(manifest: &Manifest) -> Option<CapsuleId> {
    manifest.labels.get(LINEAGE_LABEL)?.parse().ok()
}

/// The capsule that a caller means: an id, a tag, a machine's newest capsule, the beginning of an id, one
/// that was kept.
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
        && let Some(id) = get(&of_machine(&machine))?
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

/// Whether the store simply does not have it.
pub(crate) fn is_not_found(error: &StoreError) -> bool {
    matches!(error, StoreError::Unknown { .. } | StoreError::Missing { .. })
}

/// A failure of the store while it did `action`.
pub(crate) fn store_error(action: &'static str) -> impl Fn(StoreError) -> DaemonError {
    move |source| DaemonError::Store { action, code: code(&source), source: source.into() }
}

fn code(error: &StoreError) -> ErrorCode {
    match error {
        StoreError::Unknown { .. } | StoreError::NoStore { .. } => ErrorCode::NotFound,
        StoreError::Ambiguous { .. } | StoreError::OutOfRange { .. } => ErrorCode::Invalid,
        StoreError::RefChanged { .. } => ErrorCode::Busy,
        StoreError::Layout { .. } => ErrorCode::Unsupported,
        // What should be there is not, or is something else.
        StoreError::Missing { .. }
        | StoreError::MissingBase { .. }
        | StoreError::Damaged { .. }
        | StoreError::Digest { .. }
        | StoreError::Tree { .. }
        | StoreError::Manifest { .. }
        | StoreError::Index { .. }
        | StoreError::SmallFile { .. }
        | StoreError::NotWhole { .. } => ErrorCode::Damaged,
        other => chain_code(other),
    }
}

/// The name of the machine that a capsule was taken from.
pub(crate) fn machine_of(manifest: &Manifest) -> Result<MachineName, DaemonError> {
    let name = manifest.labels.get(MACHINE_LABEL).and_then(|name| name.parse().ok());
    name.ok_or_else(|| {
        DaemonError::invalid("the capsule does not say which machine it is of; choose a name with --name")
    })
}

/// A ref as people see it: a machine's ref is shown as the machine's name.
pub(crate) fn shown(name: &RefName, machine: &MachineName) -> Option<RefName> {
    if *name == of_machine(machine) { machine.as_str().parse().ok() } else { Some(name.clone()) }
}
