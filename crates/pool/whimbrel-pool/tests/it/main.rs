//! The integration tests of the pool, one binary: linking costs more than most of the tests.

mod admission;
mod backups;
mod common;
mod erasure;
mod faults;
mod groups;
mod local;
mod members;
mod messages;
mod mount;
mod orders;
mod places;
mod pool;
mod posix;
mod postgres;
mod quotas;
mod reads;
mod scrub;
mod seals;
mod tier;
