//! The demo: what Whimbrel does with a running machine, as a client of that machine sees it.
//!
//! Two hosts and a client in network namespaces of this machine; a guest that is booted, moved, kept, cloned,
//! suspended and resumed while the client watches. Progress goes to stderr, the table (or `--json`) to
//! stdout. Exit codes: 0 every promise was kept, 1 one was broken or a step failed, 2 wrong arguments, 130
//! and the like after a signal. Whatever happens, nothing stays behind: this thread waits for the end of the
//! story and for signals, and ends the hosts.

mod client;
mod guest;
mod narrator;
mod proof;
mod report;
mod signals;
mod story;

use narrator::Narrator;
use report::Report;
use std::{
    any::Any,
    panic,
    process::ExitCode,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
};
use whimbrel_e2e::Cluster;
use whimbrel_testkit::guest::GuestFiles;

const USAGE: &str = "usage: demo [--json]";

/// What the waiting thread is told.
enum Event {
    /// Hosts are being made: from here on there is something to end.
    Starting,
    /// They are up.
    Up(Arc<Cluster>),
    /// The story is over, or could not go on for this reason.
    Ended(Result<Report, String>),
    /// The signal of this number came.
    Signal(u8),
}

/// What there is to end.
enum Hosts {
    None,
    Starting,
    Up(Arc<Cluster>),
}

/// How the demo ended.
enum Outcome {
    Told(Report),
    Failed(String),
    Interrupted(u8),
}

fn main() -> ExitCode {
    let json = match std::env::args().skip(1).collect::<Vec<_>>().as_slice() {
        [] => false,
        [word] if word == "--json" => true,
        [word] if word == "--help" || word == "-h" => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("error: unknown arguments\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    if !nix::unistd::Uid::effective().is_root() {
        eprintln!("error: the demo makes network namespaces and attaches to processes, which takes root");
        eprintln!("hint: sudo make demo");
        return ExitCode::FAILURE;
    }
    match run() {
        Outcome::Told(report) => {
            println!("{}", if json { report.json() } else { report.table() });
            if report.kept() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Outcome::Failed(reason) => {
            eprintln!("error: {reason}\nEverything is removed.");
            ExitCode::FAILURE
        }
        Outcome::Interrupted(signal) => {
            eprintln!("Interrupted; everything is removed.");
            ExitCode::from(128 + signal)
        }
    }
}

fn run() -> Outcome {
    // The library and the cases that share it panic at what must not happen; `wait` reports that, once.
    panic::set_hook(Box::new(|_| ()));
    let (sender, events) = channel();
    if let Err(error) = signals::forward(sender.clone()) {
        return Outcome::Failed(format!("cannot wait for signals: {error}"));
    }
    thread::spawn(move || {
        let told = panic::catch_unwind(|| tell(&sender));
        // The receiver is gone only when a signal has ended the demo.
        let _ = sender.send(Event::Ended(told.map_err(reason)));
    });
    wait(&events)
}

fn tell(events: &Sender<Event>) -> Report {
    let narrator = Narrator::start();
    narrator.say(
        "making the guest's files (the first time fetches a kernel and compiles the program in the guest)",
    );
    GuestFiles::get();
    // As above: without a receiver there is nobody to tell, and soon no process.
    let _ = events.send(Event::Starting);
    narrator.say("making the hosts alpha and beta and a client: network namespaces on one switch, a daemon on each host");
    let cluster = Arc::new(Cluster::start(&["alpha", "beta"]));
    let _ = events.send(Event::Up(Arc::clone(&cluster)));
    story::tell(&cluster, &narrator)
}

/// Waits for the end of the story or a signal, then ends the hosts.
fn wait(events: &Receiver<Event>) -> Outcome {
    let (mut hosts, mut signal) = (Hosts::None, None);
    let ended = loop {
        match events.recv().expect("the thread that forwards signals keeps a sender") {
            Event::Starting => hosts = Hosts::Starting,
            Event::Up(cluster) => hosts = Hosts::Up(cluster),
            Event::Ended(ended) => break Some(ended),
            Event::Signal(number) => signal = Some(number),
        }
        // Hosts that are half made can only be ended once they are made, a second or two later.
        if signal.is_some() && !matches!(hosts, Hosts::Starting) {
            break None;
        }
    };
    if let Hosts::Up(cluster) = hosts {
        cluster.end();
    }
    match (signal, ended) {
        (Some(signal), _) => Outcome::Interrupted(signal),
        (None, Some(Ok(report))) => Outcome::Told(report),
        (None, Some(Err(reason))) => Outcome::Failed(reason),
        (None, None) => unreachable!("the loop ends by a signal or by the story's end"),
    }
}

/// The text of a panic.
fn reason(panic: Box<dyn Any + Send>) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}
