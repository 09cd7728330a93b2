//! Meta statements on files and folders.

use super::{
    database::{BATCH, Meta, list, numbers, rows, signed, typed_rows, unsigned},
    driver::{Row, Tx, query},
    pins, versions,
};
use crate::{
    meta::{MetaError, Result},
    policy::Policy,
    protocol::{MAX_NAME, NewNode, Node, NodeChange, NodeId},
};

const COLUMNS: &str = "id, parent, name, folder, mode, uid, gid, size, modified, changed, version";
/// Most nested folders; deeper nesting means damage.
const DEEPEST: usize = 256;

fn node_of(row: &Row) -> Result<Node> {
    Ok(Node {
        id: unsigned(row.try_get(0)?),
        parent: unsigned(row.try_get(1)?),
        name: row.try_get(2)?,
        folder: row.try_get::<i64>(3)? != 0,
        mode: row.try_get::<i64>(4)? as u32,
        uid: row.try_get::<i64>(5)? as u32,
        gid: row.try_get::<i64>(6)? as u32,
        size: unsigned(row.try_get(7)?),
        modified: row.try_get(8)?,
        changed: row.try_get(9)?,
        version: unsigned(row.try_get(10)?),
    })
}

pub(crate) async fn find(tx: &mut Tx<'_>, parent: NodeId, name: &str) -> Result<Option<Node>> {
    let row = query(format!("SELECT {COLUMNS} FROM node WHERE parent = $1 AND name = $2"))
        .bind(signed(parent)?)
        .bind(name)
        .fetch_optional(&mut *tx)
        .await?;
    row.map(|row| node_of(&row)).transpose()
}

pub(crate) async fn get(tx: &mut Tx<'_>, id: NodeId) -> Result<Option<Node>> {
    let row = query(format!("SELECT {COLUMNS} FROM node WHERE id = $1"))
        .bind(signed(id)?)
        .fetch_optional(&mut *tx)
        .await?;
    row.map(|row| node_of(&row)).transpose()
}

/// The nodes with these numbers that exist; their rows are locked in PostgreSQL.
pub(super) async fn get_all(tx: &mut Tx<'_>, ids: &[NodeId]) -> Result<Vec<Node>> {
    let mut found = Vec::with_capacity(ids.len());
    for batch in ids.chunks(BATCH) {
        let lock = if tx.is_postgres() { "ORDER BY id FOR NO KEY UPDATE" } else { "" };
        let mut query =
            query(format!("SELECT {COLUMNS} FROM node WHERE id IN ({}) {lock}", list(1, batch.len())));
        for id in batch {
            query = query.bind(signed(*id)?);
        }
        for row in query.fetch_all(&mut *tx).await? {
            found.push(node_of(&row)?);
        }
    }
    Ok(found)
}

/// The nodes with these folders and names that exist; their rows are locked in PostgreSQL.
pub(super) async fn find_all(tx: &mut Tx<'_>, places: &[(NodeId, &str)]) -> Result<Vec<Node>> {
    let mut found = Vec::new();
    for batch in places.chunks(BATCH) {
        let lock = if tx.is_postgres() { "ORDER BY id FOR NO KEY UPDATE" } else { "" };
        let mut query = query(format!(
            "SELECT {COLUMNS} FROM node WHERE (parent, name) IN (VALUES {}) {lock}",
            typed_rows(1, batch.len(), &["BIGINT", "TEXT"])
        ));
        for (parent, name) in batch {
            query = query.bind(signed(*parent)?).bind(*name);
        }
        for row in query.fetch_all(&mut *tx).await? {
            found.push(node_of(&row)?);
        }
    }
    Ok(found)
}

/// A node that was created just now.
pub(super) fn node_from(id: NodeId, make: &NewNode, now: i64) -> Node {
    let NewNode { parent, name, folder, mode, uid, gid } = make.clone();
    let time = now * 1_000_000;
    Node {
        id,
        parent,
        name,
        folder,
        mode: mode & 0o7777,
        uid,
        gid,
        size: 0,
        modified: time,
        changed: time,
        version: 0,
    }
}

/// Inserts nodes whose names are free, and updates the times of their folders.
pub(super) async fn insert_all(tx: &mut Tx<'_>, nodes: &[Node]) -> Result<()> {
    for batch in nodes.chunks(BATCH) {
        let mut query = query(format!("INSERT INTO node ({COLUMNS}) VALUES {}", rows(1, batch.len(), 11)));
        for node in batch {
            query = query
                .bind(signed(node.id)?)
                .bind(signed(node.parent)?)
                .bind(&node.name)
                .bind(i64::from(node.folder))
                .bind(i64::from(node.mode))
                .bind(i64::from(node.uid))
                .bind(i64::from(node.gid))
                .bind(signed(node.size)?)
                .bind(node.modified)
                .bind(node.changed)
                .bind(signed(node.version)?);
        }
        query.execute(&mut *tx).await?;
    }
    let mut changed: std::collections::BTreeMap<NodeId, i64> = Default::default();
    for node in nodes {
        let latest = changed.entry(node.parent).or_insert(node.changed);
        *latest = node.changed.max(*latest);
    }
    for (folder, at) in changed {
        touch(tx, folder, at / 1_000_000).await?;
    }
    Ok(())
}

/// Stores what a commit changes of a file.
pub(super) async fn update_content(tx: &mut Tx<'_>, node: &Node) -> Result<()> {
    query("UPDATE node SET size = $2, modified = $3, changed = $4, version = $5 WHERE id = $1")
        .bind(signed(node.id)?)
        .bind(signed(node.size)?)
        .bind(node.modified)
        .bind(node.changed)
        .bind(signed(node.version)?)
        .execute(&mut *tx)
        .await?;
    Ok(())
}

/// Accepts one path component that is not `.`, `..` or the folder of old versions.
pub(super) fn check_name(name: &str) -> Result<()> {
    let bad = name.is_empty() || name.len() > MAX_NAME || name.contains(['/', '\0']);
    if bad || [".", "..", ".versions"].contains(&name) {
        return Err(MetaError::Invalid("the name is not allowed"));
    }
    Ok(())
}

/// Creates a node in an existing folder; the name must be free.
pub(crate) async fn make_in(tx: &mut Tx<'_>, make: &NewNode, now: i64) -> Result<Node> {
    check_name(&make.name)?;
    let parent = get(tx, make.parent).await?.ok_or(MetaError::NotFound)?;
    if !parent.folder {
        return Err(MetaError::NotAFolder);
    }
    if find(tx, make.parent, &make.name).await?.is_some() {
        return Err(MetaError::Exists);
    }
    let node = node_from(numbers(tx, "node", 1).await?, make, now);
    insert_all(tx, std::slice::from_ref(&node)).await?;
    Ok(node)
}

/// Updates the times of a folder after a change in it.
pub(super) async fn touch(tx: &mut Tx<'_>, folder: NodeId, now: i64) -> Result<()> {
    query("UPDATE node SET modified = $2, changed = $2 WHERE id = $1")
        .bind(signed(folder)?)
        .bind(now * 1_000_000)
        .execute(&mut *tx)
        .await?;
    Ok(())
}

/// Gives a node another folder and name, which must be free.
pub(super) async fn move_to(tx: &mut Tx<'_>, node: NodeId, to: (NodeId, &str), now: i64) -> Result<()> {
    query("UPDATE node SET parent = $2, name = $3, changed = $4 WHERE id = $1")
        .bind(signed(node)?)
        .bind(signed(to.0)?)
        .bind(to.1)
        .bind(now * 1_000_000)
        .execute(&mut *tx)
        .await?;
    touch(tx, to.0, now).await
}

async fn is_empty(tx: &mut Tx<'_>, folder: NodeId) -> Result<bool> {
    let row = query("SELECT 1 FROM node WHERE parent = $1 LIMIT 1")
        .bind(signed(folder)?)
        .fetch_optional(&mut *tx)
        .await?;
    Ok(row.is_none())
}

pub(super) async fn delete(tx: &mut Tx<'_>, id: NodeId) -> Result<()> {
    query("DELETE FROM node WHERE id = $1").bind(signed(id)?).execute(&mut *tx).await?;
    Ok(())
}

/// Whether `folder` is `node` or below it.
async fn is_within(tx: &mut Tx<'_>, mut folder: NodeId, node: NodeId) -> Result<bool> {
    for _ in 0..DEEPEST {
        if folder == node {
            return Ok(true);
        }
        match get(tx, folder).await? {
            Some(found) if found.id > 1 => folder = found.parent,
            _ => return Ok(false),
        }
    }
    Err(MetaError::Invalid("folders are nested too deeply"))
}

impl Meta {
    pub(crate) async fn lookup(&self, parent: NodeId, name: &str) -> Result<Node> {
        let row = query(format!("SELECT {COLUMNS} FROM node WHERE parent = $1 AND name = $2"))
            .bind(signed(parent)?)
            .bind(name)
            .fetch_optional(&self.read)
            .await?;
        node_of(&row.ok_or(MetaError::NotFound)?)
    }

    pub(crate) async fn node(&self, id: NodeId) -> Result<Node> {
        let row = query(format!("SELECT {COLUMNS} FROM node WHERE id = $1"))
            .bind(signed(id)?)
            .fetch_optional(&self.read)
            .await?;
        node_of(&row.ok_or(MetaError::NotFound)?)
    }

    pub(crate) async fn list(&self, parent: NodeId, after: &str, most: u32) -> Result<Vec<Node>> {
        let text =
            format!("SELECT {COLUMNS} FROM node WHERE parent = $1 AND name > $2 ORDER BY name LIMIT $3");
        let rows =
            query(text).bind(signed(parent)?).bind(after).bind(i64::from(most)).fetch_all(&self.read).await?;
        rows.iter().map(node_of).collect()
    }

    pub(crate) async fn make(&self, make: &NewNode, now: i64) -> Result<Node> {
        let mut tx = self.write.begin().await?;
        let node = make_in(&mut tx, make, now).await?;
        self.finish(tx).await?;
        Ok(node)
    }

    pub(crate) async fn remove(&self, parent: NodeId, name: &str, folder: bool, now: i64) -> Result<()> {
        let mut tx = self.write.begin().await?;
        let node = find(&mut tx, parent, name).await?.ok_or(MetaError::NotFound)?;
        match (node.folder, folder) {
            (true, false) => return Err(MetaError::IsAFolder),
            (false, true) => return Err(MetaError::NotAFolder),
            (true, true) if !is_empty(&mut tx, node.id).await? => return Err(MetaError::NotEmpty),
            _ => {}
        }
        pins::refuse_pinned(&mut tx, node.id, None, now).await?;
        versions::drop_all(&mut tx, node.id, now).await?;
        delete(&mut tx, node.id).await?;
        touch(&mut tx, parent, now).await?;
        self.finish(tx).await
    }

    /// Renames a node. A file that it replaces passes on its versions: a checkpoint that is written under a
    /// temporary name and renamed becomes the next version.
    pub(crate) async fn rename(
        &self,
        from: (NodeId, &str),
        to: (NodeId, &str),
        replace: bool,
        now: i64,
    ) -> Result<()> {
        check_name(to.1)?;
        let mut tx = self.write.begin().await?;
        let node = find(&mut tx, from.0, from.1).await?.ok_or(MetaError::NotFound)?;
        let folder = get(&mut tx, to.0).await?.ok_or(MetaError::NotFound)?;
        if !folder.folder {
            return Err(MetaError::NotAFolder);
        }
        if node.folder && is_within(&mut tx, to.0, node.id).await? {
            return Err(MetaError::Invalid("a folder cannot be moved into itself"));
        }
        if let Some(old) = find(&mut tx, to.0, to.1).await? {
            match (old.id == node.id, replace, node.folder, old.folder) {
                (true, ..) => return Ok(()),
                (_, false, ..) => return Err(MetaError::Exists),
                (.., false, true) => return Err(MetaError::IsAFolder),
                (.., true, false) => return Err(MetaError::NotAFolder),
                (.., true, true) if !is_empty(&mut tx, old.id).await? => return Err(MetaError::NotEmpty),
                _ => versions::transfer_versions(&mut tx, old.id, node.id).await?,
            }
            delete(&mut tx, old.id).await?;
        }
        move_to(&mut tx, node.id, to, now).await?;
        touch(&mut tx, from.0, now).await?;
        self.finish(tx).await
    }

    pub(crate) async fn change(&self, id: NodeId, change: &NodeChange, now: i64) -> Result<Node> {
        let mut tx = self.write.begin().await?;
        let node = get(&mut tx, id).await?.ok_or(MetaError::NotFound)?;
        query("UPDATE node SET mode = $2, uid = $3, gid = $4, modified = $5, changed = $6 WHERE id = $1")
            .bind(signed(id)?)
            .bind(i64::from(change.mode.map_or(node.mode, |mode| mode & 0o7777)))
            .bind(i64::from(change.uid.unwrap_or(node.uid)))
            .bind(i64::from(change.gid.unwrap_or(node.gid)))
            .bind(change.modified.unwrap_or(node.modified))
            .bind(now * 1_000_000)
            .execute(&mut tx)
            .await?;
        let node = get(&mut tx, id).await?.ok_or(MetaError::NotFound)?;
        self.finish(tx).await?;
        Ok(node)
    }

    /// The policy set on a file or folder, and the one that applies: its own or the nearest folder's.
    pub(crate) async fn policy(&self, folder: NodeId) -> Result<(Option<Policy>, Policy)> {
        let (mut at, mut own) = (folder, None);
        for depth in 0..DEEPEST {
            let row = query("SELECT parent, policy FROM node WHERE id = $1")
                .bind(signed(at)?)
                .fetch_optional(&self.read)
                .await?;
            let row = row.ok_or(MetaError::NotFound)?;
            if let Some(text) = row.try_get::<Option<String>>(1)? {
                let policy: Policy =
                    serde_json::from_str(&text).map_err(|_| MetaError::Damaged { what: "policy" })?;
                if depth == 0 {
                    own = Some(policy.clone());
                }
                return Ok((own, policy));
            }
            if at == 1 {
                break;
            }
            at = unsigned(row.try_get(0)?);
        }
        Ok((None, Policy::default()))
    }

    /// Sets a policy. On a folder it applies to files written afterwards and to retention. On a file, a
    /// higher number of copies also applies to its present versions.
    pub(crate) async fn set_policy(&self, node: NodeId, policy: Option<&Policy>, now: i64) -> Result<()> {
        let text = policy.map(serde_json::to_string).transpose();
        let text = text.map_err(|_| MetaError::Invalid("the policy cannot be stored"))?;
        let mut tx = self.write.begin().await?;
        let done = query("UPDATE node SET policy = $2 WHERE id = $1")
            .bind(signed(node)?)
            .bind(text)
            .execute(&mut tx)
            .await?;
        if done != 1 {
            return Err(MetaError::NotFound);
        }
        if let Some(policy) = policy {
            versions::raise_copies(&mut tx, node, policy.copies, now).await?;
        }
        self.finish(tx).await
    }

    pub(crate) async fn path(&self, node: NodeId) -> Result<String> {
        let mut names = Vec::new();
        let mut at = node;
        while at != 1 && names.len() < DEEPEST {
            let node = self.node(at).await?;
            names.push(node.name);
            at = node.parent;
        }
        names.reverse();
        Ok(format!("/{}", names.join("/")))
    }
}
