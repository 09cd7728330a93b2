//! Verbs that make one call and print its result.

use crate::{
    argument_types::{BalloonArg, ImportFormatArg, Located, PushTarget, absolute, bucket},
    capsule_text,
    context::Context,
    error::CliError,
    machine_text, operation,
    output::Removed,
};
use std::path::PathBuf;
use whimbrel_api::*;
use whimbrel_core::{ByteSize, MachineName, RefName};

/// Defines a module for each verb: its help, its examples, its arguments, and the call.
macro_rules! verbs {
    ($($verb:ident {
        $(#[$about:meta])* $examples:literal; {$($arguments:tt)*}; |$args:ident, $context:ident| $call:block
    })*) => {
        $(pub(crate) mod $verb {
            use super::*;

            $(#[$about])*
            #[derive(Debug, clap::Args)]
            #[command(after_help = $examples)]
            pub(crate) struct Args {
                $($arguments)*
            }

            impl Args {
                pub(crate) async fn run(self, $context: &Context) -> Result<(), CliError> {
                    let $args = self;
                    $call
                }
            }
        })*
    };
}

verbs! {
    balloon {
        /// Change the memory size of a guest with its balloon
        ///
        /// The guest releases memory as fast as it can. Released memory is neither stored nor migrated.
        "\
Examples:
  whimbrel balloon web 256M    release caches before a suspend
  whimbrel balloon web 1G      return the memory";
        {
            /// Name of the machine
            name: MachineName,
            /// Memory that the guest may use from now on
            size: ByteSize,
        };
        |args, context| {
            let machine = context.client.balloon(&args.name, &BalloonRequest { size: args.size }).await?;
            context.output.result(&machine, machine_text::sentence)
        }
    }

    delete {
        /// Delete a stopped or crashed machine and the changes on its disks
        ///
        /// Capsules of the machine stay, and so do the files that its disks started from. The name becomes
        /// free.
        "\
Examples:
  whimbrel stop web && whimbrel delete web";
        {
            /// Name of the machine
            name: MachineName,
            /// Delete what is left of a machine whose record cannot be read
            #[arg(long)]
            unreadable: bool,
        };
        |args, context| {
            match args.unreadable {
                true => context.client.delete_unreadable_machine(&args.name).await?,
                false => context.client.delete_machine(&args.name).await?,
            }
            context.output.result(&Removed::one(&args.name), |removed| removed.sentence("deleted"))
        }
    }

    diff {
        /// Show the differences between two capsules
        ///
        /// CHANGED counts pages that differ. NEW counts those whose content the first capsule does not have
        /// anywhere.
        "\
Examples:
  whimbrel diff before-upgrade web";
        {
            /// First capsule: tag, machine (its newest capsule) or id
            a: CapsuleRef,
            /// Second capsule, named in the same way
            b: CapsuleRef,
        };
        |args, context| {
            let diff = context.client.diff(&args.a, &args.b).await?;
            context.output.result(&diff, capsule_text::difference)
        }
    }

    failover {
        /// Switch a machine over to its standby
        ///
        /// On the primary, the command sends a last epoch, and the standby continues from there. On the
        /// standby, it takes over from the last epoch that the standby has, if the witness allows it.
        "\
Examples:
  whimbrel failover web                      on the primary: a drill, nothing is lost
  whimbrel failover web --primary-is-dead    on a standby without a witness, if the primary is off";
        {
            /// Name of the machine
            name: MachineName,
            /// Confirm that the primary no longer runs the machine; if it does, two copies will run
            #[arg(long)]
            primary_is_dead: bool,
            /// Take over although its host answers: what runs there is stopped later
            #[arg(long, requires = "primary_is_dead")]
            force: bool,
        };
        |args, context| {
            let request = FailoverRequest { primary_is_dead: args.primary_is_dead, force: args.force };
            operation::perform(context, context.client.failover(&args.name, &request)).await
        }
    }

    gc {
        /// Delete stored data that no tag and no machine uses
        "\
Examples:
  whimbrel untag before-upgrade && whimbrel gc
  whimbrel gc s3://vault/vms    the same of a bucket";
        {
            /// Bucket to delete data in, instead of the store of this host
            #[arg(value_name = "s3://BUCKET", value_parser = bucket)]
            bucket: Option<String>,
        };
        |args, context| {
            match args.bucket {
                Some(bucket) => {
                    let request = BucketRequest { bucket, untag: None, gc: true, verify: false };
                    operation::perform(context, context.client.bucket(&request)).await
                }
                None => operation::perform(context, context.client.gc()).await,
            }
        }
    }

    import {
        /// Read a capsule or a disk image from a file into the store
        ///
        /// A disk image becomes a disk-only capsule, which boots when it is resumed; an appliance (OVA)
        /// becomes one with its disks. Images that name other files, like a backing file, are refused.
        "\
Examples:
  whimbrel import /backup/web.capsule web
  whimbrel import debian.qcow2 debian
  whimbrel import appliance.ova app && whimbrel derive app web --memory 4G --cpus 2";
        {
            /// File to read
            #[arg(value_parser = absolute)]
            file: PathBuf,
            /// Tag for the new capsule
            name: RefName,
            /// Content of the file [default: disk if it ends in .raw, .img, .qcow2, .vmdk, .vhdx, .vhd or
            /// .ova, also with .gz, .xz or .zst after that, else capsule]
            #[arg(long, value_enum)]
            format: Option<ImportFormatArg>,
        };
        |args, context| {
            let format = ImportFormatArg::or_from_ending(args.format, &args.file);
            let request = ImportRequest { path: args.file, name: args.name, format, key: None };
            operation::perform(context, context.client.import(&request)).await
        }
    }

    inspect {
        /// Show all details of a machine
        "\
Examples:
  whimbrel inspect web
  whimbrel inspect web --json | jq .settings

`whimbrel show` does that for capsules.";
        {
            /// Name of the machine
            name: MachineName,
        };
        |args, context| {
            let machine = context.client.machine(&args.name).await?;
            context.output.result(&machine, machine_text::page)
        }
    }

    pause {
        /// Pause the CPUs of a machine; its memory stays loaded
        "\
Examples:
  whimbrel pause web
  whimbrel unpause web";
        {
            /// Name of the machine
            name: MachineName,
        };
        |args, context| {
            let machine = context.client.pause(&args.name).await?;
            context.output.result(&machine, machine_text::sentence)
        }
    }

    ps {
        /// List the machines of this host, or of all hosts
        "\
Examples:
  whimbrel ps
  whimbrel ps --all-hosts
  whimbrel ps --label tier=front --label owner
  whimbrel ps --json | jq -r '.[].name'";
        {
            /// Only machines with this label, of this value or of any (repeatable)
            #[arg(long = "label", value_name = "KEY[=VALUE]")]
            labels: Vec<String>,
            /// Machines of the hosts that this one trusts as well
            #[arg(long)]
            all_hosts: bool,
        };
        |args, context| {
            let wanted = |machine: &MachineInfo| {
                args.labels.iter().all(|label| machine_text::has_label(machine, label))
            };
            if args.all_hosts {
                let mut all = context.client.hosts().await?;
                all.iter_mut().for_each(|host| host.machines.retain(wanted));
                return context.output.result(all.as_slice(), machine_text::list_of_hosts);
            }
            let mut all = context.client.machines().await?;
            all.retain(wanted);
            context.output.result(all.as_slice(), machine_text::list)
        }
    }

    pull {
        /// Fetch a capsule from another host or from a pool
        "\
Examples:
  whimbrel pull beta:web               the newest capsule of web, from beta
  whimbrel pull golden --tag base      from any trusted host with golden
  whimbrel pull beta:golden --lazy     only its description; pages are fetched when they are read
  whimbrel ls --from beta              capsules that beta offers
  whimbrel pull pool:MANAGER/vms/web   a capsule in the folder /vms of a pool
  whimbrel pull s3://vault/vms/web     a capsule in a bucket

Only pages that this host does not have are sent. It looks for pages in its store and in the files that were \
added with `whimbrel cache add`. If the connection breaks, call the command again to continue.";
        {
            /// Tag, machine or id on the other side; HOST:, pool:MANAGER/ or s3://BUCKET/ in front names that
            /// side
            /// [default: any trusted host]
            #[arg(value_name = "[HOST:]CAPSULE")]
            capsule: Located,
            /// Tag for the capsule on this host
            #[arg(long)]
            tag: Option<RefName>,
            /// Fetch only the description; pages are fetched when they are read
            #[arg(long)]
            lazy: bool,
        };
        |args, context| {
            let Located { host, pool, capsule } = args.capsule;
            let request = PullRequest { capsule, host, pool, tag: args.tag, lazy: args.lazy };
            operation::perform(context, context.client.pull(&request)).await
        }
    }

    show {
        /// Show all details of a capsule
        "\
Examples:
  whimbrel show before-upgrade
  whimbrel show 3fa95c81 --json | jq .images";
        {
            /// Tag, machine (its newest capsule) or id
            capsule: CapsuleRef,
        };
        |args, context| {
            let capsule = context.client.capsule(&args.capsule).await?;
            context.output.result(&capsule, capsule_text::page)
        }
    }

    start {
        /// Start a stopped or crashed machine from its own disks
        ///
        /// The machine boots with its configuration and the disks as it left them. Its memory is lost. To
        /// continue a suspended machine with its memory, use `whimbrel resume`.
        "\
Examples:
  whimbrel start web
  whimbrel stop web && whimbrel start web     switch it off and on";
        {
            /// Name of the machine
            name: MachineName,
        };
        |args, context| {
            let machine = context.client.start_machine(&args.name).await?;
            context.output.result(&machine, machine_text::sentence)
        }
    }

    suspend {
        /// Save the state of a machine as a capsule and end the machine
        ///
        /// If the command fails or is cancelled, the machine keeps running.
        "\
Examples:
  whimbrel suspend web
  whimbrel suspend web --tag friday
  whimbrel suspend web --balloon auto    leave out the guest's caches
  whimbrel resume web                    continue from there";
        {
            /// Name of the machine
            name: MachineName,
            /// Tag for the new capsule
            #[arg(long)]
            tag: Option<RefName>,
            /// Shrink guest memory first: auto, off, or the size to shrink to; a resume restores the full
            /// size
            #[arg(long, value_name = "auto|off|SIZE", default_value = "off")]
            balloon: BalloonArg,
        };
        |args, context| {
            let request = SuspendRequest { tag: args.tag, balloon: args.balloon.0 };
            operation::perform(context, context.client.suspend(&args.name, &request)).await
        }
    }

    rename {
        /// Rename a machine that is off or suspended
        ///
        /// Its disks, newest capsule, epoch snapshots, schedules, uploads, settings, addresses and published
        /// ports get the new name; names in a managed network resolve to it. The guest keeps its own host
        /// name, and tags and earlier capsules keep theirs.
        "\
Examples:
  whimbrel rename web shop
  whimbrel suspend web && whimbrel rename web shop && whimbrel resume shop     if it runs";
        {
            /// Name of the machine
            #[arg(value_name = "OLD")]
            name: MachineName,
            /// New name of the machine
            #[arg(value_name = "NEW")]
            to: MachineName,
        };
        |args, context| {
            let machine = context.client.rename(&args.name, &RenameRequest { to: args.to }).await?;
            context.output.result(&machine, machine_text::sentence)
        }
    }

    rewind {
        /// Take a machine back to an earlier capsule and keep its present state
        ///
        /// The machine is suspended first. Its present state is kept as a capsule with a tag of its own, so
        /// a rewind can be undone; of a machine that is switched off or crashed, that is its disks. If the
        /// earlier state cannot be resumed, the machine is as it was.
        /// `whimbrel log NAME` lists its capsules. Connections of the guest to the outside may break.
        "\
Examples:
  whimbrel checkpoint web --tag before-upgrade && whimbrel ssh web 'apt-get -y full-upgrade'
  whimbrel rewind web before-upgrade     the upgrade never happened
  whimbrel log web                       which states there are
  whimbrel rewind web web@-5m            five minutes ago (see `protect --snapshots`)";
        {
            /// Name of the machine
            name: MachineName,
            /// Tag or id of one of its capsules, or NAME@-AGE
            capsule: CapsuleRef,
        };
        |args, context| {
            let request = RewindRequest { capsule: args.capsule };
            operation::perform(context, context.client.rewind(&args.name, &request)).await
        }
    }

    tag {
        /// Give a capsule a tag; an existing tag moves
        ///
        /// `whimbrel log TAG --refs` lists the earlier capsules of a tag. Moving a tag is safe: no capsule
        /// depends on its parents.
        "\
Examples:
  whimbrel tag web golden
  whimbrel tag 3fa95c81 before-upgrade";
        {
            /// Tag, machine (its newest capsule) or id
            capsule: CapsuleRef,
            /// Tag for the capsule
            tag: RefName,
        };
        |args, context| {
            let capsule = context.client.tag(&args.tag, &TagRequest { capsule: args.capsule }).await?;
            if let Some(left) = &capsule.left {
                let named = format!("{} named {} until now", args.tag, left.capsule.short());
                if let Some(note) = capsule_text::left_behind(left) {
                    context
                        .output
                        .remark(&format!("note: {named}: {note}; see `whimbrel outdated {}`", args.tag));
                }
            }
            context.output.result(&capsule, |named| format!("{}: {}\n", args.tag, named.capsule.id.short()))
        }
    }

    unpause {
        /// Continue a paused machine
        "\
Examples:
  whimbrel unpause web";
        {
            /// Name of the machine
            name: MachineName,
        };
        |args, context| {
            let machine = context.client.unpause(&args.name).await?;
            context.output.result(&machine, machine_text::sentence)
        }
    }

    unprotect {
        /// Stop protecting a machine; it keeps running on this host
        ///
        /// The standby is deleted. If its host does not answer, the witness prevents it from ever taking
        /// over.
        "\
Examples:
  whimbrel unprotect web";
        {
            /// Name of the machine
            name: MachineName,
        };
        |args, context| {
            let machine = context.client.unprotect(&args.name).await?;
            context.output.result(&machine, machine_text::sentence)
        }
    }

    repair {
        /// Fetch damaged and missing data of capsules from other hosts or a pool
        ///
        /// Reads all stored data like `verify`, and fetches good copies from any trusted host that has them.
        /// Nothing is removed that is not replaced. The exit code is 6 if something is still missing.
        "\
Examples:
  whimbrel repair                              all capsules, from any trusted host
  whimbrel repair web --from beta              the newest capsule of web; beta is asked first
  whimbrel repair web --from pool:MANAGER/vms  from the file web in a folder of a pool
  whimbrel repair --json | jq .result.capsules

`whimbrel gc` frees the damaged bytes later.";
        {
            /// Tag, machine (its newest capsule) or id [default: all capsules]
            capsule: Option<CapsuleRef>,
            /// Host that is asked first, pool:MANAGER[/FOLDER] or s3://BUCKET[/PREFIX] [default: the nearest
            /// trusted host]
            #[arg(long, value_name = "HOST|POOL")]
            from: Option<PushTarget>,
        };
        |args, context| {
            let (host, pool) = args.from.map_or((None, None), PushTarget::apart);
            let request = RepairRequest { capsule: args.capsule, host, pool };
            operation::perform(context, context.client.repair(&request)).await
        }
    }

    verify {
        /// Read all stored data and check its digests
        ///
        /// The exit code is 6 if something is damaged.
        "\
Examples:
  whimbrel verify
  whimbrel verify s3://vault/vms    the same of a bucket: reads all of it
  whimbrel verify --json | jq .result.damaged";
        {
            /// Bucket to check, instead of the store of this host
            #[arg(value_name = "s3://BUCKET", value_parser = bucket)]
            bucket: Option<String>,
        };
        |args, context| {
            match args.bucket {
                Some(bucket) => {
                    let request = BucketRequest { bucket, untag: None, gc: false, verify: true };
                    operation::perform(context, context.client.bucket(&request)).await
                }
                None => operation::perform(context, context.client.verify()).await,
            }
        }
    }
}
