//! The schedules of a host: their table, and one run of each.

use crate::{
    actions::ScheduledActions,
    copies,
    error::ScheduleError,
    plan,
    record::{ScheduleRecord, path_of, tag, time_in},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Mutex, MutexGuard},
};
use whimbrel_api::{
    MachineInfo, Retention, ScheduleInfo, ScheduleReport, ScheduleRequest, ScheduledRun, ScheduledWork,
};
use whimbrel_core::{
    CapsuleId, HostName, MachineName, RefName, error_chain, lock,
    loss::{Loss, is_back},
};
use whimbrel_wire::atomic_file;

/// The schedules of this host.
#[derive(Debug)]
pub struct Schedules {
    folder: PathBuf,
    table: Mutex<BTreeMap<MachineName, ScheduleRecord>>,
    running: Mutex<BTreeSet<MachineName>>,
}

/// Tags of a schedule, with what its rule says of them.
struct Judged {
    retained: Vec<RefName>,
    removed: Vec<(RefName, CapsuleId)>,
}

/// What a run has done, with the tags that stay and those that went.
type Done = (String, (Vec<RefName>, Vec<RefName>));

/// The only run of a schedule, until dropped.
struct Turn<'a>(&'a Schedules, MachineName);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.0.running).remove(&self.1);
    }
}

impl Schedules {
    /// Reads the records of a folder, which is made if it is missing. A run that was under way has failed at
    /// `now_ms`, in milliseconds since 1970.
    ///
    /// # Errors
    /// If the folder cannot be made, made durable, or read.
    pub fn open(folder: PathBuf, now_ms: u64) -> Result<Self, ScheduleError> {
        std::fs::create_dir_all(&folder).map_err(ScheduleError::io("create", &folder))?;
        if let Some(above) = folder.parent().filter(|_| !is_back(Loss::ScheduleFolderNotSynced)) {
            atomic_file::sync_dir(above).map_err(ScheduleError::io("sync", above))?;
        }
        atomic_file::make_durable(&folder).map_err(ScheduleError::io("sync", &folder))?;
        let mut table = BTreeMap::new();
        for entry in std::fs::read_dir(&folder).map_err(ScheduleError::io("read", &folder))? {
            let path = entry.map_err(ScheduleError::io("read", &folder))?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            match ScheduleRecord::load(&path, now_ms) {
                Ok(record) => drop(table.insert(record.schedule.name.clone(), record)),
                Err(reason) => {
                    tracing::error!(path = %path.display(), reason, "the record of a schedule cannot be read; it stays as it is, and the schedule does not run");
                }
            }
        }
        Ok(Self { folder, table: Mutex::new(table), running: Mutex::default() })
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<MachineName, ScheduleRecord>> {
        lock(&self.table)
    }

    fn record(&self, name: &MachineName) -> Result<ScheduleRecord, ScheduleError> {
        let found = self.table().get(name).cloned();
        found.ok_or_else(|| ScheduleError::Unknown { name: name.clone() })
    }

    /// What a schedule is about, if there is one of that name: a machine, or else the whole store.
    pub fn machine_of(&self, name: &MachineName) -> Option<Option<MachineName>> {
        self.table().get(name).map(|record| record.schedule.work.machine().cloned())
    }

    /// Schedules for a machine go on under its new name.
    ///
    /// # Errors
    /// If a record cannot be written; those before it have the new name.
    pub fn rename_machine(&self, from: &MachineName, to: &MachineName) -> Result<(), ScheduleError> {
        let mut table = self.table();
        for record in table.values_mut().filter(|record| record.schedule.work.machine() == Some(from)) {
            let mut renamed = record.clone();
            renamed.schedule.work.machine_mut().into_iter().for_each(|machine| *machine = to.clone());
            renamed.save(&self.folder)?;
            *record = renamed;
        }
        Ok(())
    }

    /// Makes a schedule, which runs for the first time when its rhythm says so next.
    ///
    /// # Errors
    /// If the request is invalid, the name taken, or the record cannot be written.
    pub fn create(
        &self,
        request: ScheduleRequest,
        actions: &dyn ScheduledActions,
    ) -> Result<ScheduleInfo, ScheduleError> {
        let record = ScheduleRecord::new(request, actions.now_ms())?;
        let name = record.schedule.name.clone();
        {
            let mut table = self.table();
            if table.contains_key(&name) || path_of(&self.folder, &name).exists() {
                return Err(ScheduleError::invalid(format!("there is a schedule {name} already")));
            }
            if let Err(error) = record.save(&self.folder) {
                // The file may be there, and not durable: the user is told that there is no such schedule.
                let _ = std::fs::remove_file(path_of(&self.folder, &name));
                return Err(error);
            }
            table.insert(name.clone(), record);
        }
        self.show(&name, actions)
    }

    /// Removes a schedule. Its capsules and their tags stay.
    ///
    /// # Errors
    /// If there is none, or its record cannot be removed for good.
    pub fn delete(&self, name: &MachineName) -> Result<(), ScheduleError> {
        let mut table = self.table();
        if !table.contains_key(name) {
            return Err(ScheduleError::Unknown { name: name.clone() });
        }
        let path = path_of(&self.folder, name);
        std::fs::remove_file(&path).map_err(ScheduleError::io("remove", &path))?;
        table.remove(name);
        atomic_file::sync_dir(&self.folder).map_err(ScheduleError::io("sync", &self.folder))
    }

    /// All schedules, with what they have done.
    pub fn list(&self, actions: &dyn ScheduledActions) -> Vec<ScheduleInfo> {
        let (refs, now) = (actions.readable_refs(), actions.now_ms());
        let records: Vec<_> = self.table().values().cloned().collect();
        records.iter().map(|record| self.info(record, &refs, (now, &actions.host()))).collect()
    }

    /// What each schedule does.
    pub fn works(&self) -> Vec<ScheduledWork> {
        self.table().values().map(|record| record.schedule.work.clone()).collect()
    }

    /// One schedule, with what it has done.
    ///
    /// # Errors
    /// If there is none.
    pub fn show(
        &self,
        name: &MachineName,
        actions: &dyn ScheduledActions,
    ) -> Result<ScheduleInfo, ScheduleError> {
        let now = (actions.now_ms(), &actions.host());
        Ok(self.info(&self.record(name)?, &actions.readable_refs(), now))
    }

    fn info(
        &self,
        record: &ScheduleRecord,
        refs: &BTreeMap<RefName, CapsuleId>,
        (now, host): (u64, &HostName),
    ) -> ScheduleInfo {
        let tags = match rule_of_copies(record) {
            Some(rule) => record.copy_tags(host, record.copies.judge(rule, now).0),
            None => own_tags(record, refs).into_iter().map(|(_, tag, _)| tag).collect(),
        };
        ScheduleInfo {
            schedule: record.schedule.clone(),
            created_ms: record.created_ms,
            next_ms: record.rhythm().next(record.last_ms, now),
            running: lock(&self.running).contains(&record.schedule.name),
            runs: record.runs.clone(),
            tags: tags.iter().map(ToString::to_string).collect(),
        }
    }

    /// Adds failures of the last runs to the information about machines.
    pub fn add_to(&self, machines: &mut [MachineInfo]) {
        let table = self.table();
        for record in table.values() {
            let (Some(of), Some(run)) = (record.schedule.work.machine(), record.failure()) else { continue };
            for machine in machines.iter_mut().filter(|machine| machine.name == *of) {
                machine.failed_care.push(format!("{}: {}", record.schedule.name, run.text));
            }
        }
    }

    /// Each schedule, whether its last run failed, and when its last success began.
    pub fn health(&self) -> Vec<(MachineName, bool, Option<u64>)> {
        let table = self.table();
        let success = |record: &ScheduleRecord| {
            record.runs.iter().rev().find(|run| run.succeeded).map(|run| run.started_ms)
        };
        let rows = table.values().map(|it| (it.schedule.name.clone(), it.failure().is_some(), success(it)));
        rows.collect()
    }

    /// Schedules that are due at `now`, in milliseconds since 1970, and do not run.
    pub fn due(&self, now: u64) -> Vec<MachineName> {
        let running = lock(&self.running).clone();
        let table = self.table();
        let due = table.values().filter(|record| record.rhythm().is_due(record.last_ms, now));
        due.map(|record| record.schedule.name.clone()).filter(|name| !running.contains(name)).collect()
    }

    /// Says which tags the rule of a schedule would remove now.
    ///
    /// # Errors
    /// If there is no such schedule, or a ref is damaged.
    pub fn dry_run(
        &self,
        name: &MachineName,
        actions: &dyn ScheduledActions,
    ) -> Result<ScheduleReport, ScheduleError> {
        let record = self.record(name)?;
        if let Some(rule) = rule_of_copies(&record) {
            let (stay, go) = record.copies.judge(rule, actions.now_ms());
            let tags = |numbers| record.copy_tags(&actions.host(), numbers);
            return Ok(report(None, tags(stay), tags(go)));
        }
        let judged = judge(&record, &actions.refs()?, (actions.now_ms(), None));
        Ok(report(None, judged.retained, judged.removed.into_iter().map(|(tag, _)| tag).collect()))
    }

    /// Runs a schedule, whether it is due or not, and waits for the end. A run that fails is a report too.
    ///
    /// # Errors
    /// If there is none, it runs already, or its record cannot be written: then what was done is not known to
    /// the next run, and nothing that it needs is gone.
    pub fn run(
        &self,
        name: &MachineName,
        actions: &dyn ScheduledActions,
    ) -> Result<ScheduleReport, ScheduleError> {
        if !lock(&self.running).insert(name.clone()) {
            return Err(ScheduleError::invalid(format!("the schedule {name} runs now")));
        }
        let _turn = Turn(self, name.clone());
        let mut record = self.record(name)?;
        let started_ms = actions.now_ms();
        record.begin(started_ms);
        self.replace(&record)?;
        let done = match rule_of_copies(&record).copied() {
            Some(rule) => copy(&mut record, &rule, started_ms, actions),
            None => self.perform(&record, started_ms, actions),
        };
        let (succeeded, text, retained, removed) = match done {
            Ok((text, (retained, removed))) => (true, with_count(text, removed.len()), retained, removed),
            Err(error) => (false, error_chain(&error), Vec::new(), Vec::new()),
        };
        let run = ScheduledRun { started_ms, ended_ms: actions.now_ms(), succeeded, text };
        let outcome = if succeeded { "succeeded" } else { "failed" };
        let told = format!("{outcome}: {}", run.text);
        record.end(run.clone());
        self.replace(&record)?;
        actions.report_end(name, &told);
        Ok(report(Some(run), retained, removed))
    }

    /// Does the work, then removes old tags. Nothing is removed after a failure: what there is may be all
    /// that is left.
    fn perform(
        &self,
        record: &ScheduleRecord,
        started_ms: u64,
        actions: &dyn ScheduledActions,
    ) -> Result<Done, ScheduleError> {
        let tag = tag(&record.schedule.name, started_ms);
        let text = actions.perform(&record.schedule.work, &tag, None)?;
        Ok((text, self.retain(record, &tag, actions)?))
    }

    /// Saves a record, unless the schedule was deleted meanwhile.
    fn replace(&self, record: &ScheduleRecord) -> Result<(), ScheduleError> {
        let mut table = self.table();
        if let Some(known) = table.get_mut(&record.schedule.name)
            && known.created_ms == record.created_ms
        {
            // The machine may have been renamed meanwhile.
            let mut record = record.clone();
            record.schedule = known.schedule.clone();
            record.save(&self.folder)?;
            *known = record;
        }
        Ok(())
    }

    /// Removes the tags that the rule does not retain. The capsule of this run stays in any case but that of
    /// a rule that may empty the lineage.
    fn retain(
        &self,
        record: &ScheduleRecord,
        newest: &RefName,
        actions: &dyn ScheduledActions,
    ) -> Result<(Vec<RefName>, Vec<RefName>), ScheduleError> {
        let Judged { retained, removed } = judge(record, &actions.refs()?, (actions.now_ms(), Some(newest)));
        for (tag, capsule) in &removed {
            actions.remove(tag, *capsule)?;
        }
        Ok((retained, removed.into_iter().map(|(tag, _)| tag).collect()))
    }
}

/// The rule of a push to a host, if it has one.
fn rule_of_copies(record: &ScheduleRecord) -> Option<&Retention> {
    match &record.schedule.work {
        ScheduledWork::Push { retain, .. } => retain.as_ref(),
        _ => None,
    }
}

/// Copies the newest capsule under the tag of a copy that the rule no longer retains.
fn copy(
    record: &mut ScheduleRecord,
    rule: &Retention,
    started_ms: u64,
    actions: &dyn ScheduledActions,
) -> Result<Done, ScheduleError> {
    let machine =
        record.schedule.work.machine().ok_or_else(|| ScheduleError::invalid("no machine to push"))?;
    let (host, capsule) = (actions.host(), actions.newest(machine)?);
    let number = record.copies.number_for(capsule, started_ms, rule);
    let tag = copies::tag(&host, record.schedule.name.as_str(), record.created_ms, number);
    let text = actions.perform(&record.schedule.work, &tag, Some(capsule))?;
    record.copies.put(number, capsule, started_ms, rule);
    let retained = record.copy_tags(&host, record.copies.judge(rule, started_ms).0);
    Ok((text, (retained, Vec::new())))
}

fn with_count(text: String, removed: usize) -> String {
    match removed {
        0 => text,
        1 => format!("{text}; 1 old tag removed"),
        _ => format!("{text}; {removed} old tags removed"),
    }
}

fn report(run: Option<ScheduledRun>, retained: Vec<RefName>, removed: Vec<RefName>) -> ScheduleReport {
    let texts = |tags: Vec<RefName>| tags.iter().map(ToString::to_string).collect();
    ScheduleReport { run, retained: texts(retained), removed: texts(removed) }
}

/// Tags that a schedule has made, oldest first. Those of an earlier schedule of that name are not its own.
fn own_tags(record: &ScheduleRecord, refs: &BTreeMap<RefName, CapsuleId>) -> Vec<(u64, RefName, CapsuleId)> {
    let own = refs.iter().filter_map(|(tag, capsule)| {
        let time = time_in(tag, &record.schedule.name).filter(|time| *time >= record.created_ms)?;
        Some((time, tag.clone(), *capsule))
    });
    own.collect()
}

fn judge(
    record: &ScheduleRecord,
    refs: &BTreeMap<RefName, CapsuleId>,
    (now, newest): (u64, Option<&RefName>),
) -> Judged {
    let tags = own_tags(record, refs);
    let rule = match &record.schedule.work {
        ScheduledWork::Checkpoint { retain: Some(rule), .. } => *rule,
        _ => return Judged { retained: tags.into_iter().map(|(_, tag, _)| tag).collect(), removed: vec![] },
    };
    let Retention { may_empty, .. } = rule;
    let times: Vec<u64> = tags.iter().map(|(time, ..)| *time).collect();
    let retained = plan::retained(&times, &rule, now);
    // After a clock was put back, the capsule of this run may look old.
    let is_new = |tag: &RefName| newest == Some(tag) && !may_empty && !is_back(Loss::NewCopyLooksOld);
    let stays = |(time, tag, _): &(u64, RefName, CapsuleId)| retained.contains(time) || is_new(tag);
    let (stay, go): (Vec<_>, Vec<_>) = tags.into_iter().partition(stays);
    Judged {
        retained: stay.into_iter().map(|(_, tag, _)| tag).collect(),
        removed: go.into_iter().map(|(_, tag, capsule)| (tag, capsule)).collect(),
    }
}
