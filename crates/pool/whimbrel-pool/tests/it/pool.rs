//! Tests of files in a pool: written, shared, replaced, damaged, repaired, collected.

use crate::common::{Cluster, noise, until};
use std::{fs::File, os::unix::fs::FileExt, time::Duration};
use whimbrel_pool::{
    chunk::Chunking,
    client::{WriteMode, WriteOptions},
    policy::{Policy, Retention, Safety},
    protocol::{NewNode, code},
};

fn policy(copies: u8, safety: Safety) -> Policy {
    Policy { copies, safety, cutting: Chunking::Content { average: 16 << 10 }, ..Policy::default() }
}

fn set(cluster: &Cluster, policy: Policy) {
    cluster.pool.block(cluster.pool.set_policy(1, Some(policy))).unwrap();
}

#[test]
fn a_file_comes_back_as_it_was_written_with_every_protocol() {
    let cluster = Cluster::new(4);
    for (at, protocol) in
        [WriteMode::SlidingWindow, WriteMode::Incremental { file: 1 << 20 }, WriteMode::CompleteLocal]
            .into_iter()
            .enumerate()
    {
        let (name, data) = (format!("f{at}"), noise(at as u64, 5_300_000));
        let options = WriteOptions { mode: protocol, buffer: 2 << 20, ..WriteOptions::default() };
        let file = cluster.open(&name, options);
        data.chunks(77_777)
            .enumerate()
            .for_each(|(n, block)| file.write_at(n as u64 * 77_777, block).unwrap());
        assert!(
            cluster.pool.block(cluster.pool.lookup(1, &name)).is_err(),
            "nothing is visible before the commit"
        );
        let node = file.commit().unwrap().unwrap();
        assert_eq!(node.size, data.len() as u64);
        assert!(cluster.read(&name) == data, "{protocol:?}");
    }
    let status = cluster.pool.block(cluster.pool.status()).unwrap();
    assert_eq!((status.files, status.versions, status.lost), (3, 3, 0));
}

#[test]
fn an_empty_file_and_one_of_a_byte_are_files_too() {
    let cluster = Cluster::new(1);
    cluster.write("empty", b"");
    cluster.write("one", b"1");
    assert_eq!((cluster.read("empty"), cluster.read("one")), (vec![], vec![b'1']));
}

#[test]
fn a_second_version_sends_only_what_is_new_and_the_first_can_still_be_read() {
    let cluster = Cluster::new(3);
    set(&cluster, policy(1, Safety::Pessimistic));
    let mut data = noise(1, 4 << 20);
    let first = cluster.write("state", &data);
    let chunks = cluster.copies();
    data.splice(1_000_000..1_000_000, *b"inserted");
    let second = cluster.write("state", &data);
    assert_eq!(first.id, second.id);
    assert!(cluster.copies() <= chunks + 3, "{} of {chunks}", cluster.copies());
    let versions = cluster.pool.block(cluster.pool.versions(first.id)).unwrap();
    assert_eq!(versions.iter().map(|version| version.number).collect::<Vec<_>>(), [2, 1]);
    assert!(versions[0].sent < 200_000 && versions[1].sent >= 4 << 20, "{versions:?}");
    assert!(cluster.read("state") == data);
    data.drain(1_000_000..1_000_008);
    assert!(cluster.read_version(first.version) == data, "readers of the old version go on");
}

#[test]
fn chunks_of_an_older_version_are_taken_over_unread_and_what_is_between_is_written() {
    let cluster = Cluster::new(2);
    set(&cluster, Policy { cutting: Chunking::Fixed { size: 4096 }, ..policy(1, Safety::Pessimistic) });
    let mut data = noise(3, 10 * 4096);
    let old = cluster.write("state", &data);
    let file = cluster.pool.block(cluster.pool.read(old.version)).unwrap();
    assert!(file.pieces_of(0..4095).is_none() && file.pieces_of(1..4096).is_none());
    assert!(file.pieces_of(0..11 * 4096).is_none(), "behind its end");
    let next = cluster.open("state", WriteOptions::default()).with_content_time(7_000);
    next.append_known(file.pieces_of(0..3 * 4096).unwrap()).unwrap();
    // A write shorter than a chunk ends one.
    let new = noise(4, 5000);
    next.write_at(3 * 4096, &new).unwrap();
    next.append_known(file.pieces_of(5 * 4096..10 * 4096).unwrap()).unwrap();
    let node = next.commit().unwrap().unwrap();
    data.splice(3 * 4096..5 * 4096, new);
    assert!(cluster.read("state") == data);
    let versions = cluster.pool.block(cluster.pool.versions(node.id)).unwrap();
    assert!(versions[0].sent < 6000 && versions[0].modified == 7_000, "{versions:?}");
    // Chunks of a removed version cannot be reused.
    let late = cluster.open("state", WriteOptions::default());
    cluster.pool.block(cluster.pool.remove(1, "state", false)).unwrap();
    until("its chunks are collected", || cluster.copies() == 0);
    late.append_known(file.pieces()).unwrap();
    assert_eq!(late.commit().unwrap_err().code(), Some(code::GONE));
}

#[test]
fn a_file_of_more_chunks_than_a_commit_takes_is_refused_while_it_is_written() {
    let cluster = Cluster::new(1);
    let old = cluster.write("state", &noise(3, 5000));
    let file = cluster.pool.block(cluster.pool.read(old.version)).unwrap();
    let next = cluster.open("state", WriteOptions::default());
    // In a map each takes a byte for its number and two for its length: together more than 8 MiB.
    let pieces = vec![file.pieces()[0]; 3_000_000];
    next.append_known(&pieces).unwrap();
    let end = pieces.len() as u64 * u64::from(pieces[0].length);
    let mut written = 0;
    until("a write fails", || match next.write_at(end + written, b"more") {
        Ok(()) => {
            written += 4;
            false
        }
        Err(error) => {
            assert!(error.to_string().contains("so many chunks"), "{error}");
            true
        }
    });
}

#[test]
fn timesteps_are_built_on_the_one_before_and_outlive_it() {
    let mut cluster = Cluster::new(2);
    set(&cluster, Policy { cutting: Chunking::Pages { average: 1 }, ..policy(1, Safety::Pessimistic) });
    let (mut data, mut second) = (noise(5, 100 * 4096), Vec::new());
    cluster.write("sim.N1.T0", &data);
    let sent = |cluster: &Cluster, name: &str| {
        let node = cluster.pool.block(cluster.pool.lookup(1, name)).unwrap();
        cluster.pool.block(cluster.pool.versions(node.id)).unwrap()[0].sent
    };
    for step in 1..5_u64 {
        data[step as usize * 20_000..][..4096].copy_from_slice(&noise(step + 10, 4096));
        let name = format!("sim.N1.T{step}");
        cluster.write(&name, &data);
        assert!(sent(&cluster, &name) < 4 * 4096, "two pages were touched");
        if step == 2 {
            second = data.clone();
            // The cached answers came from a manager that is gone.
            cluster.kill_manager();
            cluster.start_manager();
        }
        // The base version stays, or is removed before the next is written.
        if step != 3 {
            let old = format!("sim.N1.T{}", step - 1);
            cluster.pool.block(cluster.pool.remove(1, &old, false)).unwrap();
        }
    }
    cluster.pool.block(cluster.pool.remove(1, "sim.N1.T4", false)).unwrap();
    data[..4096].fill(1);
    cluster.write("sim.N1.T5", &data);
    // 100 of the 109 pages are of the second step, and five only of the last one.
    until("garbage is collected", || cluster.copies() == 105);
    assert!(cluster.read("sim.N1.T5") == data && cluster.read("sim.N1.T2") == second);
    for name in ["sim.N1.T2", "sim.N1.T5"] {
        cluster.pool.block(cluster.pool.remove(1, name, false)).unwrap();
    }
    until("nothing is left", || cluster.copies() == 0);
}

#[test]
fn a_writer_that_dies_leaves_nothing_visible_and_its_chunks_go() {
    let cluster = Cluster::with(2, |options| options.lease = 3);
    let file = cluster.open("never", WriteOptions::default());
    noise(1, 3 << 20)
        .chunks(1 << 20)
        .enumerate()
        .for_each(|(n, b)| file.write_at((n << 20) as u64, b).unwrap());
    file.sync().unwrap();
    assert!(cluster.copies() > 0);
    file.abandon();
    assert!(file.commit().is_err());
    drop(file);
    assert_eq!(
        cluster.pool.block(cluster.pool.lookup(1, "never")).unwrap_err().code(),
        Some(code::NOT_FOUND)
    );
    until("the chunks are collected", || cluster.copies() == 0);
}

#[test]
fn writes_out_of_order_holes_and_cuts_make_the_same_file_as_anywhere() {
    let cluster = Cluster::new(2);
    set(&cluster, policy(1, Safety::Pessimistic));
    let mut model = noise(5, 1_000_000);
    let file = cluster.open("mixed", WriteOptions { buffer: 1 << 20, ..WriteOptions::default() });
    file.write_at(0, &model).unwrap();
    for (at, piece) in [(500_000, noise(6, 30_000)), (990_000, noise(7, 50_000)), (1_200_000, noise(8, 10))] {
        file.write_at(at as u64, &piece).unwrap();
        model.resize(model.len().max(at + piece.len()), 0);
        model[at..at + piece.len()].copy_from_slice(&piece);
    }
    assert!(file.read_at(499_000, 40_000).unwrap() == model[499_000..539_000]);
    file.set_size(700_001).unwrap();
    file.set_size(700_500).unwrap();
    model.truncate(700_001);
    model.resize(700_500, 0);
    file.commit().unwrap();
    assert!(cluster.read("mixed") == model);
    file.write_at(3, b"again").unwrap();
    model[3..8].copy_from_slice(b"again");
    file.commit().unwrap();
    assert!(cluster.read("mixed") == model);
}

#[test]
fn losing_a_benefactor_in_the_middle_of_a_write_loses_nothing_and_repair_makes_up_for_it() {
    let mut cluster = Cluster::with(4, |options| options.lost_after = Duration::from_secs(2));
    set(&cluster, policy(2, Safety::Pessimistic));
    let data = noise(9, 6 << 20);
    let file = cluster.open("state", WriteOptions { buffer: 1 << 20, ..WriteOptions::default() });
    for (n, block) in data.chunks(1 << 20).enumerate() {
        if n == 3 {
            cluster.kill_benefactor(1);
        }
        file.write_at((n << 20) as u64, block).unwrap();
    }
    let node = file.commit().unwrap().unwrap();
    assert!(cluster.read("state") == data);
    let chunks = cluster.pool.block(cluster.pool.status()).unwrap().chunks;
    until("two copies of everything are there", || cluster.copies() >= chunks * 2);
    until("repair has nothing left", || cluster.pool.block(cluster.pool.status()).unwrap().repair == 0);
    cluster.kill_benefactor(0);
    assert!(cluster.read_version(node.version) == data, "any second one may go too");
}

#[test]
fn an_optimistic_write_returns_with_one_copy_and_gets_the_others_later() {
    let cluster = Cluster::new(3);
    set(&cluster, policy(3, Safety::Optimistic));
    cluster.write("state", &noise(3, 2 << 20));
    let chunks = cluster.pool.block(cluster.pool.status()).unwrap().chunks;
    until("three copies", || cluster.copies() == chunks * 3);
}

#[test]
fn a_chunk_damaged_on_disk_is_read_elsewhere_repaired_and_counted() {
    let mut cluster = Cluster::new(2);
    set(&cluster, policy(2, Safety::Pessimistic));
    let data = noise(4, 2 << 20);
    let node = cluster.write("state", &data);
    let chunks = cluster.copies() / 2;
    cluster.kill_benefactor(0);
    let segment = cluster.benefactors[0].data.join("chunks/00000001.seg");
    let bytes = std::fs::read(&segment).unwrap();
    let file = File::options().write(true).open(segment).unwrap();
    // The damage is inside each frame, so that the store opens and lists the chunks. Only the newest segment
    // is checked at opening, so another must follow.
    let records = bytes.windows(4).enumerate().filter(|(_, window)| window == b"WHCK");
    records.for_each(|(at, _)| file.write_all_at(b"damage", at as u64 + 500).unwrap());
    File::create(cluster.benefactors[0].data.join("chunks/00000002.seg")).unwrap();
    cluster.start_benefactor(0);
    cluster.wait_online(2);
    for _ in 0..3 {
        assert!(cluster.read_version(node.version) == data, "never a wrong byte");
    }
    let faults = || {
        cluster.pool.block(cluster.pool.status()).unwrap().benefactors.iter().map(|b| b.faults).sum::<u64>()
    };
    until("the benefactor is marked", || {
        let _ = cluster.read_version(node.version);
        faults() > 0
    });
    until("and the copy is made anew", || cluster.copies() == chunks * 2);
}

#[test]
fn a_full_pool_says_so_before_data_is_lost() {
    let mut cluster = Cluster::new(0);
    cluster.add_benefactor(3 << 20);
    cluster.wait_online(1);
    cluster.write("small", &noise(1, 1 << 20));
    let file = cluster.open("large", WriteOptions { buffer: 1 << 20, ..WriteOptions::default() });
    let blocks = noise(2, 8 << 20);
    let written: Result<(), _> =
        blocks.chunks(1 << 20).enumerate().try_for_each(|(n, block)| file.write_at((n << 20) as u64, block));
    let error = written.and_then(|()| file.commit().map(drop)).unwrap_err();
    assert!(error.is_full(), "{error:?}");
    assert!(cluster.pool.block(cluster.pool.lookup(1, "large")).is_err());
    assert!(cluster.read("small") == noise(1, 1 << 20));
}

#[test]
fn what_was_committed_outlives_the_manager_and_a_writer_waits_for_it() {
    let mut cluster = Cluster::new(2);
    let data = noise(1, 1 << 20);
    let node = cluster.write("before", &data);
    let file = cluster.open("through", WriteOptions::default());
    file.write_at(0, &data).unwrap();
    cluster.kill_manager();
    let committing = std::thread::spawn(move || file.commit());
    std::thread::sleep(Duration::from_millis(300));
    cluster.start_manager();
    committing.join().unwrap().unwrap();
    assert!(cluster.read_version(node.version) == data && cluster.read("through") == data);
}

#[test]
fn names_behave_as_in_a_file_system_and_a_rename_over_a_file_keeps_its_versions() {
    let cluster = Cluster::new(1);
    let pool = &cluster.pool;
    let folder = NewNode { folder: true, ..Cluster::make("app") };
    let app = pool.block(pool.make(&folder)).unwrap();
    assert_eq!(pool.block(pool.make(&folder)).unwrap_err().code(), Some(code::EXISTS));
    cluster.write("state", b"one");
    cluster.write("state.tmp", b"two");
    pool.block(pool.rename((1, "state.tmp"), (1, "state"), true)).unwrap();
    assert_eq!(cluster.read("state"), b"two");
    let node = pool.block(pool.lookup(1, "state")).unwrap();
    let versions = pool.block(pool.versions(node.id)).unwrap();
    assert_eq!(versions.len(), 2);
    assert_eq!(cluster.read_version(versions[1].id), b"one");
    assert_eq!(
        pool.block(pool.rename((1, "app"), (app.id, "in"), true)).unwrap_err().code(),
        Some(code::INVALID)
    );
    pool.block(pool.rename((1, "state"), (app.id, "moved"), true)).unwrap();
    assert_eq!(pool.block(pool.remove(1, "app", true)).unwrap_err().code(), Some(code::NOT_EMPTY));
    assert_eq!(pool.block(pool.remove(1, "app", false)).unwrap_err().code(), Some(code::IS_A_FOLDER));
    for bad in ["", ".", "..", "a/b", ".versions", &"x".repeat(300)] {
        assert!(pool.block(pool.make(&Cluster::make(bad))).is_err(), "{bad:?}");
    }
    pool.block(pool.remove(app.id, "moved", false)).unwrap();
    pool.block(pool.remove(1, "app", true)).unwrap();
    until("everything is collected", || cluster.copies() == 0);
}

#[test]
fn policies_drop_old_timesteps_and_a_dry_run_only_says_so() {
    let cluster = Cluster::new(1);
    let pool = &cluster.pool;
    for step in 0..4 {
        cluster.write(&format!("blast.N1.T{step}"), &noise(step, 10_000));
        cluster.write(&format!("blast.N2.T{step}"), &noise(step + 10, 10_000));
    }
    let pinned = pool.block(pool.lookup(1, "blast.N2.T0")).unwrap();
    pool.block(pool.pin(pinned.id, 1, true)).unwrap();
    assert!(pool.block(pool.purge(true)).unwrap().is_empty(), "no intervention by default");
    set(&cluster, Policy { keep: Retention { last: Some(1), ..Retention::default() }, ..Policy::default() });
    let names =
        |nodes: Vec<whimbrel_pool::protocol::Node>| nodes.into_iter().map(|n| n.name).collect::<Vec<_>>();
    let purged = |dry| {
        let all = pool.block(pool.purge(dry)).unwrap();
        let (stays, goes): (Vec<_>, Vec<_>) = all.into_iter().partition(|one| one.pinned_by == ["hand"]);
        assert_eq!(stays.iter().map(|one| &*one.path).collect::<Vec<_>>(), ["/blast.N2.T0"]);
        goes.len()
    };
    assert_eq!(purged(true), 5);
    assert_eq!(pool.block(pool.list(1)).unwrap().len(), 8);
    assert_eq!(purged(false), 5);
    assert_eq!(names(pool.block(pool.list(1)).unwrap()), ["blast.N1.T3", "blast.N2.T0", "blast.N2.T3"]);
    until("their chunks are gone", || cluster.copies() == 3);
}

#[test]
fn a_benefactor_leaves_politely_and_takes_nothing_with_it() {
    let cluster = Cluster::new(3);
    set(&cluster, policy(1, Safety::Pessimistic));
    let data = noise(8, 3 << 20);
    let node = cluster.write("state", &data);
    cluster.benefactors[0].leave.send(true).unwrap();
    until("it has left", || cluster.benefactors[0].task.as_ref().unwrap().is_finished());
    assert!(cluster.read_version(node.version) == data);
    assert_eq!(cluster.pool.block(cluster.pool.status()).unwrap().benefactors.len(), 2);
}

#[test]
fn a_benefactor_with_the_data_of_another_pool_is_refused() {
    let mut cluster = Cluster::new(1);
    cluster.kill_benefactor(0);
    std::fs::write(cluster.benefactors[0].data.join("pool"), "00000000deadbeef\n").unwrap();
    cluster.start_benefactor(0);
    until("it ends", || cluster.benefactors[0].task.as_ref().unwrap().is_finished());
    let ended = cluster.runtime.block_on(cluster.benefactors[0].task.take().unwrap()).unwrap();
    assert!(ended.unwrap_err().to_string().contains("refuses"));
}

#[test]
fn a_stranger_is_not_let_in() {
    let cluster = Cluster::new(1);
    let stranger = std::sync::Arc::new(whimbrel_wire::Identity::ephemeral().unwrap());
    let dialer = whimbrel_pool::connections::TlsDialer::new(stranger, "stranger".parse().unwrap(), ());
    let options = whimbrel_pool::client::PoolOptions {
        manager_timeout: Duration::ZERO,
        ..whimbrel_pool::client::PoolOptions::new(vec![cluster.address.clone()])
    };
    let handle = cluster.runtime.handle().clone();
    let pool = whimbrel_pool::client::Pool::new(options, std::sync::Arc::new(dialer), handle);
    assert!(pool.block(pool.status()).is_err());
}

#[test]
fn two_writers_of_one_file_make_two_versions_each_whole() {
    let cluster = Cluster::new(2);
    let (a, b) = (noise(1, 2 << 20), noise(2, 1 << 20));
    let (first, second) =
        (cluster.open("f", WriteOptions::default()), cluster.open("f", WriteOptions::default()));
    first.write_at(0, &a).unwrap();
    second.write_at(0, &b).unwrap();
    let one = first.commit().unwrap().unwrap();
    let two = second.commit().unwrap().unwrap();
    assert_eq!(one.id, two.id);
    assert!(cluster.read_version(one.version) == a && cluster.read("f") == b);
}

#[test]
fn a_version_that_somebody_lives_from_outlives_policies_removal_and_both_ends_until_it_is_let_go() {
    let mut cluster = Cluster::with(1, |options| options.pin_timeout = Duration::from_secs(3600));
    let data = noise(1, 200_000);
    let old = cluster.write("vm", &data).version;
    let node = cluster.write("vm", b"newer");
    let lease = cluster.pool.block(cluster.pool.hold(old, "alpha/web")).unwrap();
    assert_eq!(lease, Duration::from_secs(3600));
    set(&cluster, Policy { keep: Retention { last: Some(1), ..Retention::default() }, ..Policy::default() });
    let purge = |cluster: &Cluster, dry| {
        let purged = cluster.pool.block(cluster.pool.purge(dry)).unwrap();
        purged.into_iter().map(|one| (one.version, one.pinned_by)).collect::<Vec<_>>()
    };
    let pinned = vec![(1, vec!["alpha/web".to_owned()])];
    assert_eq!(purge(&cluster, true), pinned);
    cluster.kill_manager();
    cluster.start_manager();
    cluster.wait_online(1);
    assert_eq!(purge(&cluster, false), pinned, "it is in the database");
    let pool = &cluster.pool;
    for refused in [pool.block(pool.drop_version(node.id, 1)), pool.block(pool.remove(1, "vm", false))] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.code(), Some(code::PINNED));
        let because = std::error::Error::source(&refused).unwrap().to_string();
        assert!(because.contains("version 1 is pinned by alpha/web; `whimbrel pool pins`"), "{because}");
    }
    assert!(cluster.read_version(old) == data);
    let pins = pool.block(pool.pins(false)).unwrap();
    assert_eq!((pins.len(), &*pins[0].path, pins[0].version, pins[0].id), (1, "/vm", 1, old));
    let held = pins[0].held.as_ref().unwrap();
    assert!(held.holder == "alpha/web" && held.left > 3500, "{held:?}");
    assert_eq!(pool.block(pool.pins(true)).unwrap(), pins);
    assert_eq!(pool.block(pool.status()).unwrap().pinned, 1);
    assert_eq!(pool.block(pool.versions(node.id)).unwrap()[1].holders, ["alpha/web"]);
    // Replaced by a rename, it is still the version that is pinned.
    cluster.write("other", b"x");
    pool.block(pool.rename((1, "other"), (1, "vm"), true)).unwrap();
    assert!(cluster.read_version(old) == data);
    pool.block(pool.release_pin(old, "alpha/web", false)).unwrap();
    assert_eq!(
        pool.block(pool.release_pin(old, "alpha/web", false)).unwrap_err().code(),
        Some(code::NOT_FOUND)
    );
    assert_eq!(purge(&cluster, false), [(2, vec![]), (1, vec![])]);
    assert!(cluster.try_read(old).is_err());
    assert_eq!(pool.block(pool.hold(old, "alpha/web")).unwrap_err().code(), Some(code::NOT_FOUND));
    assert_eq!(pool.block(pool.hold(old, "")).unwrap_err().code(), Some(code::INVALID));
}

#[test]
fn a_version_that_was_pinned_by_hand_stays_until_it_is_released() {
    let cluster = Cluster::new(1);
    let node = cluster.write("f", b"kept");
    let pool = &cluster.pool;
    pool.block(pool.pin(node.id, 1, true)).unwrap();
    assert_eq!(pool.block(pool.remove(1, "f", false)).unwrap_err().code(), Some(code::PINNED));
    assert!(pool.block(pool.pins(false)).unwrap()[0].held.is_none());
    assert!(pool.block(pool.pins(true)).unwrap().is_empty());
    pool.block(pool.pin(node.id, 1, false)).unwrap();
    pool.block(pool.remove(1, "f", false)).unwrap();
}
