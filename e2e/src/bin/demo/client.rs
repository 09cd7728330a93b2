//! What a client sees of the machine while something is done to it.
//!
//! One connection to the witness and one numbered stream stay open from the first step to the last. A 1 kHz
//! probe belongs to each step, so that every downtime is that step's own.

use crate::proof::Proof;
use std::time::{Duration, Instant};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS};
use whimbrel_testkit::{
    guest::{Identity, TestAgent},
    lab::{StreamProbe, StreamReport},
};

/// Blocks of 4 KiB that the guest writes to its disk before each step.
const BLOCKS: u64 = 256;
/// How long the machine may be silent before the demo gives it up.
const PATIENCE: Duration = Duration::from_secs(60);
/// Probes that must be answered after a step before it counts as over.
const ANSWERS: u64 = 300;

/// A client of the machine.
pub(crate) struct Client<'a> {
    cluster: &'a Cluster,
    witness: TestAgent,
    stream: StreamProbe,
}

/// What the client saw of one step.
pub(crate) struct Seen {
    /// How long the step took, as the one who asked for it waited.
    pub(crate) took: Duration,
    /// The longest silence of the machine.
    pub(crate) downtime: Duration,
    /// Whether the open stream went on.
    pub(crate) stream: bool,
    /// Who the machine was before.
    pub(crate) before: Identity,
    /// Whether it still is.
    pub(crate) proof: Proof,
}

impl<'a> Client<'a> {
    /// Waits until the machine answers, and keeps the connections.
    pub(crate) fn meet(cluster: &'a Cluster) -> Self {
        let witness = cluster.witness(GUEST_ADDRESS);
        Self { cluster, witness, stream: cluster.stream(GUEST_ADDRESS) }
    }

    /// Watches while `work` is done.
    pub(crate) fn watch<T>(&mut self, work: impl FnOnce() -> T) -> (T, Seen) {
        self.witness.write(BLOCKS).expect("a disk that takes writes");
        let before = self.witness.check().expect("an answer from the witness");
        let probe = self.cluster.probe(GUEST_ADDRESS);
        let begin = Instant::now();
        let value = work();
        let took = begin.elapsed();
        assert!(probe.wait_answers(ANSWERS, PATIENCE), "the machine does not answer any more");
        let stream = self.stream_goes_on();
        let downtime = probe.stop().downtime;
        let after = self.witness.check().expect("an answer on the connection that was open all the time");
        (value, Seen { took, downtime, stream, proof: Proof::same_life(&before, &after), before })
    }

    /// Who the machine is, without a full check.
    pub(crate) fn identity(&mut self) -> Identity {
        self.witness.state().expect("an answer from the witness")
    }

    /// Closes the stream.
    pub(crate) fn leave(self) -> StreamReport {
        self.stream.stop()
    }

    /// The stream's reader stops at the first number that is missing, repeated or late by a lost connection.
    fn stream_goes_on(&self) -> bool {
        let (before, deadline) = (self.stream.lines(), Instant::now() + PATIENCE);
        while self.stream.lines() <= before && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.stream.lines() > before
    }
}
