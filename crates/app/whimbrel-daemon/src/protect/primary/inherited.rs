//! The target's part of a move with a third host behind it: the protection that it inherits.
//!
//! The standby is whole as of the pause when the machine is committed to this host. From then on epochs of
//! what is written here go there, and output waits for them, until the last missing page has come. Then the
//! protection ends.
//!
//! Its note is durable before the source hears that this host is ready. The machine's turn is taken, and the
//! machine let run, by the thread that protects it: nobody works on it in between. If the pages that are
//! missing cannot be had, its QEMU is ended, which gives the machine to the third host, and frees whoever
//! waits for those pages.

use super::{handle::ProtectionHandle, heartbeat::Heartbeat, run};
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
use whimbrel_net::HoldLimits;
use whimbrel_protect::{clock::BootTime, inherited_primary, lease, protocol::ProtectionId};
use whimbrel_qemu::{ProcessIdentity, QemuProcess};

/// How long the pages that are missing may not come before the machine is given to the third host.
const SOURCE_PATIENCE: Duration = Duration::from_secs(5);
/// The same while nothing is known to be wrong: over a link that is slow enough a message may take that long.
const SILENT_PATIENCE: Duration = Duration::from_secs(30);
/// How often is looked whether they do.
const LOOK: Duration = Duration::from_millis(50);
/// How long the standby's first promise is waited for.
const FIRST_PROMISE: Duration = Duration::from_secs(1);

/// A protection that this host inherits with a machine that is on its way here.
pub(crate) struct InheritedProtection {
    pub(in crate::protect) id: ProtectionId,
    handover: HandoverId,
    name: MachineName,
    settings: ProtectionSettings,
    pub(in crate::protect) link: Arc<PageLink>,
    standby: Arc<ControlLink>,
}

impl InheritedProtection {
    /// What an offer says of it, checked: this host can reach the other two.
    pub(crate) fn expect(host: &Arc<Daemon>, offer: &Offer) -> Result<Option<Self>, DaemonError> {
        let Some(third) = &offer.third else { return Ok(None) };
        let unreadable = |error| {
            DaemonError::invalid(format!("how the machine is to be protected cannot be read: {error}"))
        };
        let request: ProtectRequest = serde_json::from_str(&third.request).map_err(unreadable)?;
        let settings = ProtectionSettings::of(&request)?;
        if request.host == host.name || settings.replay || settings.keep.is_some() {
            return Err(DaemonError::invalid("a protection that cannot be inherited"));
        }
        for other in [Some(&request.host), request.witness.as_ref().and_then(WitnessAddress::host)] {
            other.map(|other| host.route(other)).transpose()?;
        }
        let link = Arc::new(PageLink::connect(host, &request.host, settings.rate_max)?);
        let standby = Arc::new(ControlLink::new(host, &request.host));
        standby.warm();
        let (id, name) = (ProtectionId(third.protection), offer.name.clone());
        Ok(Some(Self { id, handover: third.handover, name, settings, link, standby }))
    }

    /// Writes down, before the source hears that the machine is here, whose heir this host is.
    pub(crate) fn note(&self, host: &Daemon) -> Result<(), DaemonError> {
        let side = ProtectionSide::Primary { request: self.settings.request.clone(), gave_up: false };
        host.protecting.put_note(ProtectionRecord::new(self.id, &self.name, self.handover, side))
    }

    /// What is written from now on is what the third host lacks. Before the devices are loaded, which may
    /// write.
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
        lock(&host.protecting.guards).insert(self.name.clone(), guard.clone());
        let (runs, hears) = mpsc::channel();
        let (host, machine) = (host.clone(), machine.clone());
        let layout = host.layout.clone();
        let work = move || run::inherit(&host, &machine, &guard, self, &runs);
        let thread = thread::Builder::new().name("protect".into()).spawn(work);
        thread.map_err(|source| DaemonError::io("start a thread for", layout.data(), source))?;
        // A thread that could not let it run has done what follows from that.
        Ok(hears.recv().ok())
    }

    /// Its lease, of which nothing is granted yet.
    pub(in crate::protect) fn beats(
        &self,
        host: &Arc<Daemon>,
        guard: &Arc<ProtectionHandle>,
        ports: Ports,
    ) -> Arc<Heartbeat> {
        let term = self.settings.term;
        let witness = self.settings.request.witness.as_ref();
        let witness = witness.map(|witness| WitnessClient::new(host, witness, self.id, term));
        Arc::new(Heartbeat::new(
            self.id,
            lease::PrimaryLease::initial(true, term),
            term,
            (self.standby.clone(), witness),
            (ports, Arc::downgrade(&self.link)),
            Arc::downgrade(guard),
        ))
    }
}

type Ports = Vec<std::sync::Weak<whimbrel_net::Port>>;

/// Holds all output, and asks the standby until it promises not to take over yet.
pub(in crate::protect) fn hold(beats: &Heartbeat) {
    beats.ports().for_each(|port| port.hold(HoldLimits::default()));
    beats.arm();
    let begun = Instant::now();
    while !beats.may_run() && begun.elapsed() < FIRST_PROMISE {
        beats.send_heartbeat();
    }
}

/// Ends the QEMU of an heir whose pages cannot be had, as long as this lives.
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
            if !waits_for_nothing(&taking, &beats, &over) {
                return;
            }
            tracing::error!(from = %taking.from(), to = %beats.standby.to(), "the pages that a machine lacks cannot be had: it is given to the host that has all of it");
            QemuProcess::adopt(process, &log).into_iter().for_each(|qemu| qemu.kill());
        };
        if let Err(error) = thread::Builder::new().name("source-watch".into()).spawn(work) {
            tracing::error!(%error, "no thread to look after the host that keeps pages");
        }
        watch
    }
}

impl Drop for SourceWatch {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Returns true when pages have not come for too long and the standby lives; false when there is nothing to
/// watch any more.
fn waits_for_nothing(taking: &PageFetcher, beats: &Heartbeat, over: &AtomicBool) -> bool {
    let (mut missing, mut since) = (None, Instant::now());
    while !over.load(Ordering::Acquire) {
        thread::sleep(LOOK);
        let view = taking.status();
        if missing != Some(view.stand.missing) {
            (missing, since) = (Some(view.stand.missing), Instant::now());
        }
        // A host that is gone without a word still looks connected for a while.
        let is_known = !view.connected || view.stalled.is_some();
        let patience = if is_known { SOURCE_PATIENCE } else { SILENT_PATIENCE };
        let lacks = view.stand.missing > 0 && since.elapsed() > patience;
        if lacks && inherited_primary::yields(&beats.lease(), BootTime::now()) {
            return !over.load(Ordering::Acquire);
        }
    }
    false
}

impl crate::protect::Protections {
    /// Whether this host is noted as the heir of a protection of this machine, which an earlier daemon had
    /// prepared.
    pub(crate) fn is_heir(&self, name: &MachineName) -> bool {
        !self.unsettled(name).is_empty()
    }

    /// A machine that was on its way here never was this host's: it inherits nothing.
    pub(crate) fn inherits_nothing(&self, record: &Record) {
        self.unsettled(&record.name).iter().for_each(|note| self.remove_note(note.id));
    }
}
