//! Rule: what a pin or a ref leads to stays readable as long as the pin is held, whatever is collected
//! beside it.

use crate::{
    report::violation,
    scenes::capsules::{self, Pages, is_excused},
};
use whimbrel_core::CapsuleId;
use whimbrel_store::Store;

/// A held capsule has this content.
pub(crate) fn check(store: &Store, id: &CapsuleId, expected: &Pages) {
    match capsules::content(store, id) {
        Ok(pages) if pages == *expected => {}
        Ok(_) => violation("reachable_stays", &format!("pinned capsule {id} has other content")),
        Err(error) if is_excused(&error) => {}
        Err(error) => violation("reachable_stays", &format!("pinned capsule {id} lost pages: {error:?}")),
    }
}
