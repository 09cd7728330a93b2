//! Who owns a protected machine after contact was lost, and the takeover by its standby.

pub(crate) mod ownership;
mod recovery;
pub(crate) mod run;
