//! The steps of the demo.

use crate::{
    client::{Client, Seen},
    guest::{self, NAME},
    narrator::Narrator,
    proof::Proof,
    report::{Report, Step, ms},
};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};
use whimbrel_core::ByteSize;
use whimbrel_e2e::{Cluster, HostProcess, console};
use whimbrel_testkit::guest::{Identity, TestAgent};

const CLONES: usize = 8;
const PATIENCE: Duration = Duration::from_secs(60);

/// Plays all steps and says how they went.
pub(crate) fn tell(cluster: &Cluster, narrator: &Narrator) -> Report {
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let (mut client, boot) = boot(cluster, alpha, narrator);
    let migrate = migrate(&mut client, alpha, beta, narrator);
    let (checkpoint, kept) = checkpoint(&mut client, beta, narrator);
    let clone = clone(&mut client, beta, &kept, narrator);
    let rest = suspend_and_resume(&mut client, beta, narrator);
    narrator.say("closing the client's stream and removing everything");
    Report { steps: vec![boot, migrate, checkpoint, clone, rest], stream: client.leave() }
}

fn boot<'a>(cluster: &'a Cluster, alpha: &HostProcess, narrator: &Narrator) -> (Client<'a>, Step) {
    narrator.say(&format!(
        "booting {NAME} on alpha: {} MiB of memory, a disk of {} MiB with {} MiB of files, a network port",
        guest::MEMORY_MIB,
        guest::DISK_MIB,
        guest::FILES_MIB
    ));
    let begin = Instant::now();
    guest::run(cluster, alpha);
    let client = Client::meet(cluster);
    let took = begin.elapsed();
    narrator.say("it answers; a client now probes it 1000 times a second and keeps two TCP connections open");
    let detail = "disk made, kernel booted, the client connected".to_owned();
    (client, Step { name: "boot on alpha", took, bytes: None, seen: None, detail, result: Value::Null })
}

fn migrate(client: &mut Client<'_>, alpha: &HostProcess, beta: &HostProcess, narrator: &Narrator) -> Step {
    narrator.say("moving it to beta while it runs, memory and disk");
    let (result, seen) = client.watch(|| order(alpha, &["migrate", NAME, "beta"]));
    assert!(alpha.machines().is_empty(), "the machine is still on alpha after its move");
    beta.wait_state(NAME, &["running"]);
    let rounds = result["rounds"].as_array().map_or(0, Vec::len);
    let detail = format!("{rounds} rounds; the hosts measured {} of downtime", ms(&result["downtime_ms"]));
    Step::watched("migrate to beta", result["wire_bytes"].as_u64(), seen, detail, result)
}

/// Also who the machine was just before.
fn checkpoint(client: &mut Client<'_>, beta: &HostProcess, narrator: &Narrator) -> (Step, Identity) {
    narrator.say("taking a checkpoint; it runs on");
    let (result, seen) = client.watch(|| order(beta, &["checkpoint", NAME, "--tag", "golden"]));
    let (kept, detail) = (seen.before.clone(), format!("paused for {}", ms(&result["pause_ms"])));
    (Step::watched("checkpoint", result["bytes_added"].as_u64(), seen, detail, result), kept)
}

fn clone(client: &mut Client<'_>, beta: &HostProcess, kept: &Identity, narrator: &Narrator) -> Step {
    narrator
        .say(&format!("making {CLONES} clones of the checkpoint beside it, and waiting until all answer"));
    let original = client.identity();
    let count = CLONES.to_string();
    let ((result, mut clones), seen) = client.watch(|| {
        let result = order(beta, &["clone", "golden", "--count", &count, "--prefix", "clone"]);
        (result, (1..=CLONES).map(|number| answering(beta, number)).collect::<Vec<_>>())
    });
    let read = resident_bytes(beta, "clone-");
    narrator.say("asking each clone for its nonce, its memory, its disk and its generation id");
    let (proof, ids) = identities(&mut clones, kept, &original);
    narrator.say("ending the clones");
    drop(clones);
    for number in 1..=CLONES {
        beta.run(&["stop", &clone_name(number), "--kill"]);
        beta.run(&["delete", &clone_name(number)]);
    }
    let seen = Seen { proof: seen.proof.and(proof).with("generation_ids", ids), ..seen };
    let detail = format!(
        "the last one's CPUs ran after {}; bytes: what all had read of their memory by then",
        ms(&result["to_running_ms"])
    );
    Step::watched("clone 8 times", Some(read), seen, detail, result)
}

fn suspend_and_resume(client: &mut Client<'_>, beta: &HostProcess, narrator: &Narrator) -> Step {
    narrator
        .say("suspending it, which leaves a capsule and no process, and resuming it lazily under its name");
    let ((suspend, resume, read), seen) = client.watch(|| {
        let suspend = order(beta, &["suspend", NAME]);
        assert_eq!(
            beta.machines(),
            [(NAME.to_owned(), "suspended".to_owned())],
            "a suspended machine has a process"
        );
        let resume = order(beta, &["resume", NAME, "--lazy"]);
        (suspend, resume, resident_bytes(beta, NAME))
    });
    let detail = format!(
        "ran {} after the request to resume with {} of its memory read; the stream waited and went on",
        ms(&resume["to_running_ms"]),
        ByteSize(read)
    );
    let bytes = suspend["bytes_added"].as_u64();
    let result = serde_json::json!({ "suspend": suspend, "resume": resume, "resident_bytes": read });
    Step::watched("suspend, resume lazily", bytes, seen, detail, result)
}

/// Orders something and returns what came of it.
fn order(host: &HostProcess, arguments: &[&str]) -> Value {
    host.json(arguments)["result"].take()
}

fn clone_name(number: usize) -> String {
    format!("clone-{number}")
}

fn answering(beta: &HostProcess, number: usize) -> TestAgent {
    let mut witness = console(beta, &clone_name(number));
    witness.wait_ready(PATIENCE).expect("a clone that answers on its console");
    witness
}

/// Whether all clones have the past of the checkpoint, and whether all their generation ids differ.
fn identities(clones: &mut [TestAgent], kept: &Identity, original: &Identity) -> (Proof, bool) {
    let now: Vec<Identity> =
        clones.iter_mut().map(|clone| clone.check().expect("an answer from a clone")).collect();
    let ids: BTreeSet<u128> = now.iter().chain([original]).filter_map(|identity| identity.genid).collect();
    let proofs = now.iter().map(|identity| Proof::same_life(kept, identity));
    let proof = proofs.reduce(Proof::and).expect("at least one clone");
    (proof, ids.len() == clones.len() + 1)
}

/// Memory that machines whose names begin like this have read so far.
fn resident_bytes(host: &HostProcess, prefix: &str) -> u64 {
    let machines = host.json(&["ps"]);
    let ours = machines
        .as_array()
        .into_iter()
        .flatten()
        .filter(|machine| machine["name"].as_str().is_some_and(|name| name.starts_with(prefix)));
    ours.map(|machine| match machine["state"]["resident_pages"].as_u64() {
        Some(pages) => pages * 4096,
        None => machine["memory"].as_u64().unwrap_or_default(),
    })
    .sum()
}
