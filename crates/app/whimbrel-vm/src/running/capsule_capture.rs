//! Capture of a running machine for a capsule: the capture loop with the store as its sink.
//!
//! Who captures has a writer of the store, and makes a capsule of the images afterwards. Pages that a capture
//! has collected and that come into no capsule are lost for the next one, unless the store is detached.

use super::{
    CaptureBreaks, CapturedArrays, FrozenGuest, NetworkPort, PausableMachine, RunningError, RunningMachine,
    capsule_images::store_error,
};
use std::{collections::BTreeMap, ops::ControlFlow};
use whimbrel_alignment::PageAlignment;
use whimbrel_capture::{
    AfterCapture, CaptureSource, Captured, CheckpointPolicy, Consumer, DirtyLog, PageBatch, Progress, Sink,
    SinkError, capture,
};
use whimbrel_core::Digest;
use whimbrel_image::ImageRef;
use whimbrel_machine::MachineError;
use whimbrel_qemu::{QemuGa, QemuGaError};
use whimbrel_store::{CapsuleWriter, ImageWriter};

/// Capture of a machine that is under way, with the images that it has written so far.
pub struct CapsuleCapture {
    arrays: CapturedArrays,
    /// Whether the guest freezes its file systems for the pause; for disks only.
    quiesce: bool,
    sink: StoreSink,
}

impl RunningMachine {
    /// Begins to capture arrays into images of `writer`.
    pub fn begin_capture(
        &mut self,
        writer: &CapsuleWriter,
        arrays: CapturedArrays,
    ) -> Result<CapsuleCapture, RunningError> {
        let Self { dirty_logs, disks, bases, .. } = self;
        let logs = arrays.of(dirty_logs);
        attach_consumer(logs, bases)?;
        let cuts = |name: &str| disks.iter().find(|disk| disk.name() == name)?.alignment().cloned();
        Ok(CapsuleCapture { arrays, quiesce: false, sink: StoreSink::new(writer, logs, bases, cuts)? })
    }
}

impl CapsuleCapture {
    /// Says whether qemu-ga freezes the guest's file systems for the pause. Memory would remember that they
    /// are frozen, so this is for captures without it.
    pub fn quiesced(self, quiesce: bool) -> Self {
        Self { quiesce, ..self }
    }

    /// Runs the capture loop over the arrays. `breaks` are made while the machine runs; `told` hears of the
    /// progress and may end the loop. Without memory the device state is empty.
    pub fn run(
        &mut self,
        live: &mut RunningMachine,
        (policy, finish): (&CheckpointPolicy, AfterCapture),
        breaks: &mut Option<&mut dyn CaptureBreaks>,
        told: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Captured, RunningError> {
        let was_paused = live.is_paused();
        let quiesced = live.qemu_ga.clone().filter(|_| self.quiesce);
        let RunningMachine { qemu, dirty_logs, disks, ports, .. } = live;
        let machine = PausableMachine { qemu, disks, keep_paused: was_paused, buffering_ports: &[] };
        let mut machine: Box<dyn whimbrel_machine::Machine + '_> = match self.arrays {
            CapturedArrays::All => Box::new(machine),
            CapturedArrays::Disks => Box::new(DisksOnly { machine, quiesced, frozen: None }),
        };
        let machine = &mut *machine;
        let dirty_logs = self.arrays.of(dirty_logs);
        let mut source = CaptureSource { machine, dirty_logs, consumer: Consumer::Store };
        let mut sink = SinkWithBreaks { sink: &mut self.sink, breaks, ports };
        let captured = capture(&mut source, &mut sink, policy, finish, told);
        captured.map_err(|source| RunningError::Capture { source })
    }

    /// Finishes the images of a capture that has ended.
    pub fn finish(self) -> Result<Vec<ImageRef>, RunningError> {
        self.sink.finish()
    }
}

/// Makes the store a consumer of every dirty log.
///
/// A dirty set is relative to the base image of its array. Without a base that is certainly here, the set
/// starts with every page and no base. (Against a base, a page that is a hole now but was not then would keep
/// its old content.)
fn attach_consumer(
    ledgers: &mut [DirtyLog],
    bases: &mut BTreeMap<String, Option<Digest>>,
) -> Result<(), RunningError> {
    for ledger in ledgers {
        if !ledger.is_attached(Consumer::Store) || !bases.contains_key(ledger.name()) {
            bases.remove(ledger.name());
            let followed = ledger.attach_all(Consumer::Store);
            followed.map_err(|source| RunningError::Memory { source: source.into() })?;
        }
    }
    Ok(())
}

/// The store as a sink that makes breaks for another consumer.
struct SinkWithBreaks<'a, 'b> {
    sink: &'a mut StoreSink,
    breaks: &'a mut Option<&'b mut dyn CaptureBreaks>,
    ports: &'a [NetworkPort],
}

impl Sink for SinkWithBreaks<'_, '_> {
    fn write(&mut self, batch: PageBatch<'_>) -> Result<(), SinkError> {
        self.sink.write(batch)
    }

    fn wait_idle(&mut self) -> Result<(), SinkError> {
        // Another consumer would wait as long for its next break.
        if self.breaks.is_some() { Ok(()) } else { self.sink.wait_idle() }
    }

    fn between_batches(&mut self, source: &mut CaptureSource<'_>) -> Result<(), SinkError> {
        let Some(breaks) = self.breaks else { return Ok(()) };
        let taken = breaks.take_break(source, self.ports);
        taken.map_err(|source| SinkError { destination: "the standby".to_owned(), source })
    }

    fn bytes_out(&self) -> u64 {
        self.sink.bytes_out()
    }
}

/// A machine of which only the disks are captured: it pauses and runs on as usual, and its device state is
/// empty.
struct DisksOnly<'a> {
    machine: PausableMachine<'a>,
    /// Port of qemu-ga, if it is to freeze the file systems for the pause.
    quiesced: Option<QemuGa>,
    /// What became of that; thawed when the machine runs again.
    frozen: Option<Result<FrozenGuest, QemuGaError>>,
}

impl whimbrel_machine::Machine for DisksOnly<'_> {
    fn about_to_pause(&mut self) {
        // First: the guest writes its caches, which the disks then flush.
        self.frozen = self.quiesced.as_ref().map(FrozenGuest::freeze);
        self.machine.about_to_pause();
    }

    fn pause(&mut self) -> Result<(), MachineError> {
        match self.frozen.take() {
            Some(Err(error)) => Err(MachineError::new("freeze the file systems of", error)),
            frozen => {
                self.frozen = frozen;
                self.machine.pause()
            }
        }
    }

    fn unpause(&mut self) -> Result<(), MachineError> {
        let running = self.machine.unpause();
        self.frozen = None;
        running
    }

    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        Ok(Vec::new())
    }
}

/// The store as a sink: one image writer and the alignment for each array.
struct StoreSink {
    images: Vec<(String, ImageWriter, Option<PageAlignment>)>,
    /// Bytes of pages received; their size in the store is known at the end.
    raw: u64,
}

impl StoreSink {
    fn new(
        writer: &CapsuleWriter,
        ledgers: &[DirtyLog],
        bases: &BTreeMap<String, Option<Digest>>,
        cuts: impl Fn(&str) -> Option<PageAlignment>,
    ) -> Result<Self, RunningError> {
        let open = |ledger: &DirtyLog| {
            let (name, pages) = (ledger.name().to_owned(), ledger.page_count_for(Consumer::Store));
            let image = writer.image(bases.get(&name).copied().flatten(), pages);
            let cuts = cuts(&name);
            Ok((name, image.map_err(store_error("begin an image"))?, cuts))
        };
        Ok(Self { images: ledgers.iter().map(open).collect::<Result<_, RunningError>>()?, raw: 0 })
    }

    fn finish(self) -> Result<Vec<ImageRef>, RunningError> {
        let finish = |(name, image, cuts): (String, ImageWriter, Option<PageAlignment>)| {
            let image = image.finish().map_err(store_error("finish an image"))?;
            Ok(ImageRef { name, pages: image.pages, root: image.root, cuts })
        };
        self.images.into_iter().map(finish).collect()
    }
}

impl Sink for StoreSink {
    fn write(&mut self, batch: PageBatch<'_>) -> Result<(), SinkError> {
        let (_, image, _) = &mut self.images[batch.array];
        self.raw += batch.data.len() as u64;
        image
            .put(batch.run, batch.data)
            .map_err(|error| SinkError { destination: "the store".to_owned(), source: error.into() })
    }

    fn wait_idle(&mut self) -> Result<(), SinkError> {
        self.images.iter().for_each(|(_, image, _)| image.wait_idle());
        Ok(())
    }

    fn bytes_out(&self) -> u64 {
        self.raw
    }
}
