//! `capsules.lost`: a capsule is pushed, pulled and resumed lazily again and again while its two hosts are
//! disturbed and collect garbage.
//!
//! A machine at alpha writes, and is checkpointed under one tag over and over. After a disturbed step beta
//! must have under that tag the version that it had before or the new one. The step is then done again
//! without a disturbance, and must succeed. A machine that beta makes of it, without alpha if the capsule is
//! whole, must be the life that was kept, with its memory and its disk.

use super::Length;
use super::disturbance::{Disturbance, limit_disks};
use super::guest::{NAME, PATIENCE, broken};
use crate::harness::{Chance, Goal, Row, Samples};
use crate::hosts::{Daemon, Hosts, Machine, console};
use crate::run::Context;
use anyhow::{Context as _, Result, ensure};
use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Identity, Work};

const MEMORY: ByteSize = ByteSize(128 << 20);
const DISK: ByteSize = ByteSize(32 << 20);
const TAG: &str = "golden";
const COPY: &str = "copy";
/// Steps between two verifications of both stores.
const VERIFY: u64 = 10;
/// How often a step is done again before it counts as impossible.
const AGAIN: u32 = 3;
/// Minutes of a record, which is one of several in its set.
const MINUTES: u64 = 5;
const MINUTES_QUICK: u64 = 2;

/// How beta gets the capsule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Push,
    Pull,
    Lazy,
}

/// A campaign: the hosts, and what each version of the capsule was.
struct Campaign {
    hosts: Hosts,
    versions: BTreeMap<String, Identity>,
    /// The version that beta has under the tag.
    there: Option<String>,
}

/// The row.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let length = Length::of(context, MINUTES, MINUTES_QUICK);
    let mut chance = Chance(length.seed);
    let mut hosts = Hosts::start(&["alpha", "beta"])?;
    limit_disks(&mut hosts, &["alpha", "beta"])?;
    let work = Work::Dirty { region_mib: 8, pages_per_second: 500, bytes_per_page: 64 };
    let options = GuestOptions { buffer_mib: 16, work, ..GuestOptions::default() };
    let machine = Machine::small(MEMORY, options).with_blank_disk(hosts.disk(), DISK)?;
    machine.run(hosts.get("alpha")?, NAME)?;
    let mut campaign = Campaign { hosts, versions: BTreeMap::new(), there: None };
    let (mut steps, mut lost, mut of) = (0, 0, BTreeMap::<String, u64>::new());
    while length.goes_on() {
        let way = [Way::Push, Way::Pull, Way::Lazy][chance.below(3) as usize];
        let disturbance = Disturbance::any(&mut chance);
        let instants = [1_500, 1_200, 1_500].map(|most| Duration::from_millis(chance.below(most)));
        let begun = Instant::now();
        let wrong = campaign.step(way, disturbance, instants)?;
        steps += 1;
        *of.entry(format!("{way:?}")).or_default() += 1;
        let said = wrong.as_ref().map_or("whole".to_owned(), |what| format!("WRONG: {what}"));
        let seconds = begun.elapsed().as_secs_f64();
        eprintln!("    {steps}: {way:?}, {disturbance:?} at and for {instants:?}: {said} ({seconds:.1} s)");
        if wrong.is_some() {
            lost += 1;
            for host in ["alpha", "beta"] {
                eprintln!("{}", campaign.hosts.get(host)?.account());
            }
        }
        if steps % VERIFY == 0 {
            for host in ["alpha", "beta"] {
                campaign.hosts.get(host)?.run(&["verify"]).context("a store is damaged")?;
            }
        }
    }
    let of: Vec<String> = of.iter().map(|(way, count)| format!("{count} {way}")).collect();
    let case = format!("{steps} steps ({}) in {} min, seed {}", of.join(", "), length.minutes, length.seed);
    let row = Row::new("capsules.lost", case, "capsules", &Samples::new(vec![f64::from(lost)]));
    Ok(vec![row.goal(Goal::AtMost(0.0))])
}

impl Campaign {
    fn host(&self, name: &str) -> Result<&Daemon> {
        self.hosts.get(name)
    }

    /// One disturbed step, at its end without a copy at beta. Says what went wrong, if anything.
    fn step(
        &mut self,
        way: Way,
        disturbance: Disturbance,
        [delay, span, collect]: [Duration; 3],
    ) -> Result<Option<String>> {
        self.discard_copy()?;
        let new = self.new_version()?;
        let words: &[&str] = match way {
            Way::Push => &["push", TAG, "beta"],
            Way::Pull => &["pull", "alpha:golden"],
            Way::Lazy => &["resume", "alpha:golden", "--name", COPY],
        };
        let by = if way == Way::Push { "alpha" } else { "beta" };
        let mut command = self.host(by)?.spawn(words)?;
        let mut collections = vec![self.host("alpha")?.spawn(&["gc"])?];
        sleep(collect);
        collections.push(self.host("beta")?.spawn(&["gc"])?);
        sleep(delay);
        match disturbance {
            Disturbance::Cancel => command.interrupt()?,
            other => other.strike(&mut self.hosts, ("alpha", "beta"), span)?,
        }
        let patience = |started: &mut crate::hosts::Started| started.wait_for(PATIENCE);
        let succeeded = patience(&mut command)?;
        collections.iter_mut().try_for_each(|one| patience(one).map(drop))?;
        let now = self.named_at_beta()?;
        if now != self.there && now.as_ref() != Some(&new) {
            return Ok(Some(format!("{TAG} was {:?} at beta and is {now:?} now", self.there)));
        }
        if !succeeded || now.as_ref() != Some(&new) {
            for again in 1.. {
                self.discard_copy()?;
                match self.host(by)?.run(words) {
                    Ok(_) => break,
                    Err(error) if again == AGAIN => return Ok(Some(format!("{error:#}"))),
                    Err(_) => sleep(Duration::from_secs(1)),
                }
            }
        }
        self.there = self.named_at_beta()?;
        let same = self.there.as_ref() == Some(&new);
        let wrong =
            if same { self.broken_copy(way, &new)? } else { Some("the new version is not there".into()) };
        self.discard_copy()?;
        Ok(wrong)
    }

    /// Lets the machine write, and checkpoints it under the tag.
    fn new_version(&mut self) -> Result<String> {
        let alpha = self.host("alpha")?;
        let life = {
            let mut inside = console(alpha, NAME)?;
            inside.wait_ready(PATIENCE)?;
            inside.write(5)?;
            inside.check()?
        };
        let taken = alpha.json(&["checkpoint", NAME, "--tag", TAG])?;
        let id = taken["result"]["capsule"].as_str().context("a checkpoint without a capsule")?.to_owned();
        self.versions.insert(id.clone(), life);
        Ok(id)
    }

    /// The version that beta has under the tag.
    fn named_at_beta(&self) -> Result<Option<String>> {
        let capsules = self.host("beta")?.json(&["ls"])?;
        let mut capsules = capsules.as_array().context("`ls` without a list")?.iter();
        let is_named = |names: &serde_json::Value| {
            names.as_array().is_some_and(|names| names.iter().any(|name| name == TAG))
        };
        let found = capsules.find(|one| is_named(&one["names"])).and_then(|one| one["id"].as_str());
        Ok(found.map(str::to_owned))
    }

    /// What is wrong with the machine that beta makes of a version: of what it has itself, or the one that
    /// runs lazily already.
    fn broken_copy(&self, way: Way, version: &str) -> Result<Option<String>> {
        let beta = self.host("beta")?;
        let alone = way != Way::Lazy;
        if alone {
            self.hosts.lab.unplug("alpha")?;
            let resumed = beta.run(&["resume", TAG, "--name", COPY]);
            self.hosts.lab.replug("alpha")?;
            if let Err(error) = resumed {
                return Ok(Some(format!("{error:#}")));
            }
        }
        let mut inside = console(beta, COPY)?;
        let now = inside.wait_ready(PATIENCE).and_then(|()| inside.check());
        let before = self.versions.get(version).context("a version that nobody took")?;
        Ok(match now {
            Ok(now) if now.disk != before.disk => Some(format!("its disk is of another moment: {now:?}")),
            Ok(now) => broken(before, &now).map(str::to_owned),
            Err(error) => Some(format!("{error:#}")),
        })
    }

    /// Removes the machine that beta made, if there is one.
    fn discard_copy(&self) -> Result<()> {
        let (beta, deadline) = (self.host("beta")?, Instant::now() + PATIENCE);
        loop {
            let machines = beta.json(&["ps"])?;
            if machines.as_array().context("`ps` without a list")?.iter().all(|one| one["name"] != COPY) {
                return Ok(());
            }
            let _ = beta.run(&["stop", COPY, "--kill"]);
            let _ = beta.run(&["delete", COPY]);
            ensure!(Instant::now() < deadline, "{COPY} cannot be removed: {}", beta.account());
            sleep(Duration::from_millis(100));
        }
    }
}
