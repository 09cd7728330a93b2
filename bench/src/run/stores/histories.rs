//! Clients that check their own history: what a store has acknowledged must be there, whatever became of its
//! host since.
//!
//! Each client keeps in mind what it was told. Asked to ([`Histories::check`]), every one of them looks for
//! all of it and writes more before the caller goes on. A write without an answer may be there or not; one
//! with an answer must be, and what was never sent must not.

use crate::hosts::GUEST;
use anyhow::{Result, ensure};
use sqlx::{
    Connection as _, Row as _,
    postgres::{PgConnectOptions, PgConnection, PgSslMode},
};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};
use whimbrel_testkit::lab::Namespace;

/// How long an answer may take. A takeover takes half a second, and TCP notices up to as long after it.
const ANSWER: Duration = Duration::from_secs(3);
/// How long until all histories are checked.
const PATIENCE: Duration = Duration::from_secs(60);
/// Clients of each store.
const CLIENTS: u64 = 4;
/// Keys of each client of redis, and how many it writes at once.
const KEYS: u64 = 64;
const AT_ONCE: u64 = 16;

/// Clients of both stores, until they are dropped.
pub(in crate::run) struct Histories {
    shared: Arc<Shared>,
    clients: Vec<(Arc<AtomicU64>, JoinHandle<()>)>,
}

/// Which store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::run) enum Kind {
    Redis,
    Postgres,
}

impl Kind {
    pub(in crate::run) const BOTH: [Self; 2] = [Self::Redis, Self::Postgres];
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// The check that is wanted of all.
    wanted: AtomicU64,
    /// By [`Kind`].
    tallies: [Tally; 2],
    /// Why the last connection ended.
    trouble: Mutex<String>,
}

/// What became of one store's writes.
#[derive(Default)]
struct Tally {
    written: AtomicU64,
    lost: AtomicU64,
    /// Connections that were made.
    connected: AtomicU64,
    /// When how many writes were acknowledged, while somebody wants to know.
    acknowledged: Mutex<Option<Vec<(Instant, usize)>>>,
}

impl Tally {
    fn acknowledged(&self) -> MutexGuard<'_, Option<Vec<(Instant, usize)>>> {
        self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What was written, and of that what was not there when it was looked for, of redis and of PostgreSQL.
#[derive(Debug, Clone, Copy)]
pub(in crate::run) struct Sums {
    pub(in crate::run) written: [u64; 2],
    pub(in crate::run) lost: [u64; 2],
}

/// A connection to a store.
trait Store: Sized {
    /// What a client was told by it.
    type History;

    /// Connects, and finds out what became of the last write if nobody said.
    fn connect(client: u64, history: &mut Self::History) -> Result<Self>;

    /// Writes: how many writes were acknowledged.
    fn write(&mut self, history: &mut Self::History) -> Result<u64>;

    /// How many acknowledged writes are not there, or how many are there that never were.
    fn missing(&mut self, history: &Self::History) -> Result<u64>;
}

impl Histories {
    /// Starts those of these stores.
    pub(in crate::run) fn start(network: &Namespace, stores: &[Kind]) -> Self {
        let shared = Arc::new(Shared::default());
        let mut clients = Vec::new();
        for client in 0..CLIENTS {
            for store in stores.iter().copied() {
                let (shared, checked) = (shared.clone(), Arc::new(AtomicU64::new(0)));
                let its = checked.clone();
                let work = move || match store {
                    // Of each key the last value that was acknowledged.
                    Kind::Redis => {
                        let keys = Keys { known: vec![0; KEYS as usize], next: 1 };
                        client_of::<Redis>(&shared, store, client, &its, keys);
                    }
                    Kind::Postgres => client_of::<Postgres>(&shared, store, client, &its, Rows::default()),
                };
                clients.push((checked, network.spawn(work)));
            }
        }
        Self { shared, clients }
    }

    /// Notes from now on when a store has acknowledged how many writes.
    pub(in crate::run) fn record(&self, store: Kind) {
        *self.shared.tallies[store as usize].acknowledged() = Some(Vec::new());
    }

    /// What was noted, in order.
    pub(in crate::run) fn recorded(&self, store: Kind) -> Vec<(Instant, usize)> {
        let mut noted = self.shared.tallies[store as usize].acknowledged().take().unwrap_or_default();
        noted.sort();
        noted
    }

    /// Connections that broke.
    pub(in crate::run) fn broken(&self) -> u64 {
        let made =
            self.shared.tallies.iter().map(|tally| tally.connected.load(Ordering::SeqCst)).sum::<u64>();
        made.saturating_sub(self.clients.len() as u64)
    }

    /// Waits until everybody has looked for everything.
    pub(in crate::run) fn check(&self) -> Result<()> {
        let wanted = self.shared.wanted.fetch_add(1, Ordering::SeqCst) + 1;
        let deadline = Instant::now() + PATIENCE;
        while let Some(at) =
            self.clients.iter().position(|(checked, _)| checked.load(Ordering::SeqCst) < wanted)
        {
            let trouble = || self.shared.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone();
            ensure!(
                Instant::now() < deadline,
                "client {at} has not checked its history: {:?}, {}",
                self.sums(),
                trouble()
            );
            sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// So far.
    pub(in crate::run) fn sums(&self) -> Sums {
        let of = |number: fn(&Tally) -> &AtomicU64| {
            self.shared.tallies.each_ref().map(|tally| number(tally).load(Ordering::SeqCst))
        };
        Sums { written: of(|tally| &tally.written), lost: of(|tally| &tally.lost) }
    }
}

impl Drop for Histories {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        // One that failed has checked nothing more, which was seen.
        self.clients.drain(..).for_each(|(_, thread)| drop(thread.join()));
    }
}

fn client_of<S: Store>(
    shared: &Shared,
    kind: Kind,
    client: u64,
    checked: &AtomicU64,
    mut history: S::History,
) {
    while !shared.stop.load(Ordering::SeqCst) {
        if let Err(error) = session::<S>(shared, kind, client, checked, &mut history) {
            let trouble = format!("{}: {error:#}", std::any::type_name::<S>());
            *shared.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
            sleep(Duration::from_millis(20));
        }
    }
}

/// Writes over one connection for as long as it holds.
fn session<S: Store>(
    shared: &Shared,
    kind: Kind,
    client: u64,
    checked: &AtomicU64,
    history: &mut S::History,
) -> Result<()> {
    let tally = &shared.tallies[kind as usize];
    let mut store = S::connect(client, history)?;
    tally.connected.fetch_add(1, Ordering::SeqCst);
    while !shared.stop.load(Ordering::SeqCst) {
        let wanted = shared.wanted.load(Ordering::SeqCst);
        if checked.load(Ordering::SeqCst) < wanted {
            tally.lost.fetch_add(store.missing(history)?, Ordering::SeqCst);
        }
        let written = store.write(history)?;
        if let Some(noted) = &mut *tally.acknowledged() {
            noted.push((Instant::now(), written as usize));
        }
        tally.written.fetch_add(written, Ordering::SeqCst);
        checked.store(wanted, Ordering::SeqCst);
    }
    Ok(())
}

/// Numbers that only grow, in keys of one client.
struct Keys {
    known: Vec<u64>,
    next: u64,
}

struct Redis {
    client: u64,
    stream: TcpStream,
    answers: BufReader<TcpStream>,
}

impl Redis {
    fn line(&mut self) -> Result<String> {
        let mut text = String::new();
        ensure!(self.answers.read_line(&mut text)? > 0, "the connection ended");
        Ok(text.trim_end().to_owned())
    }

    fn send(&mut self, commands: impl Iterator<Item = String>) -> Result<()> {
        Ok(self.stream.write_all(commands.collect::<String>().as_bytes())?)
    }
}

impl Store for Redis {
    type History = Keys;

    fn connect(client: u64, _: &mut Keys) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&format!("{GUEST}:6379").parse()?, ANSWER)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWER))?;
        // A client that gives up takes back what the store has not received: the kernel would send it
        // again, for longer than it takes to connect anew, and the store would put old values over newer
        // ones.
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
        Ok(Self { client, answers: BufReader::new(stream.try_clone()?), stream })
    }

    fn write(&mut self, history: &mut Keys) -> Result<u64> {
        let (client, from) = (self.client, history.next);
        let numbers = from..from + AT_ONCE;
        // Whatever becomes of these, they are never sent again.
        history.next = numbers.end;
        self.send(numbers.clone().map(|number| format!("SET c{client}k{} {number}\r\n", number % KEYS)))?;
        for number in numbers {
            ensure!(self.line()? == "+OK", "refused");
            history.known[(number % KEYS) as usize] = number;
        }
        Ok(AT_ONCE)
    }

    fn missing(&mut self, history: &Keys) -> Result<u64> {
        let client = self.client;
        self.send((0..KEYS).map(|key| format!("GET c{client}k{key}\r\n")))?;
        let mut missing = 0;
        for (key, known) in history.known.iter().enumerate() {
            let found = match self.line()?.as_str() {
                "$-1" => 0,
                _ => self.line()?.parse()?,
            };
            if !(*known..history.next).contains(&found) {
                eprintln!("    redis: key {key} of client {client} is {found}, acknowledged was {known}");
                missing += 1;
            }
        }
        Ok(missing)
    }
}

/// Rows 1 to `known` of one client are committed, and `sent` was the last one tried.
#[derive(Default)]
struct Rows {
    known: i64,
    sent: i64,
}

struct Postgres {
    client: i64,
    connection: PgConnection,
    runtime: tokio::runtime::Runtime,
}

impl Postgres {
    /// Does something of a connection, within the time that an answer may take.
    fn within<T>(&mut self, work: impl AsyncFnOnce(&mut PgConnection) -> sqlx::Result<T>) -> Result<T> {
        let Self { connection, runtime, .. } = self;
        runtime.block_on(async { Ok(tokio::time::timeout(ANSWER, work(connection)).await??) })
    }
}

impl Store for Postgres {
    type History = Rows;

    fn connect(client: u64, history: &mut Rows) -> Result<Self> {
        let options =
            PgConnectOptions::new_without_pgpass().host(GUEST).username("postgres").database("postgres");
        let options = options.ssl_mode(PgSslMode::Disable);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let connecting = async { tokio::time::timeout(ANSWER, PgConnection::connect_with(&options)).await };
        let connection = runtime.block_on(connecting)??;
        let mut store = Self { client: client.try_into()?, connection, runtime };
        let client = store.client;
        let last: Option<i64> = store.within(async |connection| {
            sqlx::query(
                "CREATE TABLE IF NOT EXISTS history (client bigint, id bigint, PRIMARY KEY (client, id))",
            )
            .execute(&mut *connection)
            .await?;
            let last = sqlx::query("SELECT max(id) FROM history WHERE client = $1").bind(client);
            last.fetch_one(connection).await?.try_get(0)
        })?;
        // What can be read is committed, whoever was told so.
        history.known = history.known.max(last.unwrap_or(0));
        Ok(store)
    }

    fn write(&mut self, history: &mut Rows) -> Result<u64> {
        let (client, id) = (self.client, history.known + 1);
        history.sent = history.sent.max(id);
        self.within(async |connection| {
            sqlx::query("INSERT INTO history VALUES ($1, $2)").bind(client).bind(id).execute(connection).await
        })?;
        history.known = id;
        Ok(1)
    }

    fn missing(&mut self, history: &Rows) -> Result<u64> {
        let (client, known, sent) = (self.client, history.known, history.sent);
        let (there, beyond): (i64, i64) = self.within(async |connection| {
            let counts = "SELECT count(*) FILTER (WHERE id BETWEEN 1 AND $2), count(*) FILTER (WHERE id > $3) FROM history WHERE client = $1";
            let row = sqlx::query(counts).bind(client).bind(known).bind(sent).fetch_one(connection).await?;
            Ok((row.try_get(0)?, row.try_get(1)?))
        })?;
        if there != known || beyond != 0 {
            eprintln!(
                "    PostgreSQL: of {known} rows of client {client} {there} are there, and {beyond} that were never sent"
            );
        }
        Ok(known.abs_diff(there) + beyond.unsigned_abs())
    }
}
