//! The integration tests of block devices, one binary: linking costs more than most of the tests.

mod align_found;
mod cow_files;
mod cow_fill;
mod cow_model;
mod cow_parts;
mod file;
mod recut;
mod tracked;
