//! The writable working set of a machine: sampled, reported, drawn. What is predicted from it is decided in
//! `whimbrel-capture`.

mod learned;
pub(crate) mod plot;
mod report;
mod sampling;

pub(crate) use learned::Learned;
pub(crate) use report::Report;
pub(crate) use sampling::Sampling;
