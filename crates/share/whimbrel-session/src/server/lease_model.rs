//! The lease table against what it promises, by hand and by seeded sequences of what sessions do.

use super::lease_table::{HolderId, LeaseLimits, LeaseTable, Turn};
use crate::proto::Ident;
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

const TERM: Duration = Duration::from_secs(15);

fn file(number: u64) -> Ident {
    Ident { dev: 1, ino: number, birth: 0 }
}

fn table(per_holder: usize, total: usize) -> LeaseTable {
    LeaseTable::new(LeaseLimits { term: TERM, per_holder, total }, 7)
}

/// A table with two sessions that have renewed.
fn two(now: Instant) -> (LeaseTable, HolderId, HolderId) {
    let mut table = table(1000, 10_000);
    let (one, other) = (table.join(now), table.join(now));
    table.renew(one, now).unwrap();
    table.renew(other, now).unwrap();
    (table, one, other)
}

fn grant(table: &mut LeaseTable, id: HolderId, files: &[Ident], now: Instant) {
    let moment = table.moment();
    table.grant(id, files, moment, now);
}

#[test]
fn a_change_waits_until_every_other_holder_has_given_its_lease_back() {
    let now = Instant::now();
    let (mut table, writer, reader) = two(now);
    grant(&mut table, writer, &[file(1)], now);
    assert_eq!(
        table.before_change(Some(writer), &[file(1)], now),
        Turn::Free,
        "its own lease is no obstacle"
    );
    grant(&mut table, reader, &[file(1), file(2)], now);
    assert_eq!(table.before_change(Some(writer), &[file(1)], now), Turn::Wait);
    let news = table.news(reader, now).unwrap();
    assert_eq!(news.recalled, [file(1)]);
    assert_eq!(table.news(reader, now).unwrap().recalled, [], "it is told once");
    assert!(!table.holds(reader, &file(1)) && table.holds(reader, &file(2)));
    // What it asks before the lease is back is not granted anew.
    grant(&mut table, reader, &[file(1)], now);
    assert_eq!(table.before_change(Some(writer), &[file(1)], now), Turn::Wait);
    table.returned(reader, news.standing.generation, &[file(1)]);
    assert_eq!(table.before_change(Some(writer), &[file(1)], now), Turn::Free);
    assert!(table.holds(writer, &file(1)));
}

#[test]
fn a_holder_that_is_gone_delays_a_change_for_its_term_only_and_finds_out() {
    let now = Instant::now();
    let (mut table, writer, gone) = two(now);
    let before = table.news(gone, now).unwrap().standing.generation;
    grant(&mut table, gone, &[file(1), file(2)], now);
    let later = now + TERM - Duration::from_millis(1);
    assert_eq!(table.before_change(Some(writer), &[file(1)], later), Turn::Wait);
    let over = now + TERM;
    assert_eq!(table.before_change(Some(writer), &[file(1)], over), Turn::Free);
    table.renew(gone, over).unwrap();
    assert_ne!(table.news(gone, now).unwrap().standing.generation, before, "all of its leases are over");
    assert!(!table.holds(gone, &file(2)), "also those that nobody asked for");
}

#[test]
fn a_holder_that_lives_and_keeps_a_recalled_lease_loses_it_after_the_term() {
    let mut now = Instant::now();
    let (mut table, writer, slow) = two(now);
    grant(&mut table, slow, &[file(1)], now);
    assert_eq!(table.before_change(Some(writer), &[file(1)], now), Turn::Wait);
    table.news(slow, now).unwrap();
    for _ in 0..3 {
        now += TERM / 3;
        table.renew(slow, now).unwrap();
    }
    assert_eq!(table.before_change(Some(writer), &[file(1)], now), Turn::Free);
    // From then on the session is told of changes, and nobody waits for it.
    grant(&mut table, slow, &[file(2)], now);
    assert_eq!(table.before_change(Some(writer), &[file(2)], now), Turn::Free);
    assert_eq!(table.news(slow, now).unwrap().recalled, [file(2)]);
}

#[test]
fn an_answer_that_was_read_before_a_change_is_recalled_at_once() {
    let now = Instant::now();
    let (mut table, writer, reader) = two(now);
    let moment = table.moment();
    table.changed(Some(writer), &[file(1)], now);
    table.grant(reader, &[file(1), file(2)], moment, now);
    assert_eq!(table.news(reader, now).unwrap().recalled, [file(1)]);
    // The writer's own change is in its answer.
    table.grant(writer, &[file(1)], moment, now);
    assert_eq!(table.news(writer, now).unwrap().recalled, []);
    // Beyond what the log remembers, everything may have changed.
    for number in 10..10_000 {
        table.changed(Some(writer), &[file(number)], now);
    }
    table.grant(reader, &[file(3)], moment, now);
    assert_eq!(table.news(reader, now).unwrap().recalled, [file(3)]);
}

#[test]
fn an_exclusive_lease_makes_others_ask_and_their_question_brings_it_back() {
    let now = Instant::now();
    let (mut table, writer, reader) = two(now);
    let generation = table.news(writer, now).unwrap().standing.generation;
    grant(&mut table, reader, &[file(1)], now);
    table.claim(writer, generation, &[file(1)], now);
    assert_eq!(table.news(reader, now).unwrap().recalled, [file(1)], "it must ask from now on");
    assert_eq!(table.before_read(Some(writer), &[file(1)], now), Turn::Free);
    assert_eq!(table.before_read(Some(reader), &[file(1)], now), Turn::Wait);
    assert_eq!(table.before_read(Some(reader), &[file(1)], now), Turn::Wait, "it is not back yet");
    assert_eq!(table.news(writer, now).unwrap().recalled, [file(1)]);
    table.returned(writer, generation, &[file(1)]);
    assert_eq!(table.before_read(Some(reader), &[file(1)], now), Turn::Free);
    table.claim(writer, generation + 99, &[file(1)], now);
    assert_eq!(table.before_read(Some(reader), &[file(1)], now), Turn::Free, "a claim of another generation");
}

#[test]
fn a_session_with_too_many_leases_starts_anew_and_the_largest_one_makes_room_for_all() {
    let now = Instant::now();
    let mut table = table(100, 150);
    let (greedy, modest) = (table.join(now), table.join(now));
    for id in [greedy, modest] {
        table.renew(id, now).unwrap();
    }
    let before = [greedy, modest].map(|id| table.news(id, now).unwrap().standing.generation);
    let files: Vec<_> = (0..101).map(file).collect();
    grant(&mut table, greedy, &files, now);
    assert!(files.iter().all(|file| !table.is_held(file)), "more than one session may have");
    grant(&mut table, modest, &files[..60], now);
    grant(&mut table, greedy, &files[..95], now);
    let after = [greedy, modest].map(|id| table.news(id, now).unwrap().standing.generation);
    assert!(after[0] != before[0] && after[1] == before[1]);
    assert!(table.holds(modest, &file(59)) && !table.holds(greedy, &file(59)));
}

#[test]
fn sessions_that_fell_silent_or_have_left_hold_nothing() {
    let before = Instant::now();
    let now = before + TERM;
    let (mut table, one, other) = two(now);
    let silent = table.join(before);
    grant(&mut table, silent, &[file(1)], now);
    assert!(!table.is_held(&file(1)));
    grant(&mut table, other, &[file(1)], now);
    assert_eq!(table.before_change(Some(one), &[file(1)], now), Turn::Wait);
    table.leave(other);
    assert_eq!(table.before_change(Some(one), &[file(1)], now), Turn::Free);
    assert!(table.renew(other, now).is_none() && table.news(other, now).is_none());
    table.leave(silent);
    assert!(table.is_alone(Some(one), now));
}

/// What a client believes, by the rules of the protocol.
struct Client {
    id: HolderId,
    generation: u64,
    valid_until: Instant,
    /// Version that it would answer with, by file.
    trusted: HashMap<u64, u64>,
    /// Recalls that it was told of and has not answered.
    owed: HashSet<u64>,
}

impl Client {
    fn renew(&mut self, table: &mut LeaseTable, sent: Instant) {
        table.renew(self.id, sent).unwrap();
        let news = table.news(self.id, sent).unwrap();
        if news.standing.generation != self.generation {
            self.trusted.clear();
            self.owed.clear();
            self.generation = news.standing.generation;
        }
        self.valid_until = sent + TERM;
        for ident in news.recalled {
            self.trusted.remove(&ident.ino);
            self.owed.insert(ident.ino);
        }
    }
}

/// Whatever sessions do, and whoever of them falls silent: once a change was made that did not have to wait,
/// nobody answers with the version before it, except within the moment in which news travel. A session that
/// once kept a recalled lease for a whole term is told of a change, and not waited for.
#[test]
fn no_client_trusts_an_old_version_after_a_change_was_let_through() {
    for seed in 0..200 {
        let mut chance = StdRng::seed_from_u64(seed);
        let (mut now, mut table) = (Instant::now(), table(6, 14));
        let mut versions: HashMap<u64, u64> = (0..8).map(|number| (number, 0)).collect();
        let mut clients: Vec<Client> = (0..3)
            .map(|_| {
                let id = table.join(now);
                let (trusted, owed) = (HashMap::new(), HashSet::new());
                let mut client = Client { id, generation: 0, valid_until: now, trusted, owed };
                client.renew(&mut table, now);
                client
            })
            .collect();
        for _ in 0..400 {
            now += Duration::from_millis(chance.random_range(0..3000));
            let (at, number) = (chance.random_range(0..3), chance.random_range(0..8u64));
            match chance.random_range(0..5) {
                // A question, and its answer. Trusted only if no recall is owed.
                0 | 1 => {
                    grant(&mut table, clients[at].id, &[file(number)], now);
                    // News of what the grant has displaced arrive, unless the client is silent.
                    for client in &mut clients {
                        if now < client.valid_until {
                            client.renew(&mut table, now);
                        }
                    }
                    let client = &mut clients[at];
                    if table.holds(client.id, &file(number)) && !client.owed.contains(&number) {
                        client.trusted.insert(number, versions[&number]);
                    }
                }
                2 => clients[at].renew(&mut table, now),
                3 => {
                    let client = &mut clients[at];
                    let owed: Vec<_> = client.owed.drain().map(file).collect();
                    table.returned(client.id, client.generation, &owed);
                }
                _ => {
                    let by = Some(clients[at].id);
                    if table.before_change(by, &[file(number)], now) == Turn::Wait {
                        continue;
                    }
                    *versions.get_mut(&number).unwrap() += 1;
                    table.changed(by, &[file(number)], now);
                    clients[at].trusted.remove(&number);
                    // Nobody waits for a session that once was slow; the news are sent to it at once.
                    for client in &mut clients {
                        if table.is_slow(client.id) && now < client.valid_until {
                            client.renew(&mut table, now);
                        }
                    }
                }
            }
            for (at, client) in clients.iter().enumerate() {
                let stale = client.trusted.iter().find(|(number, known)| versions[number] != **known);
                assert!(stale.is_none() || now >= client.valid_until, "seed {seed}: client {at}: {stale:?}");
            }
        }
    }
}
