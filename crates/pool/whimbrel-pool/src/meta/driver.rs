//! One interface to SQLite and PostgreSQL: statements with numbered values, rows, transactions.
//!
//! Statements are the same for both; the types of columns are 64-bit numbers, texts and bytes.

use crate::meta::Result;
use serde::{Deserialize, Serialize};
use sqlx::{
    AssertSqlSafe, ColumnIndex, Decode, Pool, Postgres, Row as _, Sqlite, Type, pool::PoolOptions,
    postgres::PgRow, sqlite::SqliteRow,
};

#[derive(Debug, Clone)]
pub(crate) enum Connections {
    Sqlite(Pool<Sqlite>),
    Postgres(Pool<Postgres>),
}

impl Connections {
    /// Opens at most `most` connections; they last, since a connection takes its settings with it.
    pub(crate) async fn open(url: &str, most: u32) -> Result<Self> {
        Ok(match is_postgres(url) {
            true => Self::Postgres(options(most).connect(url).await?),
            false => Self::Sqlite(options(most).connect(url).await?),
        })
    }

    pub(crate) async fn begin(&self) -> Result<Tx<'static>> {
        Ok(match self {
            Self::Sqlite(pool) => Tx::Sqlite(pool.begin().await?),
            Self::Postgres(pool) => Tx::Postgres(pool.begin().await?),
        })
    }
}

/// Whether a location is the URL of a PostgreSQL database.
pub(crate) fn is_postgres(location: &str) -> bool {
    location.starts_with("postgres://") || location.starts_with("postgresql://")
}

fn options<D: sqlx::Database>(most: u32) -> PoolOptions<D> {
    PoolOptions::new().max_connections(most).max_lifetime(None).idle_timeout(None)
}

/// A transaction; dropped without a commit, it is rolled back.
pub(crate) enum Tx<'a> {
    Sqlite(sqlx::Transaction<'a, Sqlite>),
    Postgres(sqlx::Transaction<'a, Postgres>),
}

impl Tx<'_> {
    pub(crate) async fn commit(self) -> Result<()> {
        match self {
            Self::Sqlite(tx) => tx.commit().await?,
            Self::Postgres(tx) => tx.commit().await?,
        }
        Ok(())
    }

    pub(crate) fn is_postgres(&self) -> bool {
        matches!(self, Self::Postgres(_))
    }

    /// The end of a `SELECT` that locks its rows. SQLite has one writer, and no words for this.
    pub(crate) fn row_lock(&self) -> &'static str {
        if self.is_postgres() { " FOR UPDATE" } else { "" }
    }
}

/// A value of a column. Backups store it, so the order of the kinds is part of their format.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Value {
    Number(i64),
    Text(Option<String>),
    Bytes(Vec<u8>),
}

impl From<i64> for Value {
    fn from(number: i64) -> Self {
        Self::Number(number)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(Some(text.to_owned()))
    }
}

impl From<&String> for Value {
    fn from(text: &String) -> Self {
        Self::Text(Some(text.clone()))
    }
}

impl From<Option<String>> for Value {
    fn from(text: Option<String>) -> Self {
        Self::Text(text)
    }
}

impl From<Vec<u8>> for Value {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes)
    }
}

pub(crate) struct Query {
    text: String,
    values: Vec<Value>,
}

/// A statement; `$1` is the first value that is bound.
pub(crate) fn query(text: impl Into<String>) -> Query {
    Query { text: text.into(), values: Vec::new() }
}

/// Where a statement runs: on any connection, or in a transaction.
pub(crate) enum Target<'t, 'a> {
    Any(&'t Connections),
    In(&'t mut Tx<'a>),
}

impl<'t> From<&'t Connections> for Target<'t, 't> {
    fn from(connections: &'t Connections) -> Self {
        Self::Any(connections)
    }
}

impl<'t, 'a> From<&'t mut Tx<'a>> for Target<'t, 'a> {
    fn from(tx: &'t mut Tx<'a>) -> Self {
        Self::In(tx)
    }
}

/// Runs a query by one method of the driver that the target has.
macro_rules! on_driver {
    ($query:expr, $target:expr, $method:ident, $of_sqlite:expr, $of_postgres:expr) => {{
        let Query { text, values } = $query;
        match $target.into() {
            Target::Any(Connections::Sqlite(pool)) => {
                $of_sqlite(bound!(Sqlite, text, values).$method(pool).await?)
            }
            Target::Any(Connections::Postgres(pool)) => {
                $of_postgres(bound!(Postgres, text, values).$method(pool).await?)
            }
            Target::In(Tx::Sqlite(tx)) => $of_sqlite(bound!(Sqlite, text, values).$method(&mut **tx).await?),
            Target::In(Tx::Postgres(tx)) => {
                $of_postgres(bound!(Postgres, text, values).$method(&mut **tx).await?)
            }
        }
    }};
}

macro_rules! bound {
    ($driver:ty, $text:expr, $values:expr) => {{
        let query = sqlx::query::<$driver>(AssertSqlSafe($text));
        $values.into_iter().fold(query, |query, value| match value {
            Value::Number(number) => query.bind(number),
            Value::Text(text) => query.bind(text),
            Value::Bytes(bytes) => query.bind(bytes),
        })
    }};
}

impl Query {
    pub(crate) fn bind(mut self, value: impl Into<Value>) -> Self {
        self.values.push(value.into());
        self
    }

    /// Runs the statement; how many rows it changed.
    pub(crate) async fn execute<'t, 'a: 't>(self, target: impl Into<Target<'t, 'a>>) -> Result<u64> {
        Ok(on_driver!(
            self,
            target,
            execute,
            |done: sqlx::sqlite::SqliteQueryResult| done.rows_affected(),
            |done: sqlx::postgres::PgQueryResult| done.rows_affected()
        ))
    }

    pub(crate) async fn fetch_all<'t, 'a: 't>(self, target: impl Into<Target<'t, 'a>>) -> Result<Vec<Row>> {
        Ok(on_driver!(
            self,
            target,
            fetch_all,
            |rows: Vec<SqliteRow>| rows.into_iter().map(Row::Sqlite).collect(),
            |rows: Vec<PgRow>| rows.into_iter().map(Row::Postgres).collect()
        ))
    }

    pub(crate) async fn fetch_optional<'t, 'a: 't>(
        self,
        target: impl Into<Target<'t, 'a>>,
    ) -> Result<Option<Row>> {
        Ok(on_driver!(
            self,
            target,
            fetch_optional,
            |row: Option<SqliteRow>| row.map(Row::Sqlite),
            |row: Option<PgRow>| row.map(Row::Postgres)
        ))
    }

    pub(crate) async fn fetch_one<'t, 'a: 't>(self, target: impl Into<Target<'t, 'a>>) -> Result<Row> {
        Ok(on_driver!(self, target, fetch_one, Row::Sqlite, Row::Postgres))
    }
}

pub(crate) enum Row {
    Sqlite(SqliteRow),
    Postgres(PgRow),
}

pub(crate) trait Column:
    for<'r> Decode<'r, Sqlite> + Type<Sqlite> + for<'r> Decode<'r, Postgres> + Type<Postgres>
{
}

impl<T> Column for T where
    T: for<'r> Decode<'r, Sqlite> + Type<Sqlite> + for<'r> Decode<'r, Postgres> + Type<Postgres>
{
}

impl Row {
    /// The value of a column, counted from 0.
    pub(crate) fn try_get<T: Column>(&self, index: usize) -> Result<T>
    where
        usize: ColumnIndex<SqliteRow> + ColumnIndex<PgRow>,
    {
        Ok(match self {
            Self::Sqlite(row) => row.try_get(index)?,
            Self::Postgres(row) => row.try_get(index)?,
        })
    }
}
