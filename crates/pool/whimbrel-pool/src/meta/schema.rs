//! The tables. One text for both databases; `{blob}` and `{key}` stand for what the drivers call differently.
//!
//! What was added later stands in [`LATER`], each once, counted by `schema`.
//!
//! Versions stand in chains (`chain`): `older` and `newer` are those beside one, and `copies` how many are
//! wanted of each of its chunks at least. Chunks have numbers in the order in which they came, so that maps
//! of versions are short, and what is read together lies together. `committed` remembers what sessions made
//! visible, for a while longer than session and version may live. `doomed` chunks have been given up for
//! collection: nobody may build on them, only write them anew. `held` are the pins of those who live from a
//! version; `version.pinned` is the one that is set by hand.

/// Statements that make an empty database ours, for `sqlite` and `postgres`.
pub(super) fn statements(postgres: bool) -> Vec<String> {
    let (blob, key) =
        if postgres { ("BYTEA", "BIGINT PRIMARY KEY") } else { ("BLOB", "INTEGER PRIMARY KEY") };
    TABLES.iter().map(|text| text.replace("{blob}", blob).replace("{key}", key)).collect()
}

/// What makes a database of the first schema one of the second, and so on.
///
/// A version of before is a chain of its own, in which its chunks count as they did.
pub(super) const LATER: &[&str] = &[
    "ALTER TABLE version ADD COLUMN modified BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE version ADD COLUMN older BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE version ADD COLUMN newer BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE version ADD COLUMN copies BIGINT NOT NULL DEFAULT 0",
];

const TABLES: &[&str] = &[
    "CREATE TABLE IF NOT EXISTS counter (name TEXT PRIMARY KEY, value BIGINT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS benefactor (
        id {key}, key {blob} NOT NULL UNIQUE, name TEXT NOT NULL, address TEXT NOT NULL, capacity BIGINT NOT NULL,
        used BIGINT NOT NULL, free BIGINT NOT NULL, chunks BIGINT NOT NULL, draining BIGINT NOT NULL,
        lost BIGINT NOT NULL, faults BIGINT NOT NULL, seen BIGINT NOT NULL, owed BIGINT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS session (id {key}, started BIGINT NOT NULL, seen BIGINT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS committed (
        session BIGINT NOT NULL, number BIGINT NOT NULL, node BIGINT NOT NULL, at BIGINT NOT NULL,
        PRIMARY KEY (session, number))",
    "CREATE TABLE IF NOT EXISTS reservation (
        session BIGINT NOT NULL, benefactor BIGINT NOT NULL, bytes BIGINT NOT NULL, PRIMARY KEY (session, benefactor))",
    "CREATE TABLE IF NOT EXISTS node (
        id {key}, parent BIGINT NOT NULL, name TEXT NOT NULL, folder BIGINT NOT NULL, mode BIGINT NOT NULL,
        uid BIGINT NOT NULL, gid BIGINT NOT NULL, size BIGINT NOT NULL, modified BIGINT NOT NULL,
        changed BIGINT NOT NULL, version BIGINT NOT NULL, policy TEXT, UNIQUE (parent, name))",
    "CREATE TABLE IF NOT EXISTS version (
        id {key}, node BIGINT NOT NULL, number BIGINT NOT NULL, size BIGINT NOT NULL, created BIGINT NOT NULL,
        chunks BIGINT NOT NULL, sent BIGINT NOT NULL, pinned BIGINT NOT NULL, map {blob} NOT NULL,
        UNIQUE (node, number))",
    "CREATE TABLE IF NOT EXISTS chunk (
        id {key}, digest {blob} NOT NULL UNIQUE, length BIGINT NOT NULL, stored BIGINT NOT NULL, refs BIGINT NOT NULL,
        freed BIGINT NOT NULL, want BIGINT NOT NULL, doomed BIGINT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS place (
        chunk BIGINT NOT NULL, benefactor BIGINT NOT NULL, since BIGINT NOT NULL, PRIMARY KEY (chunk, benefactor))",
    "CREATE INDEX IF NOT EXISTS place_benefactor ON place (benefactor, chunk)",
    "CREATE TABLE IF NOT EXISTS held (
        version BIGINT NOT NULL, owner {blob} NOT NULL, holder TEXT NOT NULL, since BIGINT NOT NULL, ends BIGINT NOT NULL,
        PRIMARY KEY (version, owner, holder))",
    "CREATE TABLE IF NOT EXISTS repair (chunk {key}, since BIGINT NOT NULL)",
    "INSERT INTO counter (name, value) VALUES
        ('schema', 1), ('chunk', 1), ('node', 2), ('version', 1), ('session', 1), ('benefactor', 1)
        ON CONFLICT (name) DO NOTHING",
    "INSERT INTO node (id, parent, name, folder, mode, uid, gid, size, modified, changed, version)
        VALUES (1, 0, '', 1, 493, 0, 0, 0, 0, 0, 0) ON CONFLICT DO NOTHING",
];
