//! `whimbrel-guest`, the optional program inside a guest.
//!
//! Run without arguments, as root, it waits for orders of the host on the virtio port `org.whimbrel.guest.0`
//! (`serve`): it holds processes that write too fast to be copied (`stun`), drops caches (`memory`), and
//! tells the network where the guest is (`announce`). With a verb it hands a wish of somebody inside to the
//! one that serves (`wish`), which asks the host.
//!
//! A guest without it moves all the same. Whatever becomes of it, of the host or of the port, no process
//! stays held: a lease ends, a port hangs up, and the kernel lets go what a dead tracer held.

mod announce;
mod config;
mod memory;
mod port;
mod serve;
mod stun;
mod sys;
mod wish;

use std::process::ExitCode;

const USAGE: &str = "\
whimbrel-guest: the program inside a guest of whimbrel

  whimbrel-guest                    serve the host; run it once, as root, at boot
  whimbrel-guest migrate HOST       ask to be moved to another host, and wait
  whimbrel-guest checkpoint [TAG]   ask to have the state of this machine kept, and wait

The host does what is asked only if the machine's owner allowed it: `whimbrel run --self-service`.
Settings: /etc/whimbrel-guest.conf. Exit codes: 0 done, 1 failed, 2 wrong arguments, 3 refused.
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        [] => serve::forever(),
        ["migrate", host] => wish::send(&format!("migrate {host}")),
        ["checkpoint"] => wish::send("checkpoint"),
        ["checkpoint", tag] => wish::send(&format!("checkpoint {tag}")),
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
