//! Tests of backups: a manager loses its database and comes back from each place of a backup, with what the
//! benefactors have.

use crate::{
    common::{Cluster, noise, until},
    postgres, tier,
};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use whimbrel_pool::{
    backup::BackupError,
    chunk::Chunking,
    client::Secret,
    connections::TlsDialer,
    manager::{BackupOptions, BackupSource, ManagerOptions, RestoreOptions, RestoreReport, restore},
    policy::{Policy, Safety},
    protocol::BackupReport,
};
use whimbrel_wire::Identity;

fn set(cluster: &Cluster, copies: u8) {
    let cutting = Chunking::Content { average: 16 << 10 };
    let policy = Policy { copies, safety: Safety::Pessimistic, cutting, ..Policy::default() };
    cluster.pool.block(cluster.pool.set_policy(1, Some(policy))).unwrap();
}

fn back_up(cluster: &Cluster) -> BackupReport {
    cluster.pool.block(cluster.pool.make_backup()).unwrap()
}

fn options(cluster: &Cluster, source: BackupSource) -> RestoreOptions {
    RestoreOptions {
        data: cluster.dir.path().join("manager"),
        database: None,
        source,
        secret: None,
        pool: None,
        quarantine: Duration::from_secs(7 * 86_400),
    }
}

fn run(cluster: &Cluster, options: RestoreOptions) -> Result<RestoreReport, BackupError> {
    cluster.runtime.block_on(restore(options))
}

/// Stops the manager and loses everything that it has, except its key.
fn lose_manager(cluster: &mut Cluster) {
    cluster.kill_manager();
    for entry in fs::read_dir(cluster.dir.path().join("manager")).unwrap() {
        let path = entry.unwrap().path();
        match path.file_name().and_then(|name| name.to_str()) {
            Some(name) if name.ends_with(".key") => {}
            _ if path.is_dir() => fs::remove_dir_all(&path).unwrap(),
            // The database removes some of its files itself when it is closed.
            _ => match fs::remove_file(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                removed => removed.unwrap(),
            },
        }
    }
}

/// A pool with two files, of which the second was written after the backup.
fn filled(cluster: &Cluster) -> (Vec<u8>, BackupReport) {
    set(cluster, 2);
    let data = noise(1, 2 << 20);
    cluster.write("state", &noise(7, 300_000));
    cluster.write("state", &data);
    let report = back_up(cluster);
    assert!(report.failed.is_empty(), "{report:?}");
    cluster.write("later", &noise(2, 1 << 20));
    (data, report)
}

/// The restored pool serves the files of the backup, repairs them, and deletes nothing that it does not know.
fn check_restored(cluster: &mut Cluster, data: &[u8], copies: u64) {
    cluster.start_manager();
    cluster.wait_online(3);
    until("the benefactors have told what they have", || {
        let node = cluster.pool.block(cluster.pool.lookup(1, "state")).unwrap();
        cluster.try_read(node.version).is_ok()
    });
    assert!(cluster.read("state") == data);
    let node = cluster.pool.block(cluster.pool.lookup(1, "state")).unwrap();
    let versions = cluster.pool.block(cluster.pool.versions(node.id)).unwrap();
    assert!(cluster.read_version(versions[1].id) == noise(7, 300_000), "the version before it");
    assert!(cluster.pool.block(cluster.pool.lookup(1, "later")).is_err());
    let status = || cluster.pool.block(cluster.pool.status()).unwrap();
    until("all chunks have their copies", || status().repair == 0);
    // Each has listed its chunks often by now.
    assert!(cluster.copies() >= copies, "nothing is deleted");
    let next = cluster.write("later", &noise(2, 1 << 20));
    assert!(cluster.read_version(next.version) == noise(2, 1 << 20));
    assert!(next.version > node.version + 1000, "no number of the lost manager is used again");
}

#[test]
fn a_manager_that_lost_its_database_comes_back_from_its_folder_and_later_chunks_stay() {
    let mut cluster = Cluster::with(3, |options| options.lost_after = Duration::from_secs(3));
    let (data, _) = filled(&cluster);
    let copies = cluster.copies();
    cluster.kill_manager();
    let manager = cluster.dir.path().join("manager");
    let source = || BackupSource::Path(manager.join("backups"));
    let used = run(&cluster, options(&cluster, source())).unwrap_err();
    assert!(matches!(used, BackupError::InUse { .. }), "a database is never overwritten: {used}");
    for name in ["pool.db", "pool.db-wal", "pool.db-shm"] {
        let _ = fs::remove_file(manager.join(name));
    }
    let report = run(&cluster, options(&cluster, source())).unwrap();
    assert_eq!((report.files, report.versions), (1, 2));
    check_restored(&mut cluster, &data, copies);
}

#[test]
fn a_manager_that_lost_its_disk_comes_back_from_a_benefactor() {
    let mut cluster = Cluster::with(3, |options| {
        options.lost_after = Duration::from_secs(3);
        options.backups.secret = Some(Arc::new(Secret::new(&[5; 32]).unwrap()));
    });
    let (data, report) = filled(&cluster);
    assert_eq!(report.benefactors.len(), 3);
    let copies = cluster.copies();
    let client = Arc::new(Identity::load_or_create(&cluster.dir.path().join("client")).unwrap());
    let stranger = Arc::new(Identity::ephemeral().unwrap());
    lose_manager(&mut cluster);
    let member = &cluster.benefactors[1];
    let address = whimbrel_pool::ManagerAddress { address: member.listen.to_string(), key: member.key };
    let from = |identity: &Arc<Identity>, secret: u8| {
        let dialer = Arc::new(TlsDialer::new(identity.clone(), "client".parse().unwrap(), ()));
        let secret = Some(Arc::new(Secret::new(&[secret; 32]).unwrap()));
        let source = BackupSource::Member(address.clone(), dialer);
        run(&cluster, RestoreOptions { secret, ..options(&cluster, source) })
    };
    assert!(matches!(from(&stranger, 5), Err(BackupError::Member { .. })));
    assert!(matches!(from(&client, 6), Err(BackupError::Secret)));
    let report = from(&client, 5).unwrap();
    assert_eq!(report.files, 1);
    assert!(cluster.dir.path().join("manager/trust.toml").exists(), "the members are admitted again");
    check_restored(&mut cluster, &data, copies);
}

#[test]
fn a_manager_comes_back_from_an_object_store_which_retains_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    let server = tier::Server::start(&dir.path().join("s3"));
    let store = server.options(0);
    let to = store.clone();
    let mut cluster = Cluster::with(3, move |options| {
        options.lost_after = Duration::from_secs(3);
        options.backups.store = Some(to.clone());
        options.backups.keep = 2;
    });
    let (data, report) = filled(&cluster);
    assert!(report.store.is_some());
    back_up(&cluster);
    cluster.pool.block(cluster.pool.remove(1, "later", false)).unwrap();
    back_up(&cluster);
    let names = fs::read_dir(dir.path().join("s3/bucket/a/b1")).unwrap();
    assert_eq!(names.filter(|name| !name.as_ref().unwrap().file_name().is_empty()).count(), 2);
    until("the removed file is collected", || {
        let status = cluster.pool.block(cluster.pool.status()).unwrap();
        cluster.copies() == 2 * status.chunks
    });
    let copies = cluster.copies();
    lose_manager(&mut cluster);
    run(&cluster, options(&cluster, BackupSource::Store(store))).unwrap();
    check_restored(&mut cluster, &data, copies);
}

#[test]
fn a_backup_is_made_without_being_asked_for_and_a_torn_one_restores_nothing() {
    let mut cluster = Cluster::with(1, |options: &mut ManagerOptions| {
        options.backups = BackupOptions { every: Duration::from_millis(200), ..BackupOptions::default() };
    });
    set(&cluster, 1);
    cluster.write("state", &noise(1, 100_000));
    let manager = cluster.dir.path().join("manager");
    let backups = |folder: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).into_iter().flatten();
        let mut found: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        found.retain(|path| path.extension().is_some_and(|end| end == "backup"));
        found.sort();
        found
    };
    let held = cluster.benefactors[0].data.join("backups");
    until("a benefactor has some", || backups(&held).len() > 2);
    cluster.kill_manager();
    let newest = backups(&held).pop().unwrap();
    let whole = fs::read(&newest).unwrap();
    fs::write(&newest, &whole[..whole.len() - 1]).unwrap();
    fs::rename(manager.join("pool.db"), manager.join("away.db")).unwrap();
    let torn = run(&cluster, options(&cluster, BackupSource::Path(newest.clone()))).unwrap_err();
    assert!(matches!(torn, BackupError::Damaged { .. }), "{torn}");
    fs::write(&newest, &whole).unwrap();
    let report = run(&cluster, options(&cluster, BackupSource::Path(newest))).unwrap();
    assert!(report.files == 1 && report.chunks > 0, "the database was still empty: {report:?}");
}

#[test]
fn a_pool_in_postgres_comes_back_and_moves_to_sqlite_with_the_same_backup() {
    let dir = tempfile::tempdir().unwrap();
    let server = postgres::start(dir.path());
    let url = server.url.clone();
    let mut cluster = Cluster::with(3, move |options| {
        options.lost_after = Duration::from_secs(3);
        options.database = Some(url.clone());
    });
    let (data, _) = filled(&cluster);
    let copies = cluster.copies();
    cluster.kill_manager();
    let source = || BackupSource::Path(cluster.dir.path().join("manager/backups"));
    let restored = || {
        let database = Some(server.url.clone());
        run(&cluster, RestoreOptions { database, ..options(&cluster, source()) })
    };
    assert!(matches!(restored(), Err(BackupError::InUse { .. })));
    server.ask("DROP SCHEMA public CASCADE; CREATE SCHEMA public");
    assert_eq!(restored().unwrap().versions, 2);
    let report = run(&cluster, options(&cluster, source())).unwrap();
    assert_eq!(report.versions, 2, "the same in SQLite");
    check_restored(&mut cluster, &data, copies);
}
