//! Meta statements of commits: what sessions wrote becomes visible, each file completely or not at all.
//!
//! Several commits share a transaction and, where possible, statements. What is wrong with one is found
//! before anything is changed, except for chunks that are gone: then the whole batch fails, and each is
//! committed alone (`commit_queue`). Two commits to one file are never in one batch.

use super::{
    chunks,
    database::{Meta, RANGES, list, numbers, ranges_as_part, rows, signed, typed_rows, unsigned},
    driver::{Connections, Tx, query},
    files, shards,
    versions::{pieces_of, set_neighbour},
};
use crate::{
    chunk_map::{self, ChunkRef},
    meta::{MetaError, Result, reference_counts},
    protocol::{ChunkId, Commit, Node, NodeId},
};
use std::collections::{BTreeMap, HashMap, HashSet};
use whimbrel_wire::PublicKey;

/// A commit that waits for its transaction.
pub(crate) struct PendingCommit {
    pub(crate) commit: Commit,
    pub(crate) pieces: Vec<ChunkRef>,
    /// Stored with the map.
    pub(crate) seal: Vec<u8>,
    /// Key of the member that commits.
    pub(crate) writer: Option<PublicKey>,
    /// Time of the manager.
    pub(crate) now: i64,
}

impl Meta {
    /// Commits a file: makes what a session wrote visible, all of it or nothing. If the answer was lost and
    /// the same commit is repeated, this returns the current file without a change, because others may have
    /// written since.
    pub(crate) async fn commit_pending(&self, pending: PendingCommit) -> Result<Node> {
        self.commits.commit(pending).await
    }

    /// A commit by nobody in particular.
    #[cfg(test)]
    pub(crate) async fn commit(
        &self,
        commit: &Commit,
        pieces: Vec<ChunkRef>,
        seal: &[u8],
        now: i64,
    ) -> Result<Node> {
        let (commit, seal, writer) = (commit.clone(), seal.to_vec(), None);
        self.commit_pending(PendingCommit { commit, pieces, seal, writer, now }).await
    }
}

/// One commit of a batch.
struct Work<'b> {
    pending: &'b PendingCommit,
    /// Result, if it is known before the others are committed.
    outcome: Option<Result<Node>>,
    /// Waits for a commit of the batch to the same file.
    deferred: bool,
    /// The file, if it exists.
    node: Option<Node>,
    /// Number of the version on which it is based, 0 for none, and its map.
    base: (u64, Vec<ChunkRef>),
}

impl Work<'_> {
    fn is_open(&self) -> bool {
        self.outcome.is_none() && !self.deferred
    }

    fn refuse(&mut self, error: MetaError) {
        self.outcome = Some(Err(error));
    }

    fn place(&self) -> (NodeId, &str) {
        let make = &self.pending.commit.make;
        (make.parent, &make.name)
    }
}

/// Commits all, or fails without having changed anything once the transaction is rolled back. None for a
/// commit that must wait for another of the batch. `apart` gives numbers in PostgreSQL outside the
/// transaction, so that nobody else waits for it.
pub(super) async fn commit_together(
    tx: &mut Tx<'_>,
    apart: &Connections,
    batch: &[PendingCommit],
) -> Result<Vec<Option<Result<Node>>>> {
    let work = |pending| Work { pending, outcome: None, deferred: false, node: None, base: (0, Vec::new()) };
    let mut all: Vec<Work<'_>> = batch.iter().map(work).collect();
    find_repeated(tx, &mut all).await?;
    renew_sessions(tx, &mut all).await?;
    find_nodes(tx, &mut all).await?;
    defer_same_files(&mut all);
    check_parents(tx, &mut all).await?;
    for one in all.iter_mut().filter(|one| one.is_open()) {
        let checked = check_map(one.pending);
        checked.unwrap_or_else(|error| one.refuse(error));
    }
    for one in all.iter_mut().filter(|one| one.is_open()) {
        claim_predecessor(tx, one).await?;
    }
    count_chunks(tx, &all).await?;
    insert(tx, apart, &mut all).await?;
    Ok(all.into_iter().map(|one| if one.deferred { None } else { one.outcome }).collect())
}

fn open<'a, 'b>(all: &'a mut [Work<'b>]) -> Vec<&'a mut Work<'b>> {
    all.iter_mut().filter(|one| one.is_open()).collect()
}

/// Finds commits that were made before, by session and number.
async fn find_repeated(tx: &mut Tx<'_>, all: &mut [Work<'_>]) -> Result<()> {
    let text = format!(
        "SELECT session, number, node FROM committed WHERE (session, number) IN (VALUES {})",
        typed_rows(1, all.len(), &["BIGINT", "BIGINT"])
    );
    let mut query = query(text);
    for one in all.iter() {
        let commit = &one.pending.commit;
        query = query.bind(signed(commit.session)?).bind(i64::from(commit.number));
    }
    for row in query.fetch_all(&mut *tx).await? {
        let (session, number) = (unsigned(row.try_get(0)?), row.try_get::<i64>(1)?);
        let node = files::get(tx, unsigned(row.try_get(2)?)).await?;
        for one in all.iter_mut() {
            let commit = &one.pending.commit;
            if (commit.session, i64::from(commit.number)) == (session, number) {
                one.outcome = Some(node.clone().ok_or(MetaError::NotFound));
            }
        }
    }
    Ok(())
}

/// Renews the sessions, and refuses those that have ended.
async fn renew_sessions(tx: &mut Tx<'_>, all: &mut [Work<'_>]) -> Result<()> {
    let mut work = open(all);
    let now = work.iter().map(|one| one.pending.now).max().unwrap_or(0);
    if work.is_empty() {
        return Ok(());
    }
    let mut query =
        query(format!("UPDATE session SET seen = $1 WHERE id IN ({}) RETURNING id", list(2, work.len())))
            .bind(now);
    for one in &work {
        query = query.bind(signed(one.pending.commit.session)?);
    }
    let mut living = HashSet::new();
    for row in query.fetch_all(&mut *tx).await? {
        living.insert(unsigned(row.try_get(0)?));
    }
    for one in &mut work {
        if !living.contains(&one.pending.commit.session) {
            one.refuse(MetaError::SessionOver);
        }
    }
    Ok(())
}

/// Finds the files to commit to: the node, else the file with the name by now, else none.
async fn find_nodes(tx: &mut Tx<'_>, all: &mut [Work<'_>]) -> Result<()> {
    let mut work = open(all);
    let ids: Vec<NodeId> = work.iter().filter_map(|one| one.pending.commit.node).collect();
    let by_id: HashMap<NodeId, Node> =
        files::get_all(tx, &ids).await?.into_iter().map(|node| (node.id, node)).collect();
    for one in &mut work {
        one.node = one.pending.commit.node.and_then(|id| by_id.get(&id)).cloned();
    }
    let places: Vec<(NodeId, &str)> =
        work.iter().filter(|one| one.node.is_none()).map(|one| one.place()).collect();
    let by_name: HashMap<(NodeId, String), Node> = files::find_all(tx, &places)
        .await?
        .into_iter()
        .map(|node| ((node.parent, node.name.clone()), node))
        .collect();
    for one in &mut work {
        if one.node.is_none() {
            let (parent, name) = one.place();
            one.node = by_name.get(&(parent, name.to_owned())).cloned();
        }
        if one.node.as_ref().is_some_and(|node| node.folder) {
            one.refuse(MetaError::IsAFolder);
        }
    }
    Ok(())
}

/// Leaves one commit to each file, and one upon each version, in the batch.
fn defer_same_files(all: &mut [Work<'_>]) {
    let (mut names, mut nodes, mut bases) = (HashSet::new(), HashSet::new(), HashSet::new());
    for one in all.iter_mut().filter(|one| one.is_open()) {
        let Commit { make, base, .. } = &one.pending.commit;
        let current = one.node.as_ref().map_or(0, |node| node.version);
        one.base.0 = if *base > 0 { *base } else { current };
        let known_file = match &one.node {
            Some(node) => !nodes.insert(node.id),
            None => !names.insert((make.parent, &make.name)),
        };
        let known_base = one.base.0 > 0 && !bases.insert(one.base.0);
        one.deferred = known_file || known_base;
    }
}

/// Refuses new files with a bad name, or in a folder that does not exist.
async fn check_parents(tx: &mut Tx<'_>, all: &mut [Work<'_>]) -> Result<()> {
    let mut work = open(all);
    work.retain(|one| one.node.is_none());
    let ids: Vec<NodeId> = work.iter().map(|one| one.place().0).collect();
    let parents: HashMap<NodeId, bool> =
        files::get_all(tx, &ids).await?.into_iter().map(|node| (node.id, node.folder)).collect();
    for one in work {
        let (parent, name) = one.place();
        let checked = files::check_name(name).and_then(|()| match parents.get(&parent) {
            None => Err(MetaError::NotFound),
            Some(false) => Err(MetaError::NotAFolder),
            Some(true) => Ok(()),
        });
        checked.unwrap_or_else(|error| one.refuse(error));
    }
    Ok(())
}

fn check_map(pending: &PendingCommit) -> Result<()> {
    let pieces = &pending.pieces;
    if pieces.iter().map(|piece| u64::from(piece.length)).sum::<u64>() != pending.commit.size {
        return Err(MetaError::Invalid("the map and the file have different lengths"));
    }
    let mut lengths: HashMap<u64, u32> = HashMap::with_capacity(pieces.len());
    for piece in pieces {
        if *lengths.entry(piece.chunk).or_insert(piece.length) != piece.length {
            return Err(MetaError::Invalid("a chunk has two lengths"));
        }
    }
    Ok(())
}

/// Makes a version the predecessor in a chain and reads its map. There is none if the version does not exist,
/// has a successor, or requires fewer copies.
async fn claim_predecessor(tx: &mut Tx<'_>, one: &mut Work<'_>) -> Result<()> {
    if one.base.0 == 0 {
        return Ok(());
    }
    let row =
        query("UPDATE version SET newer = -1 WHERE id = $1 AND newer = 0 AND copies >= $2 RETURNING map")
            .bind(signed(one.base.0)?)
            .bind(i64::from(one.pending.commit.copies.max(1)))
            .fetch_optional(&mut *tx)
            .await?;
    one.base = match row {
        Some(row) => (one.base.0, pieces_of(&row.try_get::<Vec<u8>>(0)?)?),
        None => (0, Vec::new()),
    };
    Ok(())
}

/// Counts the versions as users of their chunks, except for those that the previous version in the chain has.
/// Refuses maps with missing chunks.
async fn count_chunks(tx: &mut Tx<'_>, all: &[Work<'_>]) -> Result<()> {
    if tx.is_postgres() {
        // No benefactor leaves with a copy that is counted here; SQLite has one writer.
        query("SELECT id FROM benefactor FOR KEY SHARE").fetch_all(&mut *tx).await?;
    }
    let mut users: BTreeMap<ChunkId, NewUsers> = BTreeMap::new();
    let mut pieces_needed = Vec::new();
    for one in all.iter().filter(|one| one.is_open()) {
        let (commit, base) = (&one.pending.commit, &one.base.1);
        let lengths = lengths(one.pending);
        let changed =
            |piece: &ChunkRef| lengths.get(&piece.chunk).is_some_and(|found| *found != piece.length);
        if base.iter().any(changed) {
            return Err(MetaError::Invalid(OTHER_LENGTH));
        }
        let (new, old) = (reference_counts::numbers(&one.pending.pieces), reference_counts::numbers(base));
        for chunk in reference_counts::without(&new, &old) {
            let users = users.entry(chunk).or_default();
            users.count += 1;
            users.copies = users.copies.max(i64::from(commit.copies.max(1)));
        }
        pieces_needed.extend(reference_counts::both(&new, &old));
    }
    pieces_needed.sort_unstable();
    pieces_needed.dedup();
    refuse_lost(tx, &pieces_needed).await?;
    let taken = add_users(tx, &users).await?;
    for one in all.iter().filter(|one| one.is_open()) {
        let other = |(chunk, length): (&u64, &u32)| {
            taken.get(chunk).is_some_and(|taken| taken.length != i64::from(*length))
        };
        if lengths(one.pending).iter().any(other) {
            return Err(MetaError::Invalid(OTHER_LENGTH));
        }
    }
    let mut lacking = Vec::new();
    for (chunk, Taken { copies, want, coded, .. }) in &taken {
        match copies {
            // The pieces are looked at together with those of the older version.
            0 if *coded > 0 => pieces_needed.push(*chunk),
            0 => return Err(MetaError::Gone),
            _ if copies < want => lacking.push(*chunk),
            _ => {}
        }
    }
    let now = all.iter().map(|one| one.pending.now).max().unwrap_or(0);
    chunks::queue(tx, &lacking, now).await?;
    pieces_needed.sort_unstable();
    pieces_needed.dedup();
    shards::refuse_lost(tx, &pieces_needed).await
}

const OTHER_LENGTH: &str = "a chunk of the map has another length than before";

/// Versions of a batch that begin to use a chunk, and the copies that they require.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct NewUsers {
    count: i64,
    copies: i64,
}

/// A chunk whose new users are counted.
struct Taken {
    length: i64,
    copies: i64,
    want: i64,
    coded: i64,
}

fn lengths(pending: &PendingCommit) -> HashMap<u64, u32> {
    pending.pieces.iter().map(|piece| (piece.chunk, piece.length)).collect()
}

/// Chunks with the same new users, as ranges of their numbers.
type UserRanges = Vec<(ChunkId, ChunkId, NewUsers)>;

/// Counts new users of chunks, many with one statement. Fails if one of the chunks does not exist.
///
/// SQLite looks a range up as fast as a chunk. PostgreSQL would guess that each range is half a percent of
/// the table and read all of it, so it gets each chunk for itself.
async fn add_users(tx: &mut Tx<'_>, users: &BTreeMap<ChunkId, NewUsers>) -> Result<HashMap<ChunkId, Taken>> {
    let (mut ranges, apart) = (UserRanges::new(), tx.is_postgres());
    for (chunk, users) in users {
        match ranges.last_mut() {
            Some((_, last, same)) if !apart && *last + 1 == *chunk && same == users => *last = *chunk,
            _ => ranges.push((*chunk, *chunk, *users)),
        }
    }
    let condition = if apart { "id = low" } else { "id BETWEEN low AND high" };
    let mut taken = HashMap::with_capacity(users.len());
    for part in ranges.chunks(RANGES) {
        let text = format!(
            "WITH part (low, high, users, needed) AS (VALUES {})
             UPDATE chunk SET refs = refs + users, want = CASE WHEN want < needed AND coded = 0 THEN needed ELSE want END
             FROM part WHERE {condition} AND doomed = 0 RETURNING id, length,
                 (SELECT COUNT(*) FROM place JOIN benefactor ON benefactor.id = place.benefactor
                  WHERE place.chunk = chunk.id AND benefactor.lost = 0), want, coded",
            typed_rows(1, part.len(), &["BIGINT"; 4])
        );
        let mut query = query(text);
        for (low, high, users) in part {
            query = query.bind(signed(*low)?).bind(signed(*high)?).bind(users.count).bind(users.copies);
        }
        for row in query.fetch_all(&mut *tx).await? {
            let (length, copies) = (row.try_get(1)?, row.try_get(2)?);
            let (want, coded) = (row.try_get(3)?, row.try_get(4)?);
            taken.insert(unsigned(row.try_get(0)?), Taken { length, copies, want, coded });
        }
    }
    if taken.len() == users.len() { Ok(taken) } else { Err(MetaError::Gone) }
}

/// Refuses chunks in use without any copy. These are queued for repair, so few rows are read.
async fn refuse_lost(tx: &mut Tx<'_>, chunks: &[ChunkId]) -> Result<()> {
    for ranges in reference_counts::runs(chunks).chunks(RANGES) {
        let text = format!(
            "{} SELECT repair.chunk FROM part CROSS JOIN repair WHERE repair.chunk BETWEEN part.low AND part.high
                 AND EXISTS (SELECT 1 FROM chunk WHERE chunk.id = repair.chunk AND chunk.coded = 0)
                 AND NOT EXISTS (SELECT 1 FROM place JOIN benefactor ON benefactor.id = place.benefactor
                     WHERE place.chunk = repair.chunk AND benefactor.lost = 0) LIMIT 1",
            ranges_as_part(1, ranges.len())
        );
        let mut query = query(text);
        for (low, high) in ranges {
            query = query.bind(signed(*low)?).bind(signed(*high)?);
        }
        if query.fetch_optional(&mut *tx).await?.is_some() {
            return Err(MetaError::Gone);
        }
    }
    Ok(())
}

/// Reserves numbers of versions and nodes; in PostgreSQL, a transaction that had them would make everybody
/// wait. That of its own need not be synced: the log is one, so whatever uses the numbers is synced with it.
async fn reserve(tx: &mut Tx<'_>, apart: &Connections, versions: usize, nodes: usize) -> Result<(u64, u64)> {
    if !tx.is_postgres() {
        return Ok((numbers(tx, "version", versions).await?, numbers(tx, "node", nodes).await?));
    }
    let mut own = apart.begin().await?;
    query("SET LOCAL synchronous_commit = off").execute(&mut own).await?;
    let first = (numbers(&mut own, "version", versions).await?, numbers(&mut own, "node", nodes).await?);
    own.commit().await?;
    Ok(first)
}

/// Inserts versions and new files, and records the commits.
async fn insert(tx: &mut Tx<'_>, apart: &Connections, all: &mut [Work<'_>]) -> Result<()> {
    let work = open(all);
    if work.is_empty() {
        return Ok(());
    }
    let new = work.iter().filter(|one| one.node.is_none()).count();
    let (first, first_node) = reserve(tx, apart, work.len(), new).await?;
    let mut nodes = Vec::with_capacity(work.len());
    let mut made = Vec::with_capacity(new);
    for (one, version) in work.iter().zip(first..) {
        let PendingCommit { commit, now, .. } = one.pending;
        let changed = now * 1_000_000;
        let (size, modified) = (commit.size, commit.modified);
        let node = match &one.node {
            Some(node) => Node { size, modified, changed, version, ..node.clone() },
            None => {
                let id = first_node + made.len() as u64;
                let node =
                    Node { size, modified, changed, version, ..files::node_from(id, &commit.make, *now) };
                made.push(node.clone());
                node
            }
        };
        nodes.push(node);
    }
    files::insert_all(tx, &made).await?;
    insert_versions(tx, &work, &nodes).await?;
    for (one, node) in work.iter().zip(&nodes) {
        if one.base.0 > 0 {
            set_neighbour(tx, "newer", one.base.0, node.version).await?;
        }
        if one.node.is_some() {
            files::update_content(tx, node).await?;
        }
    }
    record(tx, &work, &nodes).await?;
    for (one, node) in work.into_iter().zip(nodes) {
        one.outcome = Some(Ok(node));
    }
    Ok(())
}

async fn insert_versions(tx: &mut Tx<'_>, work: &[&mut Work<'_>], nodes: &[Node]) -> Result<()> {
    let mut last: HashMap<NodeId, i64> = HashMap::new();
    let old: Vec<NodeId> = work.iter().filter_map(|one| Some(one.node.as_ref()?.id)).collect();
    if !old.is_empty() {
        let text = format!(
            "SELECT node, MAX(number) FROM version WHERE node IN ({}) GROUP BY node",
            list(1, old.len())
        );
        let mut query = query(text);
        for node in &old {
            query = query.bind(signed(*node)?);
        }
        for row in query.fetch_all(&mut *tx).await? {
            last.insert(unsigned(row.try_get(0)?), row.try_get(1)?);
        }
    }
    let mut query = query(format!(
        "INSERT INTO version
             (id, node, number, size, created, chunks, sent, pinned, map, modified, older, newer, copies,
              writer)
         VALUES {}",
        rows(1, work.len(), 14)
    ));
    for (one, node) in work.iter().zip(nodes) {
        let PendingCommit { commit, pieces, seal, writer, now } = one.pending;
        query = query
            .bind(signed(node.version)?)
            .bind(signed(node.id)?)
            .bind(last.get(&node.id).copied().unwrap_or(0) + 1)
            .bind(signed(commit.size)?)
            .bind(now * 1_000_000)
            .bind(pieces.len() as i64)
            .bind(signed(commit.sent)?)
            .bind(0_i64)
            .bind(chunk_map::encode_sealed(pieces, seal))
            .bind(commit.modified)
            .bind(signed(one.base.0)?)
            .bind(0_i64)
            .bind(i64::from(commit.copies.max(1)))
            .bind(writer.map(|key| key.to_string()));
    }
    query.execute(&mut *tx).await?;
    Ok(())
}

/// Records the commits, so that repeated ones are recognised.
async fn record(tx: &mut Tx<'_>, work: &[&mut Work<'_>], nodes: &[Node]) -> Result<()> {
    let mut query =
        query(format!("INSERT INTO committed (session, number, node, at) VALUES {}", rows(1, work.len(), 4)));
    for (one, node) in work.iter().zip(nodes) {
        let PendingCommit { commit, now, .. } = one.pending;
        query = query
            .bind(signed(commit.session)?)
            .bind(i64::from(commit.number))
            .bind(signed(node.id)?)
            .bind(*now);
    }
    query.execute(&mut *tx).await?;
    Ok(())
}
