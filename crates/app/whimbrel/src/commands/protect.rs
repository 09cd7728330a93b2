//! `whimbrel protect`.

use crate::{
    argument_types::{DurationArg, RateArg, SnapshotRuleArg},
    context::Context,
    error::CliError,
    operation,
};
use clap::ValueEnum;
use whimbrel_api::{CodeStep, ProtectBlock, ProtectCodec, ProtectMode, ProtectRequest};
use whimbrel_core::{HostName, MachineName, WitnessAddress};

const EXAMPLES: &str = "\
Examples:
  whimbrel protect web beta --witness gamma     beta takes over by itself when this host dies
  whimbrel protect web beta                     beta takes over when a person says so
  whimbrel protect web beta --witness gamma --epoch 25ms --block 256
  whimbrel protect web beta --witness gamma --then delta
  whimbrel protect web beta --witness etcd://10.0.0.7:2379,10.0.0.8:2379
  whimbrel protect web beta --keep 1/min,60     and later whimbrel resume web@-5m --name before
  whimbrel protect db beta --group shop         at one instant with others of that group
  whimbrel ps                                   how well it is protected, and what that costs
  whimbrel failover web                         let beta have it now; whimbrel unprotect web ends it";

/// Keep a standby of a running machine on another host, no older than the last epoch
///
/// Every epoch the machine stands still for a few milliseconds while what it changed is copied aside. What it
/// sends to the network waits until the standby has all of that, so nobody ever sees more than the standby
/// knows. When this host dies, the machine goes on there. Who may run it when the two hosts lose each other
/// is the witness's to say; without one nothing is taken over by itself.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The machine
    name: MachineName,
    /// Where its standby is to be; see `whimbrel trust ls`
    host: HostName,
    /// A third host, which all three trust, or an etcd as etcd://HOST:PORT,HOST:PORT; it decides who runs the
    /// machine
    #[arg(long, value_name = "WITNESS")]
    witness: Option<WitnessAddress>,
    /// How what has changed travels
    #[arg(long, value_enum, default_value = "epoch")]
    mode: ModeArg,
    /// Time between two cuts, 25ms to 1s, 50ms if absent; the delay of what it sends is about that. In mode
    /// replay 100ms to 10s, 1s if absent
    #[arg(long, value_name = "DURATION")]
    epoch: Option<DurationArg>,
    /// How many times as long an epoch may last while nothing it sent waits to leave, 1 to 20; 4 if absent, 1
    /// in a group and in the other modes
    #[arg(long, value_name = "TIMES")]
    stretch: Option<u32>,
    /// The unit in which changes are found; smaller sends less and takes more memory
    #[arg(long, value_enum)]
    block: Option<BlockArg>,
    /// How long the primary may be silent before the standby asks for it, 200ms to 60s
    #[arg(long, value_name = "DURATION", default_value = "400ms")]
    lease: DurationArg,
    /// Leave steps of the code out, to see what each brings
    #[arg(long, value_enum, value_delimiter = ',', value_name = "STEPS")]
    without: Vec<StepArg>,
    /// What blocks go through that no cheaper step has shrunk
    #[arg(long, value_enum, default_value = "zstd")]
    codec: CodecArg,
    /// Where whoever takes it over protects it next, by itself; may be this host, once it is back
    #[arg(long, value_name = "HOST")]
    then: Option<HostName>,
    /// Store epochs as capsules on the standby's host, so often and the newest so many; `whimbrel resume
    /// NAME@-5m` goes back
    #[arg(long, value_name = "RATE,COUNT")]
    keep: Option<SnapshotRuleArg>,
    /// Cut its epochs at one instant with all machines of this host that are protected in the same group
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Use no more of the link to the standby than this; what the machine sends waits for epochs that take
    /// longer so
    #[arg(long, value_name = "RATE")]
    rate_max: Option<RateArg>,
}

/// The two of them, with help.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ModeArg {
    /// Changed blocks only, each as small as is cheap
    Epoch,
    /// Whole pages as they are, as Remus did
    Remus,
    /// Seldom; output waits for inputs to be at the standby, which are played again there. Promises less: see
    /// the manual
    Replay,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum BlockArg {
    #[value(name = "64")]
    B64,
    #[value(name = "128")]
    B128,
    #[value(name = "256")]
    B256,
    Page,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum CodecArg {
    Zstd,
    /// As in the paper that the steps are from; slower
    Gzip,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum StepArg {
    /// Identical blocks travel once
    Share,
    /// Blocks of mostly zeros as offsets and values
    Sparse,
    /// Blocks of similar words by a dictionary
    Wkdm,
    /// All others by zstd, or what --codec says
    Zstd,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let block = self.block.map(|block| match block {
            BlockArg::B64 => ProtectBlock::B64,
            BlockArg::B128 => ProtectBlock::B128,
            BlockArg::B256 => ProtectBlock::B256,
            BlockArg::Page => ProtectBlock::Page,
        });
        let step = |step: StepArg| match step {
            StepArg::Share => CodeStep::Share,
            StepArg::Sparse => CodeStep::Sparse,
            StepArg::Wkdm => CodeStep::Wkdm,
            StepArg::Zstd => CodeStep::Zstd,
        };
        let request = ProtectRequest {
            host: self.host,
            witness: self.witness,
            mode: match self.mode {
                ModeArg::Epoch => ProtectMode::Epoch,
                ModeArg::Remus => ProtectMode::Remus,
                ModeArg::Replay => ProtectMode::Replay,
            },
            epoch_ms: self.epoch.map(|epoch| epoch.as_ms()),
            stretch: self.stretch,
            block,
            lease_ms: Some(self.lease.as_ms()),
            without: self.without.into_iter().map(step).collect(),
            codec: match self.codec {
                CodecArg::Zstd => ProtectCodec::Zstd,
                CodecArg::Gzip => ProtectCodec::Gzip,
            },
            then: self.then,
            keep: self.keep.map(|keep| keep.0),
            group: self.group,
            rate_max: self.rate_max.map(|rate| rate.0),
        };
        operation::perform(context, context.client.protect(&self.name, &request)).await
    }
}
