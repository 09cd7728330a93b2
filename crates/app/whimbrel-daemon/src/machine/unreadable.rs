//! Machines whose records cannot be read: their names stay taken, and nothing of them is removed until a user
//! restores the record or deletes what is left.
//!
//! What such a machine needs is unknown. So garbage is not collected, runtime directories are not swept, and
//! no other host is told how a handover ended, as long as there is one.

use crate::{
    core::{directories::Directories, error::DaemonError},
    machine::{folder, record},
};
use std::{collections::BTreeMap, sync::Mutex};
use whimbrel_api::{MachineInfo, MachineState};
use whimbrel_core::{Accel, ByteSize, MachineName, lock};

/// Names of these machines, and why their records cannot be read.
#[derive(Default)]
pub(crate) struct UnreadableMachines(Mutex<BTreeMap<MachineName, String>>);

impl UnreadableMachines {
    pub(crate) fn set(&self, machines: BTreeMap<MachineName, String>) {
        *lock(&self.0) = machines;
    }

    /// Adds a machine that was read, and of which it cannot be known who may run it.
    pub(crate) fn add(&self, name: MachineName, reason: String) {
        lock(&self.0).insert(name, reason);
    }

    /// Refuses the name of such a machine.
    pub(crate) fn check(&self, name: &MachineName) -> Result<(), DaemonError> {
        lock(&self.0).get(name).map_or(Ok(()), |reason| Err(refusal(name, reason)))
    }

    /// Refuses what must know all machines of this host.
    pub(crate) fn check_none(&self) -> Result<(), DaemonError> {
        lock(&self.0).first_key_value().map_or(Ok(()), |(name, reason)| Err(refusal(name, reason)))
    }

    /// Descriptions as `ps` shows them.
    pub(crate) fn infos(&self) -> Vec<MachineInfo> {
        lock(&self.0).iter().map(|(name, reason)| describe(name, reason)).collect()
    }

    /// Deletes what is left of such a machine.
    pub(crate) fn delete(&self, layout: &Directories, name: &MachineName) -> Result<(), DaemonError> {
        let mut machines = lock(&self.0);
        if !machines.contains_key(name) {
            return Err(DaemonError::invalid(format!("{name} is no machine with an unreadable record")));
        }
        // Removed first, so that it is not found in the trash, where it might be that of a machine that left.
        let path = record::path(&layout.machine(name));
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(DaemonError::io("remove", &path, error));
            }
            _ => folder::delete(layout, name)?,
        }
        machines.remove(name);
        Ok(())
    }
}

fn refusal(name: &MachineName, reason: &str) -> DaemonError {
    DaemonError::UnreadableRecord { name: name.clone(), reason: reason.to_owned() }
}

fn describe(name: &MachineName, reason: &str) -> MachineInfo {
    MachineInfo {
        name: name.clone(),
        state: MachineState::Unreadable { reason: reason.to_owned() },
        memory: ByteSize(0),
        cpus: 0,
        accel: Accel::Tcg,
        disks: Vec::new(),
        nics: Vec::new(),
        pid: None,
        process: None,
        since_ms: crate::now_ms(),
        origin: None,
        follows: None,
        operation: None,
        vmgenid: None,
        tunnel: None,
        protection: None,
        taken_over: None,
        uploads: None,
        settings: whimbrel_api::MachineSettings::default(),
        display: false,
        restarts: None,
        failed_care: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        daemon::Daemon,
        machine::{
            entry::Machine,
            record::{DiskBase, Phase, Record},
        },
    };
    use std::{
        fs, io,
        path::{Path, PathBuf},
        sync::Arc,
        time::{Duration, Instant},
    };
    use tokio::runtime::Runtime;
    use whimbrel_api::{ErrorCode, Operation, OperationState};
    use whimbrel_core::{CapsuleId, MachineConfig, PageRun, RefName};
    use whimbrel_image::{FORMAT, ImageRef, Manifest};
    use whimbrel_store::Expected;

    fn layout(dir: &Path) -> Directories {
        Directories::create(&dir.join("data"), &dir.join("run")).expect("directories")
    }

    fn daemon(dir: &Path, runtime: &Runtime) -> Arc<Daemon> {
        let name = "alpha".parse().expect("a name");
        let images = crate::image::ImageSources::new(Vec::new(), Default::default()).expect("no sources");
        let host =
            Daemon::open((name, None), layout(dir), Vec::new(), images, None, runtime.handle().clone())
                .expect("a daemon");
        host.recover_machines(true).expect("the folders can be listed");
        host
    }

    fn config() -> MachineConfig {
        MachineConfig::minimal(ByteSize(1 << 20))
    }

    fn record(name: &str, phase: Phase) -> Record {
        let mut record = Record::new(name.parse().expect("a name"), config(), vec![]);
        record.phase = phase;
        record
    }

    fn collect(host: &Arc<Daemon>) -> OperationState {
        let Operation { id, .. } = host.gc();
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let state = host.operations().watch(id).expect("the operation").borrow().state.clone();
            if state != OperationState::Running {
                return state;
            }
            assert!(Instant::now() < deadline, "the collection does not end");
            std::thread::yield_now();
        }
    }

    fn files(dir: &Path) -> io::Result<BTreeMap<PathBuf, Vec<u8>>> {
        let mut found = BTreeMap::new();
        for entry in fs::read_dir(dir)? {
            let path = entry?.path();
            match path.is_dir() {
                true => found.extend(files(&path)?),
                false => drop(found.insert(path.clone(), fs::read(&path)?)),
            }
        }
        Ok(found)
    }

    /// Each kind of damage: the record's text before, and after it; none removes the file.
    fn damages(text: &str) -> [(&'static str, Option<String>); 6] {
        [
            ("damaged", Some(text.replacen("\"name\"", "\"nbme\"", 1))),
            ("truncated", Some(text[..text.len() / 2].to_owned())),
            ("empty", Some(String::new())),
            ("newer", Some(String::from(r#"{"format": 2, "machine": {"title": "web"}}"#))),
            ("of another machine", Some(text.replacen("\"web\"", "\"wab\"", 1))),
            ("missing", None),
        ]
    }

    #[test]
    fn a_machine_whose_record_is_unreadable_hides_no_other_and_loses_nothing() {
        let runtime = Runtime::new().expect("a runtime");
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
        let layout = layout(dir.path());
        let (web, db): (MachineName, MachineName) =
            ("web".parse().expect("a name"), "db".parse().expect("a name"));
        for name in ["web", "db"] {
            record(name, Phase::Stopped).save(&layout).expect("a record");
        }
        let (folder, path) = (layout.machine(&web), layout.machine(&web).join("machine.json"));
        fs::create_dir(folder.join("disk0")).expect("a disk");
        fs::write(folder.join("disk0/data"), "written by the guest").expect("a disk");
        let slot = layout.runtime_dir("0123456789abcdef");
        fs::create_dir_all(&slot).expect("a runtime directory");
        let text = fs::read_to_string(&path).expect("a record");

        for (kind, damaged) in damages(&text) {
            match damaged {
                Some(text) => fs::write(&path, text).expect("a damaged record"),
                None => fs::remove_file(&path).expect("no record"),
            }
            let before = files(&folder).expect("the folder");
            let host = daemon(dir.path(), &runtime);
            let states: Vec<_> = host.machine_infos().into_iter().map(|one| (one.name, one.state)).collect();
            assert!(states.contains(&(db.clone(), MachineState::Stopped)), "{kind}: {states:?}");
            let is_web = |(name, state): &(MachineName, MachineState)| {
                *name == web && matches!(state, MachineState::Unreadable { reason } if !reason.is_empty())
            };
            assert!(states.iter().any(is_web), "{kind}: {states:?}");
            assert!(
                host.machines.reserve(&web, false).is_err() && host.machines.reserve(&web, true).is_err()
            );
            assert!(folder::prepare(&layout, &web).is_err() || path.exists(), "{kind}: it starts over it");
            assert!(host.delete(&web).is_err() && host.start(&web).is_err(), "{kind}");
            let OperationState::Failed { error } = collect(&host) else { panic!("{kind}: collected") };
            assert_eq!(error.code, ErrorCode::Damaged);
            assert!(error.message.contains("web"), "{kind}: {error:?}");
            assert!(error.hint.is_some_and(|hint| hint.contains("whimbrel delete --unreadable web")));
            assert_eq!(files(&folder).expect("the folder"), before, "{kind}");
            assert!(slot.exists(), "{kind}: a runtime directory whose owner is not known is gone");
        }

        fs::write(&path, &text).expect("a restored record");
        let host = daemon(dir.path(), &runtime);
        assert_eq!(host.machines.get(&web).expect("the machine").info().state, MachineState::Stopped);
        assert!(matches!(collect(&host), OperationState::Succeeded { .. }));
        assert!(!slot.exists());
        fs::remove_file(&path).expect("no record");
        let host = daemon(dir.path(), &runtime);
        assert!(host.machines.unreadable.delete(&layout, &db).is_err(), "a readable one");
        host.machines.unreadable.delete(&layout, &web).expect("deleted");
        assert!(!folder.exists());
        assert!(matches!(collect(&host), OperationState::Succeeded { .. }));
    }

    #[test]
    fn what_an_interrupted_start_left_is_removed_and_in_no_way() {
        let runtime = Runtime::new().expect("a runtime");
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
        let (layout, web) = (layout(dir.path()), "web".parse().expect("a name"));
        folder::prepare(&layout, &web).expect("a folder");
        fs::write(layout.console_log(&web), "boot").expect("a log");
        folder::prepare(&layout, &web).expect("a start that failed is in no way");
        let host = daemon(dir.path(), &runtime);
        assert!(host.machine_infos().is_empty() && host.machines.unreadable.check_none().is_ok());
        assert!(!layout.machine(&web).exists());
        assert!(files(&layout.trash()).expect("the trash").is_empty());

        folder::prepare(&layout, &web).expect("a folder");
        record("web", Phase::Stopped).save(&layout).expect("a record");
        fs::remove_file(layout.machine(&web).join("machine.json")).expect("no record");
        let host = daemon(dir.path(), &runtime);
        assert!(
            host.machines.unreadable.check(&web).is_err(),
            "a machine that lost its record is no garbage"
        );
    }

    fn capsule(host: &Daemon, seed: u8) -> (CapsuleId, Option<whimbrel_core::Digest>) {
        let writer = host.store.writer().expect("a writer");
        let mut image = writer.image(None, 4).expect("an image");
        image.put(PageRun::new(0, 1), &[seed; 4096]).expect("a page");
        let image = image.finish().expect("an image");
        let images = vec![ImageRef { name: "memory".into(), pages: 4, root: image.root, cuts: None }];
        let manifest = Manifest {
            format: FORMAT,
            machine: config(),
            device: vec![],
            images,
            parents: vec![],
            time: seed.into(),
            host: "alpha".into(),
            labels: BTreeMap::new(),
            working_set: None,
        };
        let tag: RefName = "taken".parse().expect("a name");
        let id = writer.commit(&manifest, std::slice::from_ref(&tag)).expect("a capsule");
        host.store.delete_ref(&tag, Expected::Anything).expect("a ref");
        (id, image.root)
    }

    #[test]
    fn what_a_listed_machine_needs_is_never_collected() {
        let runtime = Runtime::new().expect("a runtime");
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
        let host = daemon(dir.path(), &runtime);
        let beta = || "beta".parse().expect("a name");
        let handover = whimbrel_migrate::protocol::HandoverId([7; 16]);
        type OfCapsule = Box<dyn Fn(CapsuleId) -> Phase>;
        let phases: [OfCapsule; 7] = [
            Box::new(|capsule| Phase::Suspended { capsule }),
            Box::new(move |capsule| Phase::Given { to: beta(), capsule }),
            Box::new(|_| Phase::Stopped),
            Box::new(|_| Phase::Crashed { reason: "killed".into() }),
            Box::new(|_| Phase::Here),
            Box::new(move |_| Phase::HandedOver { handover, to: beta(), keeps: true }),
            Box::new(move |_| Phase::Prepared { handover, ahead: false, never_ran: false, handed_off: None }),
        ];
        let mut needed = Vec::new();
        for (number, phase) in phases.iter().enumerate() {
            let (id, root) = capsule(&host, number as u8 + 1);
            let phase = phase(id);
            let mut record = record(&format!("m{number}"), phase.clone());
            if !matches!(phase, Phase::Suspended { .. } | Phase::Given { .. }) {
                record.origin = Some(id);
                record.bases = vec![DiskBase::image(root.expect("a root"), None)];
            }
            host.machines.insert(Machine::new(record, None));
            needed.push((id, phase));
        }
        let (garbage, _) = capsule(&host, 100);
        assert!(matches!(collect(&host), OperationState::Succeeded { .. }));
        for (id, phase) in needed {
            assert!(host.store.is_complete(&id).is_ok_and(|complete| complete), "{phase:?}");
        }
        assert!(host.store.manifest(&garbage).is_err(), "nothing was collected");
    }
}
