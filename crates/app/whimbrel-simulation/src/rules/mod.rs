//! Rules: what must hold in every scene, whatever happens. Each says what it saw and ends the seed when it
//! is broken.

pub(crate) mod acknowledged_exists;
pub(crate) mod comes_back;
pub(crate) mod named_is_whole;
pub(crate) mod one_runs;
pub(crate) mod promised_stays;
pub(crate) mod reachable_stays;
