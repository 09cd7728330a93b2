//! Rename of a machine that does not run: its folder, its capsules, and whatever else of this host knows it
//! by its name.
//!
//! The rename of the folder is the instant from which the machine has its new name. Before it, only names in
//! the store are added, and a failure takes them back. After it, the record says what the machine was called
//! until everything else has the new name as well; each step may be repeated, and a starting daemon does what
//! is left. Meanwhile nobody gets the former name.

use crate::{
    core::{error::DaemonError, history, refs},
    daemon::Daemon,
    machine::{
        entry::Machine,
        record::{DiskBase, Phase, Record},
        registry::NameReservation,
    },
};
use std::{fs, path::Path};
use whimbrel_api::{MachineInfo, RenameRequest};
use whimbrel_core::{CapsuleId, MachineName, RefName};
use whimbrel_image::Manifest;
use whimbrel_store::{Expected, Store, StoreError};
use whimbrel_wire::atomic_file;

impl Daemon {
    /// Gives another name to a machine that is off or suspended.
    pub(crate) fn rename(
        &self,
        name: &MachineName,
        request: &RenameRequest,
    ) -> Result<MachineInfo, DaemonError> {
        let to = &request.to;
        let machine = self.machines.get(name)?;
        let _free = self.machines.reserve(to, false)?;
        let turn = machine.try_lock("rename", None)?;
        self.machines.check_current(&machine)?;
        if turn.running.is_some() {
            let (name, state) = (name.clone(), turn.record.phase.name());
            return Err(DaemonError::State { name, state, needed: "stopped or suspended" });
        }
        self.check_renamable(&turn.record, to)?;
        let (after, added) = self.name_capsules(&turn.record, to)?;
        let moved = self.move_folder(&turn.record, &after);
        moved.inspect_err(|_| added.iter().for_each(|(name, id)| self.take_back(name, *id)))?;
        machine.retire();
        let renamed = Machine::new(after.clone(), None);
        let _steady = self.networks.hold_steady();
        let (renamed, former) = self.machines.rename(name, renamed);
        let mut turn = renamed.lock("rename");
        if let Err(source) = self.finish_rename(&mut turn.record) {
            // What still has the former name must not become that of another machine.
            former.leak();
            let (from, to) = (name.clone(), to.clone());
            return Err(DaemonError::HalfRenamed { from, to, source: Box::new(source) });
        }
        drop(turn);
        Ok(renamed.info())
    }

    /// Finishes renames that an earlier daemon has begun.
    pub(crate) fn finish_renames(&self) {
        // A machine that its own process has runs, and is left there.
        for machine in self.machines.all().into_iter().filter(|machine| !machine.is_with_process()) {
            // One that is busy runs or is between two hosts, and was not being renamed.
            let Ok(mut turn) = machine.try_lock_in_any_phase("rename", None) else { continue };
            let Some(was) = turn.record.was.clone() else { continue };
            let former = self.machines.reserve(&was, false);
            if let Err(error) = self.finish_rename(&mut turn.record) {
                let error = &error as &dyn std::error::Error;
                tracing::error!(machine = %machine.name(), %was, error, "a rename is not finished");
                former.into_iter().for_each(NameReservation::leak);
            }
        }
    }

    fn check_renamable(&self, record: &Record, to: &MachineName) -> Result<(), DaemonError> {
        let name = &record.name;
        if !matches!(record.phase, Phase::Stopped | Phase::Crashed { .. } | Phase::Suspended { .. }) {
            let state = record.phase.name();
            return Err(DaemonError::State { name: name.clone(), state, needed: "stopped or suspended" });
        }
        if let Some(owed) = &record.owed {
            return Err(DaemonError::MissingPages { name: name.clone(), from: owed.from.clone() });
        }
        let elsewhere = if self.protections.may_be_elsewhere(name) {
            Some("its standby knows it by its name: `whimbrel unprotect` first".to_owned())
        } else if let Some(network) = &record.tunnel {
            Some(format!("{} has its network and knows it by its name", network.home))
        } else {
            [name, to]
                .into_iter()
                .find(|name| self.is_unfiltered(name))
                .map(|name| format!("the daemon's option --unfiltered names {name}"))
        };
        match elsewhere {
            Some(why) => Err(DaemonError::invalid(format!("{name} cannot be renamed now: {why}"))),
            None => Ok(()),
        }
    }

    /// Names the capsules of a machine by its new name as well. Returns its record under that name, and the
    /// names that were added. A failure adds none.
    fn name_capsules(&self, before: &Record, to: &MachineName) -> Result<(Record, Added), DaemonError> {
        let names = names_of(&self.store, &before.name, to)?;
        let mut after = before.clone();
        (after.name, after.was) = (to.clone(), Some(before.name.clone()));
        let folders = (self.directories.machine(&before.name), self.directories.machine(to));
        relocate(&mut after, &folders.0, &folders.1);
        let mut added = Added::new();
        for (name, id) in names {
            let named = if name == refs::machine_ref(to) {
                self.relabel(&mut after, id)
            } else {
                let set = self.store.set_ref(&name, &id, Expected::Absent);
                set.map_err(refs::store_error("name a capsule")).map(|()| id)
            };
            match named {
                Ok(id) => added.push((name, id)),
                Err(error) => {
                    added.iter().for_each(|(name, id)| self.take_back(name, *id));
                    return Err(error);
                }
            }
        }
        Ok((after, added))
    }

    /// The newest capsule under the new name of its machine. Capsules say whose they are, and a resume, here
    /// or on another host, goes by that. The images are the same, so nothing is copied.
    fn relabel(&self, record: &mut Record, was: CapsuleId) -> Result<CapsuleId, DaemonError> {
        let failed = refs::store_error("write the capsule");
        if self.is_partial(&was) {
            return Err(DaemonError::invalid(format!(
                "some pages of the capsule {} are still on another host: `whimbrel pull {}` fetches them",
                was.short(),
                was.short()
            )));
        }
        let _whole = self.store.pin(&was).map_err(refs::store_error("read the capsule"))?;
        let manifest = self.store.manifest(&was).map_err(refs::store_error("read the capsule"))?;
        let mut manifest = Manifest { parents: vec![was], time: crate::now_ms(), ..manifest };
        manifest.labels.insert(refs::MACHINE_LABEL.to_owned(), record.name.to_string());
        let writer = self.store.writer().map_err(&failed)?;
        let capsule = writer.commit(&manifest, &[refs::machine_ref(&record.name)]).map_err(&failed)?;
        if record.last == Some(was) {
            record.last = Some(capsule);
        }
        if let Phase::Suspended { capsule: suspended } = &mut record.phase
            && *suspended == was
        {
            *suspended = capsule;
        }
        Ok(capsule)
    }

    fn take_back(&self, name: &RefName, id: CapsuleId) {
        if let Err(error) = self.store.delete_ref(name, Expected::Capsule(id)) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(%name, error, "a name of a rename that failed stays");
        }
    }

    /// Moves the folder, after which the machine has its new name. A failure leaves it as it was.
    fn move_folder(&self, before: &Record, after: &Record) -> Result<(), DaemonError> {
        let (old, new) = (self.directories.machine(&before.name), self.directories.machine(&after.name));
        let machines = self.directories.machines();
        let moved = after.save_in(&old).and_then(|()| {
            move_to_new(&old, &new)
                .and_then(|()| atomic_file::sync_dir(&machines))
                .map_err(|source| DaemonError::io("rename", &old, source))
        });
        moved.or_else(|error| {
            if new.exists() && !old.exists() {
                move_to_new(&new, &old).map_err(|source| DaemonError::io("rename", &new, source))?;
            }
            before.save(&self.directories)?;
            Err(error)
        })
    }

    /// Gives the new name to everything else that has the former one.
    fn finish_rename(&self, record: &mut Record) -> Result<(), DaemonError> {
        let Some(was) = record.was.clone() else { return Ok(()) };
        self.schedules.rename_machine(&was, &record.name)?;
        self.networks.rename_machine(&was, &record.name)?;
        self.rename_upload(&was, &record.name)?;
        let all = self.store.list_refs().map_err(refs::store_error("list the names of capsules"))?;
        for (name, id) in &all {
            let Some(new) = renamed(name, &was, &record.name) else { continue };
            let new = new?;
            // One that came after the others were named anew, as from another host.
            if !all.contains_key(&new) {
                let added = self.store.set_ref(&new, id, Expected::Absent);
                added.map_err(refs::store_error("name a capsule"))?;
            }
            match self.store.delete_ref(name, Expected::Capsule(*id)) {
                Ok(()) | Err(StoreError::Unknown { .. }) => {}
                Err(error) => return Err(refs::store_error("remove a name")(error)),
            }
        }
        self.self_starts.forget(&was);
        let mut done = record.clone();
        done.was = None;
        done.save(&self.directories)?;
        *record = done;
        Ok(())
    }
}

/// Refs, and the capsules that they name.
type Added = Vec<(RefName, CapsuleId)>;

/// What the refs of a machine are called after its rename: the newest capsule, epoch snapshots and tags of
/// its guest. Refuses a name that capsules of an earlier machine have.
fn names_of(store: &Store, from: &MachineName, to: &MachineName) -> Result<Added, DaemonError> {
    let all = store.list_refs().map_err(refs::store_error("list the names of capsules"))?;
    if let Some(taken) = all.keys().find(|name| renamed(name, to, from).is_some()) {
        return Err(DaemonError::invalid(format!(
            "an earlier machine {to} has left capsules, like {}: `whimbrel untag` gives them up, or choose \
             another name",
            refs::known_as(taken)
        )));
    }
    let own = all.into_iter().filter_map(|(name, id)| Some((renamed(&name, from, to)?, id)));
    own.map(|(name, id)| Ok((name?, id))).collect()
}

/// What a ref of the machine `from` is called for the machine `to`; none if it is a ref of something else.
fn renamed(name: &RefName, from: &MachineName, to: &MachineName) -> Option<Result<RefName, DaemonError>> {
    if *name == refs::machine_ref(from) {
        return Some(Ok(refs::machine_ref(to)));
    }
    if let Some(time) = history::time_of(name, from) {
        return Some(Ok(history::name(to, time)));
    }
    let tag = refs::guest_tag(name, from)?;
    Some(refs::guest_ref(to, tag))
}

/// Bases in the machine's own folder are where the folder is.
pub(super) fn relocate(record: &mut Record, old: &Path, new: &Path) {
    for base in &mut record.bases {
        if let DiskBase::File { path } = base
            && let Ok(inside) = path.strip_prefix(old)
        {
            *path = new.join(inside);
        }
    }
}

/// Renames a folder unless there is something in its new place.
fn move_to_new(old: &Path, new: &Path) -> std::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    match renameat_with(CWD, old, CWD, new, RenameFlags::NOREPLACE) {
        // A file system without that flag: the name was reserved, so only what is no machine may be there.
        Err(rustix::io::Errno::INVAL) if !new.exists() => fs::rename(old, new),
        moved => Ok(moved?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{core::sample, machine::folder, schedule::Actions};
    use std::sync::Arc;
    use whimbrel_api::{CapsuleRef, ErrorCode};
    use whimbrel_core::{ByteSize, MachineConfig};

    fn name(text: &str) -> MachineName {
        text.parse().unwrap()
    }

    fn to(text: &str) -> RenameRequest {
        RenameRequest { to: name(text) }
    }

    /// A machine `web` that is suspended, with a seed in its folder, a snapshot, a tag of its guest and a
    /// schedule.
    fn suspended(daemon: &Arc<Daemon>) -> CapsuleId {
        let web = name("web");
        let capsule = sample::capsule(&daemon.store, 1, Vec::new(), "machine.web");
        for other in ["kept.web.0000000000007", "guest.web.mine", "mine"] {
            daemon.store.set_ref(&other.parse().unwrap(), &capsule, Expected::Absent).unwrap();
        }
        folder::prepare(&daemon.directories, &web).unwrap();
        let seed = daemon.directories.machine(&web).join("seed.img");
        fs::write(&seed, "seed").unwrap();
        let bases = vec![DiskBase::File { path: "/srv/base.raw".into() }, DiskBase::File { path: seed }];
        let mut record = Record::new(web.clone(), MachineConfig::minimal(ByteSize(1 << 20)), bases);
        (record.phase, record.last) = (Phase::Suspended { capsule }, Some(capsule));
        record.settings.note = "the shop".into();
        record.save(&daemon.directories).unwrap();
        daemon.machines.insert(Machine::new(record, None));
        let schedule = serde_json::json!({"name": "nightly", "every_ms": 86_400_000,
            "work": {"kind": "push", "machine": "web", "host": "beta"}});
        let schedule = serde_json::from_value(schedule).unwrap();
        daemon.schedules.create(schedule, &Actions(daemon.clone())).unwrap();
        capsule
    }

    fn refs_of(daemon: &Daemon) -> Vec<String> {
        let all = daemon.store.list_refs().unwrap();
        let schedules = daemon.schedules.list(&Actions(daemon.me.upgrade().unwrap()));
        let machine = schedules[0].schedule.work.machine().unwrap().to_string();
        all.into_keys().map(|name| name.to_string()).chain([machine]).collect()
    }

    const NEW: [&str; 5] = ["guest.shop.mine", "kept.shop.0000000000007", "machine.shop", "mine", "shop"];
    const OLD: [&str; 5] = ["guest.web.mine", "kept.web.0000000000007", "machine.web", "mine", "web"];

    #[test]
    fn a_renamed_machine_takes_everything_with_it_and_its_capsule_says_so() {
        let (daemon, _folders) = sample::daemon();
        let was = suspended(&daemon);
        let before = daemon.machines.get(&name("web")).unwrap();
        let info = daemon.rename(&name("web"), &to("shop")).unwrap();
        assert_eq!((info.name.as_str(), info.settings.note.as_str()), ("shop", "the shop"));
        assert_eq!(refs_of(&daemon), NEW);
        let (capsule, manifest) = daemon.find(&CapsuleRef::Name("shop".parse().unwrap())).unwrap();
        assert_eq!((refs::machine_of(&manifest).unwrap().as_str(), &manifest.parents), ("shop", &vec![was]));
        let found = folder::load_all(&daemon.directories).unwrap();
        let [record] = &found.records[..] else { panic!("{found:?}") };
        assert_eq!((&record.phase, &record.was), (&Phase::Suspended { capsule }, &None));
        let seed = daemon.directories.machine(&name("shop")).join("seed.img");
        assert_eq!(record.bases[1], DiskBase::File { path: seed.clone() });
        assert_eq!(record.bases[0], DiskBase::File { path: "/srv/base.raw".into() });
        assert_eq!(fs::read_to_string(seed).unwrap(), "seed");
        // A caller that found the machine by its former name before cannot bring that back.
        assert!(matches!(before.try_lock("start", None), Err(DaemonError::NotFound { .. })));
        assert!(daemon.machines.reserve(&name("web"), false).is_ok(), "its former name is free");
    }

    #[test]
    fn a_rename_that_fails_or_is_refused_leaves_the_machine_as_it_was() {
        let (daemon, _folders) = sample::daemon();
        suspended(&daemon);
        let web = name("web");
        let before = fs::read(daemon.directories.machine(&web).join("machine.json")).unwrap();
        // Something that is no machine lies where the folder should go.
        fs::create_dir(daemon.directories.machine(&name("shop"))).unwrap();
        daemon
            .store
            .set_ref(
                &"machine.old".parse().unwrap(),
                &{ daemon.find(&CapsuleRef::Name("mine".parse().unwrap())).unwrap().0 },
                Expected::Absent,
            )
            .unwrap();
        for (new, code) in [
            ("shop", ErrorCode::Internal),
            ("web", ErrorCode::NameTaken),
            ("router", ErrorCode::Invalid),
            ("old", ErrorCode::Invalid),
        ] {
            assert_eq!(daemon.rename(&web, &to(new)).unwrap_err().code(), code, "{new}");
        }
        daemon.store.delete_ref(&"machine.old".parse().unwrap(), Expected::Anything).unwrap();
        assert_eq!(refs_of(&daemon), OLD);
        assert_eq!(fs::read(daemon.directories.machine(&web).join("machine.json")).unwrap(), before);
        daemon.machines.get(&web).unwrap().lock("test").record.phase = Phase::Here;
        let running = daemon.rename(&web, &to("other")).unwrap_err().to_api();
        assert!(running.hint.unwrap().contains("whimbrel suspend web"));
    }

    #[test]
    fn a_rename_that_a_crash_interrupts_is_finished_or_has_never_been() {
        let (daemon, _folders) = sample::daemon();
        let capsule = suspended(&daemon);
        let (web, shop) = (name("web"), name("shop"));
        let before = daemon.machines.get(&web).unwrap().lock("test").record.clone();
        let (after, _) = daemon.name_capsules(&before, &shop).unwrap();
        after.save_in(&daemon.directories.machine(&web)).unwrap();
        let found = folder::load_all(&daemon.directories).unwrap();
        assert!(
            found.unreadable.is_empty() && folder::check(&daemon.directories.machine(&web), "web").is_ok()
        );
        assert_eq!((&found.records[0].name, &found.records[0].bases), (&web, &before.bases));

        daemon.move_folder(&before, &after).unwrap();
        daemon.machines.remove(&web);
        let found = folder::load_all(&daemon.directories).unwrap();
        daemon.machines.insert(Machine::new(found.records[0].clone(), None));
        // A snapshot that came after the others were named anew.
        let set = |name: &str| daemon.store.set_ref(&name.parse().unwrap(), &capsule, Expected::Absent);
        set("kept.web.0000000000009").unwrap();
        daemon.finish_renames();
        let late = "kept.shop.0000000000009".parse().unwrap();
        daemon.store.delete_ref(&late, Expected::Capsule(capsule)).expect("it is not lost");
        assert_eq!(refs_of(&daemon), NEW);
        let found = folder::load_all(&daemon.directories).unwrap();
        assert_eq!((&found.records[0].name, &found.records[0].was), (&shop, &None));
    }
}
