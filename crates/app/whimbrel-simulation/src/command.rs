//! Command line: which seeds are run, and what is printed of them. `cargo xtask simulate` passes its words
//! on.

use crate::{
    losses,
    report::Outcome,
    scenes::{self, Scene},
    seeds::{Children, Run},
    shrink::shrink,
    world::Config,
};
use anyhow::{Context, Result, bail};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use whimbrel_core::loss::Loss;

const USAGE: &str = "\
usage: cargo xtask simulate [OPTIONS]

  --seeds N      run N new seeds (200 if nothing else is said)
  --hours N      run new seeds for N hours
  --seed S       run this seed; after a failure, repeat it with what was printed
  --trace        print every call of it
  --twice        run each seed twice and compare the two
  --losses       bring back each loss, and run seeds until it is found
  --quick        of them only those that nearly every seed finds
  --loss NAME    bring back this one for all seeds
  --scene NAME   only this scene
  --from S       begin with this seed instead of a new one
  --jobs N       seeds at once (2)
  --json         print one line of figures at the end
";

/// What was asked for.
#[derive(Debug, Default)]
struct Wanted {
    seeds: Option<u64>,
    hours: Option<f64>,
    seed: Option<u64>,
    from: Option<u64>,
    scene: Option<&'static Scene>,
    jobs: usize,
    trace: bool,
    twice: bool,
    losses: bool,
    quick: bool,
    loss: Option<Loss>,
    json: bool,
}

/// What came of it.
#[derive(Debug, Default)]
struct Figures {
    seeds: u64,
    violations: u64,
    unequal: u64,
    steps: u64,
    elapsed: Duration,
}

/// Runs what the words say. Whether every rule has held, and every loss was found.
pub(crate) fn run(words: Vec<String>) -> Result<bool> {
    let Some(wanted) = parse(words)? else {
        print!("{USAGE}\nscenes:\n");
        scenes::ALL.iter().for_each(|scene| println!("  {:<12} {}", scene.name, scene.about));
        return Ok(true);
    };
    match wanted.losses {
        true => find_losses(&wanted),
        false => run_seeds(&wanted),
    }
}

fn parse(words: Vec<String>) -> Result<Option<Wanted>> {
    let mut wanted = Wanted { jobs: 2, ..Wanted::default() };
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().with_context(|| format!("{word} takes a value"));
        match word.as_str() {
            "--seeds" => wanted.seeds = Some(value()?.parse()?),
            "--hours" => wanted.hours = Some(value()?.parse()?),
            "--seed" => wanted.seed = Some(value()?.parse()?),
            "--from" => wanted.from = Some(value()?.parse()?),
            "--jobs" => wanted.jobs = value()?.parse::<usize>()?.max(1),
            "--scene" => {
                let name = value()?;
                let known = || scenes::ALL.iter().map(|scene| scene.name).collect::<Vec<_>>().join(", ");
                let scene = scenes::find(&name);
                wanted.scene = Some(scene.with_context(|| format!("no scene {name}: {}", known()))?);
            }
            "--trace" => wanted.trace = true,
            "--twice" => wanted.twice = true,
            "--losses" => wanted.losses = true,
            "--quick" => wanted.quick = true,
            "--loss" => {
                let name = value()?;
                wanted.loss = Some(losses::find(&name).with_context(|| format!("no loss {name}"))?);
            }
            "--json" => wanted.json = true,
            "--help" | "-h" => return Ok(None),
            other => bail!("no option {other}\n{USAGE}"),
        }
    }
    Ok(Some(wanted))
}

/// A seed that was most likely never run before.
fn new_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_micros() as u64 / 1_000 * 1_000
}

impl Wanted {
    /// The run of a seed: each seed has one of the scenes.
    fn run(&self, seed: u64) -> Run {
        let scene = self.scene.unwrap_or(&scenes::ALL[(seed % scenes::ALL.len() as u64) as usize]);
        let config = Config { seed, trace: self.trace, ..Config::default() };
        Run { scene, config, loss: self.loss }
    }

    fn first(&self) -> u64 {
        self.seed.or(self.from).unwrap_or_else(new_seed)
    }
}

fn run_seeds(wanted: &Wanted) -> Result<bool> {
    let (first, begun) = (wanted.first(), Instant::now());
    let until = wanted.hours.map(|hours| begun + Duration::from_secs_f64(hours * 3600.0));
    let count = match (wanted.seed, wanted.seeds, until) {
        (Some(_), ..) => 1,
        (_, Some(count), _) => count,
        (_, _, Some(_)) => u64::MAX,
        _ => 200,
    };
    println!("seeds from {first}, scenes: {}", names(wanted.scene));
    let goes_on = |done: u64| done < count && until.is_none_or(|until| Instant::now() < until);
    let (mut children, mut figures, mut started) = (Children::new(wanted.jobs), Figures::default(), 0);
    while goes_on(started) || !children.is_empty() {
        while goes_on(started) && !children.is_full() {
            children.start(wanted.run(first + started))?;
            started += 1;
        }
        let (run, outcome) = children.next()?;
        figures.add(&outcome);
        if outcome.violation.is_some() {
            tell_violation(run.clone(), outcome.clone())?;
        }
        if wanted.twice {
            figures.compare(&run, &outcome)?;
        }
    }
    figures.print(begun.elapsed(), wanted.json);
    Ok(figures.violations == 0 && figures.unequal == 0)
}

fn names(only: Option<&Scene>) -> String {
    let names = scenes::ALL.iter().filter(|scene| only.is_none_or(|only| only.name == scene.name));
    names.map(|scene| scene.name).collect::<Vec<_>>().join(", ")
}

impl Figures {
    fn add(&mut self, outcome: &Outcome) {
        self.seeds += 1;
        self.violations += u64::from(outcome.violation.is_some());
        self.steps += outcome.steps;
        self.elapsed += Duration::from_nanos(outcome.elapsed);
    }

    /// Runs a seed again, whose outcome must be equal in every call.
    fn compare(&mut self, run: &Run, outcome: &Outcome) -> Result<()> {
        let again = crate::seeds::run_one(run.clone())?;
        if again.digest != outcome.digest {
            self.unequal += 1;
            println!(
                "seed {} of {}: run twice, it is not the same: {:016x} after {} calls, then {:016x} after {}",
                run.config.seed, run.scene.name, outcome.digest, outcome.steps, again.digest, again.steps
            );
        }
        Ok(())
    }

    fn print(&self, took: Duration, json: bool) {
        let hours = self.elapsed.as_secs_f64() / 3600.0;
        println!(
            "{} seeds, {:.1} simulated hours, {} calls, {} violations, {} unequal, in {:.1} s",
            self.seeds,
            hours,
            self.steps,
            self.violations,
            self.unequal,
            took.as_secs_f64()
        );
        if json {
            let figures = serde_json::json!({
                "seeds": self.seeds, "hours": hours, "violations": self.violations + self.unequal,
            });
            println!("{figures}");
        }
    }
}

fn tell_violation(run: Run, outcome: Outcome) -> Result<()> {
    let (scene, seed) = (run.scene.name, run.config.seed);
    let (run, outcome) = shrink(run, outcome)?;
    let Some(violation) = &outcome.violation else { return Ok(()) };
    println!("\nseed {seed} of {scene} breaks the rule {}: {}", violation.rule, violation.text);
    let left_out = run.config.without.len() as u64;
    let switches = run.config.switches_max.map_or(String::from("any"), |most| most.to_string());
    println!(
        "shrunk to {switches} changes of thread and {} faults:",
        outcome.faults.saturating_sub(left_out)
    );
    outcome.story.iter().for_each(|line| println!("  {line}"));
    println!("repeat it with: cargo xtask simulate --scene {scene} --seed {seed} --trace\n");
    Ok(())
}

/// Brings back each loss until a seed finds it.
fn find_losses(wanted: &Wanted) -> Result<bool> {
    let (first, begun, mut found) = (wanted.first(), Instant::now(), 0);
    let rows = losses::TABLE.iter().filter(|row| !wanted.quick || losses::QUICK.contains(&row.loss));
    let rows: Vec<_> = rows.filter(|row| wanted.loss.is_none_or(|only| only == row.loss)).collect();
    for row in &rows {
        let (name, text) = losses::describe(row.loss);
        let scene = scenes::find(row.scene).with_context(|| format!("no scene {}", row.scene))?;
        match find_loss(wanted, row.loss, scene, first)? {
            Some((seeds, rule)) => {
                found += 1;
                println!("{name:<22} {:<10} found after {seeds:>5} seeds by {rule}: {text}", scene.name);
            }
            None => {
                let most = wanted.seeds.unwrap_or(losses::SEEDS_MAX);
                println!("{name:<22} {:<10} NOT FOUND in {most} seeds: {text}", scene.name);
            }
        }
    }
    let all = rows.len();
    println!("{found} of {all} losses found, seeds from {first}, in {:.0} s", begun.elapsed().as_secs_f64());
    if wanted.json {
        println!("{}", serde_json::json!({ "found": found, "losses": all }));
    }
    Ok(found == all)
}

/// Seeds until a loss was found, and the rule that it broke.
fn find_loss(
    wanted: &Wanted,
    loss: Loss,
    scene: &'static Scene,
    first: u64,
) -> Result<Option<(u64, String)>> {
    let (mut children, mut started, mut done, mut found) = (Children::new(wanted.jobs), 0, 0, None);
    let most = wanted.seeds.unwrap_or(losses::SEEDS_MAX);
    while (found.is_none() && started < most) || !children.is_empty() {
        while found.is_none() && started < most && !children.is_full() {
            let config = Config { seed: first + started, ..Config::default() };
            children.start(Run { scene, config, loss: Some(loss) })?;
            started += 1;
        }
        let (_, outcome) = children.next()?;
        done += 1;
        if let Some(violation) = outcome.violation {
            found.get_or_insert((done, violation.rule));
        }
    }
    Ok(found)
}
