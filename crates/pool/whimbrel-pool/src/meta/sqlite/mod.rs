//! Database statements of `sql`, compiled for SQLite.

pub(crate) type Driver = sqlx::Sqlite;
pub(crate) const IS_POSTGRES: bool = false;

#[path = "../sql/chunks.rs"]
pub(crate) mod chunks;
#[path = "../sql/members.rs"]
pub(crate) mod members;
#[path = "../sql/names.rs"]
pub(crate) mod names;
#[path = "../sql/pins.rs"]
pub(crate) mod pins;
#[path = "../sql/statements.rs"]
pub(crate) mod statements;
#[path = "../sql/versions.rs"]
pub(crate) mod versions;
