//! Write-back: what the server has when, and what becomes of files that change while they are sent.

mod common;

use common::{Fate, World, pattern, until};
use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};
use whimbrel_session::{
    client::{Policy, SessionOptions},
    proto::WriteCall,
};
use whimbrel_wire::Call;

fn back(options: &mut SessionOptions) {
    options.settings.policy = Policy::Back;
    options.settings.delay = None;
    options.settings.fresh = None;
}

#[test]
fn what_a_file_grows_by_while_it_is_written_back_is_not_cut_off() {
    const BLOCK: usize = 64 << 10;
    // Ends within a block, and within a page of it; then it grows to the end of the block, and by two more.
    for begun in [2 * BLOCK + BLOCK / 2, 2 * BLOCK + 1000, 1000] {
        let bytes = pattern(5 * BLOCK, begun as u64);
        let mut world = World::new(back, |server| fs::write(server.join("file"), "").unwrap());
        let [sending, grown] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let held = [sending.clone(), grown.clone()];
        world.end();
        world.wire.decide(move |request| {
            if request.kind == WriteCall::KIND {
                held[0].store(true, Ordering::SeqCst);
                tokio::task::block_in_place(|| until("it has grown", || held[1].load(Ordering::SeqCst)));
            }
            Fate::Answered
        });
        world.begin();
        let file = File::options().read(true).write(true).open(world.mount().join("file")).unwrap();
        file.write_all_at(&bytes[..begun], 0).unwrap();
        let session = world.session().clone();
        let flushing = std::thread::spawn(move || session.flush());
        until("it is being sent", || sending.load(Ordering::SeqCst));
        file.write_all_at(&bytes[begun..], begun as u64).unwrap();
        grown.store(true, Ordering::SeqCst);
        flushing.join().unwrap().unwrap();
        world.session().flush().unwrap();
        assert_eq!(world.session().status().dirty, 0);
        let served = fs::read(world.server().join("file")).unwrap();
        assert!(
            served == bytes,
            "{begun}: {:?}",
            served.iter().zip(&bytes).position(|(one, other)| one != other)
        );
        assert!(fs::read(world.mount().join("file")).unwrap() == bytes);
    }
}
