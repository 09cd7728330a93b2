//! Examples in the OpenAPI document: one for each body of a request and each object of a reply.
//!
//! They are JSON (`examples.json`), and a test reads each as the type that it is an example of.

use serde_json::Value;
use std::collections::BTreeMap;
use utoipa::openapi::{RefOr, Schema};

/// Examples by the name of their schema.
pub(crate) fn examples() -> BTreeMap<String, Value> {
    serde_json::from_str(include_str!("examples.json")).expect("examples.json is a map; a test reads it")
}

/// Adds each example to its schema.
pub(crate) fn add_to(schemas: &mut BTreeMap<String, RefOr<Schema>>) {
    for (name, example) in examples() {
        let Some(RefOr::T(schema)) = schemas.get_mut(&name) else { continue };
        match schema {
            Schema::Object(object) => object.examples = vec![example],
            Schema::OneOf(one) => one.examples = vec![example],
            Schema::AllOf(all) => all.examples = vec![example],
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::*;
    use serde::de::DeserializeOwned;
    use std::collections::BTreeSet;

    fn read<T: DeserializeOwned>(name: &str) -> String {
        let example = examples().remove(name).unwrap_or_else(|| panic!("no example of {name}"));
        let read = serde_json::from_value::<T>(example);
        if let Err(error) = read {
            panic!("the example of {name}: {error}");
        }
        name.to_owned()
    }

    macro_rules! read_all {
        ($($name:ident)*) => { BTreeSet::from([$(read::<$name>(stringify!($name))),*]) };
    }

    #[test]
    fn every_example_is_one_of_its_type() {
        let tried = read_all! {
            ApiError BalloonRequest BucketRequest CacheAddRequest CacheInfo CallerInfo CapsuleDiff CapsuleInfo CapsuleRef
            CheckpointRequest CloneRequest CpuBaseline CpuBaselineRequest DeriveRequest DirtyTraceRequest EvacuateRequest ExecRequest ExecResult ExportRequest
            FailoverRequest FileContent FileReadRequest FileWriteRequest GoldenMatch GraphNode HostEvent HostInfo HostMachines ImageOffers ImagePullRequest ImportRequest
            KeyChangeRequest MachineInfo MachineUsage MatchRequest MigrateRequest MigrationRecord NetworkHostsRequest NetworkInfo NetworkRequest
            NewToken Operation OutdatedReport PoolInfo PortsRequest PreviousCapsule PromoteReport PromoteRequest
            ProtectRequest PublishedPort PullRequest PushRequest RefRights RefVersion RemoteCapsule
            RenameRequest RepairRequest ResolveRequest ResumeRequest RewindRequest RunRequest ScheduleInfo ScheduleReport
            ScheduleRequest ScheduleRunRequest SessionInfo SettingsRequest StopRequest StoreEncryption SuspendRequest
            TagRequest Tagged TokenInfo TokenRequest TrustEntry
        };
        assert_eq!(tried, examples().into_keys().collect());
    }
}
