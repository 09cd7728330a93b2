//! Random reads: a read waits for its own pages, and the rest of their blocks comes while the link has room.

use crate::common::{Fate, World, pattern, until};
use std::{
    fs::{self, File},
    ops::Range,
    os::unix::fs::FileExt,
    sync::{Arc, Mutex},
    thread,
};
use tokio::sync::Semaphore;
use whimbrel_session::proto::ReadCall;
use whimbrel_wire::Call;

const PAGE: usize = 4096;
const BLOCK: u64 = 65536;

/// A disk of which every range that is requested is noted; with a semaphore, nothing is answered.
fn disk(world: &World, held: Option<Arc<Semaphore>>) -> Arc<Mutex<Vec<(u64, u64)>>> {
    let asked: Arc<Mutex<Vec<(u64, u64)>>> = Arc::default();
    let noted = asked.clone();
    world.wire.decide(move |request| match &held {
        _ if request.kind != ReadCall::KIND => Fate::Answered,
        held => {
            let range = request.decode::<ReadCall>().unwrap().body.range;
            noted.lock().unwrap().push((range.offset, range.len.into()));
            held.as_ref().map_or(Fate::Answered, |held| Fate::Late(held.clone()))
        }
    });
    asked
}

fn read(file: &File, offset: u64) -> Vec<u8> {
    let mut page = vec![0; PAGE];
    file.read_exact_at(&mut page, offset).unwrap();
    page
}

fn world(blocks: u64) -> (World, Vec<u8>) {
    let content = pattern((blocks * BLOCK) as usize, 7);
    let stored = content.clone();
    let world = World::new(
        |options| options.settings.patience = 60,
        |server| fs::write(server.join("disk.img"), stored).unwrap(),
    );
    (world, content)
}

#[test]
fn a_read_asks_for_its_own_pages_and_then_for_the_rest_of_their_block() {
    let (world, content) = world(8);
    let asked = disk(&world, None);
    let file = File::open(world.mount().join("disk.img")).unwrap();
    let at = 3 * BLOCK + 5 * PAGE as u64;
    assert_eq!(read(&file, at), content[at as usize..][..PAGE]);
    until("the rest is here", || world.session().status().used >= BLOCK && asked.lock().unwrap().len() == 3);
    let (page, mut asked) = (PAGE as u64, asked.lock().unwrap().clone());
    asked.sort_unstable();
    assert_eq!(asked, [(3 * BLOCK, 5 * page), (at, page), (at + page, 10 * page)]);
}

#[test]
fn many_reads_at_once_do_not_queue_behind_pages_that_nobody_reads() {
    let (world, content) = world(300);
    let asked = disk(&world, Some(Arc::new(Semaphore::new(0))));
    let file = File::open(world.mount().join("disk.img")).unwrap();
    let own: Vec<u64> = (1..17).map(|number| number * number * BLOCK).collect();
    thread::scope(|scope| {
        let readers: Vec<_> = own.iter().map(|at| scope.spawn(|| read(&file, *at))).collect();
        let page = PAGE as u64;
        until("all have asked", || own.iter().all(|at| asked.lock().unwrap().contains(&(*at, page))));
        // The link has room for 128 KiB, or more if this machine is too busy for a short round trip.
        let rest: u64 = asked.lock().unwrap().iter().map(|(_, len)| *len).filter(|len| *len > page).sum();
        assert!(
            (BLOCK - page..own.len() as u64 * BLOCK / 2).contains(&rest),
            "{rest} bytes beside the pages"
        );
        world.wire.decide(|_| Fate::Answered);
        for (reader, at) in readers.into_iter().zip(&own) {
            assert_eq!(reader.join().unwrap(), content[*at as usize..][..PAGE], "{at}");
        }
    });
}

#[test]
fn a_read_of_a_sequence_asks_once_for_the_rest_of_its_block() {
    let (world, _) = world(300);
    let asked = disk(&world, Some(Arc::new(Semaphore::new(0))));
    let (path, page) = (world.mount().join("disk.img"), PAGE as u64);
    let read = |offset: u64, pages: u64| {
        let mut out = vec![0; pages as usize * PAGE];
        File::open(&path).unwrap().read_exact_at(&mut out, offset).unwrap();
    };
    let noted = |within: Range<u64>| {
        let mut asked = asked.lock().unwrap().clone();
        asked.sort_unstable();
        asked.into_iter().filter(|(at, _)| within.contains(at)).collect::<Vec<_>>()
    };
    // The link has room for 128 KiB, of which these take most.
    let others = [100, 200].map(|block| block * BLOCK);
    thread::scope(|scope| {
        others.iter().for_each(|at| _ = scope.spawn(|| read(*at, 13)));
        until("the others have asked", || others.iter().all(|at| !noted(*at..at + 1).is_empty()));
        scope.spawn(|| read(0, 1));
        until("what follows was asked for", || !noted(BLOCK..others[0]).is_empty());
        until("the rest was asked for", || !noted(page..BLOCK).is_empty());
        assert_eq!(noted(0..BLOCK), [(0, page), (page, 15 * page)]);
        world.wire.decide(|_| Fate::Answered);
    });
}

#[test]
fn readers_of_one_block_get_their_pages_whoever_asked_first() {
    let (world, content) = world(8);
    let file = File::open(world.mount().join("disk.img")).unwrap();
    thread::scope(|scope| {
        let readers: Vec<_> = (0..64u64)
            .map(|number| {
                let at = number * 7919 % 128 * PAGE as u64;
                let file = &file;
                (at, scope.spawn(move || read(file, at)))
            })
            .collect();
        for (at, reader) in readers {
            assert_eq!(reader.join().unwrap(), content[at as usize..][..PAGE], "{at}");
        }
    });
}
