//! Attachment to a real QEMU, whose CPUs are never started.

use crate::support::*;
use std::{
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};
use whimbrel_core::PageRun;
use whimbrel_machine::PageArray;
use whimbrel_memory::{AttachError, Attachment, Mode, Pager};

const PAGES: u64 = 64 << 20 >> 12;

/// Starts QEMU as the daemon does: without capabilities, so that it may create a userfaultfd for faults of
/// the kernel with the inherited device only.
const CONFINED: &str = "exec 9<>/dev/userfaultfd
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs qemu-system-x86_64 \"$@\"";

struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn qemu(file: &tempfile::TempPath) -> Qemu {
    let memory = format!("memory-backend-file,id=ram0,size=64M,mem-path={},share=on", text(file));
    let machine = "q35,accel=tcg,memory-backend=ram0";
    let mut command = Command::new("sh");
    command.args(["-c", CONFINED, "sh"]).args([
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "-S",
        "-display",
        "none",
        "-nodefaults",
        "-machine",
        machine,
        "-object",
        &memory,
        "-m",
        "64",
    ]);
    Qemu(command.stdin(Stdio::null()).spawn().expect("QEMU is installed"))
}

/// Attaches as soon as QEMU has mapped its memory.
fn attach(qemu: &Qemu, file: &tempfile::TempPath, mode: Mode) -> Attachment {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match Attachment::attach(qemu.0.id() as i32, by_path(file), mode) {
            Err(AttachError::NoMapping { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            other => return other.unwrap(),
        }
    }
}

#[test]
fn qemu_is_attached_and_its_memory_read_while_pages_come_from_elsewhere() {
    let file = ram_file("qemu", PAGES);
    let mut qemu = qemu(&file);
    let attachment = attach(&qemu, &file, Mode::Lazy);
    assert_eq!(attachment.page_count(), PAGES);
    let image = Arc::new(Image::new(PAGES, 64));
    let pager = Pager::start(&attachment, image.clone()).unwrap();
    pager.prefetch_all();
    assert!(pager.wait_resident(Duration::from_secs(60)), "{:?}", pager.state());
    let ram = attachment.ram().unwrap();
    let mut copy = vec![0; PAGE];
    for page in [1, 1000, PAGES - 1] {
        ram.read(PageRun::new(page, 1), &mut copy).unwrap();
        assert!(copy == image.page(page), "page {page}");
    }
    assert!(qemu.0.try_wait().unwrap().is_none(), "QEMU lives on");
}

#[test]
fn a_stopped_qemu_writes_nothing() {
    let file = ram_file("qemu", PAGES);
    let mut qemu = qemu(&file);
    let mut ram = attach(&qemu, &file, Mode::Track).ram().unwrap();
    // QEMU may still be setting up its memory; after that nothing is written.
    let deadline = Instant::now() + Duration::from_secs(30);
    while !ram.take_dirty().unwrap().is_empty() {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(qemu.0.try_wait().unwrap().is_none(), "QEMU lives on");
}
