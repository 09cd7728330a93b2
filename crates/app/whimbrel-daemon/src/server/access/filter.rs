//! Lists without what their reader may not see.

use crate::{
    daemon::Daemon,
    server::access::{gate::Asker, may::Object},
};
use std::collections::HashMap;
use whimbrel_api::{
    CapsuleInfo, EventKind, GraphNode, HostEvent, MachineInfo, MachineUsage, MigrationRecord, NetworkInfo,
    Operation, ScheduleInfo,
};
use whimbrel_core::{CapsuleId, RefName};

impl Asker {
    fn sees(&self, object: Object<'_>) -> bool {
        self.silently(object).is_ok()
    }

    pub(crate) fn machines(&self, mut all: Vec<MachineInfo>) -> Vec<MachineInfo> {
        all.retain(|machine| self.sees(Object::Machine(&machine.name)));
        all
    }

    pub(crate) fn usage(&self, mut all: Vec<MachineUsage>) -> Vec<MachineUsage> {
        all.retain(|usage| self.sees(Object::Machine(&usage.name)));
        all
    }

    pub(crate) fn migrations(&self, mut all: Vec<MigrationRecord>) -> Vec<MigrationRecord> {
        all.retain(|record| self.sees(Object::Machine(&record.machine)));
        all
    }

    pub(crate) fn network(&self, mut network: NetworkInfo) -> NetworkInfo {
        network.machines.retain(|one| self.sees(Object::Machine(&one.machine)));
        network.ports.retain(|one| self.sees(Object::Machine(&one.machine)));
        for host in &mut network.hosts {
            host.machines.retain(|one| self.sees(Object::Machine(&one.machine)));
        }
        network
    }

    pub(crate) fn operations(&self, host: &Daemon, mut all: Vec<Operation>) -> Vec<Operation> {
        let quiet = self.quiet();
        all.retain(|operation| quiet.judge_operation(host, operation).is_ok());
        all
    }

    pub(crate) fn schedules(&self, mut all: Vec<ScheduleInfo>) -> Vec<ScheduleInfo> {
        all.retain(|one| self.sees(one.schedule.work.machine().map_or(Object::Everything, Object::Machine)));
        all
    }

    pub(crate) fn events(&self, host: &Daemon, mut all: Vec<HostEvent>) -> Vec<HostEvent> {
        let quiet = self.quiet();
        all.retain(|event| match event.kind {
            EventKind::Missed => true,
            EventKind::Schedule => {
                let name = event.subject.parse().ok();
                let machine = name.and_then(|name| host.schedules.machine_of(&name)).flatten();
                self.sees(machine.as_ref().map_or(Object::Everything, Object::Machine))
            }
            EventKind::OperationStarted { operation } | EventKind::OperationEnded { operation } => {
                quiet.judge_work(host, operation, &event.subject).is_ok()
            }
            _ => match event.machine() {
                Some(machine) => self.sees(Object::Machine(&machine)),
                None => self.sees(Object::Everything),
            },
        });
        all
    }

    pub(crate) fn capsules(&self, host: &Daemon, mut all: Vec<CapsuleInfo>) -> Vec<CapsuleInfo> {
        let refs = self.refs(host);
        all.retain(|capsule| self.sees_capsule(&refs, capsule));
        all
    }

    pub(crate) fn graph(&self, host: &Daemon, mut all: Vec<GraphNode>) -> Vec<GraphNode> {
        let refs = self.refs(host);
        all.retain(|node| self.sees_capsule(&refs, &node.capsule));
        all.iter_mut().for_each(|node| node.machines.retain(|one| self.sees(Object::Machine(&one.name))));
        all
    }

    fn sees_capsule(&self, refs: &HashMap<CapsuleId, Vec<RefName>>, capsule: &CapsuleInfo) -> bool {
        let refs = refs.get(&capsule.id).map_or(&[][..], Vec::as_slice);
        self.sees(Object::Capsule { refs, machine: Some(&capsule.machine) })
    }

    /// The refs of each capsule, as the store calls them; unused without a scope.
    fn refs(&self, host: &Daemon) -> HashMap<CapsuleId, Vec<RefName>> {
        let mut of = HashMap::<_, Vec<_>>::new();
        if !self.identity.scope.is_all() {
            for (name, id) in host.store.readable_refs().unwrap_or_default().0 {
                of.entry(id).or_default().push(name);
            }
        }
        of
    }
}
