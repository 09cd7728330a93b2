//! A running machine: its QEMU process and everything attached to it. The library knows no daemon: who runs a
//! machine gives it values ([`MachineSetup`]) and a reservation of its memory.
//!
//! # Passing a machine to another process
//!
//! The old process offers copies of the machine's descriptors while the guest runs, and the new one prepares
//! all that it can. Then the old one stops the guest and sends the state that no descriptor has; the new one
//! says that it could go on, gets the machine, and continues the guest. [`swap`] is the decision who has the
//! machine, pure and for every death and every message that does not arrive; [`give`] and [`take`] do what it
//! says; [`offer_for_later`] makes the offer only, for a process that is to go on if this one is killed, or
//! to get the machine later by [`give_offered`]. [`channel`] carries packets and descriptors between two
//! processes of one user. [`machine_process`] has a machine that is at rest, or while no daemon runs.
//!
//! Invariants: at every instant at most one process acts on the guest, its memory, its disks and its
//! control connection. One that lives can always have it. A dirty page is known to whoever has the machine,
//! or every page counts as dirty.

pub mod channel;
mod exchange;
mod filled_pages;
pub mod machine_process;
mod message;
mod passable_port;
pub mod process_report;
mod running;
pub mod swap;

pub use exchange::{
    FindPlace, Given, PassError, Step, SwapLimits, Taken, give, give_offered, offer_for_later, take,
};
pub use running::{
    AgentCommands, AgentError, ArrivalKind, BalloonGoal, CapsuleCapture, CapsuleImages, CaptureBreaks,
    CapturedArrays, ConnectTunnel, DiskBase, DiskTraffic, Failpoint, GuestAgent, GuestRequests,
    LaunchOptions, MachineDescription, MachineDirs, MachinePlace, MachineSetup, Medium, NetworkPort, Overlay,
    PagerView, PausableMachine, PortTarget, PrestartedQemu, ProcessRecord, QemuDirs, RamFile, RequestSlot,
    Reservation, Reservations, RunningDisk, RunningError, RunningMachine, RunningMemory, RuntimeMark,
    StoppedDisk, StoreKey, TPM_DISK, Template, TemplateKey, Templates, Traffic, TrafficView, Tunnel,
    TunnelView, is_partial, remove_overlays, runtime_dir,
};
