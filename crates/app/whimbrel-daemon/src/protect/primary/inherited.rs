//! Inherited protection: the target's part of a postcopy migration with a backup host.
//!
//! At the commit the backup host has the machine as of the pause. From then on this host sends it epochs, and
//! output waits for their commits, until the last missing page has arrived. Then the protection ends.
//!
//! Its record is durable before the source hears that this host is ready. The protection thread takes the
//! machine lock and starts the machine, so no other operation comes in between. If the missing pages cannot
//! be fetched, it kills the QEMU, which yields the machine to the backup host and unblocks everything that
//! waits for the pages.

use super::{
    handle::ProtectionHandle,
    heartbeat::{Heartbeat, Output},
    run,
};
use crate::protect::{
    link::{ControlLink, PageLink},
    lock,
    records::{ProtectionRecord, ProtectionSide},
    settings::ProtectionSettings,
    witness::client::WitnessClient,
};
use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::{entry::Machine, record::Record},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};
use whimbrel_api::ProtectRequest;
use whimbrel_capture::{Consumer, DirtyLog};
use whimbrel_core::{MachineName, PageSet, WitnessAddress};
use whimbrel_machine::PageError;
use whimbrel_migrate::{
    postcopy::PageFetcher,
    protocol::{HandoverId, Offer},
};
use whimbrel_protect::{clock::BootTime, inherited_primary, lease, protocol::ProtectionId};
use whimbrel_qemu::{ProcessIdentity, QemuProcess};

/// How long missing pages may not arrive, after an error, before the machine is yielded to the backup host.
const SOURCE_PATIENCE: Duration = Duration::from_secs(5);
/// Limit when no error is known: on a slow link one message may take that long.
const SILENT_PATIENCE: Duration = Duration::from_secs(30);
/// Interval at which the progress is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long to wait for the first promise of the standby.
const FIRST_PROMISE_TIMEOUT: Duration = Duration::from_secs(1);

/// A protection that this host inherits with an incoming machine.
pub(crate) struct InheritedProtection {
    pub(in crate::protect) id: ProtectionId,
    handover: HandoverId,
    name: MachineName,
    settings: ProtectionSettings,
    pub(in crate::protect) link: Arc<PageLink>,
    standby: Arc<ControlLink>,
}

impl InheritedProtection {
    /// Reads the protection from an offer, and checks that this host can reach the other two.
    pub(crate) fn from_offer(host: &Arc<Daemon>, offer: &Offer) -> Result<Option<Self>, DaemonError> {
        let Some(third) = &offer.third else { return Ok(None) };
        let unreadable = |error| {
            DaemonError::invalid(format!("cannot decode the settings of an inherited protection: {error}"))
        };
        let request: ProtectRequest = serde_json::from_str(&third.request).map_err(unreadable)?;
        let settings = ProtectionSettings::of(&request)?;
        if request.host == host.name || settings.replay || settings.snapshots.is_some() {
            return Err(DaemonError::invalid("this protection cannot be inherited"));
        }
        for other in [Some(&request.host), request.witness.as_ref().and_then(WitnessAddress::host)] {
            other.map(|other| host.route(other)).transpose()?;
        }
        let link = Arc::new(PageLink::connect(host, &request.host, settings.rate_max)?);
        let standby = Arc::new(ControlLink::new(host, &request.host));
        standby.preconnect();
        let (id, name) = (ProtectionId(third.protection), offer.name.clone());
        Ok(Some(Self { id, handover: third.handover, name, settings, link, standby }))
    }

    /// Records the inherited protection durably, before the source hears that the machine is here.
    pub(crate) fn save_record(&self, host: &Daemon) -> Result<(), DaemonError> {
        let side = ProtectionSide::Primary { request: self.settings.request.clone(), gave_up: false };
        host.protections.put_record(ProtectionRecord::new(self.id, &self.name, self.handover, side))
    }

    /// Attaches the standby's consumer to the dirty logs. Must come before the device state is loaded, which
    /// may write pages.
    pub(crate) fn attach_consumer(ledgers: &mut [DirtyLog]) -> Result<(), PageError> {
        ledgers.iter_mut().try_for_each(|ledger| {
            let nothing = PageSet::empty(ledger.page_count());
            ledger.attach_from(Consumer::Standby, nothing)
        })
    }

    /// Runs the machine and protects it. Returns since when it runs, if it does.
    pub(crate) fn run(
        self,
        host: &Arc<Daemon>,
        machine: &Arc<Machine>,
    ) -> Result<Option<Instant>, DaemonError> {
        let guard = Arc::new(ProtectionHandle::new(self.name.clone(), self.settings.clone(), self.handover));
        lock(&host.protections.handles).insert(self.name.clone(), guard.clone());
        let (runs, hears) = mpsc::channel();
        let (host, machine) = (host.clone(), machine.clone());
        let layout = host.directories.clone();
        let work = move || run::inherit(&host, &machine, &guard, self, &runs);
        let thread = thread::Builder::new().name("protect".into()).spawn(work);
        thread.map_err(|source| DaemonError::io("start a thread for", layout.data(), source))?;
        // A thread that could not run the machine has handled the failure itself.
        Ok(hears.recv().ok())
    }

    /// Creates the lease, which is not granted yet.
    pub(in crate::protect) fn heartbeat(
        &self,
        host: &Arc<Daemon>,
        guard: &Arc<ProtectionHandle>,
        output: Output,
    ) -> Arc<Heartbeat> {
        let term = self.settings.term;
        let witness = self.settings.request.witness.as_ref();
        let witness = witness.map(|witness| WitnessClient::new(host, witness, self.id, term));
        Arc::new(Heartbeat::new(
            self.id,
            lease::PrimaryLease::initial(true, term),
            term,
            (self.standby.clone(), witness),
            (output, Arc::downgrade(&self.link)),
            Arc::downgrade(guard),
        ))
    }
}

/// Buffers all output, and sends heartbeats until the standby promises not to take over yet.
pub(in crate::protect) fn buffer_output(beats: &Heartbeat) {
    beats.buffer_output();
    beats.arm();
    let begun = Instant::now();
    while !beats.may_run() && begun.elapsed() < FIRST_PROMISE_TIMEOUT {
        beats.send_heartbeat();
    }
}

/// A watch that kills the QEMU if its missing pages cannot be fetched; dropping it ends the watch.
pub(in crate::protect) struct SourceWatch(Arc<AtomicBool>);

impl SourceWatch {
    pub(in crate::protect) fn start(
        taking: Option<Arc<PageFetcher>>,
        beats: &Arc<Heartbeat>,
        process: ProcessIdentity,
        log: std::path::PathBuf,
    ) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let (watch, beats, watched) = (Self(over.clone()), beats.clone(), taking);
        let work = move || {
            let Some(taking) = watched else { return };
            if !wait_until_stalled(&taking, &beats, &over) {
                return;
            }
            tracing::error!(from = %taking.from(), to = %beats.standby.to(), "missing pages cannot be fetched: yielding the machine to the backup host");
            QemuProcess::adopt(process, &log).into_iter().for_each(|qemu| qemu.kill());
        };
        if let Err(error) = thread::Builder::new().name("source-watch".into()).spawn(work) {
            tracing::error!(%error, "cannot start the thread that watches the source of missing pages");
        }
        watch
    }
}

impl Drop for SourceWatch {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Returns true when pages have not arrived for too long and the standby is alive; false when the watch ends.
fn wait_until_stalled(taking: &PageFetcher, beats: &Heartbeat, over: &AtomicBool) -> bool {
    let (mut missing, mut since) = (None, Instant::now());
    while !over.load(Ordering::Acquire) {
        thread::sleep(POLL_INTERVAL);
        let view = taking.status();
        if missing != Some(view.progress.missing) {
            (missing, since) = (Some(view.progress.missing), Instant::now());
        }
        // A host that is gone still appears connected for a while.
        let is_known = !view.connected || view.stalled.is_some();
        let patience = if is_known { SOURCE_PATIENCE } else { SILENT_PATIENCE };
        let lacks = view.progress.missing > 0 && since.elapsed() > patience;
        if lacks && inherited_primary::yields(&beats.lease(), BootTime::now()) {
            return !over.load(Ordering::Acquire);
        }
    }
    false
}

impl crate::protect::Protections {
    /// Whether this host has recorded that it inherits a protection of this machine, which an earlier daemon
    /// prepared.
    pub(crate) fn is_inheriting(&self, name: &MachineName) -> bool {
        !self.undecided_records(name).is_empty()
    }

    /// Removes the records of an incoming machine that never was this host's.
    pub(crate) fn remove_inherited(&self, record: &Record) {
        self.undecided_records(&record.name).iter().for_each(|note| self.remove_record(note.id));
    }
}
