//! Dirty traces: the request to sample the dirty pages of a machine.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of `POST /v1/machines/{name}/wws`: sample the dirty pages of a machine.
///
/// The answer is a dirty trace that grows until the time has passed, the caller disconnects, or the machine
/// has left the host.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DirtyTraceRequest {
    /// Milliseconds between two samples, 10 to 10,000 [default: 50].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample_ms: Option<u64>,
    /// Milliseconds to sample, at most a day [default: 8000].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
}
