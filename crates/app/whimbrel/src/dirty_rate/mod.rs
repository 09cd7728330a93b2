//! Dirty rate of a machine: samples and report. The predictions are made in `whimbrel-capture`.

mod calibration;
mod report;
mod sampling;

pub(crate) use calibration::Calibration;
pub(crate) use report::Report;
pub(crate) use sampling::Sampling;
