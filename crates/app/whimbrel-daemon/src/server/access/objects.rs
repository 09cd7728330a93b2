//! Objects of requests: the machines, capsules and files that parameters and bodies are about.
//!
//! A parameter or body reaches a handler only through an extractor that judges what [`Named`] says of it, so
//! a new type of request does not build before it says what it names.

use crate::{
    core::refs,
    daemon::Daemon,
    server::access::{
        gate::Asker,
        may::{Object, may},
    },
};
use std::path::PathBuf;
use whimbrel_api::*;
use whimbrel_core::{HostName, MachineName, RefName};

/// An object that a request names, as the user names it.
#[derive(Debug, Clone)]
pub(crate) enum Subject {
    Machine(MachineName),
    /// A tag to set.
    NewTag(RefName),
    /// A tag, or the newest capsule of a machine, by its ref.
    Ref(RefName),
    Capsule(CapsuleRef),
    /// The machine that a capsule was taken from, which gives its name to a new one.
    MachineOf(CapsuleRef),
    /// A capsule on another host or in a pool.
    Elsewhere(CapsuleRef),
    /// A machine, or else a capsule.
    MachineOrCapsule(CapsuleRef),
    File(PathBuf),
    Operation(OperationId),
    /// A schedule: the machine that it is about, or everything.
    Schedule(MachineName),
    Everything,
}

use Subject::*;

/// A part of a request that names objects.
pub(crate) trait Named {
    fn named(&self) -> Vec<Subject>;
}

macro_rules! named {
    ($($kind:ty: |$it:pat_param| $subjects:expr;)*) => {
        $(impl Named for $kind {
            fn named(&self) -> Vec<Subject> {
                let $it = self;
                $subjects
            }
        })*
    };
}

named! {
    MachineName: |name| vec![Machine(name.clone())];
    CapsuleRef: |capsule| vec![Capsule(capsule.clone())];
    (CapsuleRef, CapsuleRef): |(a, b)| vec![Capsule(a.clone()), Capsule(b.clone())];
    OperationId: |id| vec![Operation(*id)];
    // Calls with a host, and those of the last three lines, are for everything (`endpoints`).
    HostName: |_| vec![];
    RunRequest: |it| {
        let disks = it.disks.iter().map(|disk| &disk.path).chain(&it.cdroms);
        let paths = disks.chain(&it.kernel).chain(&it.initrd);
        [Machine(it.name.clone())].into_iter().chain(paths.cloned().map(File)).collect()
    };
    CheckpointRequest: |it| it.tag.iter().cloned().map(NewTag).collect();
    SuspendRequest: |it| it.tag.iter().cloned().map(NewTag).collect();
    RewindRequest: |it| vec![Capsule(it.capsule.clone())];
    TagRequest: |it| vec![Capsule(it.capsule.clone())];
    ExportRequest: |it| vec![Capsule(it.capsule.clone()), File(it.path.clone())];
    ImportRequest: |it| vec![NewTag(it.name.clone()), File(it.path.clone())];
    DeriveRequest: |it| vec![Capsule(it.capsule.clone()), Machine(it.name.clone())];
    ResumeRequest: |it| resumed(it);
    CloneRequest: |it| cloned(it);
    PromoteRequest: |it| promoted(it);
    PullRequest: |it| {
        let own = it.tag.clone().map_or_else(|| pulled_as(&it.capsule), NewTag);
        vec![Elsewhere(it.capsule.clone()), own]
    };
    ImagePullRequest: |it| vec![NewTag(it.name.tag())];
    PushRequest: |it| vec![MachineOrCapsule(it.subject.clone())];
    // About the machine of their path too, which is judged there.
    SettingsRequest: |it| it.hardware.add_cdroms.iter().cloned().map(File).collect();
    // About nothing but that machine.
    StopRequest: |_| vec![];
    BalloonRequest: |_| vec![];
    MigrateRequest: |_| vec![];
    ProtectRequest: |_| vec![];
    FailoverRequest: |_| vec![];
    ResolveRequest: |_| vec![];
    PortsRequest: |_| vec![];
    ExecRequest: |_| vec![];
    FileReadRequest: |_| vec![];
    FileWriteRequest: |_| vec![];
    RenameRequest: |it| vec![Machine(it.to.clone())];
    ScheduleRunRequest: |_| vec![];
    ScheduleRequest: |it| vec![it.work.machine().cloned().map_or(Everything, Machine)];
    DirtyTraceRequest: |_| vec![];
    CacheAddRequest: |_| vec![Everything];
    KeyChangeRequest: |_| vec![Everything];
    EvacuateRequest: |_| vec![Everything];
    CpuBaselineRequest: |_| vec![Everything];
    MatchRequest: |_| vec![Everything];
    RepairRequest: |_| vec![Everything];
    BucketRequest: |_| vec![Everything];
    NetworkRequest: |_| vec![Everything];
    NetworkHostsRequest: |_| vec![Everything];
    RefRights: |_| vec![Everything];
    TokenRequest: |_| vec![Everything];
    TrustEntry: |_| vec![Everything];
}

fn resumed(request: &ResumeRequest) -> Vec<Subject> {
    let elsewhere = request.host.is_some() || request.pool.is_some();
    let capsule = request.capsule.clone();
    let name = match (&request.name, &capsule) {
        (Some(name), _) => Machine(name.clone()),
        (None, CapsuleRef::Past(past)) => Machine(past.machine.clone()),
        (None, _) => MachineOf(capsule.clone()),
    };
    vec![if elsewhere { Elsewhere(capsule) } else { Capsule(capsule) }, name]
}

fn cloned(request: &CloneRequest) -> Vec<Subject> {
    let Some(prefix) = &request.prefix else {
        // The names are those of the machine with numbers, which a pattern need not match.
        return vec![Capsule(request.capsule.clone()), Everything];
    };
    // A larger count is refused before anything is made.
    let numbers = 1..=request.count.min(1000);
    let names = numbers.filter_map(|number| format!("{prefix}-{number}").parse().ok()).map(Machine);
    [Capsule(request.capsule.clone())].into_iter().chain(names).collect()
}

fn promoted(request: &PromoteRequest) -> Vec<Subject> {
    let moved = match (&request.tag, &request.capsule) {
        _ if request.all_refs => Everything,
        (Some(tag), _) => NewTag(tag.clone()),
        (None, CapsuleRef::Name(name)) => Ref(name.clone()),
        (None, _) => return vec![Capsule(request.capsule.clone())],
    };
    vec![Capsule(request.capsule.clone()), moved]
}

/// The ref that a pull without a tag sets.
fn pulled_as(capsule: &CapsuleRef) -> Subject {
    match capsule {
        CapsuleRef::Name(name) => NewTag(name.clone()),
        CapsuleRef::Id(_) | CapsuleRef::Past(_) => Everything,
    }
}

impl Asker {
    /// Judges one object that the request names. Reads refs and manifests for callers with a scope.
    pub(crate) fn judge(&self, host: &Daemon, subject: &Subject) -> Result<(), ApiError> {
        match subject {
            Machine(name) => self.may(Object::Machine(name)),
            NewTag(name) => self.may(Object::Ref(name)),
            File(path) => self.may(Object::File(path)),
            Everything => self.may(Object::Everything),
            Schedule(name) => match host.schedules.machine_of(name) {
                Some(Some(machine)) => self.may(Object::Machine(&machine)),
                Some(None) => self.may(Object::Everything),
                // Everybody may know that there is none.
                None => self.may(Object::Host),
            },
            Ref(name) => {
                let stored = refs::named(&host.store, &CapsuleRef::Name(name.clone())).ok().flatten();
                self.may(Object::Ref(stored.as_ref().unwrap_or(name)))
            }
            Capsule(capsule) => self.judge_capsule(host, capsule),
            MachineOf(capsule) => match self.found(host, capsule).and_then(|(_, machine)| machine) {
                Some(machine) => self.may(Object::Machine(&machine)),
                None => self.may(Object::Everything),
            },
            Elsewhere(capsule) => self.judge_name(capsule),
            MachineOrCapsule(CapsuleRef::Name(name)) => {
                let capsule = CapsuleRef::Name(name.clone());
                match name.as_str().parse() {
                    Ok(machine) if host.machines.get(&machine).is_ok() => {
                        self.may(Object::Machine(&machine))?;
                        // A tag of the same name may be meant, too.
                        let is_capsule = refs::resolve(&host.store, &capsule).is_ok();
                        if is_capsule { self.judge_capsule(host, &capsule) } else { Ok(()) }
                    }
                    _ => self.judge_capsule(host, &capsule),
                }
            }
            MachineOrCapsule(capsule) => self.judge_capsule(host, capsule),
            Operation(id) => match host.operations().watch(*id) {
                Ok(operation) => self.judge_operation(host, &operation.borrow()),
                // Everybody may know that there is none.
                Err(_) => self.may(Object::Host),
            },
        }
    }

    fn judge_capsule(&self, host: &Daemon, capsule: &CapsuleRef) -> Result<(), ApiError> {
        if self.identity.scope.is_all() {
            // Nothing needs to be looked up; the text is for the log.
            self.noted(format!("capsule {capsule}"));
            return may(&self.identity, self.action(), Object::Host);
        }
        match (self.found(host, capsule), capsule) {
            (Some((refs, machine)), _) => {
                self.may(Object::Capsule { refs: &refs, machine: machine.as_ref() })
            }
            (None, CapsuleRef::Past(past)) => self.may(Object::Machine(&past.machine)),
            (None, CapsuleRef::Name(name)) => self.may(Object::Ref(name)),
            (None, CapsuleRef::Id(_)) => self.may(Object::Capsule { refs: &[], machine: None }),
        }
    }

    /// Judges by the name alone, as a tag and as a machine: what it names is elsewhere.
    fn judge_name(&self, capsule: &CapsuleRef) -> Result<(), ApiError> {
        match capsule {
            CapsuleRef::Past(past) => self.may(Object::Machine(&past.machine)),
            CapsuleRef::Id(_) => self.may(Object::Everything),
            CapsuleRef::Name(name) => {
                let machine: Option<MachineName> = name.as_str().parse().ok();
                let refs = std::slice::from_ref(name);
                self.may(Object::Capsule { refs, machine: machine.as_ref() })
            }
        }
    }

    pub(crate) fn judge_operation(
        &self,
        host: &Daemon,
        operation: &whimbrel_api::Operation,
    ) -> Result<(), ApiError> {
        self.judge_work(host, operation.kind, &operation.subject)
    }

    /// Judges an operation by its kind and what it is about.
    pub(crate) fn judge_work(
        &self,
        host: &Daemon,
        kind: OperationKind,
        subject: &str,
    ) -> Result<(), ApiError> {
        use OperationKind as Kind;
        match kind {
            Kind::Checkpoint
            | Kind::Suspend
            | Kind::Rewind
            | Kind::Migrate
            | Kind::Protect
            | Kind::Failover => match subject.parse() {
                Ok(machine) => self.may(Object::Machine(&machine)),
                Err(_) => self.may(Object::Everything),
            },
            Kind::Resume | Kind::Clone | Kind::Export | Kind::Pull | Kind::Push => match subject.parse() {
                // The capsule may have gone, or be elsewhere.
                Ok(capsule) => self.judge_capsule(host, &capsule).or_else(|_| self.judge_name(&capsule)),
                Err(_) => self.may(Object::Everything),
            },
            Kind::Evacuate
            | Kind::Bucket
            | Kind::Gc
            | Kind::Verify
            | Kind::Repair
            | Kind::Seal
            | Kind::Import
            | Kind::Cache => self.may(Object::Everything),
        }
    }

    /// The refs of a capsule, and the machine that it was taken from.
    fn found(&self, host: &Daemon, capsule: &CapsuleRef) -> Option<(Vec<RefName>, Option<MachineName>)> {
        let id = refs::resolve(&host.store, capsule).ok()?;
        let (names, _) = host.store.readable_refs().ok()?;
        let refs = names.into_iter().filter(|(_, named)| *named == id).map(|(name, _)| name).collect();
        let manifest = host.store.manifest(&id).ok();
        Some((refs, manifest.and_then(|manifest| refs::machine_of(&manifest).ok())))
    }
}
