//! Test guests: their files, and the client of the test agent inside them.

mod artifact_cache;
mod boot_files;
mod container;
mod debian;
mod debian_root;
mod disk_boot;
mod error;
pub mod image;
mod kernel;
mod kvm_guest;
mod micro_guest;
mod options;
mod own_guest;
mod package;
mod qemu_ga;
mod signed_medium;
mod test_agent;

pub use boot_files::GuestFiles;
pub use container::ContainerKernel;
pub use debian::DebianGuest;
pub use debian_root::debian_root;
pub use disk_boot::PublishedImage;
pub use error::GuestError;
pub use kvm_guest::{KvmCounts, KvmGuest, kvm_model};
pub use micro_guest::{BOOTED, MicroGuest};
pub use options::{GuestOptions, Work};
pub use own_guest::{OwnGuest, Tick, Ticks};
pub use signed_medium::signed_medium;
pub use test_agent::{
    CheckResult, GuestMemory, Identity, TestAgent, TestAgentError, TpmContent, assert_same_life,
};
pub use whimbrel_container::Archive;
