//! Test memory of a standby: a machine's memory and disk as plain bytes.

use std::sync::{Arc, Mutex};
use whimbrel_core::{Digest, PAGE_SIZE, PageRun};
use whimbrel_migrate::{
    protocol::Finish,
    target::{HostError, IncomingMachine},
};

/// Lengths in pages.
pub(crate) const MEMORY: u64 = 96;
pub(crate) const DISK: u64 = 40;

/// Memory and disk of the standby, the device state it was started with, and whether nothing can be written.
#[derive(Clone, Default)]
pub(crate) struct Copy(pub(crate) Arc<Mutex<Held>>, pub(crate) Arc<Mutex<bool>>);

/// Pages, and the device state once there is one.
pub(crate) type Held = (Vec<Vec<u8>>, Option<Vec<u8>>);

impl Copy {
    pub(crate) fn new() -> Self {
        let empty = [MEMORY, DISK].map(|pages| vec![0; pages as usize * PAGE_SIZE]);
        Self(Arc::new(Mutex::new((empty.to_vec(), None))), Arc::default())
    }
}

impl IncomingMachine for Copy {
    fn boot_files_missing(&self) -> Vec<Digest> {
        vec![]
    }
    fn store_boot_file(&mut self, _: Digest, _: Vec<u8>) -> Result<(), HostError> {
        Ok(())
    }
    fn write(&mut self, array: usize, run: PageRun, data: &[u8]) -> Result<(), HostError> {
        if *self.1.lock().unwrap() {
            return Err("no room".into());
        }
        self.0.lock().unwrap().0[array][run.offset() as usize..][..run.bytes()].copy_from_slice(data);
        Ok(())
    }
    fn zero(&mut self, array: usize, run: PageRun) -> Result<(), HostError> {
        self.0.lock().unwrap().0[array][run.offset() as usize..][..run.bytes()].fill(0);
        Ok(())
    }
    fn read(&self, array: usize, run: PageRun, out: &mut [u8]) -> Result<(), HostError> {
        out.copy_from_slice(&self.0.lock().unwrap().0[array][run.offset() as usize..][..run.bytes()]);
        Ok(())
    }
    fn prepare(&mut self, _: &Finish, device_state: &[u8]) -> Result<(), HostError> {
        if *self.1.lock().unwrap() {
            return Err("it does not load".into());
        }
        self.0.lock().unwrap().1 = Some(device_state.to_vec());
        Ok(())
    }
    fn restart(&mut self) -> Result<(), HostError> {
        Ok(())
    }
    fn run(&mut self) -> Result<(), HostError> {
        Ok(())
    }
    fn discard(&mut self) {}
}
