//! The integration tests of migration, one binary: linking costs more than most of the tests.

mod flaky_link;
mod handover_model;
mod hot_pages;
mod last_words;
mod messages;
mod mirrored_disk;
mod model;
mod postcopy_flaky;
mod postcopy_model;
mod record;
