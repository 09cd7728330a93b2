//! `whimbrel migrate`: moves a running machine to another host.

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
  whimbrel migrate web beta --mode postcopy    web runs on beta at once and fetches its pages
  whimbrel migrate web beta --mode postcopy --backup-host gamma
  whimbrel migrate web beta --mode hybrid --rounds 3
  whimbrel migrate web beta --drop-caches --throttle 50
  whimbrel migrate web beta --network home     beta is on another subnet; web keeps its address
  whimbrel trust add beta KEY 10.0.0.2:7400    once before the first migration, on both hosts";

/// Migrate a running machine with its disks to another host
///
/// If the migration fails or is cancelled before the handover, the machine keeps running on this host. With
/// --mode postcopy or hybrid it runs on the target while this host still sends pages; Ctrl-C then only ends
/// the progress display.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
    /// Target host; `whimbrel trust ls` lists them
    host: HostName,
    /// Mode of the migration
    #[arg(long, value_enum, default_value = "precopy")]
    mode: ModeArg,
    /// Keep copying until the predicted downtime is at most this [default: 2ms; 10ms with --mode hybrid]. If
    /// it is given, the machine runs on here when the downtime exceeds it by more than a second
    #[arg(long, alias = "downtime-limit", value_name = "DURATION")]
    downtime_max: Option<DurationArg>,
    /// Give up, with the machine running here, if it was not handed over within this time
    #[arg(long, value_name = "DURATION")]
    time_max: Option<DurationArg>,
    /// Most rounds of --mode hybrid before the machine runs on the target [default: 2]
    #[arg(long, value_name = "NUMBER")]
    rounds: Option<u32>,
    /// Limit the rate of the migration
    #[arg(long, value_name = "RATE")]
    rate_max: Option<RateArg>,
    /// Rate of the first round; each later round runs at the dirty rate plus --rate-step
    #[arg(long, value_name = "RATE")]
    rate_min: Option<RateArg>,
    /// Step above the dirty rate [default: 50Mbit]
    #[arg(long, value_name = "RATE")]
    rate_step: Option<RateArg>,
    /// Use a --rate-min of 100Mbit, or of --rate-max if that is less
    #[arg(long)]
    adaptive: bool,
    /// Slow down the CPUs of a machine that dirties memory faster than it can be copied; PERCENT is the least
    /// share of time they run
    #[arg(long, value_name = "auto|off|PERCENT", default_value = "auto")]
    throttle: Throttle,
    /// With --mode postcopy: a third host that takes over if the source or the target fails before all pages
    /// are sent
    #[arg(long, alias = "safe", value_name = "HOST")]
    backup_host: Option<HostName>,
    /// Do not suspend guest processes that write too fast
    #[arg(long)]
    no_stun: bool,
    /// Let the guest drop clean caches and release free memory before the first round
    #[arg(long, alias = "free-caches")]
    drop_caches: bool,
    /// Network of the machine on the target [default: local; a machine that uses a tunnel keeps it, except on
    /// its way home]
    #[arg(long, value_enum)]
    network: Option<NetworkArg>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ModeArg {
    /// Copy while the machine runs, and pause it for the last round
    #[value(alias = "live")]
    Precopy,
    /// Run the machine on the target at once; pages follow when it touches them, and in the background
    #[value(alias = "lazy")]
    Postcopy,
    /// Copy some rounds while the machine runs, then continue as postcopy
    Hybrid,
    /// Pause the machine, copy it, and run it on the target
    #[value(alias = "stop")]
    Offline,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let request = MigrateRequest {
            host: self.host,
            mode: match self.mode {
                ModeArg::Precopy => MigrateMode::Live,
                ModeArg::Offline => MigrateMode::Stop,
                ModeArg::Postcopy => MigrateMode::Lazy,
                ModeArg::Hybrid => MigrateMode::Hybrid,
            },
            rounds: self.rounds,
            downtime_max_ms: self.downtime_max.map(DurationArg::as_ms),
            time_max_ms: self.time_max.map(DurationArg::as_ms),
            rate_max: self.rate_max.map(|rate| rate.0),
            rate_min: self.rate_min.map(|rate| rate.0),
            rate_step: self.rate_step.map(|rate| rate.0),
            adaptive: self.adaptive,
            network: self.network.map(Into::into),
            throttle: self.throttle.0,
            safe: self.backup_host,
            no_stun: self.no_stun,
            free_caches: self.drop_caches,
        };
        operation::perform(context, context.client.migrate(&self.name, &request)).await
    }
}
