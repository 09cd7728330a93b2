//! Takeover: determines the owner of a protected machine after contact was lost, and takes machines over.

pub(crate) mod before_start;
pub(crate) mod ownership;
mod recovery;
pub(crate) mod run;
