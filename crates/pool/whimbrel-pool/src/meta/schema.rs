//! The database schema: one text for both databases, in which `{blob}` and `{key}` stand for driver-specific
//! types.
//!
//! Later changes are in [`LATER`]; the counter `schema` tells how many of them were applied.
//!
//! Versions form chains (see `reference_counts`): `older` and `newer` are the neighbours of a version,
//! `copies` the required copies of each of its chunks. Chunks are numbered in order of arrival, which keeps
//! maps short and related rows together. `committed` records the commits of sessions and outlives both
//! session and version for a while. A `doomed` chunk is being collected: it cannot be reused, only written
//! again. `chunk.coded` is positive for a chunk that is kept in pieces (the counts of its pieces), -1 for a
//! piece, which is a chunk too and of which `piece` tells the chunk it belongs to; `version.coded` tells
//! that all chunks of a version were looked at for that. `benefactor.labels` is JSON, `expelled` has the
//! keys that are never admitted again. `held` has the pins of holders; `step_group` has the folders of
//! groups; `version.pinned` is the pin that a user sets. `version.writer` is the key of the member that
//! committed it; `quota` has limits of folders (with an empty `member`) and of keys (with a `folder` of 0).

/// Statements that create the tables for SQLite or PostgreSQL.
pub(super) fn statements(postgres: bool) -> Vec<String> {
    let (blob, key) =
        if postgres { ("BYTEA", "BIGINT PRIMARY KEY") } else { ("BLOB", "INTEGER PRIMARY KEY") };
    TABLES.iter().map(|text| text.replace("{blob}", blob).replace("{key}", key)).collect()
}

/// Changes of the schema in order, each of which makes the next version of it.
///
/// After them an existing version is a chain of its own, with unchanged counts of its chunks.
pub(super) const LATER: &[&str] = &[
    "ALTER TABLE version ADD COLUMN modified BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE version ADD COLUMN older BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE version ADD COLUMN newer BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE version ADD COLUMN copies BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE benefactor ADD COLUMN labels TEXT",
    "CREATE INDEX committed_at ON committed (at)",
    "CREATE INDEX repair_since ON repair (since)",
    "ALTER TABLE chunk ADD COLUMN coded BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE version ADD COLUMN coded BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE node ADD COLUMN coding TEXT",
    "CREATE TABLE piece (chunk BIGINT NOT NULL, number BIGINT NOT NULL, piece BIGINT NOT NULL,
        PRIMARY KEY (chunk, number))",
    "CREATE INDEX piece_chunk ON piece (piece)",
    "CREATE TABLE step_group (node BIGINT NOT NULL PRIMARY KEY, files BIGINT NOT NULL, job TEXT NOT NULL,
        started BIGINT NOT NULL, committed BIGINT NOT NULL)",
    "CREATE INDEX chunk_coded ON chunk (freed) WHERE coded > 0 AND refs = 0",
    "CREATE INDEX node_coding ON node (id) WHERE coding IS NOT NULL",
    "CREATE INDEX version_uncoded ON version (id) WHERE coded = 0",
    "ALTER TABLE version ADD COLUMN writer TEXT",
    "CREATE INDEX version_writer ON version (writer, size) WHERE writer IS NOT NULL",
    "CREATE TABLE quota (folder BIGINT NOT NULL, member TEXT NOT NULL, bytes BIGINT NOT NULL,
        PRIMARY KEY (folder, member))",
    // Pieces of chunks that were deleted before them: nobody could give them up any more. One less and not
    // none, because the same bytes may be content of a file, too.
    "UPDATE chunk SET refs = refs - 1 WHERE refs > 0 AND id IN (SELECT piece FROM piece WHERE NOT EXISTS
        (SELECT 1 FROM chunk whole WHERE whole.id = piece.chunk))",
    "DELETE FROM piece WHERE NOT EXISTS (SELECT 1 FROM chunk whole WHERE whole.id = piece.chunk)",
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
    "CREATE TABLE IF NOT EXISTS expelled (key {blob} NOT NULL PRIMARY KEY, name TEXT NOT NULL, at BIGINT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS repair (chunk {key}, since BIGINT NOT NULL)",
    "INSERT INTO counter (name, value) VALUES
        ('schema', 1), ('chunk', 1), ('node', 2), ('version', 1), ('session', 1), ('benefactor', 1)
        ON CONFLICT (name) DO NOTHING",
    "INSERT INTO node (id, parent, name, folder, mode, uid, gid, size, modified, changed, version)
        VALUES (1, 0, '', 1, 493, 0, 0, 0, 0, 0, 0) ON CONFLICT DO NOTHING",
];
