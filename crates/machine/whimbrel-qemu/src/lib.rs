//! Driver of an unmodified QEMU: finds it, starts it, controls it by QMP, saves and loads its device state.
//!
//! The only crate that knows QEMU. Blocking calls and threads, no async: every wait is bounded, and the end
//! of a QEMU ends every wait for it. Debian 12's QEMU 7.2 is the oldest supported; QMP answers are parsed
//! leniently (strings, not closed enums), so that newer ones work too.
//!
//! Usual sequence: [`probe()`] once, [`Qemu::launch`] a [`LaunchSpec`], then the calls of
//! [`whimbrel_machine::Machine`]. A QEMU survives this process; [`Qemu::adopt`] controls it again. This crate
//! does not read guest memory: the engines map the RAM file of the specification.

mod confinement;
mod console;
mod control_group;
mod cpu_features;
mod file_access;
mod firmware;
mod guest_agent;
mod image;
mod launch;
mod machine;
mod machine_user;
mod probe;
mod process;
mod qmp;
mod reaper;
mod state;
mod tpm;

pub use console::{Console, ConsoleState, Ended, HeldOutputState, Subscription};
pub use control_group::{ControlGroup, GroupLimits, missing_limits};
pub use cpu_features::{common_cpu_features, cpu_model_of};
pub use file_access::restricts_files;
pub use firmware::{NoFirmware, UefiFiles, uefi_files};
pub use guest_agent::{
    AgentAnswer, AnswerDecoder, ExecStatus, FileChunk, GuestInterface, QEMU_GA_PORT, QemuGa, QemuGaError,
    QemuGaSession, request, sync_request,
};
pub use image::{Conversion, ImageError, ImageFormat, NewFileSystem, UnpackedTree, decompressed};
pub use launch::{
    LaunchError, LaunchSpec, MAX_DISKS, MAX_NICS, MAX_SATA, RamBacking, Sharing, SpecError, TapDevices,
    Vmgenid, display_in, guest_disks, sata_disks,
};
pub use machine::{BalloonStats, HotplugError, Qemu, QemuDescriptors, QemuState, Status, VmIdentity};
pub use machine_user::MachineUser;
pub use probe::{
    Finding, KvmProbe, ProbeError, QemuBinary, Version, best_accel, choose_accel, find, findings, probe,
    probe_kvm,
};
pub use process::{HugePages, ProcessError, ProcessIdentity, QemuProcess, last_output};
pub use qmp::{MachineEvent, Qmp, QmpError, QmpState, ShutdownCause};
pub use state::{DeviceState, MAX_STATE, RamBlock, StateError, StreamError, StreamHeader, compose};
pub use tpm::{TPM_STATE, Tpm, TpmError};
