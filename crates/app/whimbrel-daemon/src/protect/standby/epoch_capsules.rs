//! Epoch capsules: stores epochs of a hosted standby as capsules, for time travel.
//!
//! At the configured rate, the end of an epoch starts a snapshot
//! ([`whimbrel_protect::standby::EpochReceiver::start_snapshot`]). One thread for each standby reads it
//! little by little while epochs continue, and writes it to the store relative to the previous capsule. The
//! protection never waits for that thread: a failure here costs one capsule, is logged, and the next one is
//! tried when it is due.

use super::hosted::HostedStandby;
use crate::protect::lock;
use crate::{
    core::{background_thread, error::DaemonError, history, refs},
    machine::record::Record,
};
use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        mpsc::{Receiver as Hears, RecvTimeoutError, SyncSender, sync_channel},
    },
    time::{Duration, Instant},
};
use whimbrel_core::{CapsuleId, Digest, PAGE_SIZE, PageRun};
use whimbrel_image::ImageRef;
use whimbrel_migrate::protocol::{ArrayOffer, Offer};
use whimbrel_protect::{
    epoch_snapshot::{EpochSnapshot, SnapshotLost},
    protocol::SnapshotRule,
    standby::EpochReceiver,
};
use whimbrel_store::{CapsuleWriter, ImageWriter, Pin, Store};

/// Label of an epoch capsule: the number of the epoch, and the primary.
const EPOCH_LABEL: &str = "epoch";
/// Interval at which an idle thread checks whether the standby has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Writes the epoch capsules of one machine.
pub(in crate::protect) struct EpochCapsuleWriter {
    rule: SnapshotRule,
    arrays: Vec<ArrayOffer>,
    record: Record,
    due: Mutex<Instant>,
    started: SyncSender<(EpochSnapshot, u64)>,
    work: Mutex<Option<Hears<(EpochSnapshot, u64)>>>,
    last: Mutex<Option<LastEpochCapsule>>,
}

/// The last epoch capsule: new ones are relative to its images.
pub(in crate::protect) struct LastEpochCapsule {
    capsule: CapsuleId,
    images: BTreeMap<String, Option<Digest>>,
    _pin: Option<Pin>,
}

impl EpochCapsuleWriter {
    /// A writer with this rule; `last` is the capsule that has the pages which the receiver counts as stored.
    pub(in crate::protect) fn new(rule: SnapshotRule, offer: &Offer, last: Option<LastEpochCapsule>) -> Self {
        let mut record = Record::new(offer.name.clone(), offer.config.clone(), Vec::new());
        record.origin = offer.origin;
        let (started, work) = sync_channel(1);
        Self {
            rule,
            arrays: offer.arrays.clone(),
            record,
            due: Mutex::new(Instant::now()),
            started,
            work: Mutex::new(Some(work)),
            last: Mutex::new(last),
        }
    }

    /// Takes the last capsule for the next protection.
    pub(in crate::protect) fn take_last(&self) -> Option<LastEpochCapsule> {
        lock(&self.last).take()
    }

    /// Starts a snapshot of a committed epoch if one is due.
    pub(in crate::protect) fn epoch_committed(&self, receiver: &mut EpochReceiver) {
        let (mut due, now) = (lock(&self.due), Instant::now());
        if now < *due {
            return;
        }
        if let Some(kept) = receiver.start_snapshot() {
            let every = Duration::from_millis(self.rule.every_ms);
            *due = (*due + every).max(now + every / 2);
            let copy = kept.copy;
            if self.started.try_send((kept, crate::now_ms())).is_err() {
                receiver.snapshot_done(copy, false);
            }
        }
    }

    /// Runs the thread that writes capsules.
    pub(in crate::protect) fn run(&self, standing: &HostedStandby) {
        let Some(work) = lock(&self.work).take() else { return };
        while !standing.is_over() {
            let (kept, time_ms) = match work.recv_timeout(POLL_INTERVAL) {
                Ok(kept) => kept,
                Err(RecvTimeoutError::Timeout) if standing.host().sleep_unless_closing(Duration::ZERO) => {
                    continue;
                }
                Err(_) => return,
            };
            let copy = kept.copy;
            let stored = self.store(standing, kept, time_ms);
            standing.with_own_receiver(|receiver| receiver.snapshot_done(copy, stored.is_ok()));
            match stored {
                Ok(capsule) => {
                    tracing::info!(machine = %self.record.name, %capsule, "stored an epoch as a capsule");
                }
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(machine = %self.record.name, error, "cannot store an epoch as a capsule; the next one has its pages");
                }
            }
        }
    }

    fn store(
        &self,
        standing: &HostedStandby,
        kept: EpochSnapshot,
        time_ms: u64,
    ) -> Result<CapsuleId, DaemonError> {
        let host = standing.host();
        let write = refs::store_error("store an epoch");
        let writer = background_writer(&host.store)?;
        let base =
            |name: &str| lock(&self.last).as_ref().and_then(|last| last.images.get(name).copied().flatten());
        let open = |array: &ArrayOffer| writer.image(base(&array.name), array.pages);
        let mut images: Vec<ImageWriter> =
            self.arrays.iter().map(open).collect::<Result<_, _>>().map_err(&write)?;
        self.copy(standing, kept.copy, &mut images)?;
        let finish = |(array, image): (&ArrayOffer, ImageWriter)| {
            let image = image.finish()?;
            Ok(ImageRef { name: array.name.clone(), pages: image.pages, root: image.root, cuts: None })
        };
        let images: Vec<ImageRef> =
            self.arrays.iter().zip(images).map(finish).collect::<Result<_, _>>().map_err(&write)?;
        let roots = images.iter().map(|image| (image.name.clone(), image.root)).collect();
        let mut record = self.record.clone();
        record.last = lock(&self.last).as_ref().map(|last| last.capsule).or(record.last);
        let labels = BTreeMap::from([
            (refs::MACHINE_LABEL.to_owned(), record.name.to_string()),
            (EPOCH_LABEL.to_owned(), format!("{} under protection of {}", kept.epoch, standing.primary())),
        ]);
        let names = [history::name(&record.name, time_ms)];
        let device_state = ([&kept.device_state[..], &[]], labels);
        let capsule = host.commit_at(&record, images, &writer, device_state, &names, time_ms)?;
        let whole = host.store.pin(&capsule).map_err(&write)?;
        *lock(&self.last) = Some(LastEpochCapsule { capsule, images: roots, _pin: Some(whole) });
        history::retain_newest(&host.store, &record.name, self.rule.count as usize)?;
        Ok(capsule)
    }

    fn copy(
        &self,
        standing: &HostedStandby,
        copy: u64,
        images: &mut [ImageWriter],
    ) -> Result<(), DaemonError> {
        let lost = |source: SnapshotLost| DaemonError::Protect { source: source.into() };
        loop {
            let next = standing.with_own_receiver(|receiver| receiver.snapshot_pages(copy));
            let next = next.unwrap_or(Err(SnapshotLost::Over)).map_err(lost)?;
            for ((array, page), data) in next.pages.iter().zip(next.data.chunks_exact(PAGE_SIZE)) {
                let put = images[*array as usize].put(PageRun::new(*page, 1), data);
                put.map_err(refs::store_error("store an epoch"))?;
            }
            if next.last {
                return Ok(());
            }
        }
    }
}

/// Creates a writer whose threads are in the background, since epochs and machines precede: a thread inherits
/// that of its creator. The thread that reads the pages is not, since epochs wait for it.
fn background_writer(store: &Store) -> Result<CapsuleWriter, DaemonError> {
    let begin = || {
        if let Err(error) = background_thread::begin() {
            tracing::debug!(%error, "capsules are compressed at normal priority");
        }
        store.writer()
    };
    let begun = std::thread::scope(|scope| scope.spawn(begin).join());
    begun.map_err(|_| DaemonError::Panicked)?.map_err(refs::store_error("store an epoch"))
}
