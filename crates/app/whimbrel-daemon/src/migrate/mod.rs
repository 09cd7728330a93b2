//! Live migration: the source side, the target side, and the history of past migrations.

pub(crate) mod cpu_baseline;
pub(crate) mod history;
pub(crate) mod newer_parts;
pub(crate) mod resolution;
pub(crate) mod source;
pub(crate) mod target;
