//! Guest agent: `whimbrel-guest`, the optional program inside a guest.
//!
//! Run as root without arguments, it waits for commands of the host on the virtio port `org.whimbrel.guest.0`
//! (`serve`): it stuns processes that write too fast to be copied (`stun`), drops caches (`memory`),
//! announces the guest's addresses on the network (`announce`), and sets the wall clock forward (`clock`).
//! With a verb it passes a request of a user in the guest to the running agent (`requests`), which asks the
//! host.
//!
//! A guest without it can be migrated too. If the agent, the host or the port fails, no process stays
//! stunned: a lease ends, a port hangs up, and the kernel releases the threads of a dead tracer.

mod announce;
mod clock;
mod config;
mod memory;
mod port;
mod requests;
mod serve;
mod stun;
mod sys;

use std::process::ExitCode;

const USAGE: &str = "\
whimbrel-guest: the whimbrel guest agent

  whimbrel-guest                    serve the host; run it once, as root, at boot
  whimbrel-guest migrate HOST       request a migration to another host, and wait
  whimbrel-guest checkpoint [TAG]   request a checkpoint of this machine, and wait

The host grants requests only if the machine's owner allowed them: `whimbrel run --guest-requests`.
Settings: /etc/whimbrel-guest.conf. Exit codes: 0 done, 1 failed, 2 wrong arguments, 3 refused.
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        [] => serve::forever(),
        ["migrate", host] => requests::send(&format!("migrate {host}")),
        ["checkpoint"] => requests::send("checkpoint"),
        ["checkpoint", tag] => requests::send(&format!("checkpoint {tag}")),
        ["-h" | "--help" | "help"] => {
            print!("{USAGE}");
            ExitCode::SUCCESS
        }
        _ => {
            eprint!("{USAGE}");
            ExitCode::from(2)
        }
    }
}
