//! Rows of backups: reads the tables of one snapshot, and fills those of an empty database.
//!
//! A backup has the names of its columns, so one of an earlier schema is restored too: columns that it lacks
//! get their defaults. Sessions, reservations and the records of their commits are not in it, because they
//! have ended when it is restored. Nor are places: only an inventory tells what a benefactor has by then.
//! Restored chunks wait in the repair queue until enough copies are found.

use super::{
    database::{BATCH, Meta, rows, unsigned},
    driver::{Row, Tx, Value, query},
    schema,
};
use crate::meta::{MetaError, Result};

/// Kind of a column.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Number,
    Text,
    Bytes,
}

/// A table in a backup. Its first `key` columns are the primary key.
struct Table {
    name: &'static str,
    key: usize,
    columns: &'static [(&'static str, Kind)],
    /// Rows that are read at once; a row of `version` has up to 8 MiB.
    page: usize,
    /// Rows that are in a backup.
    which: &'static str,
}

const NUMBER: Kind = Kind::Number;

/// All tables of a backup.
const TABLES: &[Table] = &[
    Table {
        name: "counter",
        key: 1,
        columns: &[("name", Kind::Text), ("value", NUMBER)],
        page: 1000,
        which: "name NOT IN ('quarantine', 'crowded', 'backup')",
    },
    Table {
        name: "benefactor",
        key: 1,
        columns: &[
            ("id", NUMBER),
            ("key", Kind::Bytes),
            ("name", Kind::Text),
            ("address", Kind::Text),
            ("capacity", NUMBER),
            ("used", NUMBER),
            ("free", NUMBER),
            ("chunks", NUMBER),
            ("draining", NUMBER),
            ("lost", NUMBER),
            ("faults", NUMBER),
            ("seen", NUMBER),
            ("owed", NUMBER),
            ("labels", Kind::Text),
        ],
        page: 1000,
        which: "1 = 1",
    },
    Table {
        name: "node",
        key: 1,
        columns: &[
            ("id", NUMBER),
            ("parent", NUMBER),
            ("name", Kind::Text),
            ("folder", NUMBER),
            ("mode", NUMBER),
            ("uid", NUMBER),
            ("gid", NUMBER),
            ("size", NUMBER),
            ("modified", NUMBER),
            ("changed", NUMBER),
            ("version", NUMBER),
            ("policy", Kind::Text),
            ("coding", Kind::Text),
        ],
        page: 5000,
        which: "1 = 1",
    },
    Table {
        name: "version",
        key: 1,
        columns: &[
            ("id", NUMBER),
            ("node", NUMBER),
            ("number", NUMBER),
            ("size", NUMBER),
            ("created", NUMBER),
            ("chunks", NUMBER),
            ("sent", NUMBER),
            ("pinned", NUMBER),
            ("map", Kind::Bytes),
            ("modified", NUMBER),
            ("older", NUMBER),
            ("newer", NUMBER),
            ("copies", NUMBER),
            ("coded", NUMBER),
            ("writer", Kind::Text),
        ],
        page: 32,
        which: "1 = 1",
    },
    Table {
        name: "chunk",
        key: 1,
        columns: &[
            ("id", NUMBER),
            ("digest", Kind::Bytes),
            ("length", NUMBER),
            ("stored", NUMBER),
            ("refs", NUMBER),
            ("freed", NUMBER),
            ("want", NUMBER),
            ("doomed", NUMBER),
            ("coded", NUMBER),
        ],
        page: 20_000,
        which: "refs > 0",
    },
    Table {
        name: "step_group",
        key: 1,
        columns: &[
            ("node", NUMBER),
            ("files", NUMBER),
            ("job", Kind::Text),
            ("started", NUMBER),
            ("committed", NUMBER),
        ],
        page: 1000,
        which: "1 = 1",
    },
    Table {
        name: "piece",
        key: 2,
        columns: &[("chunk", NUMBER), ("number", NUMBER), ("piece", NUMBER)],
        page: 20_000,
        which: "1 = 1",
    },
    Table {
        name: "expelled",
        key: 1,
        columns: &[("key", Kind::Bytes), ("name", Kind::Text), ("at", NUMBER)],
        page: 1000,
        which: "1 = 1",
    },
    Table {
        name: "quota",
        key: 2,
        columns: &[("folder", NUMBER), ("member", Kind::Text), ("bytes", NUMBER)],
        page: 1000,
        which: "1 = 1",
    },
    Table {
        name: "held",
        key: 3,
        columns: &[
            ("version", NUMBER),
            ("owner", Kind::Bytes),
            ("holder", Kind::Text),
            ("since", NUMBER),
            ("ends", NUMBER),
        ],
        page: 1000,
        which: "1 = 1",
    },
];

/// Numbers that are skipped after a restore. The lost manager may have assigned those that follow the
/// backup's, and clients may still use them.
const SKIPPED: i64 = 1 << 32;
/// Numbers that clients keep.
const SKIPPING: &str = "('chunk', 'node', 'version', 'session')";
/// Bytes of maps in one statement.
const BATCH_BYTES: usize = 4 << 20;
/// Tables of an empty database that are filled.
const CLEARED: &[&str] = &["node", "counter"];

/// A snapshot of the database, table by table.
pub(crate) struct Snapshot {
    tx: Tx<'static>,
    table: usize,
    /// Key of the last row that was read.
    after: Option<Vec<Value>>,
}

/// A part of a snapshot.
pub(crate) enum SnapshotPart {
    /// Start of a table with these columns.
    Table { name: String, columns: Vec<String> },
    /// Rows of the table that was started last.
    Rows(Vec<Vec<Value>>),
}

impl Meta {
    /// Begins to read everything as of one moment. Nobody waits for it.
    pub(crate) async fn snapshot(&self) -> Result<Snapshot> {
        let mut tx = self.read.begin().await?;
        if tx.is_postgres() {
            query("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY").execute(&mut tx).await?;
        }
        Ok(Snapshot { tx, table: 0, after: None })
    }

    /// Number of files and folders, without the root.
    pub(crate) async fn nodes(&self) -> Result<u64> {
        let row = query("SELECT COUNT(*) FROM node WHERE id > 1").fetch_one(&self.read).await?;
        Ok(unsigned(row.try_get(0)?))
    }
}

impl Snapshot {
    /// Version of the schema.
    pub(crate) async fn schema(&mut self) -> Result<i64> {
        let text = "SELECT value FROM counter WHERE name = 'schema'";
        query(text).fetch_one(&mut self.tx).await?.try_get(0)
    }

    /// The next part; none at the end.
    pub(crate) async fn next(&mut self) -> Result<Option<SnapshotPart>> {
        let Some(table) = TABLES.get(self.table) else { return Ok(None) };
        let Some(after) = self.after.take() else {
            self.after = Some(Vec::new());
            let columns = table.columns.iter().map(|(name, _)| (*name).to_owned()).collect();
            return Ok(Some(SnapshotPart::Table { name: table.name.to_owned(), columns }));
        };
        let rows = table.page(&mut self.tx, after).await?;
        match rows.last().filter(|_| rows.len() == table.page) {
            Some(last) => self.after = Some(last[..table.key].to_vec()),
            None => self.table += 1,
        }
        Ok(Some(SnapshotPart::Rows(rows)))
    }
}

impl Table {
    /// The rows behind a key, which is empty before the first.
    async fn page(&self, tx: &mut Tx<'_>, after: Vec<Value>) -> Result<Vec<Vec<Value>>> {
        let names: Vec<&str> = self.columns.iter().map(|(name, _)| *name).collect();
        let (name, key, which) = (self.name, names[..self.key].join(", "), self.which);
        let behind = match after.len() {
            0 => String::new(),
            _ => format!("AND ({key}) > {}", rows(1, 1, self.key)),
        };
        let text = format!(
            "SELECT {} FROM {name} WHERE {which} {behind} ORDER BY {key} LIMIT {}",
            names.join(", "),
            self.page
        );
        let query = after.into_iter().fold(query(text), |query, value| query.bind(value));
        let found = query.fetch_all(&mut *tx).await?;
        found.iter().map(|row| self.values(row)).collect()
    }

    fn values(&self, row: &Row) -> Result<Vec<Value>> {
        let columns = self.columns.iter().enumerate();
        let value = |(at, (_, kind)): (usize, &(_, Kind))| {
            Ok(match kind {
                Kind::Number => Value::Number(row.try_get(at)?),
                Kind::Text => Value::Text(row.try_get(at)?),
                Kind::Bytes => Value::Bytes(row.try_get(at)?),
            })
        };
        columns.map(value).collect()
    }
}

/// What a restored database has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct RestoredRows {
    pub(crate) nodes: u64,
    pub(crate) versions: u64,
    pub(crate) chunks: u64,
}

/// Fills an empty database, completely or not at all.
pub(crate) struct RowLoader {
    meta: Meta,
    tx: Tx<'static>,
    /// Statement for the rows of the present table, up to the values, and the number of columns.
    insert: (String, usize),
    waiting: Vec<Vec<Value>>,
    /// Bytes in them.
    bytes: usize,
}

impl RowLoader {
    /// Begins; nothing is in the database before [`RowLoader::finish`]. Refuses a backup of a newer schema.
    pub(crate) async fn begin(meta: Meta, schema: i64) -> Result<Self> {
        if usize::try_from(schema).unwrap_or(usize::MAX) > schema::LATER.len() + 1 {
            return Err(MetaError::Invalid("the backup was made by a newer version"));
        }
        let mut tx = meta.write.begin().await?;
        for table in CLEARED {
            // The version of the schema is that of this database.
            let which = if *table == "counter" { "name <> 'schema'" } else { "1 = 1" };
            query(format!("DELETE FROM {table} WHERE {which}")).execute(&mut tx).await?;
        }
        Ok(Self { meta, tx, insert: Default::default(), waiting: Vec::new(), bytes: 0 })
    }

    /// Starts a table. Names come from a file, so only known ones get into a statement.
    pub(crate) async fn table(&mut self, name: &str, columns: &[String]) -> Result<()> {
        self.flush().await?;
        let damaged = MetaError::Damaged { what: "backup: a table is unknown" };
        let table = TABLES.iter().find(|table| table.name == name).ok_or(damaged)?;
        let known = |column: &String| table.columns.iter().any(|(name, _)| name == column);
        if columns.is_empty() || !columns.iter().all(known) {
            return Err(MetaError::Damaged { what: "backup: a column is unknown" });
        }
        self.insert = (format!("INSERT INTO {name} ({}) VALUES", columns.join(", ")), columns.len());
        Ok(())
    }

    pub(crate) async fn row(&mut self, row: Vec<Value>) -> Result<()> {
        if self.insert.1 == 0 || row.len() != self.insert.1 {
            return Err(MetaError::Damaged { what: "backup: a row has no table" });
        }
        let schema = Value::Text(Some("schema".to_owned()));
        if self.insert.0.starts_with("INSERT INTO counter") && row.contains(&schema) {
            return Ok(());
        }
        let bytes = |value: &Value| if let Value::Bytes(bytes) = value { bytes.len() } else { 0 };
        self.bytes += row.iter().map(bytes).sum::<usize>();
        self.waiting.push(row);
        let full = self.waiting.len() >= BATCH || self.bytes >= BATCH_BYTES;
        if full { self.flush().await } else { Ok(()) }
    }

    async fn flush(&mut self) -> Result<()> {
        let waiting = std::mem::take(&mut self.waiting);
        self.bytes = 0;
        if waiting.is_empty() {
            return Ok(());
        }
        let text = format!("{} {}", self.insert.0, rows(1, waiting.len(), self.insert.1));
        let query = waiting.into_iter().flatten().fold(query(text), |query, value| query.bind(value));
        query.execute(&mut self.tx).await?;
        Ok(())
    }

    /// Makes everything visible and durable. The quarantine begins when a manager starts; see
    /// [`Meta::start_quarantine`].
    pub(crate) async fn finish(mut self, quarantine: i64) -> Result<RestoredRows> {
        self.flush().await?;
        let tx = &mut self.tx;
        query(format!("UPDATE counter SET value = value + {SKIPPED} WHERE name IN {SKIPPING}"))
            .execute(&mut *tx)
            .await?;
        query("INSERT INTO counter (name, value) VALUES ('quarantine', $1)")
            .bind(-quarantine.max(1))
            .execute(&mut *tx)
            .await?;
        query("INSERT INTO repair (chunk, since) SELECT id, 0 FROM chunk").execute(&mut *tx).await?;
        let mut counts = Vec::new();
        for text in ["node WHERE folder = 0", "version", "chunk"] {
            let row = query(format!("SELECT COUNT(*) FROM {text}")).fetch_one(&mut *tx).await?;
            counts.push(unsigned(row.try_get(0)?));
        }
        self.meta.finish(self.tx).await?;
        let [nodes, versions, chunks] = counts[..] else { return Err(MetaError::Damaged { what: "sums" }) };
        Ok(RestoredRows { nodes, versions, chunks })
    }
}
