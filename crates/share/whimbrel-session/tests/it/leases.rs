//! Leases: what one session or a process of the server changes is seen by the others at once, and nobody asks
//! about what nobody has changed.

use crate::common::{World, back, pattern, until};
use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Seek, SeekFrom},
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt},
    path::Path,
    process::Command,
    time::Duration,
};
use whimbrel_session::{client::Policy, server::Limits};

fn fill(server: &Path) {
    for dir in ["dir", "other"] {
        fs::create_dir(server.join(dir)).unwrap();
        for name in ["one", "two"] {
            fs::write(server.join(dir).join(name), format!("{dir} {name} at first")).unwrap();
        }
    }
    fs::write(server.join("linked"), "linked at first").unwrap();
    fs::hard_link(server.join("linked"), server.join("dir/second name")).unwrap();
    fs::write(server.join("large"), pattern(200_000, 3)).unwrap();
}

/// A process of the server that is not the server.
fn on_server(world: &World, script: &str) {
    let done = Command::new("sh").arg("-c").arg(script).current_dir(world.server()).status().unwrap();
    assert!(done.success(), "{script}");
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

/// Makes everything known to a session and to the kernel.
fn look(mount: &Path) {
    for dir in ["dir", "other"] {
        for name in names(&mount.join(dir)) {
            text(&mount.join(dir).join(name));
        }
    }
    assert!(!mount.join("dir/absent").exists());
    text(&mount.join("linked"));
    fs::read(mount.join("large")).unwrap();
    fs::metadata(mount.join("dir")).unwrap();
}

fn asked(world: &World) -> u64 {
    let leases = ["watch", "return", "claim"];
    let requests = world.session().status().requests;
    requests.iter().filter(|(kind, _)| !leases.contains(&kind.as_str())).map(|(_, count)| count).sum()
}

#[test]
fn what_one_session_changes_is_seen_by_the_other_as_soon_as_the_call_returns() {
    let one = World::leased(Limits::default(), |_| {}, fill);
    let other = World::beside(&one, |_| {});
    let (here, there) = (one.mount(), other.mount());
    for round in 0..3 {
        look(&here);
        look(&there);
        let mut open = File::open(there.join("dir/one")).unwrap();
        fs::write(here.join("dir/one"), format!("round {round}")).unwrap();
        assert_eq!(text(&there.join("dir/one")), format!("round {round}"));
        let mut seen = String::new();
        open.seek(SeekFrom::Start(0)).unwrap();
        open.read_to_string(&mut seen).unwrap();
        assert_eq!(seen, format!("round {round}"), "who has it open sees it, too");
        fs::write(here.join("dir/absent"), "not any more").unwrap();
        assert_eq!(text(&there.join("dir/absent")), "not any more");
        fs::remove_file(there.join("dir/absent")).unwrap();
        assert!(!here.join("dir/absent").exists());
        fs::rename(here.join("other/two"), here.join("other/three")).unwrap();
        assert_eq!(names(&there.join("other")), ["one", "three"]);
        assert!(!there.join("other/two").exists());
        fs::rename(there.join("other/three"), there.join("other/two")).unwrap();
        let mode = 0o600 + round;
        fs::set_permissions(here.join("dir/two"), fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(fs::metadata(there.join("dir/two")).unwrap().mode() & 0o777, mode);
        fs::write(here.join("linked"), format!("linked {round}")).unwrap();
        assert_eq!(text(&there.join("dir/second name")), format!("linked {round}"));
        let writes = OpenOptions::new().write(true).open(there.join("large")).unwrap();
        writes.write_all_at(&[round as u8; 10], 100_000).unwrap();
        drop(writes);
        assert_eq!(fs::read(here.join("large")).unwrap()[100_000..100_010], [round as u8; 10]);
    }
    assert_eq!((one.session().status().events, other.session().status().events), (vec![], vec![]));
}

#[test]
fn what_another_session_has_changed_is_one_question_and_its_answer() {
    let one = World::leased(Limits::default(), |_| {}, fill);
    let other = World::beside(&one, |_| {});
    let (here, there) = (one.mount(), other.mount());
    for round in 0..3 {
        look(&there);
        let before = asked(&other);
        fs::write(here.join("dir/one"), format!("round {round}")).unwrap();
        assert_eq!(text(&there.join("dir/one")), format!("round {round}"));
        // The file was emptied and written: if the reader asks in between, it asks twice.
        assert!((1..=2).contains(&(asked(&other) - before)), "attributes and content of a small file");
        let name = format!("dir/new {round}");
        assert!(!there.join(&name).exists());
        let before = asked(&other);
        File::create(here.join(&name)).unwrap();
        assert!(there.join(&name).exists());
        assert_eq!(asked(&other) - before, 1, "a name");
    }
}

#[test]
fn alone_a_warm_session_asks_nothing() {
    let world = World::leased(Limits::default(), |_| {}, fill);
    let mount = world.mount();
    look(&mount);
    look(&mount);
    let before = asked(&world);
    for _ in 0..3 {
        look(&mount);
        // The kernel asks for everything anew after a while.
        Command::new("sh").arg("-c").arg("echo 2 > /proc/sys/vm/drop_caches").status().unwrap();
    }
    assert_eq!(asked(&world), before);
    // A second session that only reads makes nobody ask.
    let other = World::beside(&world, |_| {});
    look(&other.mount());
    look(&mount);
    assert_eq!(asked(&world), before);
}

#[test]
fn what_a_process_of_the_server_changes_is_seen_although_names_never_expire() {
    let world = World::leased(Limits::default(), |_| {}, fill);
    let mount = world.mount();
    look(&mount);
    on_server(&world, "printf changed > dir/one");
    until("content", || text(&mount.join("dir/one")) == "changed");
    on_server(&world, "printf new > dir/absent; rm other/two; mv other/one other/moved; mkdir other/deep");
    until("names", || names(&mount.join("other")) == ["deep", "moved"]);
    until("a new name", || mount.join("dir/absent").exists());
    on_server(&world, "printf 'by another name' > 'dir/second name'");
    until("a hard link", || text(&mount.join("linked")) == "by another name");
    on_server(&world, "chmod 601 dir; touch other/deep/below");
    until("a mode", || fs::metadata(mount.join("dir")).unwrap().mode() & 0o777 == 0o601);
    until("a directory that was not known", || mount.join("other/deep/below").exists());
    let before = asked(&world);
    look_again(&mount);
    let known = asked(&world);
    look_again(&mount);
    assert_eq!(asked(&world), known, "asked {} times for what had changed", known - before);
}

fn look_again(mount: &Path) {
    for dir in ["dir", "other", "other/deep"] {
        for name in names(&mount.join(dir)) {
            fs::metadata(mount.join(dir).join(name)).unwrap();
        }
    }
}

#[test]
fn a_session_that_is_gone_holds_nobody_up_for_longer_than_its_term_and_finds_out() {
    let limits = Limits { lease_term: Duration::from_secs(3), ..Limits::default() };
    let one = World::leased(limits, |_| {}, fill);
    let mut gone = World::beside(&one, |_| {});
    look(&one.mount());
    look(&gone.mount());
    gone.wire.cut(true);
    // Waits for the term, and no longer.
    fs::write(one.mount().join("dir/one"), "while it was away").unwrap();
    fs::write(one.mount().join("dir/absent"), "while it was away").unwrap();
    gone.wire.mend();
    until("the session is back", || gone.session().status().connected);
    until("what it had cached is not believed", || {
        text(&gone.mount().join("dir/one")) == "while it was away"
    });
    until("absent names neither", || gone.mount().join("dir/absent").exists());
    fs::write(one.mount().join("dir/two"), "and from then on").unwrap();
    assert_eq!(text(&gone.mount().join("dir/two")), "and from then on");
    gone.end();
}

#[test]
fn unsent_content_is_sent_before_another_session_reads_or_changes_the_file() {
    let one = World::leased(Limits::default(), |_| {}, fill);
    let behind = World::beside(&one, back);
    behind_looks(&behind);
    fs::write(behind.mount().join("dir/one"), "unsent").unwrap();
    fs::write(behind.mount().join("dir/new"), "unsent, too").unwrap();
    fs::rename(behind.mount().join("other/one"), behind.mount().join("other/renamed")).unwrap();
    // Claims travel on their own.
    until("content", || text(&one.mount().join("dir/one")) == "unsent");
    until("names", || names(&one.mount().join("other")) == ["renamed", "two"]);
    until("a new file", || {
        fs::read_to_string(one.mount().join("dir/new")).is_ok_and(|text| text == "unsent, too")
    });
    assert_eq!((one.session().status().events, behind.session().status().events), (vec![], vec![]));
}

fn behind_looks(world: &World) {
    look(&world.mount());
    until("it knows that it is not alone", || world.session().status().requests["watch"] > 1);
}

#[test]
fn a_recall_loses_nothing_that_both_sessions_have_written() {
    let one = World::leased(Limits::default(), back, fill);
    let other = World::beside(&one, back);
    behind_looks(&one);
    behind_looks(&other);
    // Both are offline, so that neither hears of the other.
    [&one, &other].iter().for_each(|world| world.wire.cut(true));
    fs::write(one.mount().join("dir/one"), "from one").unwrap();
    fs::write(other.mount().join("dir/one"), "from the other").unwrap();
    [&one, &other].iter().for_each(|world| world.wire.mend());
    // One of the two is refused.
    let done = [&one, &other].map(|world| world.session().flush().is_ok());
    assert_ne!(done, [false, false]);
    let mut found: Vec<String> = [&one, &other].iter().flat_map(|world| kept(world)).collect();
    found.push(fs::read_to_string(one.server().join("dir/one")).unwrap());
    found.sort();
    assert_eq!(found, ["from one", "from the other"]);
}

fn kept(world: &World) -> Vec<String> {
    let Ok(kept) = fs::read_dir(world.options.cache.join("kept")) else { return Vec::new() };
    kept.map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap()).collect()
}

#[test]
fn two_sessions_that_write_in_one_directory_do_not_wait_for_each_others_term() {
    for policy in [Policy::Through, Policy::Back] {
        let one = World::leased(
            Limits { lease_term: Duration::from_secs(600), ..Limits::default() },
            |options| options.settings.policy = policy,
            fill,
        );
        let other = World::beside(&one, |options| options.settings.policy = policy);
        let begun = std::time::Instant::now();
        std::thread::scope(|scope| {
            for (world, who) in [(&one, "one"), (&other, "other")] {
                scope.spawn(move || {
                    for number in 0..20 {
                        fs::write(world.mount().join(format!("dir/{who} {number}")), who).unwrap();
                        assert!(!world.mount().join(format!("dir/{who} absent {number}")).exists());
                    }
                    world.session().flush().unwrap();
                });
            }
        });
        for world in [&one, &other] {
            until("all names", || names(&world.mount().join("dir")).len() == 43);
        }
        assert!(begun.elapsed() < Duration::from_secs(300), "{policy}: {:?}", begun.elapsed());
    }
}
