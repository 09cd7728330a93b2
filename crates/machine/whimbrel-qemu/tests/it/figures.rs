//! Measurements, not tests: prints the cost of the steps. `cargo test -p whimbrel-qemu figures -- --ignored
//! --nocapture`

use crate::guest::{Guest, Slot};
use std::time::{Duration, Instant};
use whimbrel_machine::Machine;
use whimbrel_qemu::{Qemu, Sharing, VmIdentity, probe};

const ROUNDS: usize = 20;

fn print(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let [min, median, max] = [0, times.len() / 2, times.len() - 1].map(|at| times[at].as_secs_f64() * 1e3);
    println!("{what:30} median {median:7.2} ms   min {min:7.2}   max {max:7.2}");
}

fn timed<T>(times: &mut Vec<Duration>, step: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = step();
    times.push(start.elapsed());
    result
}

#[test]
#[ignore = "prints figures"]
fn figures() {
    let mut guest = Guest::boot();
    guest.expect("READY ");
    let [mut head, mut pause, mut save, mut resume] = [const { Vec::new() }; 4];
    let mut sizes = (0, 0);
    for _ in 0..ROUNDS {
        guest.count();
        timed(&mut pause, || guest.qemu().pause().unwrap());
        timed(&mut head, || guest.qemu().prepare_device_state().unwrap());
        timed(&mut resume, || guest.qemu().unpause().unwrap());
        guest.count();
        guest.qemu().pause().unwrap();
        let state = timed(&mut save, || guest.qemu().save_device_state().unwrap());
        sizes = (state.head.len(), state.devices.len());
        guest.qemu().unpause().unwrap();
    }
    guest.qemu().pause().unwrap();
    let state = guest.qemu().device_state().unwrap();
    let [mut start, mut load, mut expected, mut go] = [const { Vec::new() }; 4];
    for round in 0..2 * ROUNDS {
        let slot = Slot::new();
        std::fs::copy(&guest.slot.ram, &slot.ram).unwrap();
        let mut spec = slot.spec(Sharing::Shared);
        spec.incoming = true;
        let binary = &probe().unwrap().path;
        let qemu = timed(&mut start, || Qemu::launch(binary, &spec).unwrap());
        let mut target = Guest::resume(qemu, slot);
        let load = if round % 2 == 0 {
            &mut load
        } else {
            target.qemu().expect_state(&state).unwrap();
            &mut expected
        };
        timed(load, || target.qemu().load_to_run(&state, VmIdentity::Unchanged).unwrap());
        timed(&mut go, || target.qemu().unpause().unwrap());
    }
    println!("head {} bytes, devices {} bytes", sizes.0, sizes.1);
    print("process start to qmp", start);
    print("take the head", head);
    print("pause", pause);
    print("save while paused", save);
    print("unpause", resume);
    print("load", load);
    print("load what was expected", expected);
    print("unpause after load", go);
}
