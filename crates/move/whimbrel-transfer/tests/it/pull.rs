//! Tests of complete pulls between two stores over links that fail.
//!
//! The fears: a page that is not what it was, something sent twice, wrong data believed, a holder that could
//! help not asked, a pull that does not come to an end.

use crate::common::{Asked, Dark, Fake, Place, get, live, memory, random, try_get};
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use whimbrel_core::{PAGE_SIZE, PageRun};
use whimbrel_image::pack_frame::Kind;
use whimbrel_store::{Expected, GcRoots, ObjectWant, RemoteObjects as _};
use whimbrel_transfer::{DemandFetcher, Holders, Progress, TransferError};

const PAGES: usize = 300;

#[test]
fn a_capsule_arrives_whole_and_zero_pages_cost_nothing() {
    let (there, here) = (Place::new(), Place::new());
    let memory = memory(PAGES, 1);
    let capsule = there.capsule(&memory, &[7; 100_000], None);
    let (peer, _) = Fake::peer("alpha", &there.store);
    let report = get(&here.store, &Holders::new(vec![peer]), capsule, &[]).unwrap();
    assert_eq!(here.memory(&capsule), memory);
    let verified = here.store.verify(|_, _| true).unwrap();
    assert!(verified.damage.is_empty() && verified.broken.is_empty() && verified.partial.is_empty());
    let used = memory.chunks(PAGE_SIZE).filter(|page| !whimbrel_core::is_zero(page)).count() as u64;
    assert!(report.pages.plain <= used && report.pages.delta == 0, "{report:?}");
    let again =
        get(&here.store, &Holders::new(vec![Fake::peer("alpha", &there.store).0]), capsule, &[]).unwrap();
    assert_eq!((again.requests, again.received), (0, 0), "nothing is asked of what is here");
}

#[test]
fn a_second_version_travels_as_its_difference() {
    let (there, here) = (Place::new(), Place::new());
    let mut memory = memory(PAGES * 4, 2);
    let first = there.capsule(&memory, &[7; 50_000], None);
    let (peer, _) = Fake::peer("alpha", &there.store);
    let sources = Holders::new(vec![peer]);
    get(&here.store, &sources, first, &[]).unwrap();
    let before = memory.clone();
    live(&mut memory, 200, 3);
    let second = there.capsule(&memory, &[[7; 49_000].as_slice(), &[8; 1000]].concat(), Some(first));
    let report = get(&here.store, &sources, second, &[first]).unwrap();
    assert_eq!(here.memory(&second), memory);
    let other = |(old, new): &(&[u8], &[u8])| old.iter().zip(*new).filter(|(a, b)| a != b).count() > 100;
    let pairs = before.chunks(PAGE_SIZE).zip(memory.chunks(PAGE_SIZE));
    let altogether = pairs.filter(other).filter(|(_, new)| !whimbrel_core::is_zero(new)).count();
    let expected = (altogether * (PAGE_SIZE + 16) + 200 * 40) as u64;
    assert!(report.received < expected, "{expected} for {altogether} new pages: {report:?}");
    assert!(report.pages.delta > 100 && report.pages.plain == 0, "{report:?}");
    // The ref was at the first version until the second was whole, so that equal subtrees were skipped.
    assert_eq!(report.pages.had, 0, "{report:?}");
    assert_eq!(
        here.store.blob(&here.store.manifest(&second).unwrap().device[0]).unwrap()[49_000..],
        [8; 1000]
    );
}

#[test]
fn a_source_that_dies_leaves_the_old_version_whole_and_the_pull_ends_when_it_is_back() {
    let (there, here) = (Place::new(), Place::new());
    let before = memory(PAGES * 4, 12);
    let first = there.capsule(&before, &[7; 5000], None);
    get(&here.store, &Holders::new(vec![Fake::peer("alpha", &there.store).0]), first, &[]).unwrap();
    let mut memory = before.clone();
    live(&mut memory, 2000, 13);
    let second = there.capsule(&memory, &[8; 5000], Some(first));
    let named = |place: &Place| place.store.get_ref(&"it".parse().unwrap()).unwrap();
    let bases = [first];
    for cut in 0..4 {
        let (peer, faults) = Fake::peer("alpha", &there.store);
        faults.until_cut.store(cut, Ordering::Release);
        *faults.next_cut.lock().unwrap() = Box::new(|| 0);
        let asked = Asked { patience: Duration::ZERO, ..Asked::of(second, &bases) };
        let failed = asked.pull(&here.store, &Holders::new(vec![peer]), &mut |_| ());
        assert!(failed.is_err_and(|error| error.is_retryable()), "cut {cut}");
        here.store.gc(GcRoots::Referenced).unwrap();
        assert_eq!(named(&here), Some(first), "cut {cut}");
        let verified = here.store.verify(|_, _| true).unwrap();
        assert!(verified.damage.is_empty() && verified.broken.is_empty(), "{verified:?}");
        assert!(here.memory(&first) == before, "cut {cut}");
    }
    get(&here.store, &Holders::new(vec![Fake::peer("alpha", &there.store).0]), second, &[first]).unwrap();
    assert_eq!(named(&here), Some(second));
    assert!(here.memory(&second) == memory);
}

#[test]
fn collections_in_the_middle_of_a_pull_cost_little_and_do_not_fail_it() {
    let there = Place::new();
    let mut memory = memory(PAGES * 8, 14);
    let first = there.capsule(&memory, &[7; 50_000], None);
    live(&mut memory, 1500, 15);
    let second = there.capsule(&memory, &[9; 50_000], Some(first));
    let here = Place::new();
    let calm = Place::new();
    for (capsule, bases) in [(first, vec![]), (second, vec![first])] {
        let (peer, once) = Fake::peer("alpha", &there.store);
        get(&calm.store, &Holders::new(vec![peer]), capsule, &bases).unwrap();
        let (peer, faults) = Fake::peer("alpha", &there.store);
        let mut calls = 0;
        let mut collect = |_: &Progress| {
            calls += 1;
            if [4, 9, 16].contains(&calls) {
                here.store.fetched_objects_writer().flush().unwrap();
                here.store.gc(GcRoots::Referenced).unwrap();
            }
        };
        let report = Asked::of(capsule, &bases).pull(&here.store, &Holders::new(vec![peer]), &mut collect);
        report.unwrap();
        assert!(calls >= 4, "{calls}");
        let (came, calm) = (faults.arrived.load(Ordering::Acquire), once.arrived.load(Ordering::Acquire));
        assert!(came <= calm * 2, "{came} bytes instead of {calm}");
    }
    assert!(here.memory(&second) == memory);
}

#[test]
fn a_collection_at_any_step_of_the_first_ones_does_not_fail_a_pull() {
    let there = Place::new();
    let memory = memory(PAGES, 22);
    let capsule = there.capsule(&memory, &[7; 5000], None);
    for step in 1..12 {
        let here = Place::new();
        let mut calls = 0;
        let mut collect = |_: &Progress| {
            calls += 1;
            if calls == step {
                here.store.fetched_objects_writer().flush().unwrap();
                here.store.gc(GcRoots::Referenced).unwrap();
            }
        };
        let (peer, _) = Fake::peer("alpha", &there.store);
        let pulled = Asked::of(capsule, &[]).pull(&here.store, &Holders::new(vec![peer]), &mut collect);
        pulled.unwrap_or_else(|error| panic!("a collection at step {step}: {error:?}"));
        assert_eq!(here.memory(&capsule), memory);
    }
}

#[test]
fn a_ref_that_is_moved_during_a_pull_stays_where_it_was_put() {
    let (there, here) = (Place::new(), Place::new());
    let memory = memory(PAGES, 16);
    let capsule = there.capsule(&memory, &[7; 5000], None);
    let own = here.capsule(&memory, &[8; 5000], None);
    let name = "it".parse().unwrap();
    here.store.delete_ref(&name, Expected::Capsule(own)).unwrap();
    let mut move_it = |_: &Progress| here.store.set_ref(&name, &own, Expected::Anything).unwrap();
    let sources = Holders::new(vec![Fake::peer("alpha", &there.store).0]);
    Asked::of(capsule, &[]).pull(&here.store, &sources, &mut move_it).unwrap();
    assert_eq!(here.store.get_ref(&name).unwrap(), Some(own));
}

#[test]
fn a_base_that_only_the_asker_has_does_not_help_and_does_not_harm() {
    let (there, here) = (Place::new(), Place::new());
    let mut memory = memory(PAGES, 4);
    let own = here.capsule(&memory, &[1; 10], None);
    live(&mut memory, 50, 5);
    let capsule = there.capsule(&memory, &[2; 10], None);
    let (peer, _) = Fake::peer("alpha", &there.store);
    let report = get(&here.store, &Holders::new(vec![peer]), capsule, &[own]).unwrap();
    assert_eq!(here.memory(&capsule), memory);
    assert!(
        report.pages.plain <= 50 && report.pages.had > 100,
        "pages that stand elsewhere are found: {report:?}"
    );
}

#[test]
fn cuts_at_every_stage_cost_at_most_a_window_each() {
    let there = Place::new();
    let mut memory = memory(PAGES * 2, 6);
    let first = there.capsule(&memory, &[7; 50_000], None);
    live(&mut memory, 400, 7);
    let second = there.capsule(&memory, &[9; 50_000], Some(first));
    for (capsule, base) in [(first, None), (second, Some(first))] {
        let bases: Vec<_> = base.into_iter().collect();
        let prepared = |place: &Place| {
            bases.iter().for_each(|base| {
                get(&place.store, &Holders::new(vec![Fake::peer("alpha", &there.store).0]), *base, &[])
                    .unwrap();
            });
        };
        let calm = Place::new();
        prepared(&calm);
        let (peer, faults) = Fake::peer("alpha", &there.store);
        get(&calm.store, &Holders::new(vec![peer]), capsule, &bases).unwrap();
        let (once, answer) = (faults.arrived.load(Ordering::Acquire), faults.largest.load(Ordering::Acquire));
        // Fewer than two answers each time would be no progress: so many are under way.
        for cut in [4, 5, 9] {
            // The receiver is killed at the cut, and starts again with what its store holds.
            let mut here = Place::new();
            prepared(&here);
            let (mut arrived, mut runs) = (0, 0);
            loop {
                let (peer, faults) = Fake::peer("alpha", &there.store);
                faults.until_cut.store(cut, Ordering::Release);
                let ended = try_get(&here.store, &Holders::new(vec![peer]), capsule, &bases);
                arrived += faults.arrived.load(Ordering::Acquire);
                runs += 1;
                here.reopen();
                match ended {
                    Ok(_) => break,
                    Err(error) => assert!(error.is_retryable(), "{error:?}"),
                }
                assert!(runs < 2000, "no progress with cuts after {cut} requests");
            }
            assert_eq!(here.memory(&capsule), there.memory(&capsule));
            // What had arrived is never sent again; pages compress a little worse in smaller answers.
            assert!(
                arrived <= once + once / 4 + answer,
                "{arrived} bytes instead of {once} after {runs} runs"
            );
        }
    }
}

#[test]
fn wrong_data_is_rejected_blamed_and_asked_of_another() {
    let (there, other, here) = (Place::new(), Place::new(), Place::new());
    let memory = memory(PAGES, 8);
    let capsule = there.capsule(&memory, &[7; 5000], None);
    other.capsule(&memory, &[7; 5000], None);
    for from in 0..8 {
        let (liar, lies) = Fake::peer("liar", &there.store);
        let (honest, _) = Fake::peer("honest", &other.store);
        lies.spoil_from.store(from, Ordering::Release);
        let sources = Holders::new(vec![liar, honest]);
        get(&here.store, &sources, capsule, &[]).unwrap();
        assert_eq!(here.memory(&capsule), memory);
        let before = lies.requests.load(Ordering::Acquire);
        if sources.blamed().is_empty() {
            assert!(before <= from, "a lie was believed");
        } else {
            assert_eq!(sources.blamed()[0].0, "liar");
        }
    }
    let alone = Place::new();
    let (liar, lies) = Fake::peer("liar", &there.store);
    lies.spoil_from.store(3, Ordering::Release);
    match get(&alone.store, &Holders::new(vec![liar]), capsule, &[]) {
        Err(TransferError::WrongData { peer, .. }) => assert_eq!(peer, "liar"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn two_holders_that_fail_in_turns_are_enough() {
    for seed in 0..6 {
        let (there, other, here) = (Place::new(), Place::new(), Place::new());
        let mut memory = memory(PAGES, seed);
        let first = there.capsule(&memory, &[7; 5000], None);
        other.capsule(&memory, &[7; 5000], None);
        live(&mut memory, 300, seed + 100);
        let second = there.capsule(&memory, &[8; 5000], Some(first));
        // Another host has the second version without the first one.
        let partly = Place::new();
        partly.capsule(&memory, &[8; 5000], None);
        let second_there = partly.store.manifest(&second).is_ok();
        let (a, cuts_a) = Fake::peer("a", &there.store);
        let (b, cuts_b) = Fake::peer("b", &other.store);
        for (faults, seed) in [(&cuts_a, seed), (&cuts_b, seed + 50)] {
            let mut next = random(seed + 1);
            faults.until_cut.store(next() % 9, Ordering::Release);
            faults.refuse_dials.store(next() % 2, Ordering::Release);
            *faults.next_cut.lock().unwrap() = Box::new(move || 3 + next() % 9);
        }
        let sources = Holders::new(vec![a, b]).with_retry(Duration::from_millis(1));
        get(&here.store, &sources, first, &[]).unwrap_or_else(|error| panic!("seed {seed}: {error:?}"));
        get(&here.store, &sources, second, &[first]).unwrap_or_else(|error| panic!("seed {seed}: {error:?}"));
        assert_eq!(here.memory(&second), memory, "seed {seed}, {second_there}");
    }
}

#[test]
fn a_machine_runs_on_pages_that_are_elsewhere() {
    let (there, here) = (Place::new(), Place::new());
    let mut memory = memory(PAGES, 9);
    let first = there.capsule(&memory, &[7; 5000], None);
    let (peer, _) = Fake::peer("alpha", &there.store);
    get(&here.store, &Holders::new(vec![peer]), first, &[]).unwrap();
    live(&mut memory, 300, 10);
    let second = there.capsule(&memory, &[8; 5000], Some(first));
    let (peer, faults) = Fake::peer("alpha", &there.store);
    let sources = Arc::new(Holders::new(vec![peer]));
    let remote = Arc::new(DemandFetcher::new(Arc::new(here.store.clone()), sources));
    here.store.set_remote_objects(remote);
    let (new, old) = (there.store.manifest(&second).unwrap(), there.store.manifest(&first).unwrap());
    let image = here.store.image(new.images[0].root, PAGES as u64).with_remote_fetch(old.images[0].root);
    let mut seen = vec![1; memory.len()];
    let mut next = random(11);
    for _ in 0..50 {
        let page = next() % PAGES as u64;
        let run = PageRun::new(page, (PAGES as u64 - page).min(5));
        let out = &mut seen[..run.bytes()];
        image.read(run, out).unwrap();
        assert!(*out == memory[run.offset() as usize..][..run.bytes()], "pages {run:?}");
    }
    let before = faults.requests.load(Ordering::Acquire);
    image.read(PageRun::new(0, PAGES as u64), &mut seen).unwrap();
    assert!(seen == memory);
    let after = faults.requests.load(Ordering::Acquire);
    image.read(PageRun::new(0, PAGES as u64), &mut seen).unwrap();
    assert_eq!(after, faults.requests.load(Ordering::Acquire), "what came is kept ({before} before)");
    faults.until_cut.store(0, Ordering::Release);
    let gone = here.store.image(Some(whimbrel_core::Digest([5; 32])), 10).with_remote_fetch(None);
    assert!(gone.read(PageRun::new(0, 1), &mut seen[..PAGE_SIZE]).unwrap_err().is_retryable());
}

#[test]
fn replies_are_small_while_a_machine_lives_from_the_same_holders() {
    let there = Place::new();
    let mut next = random(21);
    let memory: Vec<u8> = (0..2000 * PAGE_SIZE / 8).flat_map(|_| next().to_le_bytes()).collect();
    let capsule = there.capsule(&memory, &[7; 5000], None);
    let largest = |machine: bool| {
        let here = Place::new();
        let (peer, faults) = Fake::peer("alpha", &there.store);
        let sources = Holders::new(vec![peer]);
        // The next page that it touches may be asked for at any moment.
        machine.then(|| drop(sources.demand()));
        get(&here.store, &sources, capsule, &[]).unwrap();
        assert!(here.memory(&capsule) == memory);
        faults.largest.load(Ordering::Acquire)
    };
    let (beside, alone) = (largest(true), largest(false));
    // A holder answers with a whole frame at least, here of pages that do not shrink.
    assert!(beside < 1 << 20, "the machine's page waits behind {beside} bytes");
    assert!(alone > 2 * beside, "{alone} and {beside}: the case shows nothing");
}

#[test]
fn a_host_that_does_not_answer_is_dialled_again_and_never_waited_for_while_another_can_serve() {
    let (there, here) = (Place::new(), Place::new());
    let capsule = there.capsule(&memory(PAGES, 17), &[7; 5000], None);
    let (dark, silence) = Dark::peer();
    let (alpha, _) = Fake::peer("alpha", &there.store);
    let sources = Arc::new(Holders::new(vec![dark, alpha]).with_retry(Duration::from_millis(1)));
    assert_eq!(sources.name(0), "dark");
    let remote = DemandFetcher::new(Arc::new(here.store.clone()), sources.clone());
    let want = ObjectWant { digest: capsule.0, similar: None };
    for failed in 0..3 {
        let deadline = Instant::now() + Duration::from_secs(20);
        while silence.dials() <= failed {
            assert!(Instant::now() < deadline, "it is not dialled again");
            assert_eq!(remote.objects(Kind::Manifest, &[want]).unwrap().len(), 1);
        }
        remote.objects(Kind::Manifest, &[want]).unwrap();
        assert_eq!(silence.ended(), failed, "a fetch waited for a dial");
        silence.end_one_dial();
    }
    get(&here.store, &sources, capsule, &[]).unwrap();
    assert_eq!(silence.ended(), 3, "a pull waited for a dial");
    silence.end();
}

#[test]
fn a_holder_that_goes_dark_under_a_request_is_waited_for_only_while_no_other_can_serve() {
    let (there, here) = (Place::new(), Place::new());
    let capsule = there.capsule(&memory(PAGES, 19), &[7; 5000], None);
    let (alpha, faults) = Fake::peer("alpha", &there.store);
    let (beta, others) = Fake::peer("beta", &there.store);
    let sources = Arc::new(Holders::new(vec![alpha, beta]).with_retry(Duration::from_secs(10)));
    let remote = DemandFetcher::new(Arc::new(here.store.clone()), sources);
    let want = ObjectWant { digest: capsule.0, similar: None };
    remote.objects(Kind::Manifest, &[want]).unwrap();
    let asked = faults.requests.load(Ordering::Acquire);
    faults.quiet_from.store(asked, Ordering::Release);
    for _ in 0..3 {
        assert_eq!(remote.objects(Kind::Manifest, &[want]).unwrap().len(), 1);
    }
    assert_eq!(faults.waited.load(Ordering::Acquire), 0, "a machine waited for a holder that says nothing");
    let again = faults.requests.load(Ordering::Acquire);
    assert_eq!(again, asked + 1, "it is asked again only when something arrives from it");

    // The other one is lost as well, and its host does not answer: now the quiet one is waited for.
    others.refuse_dials.store(u64::MAX, Ordering::Release);
    others.until_cut.store(0, Ordering::Release);
    assert!(remote.objects(Kind::Manifest, &[want]).is_err());
    assert!(remote.objects(Kind::Manifest, &[want]).is_err());
    assert_eq!(faults.waited.load(Ordering::Acquire), 1);
}

#[test]
fn a_holder_that_cannot_read_now_is_asked_again_and_nobody_is_told_that_the_page_is_gone() {
    let (mut there, here) = (Place::new(), Place::new());
    let memory = memory(PAGES, 18);
    let capsule = there.capsule(&memory, &[7; 5000], None);
    let image = there.store.manifest(&capsule).unwrap().images.remove(0);
    there.reopen();
    let (peer, _) = Fake::peer("alpha", &there.store);
    let sources = Arc::new(Holders::new(vec![peer]).with_retry(Duration::from_millis(1)));
    let remote = DemandFetcher::new(Arc::new(here.store.clone()), sources);
    here.store.set_remote_objects(Arc::new(remote));
    let source = here.store.image(image.root, image.pages).with_remote_fetch(None);
    let (packs, away) = (there.dir.path().join("packs"), there.dir.path().join("away"));
    let mut page = [0; PAGE_SIZE];
    std::fs::rename(&packs, &away).unwrap();
    for _ in 0..3 {
        let error = source.read(PageRun::new(1, 1), &mut page).unwrap_err();
        assert!(error.is_retryable(), "{error:?}");
    }
    std::fs::rename(&away, &packs).unwrap();
    source.read(PageRun::new(1, 1), &mut page).unwrap();
    assert!(page == memory[PAGE_SIZE..][..PAGE_SIZE]);
}

#[test]
fn a_page_is_gone_for_good_only_when_somebody_was_asked_and_all_lack_it() {
    let (there, here) = (Place::new(), Place::new());
    let image = here.store.image(Some(whimbrel_core::Digest([5; 32])), 10).with_remote_fetch(None);
    let read = |holders| {
        let remote = DemandFetcher::new(Arc::new(here.store.clone()), Arc::new(Holders::new(holders)));
        here.store.set_remote_objects(Arc::new(remote));
        image.read(PageRun::new(0, 1), &mut [0; PAGE_SIZE]).unwrap_err().is_retryable()
    };
    assert!(read(vec![]), "nobody was asked");
    assert!(!read(vec![Fake::peer("alpha", &there.store).0]));
    let (away, faults) = Fake::peer("beta", &there.store);
    faults.refuse_dials.store(u64::MAX, Ordering::Release);
    assert!(read(vec![Fake::peer("alpha", &there.store).0, away]), "one of them may have it");
}
