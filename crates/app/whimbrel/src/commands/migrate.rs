//! `whimbrel migrate`.

use crate::{
    argument_types::{DurationArg, NetworkArg, RateArg, Throttle},
    context::Context,
    error::CliError,
    operation,
};
use clap::ValueEnum;
use whimbrel_api::{MigrateMode, MigrateRequest};
use whimbrel_core::{HostName, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel migrate web beta
  whimbrel migrate web beta --downtime-max 30ms --rate-max 400Mbit
  whimbrel migrate web beta --mode lazy        it runs there at once and fetches its pages from here
  whimbrel migrate web beta --mode lazy --safe gamma
  whimbrel migrate web beta --mode hybrid --rounds 3
  whimbrel migrate web beta --free-caches --throttle 50
  whimbrel migrate web beta --network home     beta is on another subnet; web keeps its address
  whimbrel trust add beta KEY 10.0.0.2:7400    before the first time, on both hosts";

/// Move a running machine to another host, disks and all
///
/// Until the other host has taken over, every failure and Ctrl-C leave it running here. With --mode lazy or
/// hybrid it runs there before all of it is there: this host keeps the rest until the other one has it,
/// whatever becomes of the link or of either daemon. Ctrl-C then only stops watching.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The machine
    name: MachineName,
    /// Where to; see `whimbrel trust ls`
    host: HostName,
    /// How
    #[arg(long, value_enum, default_value = "live")]
    mode: ModeArg,
    /// Copy on until it would stand still no longer than this
    #[arg(long, value_name = "DURATION")]
    downtime_max: Option<DurationArg>,
    /// Rounds of --mode hybrid before it runs there; 2 unless given
    #[arg(long, value_name = "NUMBER")]
    rounds: Option<u32>,
    /// Use no more of the link than this
    #[arg(long, value_name = "RATE")]
    rate_max: Option<RateArg>,
    /// Begin at this rate, then go as fast as the machine writes and a step faster
    #[arg(long, value_name = "RATE")]
    rate_min: Option<RateArg>,
    /// How much faster; 50Mbit unless given
    #[arg(long, value_name = "RATE")]
    rate_step: Option<RateArg>,
    /// The same as a --rate-min of 100Mbit
    #[arg(long)]
    adaptive: bool,
    /// The least part of the time that its CPUs run while it writes faster than it can be copied
    #[arg(long, value_name = "auto|off|PERCENT", default_value = "auto")]
    throttle: Throttle,
    /// In --mode lazy: a third host that takes over if either dies while pages are missing there
    #[arg(long, value_name = "HOST")]
    safe: Option<HostName>,
    /// Have its guest hold no process that writes too fast
    #[arg(long)]
    no_stun: bool,
    /// Have its guest drop clean caches and free memory before the first round
    #[arg(long)]
    free_caches: bool,
    /// Where its network is from then on; local unless given or tunnelled already, and local when it moves
    /// home
    #[arg(long, value_enum)]
    network: Option<NetworkArg>,
}

/// All of them, with help.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ModeArg {
    /// Copy while it runs, stop it for the last round only
    Live,
    /// Stop it, copy it, start it there
    Stop,
    /// Start it there at once; pages follow when it touches them, and in the background
    Lazy,
    /// Copy some rounds while it runs, then start it there; the rest follows
    Hybrid,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let request = MigrateRequest {
            host: self.host,
            mode: match self.mode {
                ModeArg::Live => MigrateMode::Live,
                ModeArg::Stop => MigrateMode::Stop,
                ModeArg::Lazy => MigrateMode::Lazy,
                ModeArg::Hybrid => MigrateMode::Hybrid,
            },
            rounds: self.rounds,
            downtime_max_ms: self.downtime_max.map(DurationArg::as_ms),
            rate_max: self.rate_max.map(|rate| rate.0),
            rate_min: self.rate_min.map(|rate| rate.0),
            rate_step: self.rate_step.map(|rate| rate.0),
            adaptive: self.adaptive,
            network: self.network.map(Into::into),
            throttle: self.throttle.0,
            safe: self.safe,
            no_stun: self.no_stun,
            free_caches: self.free_caches,
        };
        operation::perform(context, context.client.migrate(&self.name, &request)).await
    }
}
