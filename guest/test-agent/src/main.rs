//! Test agent: a program inside a test guest that proves whether the guest is still the same one.
//!
//! It has state that only an uninterrupted guest retains: a random nonce, a counter that only grows, a buffer
//! of known content and the memory of what it wrote to the disk. A guest that was silently rebooted instead
//! of resumed has another nonce; one with a lost page has a bad checksum. It answers one-line requests on the
//! serial console and on TCP port 7000 (`request`), and generates traffic for probes outside (`traffic`).
//!
//! It tolerates bad input (lines are bounded) but gives every client full control of the guest: for tests
//! only. If a port or the console is unavailable, it reports that on standard error and works without it.

mod answer;
mod disk;
mod genid;
mod life;
mod load;
mod memory;
mod random;
mod request;
mod serve;
mod stall;
mod tpm;
mod traffic;

use answer::TestAgent;
use std::{env, fs, sync::Arc, thread};

/// Value of `key=` on the kernel command line.
fn kernel_option(cmdline: &str, key: &str) -> Option<String> {
    let mut values = cmdline.split_whitespace().filter_map(|word| word.strip_prefix(key)?.strip_prefix('='));
    values.next_back().map(str::to_owned)
}

/// Runs as a separate process, called `muncher`, that only dirties memory: `muncher MIB PAGES_PER_SECOND
/// BYTES_PER_PAGE`.
fn run_memory_writer(arguments: &[String]) -> ! {
    let load = load::Load::from_words(arguments.iter().map(String::as_str));
    let _munching = load.unwrap_or_else(|| panic!("no load in {arguments:?}")).start();
    loop {
        thread::park();
    }
}

fn main() {
    let arguments: Vec<String> = env::args().collect();
    if arguments.first().is_some_and(|name| name.ends_with("muncher")) {
        run_memory_writer(&arguments[1..]);
    }
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let buffer_mib = kernel_option(&cmdline, "buf").and_then(|text| text.parse().ok()).unwrap_or(64);
    let tick = kernel_option(&cmdline, "tick").and_then(|text| text.parse().ok());
    let witness = Arc::new(TestAgent::start(buffer_mib, tick.unwrap_or(life::TICK)));
    if let Some(load) = kernel_option(&cmdline, "work").and_then(|text| load::Load::from_kernel_option(&text))
    {
        witness.set_load(Some(load));
    }
    traffic::start();
    serve::start_tcp(&witness);
    let console = serve::start_console(&witness);
    println!("READY");
    if let Some(console) = console {
        // The console thread ends only with the console; then the network remains.
        let _ = console.join();
    }
    loop {
        thread::park();
    }
}
