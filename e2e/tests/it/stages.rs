//! Either daemon, either QEMU and the link break at each stage of a migration. Before the commit point the
//! source goes on and the next migration loses no page; after it the target runs; at the end there is one
//! copy.
//!
//! The target is held at the stage while the thing is broken, so nothing here depends on how quick anything
//! is.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::process::Child;
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE, console};
use whimbrel_testkit::guest::{CheckResult, Identity, assert_same_life};

/// What breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    SourceDaemon,
    TargetDaemon,
    TargetQemu,
    Link,
}

/// A guest, the host it is on, and the other one.
struct Scene {
    cluster: Cluster,
    home: &'static str,
    away: &'static str,
    life: Identity,
}

impl Scene {
    fn new() -> Self {
        let cluster = Cluster::start(&["alpha", "beta"]);
        let guest = Guest { memory_mib: 128, buffer_mib: 8, ..Guest::small("web") };
        guest.run(&cluster, cluster.host("alpha"));
        let life = cluster.witness(GUEST_ADDRESS).write(50).expect("a first life");
        Self { cluster, home: "alpha", away: "beta", life }
    }

    fn source(&self) -> &HostProcess {
        self.cluster.host(self.home)
    }

    fn target(&self) -> &HostProcess {
        self.cluster.host(self.away)
    }

    /// Migrates, breaks something at a stage, mends it and waits for the end of the command. Whether it
    /// succeeded.
    fn break_at(&mut self, stage: &str, victim: Victim) -> bool {
        self.target().hold_at(stage);
        let logged = self.source().log_text().len();
        let mut command = self.source().start_command(&["migrate", "web", self.away]);
        self.target().wait_held(stage);
        match victim {
            Victim::SourceDaemon => self.source().signal_daemon(Signal::SIGKILL),
            Victim::TargetDaemon => self.target().signal_daemon(Signal::SIGKILL),
            Victim::TargetQemu => end_qemu(self.target()),
            Victim::Link => {
                self.cluster.lab.unplug("beta").expect("a cable to pull");
                // Until the source has given up: it is not told whether the target was still asked.
                let source = self.source();
                match stage {
                    "commit" | "running" => source.wait_log(logged, "has not confirmed the handover yet"),
                    _ => source.wait_state("web", &["running"]),
                }
                self.cluster.lab.replug("beta").expect("a cable to put back");
            }
        }
        self.target().release(stage);
        match victim {
            Victim::SourceDaemon => self.start_again(self.home),
            Victim::TargetDaemon => self.start_again(self.away),
            Victim::TargetQemu | Victim::Link => {}
        }
        command.wait().expect("the command ends").success()
    }

    /// Migrates, and ends the target's QEMU and a daemon between the commit and the start of the machine.
    fn break_twice(&mut self, daemon: Victim) -> Child {
        self.target().hold_at("commit");
        let command = self.source().start_command(&["migrate", "web", self.away]);
        self.target().wait_held("commit");
        end_qemu(self.target());
        let fallen = if daemon == Victim::SourceDaemon { self.home } else { self.away };
        self.cluster.host(fallen).signal_daemon(Signal::SIGKILL);
        self.target().release("commit");
        self.start_again(fallen);
        command
    }

    fn start_again(&mut self, fallen: &str) {
        self.cluster.host_mut(fallen).kill_daemon();
        self.cluster.host_mut(fallen).start_daemon();
    }

    /// The machine runs on `host` and nowhere else, with the life it had and all of its memory.
    fn check(&mut self, host: &'static str) {
        let other = if host == "alpha" { "beta" } else { "alpha" };
        self.cluster.host(host).wait_state("web", &["running"]);
        self.cluster.host(other).wait_empty();
        let mut witness = self.cluster.witness(GUEST_ADDRESS);
        let now = witness.check().expect("an answer");
        assert_same_life(&self.life, &now);
        assert!(
            matches!(now.ram, CheckResult::Good(_)) && matches!(now.disk, CheckResult::Good(_)),
            "{now:?}"
        );
        self.life = witness.write(10).expect("a machine that writes");
        (self.home, self.away) = (host, other);
    }
}

/// Ends the QEMU that a host has for the machine, whether the machine runs there or is on its way.
fn end_qemu(host: &HostProcess) {
    let (_, record) = host.record("web");
    let pid = record["process"]["pid"].as_u64().expect("a machine with a process").to_string();
    // Until it has ended: a daemon that looks earlier sees one that lives. The first thread is a zombie
    // before the others have ended.
    let dead = format!(
        "kill -9 {pid}; while grep -q '^State:.[^Z]' /proc/{pid}/task/*/status || [ $(ls /proc/{pid}/task | wc -l) -gt 1 ]; \
         do sleep 0.01; done"
    );
    host.exec("sh", &["-c", &format!("{dead} 2>/dev/null; true")]);
}

#[test]
fn before_the_commit_point_the_source_goes_on_and_the_next_migration_loses_no_page() {
    use Victim::{Link, SourceDaemon, TargetDaemon, TargetQemu};
    let mut scene = Scene::new();
    let cases: [(&str, &[Victim]); 4] = [
        ("offer", &[SourceDaemon, TargetDaemon]),
        ("pages", &[SourceDaemon, TargetDaemon, TargetQemu]),
        ("last", &[SourceDaemon, TargetDaemon, TargetQemu, Link]),
        ("ready", &[SourceDaemon, TargetDaemon]),
    ];
    for (stage, victims) in cases {
        for victim in victims {
            let (home, away) = (scene.home, scene.away);
            let begun = std::time::Instant::now();
            assert!(!scene.break_at(stage, *victim), "it moved although {victim:?} broke at {stage}");
            scene.check(home);
            scene.source().run(&["migrate", "web", away]);
            scene.check(away);
            println!("{stage}, {victim:?}: {:.1} s", begun.elapsed().as_secs_f64());
        }
    }
}

#[test]
fn after_the_commit_point_the_target_runs_and_the_source_is_told() {
    use Victim::{Link, SourceDaemon, TargetDaemon};
    let mut scene = Scene::new();
    for stage in ["commit", "running"] {
        for victim in [SourceDaemon, TargetDaemon, Link] {
            let away = scene.away;
            let begun = std::time::Instant::now();
            let moved = scene.break_at(stage, victim);
            assert!(
                moved || victim == SourceDaemon,
                "{victim:?} broke at {stage}, and the user was not told"
            );
            scene.check(away);
            println!("{stage}, {victim:?}: {:.1} s", begun.elapsed().as_secs_f64());
        }
    }

    // A target that is lost for good cannot say whether it has the machine: a person decides.
    let (home, away) = (scene.home, scene.away);
    scene.target().hold_at("commit");
    let mut command = scene.source().start_command(&["migrate", "web", away]);
    scene.target().wait_held("commit");
    scene.target().signal_daemon(Signal::SIGKILL);
    let known = scene.source().try_run(&["resolve", "web"]).expect_err("nothing was decided");
    assert!(known.text.contains("has not confirmed it and cannot be reached"), "{known:?}");
    assert!(!command.wait().expect("the command ends").success());
    scene.source().run(&["resolve", "web", "--run-here"]);
    scene.target().release("commit");
    scene.start_again(away);
    scene.check(home);

    // A QEMU that dies takes the memory of its machine with it. A daemon that was restarted since cannot know
    // whether the machine had run: whose the rest is, is clear all the same.
    let (home, away) = (scene.home, scene.away);
    let mut command = scene.break_twice(Victim::TargetDaemon);
    assert!(command.wait().expect("the command ends").success());
    scene.cluster.host(home).wait_empty();
    let target = scene.cluster.host(away);
    target.wait_state("web", &["crashed"]);
    target.run(&["start", "web"]);
    console(target, "web").wait_ready(PATIENCE).expect("a machine that boots");
}

#[test]
fn a_machine_whose_target_qemu_dies_before_it_ever_ran_comes_back_with_all_it_had() {
    let mut scene = Scene::new();
    let (home, away) = (scene.home, scene.away);
    for stage in ["ready", "commit"] {
        assert!(!scene.break_at(stage, Victim::TargetQemu), "the user is not told at {stage}");
        scene.check(home);
    }
    // The next daemon of the source takes it back as well.
    scene.break_twice(Victim::SourceDaemon).wait().expect("the command ends");
    scene.check(home);
    scene.source().run(&["migrate", "web", away]);
    scene.check(away);
}

#[test]
fn a_source_whose_qemu_dies_keeps_its_machine_until_the_commit_and_not_after_it() {
    for (stage, survives) in [("pages", false), ("commit", true)] {
        let scene = Scene::new();
        scene.target().hold_at(stage);
        let mut command = scene.source().start_command(&["migrate", "web", "beta"]);
        scene.target().wait_held(stage);
        end_qemu(scene.source());
        scene.target().release(stage);
        assert_eq!(command.wait().expect("the command ends").success(), survives, "{stage}");
        match survives {
            false => {
                scene.source().wait_state("web", &["crashed"]);
                scene.target().wait_empty();
                scene.source().run(&["start", "web"]);
            }
            true => {
                let mut scene = scene;
                scene.check("beta");
            }
        }
    }
}

#[test]
fn a_pause_of_the_user_outlasts_the_daemon_and_one_of_an_operation_does_not() {
    let mut cluster = Cluster::start(&["alpha"]);
    Guest { address: None, ..Guest::small("still") }.run(&cluster, cluster.host("alpha"));
    for (pause, state) in [(true, "paused"), (false, "running")] {
        cluster.host("alpha").run(&[if pause { "pause" } else { "unpause" }, "still"]);
        cluster.host_mut("alpha").kill_daemon();
        cluster.host_mut("alpha").start_daemon();
        assert_eq!(cluster.host("alpha").machines(), [("still".to_owned(), state.to_owned())]);
    }
}

#[test]
fn a_migration_can_be_cancelled_at_any_moment_and_leaves_one_copy() {
    let mut scene = Scene::new();
    for stage in ["offer", "pages", "last", "ready", "commit"] {
        let (home, away) = (scene.home, scene.away);
        scene.target().hold_at(stage);
        // Slow enough that it is still copying when the cancel comes, if it was copying.
        let rate = if ["offer", "pages"].contains(&stage) { "2M" } else { "1G" };
        let mut command = scene.source().start_command(&["migrate", "web", away, "--rate-max", rate]);
        scene.target().wait_held(stage);
        kill(Pid::from_raw(command.id().cast_signed()), Signal::SIGINT).expect("a command to cancel");
        // In its pause the machine waits for a target that hangs: the source does not wait for its end.
        if ["last", "ready"].contains(&stage) {
            scene.source().wait_state("web", &["running"]);
        }
        scene.target().release(stage);
        let code = command.wait().expect("the command ends").code();
        if stage == "commit" {
            scene.check(away);
        } else {
            assert_eq!(code, Some(130), "at {stage}");
            scene.check(home);
        }
    }
}

#[test]
fn what_cannot_be_moved_is_refused_with_a_reason_and_stays() {
    let mut scene = Scene::new();
    let (alpha, beta) = (scene.source(), scene.target());
    let refused = |machine: &str, to: &str, code: i32, words: &[&str]| {
        let refusal = alpha.refuse(&["migrate", machine, to]);
        assert_eq!(refusal.code, code, "{refusal:?}");
        for word in words {
            assert!(refusal.text.contains(word), "no {word:?} in {refusal:?}");
        }
    };
    refused("web", "alpha", 2, &["web is on alpha already"]);
    refused("web", "nowhere", 5, &["hint:"]);

    beta.hold_at("pages");
    let mut first = alpha.start_command(&["migrate", "web", "beta"]);
    beta.wait_held("pages");
    refused("web", "beta", 4, &["busy with a migrate", "hint:"]);
    beta.release("pages");
    assert!(first.wait().expect("the command ends").success());
    scene.check("beta");

    let (alpha, beta) = (scene.cluster.host("alpha"), scene.cluster.host("beta"));
    Guest { address: None, memory_mib: 64, buffer_mib: 1, ..Guest::small("twin") }.run(&scene.cluster, alpha);
    Guest { address: None, memory_mib: 64, buffer_mib: 1, ..Guest::small("twin") }.run(&scene.cluster, beta);
    let refusal = alpha.refuse(&["migrate", "twin", "beta"]);
    assert!(refusal.text.contains("the target already has a machine twin"), "{refusal:?}");
    assert!(refusal.text.contains("hint:"), "{refusal:?}");

    // No room for guest memory: something else fills the tmpfs of the slots.
    beta.run(&["stop", "twin", "--kill"]);
    beta.run(&["delete", "twin"]);
    let slots = beta.slot("web");
    let slots = slots.parent().and_then(std::path::Path::to_str).expect("a directory of slots");
    beta.exec("mount", &["-t", "tmpfs", "-o", "size=32m", "tmpfs", slots]);
    let refusal = alpha.refuse(&["migrate", "twin", "beta"]);
    assert!(refusal.text.contains("the machine needs 64 MiB of memory"), "{refusal:?}");
    assert!(refusal.text.contains("hint:"), "{refusal:?}");
    beta.exec("umount", &[slots]);
    alpha.run(&["migrate", "twin", "beta"]);
}
