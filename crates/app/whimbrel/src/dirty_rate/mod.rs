//! The writable working set of a machine: sampled, reported, drawn. What is predicted from it is decided in
//! `whimbrel-capture`.

mod calibration;
pub(crate) mod plot;
mod report;
mod sampling;

pub(crate) use calibration::Calibration;
pub(crate) use report::Report;
pub(crate) use sampling::Sampling;
