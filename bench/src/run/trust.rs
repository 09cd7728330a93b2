//! The set `trust`: what confinement and authorization cost, and what was tried to break them.

use super::{Context, Experiment, throughput};
use crate::guest::{Guest, GuestPlan};
use crate::harness::{Goal, Row, Samples, in_turn};
use anyhow::{Context as _, Result, ensure};
use std::fs::File;
use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::time::Instant;
use tempfile::TempDir;
use whimbrel_core::{ByteSize, HostName, RefName};
use whimbrel_daemon::{Access, Action, Caller, Object, may};
use whimbrel_machine::Machine as _;
use whimbrel_qemu::{LaunchSpec, MachineUser, Qemu, RamBacking, Sharing, VmIdentity, probe};
use whimbrel_testkit::guest::GuestOptions;
use whimbrel_wire::{PeerIdentity, PublicKey, Right, Rights, Trust, TrustedPeer};

/// The experiments.
pub(super) const EXPERIMENTS: &[Experiment] = &[
    Experiment { rows: &["confine.start"], about: "start a machine, confined and not", run: start },
    Experiment { rows: &["confine.resume"], about: "resume a machine, confined and not", run: resume },
    Experiment {
        rows: &["encrypt.ingest", "encrypt.restore"],
        about: "a GiB of memory into an encrypted store, and back",
        run: throughput::encrypted,
    },
    Experiment { rows: &["may.cost"], about: "authorize a request for pages", run: may_cost },
    Experiment { rows: &["matrix"], about: "judge every kind of request by every right", run: matrix },
    Experiment { rows: &["fuzz"], about: "every parser of outside bytes under libFuzzer", run: fuzz },
];

const MEMORY: ByteSize = ByteSize(512 << 20);
/// Authorizations that are timed together.
const REQUESTS: u32 = 100_000;
/// Tests of the daemon that try every request. They print `N requests judged`.
const MATRICES: [&str; 2] = [
    "every_request_is_judged_by_the_entry_of_this_moment_whoever_dialled",
    "every_call_is_judged_by_role_scope_and_the_token_of_this_moment",
];

/// A place for a QEMU: with a user of its own, or as this process's user.
fn place(confined: bool) -> Result<TempDir> {
    let folder = tempfile::Builder::new().prefix("wb").tempdir_in("/dev/shm")?;
    let dir = folder.path().join("qemu");
    match confined {
        true => MachineUser::of_random(u64::from(std::process::id())).make_dir(&dir)?,
        false => std::fs::create_dir(&dir)?,
    }
    Ok(folder)
}

fn spec(plan: &GuestPlan, folder: &Path) -> Result<LaunchSpec> {
    let ram = RamBacking { path: folder.join("ram"), sharing: Sharing::Shared };
    Ok(LaunchSpec {
        kernel: Some(plan.kernel.clone()),
        initrd: Some(plan.initrd.clone()),
        ..LaunchSpec::new(plan.config()?, folder.join("qemu"), ram)
    })
}

fn plan() -> GuestPlan {
    GuestPlan::small(MEMORY, GuestOptions { buffer_mib: 8, ..GuestOptions::default() })
}

/// The time of a confined one beyond that of one that is not, in pairs.
fn beyond(row: &'static str, case: &str, most: f64, measured: (Vec<f64>, Vec<f64>)) -> Vec<Row> {
    let (confined, free) = measured;
    let added: Vec<f64> = confined.iter().zip(&free).map(|(confined, free)| confined - free).collect();
    let (confined, free) = (Samples::new(confined), Samples::new(free));
    eprintln!("    {case}: {:.2} ms confined, {:.2} ms not", confined.median(), free.median());
    vec![
        Row::new(row, format!("{case}, beyond one that is not confined"), "ms", &Samples::new(added))
            .goal(Goal::AtMost(most)),
    ]
}

/// Milliseconds until a QEMU answers.
fn start(context: &Context) -> Result<Vec<Row>> {
    let plan = plan();
    let started = |confined| {
        let folder = place(confined)?;
        File::create(folder.path().join("ram"))?;
        let spec = spec(&plan, folder.path())?;
        let begun = Instant::now();
        let qemu = Qemu::launch(&probe()?.path, &spec)?;
        let took = begun.elapsed().as_secs_f64() * 1e3;
        qemu.kill();
        Ok(took)
    };
    let measured = in_turn(context.times(20, 5), || started(true), || started(false))?;
    Ok(beyond("confine.start", "until QEMU answers", 15.0, measured))
}

/// Milliseconds of a warm resume: a QEMU that waits reads a device state and runs.
fn resume(context: &Context) -> Result<Vec<Row>> {
    let plan = plan();
    let kept = tempfile::Builder::new().prefix("wb").tempdir_in("/dev/shm")?;
    let (memory, state) = (kept.path().join("memory"), state_of(&plan, &kept.path().join("memory"))?);
    let resumed = |confined| {
        let folder = place(confined)?;
        std::fs::copy(&memory, folder.path().join("ram"))?;
        let spec = LaunchSpec { incoming: true, ..spec(&plan, folder.path())? };
        let mut qemu = Qemu::launch(&probe()?.path, &spec)?;
        let begun = Instant::now();
        let loaded = qemu.load_to_run(&state, VmIdentity::Unchanged).map_err(anyhow::Error::from);
        let ran = loaded.and_then(|()| Ok(qemu.unpause()?));
        let took = begun.elapsed().as_secs_f64() * 1e3;
        qemu.kill();
        ran.map(|()| took)
    };
    let measured = in_turn(context.times(20, 5), || resumed(true), || resumed(false))?;
    Ok(beyond("confine.resume", "from its device state until it runs", 3.0, measured))
}

/// Device state of a booted guest, its memory in a file.
fn state_of(plan: &GuestPlan, memory: &Path) -> Result<Vec<u8>> {
    let mut guest = Guest::boot(plan)?;
    guest.qemu().pause()?;
    let state = guest.qemu().device_state()?;
    std::fs::copy(guest.ram(), memory)?;
    Ok(state)
}

/// Microseconds from a request of a known peer to the answer whether it may: looked up in a list of a hundred
/// hosts, with patterns to match.
fn may_cost(context: &Context) -> Result<Vec<Row>> {
    const READ: Action = Action { rights: &[Right::Store], access: Access::Read };
    let folder = tempfile::tempdir()?;
    let trust = Trust::load(folder.path())?;
    for number in 0..100_u8 {
        trust.add(TrustedPeer {
            name: format!("host-{number}").parse()?,
            key: Some(PublicKey([number; 32])),
            address: None,
            rights: Rights::all(),
            read: Some("db-*,cache-*,web-*".parse()?),
            write: None,
        })?;
    }
    let (identity, name): (_, HostName) = (PeerIdentity::Key(PublicKey([77; 32])), "host-77".parse()?);
    let (mine, other): (RefName, RefName) = ("machine.web-1".parse()?, "machine.mail".parse()?);
    let ask =
        |object: &RefName| may(&Caller::find(&trust, &identity, &name), READ, Object::Ref(object)).is_ok();
    ensure!(ask(&mine) && !ask(&other), "the list does not decide as it says");
    let once = |_| {
        let begun = Instant::now();
        for _ in 0..REQUESTS {
            black_box(ask(black_box(&mine)));
        }
        begun.elapsed().as_secs_f64() * 1e6 / f64::from(REQUESTS)
    };
    let micros = Samples::new((0..context.times(5, 5)).map(once).collect());
    let case = "the peer looked up among 100, three patterns";
    Ok(vec![Row::new("may.cost", case, "us", &micros).goal(Goal::AtMost(1.0))])
}

/// Wrong answers of the tests that try each request with each right.
fn matrix(_context: &Context) -> Result<Vec<Row>> {
    let mut judged = 0_u64;
    let mut wrong = 0.0;
    for test in MATRICES {
        let mut cargo = cargo();
        cargo.args([
            "test",
            "--quiet",
            "--locked",
            "-p",
            "whimbrel-daemon",
            "--lib",
            "--",
            "--nocapture",
            test,
        ]);
        let output = cargo.output().context("cannot run cargo")?;
        let said = String::from_utf8_lossy(&output.stdout);
        let count =
            said.lines().find_map(|line| line.trim_start_matches('.').strip_suffix(" requests judged"));
        // A test that fails says which answers were wrong; here it counts as one.
        match (output.status.success(), count) {
            (true, Some(count)) => judged += count.trim().parse::<u64>()?,
            (true, None) => anyhow::bail!("{test} was not run: {said}"),
            (false, _) => wrong += 1.0,
        }
    }
    let case =
        format!("{judged} requests: kinds, rights, lists, ways to connect, rights taken away meanwhile");
    Ok(vec![Row::new("matrix", case, "wrong", &Samples::new(vec![wrong])).goal(Goal::AtMost(0.0))])
}

/// Findings of half an hour of fuzzing, spread over all targets.
fn fuzz(context: &Context) -> Result<Vec<Row>> {
    let minutes = if context.quick { "1" } else { "30" };
    let output =
        cargo().args(["xtask", "fuzz", "--minutes", minutes]).output().context("cannot run cargo")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let (mut targets, mut inputs, mut findings) = (0_u32, 0_u64, 0.0);
    for line in said.lines() {
        // name, number of inputs, "inputs", "held" or "BROKEN"
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, count, "inputs", held] = words[..] else { continue };
        targets += 1;
        inputs += count.parse::<u64>()?;
        findings += if held == "held" { 0.0 } else { 1.0 };
    }
    ensure!(targets > 0, "nothing was fuzzed: {}", String::from_utf8_lossy(&output.stderr));
    let case = format!("{targets} targets, {inputs} inputs");
    Ok(vec![Row::new("fuzz", case, "findings", &Samples::new(vec![findings])).goal(Goal::AtMost(0.0))])
}

/// A cargo in the folder of the workspace.
pub(super) fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    cargo
}
