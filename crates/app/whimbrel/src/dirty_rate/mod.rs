//! Dirty rate of a machine: samples, report and plot. The predictions are made in `whimbrel-capture`.

mod calibration;
pub(crate) mod plot;
mod report;
mod sampling;

pub(crate) use calibration::Calibration;
pub(crate) use report::Report;
pub(crate) use sampling::Sampling;
