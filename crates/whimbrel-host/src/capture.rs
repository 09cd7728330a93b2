//! Checkpoint and suspend: the capture loop with the store as its sink.
//!
//! A capsule exists from the moment its ref is durable. Before that moment a failure leaves the machine as it
//! was found, and the store with nothing but garbage that `gc` removes.

use crate::{
    error::HostError,
    host::Host,
    live::{Live, Stoppable, remove_overlays},
    machine::Turn,
    operation::Reporter,
    record::{Phase, Record},
    refs,
};
use std::{collections::BTreeMap, time::Instant};
use whimbrel_api::{
    CaptureReport, CheckpointRequest, Operation, OperationKind, OperationResult, RoundInfo, Squeeze,
    SuspendRequest, Unit,
};
use whimbrel_capture::{
    Batch, Captured, Finish, Follower, Pace, Phase as CapturePhase, Progress, RoundStats, Sink, SinkError,
    Subject, capture,
};
use whimbrel_core::{CapsuleId, Digest, MachineName, RefName};
use whimbrel_image::{ImageRef, Manifest};
use whimbrel_store::{ImageWriter, Writer};

/// What the user wants on the capsule.
struct Wanted {
    tag: Option<RefName>,
    labels: BTreeMap<String, String>,
    balloon: Squeeze,
}

impl Host {
    /// Takes a capsule of a machine that runs on.
    pub(crate) fn checkpoint(
        self: &std::sync::Arc<Self>,
        name: &MachineName,
        request: CheckpointRequest,
    ) -> Result<Operation, HostError> {
        refs::check_tag(request.tag.as_ref())?;
        let (host, machine) = (self.clone(), self.machine(name)?);
        let wanted = Wanted { tag: request.tag, labels: request.labels, balloon: request.balloon };
        Ok(self.operations().start(OperationKind::Checkpoint, name.to_string(), move |reporter| {
            let mut turn = machine.begin("checkpoint", Some(reporter.id))?;
            let taken = host.take_capsule(&mut turn, Finish::GoOn, &wanted, reporter)?;
            turn.record.save(&host.layout)?;
            Ok(OperationResult::Checkpoint(taken))
        }))
    }

    /// Takes a capsule of a machine and ends it.
    pub(crate) fn suspend(
        self: &std::sync::Arc<Self>,
        name: &MachineName,
        request: SuspendRequest,
    ) -> Result<Operation, HostError> {
        refs::check_tag(request.tag.as_ref())?;
        let (host, machine) = (self.clone(), self.machine(name)?);
        let wanted = Wanted { tag: request.tag, labels: BTreeMap::new(), balloon: request.balloon };
        Ok(self.operations().start(OperationKind::Suspend, name.to_string(), move |reporter| {
            let mut turn = machine.begin("suspend", Some(reporter.id))?;
            let taken = host.take_capsule(&mut turn, Finish::StayPaused, &wanted, reporter)?;
            host.end_suspended(&mut turn, taken.capsule)?;
            // Whoever suspends will resume, and then a QEMU that waits saves most of the time.
            host.warm_up(&turn.record.config);
            Ok(OperationResult::Suspend(taken))
        }))
    }

    /// The machine lies in the store now: written down first, ended second, so that it never runs twice.
    fn end_suspended(&self, turn: &mut Turn<'_>, capsule: CapsuleId) -> Result<(), HostError> {
        turn.record.phase = Phase::Suspended { capsule };
        turn.record.process = None;
        turn.record.since_ms = crate::now_ms();
        if let Err(error) = turn.record.save(&self.layout) {
            turn.record.phase = Phase::Here;
            let (record, live) = turn.parts()?;
            live.go_on();
            self.give_back(record, live);
            return Err(error);
        }
        turn.live.take().into_iter().for_each(Live::end);
        // The capsule has the disks: the overlays are of no more use.
        remove_overlays(&self.layout, &turn.record.name);
        Ok(())
    }

    /// Takes a capsule of a guest that is squeezed for it. It has its memory back unless the machine ends next.
    fn take_capsule(
        &self,
        turn: &mut Turn<'_>,
        finish: Finish,
        wanted: &Wanted,
        reporter: &Reporter,
    ) -> Result<CaptureReport, HostError> {
        let begun = Instant::now();
        let (record, live) = turn.parts()?;
        let squeezed = self.squeeze(record, live, wanted.balloon, reporter)?;
        let taken = self.take_squeezed(record, live, finish, wanted, reporter);
        if taken.is_err() || finish == Finish::GoOn {
            self.give_back(record, live);
        }
        let total_ms = begun.elapsed().as_secs_f64() * 1e3;
        taken.map(|report| CaptureReport { total_ms, squeezed, ..report })
    }

    fn take_squeezed(
        &self,
        record: &mut Record,
        live: &mut Live,
        finish: Finish,
        wanted: &Wanted,
        reporter: &Reporter,
    ) -> Result<CaptureReport, HostError> {
        let was_paused = live.is_paused();
        let finish = if was_paused { Finish::StayPaused } else { finish };
        let stored_before = self.stored_bytes();
        let writer = self.store.writer().map_err(refs::store_error("begin to write"))?;
        let bases = self.follow(record, live)?;
        let written = StoreSink::new(&writer, live, &bases).and_then(|mut sink| {
            let captured = live.capture(Follower::Store, &mut sink, &pace(was_paused), finish, reporter)?;
            Ok((sink, captured))
        });
        // Sets that were taken against no base must not be used against one the next time.
        let (sink, captured) = written.inspect_err(|_| {
            if bases.is_empty() {
                live.unfollow_store()
            }
        })?;
        // In the capsule it is written down already that the guest is to get it back.
        let labels = labels_of(record, wanted);
        if finish == Finish::GoOn {
            self.give_back(record, live);
        }
        let head_bytes = live.qemu.head().map_or(0, |head| head.as_bytes().len());
        match self.commit(record, sink, &writer, (&captured, head_bytes), (wanted, labels)) {
            Ok(capsule) => {
                record.last = Some(capsule);
                live.hold_base(self.store.pin(&capsule));
                let bytes_added = self.stored_bytes().saturating_sub(stored_before);
                let pause =
                    if finish == Finish::GoOn { captured.pause } else { captured.paused_at.elapsed() };
                Ok(CaptureReport {
                    capsule,
                    pause_ms: if was_paused { 0.0 } else { pause.as_secs_f64() * 1e3 },
                    total_ms: 0.0,
                    bytes_added,
                    rounds: captured.rounds.iter().map(round_info).collect(),
                    squeezed: None,
                })
            }
            Err(error) => {
                // What the sink took is in no capsule: the next one looks at everything again.
                live.unfollow_store();
                if !was_paused && finish == Finish::StayPaused {
                    live.go_on();
                }
                Err(error)
            }
        }
    }

    /// Sees to it that the store follows every array, and returns the images that its sets are relative to, by name.
    ///
    /// The sets of a follower say what differs from its base, so the two belong together: without a base that is
    /// certainly here, the sets begin anew with everything, against nothing. (Against a base, a page that is a hole
    /// now and was none then would keep its old content.)
    fn follow(&self, record: &Record, live: &mut Live) -> Result<BTreeMap<String, Digest>, HostError> {
        if live.ledgers.iter().all(|ledger| ledger.is_followed_by(Follower::Store))
            && let Some(base) = record.last.or(record.origin)
            && let Ok(manifest) = self.store.manifest(&base)
        {
            let root = |image: ImageRef| Some((image.name, image.root?));
            return Ok(manifest.images.into_iter().filter_map(root).collect());
        }
        for ledger in &mut live.ledgers {
            let followed = ledger.follow_all(Follower::Store);
            followed.map_err(|source| HostError::Memory { source: source.into() })?;
        }
        Ok(BTreeMap::new())
    }

    fn commit(
        &self,
        record: &Record,
        sink: StoreSink,
        writer: &Writer,
        (captured, head_bytes): (&Captured, usize),
        (wanted, labels): (&Wanted, BTreeMap<String, String>),
    ) -> Result<CapsuleId, HostError> {
        let images = sink.finish()?;
        let write = refs::store_error("write the capsule");
        // The head of the state hardly ever changes: as a blob of its own it is stored once.
        let (head, sections) = captured.device_state.split_at(head_bytes.min(captured.device_state.len()));
        let parts = [head, sections].into_iter().filter(|part| !part.is_empty());
        let device = parts.map(|part| writer.put_blob(part)).collect::<Result<_, _>>().map_err(&write)?;
        for digest in record.config.boot.iter().flat_map(|boot| [Some(boot.kernel), boot.initrd]).flatten() {
            if self.store.has(&[digest]) != [true] {
                let path = self.layout.boot_file(&digest);
                let content = std::fs::read(&path).map_err(|source| HostError::io("read", &path, source))?;
                writer.put_blob(&content).map_err(&write)?;
            }
        }
        let manifest = Manifest {
            format: whimbrel_image::FORMAT,
            machine: record.config.clone(),
            device,
            images,
            parents: record.last.or(record.origin).into_iter().collect(),
            time: crate::now_ms(),
            host: self.name.to_string(),
            labels,
            working_set: None,
        };
        let names: Vec<RefName> =
            wanted.tag.clone().into_iter().chain([refs::of_machine(&record.name)]).collect();
        writer.commit(&manifest, &names).map_err(refs::store_error("commit the capsule"))
    }
}

/// What the user wants on the capsule, and what a resume needs to know.
fn labels_of(record: &Record, wanted: &Wanted) -> BTreeMap<String, String> {
    let mut labels = wanted.labels.clone();
    labels.insert(refs::MACHINE_LABEL.to_owned(), record.name.to_string());
    let squeezed = record.squeezed_from.map(|size| (refs::BALLOON_LABEL.to_owned(), size.0.to_string()));
    labels.extend(squeezed);
    labels
}

fn pace(was_paused: bool) -> Pace {
    if was_paused { Pace::STOPPED } else { Pace::CHECKPOINT }
}

/// One round as the API tells it.
pub(crate) fn round_info(round: &RoundStats) -> RoundInfo {
    RoundInfo { pages: round.pages, bytes: round.bytes, ms: round.took.as_secs_f64() * 1e3 }
}

/// Says how far a capture is.
pub(crate) fn report(reporter: &Reporter, progress: Progress) {
    let stage = match progress.phase {
        CapturePhase::Round(round) => format!("copying, round {round}"),
        CapturePhase::Paused => "copying the last pages".to_owned(),
        CapturePhase::Delivering => "writing the last pages".to_owned(),
    };
    reporter.progress(&stage, Unit::Pages, progress.done, Some(progress.total));
}

impl Live {
    /// Runs the capture loop over all arrays of the machine.
    pub(crate) fn capture(
        &mut self,
        follower: Follower,
        sink: &mut dyn Sink,
        pace: &Pace,
        finish: Finish,
        reporter: &Reporter,
    ) -> Result<Captured, HostError> {
        let was_paused = self.is_paused();
        let Live { qemu, ledgers, disks, .. } = self;
        let mut machine = Stoppable { qemu, disks, keep_paused: was_paused };
        let mut subject = Subject { machine: &mut machine, ledgers, follower };
        let captured = capture(&mut subject, sink, pace, finish, &mut |progress| {
            report(reporter, progress);
            reporter.flow()
        });
        captured.map_err(|source| HostError::Capture { source })
    }
}

/// The store as a sink: one image writer an array.
struct StoreSink {
    images: Vec<(String, ImageWriter)>,
    /// Bytes of pages handed over; what they come to in the store is known at the end.
    raw: u64,
}

impl StoreSink {
    fn new(writer: &Writer, live: &Live, bases: &BTreeMap<String, Digest>) -> Result<Self, HostError> {
        let open = |ledger: &whimbrel_capture::Ledger| {
            let name = ledger.name().to_owned();
            let image = writer.image(bases.get(&name).copied(), ledger.page_count());
            Ok((name, image.map_err(refs::store_error("begin an image"))?))
        };
        Ok(Self { images: live.ledgers.iter().map(open).collect::<Result<_, HostError>>()?, raw: 0 })
    }

    fn finish(self) -> Result<Vec<ImageRef>, HostError> {
        let finish = |(name, image): (String, ImageWriter)| {
            let image = image.finish().map_err(refs::store_error("finish an image"))?;
            Ok(ImageRef { name, pages: image.pages, root: image.root, cuts: None })
        };
        self.images.into_iter().map(finish).collect()
    }
}

impl Sink for StoreSink {
    fn pages(&mut self, batch: Batch<'_>) -> Result<(), SinkError> {
        let (_, image) = &mut self.images[batch.array];
        self.raw += batch.data.len() as u64;
        image
            .put(batch.run, batch.data)
            .map_err(|error| SinkError { destination: "the store".to_owned(), source: error.into() })
    }

    fn bytes_out(&self) -> u64 {
        self.raw
    }
}
