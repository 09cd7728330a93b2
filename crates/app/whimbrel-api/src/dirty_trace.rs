//! Sampling the writable working set of a machine.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of `POST /v1/machines/{name}/wws`: sample what a machine dirties.
///
/// The answer is a trace that grows until the time is over, the caller hangs up, or the machine is no longer
/// here.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DirtyTraceRequest {
    /// Time between two looks at the dirty set, 10 to 10,000; 50 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample_ms: Option<u64>,
    /// How long; 8 seconds if absent, a day at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
}
