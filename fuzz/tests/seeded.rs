//! Every target on mutations of its seeds: the cheap part of fuzzing, on every test run, the same each time.

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use whimbrel_fuzz::TARGETS;

/// Mutations of each seed; fewer where each costs a thread and a socket.
fn rounds(name: &str) -> usize {
    match name {
        "nbd_session" => 200,
        // Each makes files.
        "container_layer" => 1000,
        _ => 4000,
    }
}

/// One to four small changes of the kinds that break parsers.
fn mutate(input: &mut Vec<u8>, random: &mut StdRng) {
    const EDGES: [u8; 6] = [0, 1, 0x7f, 0x80, 0xfe, 0xff];
    for _ in 0..random.random_range(1..=4) {
        let at = random.random_range(0..=input.len());
        match random.random_range(0..6) {
            0 => input.truncate(at),
            1 => input.insert(at, random.random()),
            2 if at < input.len() => input[at] ^= 1 << random.random_range(0..8),
            3 if at < input.len() => input[at] = EDGES[random.random_range(0..EDGES.len())],
            4 => {
                let end = (at + 8).min(input.len());
                input[at..end].fill(0xff);
            }
            _ => {
                let end = (at + random.random_range(0..64)).min(input.len());
                let piece = input[at..end].to_vec();
                input.splice(at..at, piece);
            }
        }
    }
}

#[test]
fn no_mutation_of_a_good_input_breaks_a_parser() {
    for (number, target) in TARGETS.iter().enumerate() {
        let mut random = StdRng::seed_from_u64(number as u64);
        for seed in (target.seeds)() {
            for round in 0..rounds(target.name) {
                let mut input = seed.clone();
                mutate(&mut input, &mut random);
                let run = std::panic::catch_unwind(|| (target.run)(&input));
                assert!(run.is_ok(), "{} panics in round {round} on {input:02x?}", target.name);
            }
        }
    }
}

#[test]
fn nothing_that_broke_a_parser_breaks_it_again() {
    let kept = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kept");
    for target in TARGETS {
        for input in std::fs::read_dir(kept.join(target.name)).into_iter().flatten().flatten() {
            (target.run)(&std::fs::read(input.path()).expect("a kept input"));
        }
    }
}

#[test]
fn every_seed_is_one_that_its_parser_accepts() {
    let seeds = |name: &str| {
        let target = TARGETS.iter().find(|target| target.name == name).expect("a target");
        (target.seeds)()
    };
    let filter = whimbrel_net::PortFilter::Only(whimbrel_net::Mac([0x52, 0x54, 0, 0x12, 0x34, 0x56]));
    assert!(seeds("guest_frame").iter().all(|seed| whimbrel_net::allowed(seed, filter).is_ok()));
    assert!(seeds("guest_packet").iter().all(|seed| whimbrel_net::offload::check(seed).is_ok()));
    assert!(seeds("hash_cache").iter().all(|seed| whimbrel_fuzz::accepts_hash_cache_seed(seed)));
    assert!(seeds("image_node").iter().all(|seed| whimbrel_image::Node::decode(seed).is_ok()));
    assert!(seeds("manifest").iter().all(|seed| whimbrel_image::Manifest::decode(seed).is_ok()));
    assert!(seeds("wire_hello").iter().all(|seed| whimbrel_wire::Hello::parse(seed).is_ok()));
    assert!(
        seeds("wws_trace").iter().all(|seed| whimbrel_capture::dirty_trace::DirtyTrace::read(seed).is_ok())
    );
    assert!(
        seeds("session").len() >= 12
            && seeds("session").iter().all(|seed| whimbrel_fuzz::accepts_session_seed(seed))
    );
    assert!(seeds("postcopy").iter().all(|seed| whimbrel_fuzz::accepts_postcopy_seed(seed)));
    assert!(seeds("cuts").iter().all(|seed| whimbrel_alignment::PageAlignment::decode(seed).is_ok()));
    let partitions = seeds("disk_layout").into_iter().map(|mut seed| {
        let disk = seed.split_off(8);
        let size = seed.try_into().map(u64::from_le_bytes).unwrap();
        whimbrel_alignment::inspect(&disk, size).regions.iter().filter(|region| region.start > 0).count()
    });
    assert_eq!(partitions.collect::<Vec<_>>(), [0, 2, 2, 1]);
    assert!(seeds("sync_answer").iter().all(|seed| whimbrel_transfer::decode_any(seed)));
    for seed in seeds("image_frame") {
        whimbrel_image::pack_frame::PackFrame::parse(&seed).unwrap().decode(&[]).unwrap();
    }
    for seed in seeds("qemu_state") {
        whimbrel_qemu::StreamHeader::parse(&seed).unwrap();
    }
    assert!(TARGETS.iter().all(|target| !(target.seeds)().is_empty()));
}
