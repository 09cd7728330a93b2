//! Types of the HTTP API of a host, its paths, and the OpenAPI document generated from both.
//!
//! The daemon and its clients share this crate: each path is defined once, in [`routes`], and each body once,
//! as a Rust type. There is no I/O here. Rules for all calls:
//!
//! - sizes are bytes, times are milliseconds since 1970 (UTC), durations are milliseconds;
//! - a request with an unknown field is refused, so that a mistyped name is an error; a reply with an unknown
//!   field is read, so that an old client can talk to a new daemon;
//! - long work is answered at once with an [`Operation`], which continues in the daemon;
//! - every failure is an [`ApiError`] with a stable [`ErrorCode`].

mod capsule;
mod dirty_trace;
mod encryption;
mod error;
mod evacuate;
mod event;
mod golden;
mod guest;
mod host;
mod image;
mod lineage;
mod machine;
mod migration;
mod network;
mod new_machine;
mod openapi;
mod openapi_errors;
mod openapi_examples;
mod openapi_names;
mod operation;
mod pool;
mod protect;
pub mod routes;
mod schedule;
mod session;
mod settings;
mod token;
mod transfer;
mod usage;

pub use capsule::{
    CapsuleDiff, CapsuleInfo, CapsuleRef, CapsuleRefError, ConfigChange, ExportFormat, ExportRequest,
    ImageDiff, ImageInfo, ImportFormat, ImportRequest, PointInTime, TagRequest,
};
pub use dirty_trace::DirtyTraceRequest;
pub use encryption::{KeyChangeRequest, StoreEncryption};
pub use error::{ApiError, ErrorCode};
pub use evacuate::{EvacuateReport, EvacuateRequest, EvacuatedMachine, MoveOutcome};
pub use event::{EventKind, HostEvent};
pub use golden::{Attributes, GoldenMatch, MatchRequest, Terms, TermsError};
pub use guest::{
    ExecRequest, ExecResult, FileContent, FileReadRequest, FileWriteRequest, MirroredWrites, SelfService,
    ThrottleReport,
};
pub use host::{
    CpuBaseline, CpuBaselineRequest, CpuHost, HostInfo, HostMachines, HostMemory, StoreUsage, TrustEntry,
};
pub use image::{
    CHECKSUM_LABEL, IMAGE_LABEL, ImageName, ImageOffer, ImageOffers, ImagePullRequest, PROGRAM_LABEL,
    USER_LABEL,
};
pub use lineage::{
    DeriveRequest, DiskRebase, GraphNode, MachineOnCapsule, OutdatedChild, OutdatedReport, PreviousCapsule,
    PromoteReport, PromoteRequest, RefRights, RefVersion, Tagged,
};
pub use machine::{
    BalloonRequest, BalloonTarget, CheckpointRequest, CloneNetwork, CloneRequest, DiskInfo, HandoverDecision,
    MachineInfo, MachineProcess, MachineState, MigrateMode, MigrateRequest, MoveNetwork, NicInfo,
    ResolveRequest, ResumeMode, ResumeRequest, RewindRequest, RunRequest, StopMode, StopRequest,
    SuspendRequest, TunnelInfo,
};
pub use migration::{DowntimeInfo, MigrationEnd, MigrationId, MigrationRecord, RoundsEnd};
pub use network::{
    HostPort, NetworkAddress, NetworkHost, NetworkHostsRequest, NetworkInfo, NetworkRequest, PortProtocol,
    PortRequest, PortsRequest, PublishedPort,
};
pub use new_machine::{BootOrder, CloudInit, DiskSource, NicRequest, Profile, StaticAddress};
pub use openapi::{documented_calls, openapi, openapi_json, success_status};
pub use operation::{
    CaptureReport, Damage, NetworkHandover, Operation, OperationId, OperationKind, OperationResult,
    OperationState, PostcopyInfo, Progress, RepairedCapsule, RoundInfo, Unit,
};
pub use pool::{PoolBenefactor, PoolInfo, PoolScrub, PoolState};
pub use protect::{
    EpochPauseParts, FailoverRequest, ProtectBlock, ProtectFigures, ProtectMode, ProtectRequest, ProtectRole,
    ProtectState, ProtectionInfo, SnapshotRule, TakeoverInfo,
};
pub use schedule::{
    Retention, ScheduleInfo, ScheduleReport, ScheduleRequest, ScheduleRunRequest, ScheduledRun, ScheduledWork,
};
pub use session::SessionInfo;
pub use settings::{
    Autostart, DiskSize, HardwareChange, MachineSettings, RESTARTS_MAX, RenameRequest, RestartInfo,
    RestartPolicy, RestartRule, SettingsRequest,
};
pub use token::{CallerInfo, NewToken, Role, RoleError, TokenInfo, TokenRequest};
pub use transfer::{
    BucketCapsule, BucketRequest, CacheAddRequest, CacheInfo, CacheSource, PullRequest, PushRequest,
    RemoteCapsule, RepairRequest, TransferReport, Uploads, is_bucket,
};
pub use usage::MachineUsage;
