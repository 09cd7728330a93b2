//! Source and target of a migration.
