//! Saving and loading device state.

use crate::guest::{Guest, MEMORY, SOON, Slot};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use std::{
    fs::{self, File},
    os::{fd::AsRawFd, unix::fs::FileExt},
    time::Duration,
};
use whimbrel_core::ByteSize;
use whimbrel_machine::Machine;
use whimbrel_qemu::{MachineEvent, Qemu, RamBacking, Sharing, StateError, StreamHeader, VmIdentity};

/// Reboots from inside and expects a new life.
fn reboot(guest: &mut Guest, nonce: &str) {
    guest.say("run reboot -f");
    assert_ne!(guest.expect("READY "), nonce, "it did not reboot");
    assert_eq!(guest.count().0, 1);
}

#[test]
fn a_moved_machine_goes_on_where_it_was_and_can_still_reboot() {
    let mut source = Guest::boot();
    let nonce = source.expect("READY ");
    source.qemu().prepare_device_state().unwrap();
    assert_eq!(source.count(), (1, nonce.clone()));
    source.qemu().pause().unwrap();
    let state = source.qemu().device_state().unwrap();
    let mut target = source.twin(Sharing::Shared);
    // The stream header is sent ahead of the state.
    target.qemu().expect_state(&state).unwrap();
    assert_eq!(target.qemu().status().unwrap().name, "inmigrate");
    target.qemu().load(&state).unwrap();
    assert_eq!(target.qemu().status().unwrap().name, "paused");
    target.qemu().unpause().unwrap();
    assert_eq!(target.count(), (2, nonce.clone()), "the count is in memory only");
    // A machine that was loaded must be able to be saved again.
    target.qemu().pause().unwrap();
    let state = target.qemu().device_state().unwrap();
    let mut second = target.twin(Sharing::Shared);
    // Unchanged identity: the guest is not notified, and its state can be saved although the small blocks are
    // located only now.
    second.qemu().load_to_run(&state, VmIdentity::Unchanged).unwrap();
    second.qemu().refresh_header().unwrap();
    second.qemu().unpause().unwrap();
    assert_eq!(second.count(), (3, nonce.clone()));
    reboot(&mut second, &nonce);
    // The source was only paused: it continues independently.
    source.qemu().unpause().unwrap();
    assert_eq!(source.count(), (2, nonce));
}

#[test]
fn a_machine_with_private_memory_can_be_saved_again_and_its_copy_reboots() {
    let mut source = Guest::boot();
    let nonce = source.expect("READY ");
    source.qemu().pause().unwrap();
    let state = source.qemu().device_state().unwrap();
    let mut clone = source.twin(Sharing::Private);
    assert!(matches!(clone.qemu().save_device_state(), Err(StateError::NoHeader)));
    clone.qemu().load(&state).unwrap();
    // Memory still has the content of the file, because the machine has not run. The header comes with the
    // load.
    let again = clone.qemu().device_state().unwrap();
    assert_eq!(StreamHeader::parse(&again).unwrap(), StreamHeader::parse(&state).unwrap());
    let mut copy = source.twin(Sharing::Shared);
    copy.qemu().load(&again).unwrap();
    copy.qemu().unpause().unwrap();
    assert_eq!(copy.count(), (1, nonce.clone()));
    reboot(&mut copy, &nonce);
    clone.qemu().unpause().unwrap();
    assert_eq!(clone.count(), (1, nonce));
    clone.qemu().pause().unwrap();
    clone.qemu().device_state().unwrap();
}

#[test]
fn a_hundred_saves_in_a_row_leave_a_machine_that_works() {
    let mut guest = Guest::boot();
    let (nonce, mut length) = (guest.expect("READY "), None::<usize>);
    for round in 1..=100 {
        if round % 2 == 0 {
            guest.qemu().prepare_device_state().unwrap();
        }
        // Requested with the stop, the state is as long as one requested afterwards: both are complete.
        let state = if round % 3 == 0 {
            guest.qemu().pause_for_state().unwrap();
            guest.qemu().unpause_with_state().device_state.unwrap()
        } else {
            guest.qemu().pause().unwrap();
            let state = guest.qemu().device_state().unwrap();
            guest.qemu().unpause().unwrap();
            state
        };
        assert!(StreamHeader::parse(&state).is_ok());
        assert!(length.is_none_or(|length| state.len().abs_diff(length) < 4096), "{} bytes", state.len());
        length = Some(state.len());
        assert_eq!(guest.count(), (round, nonce.clone()));
    }
    reboot(&mut guest, &nonce);
}

#[test]
fn a_machine_that_a_pipe_holds_stands_still_until_it_is_let_go_or_nobody_reads_the_pipe() {
    for slot in [Slot::new(), Slot::confined()] {
        let mut guest = Guest::launch(slot, |_| ());
        guest.qemu().unpause().unwrap();
        assert_held(guest);
    }
}

fn assert_held(mut guest: Guest) {
    let nonce = guest.expect("READY ");
    // What it waits for in the kernel.
    let waits = |guest: &mut Guest| {
        let place = format!("/proc/{}/wchan", guest.qemu().pid());
        // It has begun to write, and may not have come to the end of the page yet.
        (0..50).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            fs::read_to_string(&place).unwrap().contains("pipe_write")
        })
    };
    for round in 1..=10 {
        guest.qemu().pause_for_state().unwrap();
        assert!(!guest.qemu().qmp().is_running());
        // The first one tells how long its state is.
        assert_eq!(waits(&mut guest), round > 1, "round {round}");
        let state = guest.qemu().unpause_with_state().device_state.unwrap();
        assert!(StreamHeader::parse(&state).is_ok() && guest.qemu().qmp().is_running());
        assert_eq!(guest.count(), (round, nonce.clone()));
    }
    // A process that ends while it holds one closes the pipe.
    guest.qemu().pause_for_state().unwrap();
    let (dir, identity) = (guest.qemu().dir().to_owned(), guest.qemu().process().identity());
    guest.qemu = None;
    guest.qemu = Some(Qemu::adopt(&dir, identity, Sharing::Shared).unwrap());
    assert_eq!(guest.count(), (11, nonce.clone()));
    reboot(&mut guest, &nonce);
}

#[test]
fn a_running_machine_has_no_state_of_one_instant() {
    let mut guest = Guest::boot();
    assert!(matches!(guest.qemu().save_device_state(), Err(StateError::NotPaused)));
    guest.expect("READY ");
}

#[test]
fn the_head_follows_what_the_guest_does_to_its_small_blocks() {
    // Before its first instruction a machine has its tables as QEMU made them; the firmware patches them.
    let mut guest = Guest::launch(Slot::new(), |_| ());
    guest.qemu().prepare_device_state().unwrap();
    let before = guest.qemu().head().unwrap().clone();
    guest.qemu().unpause().unwrap();
    let nonce = guest.expect("READY ");
    guest.qemu().pause().unwrap();
    let state = guest.qemu().device_state().unwrap();
    let patched = StreamHeader::parse(&state).unwrap();
    // A header taken again by QEMU itself is equal.
    guest.qemu().prepare_device_state().unwrap();
    assert_eq!(guest.qemu().head().unwrap().blocks(), patched.blocks());
    assert!(!guest.qemu().save_device_state().unwrap().devices.is_empty());
    assert!(!guest.qemu().save_device_state().unwrap().head_changed);
    assert_ne!(before.blocks(), patched.blocks(), "nothing changed, so nothing was tested");
    let mut target = guest.twin(Sharing::Shared);
    // The header that it has read ahead is out of date.
    target.qemu().expect_state(before.as_bytes()).unwrap();
    target.qemu().load(&state).unwrap();
    assert_eq!(target.qemu().head(), Some(&patched));
    target.qemu().prepare_device_state().unwrap();
    assert_eq!(target.qemu().head().unwrap().blocks(), patched.blocks(), "as QEMU itself says");
    target.qemu().unpause().unwrap();
    assert_eq!(target.count(), (1, nonce.clone()));
    reboot(&mut target, &nonce);
}

#[test]
fn a_state_of_another_machine_is_refused_in_qemus_words() {
    let mut source = Guest::boot();
    source.expect("READY ");
    source.qemu().pause().unwrap();
    let mut state = source.qemu().device_state().unwrap();
    let at = state.windows(10).position(|window| window == b"cpu_common").unwrap();
    state[at] = b'x';
    let mut target = source.twin(Sharing::Shared);
    let refused = target.qemu().load(&state).unwrap_err();
    assert!(
        matches!(&refused, StateError::Refused { words, .. } if words.contains("xpu_common")),
        "{refused:?}"
    );
    let mut target = source.twin(Sharing::Shared);
    target.qemu().expect_state(&state).unwrap();
    let refused = target.qemu().load(&state).unwrap_err();
    assert!(
        matches!(&refused, StateError::Refused { words, .. } if words.contains("xpu_common")),
        "{refused:?}"
    );
    let mut target = source.twin(Sharing::Shared);
    assert!(matches!(target.qemu().load(b"nonsense"), Err(StateError::Malformed(_))));
}

#[test]
fn a_clone_that_gives_memory_back_leaves_the_image_and_its_siblings_alone() {
    let mut source = Guest::boot();
    let nonce = source.expect("READY ");
    source.qemu().pause().unwrap();
    let state = source.qemu().device_state().unwrap();
    // Sealed, because QEMU 7.2 would punch the balloon's holes into the file of a private mapping.
    let image = File::from(memfd_create("image", MemfdFlags::ALLOW_SEALING).unwrap());
    let before = fs::read(&source.slot.ram).unwrap();
    image.write_all_at(&before, 0).unwrap();
    fcntl_add_seals(&image, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW).unwrap();
    // The clones inherit the descriptor; that of another process is closed to them.
    let path = format!("/proc/self/fd/{}", image.as_raw_fd());
    let mut clones = [(); 2].map(|()| {
        Guest::launch(Slot::new(), |spec| {
            spec.incoming = true;
            spec.ram = RamBacking { path: path.clone().into(), sharing: Sharing::Private };
        })
    });
    for clone in &mut clones {
        clone.qemu().load(&state).unwrap();
        clone.qemu().unpause().unwrap();
        assert_eq!(clone.count(), (1, nonce.clone()));
    }
    let events = clones[0].qemu().events();
    let smaller = ByteSize(MEMORY.0 - (32 << 20));
    clones[0].qemu().balloon(smaller).unwrap();
    while events.recv_timeout(SOON).unwrap() != (MachineEvent::BalloonChanged { actual: smaller.0 }) {}
    let mut after = vec![0; before.len()];
    image.read_exact_at(&mut after, 0).unwrap();
    assert!(before == after, "the image changed");
    assert_eq!(clones.each_mut().map(|clone| clone.count().0), [2, 2]);
}

/// Set `WHIMBREL_QEMU_NEWER` to a program newer than the one in `PATH`.
#[test]
#[ignore = "needs a second qemu"]
fn a_machine_of_an_older_qemu_goes_on_in_a_newer_one() {
    let newer = std::env::var_os("WHIMBREL_QEMU_NEWER").expect("the newer qemu");
    let mut source = Guest::launch(Slot::new(), |spec| spec.config.cpu = "qemu64".into());
    source.qemu().unpause().unwrap();
    let nonce = source.expect("READY ");
    source.qemu().pause().unwrap();
    let state = source.qemu().device_state().unwrap();
    let slot = Slot::new();
    fs::copy(&source.slot.ram, &slot.ram).unwrap();
    let mut target = Guest::launch_by(newer.as_ref(), slot, |spec| {
        spec.config.cpu = "qemu64".into();
        spec.incoming = true;
    });
    target.qemu().load(&state).unwrap();
    target.qemu().unpause().unwrap();
    assert_eq!(target.count(), (1, nonce.clone()));
    target.qemu().pause().unwrap();
    assert!(target.qemu().device_state().is_ok());
    target.qemu().unpause().unwrap();
    reboot(&mut target, &nonce);
}

#[test]
fn an_adopted_machine_with_private_memory_is_saved_with_a_head_that_is_out_of_date() {
    let mut source = Guest::launch(Slot::new(), |_| ());
    // Before its first instruction: the firmware patches the tables later.
    let state = source.qemu().device_state().unwrap();
    let mut clone = source.twin(Sharing::Private);
    clone.qemu().load(&state).unwrap();
    clone.qemu().unpause().unwrap();
    let nonce = clone.expect("READY ");
    let qemu = clone.qemu.take().unwrap();
    let (identity, dir) = (qemu.process().identity(), qemu.dir().to_owned());
    drop(qemu);
    clone.qemu = Some(Qemu::adopt(&dir, identity, Sharing::Private).unwrap());
    clone.qemu().pause().unwrap();
    assert!(matches!(clone.qemu().save_device_state(), Err(StateError::NoHeader)));
    clone.qemu().set_head(&state).unwrap();
    let patched = clone.qemu().device_state().unwrap();
    assert_ne!(
        StreamHeader::parse(&patched).unwrap().blocks(),
        StreamHeader::parse(&state).unwrap().blocks()
    );
    clone.qemu().unpause().unwrap();
    assert_eq!(clone.count(), (1, nonce));
}
