//! Rule: every capsule that a ref names can be read completely, and verification finds nothing wrong where
//! nothing was damaged.

use crate::{
    report::violation,
    scenes::capsules::{self, Pages},
};
use whimbrel_core::RefName;
use whimbrel_store::Store;

const RULE: &str = "named_is_whole";

/// The content of every ref of an undamaged store.
pub(crate) fn check(store: &Store, when: &str) -> Vec<(RefName, Pages)> {
    let refs = store.list_refs().unwrap_or_else(|error| violation(RULE, &format!("{when}: refs: {error:?}")));
    let report = store.verify(|_, _| true);
    let report = report.unwrap_or_else(|error| violation(RULE, &format!("{when}: verify: {error:?}")));
    if !report.is_complete() {
        let (damage, broken) = (report.damage, report.broken);
        violation(RULE, &format!("{when}: verify finds damage {damage:?} and broken capsules {broken:?}"));
    }
    let content = |(name, id)| match capsules::content(store, &id) {
        Ok(pages) => (name, pages),
        Err(error) => violation(RULE, &format!("{when}: {name} names {id}, which cannot be read: {error:?}")),
    };
    refs.into_iter().map(content).collect()
}
