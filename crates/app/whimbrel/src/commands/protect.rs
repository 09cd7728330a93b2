//! `whimbrel protect`: replicates a running machine to a standby.

use crate::{
    argument_types::{DurationArg, RateArg, SnapshotRuleArg},
    context::Context,
    error::CliError,
    operation,
};
use clap::ValueEnum;
use whimbrel_api::{ProtectBlock, ProtectMode, ProtectRequest};
use whimbrel_core::{HostName, MachineName, WitnessAddress};

const EXAMPLES: &str = "\
Examples:
  whimbrel protect web beta --witness gamma     beta takes over automatically when this host fails
  whimbrel protect web beta                     beta takes over only with `whimbrel failover`
  whimbrel protect web beta --witness gamma --epoch 25ms --diff-block 256
  whimbrel protect web beta --witness gamma --next-standby delta
  whimbrel protect web beta --witness gamma --spare delta,epsilon
  whimbrel protect web beta --witness etcd://10.0.0.7:2379,10.0.0.8:2379
  whimbrel protect web beta --snapshots 1/min,60    later: `whimbrel resume web@-5m --name before`
  whimbrel protect db beta --group shop         epochs end at one instant with those of the group
  whimbrel ps                                   shows the protection of each machine, and its cost
  whimbrel unprotect web                        end the protection
  whimbrel failover web                         switch over to beta";

/// Replicate a running machine to a standby on another host
///
/// At the end of each epoch the machine pauses for a few milliseconds while its changes are copied. Its
/// network output is held until the standby has them. If this host fails, the machine continues on the
/// standby, and no client has seen output of a state that is lost. If the hosts lose contact, the witness
/// decides which one runs the machine. Without a witness there is no automatic takeover.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
    /// Host of the standby; `whimbrel trust ls` lists hosts
    host: HostName,
    /// Witness, which decides who runs the machine: a third host that all trust, or an etcd as
    /// etcd://HOST:PORT,HOST:PORT
    #[arg(long, value_name = "WITNESS")]
    witness: Option<WitnessAddress>,
    /// Mode of the protection
    #[arg(long, value_enum, default_value = "epoch")]
    mode: ModeArg,
    /// Length of an epoch, which is about the delay of output [25ms to 1s, default 50ms; in mode replay 100ms
    /// to 10s, default 1s]
    #[arg(long, value_name = "DURATION")]
    epoch: Option<DurationArg>,
    /// Longest epoch of a machine that sends nothing, as a multiple of --epoch [1 to 20, default 4; 1 in a
    /// group and in the other modes]
    #[arg(long, alias = "stretch", value_name = "FACTOR")]
    max_epoch_factor: Option<u32>,
    /// Unit in bytes in which changes are found; a smaller one sends less and needs more memory [default: 64]
    #[arg(long, alias = "block", value_enum)]
    diff_block: Option<BlockArg>,
    /// Lease: how long the primary may be silent before the standby may take over [200ms to 60s]
    #[arg(long, value_name = "DURATION", default_value = "400ms")]
    lease: DurationArg,
    /// Host of the next standby, set up automatically after a takeover; may be this host
    #[arg(long, alias = "then", value_name = "HOST")]
    next_standby: Option<HostName>,
    /// Spare hosts: when the standby is lost, the next of them becomes the standby, and the lost one the last
    /// spare
    #[arg(long, alias = "spares", value_name = "HOSTS", value_delimiter = ',')]
    spare: Vec<HostName>,
    /// Store epochs as capsules on the standby's host, like 1/min,60: one per minute, and the newest 60 are
    /// retained
    #[arg(long, alias = "keep", value_name = "RATE,COUNT")]
    snapshots: Option<SnapshotRuleArg>,
    /// Consistency group: epochs end at one instant with those of all machines of this host in the group
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Limit the rate to the standby; a lower rate makes epochs longer and delays the machine's output
    #[arg(long, value_name = "RATE")]
    rate_max: Option<RateArg>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ModeArg {
    /// Changed blocks only, in a compact encoding
    Epoch,
    /// Complete pages without encoding, as in Remus
    Remus,
    /// Long epochs; output waits only until the standby has the inputs, which it replays after a takeover.
    /// Guarantees less: see the manual
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

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let block = self.diff_block.map(|block| match block {
            BlockArg::B64 => ProtectBlock::B64,
            BlockArg::B128 => ProtectBlock::B128,
            BlockArg::B256 => ProtectBlock::B256,
            BlockArg::Page => ProtectBlock::Page,
        });
        let request = ProtectRequest {
            host: self.host,
            witness: self.witness,
            mode: match self.mode {
                ModeArg::Epoch => ProtectMode::Epoch,
                ModeArg::Remus => ProtectMode::Remus,
                ModeArg::Replay => ProtectMode::Replay,
            },
            epoch_ms: self.epoch.map(|epoch| epoch.as_ms()),
            stretch: self.max_epoch_factor,
            block,
            lease_ms: Some(self.lease.as_ms()),
            then: self.next_standby,
            spares: self.spare,
            keep: self.snapshots.map(|rule| rule.0),
            group: self.group,
            rate_max: self.rate_max.map(|rate| rate.0),
        };
        operation::perform(context, context.client.protect(&self.name, &request)).await
    }
}
