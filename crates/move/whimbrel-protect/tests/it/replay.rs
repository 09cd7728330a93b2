//! Protection by inputs: whatever comes in whatever order, nothing has left that is not preceded by what the
//! standby has, and who takes over is given all that its epoch lacks.

use proptest::prelude::*;
use rand::{Rng, SeedableRng, rngs::StdRng};
use whimbrel_protect::{
    input_replay::{InputChannel, InputLog, ship_and_release},
    protocol::{InputFrames, ProtectionId},
};

const ID: ProtectionId = ProtectionId([3; 16]);

/// A guest, its port and its standby. Something may happen to the guest in the middle of every step of a
/// turn.
struct World {
    random: StdRng,
    recorded: u64,
    told: u64,
    /// How many inputs the guest had when it sent each of these.
    held: Vec<u64>,
    released: u64,
    log: InputLog,
    /// The last whole epoch, and how many inputs it has.
    current: Option<(u64, u64)>,
    under_way: Option<(u64, u64)>,
    breaks_at: u64,
}

fn told(first: u64, frames: &[u64], image: Option<(u64, u64)>) -> (InputFrames, Vec<u8>) {
    let payload: Vec<u8> = frames.iter().flat_map(|number| number.to_be_bytes()).collect();
    let frames = frames.iter().map(|number| (0, *number, 8)).collect();
    (InputFrames { id: ID, first, frames, left: vec![], image }, payload)
}

impl World {
    fn live(&mut self) {
        for _ in 0..self.random.random_range(0..4) {
            match self.random.random_range(0..5) {
                0 | 1 => self.recorded += 1,
                2 | 3 => self.held.push(self.recorded),
                _ => match self.under_way.take() {
                    // Said before it is sealed, however late that is.
                    Some(image) => self.current = Some(image),
                    None => {
                        let epoch = self.current.map_or(0, |(epoch, _)| epoch + 1);
                        let has = self.recorded;
                        // What is on its way to the guest is not in it; what was in the one before is.
                        let from = has.saturating_sub(self.random.random_range(0..3));
                        let from = from.max(self.current.map_or(0, |(_, from)| from));
                        let (inputs, payload) = told(self.told, &[], Some((epoch, from)));
                        self.log.add(&inputs, &payload, self.current.map(|(epoch, _)| epoch)).unwrap();
                        self.under_way = Some((epoch, from));
                    }
                },
            }
        }
    }

    /// What the standby could give a guest that goes on from its epoch.
    fn known(&self) -> u64 {
        self.told
    }
}

impl InputChannel for World {
    type OutputMark = usize;
    type Error = ();

    fn mark_output(&mut self) -> usize {
        self.live();
        let cut = self.held.len();
        self.live();
        cut
    }

    fn recorded(&mut self) -> u64 {
        self.live();
        self.recorded
    }

    fn ship_inputs(&mut self) -> Result<u64, ()> {
        self.live();
        if self.told >= self.breaks_at {
            return Err(());
        }
        // Sometimes an answer was lost, and it is told again.
        let first = self.told.saturating_sub(self.random.random_range(0..2)).max(self.first());
        let upto = self.recorded.min(self.told + self.random.random_range(1..4)).max(first);
        let numbers: Vec<u64> = (first..upto).collect();
        let (inputs, payload) = told(first, &numbers, None);
        self.log.add(&inputs, &payload, self.current.map(|(epoch, _)| epoch)).unwrap();
        self.told = self.told.max(upto);
        self.live();
        Ok(self.told)
    }

    fn release(&mut self, cut: usize) {
        for inputs in self.held.drain(..cut) {
            assert!(inputs <= self.told, "{inputs} inputs led to what leaves, {} are known", self.told);
            self.released = self.released.max(inputs);
        }
    }
}

impl World {
    fn first(&self) -> u64 {
        self.current.map_or(0, |(_, from)| from).min(self.told)
    }
}

proptest! {
    #[test]
    fn nothing_leaves_before_what_led_to_it_is_known_and_nothing_that_led_to_it_is_missing_after_a_takeover(
        seed: u64, turns in 1..60usize, breaks_at in 1..200u64,
    ) {
        let mut world = World {
            random: StdRng::seed_from_u64(seed), recorded: 0, told: 0, held: vec![], released: 0, log: InputLog::default(),
            current: None, under_way: None, breaks_at,
        };
        // The first copy, before which nothing is told.
        let (inputs, payload) = told(0, &[], Some((0, 0)));
        world.log.add(&inputs, &payload, None).unwrap();
        world.under_way = Some((0, 0));
        for _ in 0..turns {
            if ship_and_release(&mut world).is_err() { break }
        }
        let (known, released, current) = (world.known(), world.released, world.current);
        let (frames, _) = world.log.take(current.map(|(epoch, _)| epoch));
        let numbers: Vec<u64> = frames.iter().map(|frame| frame.at_us).collect();
        let from = current.map_or(0, |(_, from)| from);
        // All from the first that its epoch lacks up to the last that anybody was told of, and nothing twice.
        let first = numbers.first().copied().unwrap_or(known);
        prop_assert!(first <= from.min(known), "{first} is the first, {from} is needed");
        prop_assert_eq!(numbers, (first..known).collect::<Vec<_>>());
        prop_assert!(released <= known);
    }

    #[test]
    fn garbage_is_refused(first: u64, count in 0..6000usize, len in 0..90_000u32, bytes in 0..5000usize) {
        let inputs = InputFrames { id: ID, first, frames: vec![(1, 2, len); count], left: vec![], image: None };
        let mut log = InputLog::default();
        let sound = count <= 4096 && len <= 69_632 && count * len as usize == bytes;
        prop_assert_eq!(log.add(&inputs, &vec![0; bytes], None).is_ok(), sound);
    }
}

#[test]
fn a_gap_is_refused_and_so_is_more_than_is_kept() {
    let mut log = InputLog::default();
    let (inputs, payload) = told(0, &[0, 1, 2], None);
    log.add(&inputs, &payload, None).unwrap();
    let (inputs, payload) = told(4, &[4], None);
    assert!(log.add(&inputs, &payload, None).is_err());
    let mut first = 3;
    let big =
        |first| InputFrames { id: ID, first, frames: vec![(0, 0, 65_536); 32], left: vec![], image: None };
    while log.add(&big(first), &vec![0; 2 << 20], None).is_ok() {
        first += 32;
        assert!(first < 10_000, "there is no bound");
    }
    assert!(first > 1_000);
}
