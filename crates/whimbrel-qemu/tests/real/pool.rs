//! QEMUs started ahead of time.

use crate::guest::{Guest, SOON, Slot as GuestSlot};
use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};
use whimbrel_qemu::{Pool, Shape, Sharing, Slot, probe};

fn pool(prepared: &Arc<AtomicUsize>) -> Pool {
    let prepared = Arc::clone(prepared);
    let prepare = move |_: &Shape| {
        prepared.fetch_add(1, Ordering::Relaxed);
        let slot = GuestSlot::new();
        Ok(Slot { spec: slot.spec(Sharing::Shared), keep: Box::new(slot) })
    };
    Pool::new(probe().unwrap().path.clone(), Box::new(prepare)).unwrap()
}

fn await_ready(pool: &Pool, shape: &Shape, count: usize) {
    let deadline = Instant::now() + SOON;
    while pool.ready(shape) != count {
        assert!(Instant::now() < deadline, "{} ready", pool.ready(shape));
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn a_claimed_qemu_loads_and_another_takes_its_place() {
    use whimbrel_machine::Machine;
    let mut source = Guest::boot();
    let nonce = source.expect("READY ");
    source.qemu().pause().unwrap();
    let state = source.qemu().device_state().unwrap();
    let prepared = Arc::default();
    let pool = pool(&prepared);
    let shape = Shape::of(&source.slot.spec(Sharing::Shared).config);
    assert!(pool.claim(&shape).is_none());
    pool.keep_warm(&shape, 2);
    await_ready(&pool, &shape, 2);
    assert!(pool.claim(&shape.clone().with_variant("other")).is_none());
    let warm = pool.claim(&shape).unwrap();
    // Its RAM file is there already and mapped, so fill it in place.
    let mut ram = std::fs::OpenOptions::new().write(true).open(&warm.spec.ram.path).unwrap();
    std::io::copy(&mut std::fs::File::open(&source.slot.ram).unwrap(), &mut ram).unwrap();
    let slot = *warm.keep.downcast::<GuestSlot>().unwrap();
    let mut target = Guest::resume(warm.qemu, slot);
    target.qemu().load(&state).unwrap();
    target.qemu().unpause().unwrap();
    assert_eq!(target.count(), (1, nonce));
    await_ready(&pool, &shape, 2);
    assert_eq!(prepared.load(Ordering::Relaxed), 3);
}

#[test]
fn a_dead_qemu_is_replaced_and_none_outlives_the_pool() {
    let (identities, slots) = std::sync::mpsc::channel();
    let prepare = move |_: &Shape| {
        let slot = GuestSlot::new();
        identities.send(slot.dir.path().to_owned())?;
        Ok(Slot { spec: slot.spec(Sharing::Shared), keep: Box::new(slot) })
    };
    let pool = Pool::new(probe().unwrap().path.clone(), Box::new(prepare)).unwrap();
    let shape = Shape::of(&GuestSlot::new().spec(Sharing::Shared).config);
    pool.keep_warm(&shape, 1);
    await_ready(&pool, &shape, 1);
    let first = slots.recv_timeout(SOON).unwrap();
    pids_with(&first).into_iter().for_each(kill);
    // The second slot is prepared only because the first QEMU died.
    let second = slots.recv_timeout(SOON).unwrap();
    await_ready(&pool, &shape, 1);
    assert!(!first.exists(), "what the dead one kept is dropped");
    assert_eq!(pids_with(&second).len(), 1);
    drop(pool);
    assert!(pids_with(&second).is_empty());
    assert!(!second.exists());
}

/// The processes whose command line names `dir`, a random name of ours.
fn pids_with(dir: &Path) -> Vec<u32> {
    let dir = dir.to_str().unwrap().as_bytes();
    let pids =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let names_dir = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.windows(dir.len()).any(|window| window == dir)
    };
    pids.filter(names_dir).collect()
}

fn kill(pid: u32) {
    let status = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    assert!(status.success());
}
