//! The integration tests of the store, one binary: linking costs more than most of the tests.

mod capsules;
mod collect;
mod common;
mod copies;
mod crash;
mod damage;
mod elsewhere;
mod encrypted;
mod full_disk;
mod growth;
mod hierarchy;
mod repair;
