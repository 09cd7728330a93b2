//! Usage: processor time, memory and traffic of machines.

use crate::openapi_names::Name;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use whimbrel_core::{ByteSize, MachineName};

/// Totals of a machine that has processes, since they were started. Two readings give its rates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineUsage {
    /// Name of the machine on this host.
    #[schema(value_type = Name)]
    pub name: MachineName,
    /// Time of the reading.
    pub at_ms: u64,
    /// Processor time of its QEMU and of the process that serves it.
    pub cpu_ms: u64,
    /// Memory of these processes on the host.
    #[schema(value_type = u64)]
    pub resident: ByteSize,
    /// Bytes that the guest received from its networks.
    pub received: u64,
    /// Bytes that the guest sent to its networks.
    pub sent: u64,
    /// Bytes that the guest read from its disks.
    pub read: u64,
    /// Bytes that the guest wrote to its disks.
    pub written: u64,
}
